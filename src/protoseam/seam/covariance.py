"""Covariance estimators: what the seam knows of Σ̂, and the factors it samples with.

An estimator is a small object (``ExactCovariance(floor=0.1)``) that :func:`protoseam.lift` copies and binds to
its classes and width. Bound, it owns the factors, a buffer, and running moments where there are any: both move with the
network and are part of its ``state_dict``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.core.covariance import (
    Moments,
    Structure,
    automatic_floor,
    check_structure,
    class_factors,
    empty_moments,
    factorize,
    normalise_scatter,
    or_one,
    scatter_shape,
    split_half_error,
)
from protoseam.core.merging import between_scatter, merge_batch_, merge_moments
from protoseam.errors import ArgumentError
from protoseam.seam.estimator import DEFAULT_FLOOR, AbstractCovariance, Floor, Reduce, Refreshed
from protoseam.seam.processes import world_size

__all__ = [
    "DEFAULT_FLOOR",
    "AbstractCovariance",
    "ExactCovariance",
    "IsotropicCovariance",
    "Refreshed",
    "RunningCovariance",
    "SwitchCovariance",
]

_GOLDEN = 2654435769  # 2**32 over the golden ratio: multiples of it fall evenly, whatever their spacing


def _check_floor(floor: Floor) -> Floor:
    if floor != "auto" and not (isinstance(floor, int | float) and 0 < floor < float("inf")):
        raise ArgumentError(
            f"floor σ0 must be a positive number or 'auto', got {floor!r}: without it a collapsed class has "
            "no positive definite covariance (eq:shrinkage)"
        )
    return floor


def _floor_factors(num_classes: int, dim: int, structure: Structure, floor: Floor) -> Tensor:
    sigma0 = DEFAULT_FLOOR if floor == "auto" else floor
    shape = scatter_shape(num_classes, dim, structure)
    eye = torch.ones(dim) if structure == "diagonal" else torch.eye(dim)
    return (sigma0 * eye).expand(shape).clone()


class ExactCovariance(AbstractCovariance):
    """Σ̂ from one extra pass over the data at each epoch's end (eq:covariance; the paper's benchmarks).

    Args:
        floor: σ0 of Σ̃ = Σ̂ + σ0²I (eq:shrinkage), a number, or ``"auto"`` for σ0* of the bound. 0.1: the paper does not
            state it; .01, .1 and .3 differ by .3 points on CIFAR-100.
        structure: ``"full"`` (paper), ``"diagonal"``, or ``"shared"`` by all classes.

    Raises:
        ArgumentError: the floor is not positive, or the structure unknown.
    """

    def __init__(self, floor: Floor = DEFAULT_FLOOR, structure: Structure = "full") -> None:
        super().__init__()
        self.floor, self.structure = _check_floor(floor), check_structure(structure)

    @property
    def needs_pass(self) -> bool:
        return True

    def bind(self, num_classes: int, dim: int) -> None:
        self.num_classes = num_classes
        self.register_buffer("factors", _floor_factors(num_classes, dim, self.structure, self.floor))

    def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: Reduce | None) -> Refreshed:
        return _refresh_exactly(self.factors, z_NK, y_N, self.num_classes, self.floor, self.structure, reduce)

    def extra_repr(self) -> str:
        return f"floor={self.floor}, structure={self.structure!r}"


def _refresh_exactly(
    factors: Tensor,
    z_NK: Tensor | None,
    y_N: Tensor | None,
    num_classes: int,
    floor: Floor,
    structure: Structure,
    reduce: Reduce | None,
) -> Refreshed:
    if z_NK is None or y_N is None:
        raise ArgumentError("the exact covariance is estimated from the data: give its embeddings and labels")
    found = class_factors(z_NK, y_N, num_classes, floor, structure=structure, reduce=reduce, out=factors)
    return Refreshed(found.count_C, found.floor, found.floor_used)


class RunningCovariance(AbstractCovariance):
    """Σ̂ accumulated during training (after alg:lifted): no extra pass, a few small products per step.

    Centred moments are merged batch by batch (Chan), and each class is described by about its last
    ``window`` samples around a mean of about its last ``mean_window``: a mean that lagged behind embeddings
    which move fast within an epoch would inflate Σ̂ by the square of its lag. The windows count samples of a class:
    one of 4 images is described by its last 64 epochs at the default of 256, so give small classes a smaller one.

    Args:
        floor: as for :class:`ExactCovariance`.
        structure: as for :class:`ExactCovariance`.
        window: samples per class that Σ̂ describes; None: 256 or 8 per dimension, whichever is more.
        mean_window: samples per class that the mean describes. 32: a drift of 10 σ in 500 samples then adds 40 % to a
            variance.

    Raises:
        ArgumentError: the floor is not positive, the structure unknown, or a window below 2.
    """

    steps: Tensor

    def __init__(
        self,
        floor: Floor = DEFAULT_FLOOR,
        structure: Structure = "full",
        window: int | None = None,
        mean_window: int = 32,
    ) -> None:
        super().__init__()
        for name, samples in {"window": window, "mean_window": mean_window}.items():
            if samples is not None and samples < 2:
                raise ArgumentError(f"{name} is a number of samples per class, at least 2; got {samples}")
        self.floor, self.structure = _check_floor(floor), check_structure(structure)
        self.window, self.mean_window = window, mean_window

    def bind(self, num_classes: int, dim: int) -> None:
        # 8 samples per dimension leave a relative error of about √(k/m') = 35 % (eq:vershynin), and are forgotten
        # within half an epoch of CIFAR-100
        self.effective_window = float(max(256, 8 * dim) if self.window is None else self.window)
        self.register_buffer("factors", _floor_factors(num_classes, dim, self.structure, self.floor))
        # ε̄ of floor="auto" compares two halves of each class
        self.halves = 2 if self.floor == "auto" else 1
        if self.halves == 2:
            self.keep(steps=torch.zeros((), dtype=torch.int64))
        for half in range(self.halves):  # of this process's samples, until refresh pools them
            moments = empty_moments(num_classes, dim, self.structure)._asdict()
            self.keep(**{f"{name}_{half}": value for name, value in moments.items()})

    @property
    def from_batches(self) -> bool:
        return True

    def _moments(self, half: int) -> Moments:
        return Moments(*(getattr(self, f"{name}_{half}") for name in Moments._fields))

    def observe(self, z_BK: Tensor, y_B: Tensor) -> None:
        # a window is shared by the halves, and by the processes whose moments are merged
        parts = self.halves * world_size()
        windows = {"window": self.effective_window / parts, "mean_window": self.mean_window / parts}
        if self.halves == 1:
            merge_batch_(self._moments(0), z_BK, y_B, **windows)
            return
        # Every other sample of a class, from a start that moves by the golden ratio with each step: a class with one
        # sample in each batch, or in every n-th, gets to both halves too, in whatever order the data comes.
        fraction = (self.steps * _GOLDEN) % 2**32
        if len(y_B) == 1:  # the halves change places instead: shapes must not depend on the step
            for one, other in zip(self._moments(0), self._moments(1), strict=True):
                kept = torch.where(fraction < 2**31, one, other)
                other.copy_(torch.where(fraction < 2**31, other, one))
                one.copy_(kept)
            merge_batch_(self._moments(0), z_BK, y_B, **windows)
        else:
            order_B = y_B.argsort(stable=True)
            # 0 or 1 will do for an even batch, and does not depend on how many processes share it
            start = fraction * (len(y_B) if len(y_B) % 2 else 2) // 2**32
            for half in range(self.halves):
                rows = torch.arange(half, len(y_B), 2, device=y_B.device)
                rows = order_B[(rows + start) % len(y_B)]
                merge_batch_(self._moments(half), z_BK[rows], y_B[rows], **windows)
        self.steps.add_(1)

    def _pooled(self, reduce: Reduce | None) -> list[Moments]:
        """The halves' moments over all processes, which then hold equal shares."""
        parts = [self._moments(half) for half in range(self.halves)]
        return parts if reduce is None else [_pool_(part, reduce) for part in parts]

    def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: Reduce | None) -> Refreshed:
        parts = self._pooled(reduce)
        # an epoch of mixed targets left nothing to observe; after the last step the data tells
        if z_NK is not None:
            C = len(self._moments(0).count_C)
            return _refresh_exactly(self.factors, z_NK, y_N, C, self.floor, self.structure, reduce)
        whole = parts[0] if self.halves == 1 else merge_moments(*parts)
        if self.floor == "auto":
            covariances = [normalise_scatter(part.count_C, part.scatter) for part in parts]
            sigma0 = automatic_floor(split_half_error(*covariances), whole.mean_CK.shape[1])
        else:
            sigma0 = torch.tensor(self.floor, dtype=torch.float64, device=whole.mean_CK.device)
        factors, used = factorize(normalise_scatter(whole.count_C, whole.scatter), sigma0)
        self.factors.copy_(factors)
        return Refreshed(None, sigma0, used)

    def extra_repr(self) -> str:
        windows = f"window={self.window}, mean_window={self.mean_window}"
        return f"floor={self.floor}, structure={self.structure!r}, {windows}"


def _pool_(own: Moments, reduce: Reduce) -> Moments:
    """The moments of all processes' samples; each process then holds an equal share of them.

    So the states are the same everywhere after a refresh, and any one of them can be the checkpoint.
    """
    n_C, sum_CK = own.count_C.clone(), own.count_C[:, None] * own.mean_CK
    reduce(n_C)
    reduce(sum_CK)
    mean_CK = sum_CK / or_one(n_C)[:, None]
    scatter = own.scatter + between_scatter(own.count_C, own.mean_CK - mean_CK, own.scatter)
    reduce(scatter)
    ranks = torch.ones((), dtype=torch.float64, device=n_C.device)
    reduce(ranks)
    own.count_C.copy_(n_C / ranks)
    own.mean_CK.copy_(mean_CK)
    own.scatter.copy_(scatter / ranks)
    return Moments(n_C, mean_CK, scatter)


class IsotropicCovariance(AbstractCovariance):
    """Σ̂ = v·I with v = 1/ρ (remark (iii)) or a given variance: no statistics at all.

    Args:
        variance: v; None: 1/ρ.
        floor: σ0, added as σ0² to the variance; 0.1, as for the other estimators.

    Raises:
        ArgumentError: a number is not positive, or the floor is ``"auto"``.
    """

    refreshes = False
    structure = "shared"

    def __init__(self, variance: float | None = None, floor: float = DEFAULT_FLOOR) -> None:
        super().__init__()
        if variance is not None and not variance > 0:
            raise ArgumentError(f"variance must be positive (or None for 1/ρ), got {variance}")
        if floor == "auto":
            raise ArgumentError(
                "floor='auto' weighs an estimation error, and IsotropicCovariance estimates nothing"
            )
        self.variance, self.floor, self._floor = variance, floor, float(_check_floor(floor))

    def bind(self, num_classes: int, dim: int) -> None:
        self.register_buffer("factors", torch.full((1, 1), self._floor))

    def begin(self, rho: float) -> None:
        variance = 1 / rho if self.variance is None else self.variance
        self.factors.fill_((variance + self._floor**2) ** 0.5)

    def progress(self, rho: float, lr: float | None) -> None:
        self.begin(rho)

    def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: Reduce | None) -> None:
        return None

    def extra_repr(self) -> str:
        return f"variance={'1/ρ' if self.variance is None else self.variance}, floor={self.floor}"


class SwitchCovariance(AbstractCovariance):
    """Exact passes while N1 moves fast, running statistics once the learning rate has decayed.

    Switches for good when the rate given to ``set_progress(…, lr=…)`` falls below ``lr_below`` times the
    highest one seen.

    Args:
        floor: as for :class:`ExactCovariance`.
        structure: as for :class:`ExactCovariance`.
        window: as for :class:`RunningCovariance`.
        lr_below: share of the highest learning rate at which to switch; 0.1.
        mean_window: as for :class:`RunningCovariance`.

    Raises:
        ArgumentError: an argument is out of bounds.
    """

    peak_lr: Tensor
    switched: Tensor

    def __init__(
        self,
        floor: Floor = DEFAULT_FLOOR,
        structure: Structure = "full",
        window: int | None = None,
        lr_below: float = 0.1,
        mean_window: int = 32,
    ) -> None:
        super().__init__()
        if not 0 < lr_below < 1:
            raise ArgumentError(
                f"lr_below is a fraction of the peak learning rate, in (0, 1); got {lr_below}"
            )
        self.running = RunningCovariance(floor, structure, window, mean_window)
        self.lr_below, self.floor, self.structure = lr_below, floor, structure

    def bind(self, num_classes: int, dim: int) -> None:
        self.num_classes = num_classes
        self.running.bind(num_classes, dim)
        self.keep(peak_lr=torch.zeros((), dtype=torch.float64), switched=torch.zeros((), dtype=torch.bool))

    @property
    def factors(self) -> Tensor:  # type: ignore[override]
        return self.running.factors

    @property
    def needs_pass(self) -> bool:
        return not bool(self.switched)

    @property
    def from_batches(self) -> bool:
        return not self.needs_pass

    def observe(self, z_BK: Tensor, y_B: Tensor) -> None:
        self.running.observe(z_BK, y_B)

    def progress(self, rho: float, lr: float | None) -> None:
        if lr is None:
            raise ArgumentError(
                "SwitchCovariance follows the learning rate: "
                "call net.set_progress(epoch, epochs, lr=optimizer.param_groups[0]['lr'])"
            )
        self.switched |= lr < self.lr_below * self.peak_lr
        self.peak_lr.clamp_(min=lr)

    def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: Reduce | None) -> Refreshed:
        running = self.running
        if not self.needs_pass:
            return running.refresh(z_NK, y_N, reduce)
        running._pooled(reduce)  # so that any process's state can be the checkpoint before the switch, too
        return _refresh_exactly(
            running.factors, z_NK, y_N, self.num_classes, running.floor, self.structure, reduce
        )

    def extra_repr(self) -> str:
        return f"lr_below={self.lr_below}"
