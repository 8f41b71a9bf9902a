"""The split's promises as properties, its exact output as a constant, and the statistics against a naive oracle."""

from __future__ import annotations

import time
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protoseam.errors import DataError
from protoseam.lab.data import split
from protoseam.lab.data.split import channel_statistics, stratified_split

LABELS = st.lists(st.integers(0, 6), max_size=120).map(np.array).map(lambda a: a.astype(np.int64))
FRACTIONS = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 0.29, 0.5, 0.9, 0.999])
SEEDS = st.integers(0, 2**63)


@settings(max_examples=200, deadline=None)
@given(LABELS, FRACTIONS, SEEDS)
def test_parts_are_disjoint_complete_sorted_and_of_the_promised_size(
    labels: np.ndarray, fraction: float, seed: int
) -> None:
    train, held = stratified_split(labels, fraction, seed)
    assert train.dtype == held.dtype == np.int64
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held])), np.arange(len(labels)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(held) > 0).all()
    for label in set(labels.tolist()):
        count = int((labels == label).sum())
        rounded = floor(Fraction(str(fraction)) * count + Fraction(1, 2))
        assert (labels[held] == label).sum() == min(rounded, count - 1)


@settings(max_examples=100, deadline=None)
@given(LABELS, SEEDS, st.integers(0, 6))
def test_a_class_does_not_feel_the_others(labels: np.ndarray, seed: int, label: int) -> None:
    """Alone, or among any others: the same of its rows are held out."""
    own = np.flatnonzero(labels == label)
    _, held = stratified_split(labels, 0.3, seed)
    _, held_alone = stratified_split(np.full(len(own), label), 0.3, seed)
    np.testing.assert_array_equal(own[held_alone], held[labels[held] == label])


def test_the_fraction_is_rounded_as_written() -> None:
    """0.29 · 50 is 14.5 on paper, and a little less in binary."""
    assert len(stratified_split(np.zeros(50, int), 0.29)[1]) == 15


def test_the_same_seed_gives_this_split_everywhere() -> None:
    """Written down once; another platform or numpy version must give the same rows."""
    _, held = stratified_split(np.arange(40) % 4, 0.25, seed=42)
    assert held.tolist() == HELD_42
    assert stratified_split(np.arange(40) % 4, 0.25, seed=43)[1].tolist() != HELD_42


HELD_42 = [2, 3, 4, 5, 9, 10, 16, 26, 27, 32, 33, 35]


def test_the_draw_is_spread_over_the_class() -> None:
    held = np.concatenate([stratified_split(np.zeros(100, int), 0.1, seed)[1] for seed in range(200)])
    counts = np.bincount(held, minlength=100)
    assert counts.sum() == 2000
    assert counts.max() < 45  # 20 each on average, standard deviation 4.2
    assert counts.min() > 4


def test_ten_thousand_classes_are_quick() -> None:
    labels = np.arange(10_000).repeat(3)
    start = time.perf_counter()
    train, held = stratified_split(labels, 0.3)
    assert time.perf_counter() - start < 5  # 0.2 s on an old laptop
    assert len(held) == 10_000
    assert set(labels[train].tolist()) == set(range(10_000))


@pytest.mark.parametrize(
    ("labels", "fraction", "seed", "message"),
    [
        ([0, 1], 1.0, 0, "below 1"),
        ([0, 1], -0.1, 0, "at least 0"),
        ([0, 1], 0.1, -1, "seed"),
        ([0, -1], 0.1, 0, "negative"),
        ([0.0, 1.0], 0.1, 0, "integers"),
        ([[0, 1]], 0.1, 0, "one row"),
    ],
)
def test_bad_arguments_are_named(labels: list, fraction: float, seed: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stratified_split(labels, fraction, seed)


def oracle(values: np.ndarray) -> tuple[list[float], list[float]]:
    """Two loops in exact arithmetic."""
    means, deviations = [], []
    for channel in range(values.shape[-1]):
        column = [Fraction(float(v)) for v in values[..., channel].reshape(-1)]
        mean = sum(column) / len(column)
        means.append(float(mean))
        deviations.append(float(sum((v - mean) ** 2 for v in column) / len(column)) ** 0.5)
    return means, deviations


@pytest.mark.parametrize("chunk", [1, 200, 2**24])
def test_channel_statistics_of_images(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(split, "_CHUNK_BYTES", chunk)
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    images[..., 2] = 7
    rows = np.array([0, 2, 3, 8])
    mean, deviation = channel_statistics(images, rows)
    means, deviations = oracle(images[rows])
    np.testing.assert_allclose(mean, np.array(means) / 255, rtol=1e-14)
    np.testing.assert_allclose(deviation, np.array(deviations) / 255, rtol=1e-14)
    assert deviation[2] == 0
    images[1] = 255  # a row that was not asked for
    np.testing.assert_array_equal(channel_statistics(images, rows)[0], mean)


@pytest.mark.parametrize("chunk", [1, 50, 2**24])
def test_channel_statistics_of_features_survive_a_large_mean(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(split, "_CHUNK_BYTES", chunk)
    features = (1e6 + np.random.default_rng(0).standard_normal((40, 3))).astype(np.float32)
    mean, deviation = channel_statistics(features)
    means, deviations = oracle(features)
    np.testing.assert_allclose(mean, means, rtol=1e-13)
    np.testing.assert_allclose(deviation, deviations, rtol=1e-8)


def test_channel_statistics_refuses_nothing_and_odd_shapes() -> None:
    with pytest.raises(DataError, match="no rows"):
        channel_statistics(np.zeros((2, 2), np.float32), [])
    with pytest.raises(DataError, match=r"\(2, 2, 2\)"):
        channel_statistics(np.zeros((2, 2, 2), np.uint8))


def test_by_name_a_file_that_comes_or_goes_moves_hardly_another() -> None:
    """A trained image in the test part would count as known; of 200 files only one can have moved."""
    names = [f"a/{i:03d}.png" for i in range(200)]

    def held_out(files: list[str]) -> set[str]:
        train, held = stratified_split(np.zeros(len(files), int), 0.2, names=files)
        assert sorted([*train, *held]) == list(range(len(files)))
        return {files[i] for i in held}

    before = held_out(names)
    assert len(before) == 40
    assert held_out(names[::-1]) == before  # the order does not matter
    for changed in (["a/+new.png", *names], names[1:], names[:-1]):
        assert len(held_out(changed) - before - {"a/+new.png"}) <= 1
