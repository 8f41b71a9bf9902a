"""The epochs of a training loop, and warnings about calls it lacks or training that makes no progress.

Data in: how many samples the objective has seen and the state of the seam; data out: warnings. It owns the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protoseam.core.discriminant import linear_discriminant, pooled_covariance
from protoseam.core.sampling import sample
from protoseam.errors import ArgumentError, ArgumentTypeError
from protoseam.seam.guards import warn

if TYPE_CHECKING:
    from protoseam.seam.lifted import Lifted

_UNKNOWN_SIZE = 50_000  # samples of an epoch, where no sweep has counted them
_FEW_STEPS = 10
_SAMPLES = 2000  # drawn for a look at the head
_MOST_CLASSES = 2000  # beyond them a look would hold matrices of n×n doubles, 32 MB each


def each_epoch(
    net: Lifted, loader: Iterable[Any], epochs: int, start: int, looked_at: Iterable[Any]
) -> Iterator[int]:
    """See :meth:`Lifted.epochs`."""
    if not 0 <= start <= epochs or epochs < 1:
        raise ArgumentError(f"need 0 ≤ start ≤ epochs and epochs ≥ 1, got start={start}, epochs={epochs}")
    for data in (loader, looked_at):
        if isinstance(data, Iterator):
            raise ArgumentTypeError(
                f"net.epochs goes over the data more than once, but a {type(data).__name__} can be read only once: "
                "pass a DataLoader or a list of batches"
            )
    return _epochs(net, epochs, start, looked_at)  # the checks above come at once, not with the first epoch


def _epochs(net: Lifted, epochs: int, start: int, looked_at: Iterable[Any]) -> Iterator[int]:
    if not net.is_initialized:
        net.initialize(looked_at)
    for epoch in range(start, epochs):
        net.set_progress(epoch, epochs, lr=net._rate)
        yield epoch
        net.refresh(looked_at)


class LoopGuard:
    """Counts what the objective sees between the calls that an epoch needs, and judges the seam once an epoch."""

    def __init__(self) -> None:
        self.since_progress = self.since_refresh = self.steps = 0
        self.said: set[str] = set()

    def step(self, samples: int, size: int, refreshes: bool) -> None:
        """A training batch of ``samples``; an epoch has ``size`` (0: unknown)."""
        self.since_progress += samples
        self.since_refresh += samples
        self.steps += 1
        epoch = size or _UNKNOWN_SIZE
        lacking = []
        if self.since_progress > 2 * epoch:
            lacking.append("net.set_progress(epoch, epochs) before each epoch, so that ρ rises")
        if self.since_refresh > 2 * epoch and refreshes:
            lacking.append("net.refresh(loader) after it, so that N2 learns the spread of the classes")
        if lacking:
            seen = max(self.since_progress, self.since_refresh)
            self._say(
                "forgotten",
                f"net.objective has seen {seen:,} samples"
                f"{f', {seen / size:.1f} times the training data,' if size else ''} "
                f"without a call of {' and of '.join(lacking)}. Write the loop as "
                "'for epoch in net.epochs(loader, epochs):', which makes these calls",
            )

    def progressed(self) -> None:
        """Start an epoch."""
        self.since_progress = self.steps = 0

    def rates(self, given: Sequence[float], now: Sequence[float]) -> None:
        """Compare the rates that the groups were given with those an optimizer's scheduler has set."""
        if len(set(given)) > 1 and len(set(now)) == 1 and now[0] > 0:
            self._say(
                "rates",
                f"N1, N2 and the prototypes now learn at the same rate, {now[0]:.2g}, but net.param_groups gave them "
                f"{' and '.join(f'{rate:.2g}' for rate in sorted(set(given)))}: a scheduler that takes one rate sets "
                "all groups to it. Give it one for each: OneCycleLR(optimizer, max_lr=[g['lr'] for g in "
                "optimizer.param_groups], …)",
            )

    def refreshed(self) -> None:
        """An epoch has ended."""
        self.since_refresh = 0
        if 0 < self.steps < _FEW_STEPS:
            self._say(
                "steps",
                f"this epoch had {self.steps} steps, and N2 and the prototypes learn a little in each: take smaller "
                f"batches, so that an epoch has at least {_FEW_STEPS} steps, or train for more epochs",
            )

    @torch.no_grad()
    def judge(
        self,
        head: Callable[[Tensor], Tensor],
        prototypes_CK: Tensor,
        factors: Tensor,
        alpha: float,
        epoch: int,
        epochs: int,
    ) -> None:
        """After a fifth of the epochs: are the classes apart, and has the head learned its own samples?"""
        C, K = prototypes_CK.shape
        if C > _MOST_CLASSES or epoch + 1 < max(3, epochs / 5) or {"near", "head"} <= self.said:
            return
        s_CK = prototypes_CK.double()
        gap, (i, j) = _nearest(s_CK)
        if gap < 1 / alpha:
            self._say(
                "near",
                f"after epoch {epoch + 1} of {epochs} the prototypes of classes {i} and {j} are {gap:.2g} apart, "
                f"closer than the 1/α = {1 / alpha:.2g} over which repulsion acts: N2 can hardly tell them apart. "
                "Train for more epochs, or raise the seam's rate (net.param_groups(lr, seam_lr=…))",
            )
        generator = torch.Generator(s_CK.device).manual_seed(0)  # the caller's draws stay as they are
        draws = max(1, min(_SAMPLES // C, 20))
        z_NK = sample(prototypes_CK, factors, draws=draws, generator=generator).flatten(0, 1)
        y_N = torch.arange(C, device=z_NK.device).repeat(draws)
        probability_NC = head(z_NK).double().softmax(1)
        confidence, answer_N = (v.double() for v in probability_NC.max(1))
        learned, sure = float((answer_N == y_N).double().mean()), float(confidence.mean())
        weight_CK, bias_C = linear_discriminant(s_CK, pooled_covariance(factors, K))
        best = float(((z_NK.double() @ weight_CK.T + bias_C).argmax(1) == y_N).double().mean())
        if learned < best - 0.1 or sure < learned - 0.3:
            rate = "the seam's rate (net.param_groups(lr, seam_lr=…))"
            why = f"it is undertrained. Raise {rate}, take smaller batches"
            if sure > learned:  # of wrong answers: its last steps threw it about
                why = f"its steps are too large. Lower {rate}, let the rates decay"
            self._say(
                "head",
                f"after epoch {epoch + 1} of {epochs} N2 classifies {100 * learned:.0f} % of its own samples rightly, "
                f"with a mean confidence of {100 * sure:.0f} %, where a linear discriminant would get "
                f"{100 * best:.0f} %: {why}, or set N2 in closed form: net.refit_head()",
            )

    def _say(self, what: str, message: str) -> None:
        if what not in self.said:
            self.said.add(what)
            warn(message)


def _nearest(s_CK: Tensor) -> tuple[float, tuple[int, int]]:
    """The smallest distance between two prototypes, and whose it is."""
    distance_CC = torch.cdist(s_CK, s_CK)
    distance_CC.fill_diagonal_(torch.inf)
    at = int(distance_CC.argmin())
    return float(distance_CC.flatten()[at]), divmod(at, len(s_CK))
