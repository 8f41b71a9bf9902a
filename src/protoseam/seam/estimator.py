"""The interface of a covariance estimator: what a seam asks of it, and when. See docs/write-your-own.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from torch import Tensor

from protoseam.core.covariance import Reduce, Structure
from protoseam.seam.state import KeepsState

__all__ = ["DEFAULT_FLOOR", "AbstractCovariance", "Floor", "Reduce", "Refreshed"]

Floor = float | Literal["auto"]

DEFAULT_FLOOR = 0.1  # the paper does not state σ0; .01, .1 and .3 differ by .3 points on CIFAR-100


class Refreshed(NamedTuple):
    """What a refresh found.

    Attributes:
        count_C: samples per class; None if no sample was seen.
        floor: the floor σ0 that was asked for, or that was chosen.
        floor_used: the floor that each class needed.
    """

    count_C: Tensor | None
    floor: Tensor
    floor_used: Tensor


class AbstractCovariance(KeepsState, ABC):
    """The interface of an estimator of Σ̂; a subclass writes :meth:`bind` and :meth:`refresh`.

    Attributes:
        factors: what samples are drawn with, of one of the shapes in :mod:`protoseam.core.sampling`; a buffer.
        floor: σ0 of eq:shrinkage, a number or ``"auto"``.
        structure: ``"full"``, ``"diagonal"``, or ``"shared"`` by all classes.
        refreshes: whether :meth:`refresh` makes new factors at all.
    """

    factors: Tensor
    floor: Floor = DEFAULT_FLOOR
    structure: Structure = "full"
    refreshes: bool = True

    @property
    def needs_pass(self) -> bool:
        """Whether :meth:`refresh` needs the embeddings of the training data, from an extra pass."""
        return False

    @property
    def from_batches(self) -> bool:
        """Whether :meth:`refresh` makes factors from what :meth:`observe` was shown."""
        return False

    @abstractmethod
    def bind(self, num_classes: int, dim: int) -> None:
        """Register ``factors``, at first σ0·I (alg:lifted, line 1), and allocate what the estimator needs.

        Args:
            num_classes: number of classes.
            dim: the seam's width.
        """

    @abstractmethod
    def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: Reduce | None) -> Refreshed | None:
        """Make new factors at an epoch's end.

        Args:
            z_NK: embeddings of this process's training data; None without a pass.
            y_N: their labels; None without a pass.
            reduce: sums a tensor in place over all processes; None for one process.

        Returns:
            What was found; None if there was nothing to do.
        """

    def begin(self, rho: float) -> None:
        """Start: called once after :meth:`bind`.

        Args:
            rho: the ρ that holds until an epoch starts.
        """

    def observe(self, z_BK: Tensor, y_B: Tensor) -> None:
        """Take in a training batch; must not wait for the device.

        Args:
            z_BK: embeddings, without a graph.
            y_B: labels.
        """

    def progress(self, rho: float, lr: float | None) -> None:
        """Start an epoch.

        Args:
            rho: the epoch's ρ.
            lr: the learning rate now, if the loop gave it.
        """
