"""ρ(t): eq:anneal with the paper's t from 1, constants, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import oracles
import pytest

from protoseam.core import ConstantRho, SineAnneal, sine_anneal


@pytest.mark.parametrize("epochs", [2, 3, 10, 200])
def test_the_papers_formula(epochs: int) -> None:
    for epoch in range(epochs):
        expected = oracles.anneal(epoch + 1, epochs, 0.5, 8.0)
        assert sine_anneal(epoch, epochs, 0.5, 8.0) == pytest.approx(expected, rel=1e-14)
        assert SineAnneal(0.5, 8.0)(epoch, epochs) == sine_anneal(epoch, epochs, 0.5, 8.0)


def test_ends() -> None:
    anneal = SineAnneal(1, 16)
    assert anneal(0, 200) == 1.0
    assert anneal(199, 200) == 16.0


def test_one_epoch_gets_the_first_value() -> None:
    assert sine_anneal(0, 1, 1.0, 16.0) == 1.0


@pytest.mark.parametrize(("epoch", "epochs"), [(5, 3), (1, 1), (1000, 200)])
def test_past_the_end_it_stays(epoch: int, epochs: int) -> None:
    assert sine_anneal(epoch, epochs, 1.0, 16.0) == 16.0


def test_rises_fastest_at_first() -> None:
    rho = [SineAnneal()(epoch, 50) for epoch in range(50)]
    steps = [b - a for a, b in itertools.pairwise(rho)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)


def test_defaults_and_values_that_cannot_be_changed() -> None:
    assert (SineAnneal().rho_min, SineAnneal().rho_max) == (1.0, 16.0)
    assert ConstantRho().rho == 16.0
    for schedule, field in ((SineAnneal(), "rho_min"), (ConstantRho(), "rho")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field, 2.0)


def test_constant() -> None:
    assert [ConstantRho(0.3)(epoch, 5) for epoch in range(5)] == [0.3] * 5
    assert SineAnneal(2, 2)(1, 3) == 2.0


@pytest.mark.parametrize(("epoch", "epochs"), [(0, 0), (-1, 5), (0, -1)])
def test_impossible_epochs(epoch: int, epochs: int) -> None:
    with pytest.raises(ValueError, match=rf"epoch={epoch}, epochs={epochs}"):
        sine_anneal(epoch, epochs, 1.0, 16.0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_impossible_ranges(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="need 0 < rho_min ≤ rho_max"):
        SineAnneal(low, high)


@pytest.mark.parametrize("rho", [0.0, -1.0, float("nan")])
def test_impossible_constants(rho: float) -> None:
    with pytest.raises(ValueError, match="rho must be positive"):
        ConstantRho(rho)
