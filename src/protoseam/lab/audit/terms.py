"""The numbers of an audit, and the bounds they add up to.

Legend: P classes that have held-out samples, C all classes, K seam width.

Every bound limits |R − L_sample| for risks averaged with the same class weights. G_i is the smallest Lipschitz
constant known for class i, G the paper's one for all of them.

L_sample is a Monte-Carlo mean, and a bound may be missed by its error. Of a loss that is rarely large a standard
error says too little: from few draws it can be a tenth of the truth. So the slack is a proved one. The mean over
M pairs is, as a function of the M·K standard normals behind class i, G_i(λ_max(Σ̃_i)/M)^{1/2}-Lipschitz; by Gaussian
concentration it is within that times (2 log(2/δ))^{1/2} of its expectation, except with probability δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protoseam.errors import ArgumentError
from protoseam.theory.bounds import RiskTransfer, controlled_bound, controlled_bound_full
from protoseam.theory.bures import bures

CONFIDENCE = 0.999  # of every Δ_i from above together, and of each verdict's slack
_STANDARD_ERRORS = 4.0  # for the second-order form, a matter of description
_ROUNDING = 1e-9


class ClassMoments(NamedTuple):
    """What :func:`protoseam.core.class_moments` returns, full structure."""

    count_C: Tensor
    mean_CK: Tensor
    covariance_CKK: Tensor


@dataclass(frozen=True)
class SeamClasses:
    """What was measured of each class, float64 ``(P,)``; NaN where a mode or a head does not define it."""

    index_P: Tensor  # the class's number among all classes
    count_P: Tensor  # held-out samples
    accuracy_P: Tensor
    risk_P: Tensor  # R_i = E_{P_i} ℓ_i
    sampled_loss_P: Tensor  # E_{Q_i} ℓ_i
    sampled_error_P: Tensor  # its Monte-Carlo standard error
    sampled_lipschitz_P: Tensor  # of that mean, in the standard normals it was made from
    lipschitz_P: Tensor  # G_i
    slope_P: Tensor  # E_{P_i} ‖∇ℓ_i‖: what G_i is the supremum of (Linear head)
    non_gaussianity_P: Tensor  # Δ_i from above
    non_gaussianity_lower_P: Tensor  # Δ_i from below, sliced
    non_gaussianity_null_P: Tensor  # the sliced value of a class that is Gaussian
    mean_mismatch_P: Tensor
    covariance_mismatch_P: Tensor
    floor_bias_P: Tensor  # bures(Σ_i, Σ_i + σ0²I): the part of the covariance mismatch that is the floor's
    transport_P: Tensor  # W1(P_i, Q_i) from above, without the detour over N(μ_i, Σ_i)
    mean_square_P: Tensor  # E ‖z − s_i‖²
    sampling_trace_P: Tensor  # tr Σ̃_i
    estimation_error_P: Tensor  # ‖Σ̂_i − Σ_i‖_F
    point_loss_P: Tensor  # ℓ_i(s_i)
    curvature_P: Tensor  # ½ tr(Σ̃_i ∇²ℓ_i(s_i))
    floor_curvature_P: Tensor  # its part from σ0²I
    remainder_P: Tensor  # how far curvature_P may be from the measured gap

    @property
    def coupling_P(self) -> Tensor:
        """(E‖z − s_i‖² + tr Σ̃_i)^{1/2}: W1(P_i, Q_i) by the independent coupling."""
        return (self.mean_square_P + self.sampling_trace_P).sqrt()

    @property
    def jensen_gap_P(self) -> Tensor:
        """E_{Q_i} ℓ_i − ℓ_i(s_i), the smoothing that sampling really did."""
        return self.sampled_loss_P - self.point_loss_P

    def transfer(self, weight_P: Tensor, lipschitz: float | None = None) -> RiskTransfer:
        """eq:mismatch-decomposition with these numbers; ``lipschitz``: one G instead of the G_i."""
        return RiskTransfer(
            self.lipschitz_P if lipschitz is None else torch.full_like(self.lipschitz_P, lipschitz),
            self.non_gaussianity_P,
            self.mean_mismatch_P,
            self.covariance_mismatch_P,
            weight_P,
        )

    def holds_P(self) -> Tensor:
        """Whether |R_i − L_i| ≤ G_i(Δ_i + …) in each class by itself, up to the slack of all of them together."""
        gap_P = self.transfer(torch.ones_like(self.risk_P)).gap_C
        slack_P = _slack(self.sampled_lipschitz_P, len(gap_P))
        return (self.risk_P - self.sampled_loss_P).abs() <= gap_P + slack_P + _ROUNDING


@dataclass(frozen=True)
class Bound:
    """|R − L_sample| ≤ ``gap``, the sum of ``terms``."""

    name: str
    source: str  # where the inequality stands
    terms: dict[str, float]
    gap: float
    risk: float
    sampled_loss: float
    slack: float

    @property
    def value(self) -> float:
        """L_sample + gap ≥ R."""
        return self.sampled_loss + self.gap

    @property
    def holds(self) -> bool:
        return abs(self.risk - self.sampled_loss) <= self.gap + self.slack + _ROUNDING

    @property
    def tightness(self) -> float:
        """|R − L_sample|/gap: 1 for a bound that is attained, 0 for one that says nothing."""
        return abs(self.risk - self.sampled_loss) / self.gap if self.gap > 0 else math.nan

    @property
    def over_risk(self) -> float:
        """(L_sample + gap)/R, at least 1."""
        return self.value / self.risk if self.risk > 0 else math.inf


@dataclass(frozen=True)
class Totals:
    """Risk, sampled loss and every bound under one weighting of the classes."""

    weighting: str
    risk: float
    accuracy: float
    sampled_loss: float
    sampled_error: float
    rms: float  # (E‖z − s_y‖²)^{1/2}
    bounds: tuple[Bound, ...]

    def bound(self, name: str) -> Bound:
        for bound in self.bounds:
            if bound.name == name:
                return bound
        raise ArgumentError(
            f"no bound is called {name!r}; there are {', '.join(b.name for b in self.bounds)}"
        )

    @property
    def all_hold(self) -> bool:
        return all(bound.holds for bound in self.bounds)


@dataclass(frozen=True)
class Smoothing:
    """Sampling as a curvature penalty, averaged over the classes."""

    point_loss: float
    gap: float
    gap_error: float
    curvature: float
    floor_curvature: float
    remainder: float
    holds: bool | None  # |gap_i − curvature_i| ≤ remainder_i in every class; None for a head without a bound


@dataclass(frozen=True)
class TrainingSide:
    """Training data beside held-out data, ``(P,)`` distances: which part of a mismatch is generalisation."""

    mean_mismatch_P: Tensor  # ‖μ_train − s‖
    mean_shift_P: Tensor  # ‖μ_held-out − μ_train‖
    covariance_shift_P: Tensor  # bures(Σ_held-out, Σ_train)
    sampling_shift_P: Tensor  # bures(Σ_train + σ0²I, Σ̃): augmentation, structure and staleness of Σ̂


def totals(
    classes: SeamClasses, weight_P: Tensor, weighting: str, lipschitz: float, floor: float, dim: int
) -> Totals:
    """All bounds for the class weights ``weight_P`` (which sum to 1)."""
    G_P = classes.lipschitz_P
    measured = classes.risk_P, classes.accuracy_P, classes.sampled_loss_P, classes.mean_square_P
    risk, accuracy, sampled, square, transport, coupling = _means(
        weight_P, *measured, G_P * classes.transport_P, G_P * classes.coupling_P
    )
    error = float((weight_P * classes.sampled_error_P).norm())
    slack = float(_slack((weight_P * classes.sampled_lipschitz_P).norm(), 1))
    rms = math.sqrt(square)

    def bound(name: str, source: str, terms: dict[str, float]) -> Bound:
        return Bound(name, source, terms, math.fsum(terms.values()), risk, sampled, slack)

    largest = float(G_P.max())
    bounds = [
        bound("transport", "eq:risk-transfer", {"transport": transport}),
        bound("decomposition", "eq:mismatch-decomposition", classes.transfer(weight_P).shares()),
        bound("coupling", "docs, slip 3", {"coupling": coupling}),
    ]
    families = [("sharp", True, largest)]
    if floor > 0:  # the paper's ε̄/(2σ0) needs one
        families.append(("paper", False, lipschitz))
    if bool(classes.estimation_error_P.isnan().any()):
        families = []  # a quick audit
    else:
        shares = classes.transfer(weight_P, lipschitz).shares()
        bounds.append(bound("decomposition, paper", "eq:mismatch-decomposition", shares))
    for label, sharp, G in families:
        common = rms, floor, classes.estimation_error_P, dim
        options: dict[str, Any] = {"sharp": sharp, "class_weights": weight_P}
        found = {
            "controlled": controlled_bound(G, classes.non_gaussianity_P, *common, **options),
            "controlled-full": controlled_bound_full(G, *common, **options),
        }
        for name, parts in found.items():
            terms = {term: G * value for term, value in vars(parts).items() if term != "lipschitz"}
            source = f"eq:{name.replace('controlled', 'controlled-bound')}"
            bounds.append(bound(f"{name}, {label}", source, terms))
    return Totals(weighting, risk, accuracy, sampled, error, rms, tuple(bounds))


def _means(weight_P: Tensor, *values: Tensor) -> list[float]:
    """Weighted means of several columns at once."""
    means: list[float] = (torch.stack(values) @ weight_P).tolist()
    return means


def _slack(lipschitz: Tensor, statements: int) -> Tensor:
    """How far a Lipschitz function of standard normals may be from its mean, in ``statements`` at once."""
    return lipschitz * math.sqrt(2 * math.log(2 * statements / (1 - CONFIDENCE)))


def smoothing(classes: SeamClasses, weight_P: Tensor) -> Smoothing:
    """The measured smoothing beside its second-order form (prop:smoothing)."""
    gap_P = classes.jensen_gap_P
    allowed_P = classes.remainder_P + _STANDARD_ERRORS * classes.sampled_error_P + _ROUNDING
    within = bool(((gap_P - classes.curvature_P).abs() <= allowed_P).all())
    columns = {
        "point_loss": classes.point_loss_P,
        "gap": gap_P,
        "curvature": classes.curvature_P,
        "floor_curvature": classes.floor_curvature_P,
        "remainder": classes.remainder_P,
    }
    means = dict(zip(columns, _means(weight_P, *columns.values()), strict=True))
    error = float((weight_P * classes.sampled_error_P).norm())
    return Smoothing(**means, gap_error=error, holds=None if math.isnan(means["remainder"]) else within)


def training_side(
    training: ClassMoments, held_out: ClassMoments, prototype_PK: Tensor, sampling_PKK: Tensor, floor: float
) -> TrainingSide:
    """How far held-out moments, prototypes and Σ̃ are from the training data's moments."""
    _, mean_PK, covariance_PKK = training
    floor_KK = floor**2 * torch.eye(mean_PK.shape[1], dtype=torch.float64)
    return TrainingSide(
        mean_mismatch_P=(mean_PK - prototype_PK).norm(dim=1),
        mean_shift_P=(held_out.mean_CK - mean_PK).norm(dim=1),
        covariance_shift_P=bures(held_out.covariance_CKK, covariance_PKK),
        sampling_shift_P=bures(covariance_PKK + floor_KK, sampling_PKK),
    )


@dataclass(frozen=True)
class Spectrum:
    """``eigenvalue_K``: the largest eigenvalue averaged over the classes, then the second largest, …"""

    eigenvalue_K: Tensor
    trace: float  # mean of tr Σ_i
    effective_rank: float  # mean of exp(entropy of λ/tr Σ_i): K if isotropic, 1 if one direction has it all
    condition_median: float  # of λ_max/λ_min; infinite for a class with n ≤ K samples and no floor
    condition_max: float


def covariance_spectrum(covariance_CKK: Tensor) -> Spectrum:
    """Spectrum of a stack of covariances, each class with the same weight; float64."""
    value_CK = torch.linalg.eigvalsh(covariance_CKK.detach().double()).clamp_min(0).flip(-1)
    trace_C = value_CK.sum(-1)
    share_CK = value_CK / torch.where(trace_C > 0, trace_C, 1.0)[:, None]
    rank_C = torch.special.entr(share_CK).sum(-1).exp()
    # what rounding leaves of a zero eigenvalue is no eigenvalue
    zero_C = value_CK.shape[-1] * torch.finfo(torch.float64).eps * value_CK[:, 0]
    condition_C = torch.where(value_CK[:, -1] > zero_C, value_CK[:, 0] / value_CK[:, -1], torch.inf)
    return Spectrum(
        eigenvalue_K=value_CK.mean(0),
        trace=float(trace_C.mean()),
        effective_rank=float(rank_C.mean()),
        condition_median=float(condition_C.median()),
        condition_max=float(condition_C.max()),
    )
