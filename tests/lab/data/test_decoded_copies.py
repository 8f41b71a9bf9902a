"""The decoded copy of a folder is that folder's, and no older than it."""

from __future__ import annotations

import os
import stat
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miniature_files import binary_records, cifar_parts, write_tar
from PIL import Image

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data import loading
from protoseam.lab.data.archives import FolderTree
from protoseam.lab.data.images import Problem, decode_image
from protoseam.lab.data.loading import load, verify
from protoseam.lab.data.streams import DEFAULT_LIMITS, Limits


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


def test_verify_finds_the_decoded_copy_of_images_that_were_resized(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", _one_folder(tmp_path, 50)
    load(str(folder), root, image_size=5)
    found, loaded = verify(str(folder), root, image_size=5).findings
    assert found.detail == "every SHA-256 matches its manifest"
    assert "of 5×5×3" in loaded.detail
    assert len(verify(str(folder), root).findings) == 1  # at their own size there is no copy yet


def test_what_a_dead_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    young, old = tmp_path / "root" / "cache" / ".writing-1", tmp_path / "root" / "cache" / ".writing-2"
    for leftover, age in ((young, 23 * 3600), (old, 25 * 3600)):
        leftover.mkdir(parents=True)
        os.utime(leftover, (time.time() - age,) * 2)
    load(str(_one_folder(tmp_path, 50)), tmp_path / "root")
    assert young.exists()
    assert not old.exists()
    (copy,) = (path for path in young.parent.iterdir() if path != young)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o755  # for colleagues who share the root


def test_a_member_may_unpack_to_two_hundred_times_its_size(tmp_path: Path) -> None:
    limits = Limits(ratio_free_bytes=0)
    limits.allow("it", 199 * 1000, 1000)
    with pytest.raises(DataError, match="decompression bomb"):
        limits.allow("it", 201 * 1000, 1000)
    DEFAULT_LIMITS.allow("it", 16 * 2**20, 1)
    with pytest.raises(DataError, match="decompression bomb"):
        DEFAULT_LIMITS.allow("it", 16 * 2**20 + 1, 1)


def test_a_tiff_of_sixteen_bits_is_refused() -> None:
    """Pillow opens it as 8-bit RGB; it cannot write one."""

    def tiff(bits: int) -> bytes:
        pixels = bytes(4 * 4 * 3 * bits // 8)
        tags = [(256, 3, 1, 4), (257, 3, 1, 4), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2)]
        tags += [(273, 4, 1, 14), (277, 3, 1, 3), (278, 3, 1, 4), (279, 4, 1, len(pixels))]
        head = struct.pack("<2sHI3H", b"II", 42, 14 + len(pixels), bits, bits, bits)
        entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
        return head + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)

    assert decode_image(tiff(8))[0].shape == (4, 4, 3)
    with pytest.raises(Problem, match="16 bits or more per channel"):
        decode_image(tiff(16))


def test_what_is_downloaded_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = cifar_parts([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"])
    files = {name: binary_records(*arrays) for name, arrays in parts.items()}

    def fetch(entry: Any, root: Path) -> None:
        write_tar(root / "cifar-10-binary.tar.gz", files)

    monkeypatch.setattr(loading, "fetch", fetch)
    with pytest.raises(DataError, match="is not under"):
        load("cifar10", tmp_path)
    with pytest.warns(DataWarning, match="the official set"):
        assert len(load("cifar10", tmp_path, download=True).train_images) == 36


def test_the_digits_use_the_whole_range() -> None:
    from sklearn.datasets import load_digits

    digits = load("digits")
    values = np.unique(np.concatenate([digits.train_images, digits.test_images]))
    assert values.tolist() == np.rint(np.unique(load_digits().images) * 255 / 16).tolist()
