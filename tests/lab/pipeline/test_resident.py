"""An epoch's batches: every image once, in one shape for the compiler, the same whenever it is made."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protoseam.errors import DataWarning
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.pipeline.augment import Augmentation
from protoseam.lab.pipeline.resident import Resident, _equal_chunks


@settings(deadline=None)  # a hundred thousand chunks take their time on a busy machine
@given(st.integers(1, 100_000), st.integers(1, 8000))
def test_chunks_have_one_size_and_cover_everything(total: int, most: int) -> None:
    chunks = list(_equal_chunks(total, most))
    assert len({hi - lo for lo, hi in chunks}) == 1
    assert chunks[0][0] == 0
    assert chunks[-1][1] == total
    for (_, before), (lo, hi) in itertools.pairwise(chunks):
        assert lo <= before < hi
    assert chunks[0][1] <= most


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


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_has_every_image_once_beside_its_label(images: ArrayDataset, world: int) -> None:
    ranks = [
        Resident(images, seed=3, batch_size=8, validation=0.1, rank=rank, world=world)
        for rank in range(world)
    ]
    assert {r.steps for r in ranks} == {5}  # of 45 images
    seen = []
    for r in ranks:
        r.load_epoch(4)
        assert len(r.x) == len(r.y) >= r.steps * r.local_batch
        seen += [(x.numpy().tobytes(), int(y)) for x, y in zip(r.x, r.y, strict=True)]
    whole = ranks[0]
    every = zip(whole._normalised(whole.images), whole.labels, strict=True)
    assert sorted(seen) == sorted((x.contiguous().numpy().tobytes(), int(y)) for x, y in every)
    before = whole.y.clone()
    whole.load_epoch(5)
    assert not torch.equal(whole.y, before)


def test_a_validation_part_that_rounds_to_nothing_is_told(images: ArrayDataset) -> None:
    few = dataclasses.replace(
        images, train_images=images.train_images[:8], train_labels=np.arange(8) % images.num_classes
    )
    with pytest.warns(DataWarning, match=r"validation=0\.1 of each class of .* rounds to no sample"):
        assert not len(Resident(few, seed=0, batch_size=4).validation[1])


def test_every_process_has_its_share_of_a_clean_pass(images: ArrayDataset) -> None:
    shares = [Resident(images, seed=0, batch_size=4, rank=rank, world=2) for rank in range(2)]
    seen = [torch.cat([x for x, _ in resident.clean()]) for resident in shares]
    whole = torch.cat([x for x, _ in Resident(images, seed=0, batch_size=4).clean()])
    assert abs(len(seen[0]) - len(seen[1])) <= 1
    assert torch.equal(torch.cat(seen).flatten(1).sort(0)[0], whole.flatten(1).sort(0)[0])


def test_a_clean_pass_is_not_ordered_by_class(images: ArrayDataset) -> None:
    order = np.argsort(images.train_labels, kind="stable")
    data = ArrayDataset(
        "sorted", images.train_images[order], images.train_labels[order], images.test_images,
        images.test_labels, images.classes,
    )  # fmt: skip
    resident = Resident(data, seed=3, batch_size=8)
    ((x, y),) = resident.clean()
    assert y.diff().ne(0).sum() > 20
    assert sorted(zip(x.sum((1, 2, 3)).tolist(), y.tolist(), strict=True)) == sorted(
        zip(
            resident._normalised(resident.images).sum((1, 2, 3)).tolist(),
            resident.labels.tolist(),
            strict=True,
        )
    )
    assert torch.equal(y, next(iter(resident.clean()))[1])
