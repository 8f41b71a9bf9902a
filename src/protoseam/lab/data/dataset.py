"""The form that every reader produces, and the checks that find bad data before a run is spent on it."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data.names import refuse_unprintable

_CHUNK_ROWS = 4096
_NAMED = 10  # classes or rows that a message names before it starts counting


@dataclass(frozen=True)
class ArrayDataset:
    """A labelled data set as plain arrays. The images may be memory-mapped and read-only."""

    name: str
    train_images: NDArray[Any]  # uint8 (N, H, W, C), or float32 (N, F) for flat features
    train_labels: NDArray[np.int64]
    test_images: NDArray[Any]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]
    held_out: bool = False  # whether the test part is a fifth of one folder, chosen by the names of the files

    def __post_init__(self) -> None:
        refuse_unprintable(self.name, self.classes)  # whatever file they were read from

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return (H, W, C) of an image, or (F,) of a feature row."""
        return tuple(self.train_images.shape[1:])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape that a network sees: (C, H, W), or (F,)."""
        shape = self.sample_shape
        return shape if len(shape) == 1 else (shape[2], shape[0], shape[1])

    def without_test(self) -> ArrayDataset:
        """Return the same data set without test data, for code that must not see any."""
        return dataclasses.replace(self, test_images=self.test_images[:0], test_labels=self.test_labels[:0])


def check(dataset: ArrayDataset) -> None:
    """Raise one `DataError` that lists everything wrong with the data set, and warn about what is only odd.

    All labels are checked (10,000 classes cost milliseconds). Images are compared until two differ, and float features
    are searched once for values that are not finite.
    """
    errors = _array_errors(dataset)
    if not errors:  # the label checks below index by label and by row, so the arrays must fit together first
        errors = _label_errors(dataset)
    if errors:
        listed = "".join(f"\n  - {error}" for error in errors)
        raise DataError(f"{dataset.name} cannot be trained on:{listed}")
    for oddity in _oddities(dataset):
        warnings.warn(f"{dataset.name}: {oddity}", DataWarning, stacklevel=2)


def _array_errors(dataset: ArrayDataset) -> list[str]:
    errors = []
    for split, images, labels in _splits(dataset):
        if images.dtype == np.uint8 and images.ndim != 4:
            errors.append(f"{split} images have shape {images.shape}: make them (N, height, width, channels)")
        elif images.dtype == np.uint8 and images.shape[3] not in (1, 3):
            errors.append(
                f"{split} images have {images.shape[3]} channels: keep 1 (grey) or 3 (colours); x[..., :3] drops an "
                "alpha channel"
            )
        elif images.dtype != np.uint8 and not (images.dtype == np.float32 and images.ndim == 2):
            errors.append(
                f"{split} images are {images.dtype} of shape {images.shape}: give uint8 (N, height, width, "
                "channels) images or float32 (N, features) rows"
            )
        if labels.ndim != 1 or labels.dtype != np.int64:
            errors.append(f"{split} labels are {labels.dtype} of shape {labels.shape}: give int64 (N,)")
        elif len(images) != len(labels):
            errors.append(
                f"{split} has {len(images)} images but {len(labels)} labels: one of the two files is "
                "incomplete or belongs to another set"
            )
        if images.size == 0:
            errors.append(f"{split} has no images (shape {images.shape}): add some")
        elif images.dtype.kind == "f" and (bad := _first_not_finite(images)) is not None:
            errors.append(
                f"{split} features hold NaN or infinity, first in row {bad}: drop or fill such rows"
            )
    if dataset.train_images.shape[1:] != dataset.test_images.shape[1:]:
        errors.append(
            f"train images are {dataset.train_images.shape[1:]} each but test images "
            f"{dataset.test_images.shape[1:]}: bring both to one size"
        )
    if dataset.num_classes < 2:
        there = f"is one class, {dataset.classes[0]!r}" if dataset.classes else "are no classes"
        errors.append(f"there {there}: at least two are needed, and of images a folder for each")
    if twice := [name for name, count in Counter(dataset.classes).items() if count > 1]:
        errors.append(
            f"{', '.join(map(repr, twice[:_NAMED]))} is the name of more than one class: give each its own, or "
            "give them one label"
        )
    return errors


def _label_errors(dataset: ArrayDataset) -> list[str]:
    errors = []
    for split, _, labels in _splits(dataset):
        if (missing := np.flatnonzero(labels < 0)).size:
            errors.append(
                f"{split} labels are negative (missing?) in {missing.size} rows, first row {missing[0]} with "
                f"{labels[missing[0]]}: drop those rows"
            )
    if errors:
        return errors

    count = dataset.num_classes
    highest = max(int(labels.max()) for _, _, labels in _splits(dataset))
    lowest = min(int(labels.min()) for _, _, labels in _splits(dataset))
    if lowest == 1 and highest >= count - 1:
        return [f"labels run from 1 to {highest}, but they must start at 0: subtract 1 from every label"]
    for split, _, labels in _splits(dataset):
        if (beyond := np.flatnonzero(labels >= count)).size:
            errors.append(
                f"{split} label {labels[beyond[0]]} in row {beyond[0]} (and {beyond.size - 1} more) is not one "
                f"of the {count} classes 0…{count - 1}: add the class name or correct the label"
            )
    if errors:
        return errors

    train_C = np.bincount(dataset.train_labels, minlength=count)
    test_C = np.bincount(dataset.test_labels, minlength=count)
    if (unseen := np.flatnonzero((train_C == 0) & (test_C > 0))).size:
        errors.append(
            f"training lacks {unseen.size} of the classes that test has: {_names(dataset.classes, unseen)}; "
            "move some of their images to training or drop them from test"
        )
    if (empty := np.flatnonzero((train_C == 0) & (test_C == 0))).size:
        errors.append(
            f"{empty.size} of {count} classes have no image at all: {_names(dataset.classes, empty)}; add "
            "images or remove the classes (labels must then be renumbered without gaps)"
        )
    return errors


def _oddities(dataset: ArrayDataset) -> Iterator[str]:
    single = np.flatnonzero(np.bincount(dataset.train_labels, minlength=dataset.num_classes) == 1)
    if single.size:
        yield (
            f"{single.size} classes have a single training image: {_names(dataset.classes, single)}; a class "
            "covariance cannot be estimated from one, only the floor is left of it, and none can go to validation. "
            "Add images if you can."
        )
    for split, images, _ in _splits(dataset):
        if len(images) > 1 and _all_identical(images):
            yield f"all {len(images)} {split} images are identical; check the source files"


def _splits(dataset: ArrayDataset) -> tuple[tuple[str, NDArray[Any], NDArray[np.int64]], ...]:
    return (
        ("train", dataset.train_images, dataset.train_labels),
        ("test", dataset.test_images, dataset.test_labels),
    )


def _names(classes: Sequence[str], indices: NDArray[np.int64]) -> str:
    shown = ", ".join(f"{classes[i]!r} ({i})" for i in indices[:_NAMED])
    return shown if len(indices) <= _NAMED else f"{shown} and {len(indices) - _NAMED} more"


def _first_not_finite(features: NDArray[Any]) -> int | None:
    for start in range(0, len(features), _CHUNK_ROWS):
        bad = np.flatnonzero(~np.isfinite(features[start : start + _CHUNK_ROWS]).all(axis=1))
        if bad.size:
            return start + int(bad[0])
    return None


def _all_identical(images: NDArray[Any]) -> bool:
    first = np.asarray(images[0])
    # two rows first: real data differ there, and a memory-mapped file is then hardly touched
    starts = [(1, 2), *((start, start + _CHUNK_ROWS) for start in range(2, len(images), _CHUNK_ROWS))]
    return all(bool((images[start:stop] == first).all()) for start, stop in starts)
