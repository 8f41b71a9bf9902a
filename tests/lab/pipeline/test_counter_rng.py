"""The counter-based random numbers: known answers, and the laws they follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from protoseam.lab.pipeline.counter_rng import bernoulli, philox4x32, random_words, uniform, uniform_integer

# Every statistical test has a fixed seed, so it passes or fails for good; this is what an honest generator
# falls below once in a thousand.
SIGNIFICANCE = 1e-3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known answers for philox4x32-10
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_words_are_numbered_by_draw() -> None:
    indices = torch.tensor([0, 5, 2**40 + 1])
    everything = random_words(indices, seed=7, epoch=2, count=23)
    assert torch.equal(random_words(indices, seed=7, epoch=2, count=11), everything[:11])
    assert torch.equal(random_words(indices[1:], seed=7, epoch=2, count=23), everything[:, 1:])
    assert int(everything.min()) >= 0
    assert int(everything.max()) < 2**32
    # Every part of the counter and of the key counts, the high words too.
    for other in (
        random_words(indices, seed=7 + 2**32, epoch=2, count=23),
        random_words(indices, seed=7, epoch=3, count=23),
        random_words(indices + 2**32, seed=7, epoch=2, count=23),
    ):
        assert not (other == everything).any()


def test_seed_and_epoch_may_be_tensors() -> None:
    indices = torch.arange(9)
    expected = random_words(indices, seed=2**40 + 3, epoch=4)
    assert torch.equal(random_words(indices, seed=torch.tensor(2**40 + 3), epoch=torch.tensor(4)), expected)


def test_words_are_uniform() -> None:
    words = random_words(torch.arange(4096), seed=1, epoch=0, count=64)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> shift & 255).flatten().numpy(), minlength=256)
        assert stats.chisquare(counts).pvalue > SIGNIFICANCE
    assert stats.kstest(uniform(words).flatten().numpy(), "uniform").pvalue > SIGNIFICANCE
    assert 0.0 <= float(uniform(torch.tensor(0))) < float(uniform(torch.tensor(2**32 - 1))) < 1.0


def test_neighbouring_indices_epochs_draws_and_seeds_are_uncorrelated() -> None:
    def values(seed: int, epoch: int) -> np.ndarray[Any, Any]:
        return uniform(random_words(torch.arange(8192), seed=seed, epoch=epoch, count=9)).numpy()

    base = values(1, 0)
    pairs = {
        "index": (base[:, 1:], base[:, :-1]),
        "draw": (base[1:], base[:-1]),
        "epoch": (base, values(1, 1)),
        "seed": (base, values(2, 0)),
        "index and epoch": (base[:, 1:], values(1, 1)[:, :-1]),
    }
    for name, (one, other) in pairs.items():
        assert stats.pearsonr(one.ravel(), other.ravel()).pvalue > SIGNIFICANCE, name
        cells = np.floor(one.ravel() * 16) * 16 + np.floor(other.ravel() * 16)
        assert stats.chisquare(np.bincount(cells.astype(int), minlength=256)).pvalue > SIGNIFICANCE, name


def test_integers_and_booleans_cover_their_range() -> None:
    edges = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    assert uniform_integer(edges, 14).tolist() == [0, 6, 7, 13]
    assert uniform_integer(edges, torch.tensor([1, 2, 2, 33])).tolist() == [0, 0, 1, 32]
    assert bernoulli(edges, 0.5).tolist() == [True, True, False, False]
    assert not bernoulli(edges, 0.0).any()
    assert bernoulli(edges, 1.0).all()
