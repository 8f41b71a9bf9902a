"""NLL and ECE against two loops in Python's own floats; what counts as chance."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protoseam.data.resident import suitable_batch
from protoseam.engine.chance import at_chance, few_steps, what_to_try
from protoseam.engine.config import OptimConfig, RunConfig
from protoseam.engine.metrics import calibration_error, log_losses


def naive_nll(logits: list[list[float]], labels: list[int]) -> float:
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        total -= math.log(math.exp(row[label]) / sum(math.exp(value) for value in row))
    return total / len(labels)


def naive_ece(confidences: list[float], correct: list[bool], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [i for i, c in enumerate(confidences) if low < c <= high or (b == 0 and c == 0)]
        if inside:
            accuracy = sum(correct[i] for i in inside) / len(inside)
            confidence = sum(confidences[i] for i in inside) / len(inside)
            total += len(inside) / len(confidences) * abs(accuracy - confidence)
    return total


def test_nll_is_the_mean_log_loss() -> None:
    logits = 3 * torch.randn(40, 7)
    labels = torch.randint(0, 7, (40,))
    found = float(log_losses(logits, labels).mean())
    assert found == pytest.approx(naive_nll(logits.double().tolist(), labels.tolist()), rel=1e-12)
    assert log_losses(torch.tensor([[1000.0, 0.0]]), torch.tensor([1])).tolist() == [1000.0]  # no overflow


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.999), st.booleans()), min_size=1, max_size=60), st.integers(1, 20)
)
def test_ece_is_the_loops(samples: list[tuple[float, bool]], bins: int) -> None:
    # off the borders of the bins, where a float decides
    kept = [(c, hit) for c, hit in samples if abs(c * bins - round(c * bins)) > 1e-9] or [(0.5001, True)]
    confidences, correct = [c for c, _ in kept], [hit for _, hit in kept]
    found = calibration_error(torch.tensor(confidences, dtype=torch.float64), torch.tensor(correct), bins)
    assert found == pytest.approx(naive_ece(confidences, correct, bins), abs=1e-12)


def test_ece_by_hand() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.55, 0.55])
    assert calibration_error(confidence, torch.tensor([True, True, True, False])) == pytest.approx(0.05)
    # a border belongs to the bin below it
    halves = calibration_error(torch.tensor([0.5, 0.6]), torch.tensor([True, False]), bins=2)
    assert halves == pytest.approx(0.55)
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0.0
    assert calibration_error(torch.tensor([1.0]), torch.tensor([False])) == 1.0
    assert calibration_error(torch.tensor([]), torch.tensor([])) == 0.0


@pytest.mark.parametrize(
    ("accuracy", "counts", "chance"),
    [
        (0.20, [12] * 5, True),
        (0.30, [12] * 5, True),
        (0.31, [12] * 5, False),
        (0.60, [50, 50], True),
        (0.61, [50, 50], False),  # 1.5/n would be 75 %
        (0.90, [90, 10], True),  # always the first
        (0.91, [90, 10], False),
        (0.015, [10] * 100, True),
        (0.02, [10] * 100, False),
    ],
)
def test_chance(accuracy: float, counts: list[int], chance: bool) -> None:
    told = at_chance(accuracy, counts, [f"c{i}" for i in range(len(counts))], "test")
    assert (told is not None) == chance
    if told is not None:
        share = 100 * max(counts) / sum(counts)
        assert f"test accuracy {100 * accuracy:.2f} % is at chance: with {len(counts)} classes" in told
        assert f"always answering 'c0' gives {share:.2f} %" in told


def test_no_samples_are_no_chance() -> None:
    assert at_chance(0.0, [0, 0], ["a", "b"], "test") is None


def test_advice_has_numbers() -> None:
    config = RunConfig(data="./mine", epochs=20, variant="protoseam")
    told = what_to_try(config, samples=216, batch_size=128)
    assert "--batch_size 8, --epochs 40, --optim.lr 0.004, --optim.name adamw" in told
    assert "--variant baseline" in told
    adam = dataclasses.replace(config, variant="baseline", optim=OptimConfig(name="adamw", clip=1.0))
    told = what_to_try(adam, samples=216, batch_size=8)
    assert told == "Try one of --epochs 40, --optim.lr 0.003."


def test_few_steps_are_told_with_a_remedy() -> None:
    config = RunConfig(data="./mine", epochs=20)
    assert few_steps(config, 1280, 128) is None
    told = few_steps(config, 216, 128)
    assert told is not None
    assert "an epoch has only 1 step (216 samples in batches of 128), so 20 epochs are 20 updates" in told
    assert "--batch_size 8 gives 27" in told
    assert "--epochs 40 gives as many as 10 per epoch would" in (few_steps(config, 40, 8) or "")


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
