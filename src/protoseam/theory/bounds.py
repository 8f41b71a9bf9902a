"""How far the sampled loss can be from the deployed risk: thm:risk-transfer and cor:controlled.

Legend: C classes, K seam width.

``sharp=True`` replaces constants that the paper's own argument does not need; see docs/theory.md.
Every result holds for R and the sampled loss averaged with the same class weights (the paper's: 1/n each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError
from protoseam.theory.bures import bures, trace


@dataclass(frozen=True)
class RiskTransfer:
    """|R − L_sample| ≤ ``gap`` = Σ_i w_i G_i [Δ_i + (‖μ_i − s_i‖² + bures²)^{1/2}].

    Attributes:
        lipschitz_C: G_i.
        non_gaussianity_C: Δ_i.
        mean_mismatch_C: ‖μ_i − s_i‖.
        covariance_mismatch_C: bures(Σ_i, Σ̃_i).
        weight_C: class weights.
    """

    lipschitz_C: Tensor
    non_gaussianity_C: Tensor
    mean_mismatch_C: Tensor
    covariance_mismatch_C: Tensor
    weight_C: Tensor

    @property
    def transport_C(self) -> Tensor:
        """The right side of eq:mismatch-decomposition: an upper bound of W1(P_i, Q_i)."""
        return self.non_gaussianity_C + torch.hypot(self.mean_mismatch_C, self.covariance_mismatch_C)

    @property
    def gap_C(self) -> Tensor:
        """What each class may contribute to |R − L_sample|, before weighting."""
        return self.lipschitz_C * self.transport_C

    @property
    def gap(self) -> float:
        """Return the weighted sum over the classes."""
        return float((self.weight_C * self.gap_C).sum())

    def shares(self) -> dict[str, float]:
        """``gap`` as a sum of three: the root of the sum of squares is split in proportion to the squares."""
        return {name: float(share_C.sum()) for name, share_C in self.shares_C().items()}

    def shares_C(self) -> dict[str, Tensor]:
        """What each class adds to each of :meth:`shares`."""
        mean_C, covariance_C = self.mean_mismatch_C, self.covariance_mismatch_C
        safe_C = torch.hypot(mean_C, covariance_C).clamp_min(torch.finfo(torch.float64).tiny)
        scale_C = self.weight_C * self.lipschitz_C
        return {
            "non_gaussianity": scale_C * self.non_gaussianity_C,
            "mean_mismatch": scale_C * mean_C * (mean_C / safe_C),
            "covariance_mismatch": scale_C * covariance_C * (covariance_C / safe_C),
        }


@dataclass(frozen=True)
class ControlledBound:
    """R − L_sample ≤ ``gap`` = G·(non-Gaussianity + consensus + floor bias + estimation).

    Attributes:
        lipschitz: G.
        non_gaussianity: Δ̄.
        consensus: the consensus part.
        floor_bias: √k σ0.
        estimation: the part of the estimation error.
    """

    lipschitz: float
    non_gaussianity: float
    consensus: float
    floor_bias: float
    estimation: float

    @property
    def gap(self) -> float:
        """Return G times the sum of the four terms."""
        return self.lipschitz * (self.non_gaussianity + self.consensus + self.floor_bias + self.estimation)


def risk_transfer(
    lipschitz: float | Tensor,
    non_gaussianity_C: Tensor,
    mean_CK: Tensor,
    covariance_CKK: Tensor,
    prototype_CK: Tensor,
    sampling_covariance_CKK: Tensor,
    *,
    class_weights: Tensor | None = None,
) -> RiskTransfer:
    """eq:risk-transfer with eq:mismatch-decomposition, class by class.

    ``lipschitz`` is one G (:func:`head_lipschitz`) or one per class (:func:`class_lipschitz`, tighter);
    ``non_gaussianity_C`` is Δ_i, see :mod:`protoseam.theory.wasserstein`. If P_i is the empirical law of a
    held-out sample, then μ_i and Σ_i are its mean and its covariance divided by |D_i|, R is the loss on that
    sample, and the inequality is deterministic.

    Args:
        lipschitz: G, one number or one per class.
        non_gaussianity_C: Δ_i.
        mean_CK: class means μ_i.
        covariance_CKK: covariances Σ_i.
        prototype_CK: S, one prototype per class.
        sampling_covariance_CKK: Σ̃_i, the covariances that were sampled from.
        class_weights: weights ``(C,)`` that sum to 1; None: 1/n each.
    """
    shapes = tuple(mean_CK.shape), tuple(prototype_CK.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise ArgumentError(
            f"risk_transfer: means {shapes[0]} and prototypes {shapes[1]} must both be (C, K)"
        )
    weight_C = _weights(class_weights, mean_CK)
    return RiskTransfer(
        lipschitz_C=torch.as_tensor(lipschitz, dtype=torch.float64).to(weight_C).expand(len(mean_CK)),
        non_gaussianity_C=non_gaussianity_C.detach().to(weight_C),
        mean_mismatch_C=(mean_CK.detach().double() - prototype_CK.detach().double()).norm(dim=1),
        covariance_mismatch_C=bures(covariance_CKK, sampling_covariance_CKK),
        weight_C=weight_C,
    )


def rms_distance(consensus: float, rho: float) -> float:
    """√(2 L_con/ρ) = (E‖N1(X) − s_Y‖²)^{1/2}, the consensus term freed of its weight.

    Args:
        consensus: the consensus term L_con.
        rho: the penalty ρ.
    """
    if rho <= 0 or consensus < 0:
        raise ArgumentError(f"rms_distance needs L_con ≥ 0 and ρ > 0, got {consensus} and {rho}")
    return math.sqrt(2 * consensus / rho)


def controlled_bound(
    lipschitz: float,
    non_gaussianity_C: Tensor,
    rms: float,
    floor: float,
    error_C: Tensor,
    dim: int,
    *,
    sharp: bool = False,
    class_weights: Tensor | None = None,
) -> ControlledBound:
    """eq:controlled-bound: Δ̄ + rms + √k σ0 + ε̄/(2σ0), times G; ``error_C`` is ‖Σ̂_i − Σ_i‖_F.

    Args:
        lipschitz: G.
        non_gaussianity_C: Δ_i.
        rms: (E‖N1(X) − s_Y‖²)^{1/2}, see :func:`rms_distance`.
        floor: σ0.
        error_C: ‖Σ̂_i − Σ_i‖_F.
        dim: the seam's width k.
        sharp: use the better constant of docs/theory.md instead of the paper's.
        class_weights: weights ``(C,)`` that sum to 1; None: 1/n each.
    """
    if floor < 0 or (floor == 0 and not sharp):
        raise ArgumentError(
            f"the estimation term ε̄/(2σ0) needs a floor σ0 > 0, got {floor}; sharp=True has a finite one at 0"
        )
    error_C = error_C.double()
    term_C = error_C / (2 * floor) if floor else torch.full_like(error_C, torch.inf)
    if sharp:
        term_C = torch.minimum(term_C, estimation_cap(error_C, dim))
    delta, estimation = (_mean(values_C, class_weights) for values_C in (non_gaussianity_C, term_C))
    return ControlledBound(lipschitz, delta, rms, math.sqrt(dim) * floor, estimation)


def controlled_bound_full(
    lipschitz: float,
    rms: float,
    floor: float,
    error_C: Tensor,
    dim: int,
    *,
    sharp: bool = False,
    class_weights: Tensor | None = None,
) -> ControlledBound:
    """eq:controlled-bound-full: Δ̄ and the mean term together at most √5·rms.

    ``sharp``: √3, since Δ_i ≤ √2 (tr Σ_i)^{1/2} (:func:`non_gaussianity_cap`) and m + √2 t ≤ √3 (m² + t²)^{1/2}.

    Args:
        lipschitz: G.
        rms: (E‖N1(X) − s_Y‖²)^{1/2}, see :func:`rms_distance`.
        floor: σ0.
        error_C: ‖Σ̂_i − Σ_i‖_F.
        dim: the seam's width k.
        sharp: use the better constant of docs/theory.md instead of the paper's.
        class_weights: weights ``(C,)`` that sum to 1; None: 1/n each.
    """
    consensus, none_C = math.sqrt(3 if sharp else 5) * rms, torch.zeros_like(error_C)
    return controlled_bound(
        lipschitz, none_C, consensus, floor, error_C, dim, sharp=sharp, class_weights=class_weights
    )


def coupling_bound(
    lipschitz: float | Tensor,
    mean_square_C: Tensor,
    sampling_covariance_CKK: Tensor,
    *,
    class_weights: Tensor | None = None,
) -> float:
    """|R − L_sample| ≤ Σ_i w_i G_i (E‖z − s_i‖² + tr Σ̃_i)^{1/2}, from the independent coupling of P_i and Q_i.

    Not in the paper. It asks for nothing but observed quantities and never exceeds eq:controlled-bound-full.

    Args:
        lipschitz: G, one number or one per class.
        mean_square_C: E‖z − s_i‖² of each class.
        sampling_covariance_CKK: Σ̃_i, the covariances that were sampled from.
        class_weights: weights ``(C,)`` that sum to 1; None: 1/n each.
    """
    distance_C = (mean_square_C.double() + trace(sampling_covariance_CKK)).sqrt()
    lipschitz_C = torch.as_tensor(lipschitz, dtype=torch.float64, device=distance_C.device)
    return _mean(lipschitz_C * distance_C, class_weights)


def non_gaussianity_cap(covariance_CKK: Tensor, *, sharp: bool = True) -> Tensor:
    """Δ_i ≤ √2 (tr Σ_i)^{1/2}, whatever the shape of P_i; the paper's constant (``sharp=False``) is 2.

    Independent z ∼ P_i, z' ∼ N(μ_i, Σ_i) have E‖z − z'‖² = 2 tr Σ_i, and W1 ≤ (E‖z − z'‖²)^{1/2}.

    Args:
        covariance_CKK: covariances Σ_i.
        sharp: use the better constant of docs/theory.md instead of the paper's.
    """
    return (math.sqrt(2) if sharp else 2.0) * trace(covariance_CKK).sqrt()


def floor_bias(covariance_CKK: Tensor, floor: float) -> Tensor:
    """bures(Σ_i, Σ_i + σ0²I) itself; cor:controlled bounds it by √k σ0, attained only under full collapse.

    Args:
        covariance_CKK: covariances Σ_i.
        floor: σ0.
    """
    values_CK = torch.linalg.eigvalsh(covariance_CKK.double()).clamp_min(0)
    # √(λ + σ0²) − √λ, written without cancellation
    return (floor**2 / ((values_CK + floor**2).sqrt() + values_CK.sqrt())).norm(dim=-1)


def optimal_floor(error: float, dim: int) -> float:
    """σ0* = (ε̄/(2√k))^{1/2}, the minimiser of √k σ0 + ε̄/(2σ0), which eq:controlled-bound charges for a floor.

    The sampled loss of a convex head rises with σ0 as well, so the minimiser of the whole bound is at most σ0*.

    Args:
        error: ε̄, the mean of ‖Σ̂_i − Σ_i‖_F.
        dim: the seam's width k.
    """
    if error < 0 or dim < 1:
        raise ArgumentError(f"optimal_floor needs ε̄ ≥ 0 and k ≥ 1, got {error} and {dim}")
    return math.sqrt(error / (2 * math.sqrt(dim)))


def estimation_cap(error_C: Tensor, dim: int) -> Tensor:
    """bures(Σ_i + σ0²I, Σ̂_i + σ0²I) ≤ k^{1/4} ‖Σ̂_i − Σ_i‖_F^{1/2} for every σ0 ≥ 0, also σ0 = 0.

    Powers and Størmer: ‖A^{1/2} − B^{1/2}‖_F² ≤ ‖A − B‖_* ≤ √k ‖A − B‖_F.

    Args:
        error_C: ‖Σ̂_i − Σ_i‖_F.
        dim: the seam's width k.
    """
    return dim**0.25 * error_C.double().sqrt()


def epsilon_from_halves(
    covariance_a_CKK: Tensor, covariance_b_CKK: Tensor, counts: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """‖Σ̂_i − Σ_i‖_F of the estimate from all samples, from the estimates of two disjoint halves, ``(C,)``.

    An estimate from m independent samples has mean squared error v/m, and two estimates differ by v/m_a + v/m_b in
    mean square: hence √(m_a m_b)/(m_a + m_b) times their distance, ½ for equal halves. N1 was fitted to the training
    samples, so there this is too small.

    Args:
        covariance_a_CKK: covariances from one half of the samples.
        covariance_b_CKK: covariances from the other half.
        counts: samples per class in each half; None: halves of one size.
    """
    distance_C = torch.linalg.matrix_norm(covariance_a_CKK.double() - covariance_b_CKK.double())
    if counts is None:
        return distance_C / 2
    a_C, b_C = counts[0].double(), counts[1].double()
    if bool((torch.minimum(a_C, b_C) < 1).any()):
        raise ArgumentError(
            "epsilon_from_halves: a half has no sample of some class; it needs two samples per class"
        )
    return distance_C * (a_C * b_C).sqrt() / (a_C + b_C)


def error_probability_bound(risk: float) -> float:
    """P(misclassified) ≤ R/log 2: a wrong arg max leaves the true class p ≤ ½, hence a loss ≥ log 2.

    Args:
        risk: R, the mean cross-entropy.
    """
    return risk / math.log(2)


def _mean(values_C: Tensor, class_weights: Tensor | None) -> float:
    return float((_weights(class_weights, values_C) * values_C.double()).sum())


def _weights(class_weights: Tensor | None, like: Tensor) -> Tensor:
    """Class weights as float64 that sum to one; 1/n each by default (eq:deployed-risk)."""
    C = len(like)
    if class_weights is None:
        return torch.full((C,), 1 / C, dtype=torch.float64, device=like.device)
    if class_weights.shape != (C,) or abs(float(class_weights.sum()) - 1) > 1e-6:
        raise ArgumentError(
            f"class_weights must be ({C},) and sum to 1, got shape {tuple(class_weights.shape)} "
            f"and sum {float(class_weights.sum()):.6g}; divide the class counts by their sum"
        )
    return class_weights.to(dtype=torch.float64, device=like.device)
