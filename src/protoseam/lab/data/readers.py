"""The official file formats: idx (MNIST and sets like it), and CIFAR's binary and python forms.

Every reader takes a tree of files, which may be a folder or an archive, and returns an `ArrayDataset`. The
small functions underneath take bytes; given any bytes at all, they return arrays or raise `DataError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protoseam.errors import DataError
from protoseam.lab.data.archives import Tree, only
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.pickles import read_cifar_pickle
from protoseam.lab.data.streams import inflate

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]
Reader = Callable[..., ArrayDataset]  # of a tree, a name and, where the catalogue has them, the class names

_SIDE, _CHANNELS = 32, 3
_PIXELS = _SIDE * _SIDE * _CHANNELS
_IDX_UBYTE = 0x08
_IDX_STEMS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
_IDX_NAMES = {
    f"{stem}{joint}idx{1 if 'labels' in stem else 3}-ubyte{suffix}": stem
    for stem in _IDX_STEMS
    for joint in "-."
    for suffix in ("", ".gz")
}


def parse_idx(data: bytes, where: str, dimensions: int) -> NDArray[np.uint8]:
    """Parse an idx array of unsigned bytes: two zero bytes, a type, the number of sides, the sides, the values."""
    start = 4 + 4 * dimensions
    if len(data) < start or data[:2] != b"\0\0":
        raise DataError(f"{where} is not an idx file (it starts with {data[:4].hex(' ') or 'nothing'})")
    if data[2] != _IDX_UBYTE or data[3] != dimensions:
        raise DataError(
            f"{where} holds idx type 0x{data[2]:02x} with {data[3]} dimensions, but unsigned bytes (0x08) with "
            f"{dimensions} are needed; are images and labels swapped?"
        )
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    size = math.prod(shape)
    if len(data) - start != size:
        raise DataError(
            f"{where} should hold {size:,} values for its shape {shape}, but holds {len(data) - start:,}; it is "
            "cut short or damaged, fetch it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def parse_cifar_binary(data: bytes, where: str, label_bytes: int) -> Arrays:
    """Parse records of a label (CIFAR-100: coarse, then fine) and 3 planes of 32×32 pixels."""
    record = label_bytes + _PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{where} has {len(data):,} bytes, which is not a whole number of {record}-byte records; it is cut "
            "short or belongs to another data set"
        )
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return _planes_to_images(rows[:, label_bytes:]), rows[:, label_bytes - 1].astype(np.int64)


def parse_cifar_python(data: bytes, where: str, label_key: str) -> Arrays:
    """Parse one pickled batch: `data` (n × 3072) and a list of labels."""
    batch = read_cifar_pickle(data, where)
    pixels, labels = batch.get("data"), batch.get(label_key)
    if not isinstance(pixels, np.ndarray) or pixels.shape[1] != _PIXELS or len(pixels) == 0:
        raise DataError(f"{where} has no array 'data' of n × {_PIXELS} bytes; its keys are {sorted(batch)}")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise DataError(f"{where} has no list {label_key!r} of labels; its keys are {sorted(batch)}")
    if len(pixels) != len(labels):
        raise DataError(f"{where} has {len(pixels)} images but {len(labels)} labels; fetch it again")
    return _planes_to_images(pixels), np.array(labels, dtype=np.int64)


def idx_stem(file: str) -> str | None:
    """Return which of the four idx files this is by its last name (`train-images`, …), or None."""
    return _IDX_NAMES.get(file.rsplit("/", 1)[-1])


def missing_idx_files(tree: Tree) -> list[str]:
    present = {idx_stem(name) for name in tree.names()}
    return [stem for stem in _IDX_STEMS if stem not in present]


def read_idx(tree: Tree, name: str, classes: Sequence[str] = ()) -> ArrayDataset:
    """Read the four files of MNIST or a set like it, compressed or not, with `-idx3-` or `.idx3-` in their names."""
    files: dict[str, bytes] = {}
    for member, data in tree.read(only(_IDX_NAMES)):
        if (stem := idx_stem(member)) and stem not in files:  # plain and .gz side by side: the first will do
            files[stem] = inflate(data, f"{tree.path}/{member}")
    _require(tree, _IDX_STEMS, files, "-idx3-ubyte(.gz) and -idx1-ubyte(.gz)")
    arrays = [
        parse_idx(files[stem], f"{tree.path}: {stem}", 1 if "labels" in stem else 3) for stem in _IDX_STEMS
    ]
    train_images, train_labels, test_images, test_labels = arrays
    highest = max((int(labels.max()) for labels in (train_labels, test_labels) if labels.size), default=0)
    train = train_images[..., None], train_labels.astype(np.int64)
    test = test_images[..., None], test_labels.astype(np.int64)
    return ArrayDataset(name, *train, *test, tuple(classes) or _numbers(highest + 1))


def _cifar(count: int, train: Sequence[str], test: str, names: str, labels: int | str) -> Reader:
    """Return the reader of one form of CIFAR: its training files, its test file and, if it is there, its class names.

    ``labels`` is the number of label bytes in a binary record, or the key of the labels in a pickled dict.
    """

    def read(tree: Tree, name: str, classes: Sequence[str] = ()) -> ArrayDataset:
        files: dict[str, bytes] = {}
        for member, data in tree.read(only([*train, test, names])):
            last = member.rsplit("/", 1)[-1]
            if last in files:
                raise DataError(f"{tree.path} has {last} in more than one folder; keep one of them")
            files[last] = data
        _require(tree, [*train, test], files)
        parts = []
        for file in (*train, test):
            where = f"{tree.path}: {file}"
            if isinstance(labels, int):
                parts.append(parse_cifar_binary(files[file], where, labels))
            else:
                parts.append(parse_cifar_python(files[file], where, labels))
        own = _class_names(files[names], f"{tree.path}: {names}", labels) if names in files else ()
        *images, test_images = [images for images, _ in parts]
        *numbers, test_labels = [numbers for _, numbers in parts]
        together = np.concatenate(images), np.concatenate(numbers)
        return ArrayDataset(
            name, *together, test_images, test_labels, own or tuple(classes) or _numbers(count)
        )

    return read


def _class_names(data: bytes, where: str, labels: int | str) -> tuple[str, ...]:
    if isinstance(labels, int):
        return tuple(data.decode("utf-8", "replace").split())
    key = f"{labels.removesuffix('s')}_names"
    names = read_cifar_pickle(data, where).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} has no list {key!r} of class names; fetch it again")
    return tuple(names)


_BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
read_cifar10_python = _cifar(10, _BATCHES, "test_batch", "batches.meta", "labels")
read_cifar10_binary = _cifar(10, [f"{b}.bin" for b in _BATCHES], "test_batch.bin", "batches.meta.txt", 1)
read_cifar100_python = _cifar(100, ["train"], "test", "meta", "fine_labels")
read_cifar100_binary = _cifar(100, ["train.bin"], "test.bin", "fine_label_names.txt", 2)


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _planes_to_images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows.reshape(-1, _CHANNELS, _SIDE, _SIDE).transpose(0, 2, 3, 1))


def _require(tree: Tree, needed: Sequence[str], files: dict[str, Any], hint: str = "") -> None:
    missing = [name for name in needed if name not in files]
    if missing:
        raise DataError(
            f"{tree.path} lacks {', '.join(missing)}{f' ({hint})' if hint else ''}; it is incomplete, add what "
            "is missing or fetch it again"
        )
