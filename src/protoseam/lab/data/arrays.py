"""Data sets that are numpy arrays already: an .npz file, or a folder of .npy files."""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from protoseam.errors import DataError
from protoseam.lab.data.archives import ZipTree
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.streams import Limits

# Names under which people save the four arrays; all four must follow the same custom.
_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("X_train", "y_train", "X_test", "y_test"),
    ("train_x", "train_y", "test_x", "test_y"),
)
_CLASS_KEYS = ("classes", "class_names")
_MAX_CLASSES = 1_000_000  # a label above this is a mistake, and naming that many classes would hang
NPZ_LIMITS = Limits(
    member_bytes=32 * 2**30,
    total_bytes=64 * 2**30,
    remedy="if it is your own file, write it with np.savez in place of np.savez_compressed",
)

FOLDER_FILES = tuple(f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels"))


def read_npz(path: Path, name: str) -> ArrayDataset:
    """Read x_train, y_train, x_test, y_test (or train_images, …), and the class names under `classes` if present.

    Images are uint8 (N, H, W, C) or (N, H, W); anything numeric of shape (N, F) becomes float32 features.
    Labels are whole numbers from 0, of shape (N,) or (N, 1).
    """
    tree = ZipTree(path, NPZ_LIMITS)
    present = {member.removesuffix(".npy") for member in tree.names()}
    keys = next((keys for keys in _KEYS if present.issuperset(keys)), None)
    if keys is None:
        raise DataError(
            f"{path} holds {', '.join(sorted(present)) or 'nothing'}, but needs {', '.join(_KEYS[0])} (or "
            f"{', '.join(_KEYS[1])}); save it as np.savez(path, x_train=…, y_train=…, x_test=…, y_test=…)"
        )
    wanted = {*keys, *_CLASS_KEYS}
    found = {
        member.removesuffix(".npy"): parse_npy(data, f"{path}: {member}")
        for member, data in tree.read(lambda member: member.removesuffix(".npy") in wanted)
    }
    classes = next((_class_names(found[key], f"{path}: {key}") for key in _CLASS_KEYS if key in found), None)
    return _assemble(name, {f"{path}: {key}": found[key] for key in keys}, classes)


def read_array_folder(folder: Path, name: str) -> ArrayDataset:
    """Read {train,test}_images.npy, {train,test}_labels.npy and classes.txt (one name per line), memory-mapped."""
    loaded = {}
    for file in FOLDER_FILES:
        path = folder / file
        if not path.is_file():
            raise DataError(f"{path} is missing; such a folder needs {', '.join(FOLDER_FILES)}")
        try:
            loaded[str(path)] = np.load(path, mmap_mode="r" if "images" in file else None, allow_pickle=False)
        except Exception as error:  # numpy raises half a dozen kinds for a damaged file
            raise DataError(f"{path} cannot be read as an .npy file: {error}") from error
    names = folder / "classes.txt"
    try:
        listed = tuple(names.read_text(encoding="utf-8").splitlines()) if names.is_file() else None
    except UnicodeDecodeError as error:
        raise DataError(f"{names} is not UTF-8 text ({error}): write one name per line in UTF-8") from error
    return _assemble(name, loaded, listed)


def parse_npy(data: bytes, where: str) -> NDArray[Any]:
    """Parse an .npy file: never a pickle, and never more memory than the bytes given.

    (`np.load` would allocate whatever the header claims before it looks for the values.)
    """
    stream = io.BytesIO(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header written by Python 2
            readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
            shape, by_column, dtype = readers[npy_format.read_magic(stream)](stream)
    except Exception as error:  # the header is a Python literal: whatever parsing one can raise
        raise DataError(f"{where} has no valid .npy header ({type(error).__name__}: {error})") from error
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects, which only a pickle can store: save numbers instead")
    size = dtype.itemsize * math.prod(shape)
    start = stream.tell()
    if min(shape, default=0) < 0 or size != len(data) - start or dtype.itemsize == 0:
        raise DataError(
            f"{where} should hold {size:,} bytes for shape {shape} of {dtype}, but holds {len(data) - start:,}"
        )
    return np.frombuffer(data, dtype=dtype, offset=start).reshape(shape, order="F" if by_column else "C")


def _samples(array: NDArray[Any], where: str) -> NDArray[Any]:
    if array.ndim == 2 and array.dtype.kind in "iufb":
        with np.errstate(over="ignore"):  # too large for float32 becomes infinity, which check() names
            return array if array.dtype == np.float32 else array.astype(np.float32)
    if array.dtype != np.uint8:
        raise DataError(
            f"{where} is {array.dtype} of shape {array.shape}: images must be uint8, 0…255 (for floats in 0…1: "
            "(255 * x).round().astype('uint8')); features must be of shape (N, F)"
        )
    if array.ndim == 3:
        return array[..., None]
    if array.ndim != 4:
        raise DataError(f"{where} has shape {array.shape}: images must be (N, H, W, C) or (N, H, W)")
    if array.shape[1] in (1, 3, 4) and array.shape[3] not in (1, 3, 4):
        raise DataError(
            f"{where} has shape {array.shape}, so its channels come first: x.transpose(0, 2, 3, 1) puts them last"
        )
    return array


def _labels(array: NDArray[Any], where: str) -> NDArray[np.int64]:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{where} has shape {array.shape}: labels must be one number per row (one-hot: y.argmax(axis=1))"
        )
    if array.dtype.kind == "f":
        if (missing := np.flatnonzero(~np.isfinite(array))).size:
            raise DataError(
                f"{where} has no label (NaN) in {missing.size} rows, first row {missing[0]}: drop those rows"
            )
        if (broken := np.flatnonzero(array != np.floor(array))).size:
            raise DataError(
                f"{where} has the label {array[broken[0]]} in row {broken[0]}: labels must be whole"
            )
    elif array.dtype.kind not in "iu":
        raise DataError(
            f"{where} is {array.dtype}: labels must be integers from 0 (text: np.unique's inverse)"
        )
    if array.size and max(abs(int(array.min())), int(array.max())) > _MAX_CLASSES:
        raise DataError(
            f"{where} has labels from {array.min()} to {array.max()}: number the classes 0, 1, 2, … without gaps "
            "(np.unique(y, return_inverse=True)[1])"
        )
    return array.astype(np.int64)


def _class_names(array: NDArray[Any], where: str) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "US":
        raise DataError(f"{where} is {array.dtype} of shape {array.shape}: class names must be a row of text")
    try:
        return tuple(item.decode() if isinstance(item, bytes) else str(item) for item in array.tolist())
    except UnicodeDecodeError as error:
        raise DataError(f"{where} holds text that is not UTF-8: {error}") from error


def _assemble(name: str, arrays: dict[str, NDArray[Any]], classes: tuple[str, ...] | None) -> ArrayDataset:
    """Check the four arrays, given by where they come from, in the order of :class:`ArrayDataset`."""
    (x, train_x), (y, train_y), (other_x, test_x), (other_y, test_y) = arrays.items()
    train = _samples(train_x, x), _labels(train_y, y)
    test = _samples(test_x, other_x), _labels(test_y, other_y)
    if classes is None:  # a class that neither split names cannot be known of: count up to the highest label
        highest = max((int(labels.max()) for _, labels in (train, test) if labels.size), default=-1)
        classes = tuple(str(label) for label in range(highest + 1))
    return ArrayDataset(name, *train, *test, classes)
