"""Schedules of the penalty weight: a callable ``(epoch, epochs) → ρ``, with epoch counted from 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from protoseam.errors import ArgumentError

__all__ = ["ConstantRho", "Schedule", "SineAnneal", "rho_at", "sine_anneal"]

Schedule = Callable[[int, int], float]


def sine_anneal(epoch: int, epochs: int, rho_min: float, rho_max: float) -> float:
    """ρ(t) = ρmin + (ρmax − ρmin)·sin(π/2·(t−1)/(T−1)) with t = epoch + 1 (eq:anneal).

    T = 1 has no ramp, and the formula is 0/0 there: the only epoch is the first, and gets ρmin; at ρmax untrained
    classes would be pressed together at once. Past the last epoch ρ stays at ρmax.

    Args:
        epoch: number of the epoch, from 0.
        epochs: number of epochs in total.
        rho_min: ρ in the first epoch.
        rho_max: ρ in the last epoch.

    Returns:
        ρ.

    Raises:
        ArgumentError: ``epochs`` is below 1 or ``epoch`` negative.
    """
    if epochs < 1 or epoch < 0:
        raise ArgumentError(
            f"the schedule needs epochs ≥ 1 and epoch ≥ 0, got epoch={epoch}, epochs={epochs}"
        )
    progress = min(epoch / max(epochs - 1, 1), 1.0)
    return rho_min + (rho_max - rho_min) * math.sin(0.5 * math.pi * progress)


def rho_at(schedule: Schedule, epoch: int, epochs: int) -> float:
    """A schedule's ρ, checked. One that divides by T − 1 begins a single epoch where it begins two."""
    try:
        rho = float(schedule(epoch, epochs))
    except ZeroDivisionError:
        if epochs != 1:
            raise
        rho = float(schedule(0, 2))
    if not 0 < rho < math.inf:
        raise ArgumentError(
            f"the schedule gives ρ = {rho} for epoch {epoch} of {epochs}: ρ must be positive and finite"
        )
    return rho


@dataclass(frozen=True)
class SineAnneal:
    """eq:anneal as an object: ``SineAnneal(1, 16)(epoch, epochs)``.

    Args:
        rho_min: ρ in the first epoch. 1: the paper does not state it; .1 and 1 differ by .2 points on CIFAR-100.
        rho_max: ρ in the last epoch; 16 (paper, §protocol).
    """

    rho_min: float = 1.0  # the paper does not state it; .1 and 1 differ by .2 points on CIFAR-100
    rho_max: float = 16.0  # paper, §protocol

    def __post_init__(self) -> None:
        if not 0 < self.rho_min <= self.rho_max:
            raise ArgumentError(f"need 0 < rho_min ≤ rho_max, got {self.rho_min} and {self.rho_max}")

    def __call__(self, epoch: int, epochs: int) -> float:
        """Return ρ in an epoch, counted from 0, of so many."""
        return sine_anneal(epoch, epochs, self.rho_min, self.rho_max)


@dataclass(frozen=True)
class ConstantRho:
    """The same ρ in every epoch.

    Args:
        rho: the penalty ρ; 16, where the paper's schedule ends.
    """

    rho: float = 16.0

    def __post_init__(self) -> None:
        if not self.rho > 0:
            raise ArgumentError(f"rho must be positive, got {self.rho}")

    def __call__(self, epoch: int, epochs: int) -> float:
        """Return ρ."""
        return self.rho
