"""Reproducible stratified splits, and the channel statistics of the training part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protoseam.errors import DataError

_CHUNK_BYTES = 16 * 2**20
Statistics = tuple[NDArray[np.float64], NDArray[np.float64]]  # mean and deviation of each channel


def stratified_split(
    labels: ArrayLike, fraction: float = 0.1, seed: int = 0, names: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row numbers of the training part and of the held-out part, both ascending.

    A class of n rows gives round-half-up(fraction · n) of them, but always keeps one for training. So a class with one
    row is never held out.

    Class c draws n 64-bit words from PCG64(SeedSequence([seed, c])), one for each of its rows in order, and gives away
    the rows with the smallest words. numpy promises never to change that raw bit stream (it makes no such promise for
    `Generator.permutation`), so neither the platform nor the numpy version matters. A class's share depends on the
    seed, its label and its own rows alone: adding or removing another class does not change it.

    With ``names`` a row's word is the beginning of the SHA-256 of its name instead, whatever the seed and the class: a
    row that comes or goes then moves hardly any other from one part to the other.

    Args:
        labels: one whole number from 0 per row.
        fraction: the share to hold out; 0.1 by default, chosen here because the paper states none.
        seed: of the draw.
        names: one per row, such as the files' names; None: rows are known by their place.

    Raises:
        DataError: if an argument is out of range or the labels are not whole numbers from 0.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"fraction must be at least 0 and below 1, not {fraction}: it is the share held out")
    if seed < 0:
        raise DataError(f"seed must not be negative, not {seed}")
    given = np.asarray(labels)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"labels must be one row of integers, not {given.dtype} of shape {given.shape}")
    labels_N = given.astype(np.int64)
    if labels_N.size and labels_N.min() < 0:
        raise DataError(f"label {labels_N.min()} is negative: drop the unlabelled rows before splitting")

    order_N = np.argsort(labels_N, kind="stable")  # rows grouped by class, in row order within a class
    classes, starts, counts = np.unique(labels_N[order_N], return_index=True, return_counts=True)
    # 0.29 · 50 is 14.499999999999998 in binary but 14.5 as written: decimal rounds what the user typed
    share = Decimal(repr(float(fraction)))
    held_N = np.zeros(labels_N.size, dtype=bool)
    for label, start, count in zip(classes.tolist(), starts.tolist(), counts.tolist(), strict=True):
        give = min(int((share * count).to_integral_value(ROUND_HALF_UP)), count - 1)
        if give:
            rows = order_N[start : start + count]
            words = (
                np.random.PCG64(np.random.SeedSequence([seed, label])).random_raw(count)
                if names is None
                else np.array([_word(names[row]) for row in rows], dtype=np.uint64)
            )
            held_N[rows[np.argsort(words, kind="stable")[:give]]] = True
    return np.flatnonzero(~held_N).astype(np.int64), np.flatnonzero(held_N).astype(np.int64)


def _word(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def channel_statistics(images: NDArray[Any], indices: ArrayLike | None = None) -> Statistics:
    """Return mean and population standard deviation of each channel (or feature) over the given rows.

    Pass the training rows only: statistics that saw the validation rows leak them. uint8 images are measured
    on the 0…1 scale, floats as they are. A constant channel has standard deviation 0.
    """
    if images.ndim not in (2, 4):
        raise DataError(f"channel_statistics needs shape (N, H, W, C) or (N, F), not {images.shape}")
    rows = np.arange(len(images)) if indices is None else np.asarray(indices)
    if rows.size == 0:
        raise DataError("channel_statistics was given no rows: the training part is empty")
    return _exact_statistics(images, rows) if images.dtype == np.uint8 else _merged_statistics(images, rows)


def _chunks(images: NDArray[Any], rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the selected rows as flat vectors, a few at a time: the images may be a file larger than memory."""
    step = max(1, _CHUNK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(rows), step):
        yield np.asarray(images[rows[start : start + step]]).reshape(-1, images[:1].size)


def _exact_statistics(images: NDArray[Any], rows: NDArray[Any]) -> Statistics:
    # Whole numbers all the way: n Σx² − (Σx)² does not cancel when it is computed in integers, here Python's own.
    channels, count = images.shape[-1], 0
    total_C = square_C = np.zeros(channels, dtype=object)
    for chunk in _chunks(images, rows):
        count += chunk.size // channels
        # Summing down whole rows first runs on long vectors: five times faster than along C values at a time.
        sums = chunk.sum(axis=0, dtype=np.int64).reshape(-1, channels).sum(axis=0)
        squares = np.square(chunk, dtype=np.uint16)  # 255² fits in 16 bits
        square_sums = squares.sum(axis=0, dtype=np.int64).reshape(-1, channels).sum(axis=0)
        total_C, square_C = total_C + sums.astype(object), square_C + square_sums.astype(object)
    variance_C = (count * square_C - total_C * total_C) / count**2
    return (total_C / count / 255).astype(np.float64), np.sqrt(variance_C.astype(np.float64)) / 255


def _merged_statistics(images: NDArray[Any], rows: NDArray[Any]) -> Statistics:
    # Chan, Golub and LeVeque's merge of centred chunks: E[x²] − μ² would lose everything for a large mean.
    count, mean, spread = 0, np.zeros(images.shape[-1]), np.zeros(images.shape[-1])
    for chunk in _chunks(images, rows):
        values = chunk.astype(np.float64).reshape(-1, images.shape[-1])
        chunk_mean = values.mean(axis=0)
        shift, merged = chunk_mean - mean, count + len(values)
        spread += np.square(values - chunk_mean).sum(axis=0) + shift**2 * count * len(values) / merged
        mean += shift * len(values) / merged
        count = merged
    return mean, np.sqrt(spread / count)
