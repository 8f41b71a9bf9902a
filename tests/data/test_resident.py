"""An epoch's batches: every image once, in one shape for the compiler, the same whenever it is made."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protoseam.data.augment import Augmentation
from protoseam.data.dataset import ArrayDataset
from protoseam.data.resident import Resident, _equal_chunks


@given(st.integers(1, 100_000), st.integers(1, 8000))
def test_chunks_have_one_size_and_cover_everything(total: int, most: int) -> None:
    chunks = list(_equal_chunks(total, most))
    assert len({hi - lo for lo, hi in chunks}) == 1
    assert chunks[0][0] == 0
    assert chunks[-1][1] == total
    for (_, before), (lo, hi) in itertools.pairwise(chunks):
        assert lo <= before < hi
    assert chunks[0][1] <= most + 255


def test_batch_sizes_share_the_shapes_that_a_compiler_keeps() -> None:
    sizes = set()
    for batch in range(32, 1025, 16):
        ((lo, hi), *_) = _equal_chunks(45_000 // batch * batch, 6000)
        sizes.add(hi - lo)
    assert len(sizes) <= 2


@pytest.fixture
def images() -> ArrayDataset:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    return ArrayDataset(
        "noise", pictures[:50], np.arange(50) % 5, pictures[50:], np.arange(10) % 5, tuple("abcde")
    )


def test_an_epoch_does_not_depend_on_those_before_it(images: ArrayDataset) -> None:
    def resident() -> Resident:
        return Resident(images, seed=3, batch_size=8, policy=Augmentation())

    straight, jumped = resident(), resident()
    for epoch in (0, 1, 2):
        straight.load_epoch(epoch)
    jumped.load_epoch(7)
    jumped.prepare(5)  # on a CPU there is nothing to prepare beside
    jumped.load_epoch(2)
    assert torch.equal(straight.x, jumped.x)
    assert torch.equal(straight.y, jumped.y)
    jumped.load_epoch(3)
    assert not torch.equal(straight.x, jumped.x)
