"""What a lifted network checks around a training step and between epochs, and the little state that takes.

Data in: a network, a batch or the embeddings of a sweep; data out: errors and warnings. It owns counts and flags that
need no place in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protoseam.errors import SeamError
from protoseam.seam.guards import (
    StepGuard,
    check_batch,
    check_terms,
    hard_labels,
    refuse_sharded,
    warn,
    warn_about_data,
)
from protoseam.seam.loop import LoopGuard
from protoseam.seam.processes import world_size
from protoseam.seam.split import evaluating

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork
    from protoseam.seam.terms import Terms


class TrainingChecks:
    """The checks of one network. The flags mirror tensors of the network, so that no step waits for the device."""

    def __init__(self, ready: bool) -> None:
        self.ready, self.counted = ready, False  # the prototypes have values; the classes were counted
        self.samples = 0  # of the training data, once counted
        self.trained_on: set[str] = set()  # since the last refresh: "hard" or "mixed" targets
        self._own = True  # False: a training engine checks steps and finiteness itself
        self._looked = self._whole = False
        self._guard, self._loop = StepGuard(), LoopGuard()
        self._last_total: Tensor | None = None

    def leave(self) -> None:
        """Leave the checks of steps and of finiteness to the caller."""
        self._own = False

    def loaded(self, net: LiftedNetwork) -> None:
        """Follow a state that was loaded; going back to a checkpoint ends a divergence."""
        self.counted_now(net)
        self.ready, self.counted = bool(net.ready), bool(net.class_count.any())
        self._guard, self._loop = StepGuard(), LoopGuard()
        self._guard.moved = int(net.progress[0]) > 0
        self._last_total = None

    def counted_now(self, net: LiftedNetwork) -> None:
        """Follow new class counts."""
        self.counted, self.samples = True, int(net.class_count.sum())

    def must_be_ready(self) -> None:
        """Refuse prototypes without values."""
        if not self.ready:
            raise SeamError(
                "the prototypes have no values yet: FSInit puts them on the class means. Call "
                "net.initialize(loader) before training, or lift with init='random'"
            )

    def must_be_whole(self, net: LiftedNetwork) -> None:
        """Refuse sharded parameters, once."""
        if not self._whole:
            refuse_sharded(net)
            self._whole = True

    def look(self, net: LiftedNetwork, z_NK: Tensor, count_C: Tensor) -> None:
        """Say once what only the data can tell."""
        if not self._looked:
            self._looked = True
            warn_about_data(z_NK, count_C, net.dim, net.covariance.structure, net.covariance.floor)

    def before_step(self, net: LiftedNetwork, z_BK: Tensor, y: Tensor) -> Tensor:
        """Check what can go wrong before a step; the targets, as labels where they are one-hot."""
        self.must_be_ready()
        if net.class_weights == "frequency" and not self.counted:
            raise SeamError(
                "class_weights='frequency' needs the class counts |D_i|: call net.initialize(loader) before training"
            )
        check_batch(z_BK, y, net.dim, net.num_classes, values=z_BK.device.type == "cpu")
        if y.is_floating_point() and (labels := hard_labels(y)) is not None:
            y = labels
        if net.training and torch.is_grad_enabled():
            self.trained_on.add("mixed" if y.is_floating_point() else "hard")
            if self._own:
                self._guard.step(net.prototypes, _witness(net))
                self._loop.step(len(y) * world_size(), self.samples, net.covariance.refreshes)
        return y

    def after_step(self, terms: Terms, z_BK: Tensor, y_B: Tensor) -> None:
        """Check that the terms are finite: now on a CPU, between epochs elsewhere."""
        if self._own and y_B.device.type == "cpu":
            check_terms({k: v for k, v in terms._asdict().items() if k != "total"}, z_BK, y_B)
        elif self._own:
            self._last_total = terms.total.detach()

    def between_epochs(self, net: LiftedNetwork) -> None:
        """Check that the prototypes move, and that the last objective was finite."""
        if self._own:
            self._guard.epoch(net.prototypes, _witness(net))
        if self._last_total is not None and not math.isfinite(float(self._last_total)):
            raise SeamError(
                "the objective is not finite: training has diverged. Lower the learning rate, clip gradients, or let "
                "ρ grow more slowly (a longer schedule, a smaller rho_max)"
            )

    def progressed(self, rho: float, before: float, epoch: int, epochs: int, bounded: bool) -> None:
        """An epoch starts at ρ; a jump of ρ is dangerous where no bound holds the gradients."""
        if rho > 4 * before and not bounded:
            warn(
                f"ρ jumps from {before:.3g} to {rho:.3g} between epochs {max(epoch - 1, 0)} and {epoch} of {epochs}. "
                "The consensus curvature scales with lr·ρ·‖features‖², so a short schedule can diverge: train "
                "longer, raise rho_min, or lower the learning rate",
                level=3,
            )
        self._loop.progressed()

    def rates(self, given: Sequence[float], groups: Sequence[dict[str, Any]]) -> None:
        """Check that a scheduler (which leaves its initial rate in a group) has not set all groups to one rate."""
        if self._own and all("initial_lr" in group for group in groups):
            self._loop.rates(given, [float(group["lr"]) for group in groups])

    def refreshed(self, net: LiftedNetwork) -> None:
        """An epoch has ended: judge how far training has come."""
        self._loop.refreshed()
        epoch, epochs = (int(v) for v in net.progress)
        if self._own and epochs > 1:
            with evaluating(net.n2):  # dropout's draws and BatchNorm's statistics stay as they are
                self._loop.judge(net.head, net.prototypes, net.covariance.factors, net.alpha, epoch, epochs)


def _witness(net: LiftedNetwork) -> Tensor | None:
    """A trainable tensor outside the seam, by which the guard sees that steps are taken."""
    return next((p for p in net.n2.parameters() if p.requires_grad), None)
