"""The decoded copy of a folder is that folder's, and no older than it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from protoseam.data.loading import load
from protoseam.data.trees import FolderTree
from protoseam.data.verification import verify


def _one_folder(parent: Path, shade: int) -> Path:
    """Two classes of two images; name, sizes and times do not depend on the shade."""
    folder = parent / "pictures"
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for i in range(5):
            pixels = np.full((4, 4, 3), shade, dtype=np.uint8)
            pixels[0, 0] = i
            Image.fromarray(pixels).save(folder / label / f"{i}.bmp")
            os.utime(folder / label / f"{i}.bmp", ns=(10**18, 10**18))
    return folder


def test_a_decoded_copy_belongs_to_one_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, other = (_one_folder(tmp_path / name, shade) for name, shade in (("one", 50), ("other", 200)))
    assert load(str(one), root).train_images.max() == 50
    assert load(str(other), root).train_images.max() == 200
    assert load(str(one), root).train_images.max() == 50


def test_a_changed_image_is_noticed_whatever_its_time(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", _one_folder(tmp_path, 50)
    load(str(folder), root)
    for file in sorted(folder.rglob("*.bmp")):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))
        os.utime(file, ns=(10**18, 10**18))
    assert load(str(folder), root).train_images.max() == 205


def test_a_stamp_looks_into_files_as_well_as_at_their_times(tmp_path: Path) -> None:
    one, other = (_one_folder(tmp_path / name, shade) for name, shade in (("one", 50), ("other", 200)))
    marks = [[mark.split()[0::2] for _, _, mark in FolderTree(tree).stamp()[:-1]] for tree in (one, other)]
    assert all(a[0] == b[0] and a[1] != b[1] for a, b in zip(*marks, strict=True))


def test_verify_finds_the_decoded_copy_of_an_image_folder(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", _one_folder(tmp_path, 50)
    load(str(folder), root)
    found, _ = verify(str(folder), root).findings
    assert found.detail == "every SHA-256 matches its manifest"
