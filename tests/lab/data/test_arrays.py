"""An .npz file and a folder of .npy arrays: read exactly, and never through a pickle."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from miniature_files import Exploit, mutated, survives

from protoseam.errors import DataError
from protoseam.lab.data.arrays import parse_npy, read_array_folder, read_npz
from protoseam.lab.data.dataset import check


def four(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    return {"x_train": x, "y_train": y, "x_test": x[:5], "y_test": y[:5]}


X = np.random.default_rng(0).integers(0, 256, (10, 6, 5, 3), dtype=np.uint8)
Y = np.arange(10) % 5


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_images(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "a.npz", **four(X, Y[:, None].astype(np.uint8)), classes=np.array(list("abcde")))
    dataset = read_npz(tmp_path / "a.npz", "a")
    np.testing.assert_array_equal(dataset.train_images, X)
    np.testing.assert_array_equal(dataset.test_labels, Y[:5])
    assert dataset.classes == tuple("abcde")
    check(dataset)


def test_npz_other_names_grey_images_and_features(tmp_path: Path) -> None:
    grey = {"train_images": X[..., 0], "train_labels": Y, "test_images": X[:5, ..., 0], "test_labels": Y[:5]}
    np.savez(tmp_path / "grey.npz", **grey)
    assert read_npz(tmp_path / "grey.npz", "grey").train_images.shape == (10, 6, 5, 1)
    np.savez(tmp_path / "flat.npz", **four(np.asfortranarray(X.reshape(10, -1) / 3), Y.astype(float)))
    flat = read_npz(tmp_path / "flat.npz", "flat")
    assert flat.train_images.dtype == np.float32
    np.testing.assert_allclose(flat.train_images, X.reshape(10, -1) / 3, rtol=1e-6)
    assert flat.train_labels.dtype == np.int64
    check(flat)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": X}, "needs x_train, y_train, x_test, y_test"),
        (four(X / 255, Y), "images must be uint8"),
        (four(X.transpose(0, 3, 1, 2), Y), "channels come first"),
        (four(X, np.eye(5)[Y]), "argmax"),
        (four(X, np.where(Y == 1, np.nan, Y)), "no label"),
        (four(X, Y + 0.5), r"label \d\.5 in row 0"),
        (four(X, np.array(list("abcdefghij"))), "<U1"),
        (four(X, Y + 10**12), "without gaps"),
        ({**four(X, Y), "classes": np.arange(5)}, r"classes.* is int64"),
    ],
)
def test_npz_says_what_is_wrong(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read_npz(tmp_path / "a.npz", "a")


def test_npz_objects_are_refused_without_unpickling(tmp_path: Path) -> None:
    target = tmp_path / "proof"
    objects = np.array([Exploit(os.mkdir, str(target))] * 10, dtype=object)
    np.savez(tmp_path / "a.npz", **four(objects, Y))
    with pytest.raises(DataError, match="Python objects"):
        read_npz(tmp_path / "a.npz", "a")
    assert not target.exists()


def test_a_header_that_claims_a_terabyte_allocates_nothing() -> None:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (10**12,)})
    with pytest.raises(DataError, match="should hold 1,000,000,000,000 bytes"):
        parse_npy(out.getvalue() + bytes(64), "a")


def test_array_folder_is_mapped_and_checked(tmp_path: Path) -> None:
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", X)
        np.save(tmp_path / f"{split}_labels.npy", Y)
    (tmp_path / "classes.txt").write_text("\n".join("abcde") + "\n")
    dataset = read_array_folder(tmp_path, "a")
    assert isinstance(dataset.train_images, np.memmap)
    assert dataset.classes == tuple("abcde")
    whole = (tmp_path / "train_images.npy").read_bytes()
    (tmp_path / "train_images.npy").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"train_images\.npy cannot be read"):
        read_array_folder(tmp_path, "a")
    (tmp_path / "train_images.npy").unlink()
    with pytest.raises(DataError, match="is missing"):
        read_array_folder(tmp_path, "a")


def npz_bytes() -> bytes:
    out = io.BytesIO()
    np.savez(out, **four(X[:6, :2, :2], Y[:6]))
    return out.getvalue()


@settings(max_examples=150, deadline=None)
@given(mutated(npz_bytes()))
def test_fuzz_npz(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.npz"
    path.write_bytes(data)
    survives(lambda: read_npz(path, "a"))


@settings(max_examples=150, deadline=None)
@given(
    mutated(
        np.lib.format.magic(1, 0)
        + b"\x46\0{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }".ljust(72)
        + b"1234"
    )
)
def test_fuzz_npy(data: bytes) -> None:
    survives(lambda: parse_npy(data, "a"))
