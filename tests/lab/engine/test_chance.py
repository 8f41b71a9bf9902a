"""What counts as chance, what is advised then, and which batch suits the data."""

from __future__ import annotations

import dataclasses

import pytest

from protoseam.lab.engine.chance import at_chance, few_steps, what_to_try
from protoseam.lab.engine.config import OptimConfig, RunConfig
from protoseam.lab.pipeline.resident import suitable_batch


@pytest.mark.parametrize(
    ("right", "counts", "chance"),
    [
        ([12, 0, 0, 0, 0], [12] * 5, True),
        ([4, 4, 4, 3, 3], [12] * 5, True),
        ([4, 4, 4, 4, 3], [12] * 5, False),
        ([60, 60], [100, 100], True),
        ([60, 61], [100, 100], False),  # 1.5/n would be 75 %
        ([90, 0], [90, 10], True),  # always the first
        ([82, 8], [90, 10], False),  # fewer right than that, and yet it knows both
        ([0, 5, 0], [0, 10, 10], True),  # a class that is not there
        ([0, 10, 4], [0, 10, 10], False),
        ([1, 0] * 50, [67] * 100, True),
        ([2] * 100, [100] * 100, False),
    ],
)
def test_chance(right: list[int], counts: list[int], chance: bool) -> None:
    told = at_chance(right, counts, [f"c{i}" for i in range(len(counts))], "test")
    assert (told is not None) == chance
    if told is not None:
        share, accuracy = max(counts) / sum(counts), sum(right) / sum(counts)
        share *= 100
        assert f"test accuracy {100 * accuracy:.2f} % is near chance: with {len(counts)} classes" in told
        assert f"always answering 'c{counts.index(max(counts))}' gives {share:.2f} %" in told


def test_no_samples_are_no_chance() -> None:
    assert at_chance([0, 0], [0, 0], ["a", "b"], "test") is None


def test_advice_has_numbers() -> None:
    config = RunConfig(data="./mine", epochs=20, variant="protoseam")
    told = what_to_try(config, samples=216, batch_size=128)
    assert "--batch_size 8, --epochs 40, --optim.lr 0.004, --optim.name adamw" in told
    assert "--variant baseline" in told
    adam = dataclasses.replace(config, variant="baseline", optim=OptimConfig(name="adamw", clip=1.0))
    told = what_to_try(adam, samples=216, batch_size=8)
    assert told == "Try one of --epochs 40, --optim.name adamw --optim.lr 0.003."
    slow = dataclasses.replace(config, optim=OptimConfig(name="sgd", lr=3e-4))  # Adam's rate, given to SGD
    assert "--optim.lr 0.02," in what_to_try(slow, samples=216, batch_size=8)


def test_few_steps_are_told_with_a_remedy() -> None:
    config = RunConfig(data="./mine", epochs=20)
    assert few_steps(config, 1280, 128) is None
    told = few_steps(config, 216, 128)
    assert told is not None
    assert "an epoch has only 1 step (216 samples in batches of 128), so 20 epochs are 20 updates" in told
    assert "--batch_size 8 gives 27" in told
    assert "--epochs 40 gives as many as 10 per epoch would" in (few_steps(config, 40, 8) or "")
    # a batch of 8 does not divide among three processes
    assert "--epochs 29 gives as many" in (few_steps(config, 66, 9, world=3) or "")
    assert "--batch_size" not in what_to_try(config, 66, 9, world=3)


@pytest.mark.parametrize(
    ("samples", "world", "expected"),
    [
        (216, 1, 8),
        (159, 1, 8),
        (10, 1, 8),
        (320, 1, 16),
        (2559, 1, 64),
        (2560, 1, 128),
        (10**6, 1, 128),
        (216, 3, 9),
        (10**6, 3, 129),
        (216, 4, 8),
    ],
)
def test_a_suitable_batch(samples: int, world: int, expected: int) -> None:
    batch = suitable_batch(samples, world)
    assert batch == expected
    assert batch == 8 or world > 1 or samples // batch >= 20
