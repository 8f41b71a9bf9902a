"""What a lifted network checks around a training step and between epochs, and the little state that takes.

Data in: a network, a batch or the embeddings of a sweep; data out: errors and warnings. It owns counts and flags that
need no place in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from protoseam.core.discriminant import linear_discriminant, pooled_covariance
from protoseam.core.initializers import forward_sweep
from protoseam.core.sampling import sample
from protoseam.errors import ArgumentError, SeamError
from protoseam.seam.guards import (
    StepGuard,
    check_batch,
    check_terms,
    hard_labels,
    refuse_sharded,
    report_floors,
    warn,
    warn_about_data,
    without_bounds,
)
from protoseam.seam.heads import can_refit
from protoseam.seam.processes import world_size
from protoseam.seam.split import evaluating

if TYPE_CHECKING:
    from protoseam.seam.estimator import Refreshed
    from protoseam.seam.network import LiftedNetwork
    from protoseam.seam.terms import Terms

_UNKNOWN_SIZE = 50_000  # samples of an epoch, where no sweep has counted them
_FEW_STEPS = 10
_SAMPLES = 2000  # drawn for a look at the head
_MOST_CLASSES = 2000  # beyond them a look would hold matrices of n×n doubles, 32 MB each
_COLLAPSED = (
    "all embeddings are equal: N1 has collapsed to a constant (dead ReLUs, usually after too large a step). Start "
    "again with a smaller learning rate, a longer warm-up or a smaller rho_max"
)


class TrainingChecks:
    """The checks of one network. The flags mirror tensors of the network, so that no step waits for the device."""

    def __init__(self, ready: bool) -> None:
        self.ready, self.counted = ready, False  # the prototypes have values; the classes were counted
        self.parts = 2  # of a batch that initialize has read
        self.samples = 0  # of the training data, once counted
        self.trained_on: set[str] = set()  # since the last refresh: "hard" or "mixed" targets
        # Within net.epochs, whether its loader has a length.
        self.loop: Literal["counted", "endless"] | None = None
        self.own = True  # False: a training engine checks steps and finiteness itself
        self._looked = self._whole = False
        self._forget()

    def _forget(self) -> None:
        self._guard = StepGuard()
        self._last_total: Tensor | None = None
        self._last_batch: tuple[Tensor, Tensor] | None = None  # its embeddings and targets
        self._since_progress = self._since_refresh = 0  # samples that the objective has seen
        self._steps = 0  # of this epoch
        self._modes: set[bool] = set()  # of the network in this epoch's steps: train mode or not
        self._said: set[str] = set()

    def leave(self) -> None:
        """Leave the checks of steps and of finiteness to the caller."""
        self.own = False

    def loaded(self, net: LiftedNetwork) -> None:
        """Follow a state that was loaded; going back to a checkpoint ends a divergence."""
        self.counted_now(net)
        self.ready, self.counted = bool(net.ready), bool(net.class_count.any())
        self._forget()
        self._guard.moved = int(net.progress[0]) > 0

    def counted_now(self, net: LiftedNetwork) -> None:
        """Follow new class counts."""
        self.counted, self.samples = True, int(net.class_count.sum())

    def must_be_ready(self) -> None:
        """Refuse prototypes without values."""
        if not self.ready:
            raise SeamError(
                "the prototypes have no values yet: FSInit puts them on the class means. Call "
                "net.initialize(loader) before training, or lift with init='random'. With Lightning or the Trainer, "
                "SeamCallback makes the call"
            )

    def must_have_values(self, net: LiftedNetwork) -> None:
        """The same outside training, where the tensor itself decides: an average of weights copies no flag.

        Training does not ask the tensor, which is 0 before FSInit, but may have been drawn with all parameters.
        """
        if not self.ready and not bool(net.prototypes.any()):
            self.must_be_ready()

    def must_be_counted(self, net: LiftedNetwork) -> None:
        """Refuse weights of the classes by counts that there are not."""
        if net.class_weights == "frequency" and not self.counted:
            raise SeamError(
                "class_weights='frequency' needs the class counts |D_i|: call net.initialize(loader) first"
            )

    def must_be_whole(self, net: LiftedNetwork) -> None:
        """Refuse sharded parameters, once."""
        if not self._whole:
            refuse_sharded(net)
            self._whole = True

    def class_means(self, count_C: Tensor, mean_CK: Tensor) -> Tensor:
        """FSInit's prototypes; if a class has no sample, the error says where the labels were looked for."""
        try:
            return forward_sweep(count_C, mean_CK)
        except ArgumentError as error:
            if self.parts == 2:
                raise
            raise ArgumentError(
                f"{error}. The labels were read from the second of the {self.parts} parts of a batch"
            ) from None

    def look(self, net: LiftedNetwork, z_NK: Tensor, count_C: Tensor) -> None:
        """Say once what only the data can tell."""
        if not self._looked:
            self._looked = True
            warn_about_data(z_NK, count_C, net.dim, net.covariance.structure, net.covariance.floor)

    def before_step(self, net: LiftedNetwork, z_BK: Tensor, y: Tensor) -> Tensor:
        """Check what can go wrong before a step; the targets, as labels where they are one-hot."""
        self.must_be_ready()
        self.must_be_counted(net)
        check_batch(z_BK, y, net.dim, net.num_classes, values=z_BK.device.type == "cpu")
        if y.is_floating_point() and (labels := hard_labels(y)) is not None:
            y = labels
        if torch.is_grad_enabled() and self.own:
            self._modes.add(net.training)
        if net.training and torch.is_grad_enabled():
            self.trained_on.add("mixed" if y.is_floating_point() else "hard")
            if self.own:
                self._guard.step(net.prototypes, _witness(net))
                self._count(len(y) * world_size(), net.covariance.refreshes)
        return y

    def _count(self, samples: int, refreshes: bool) -> None:
        """Count a training batch, and name the calls that an epoch lacks."""
        self._since_progress += samples
        self._since_refresh += samples
        self._steps += 1
        if self.loop is not None:  # which makes the calls, however often a batch is evaluated
            return
        epoch = self.samples or _UNKNOWN_SIZE
        lacking = []
        if self._since_progress > 2 * epoch:
            lacking.append("net.set_progress(epoch, epochs) before each epoch, so that ρ rises")
        if self._since_refresh > 2 * epoch and refreshes:
            lacking.append("net.refresh(loader) after it, so that N2 learns the spread of the classes")
        if lacking:
            seen = max(self._since_progress, self._since_refresh)
            self._say(
                "forgotten",
                f"net.objective has seen {seen:,} samples"
                f"{f', {seen / self.samples:.1f} times the training data,' if self.samples else ''} "
                f"without a call of {' and of '.join(lacking)}. Write the loop as "
                "'for epoch in net.epochs(loader, epochs):', which makes these calls",
            )

    def after_step(self, net: LiftedNetwork, terms: Terms, z_BK: Tensor, y_B: Tensor) -> None:
        """Check that the terms are finite: now on a CPU, between epochs elsewhere."""
        if self.own and net.training and torch.is_grad_enabled():
            self._last_batch = z_BK.detach(), y_B.detach()
        if self.own and y_B.device.type == "cpu":
            parts = {k: v for k, v in terms._asdict().items() if k != "total"}
            check_terms(parts, z_BK, y_B, without_bounds(net))
        elif self.own:
            self._last_total = terms.total.detach()

    def between_epochs(self, net: LiftedNetwork) -> None:
        """Check that the prototypes move, that the last objective was finite, and its embeddings not all equal."""
        if self.own:
            self._guard.epoch(net.prototypes, _witness(net))
        if self._last_total is not None and not math.isfinite(float(self._last_total)):
            raise SeamError(
                "the objective is not finite: training has diverged. Lower the learning rate, clip gradients, or let "
                f"ρ grow more slowly (a longer schedule, a smaller rho_max){without_bounds(net)}"
            )

        if self._last_batch is not None:  # running moments remember what was before a collapse
            z_BK, y_B = self._last_batch
            self._last_batch = None
            if bool((y_B != y_B[:1]).any()):
                self.collapsed(net, z_BK)

    def collapsed(self, net: LiftedNetwork, z_NK: Tensor) -> None:
        """Say once that all of these embeddings are equal: no head can tell the classes apart."""
        if len(z_NK) > 1 and torch.equal(*torch.aminmax(z_NK, dim=0)):
            self._say("collapse", _COLLAPSED + without_bounds(net))

    def progressed(self, rho: float, before: float, epoch: int, epochs: int, bounded: bool) -> None:
        """An epoch starts at ρ; a jump of ρ is dangerous where no bound holds the gradients."""
        if rho > 4 * before and not bounded:
            warn(
                f"ρ jumps from {before:.3g} to {rho:.3g} between epochs {max(epoch - 1, 0)} and {epoch} of {epochs}. "
                "The consensus curvature scales with lr·ρ·‖features‖², so a short schedule can diverge: train "
                "longer, raise rho_min, or lower the learning rate",
                level=3,
            )
        self._since_progress = self._steps = 0

    def rates(self, given: Sequence[float], groups: Sequence[dict[str, Any]]) -> None:
        """Check that no scheduler, finder or line of the loop has set all groups to one rate."""
        now = [float(group["lr"]) for group in groups]
        if self.own and len(set(given)) > 1 and len(set(now)) == 1 and now[0] > 0:
            self._say(
                "rates",
                f"N1, N2 and the prototypes now learn at the same rate, {now[0]:.2g}, but net.param_groups gave them "
                f"{' and '.join(f'{rate:.2g}' for rate in sorted(set(given)))}: a line or a "
                "scheduler that knows one rate has set all groups to it. Scale each group's own rate, or give the "
                "scheduler one for each of net.param_groups: max_lr=[g['lr'] for g in "
                "optimizer.param_groups] for OneCycleLR, or a list swa_lr=[…] for SWALR",
            )

    def refreshed(self, net: LiftedNetwork, fitted: bool = False) -> None:
        """An epoch has ended: judge how far training has come, unless the classifier was just fitted anew."""
        self._since_refresh = 0
        if self._modes == {False}:
            self._say(
                "mode",
                "this epoch's steps were taken in eval mode, in which dropout and batch statistics rest and the spread "
                "of the classes is not followed: call net.train() before each epoch's batches",
            )
        self._modes.clear()
        unread = self.loop == "endless" and not self._steps and self._guard.still
        if unread:
            self._say(
                "no step",
                "this epoch took no step: did the loader yield no batch? An iterable data set over a generator is "
                "empty from the second pass on, and net.epochs makes the first: open the data anew in its __iter__",
            )
        bounds, gradient = net._bounds, net.prototypes.grad
        if self.own and bounds is not None and not bounds.used and gradient is not None:
            self._say("unbounded", f"this epoch's steps had no limits{without_bounds(net)}")
        if 0 < self._steps < _FEW_STEPS:
            self._say(
                "steps",
                f"this epoch had {self._steps} steps, and N2 and the prototypes learn a little in each: take smaller "
                f"batches, so that an epoch has at least {_FEW_STEPS} steps, or train for more epochs",
            )
        epoch, epochs = (int(v) for v in net.progress)
        late = epochs > 1 and epoch + 1 >= max(3, epochs / 5)
        idle = unread or self._guard.idle or net.num_classes > _MOST_CLASSES
        told = "collapse" in self._said or {"near", "head"} <= self._said
        if self.own and late and not idle and not told and not fitted:
            with evaluating(net.n2):  # dropout's draws and BatchNorm's statistics stay as they are
                self._judge(net, f"after epoch {epoch + 1} of {epochs}")

    @torch.no_grad()
    def _judge(self, net: LiftedNetwork, when: str) -> None:
        """Are the classes apart, and has the head learned its own samples?"""
        C, factors = net.num_classes, net.covariance.factors
        s_CK = net.prototypes.double()
        gap, (i, j) = _nearest(s_CK)
        if gap < 1 / net.alpha:
            self._say(
                "near",
                f"{when} the prototypes of classes {i} and {j} are {gap:.2g} apart, "
                f"closer than the 1/α = {1 / net.alpha:.2g} over which repulsion acts: N2 can hardly tell them apart. "
                "Train for more epochs, or raise the seam's rate (net.param_groups(lr, seam_lr=…))",
            )
        generator = torch.Generator(s_CK.device).manual_seed(0)  # the caller's draws stay as they are
        draws = max(1, min(_SAMPLES // C, 20))
        z_NK = sample(net.prototypes, factors, draws=draws, generator=generator).flatten(0, 1)
        y_N = torch.arange(C, device=z_NK.device).repeat(draws)
        confidence_N, answer_N = net.head(z_NK).double().softmax(1).max(1)
        learned, sure = float((answer_N == y_N).double().mean()), float(confidence_N.mean())
        weight_CK, bias_C = linear_discriminant(s_CK, pooled_covariance(factors, net.dim))
        best = float(((z_NK.double() @ weight_CK.T + bias_C).argmax(1) == y_N).double().mean())
        if learned < best - 0.1 or sure < learned - 0.3:
            rate = "the seam's rate (net.param_groups(lr, seam_lr=…))"
            why = f"it is undertrained. Raise {rate}, take smaller batches"
            if sure > learned:  # of wrong answers: its last steps threw it about
                why = f"its steps are too large. Lower {rate}, let the rates decay"
            self._say(
                "head",
                f"{when} N2 classifies {100 * learned:.0f} % of its own samples rightly, "
                f"with a mean confidence of {100 * sure:.0f} %, where a linear discriminant would get "
                f"{100 * best:.0f} %: {why}{', or set N2 in closed form: net.refit_head()' * can_refit(net)}",
            )

    def floors(self, net: LiftedNetwork, found: Refreshed) -> None:
        """Say once that covariances outgrow their floor."""
        if message := report_floors(found.floor, found.floor_used, without_bounds(net)):
            self._say("floor", message)

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(message)


def _nearest(s_CK: Tensor) -> tuple[float, tuple[int, int]]:
    """The smallest distance between two prototypes, and whose it is."""
    distance_CC = torch.cdist(s_CK, s_CK)
    distance_CC.fill_diagonal_(torch.inf)
    at = int(distance_CC.argmin())
    return float(distance_CC.flatten()[at]), divmod(at, len(s_CK))


def _witness(net: LiftedNetwork) -> Tensor | None:
    """A trainable tensor outside the seam, by which the guard sees that steps are taken."""
    return next((p for p in net.n2.parameters() if p.requires_grad), None)
