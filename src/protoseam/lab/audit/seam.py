"""The audit: every term of the bounds for one seam, from held-out embeddings.

Legend: N held-out samples, C classes of the head, P classes that have held-out samples, K seam width.

P_i is the empirical law of the held-out embeddings of class i, so R, μ_i and Σ_i are exact. Two things are
sampled. L_sample has a Monte-Carlo error, and a bound may be missed by a slack that is proved and reported
(:mod:`~protoseam.lab.audit.terms`). Δ_i needs no slack: it is :func:`~protoseam.theory.wasserstein.w1_upper`, an
upper bound with a proved confidence (0.999 for all classes together), or its cap √2(tr Σ_i)^{1/2} where that is
smaller. ``QUICK`` uses the cap alone. The sliced W1 beside it bounds Δ_i from below.

Sweeps stay on the device of the embeddings. The (P, K, K) matrices go to the CPU, where a hundred small
decompositions are faster than on an accelerator, and where the draws are the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protoseam.core.covariance import class_moments
from protoseam.errors import ArgumentError
from protoseam.lab.audit.head import AuditedHead, full_factors
from protoseam.lab.audit.terms import (
    CONFIDENCE,
    ClassMoments,
    SeamClasses,
    Smoothing,
    Spectrum,
    Totals,
    TrainingSide,
    covariance_spectrum,
    smoothing,
    totals,
    training_side,
)
from protoseam.theory.bounds import floor_bias, non_gaussianity_cap
from protoseam.theory.bures import bures, trace
from protoseam.theory.collapse import Collapse, collapse_measures
from protoseam.theory.wasserstein import sliced_w1, w1_upper


@dataclass(frozen=True)
class AuditSettings:
    """How much to compute."""

    pairs: int = 512  # antithetic pairs a class for L_sample
    points: int = 256  # of one optimal assignment for W1 from above; 0: caps only
    repeats: int = 2
    directions: int = 128  # of the sliced W1 from below; 0: none
    details: bool = True  # spectra, slopes, the floor's share, the curvature of a head that is not Linear


FULL = AuditSettings()
# What training can afford every few epochs: no assignment, no directions, one eigenvalue problem a class.
QUICK = AuditSettings(pairs=16, points=0, directions=0, details=False)

_LOGGED = ("nc1", "nc1_ratio", "nc2_angle", "nc2_max_cosine", "nc3", "nc4")


@dataclass(frozen=True)
class Audit:
    """Everything :func:`audit_seam` found."""

    classes: SeamClasses
    balanced: Totals  # 1/P a class, the paper's R
    smoothing: Smoothing
    collapse: Collapse
    spectra: dict[str, Spectrum]
    training: TrainingSide | None
    lipschitz: float  # the paper's G
    floor: float
    rho: float
    dim: int
    num_classes: int

    @property
    def as_sampled(self) -> Totals:
        """As ``balanced``, with each held-out sample the same weight."""
        weight_P = self.classes.count_P / self.classes.count_P.sum(dtype=torch.float64)
        return totals(self.classes, weight_P, "as sampled", self.lipschitz, self.floor, self.dim)

    @property
    def consensus(self) -> float:
        """L_con on the held-out data: ρ/2 · E‖z − s_y‖²."""
        return self.rho / 2 * self.balanced.rms**2

    def flat(self) -> dict[str, float]:
        """The totals as one small dict of numbers, for a line of a log; what is undefined is left out."""
        total, bound = self.balanced, self.balanced.bound("decomposition")
        found = {
            "risk": total.risk,
            "sampled_loss": total.sampled_loss,
            "sampled_error": total.sampled_error,
            "bound": bound.value,
            **bound.terms,
            "tightness": bound.tightness,
            "coupling_bound": total.bound("coupling").value,
            "consensus": self.consensus,
            "lipschitz": float(self.classes.lipschitz_P.mean()),
            "smoothing_gap": self.smoothing.gap,
            "curvature": self.smoothing.curvature,
            **{name: getattr(self.collapse, name) for name in _LOGGED},
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


@torch.no_grad()
def audit_seam(
    z_NK: Tensor,
    y_N: Tensor,
    prototype_CK: Tensor,
    factors: Tensor,
    head: AuditedHead,
    *,
    rho: float,
    floor: float | None,
    generator: torch.Generator,
    training: ClassMoments | None = None,
    settings: AuditSettings = FULL,
) -> Audit:
    """Return R, L_sample, each term of each bound, smoothing, collapse and spectra of one seam.

    Args:
        z_NK: held-out embeddings.
        y_N: their labels; a class without any is left out.
        prototype_CK: S.
        factors: those of Σ̃, in any shape.
        head: N2, see :func:`audited_head`.
        rho: the penalty ρ.
        floor: σ0 in Σ̃ = Σ̂ + σ0²I; None (where training chose it): the largest that fits.
        generator: of every draw, on the CPU.
        training: the moments of the training embeddings, if known.
        settings: how much to compute; ``FULL`` unless given.
    """
    C, K = prototype_CK.shape
    _check(z_NK, y_N, C, K, generator)
    count_C = torch.bincount(y_N, minlength=C)
    index_P = count_C.nonzero()[:, 0]
    if len(index_P) < 2:
        raise ArgumentError(f"an audit compares classes, but {len(index_P)} of {C} has held-out samples")
    place_C = torch.full_like(count_C, -1)
    place_C[index_P] = torch.arange(len(index_P), device=place_C.device)
    label_N = place_C[y_N]

    loss_N, prediction_N, slope_N = head.deployed(z_NK, y_N, slopes=settings.details)
    moments = class_moments(z_NK, label_N, len(index_P))
    rows_PK = None if head.weight_CK is None else head.weight_CK.to(moments[1])[index_P]
    collapse = collapse_if_defined(*moments, rows_PK, z_NK, place_C[prediction_N])

    index_P, label_N = index_P.cpu(), label_N.cpu()
    held_out = ClassMoments(*(t.cpu() for t in moments))
    s_CK, factors = prototype_CK.double().cpu(), factors.cpu().double()
    root_PKK = full_factors(factors, C, K)[index_P]
    sampling_PKK = root_PKK @ root_PKK.mT
    sigma0 = _floor(floor, sampling_PKK, check=settings.details)
    per_sample = {"accuracy_P": prediction_N == y_N, "risk_P": loss_N, "slope_P": slope_N}
    place = held_out, index_P, s_CK, factors, root_PKK, sigma0
    classes = _classes(head, z_NK.cpu(), label_N, per_sample, *place, generator, settings)
    equal_P = torch.full_like(classes.risk_P, 1 / len(index_P))
    spectra = {"held-out": held_out.covariance_CKK, "sampled from": sampling_PKK}
    side = None
    if training is not None:
        seen = ClassMoments(*(t.cpu()[index_P] for t in training))
        spectra["training"] = seen.covariance_CKK
        side = training_side(seen, held_out, s_CK[index_P], sampling_PKK, sigma0)
    return Audit(
        classes=classes,
        balanced=totals(classes, equal_P, "balanced", head.lipschitz, sigma0, K),
        smoothing=smoothing(classes, equal_P),
        collapse=collapse,
        spectra={name: covariance_spectrum(c) for name, c in spectra.items()} if settings.details else {},
        training=side,
        lipschitz=head.lipschitz,
        floor=sigma0,
        rho=rho,
        dim=K,
        num_classes=C,
    )


def _classes(
    head: AuditedHead,
    z_NK: Tensor,
    label_N: Tensor,
    seen: dict[str, Tensor | None],
    held_out: ClassMoments,
    index_P: Tensor,
    s_CK: Tensor,
    factors: Tensor,
    root_PKK: Tensor,
    sigma0: float,
    generator: torch.Generator,
    settings: AuditSettings,
) -> SeamClasses:
    """Every quantity of the bounds, one value per class; ``seen`` holds values per sample, to be averaged.

    Of Δ_i and W1(P_i, Q_i) the caps stand first, and what ``_distances`` finds takes their place.
    """
    s_PK, (count_P, mean_PK, covariance_PKK) = s_CK[index_P], held_out
    sampling_PKK = root_PKK @ root_PKK.mT

    def per_class(x_N: Tensor) -> Tensor:
        return torch.bincount(label_N, weights=x_N.double().cpu(), minlength=len(index_P)) / count_P

    sampled_C, error_C, point_C = head.sampled(s_CK, factors, generator, settings.pairs)
    shift_P = (mean_PK - s_PK).norm(dim=1)
    square_P, spread_P = shift_P.square() + trace(covariance_PKK), trace(sampling_PKK)
    lipschitz_P = head.lipschitz_C[index_P]
    unknown_P = torch.full_like(shift_P, math.nan)
    columns = {field.name: unknown_P for field in fields(SeamClasses)} | {
        "index_P": index_P,
        "count_P": count_P,
        **{name: per_class(x_N) for name, x_N in seen.items() if x_N is not None},
        "sampled_loss_P": sampled_C[index_P],
        "sampled_error_P": error_C[index_P],
        "lipschitz_P": lipschitz_P,
        "non_gaussianity_P": non_gaussianity_cap(covariance_PKK),
        "mean_mismatch_P": shift_P,
        "transport_P": (square_P + spread_P).sqrt(),
        "mean_square_P": square_P,
        "sampling_trace_P": spread_P,
        "point_loss_P": point_C[index_P],
        **_distances(z_NK, label_N, held_out[1:], (s_PK, sampling_PKK), generator, settings),
        **head.second_order(s_CK, sampling_PKK, index_P, sigma0, details=settings.details),
    }
    if settings.details:
        top_P = torch.linalg.eigvalsh(sampling_PKK)[:, -1]
        estimate_PKK = sampling_PKK - sigma0**2 * torch.eye(s_CK.shape[1], dtype=torch.float64)  # Σ̂
        columns["estimation_error_P"] = torch.linalg.matrix_norm(estimate_PKK - covariance_PKK)
        columns["floor_bias_P"] = floor_bias(covariance_PKK, sigma0)
        columns["covariance_mismatch_P"] = bures(covariance_PKK, sampling_PKK)
    else:
        top_P = sampling_PKK.abs().sum(-1).amax(-1)  # ≥ λ_max(Σ̃_i), by Gershgorin
        columns["covariance_mismatch_P"] = _quick_bures(covariance_PKK, root_PKK)
    columns["sampled_lipschitz_P"] = lipschitz_P * (top_P / settings.pairs).sqrt()
    return SeamClasses(**columns)


def _distances(
    z_NK: Tensor,
    label_N: Tensor,
    held_out: tuple[Tensor, Tensor],
    sampled_from: tuple[Tensor, Tensor],
    generator: torch.Generator,
    settings: AuditSettings,
) -> dict[str, Tensor]:
    """Δ_i from above and W1(P_i, Q_i), then Δ_i from below with its null, as far as the settings ask for them.

    ``held_out`` and ``sampled_from`` are the means and covariances of the two Gaussians of each class.
    """
    found = {}
    if settings.points:
        certify = partial(
            w1_upper,
            z_NK,
            label_N,
            generator=generator,
            points=settings.points,
            repeats=settings.repeats,
            confidence=1 - (1 - CONFIDENCE) / 2,  # two families of statements
        )
        found["non_gaussianity_P"] = certify(*held_out).upper_C
        found["transport_P"] = certify(*sampled_from).upper_C
    if settings.directions:
        many = {"directions": settings.directions, "null_repeats": 2}
        sliced = sliced_w1(z_NK, label_N, len(held_out[0]), generator=generator, **many)
        found |= {"non_gaussianity_lower_P": sliced.value_C, "non_gaussianity_null_P": sliced.null_C}
    return found


def _quick_bures(covariance_PKK: Tensor, root_PKK: Tensor) -> Tensor:
    """Bures distance to Σ̃ = LLᵀ from the eigenvalues of LᵀΣL alone: a tenth of the time of :func:`bures`.

    The trace form of eq:bures, so about 10⁻³ of the scale is lost where the two nearly agree.
    """
    value_PK = torch.linalg.eigvalsh(root_PKK.mT @ covariance_PKK @ root_PKK).clamp_min(0)
    square_P = trace(covariance_PKK) + root_PKK.square().sum((-2, -1)) - 2 * value_PK.sqrt().sum(-1)
    return square_P.clamp_min(0).sqrt()


def collapse_if_defined(*measured: Any) -> Collapse:
    """:func:`collapse_measures`, or NaN throughout for a network that gives every class the same mean."""
    try:
        return collapse_measures(*measured)
    except ValueError:  # a dead network has risks and bounds all the same
        return Collapse(**{field.name: math.nan for field in fields(Collapse)})


def _check(z_NK: Tensor, y_N: Tensor, C: int, K: int, generator: torch.Generator) -> None:
    if z_NK.ndim != 2 or z_NK.shape[1] != K or y_N.shape != z_NK.shape[:1]:
        raise ArgumentError(
            f"audit_seam: embeddings {tuple(z_NK.shape)} and labels {tuple(y_N.shape)} must be (N, {K}) and (N,), "
            f"because the prototypes are ({C}, {K})"
        )
    if not len(y_N):
        raise ArgumentError("audit_seam: there is no held-out sample to audit")
    low, high = map(int, y_N.aminmax())
    if low < 0 or high >= C:
        raise ArgumentError(f"audit_seam: labels run from {low} to {high}, the classes from 0 to {C - 1}")
    if not bool(z_NK.isfinite().all()):
        raise ArgumentError("audit_seam: an embedding holds NaN or infinity; audit an earlier checkpoint")
    if generator.device.type != "cpu":
        raise ArgumentError(f"audit_seam: the generator must live on the CPU, not on {generator.device}")


def _floor(floor: float | None, sampling_PKK: Tensor, *, check: bool) -> float:
    """σ0 with Σ̃ ⪰ σ0²I, which cor:controlled needs: the given one, or the largest that fits."""
    if floor is not None and not check:
        return floor
    value_PK = torch.linalg.eigvalsh(sampling_PKK)
    least, scale = float(value_PK.min()), float(value_PK.max())
    if floor is None:
        return math.sqrt(max(0.0, least))
    if least < floor**2 - 1e-5 * scale:  # factors are kept in float32
        raise ArgumentError(
            f"floor σ0 = {floor:g} does not belong to these factors: Σ̃ has an eigenvalue {least:.3g} below σ0² = "
            f"{floor**2:.3g}. Pass the floor of training, or None"
        )
    return floor
