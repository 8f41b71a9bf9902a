"""How large a step may be: limits that follow from the objective, so that no threshold has to be tuned.

Each half of a lifted network minimises a term whose shape is known, which says how far a gradient can be trusted at a
learning rate. Plain gradient steps (SGD) beyond these limits diverge. Everything stays on the device: no value is read
by the host.

Legend: B batch, C classes, D features, K seam width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protoseam.core.precision import at_least_float32, no_autocast

__all__ = [
    "batch_share",
    "consensus_factor",
    "feature_curvature",
    "feature_factor",
    "head_factor",
    "prototype_factors",
]

# Measured with SGD (momentum .9) on the first-try panel (benchmarks/first_try.py); docs/method-card.md has the figures.
KAPPA_FEATURES = 1.0
KAPPA_POLYAK = 1.0
KAPPA_WEIGHTS = 0.01
KAPPA_HEAD = 1.0
KAPPA_PROTOTYPES = 0.1
_TINY = 1e-30


def feature_curvature(h_BD: Tensor) -> Tensor:
    """‖Ê[(h, 1)(h, 1)ᵀ]‖_F over a batch: how curved least squares is in the weights and the bias that read h.

    Steps along the mean of all samples are stable up to the inverse of the largest eigenvalue of R = E[(h, 1)(h, 1)ᵀ],
    steps along one sample's gradient up to that of its trace E‖(h, 1)‖² (the normalised LMS filter). A batch lies
    between: the squared Frobenius norm of its Ê has the mean ‖R‖²_F + about tr(R)²/B.

    Args:
        h_BD: the Linear's input; leading axes count as samples.

    Returns:
        A scalar, at least Ê's largest eigenvalue and at most its trace.
    """
    h = F.pad(at_least_float32(h_BD.flatten(0, -2)), (0, 1), value=1.0)
    B, D = h.shape
    with no_autocast(h.device):  # the norm of either product is the same
        gram = h @ h.T if B < D else h.T @ h
    return torch.linalg.vector_norm(gram) / B


def batch_share(batch: float | Tensor, momentum: float) -> float | Tensor:
    """min(1, B(1 − μ)/(1 + μ)): how much of a step's limit SGD with momentum μ can use on B samples.

    The limits of :func:`consensus_factor` and :func:`feature_factor` hold for one step along the gradient. A velocity
    Σ_j μʲ g_{t−j} is worth the mean of (Σ μʲ)²/Σ μ²ʲ = (1 + μ)/(1 − μ) gradients, 19 for μ = 0.9. With fewer samples
    than that per step, single samples decide too much of it: measured in docs/method-card.md.

    Args:
        batch: samples behind the gradient.
        momentum: SGD's μ.

    Returns:
        A share in (0, 1]; a scalar tensor if ``batch`` is one.
    """
    share = batch * (1 - momentum) / (1 + momentum)
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share)


def feature_factor(
    rho: float | Tensor, curvature: Tensor, lr: float | Tensor, share: float | Tensor = 1.0
) -> Tensor:
    """min(1, 1/(lr·ρ·c)): how much of its gradient the Linear that ends N1 can take at rate ``lr``.

    In this layer's weights the consensus term is a least-squares problem of curvature ρ·E[hhᵀ], h the layer's input.

    Args:
        rho: the penalty ρ.
        curvature: c of :func:`feature_curvature`.
        lr: N1's learning rate.
        share: how much of the limit to use, :func:`batch_share`.

    Returns:
        A factor in (0, 1], a scalar.
    """
    return (share * KAPPA_FEATURES / (rho * curvature) / lr).clamp_(max=1.0)


def consensus_factor(
    loss: Tensor,
    gradient_square: Tensor,
    weight_square: Tensor,
    lr: float | Tensor,
    share: float | Tensor = 1.0,
) -> Tensor:
    """The share of N1's gradient that a step at rate ``lr`` can take, at most 1: the smaller of two limits.

    *The curvature along the gradient.* A quadratic of curvature c with minimum 0 has L/‖∇L‖² = 1/(2c), which gives
    Polyak's step L/(lr·‖∇L‖²), here as in ALI-G (Berrada, Zisserman & Kumar 2020).

    *The size of the weights.* A step is at most a hundredth of N1's weights, lr·‖∇L‖ ≤ 0.01·‖θ1‖: larger ones, noisy in
    small batches, can kill every ReLU before the curvature has grown.

    Args:
        loss: the consensus term L of the batch.
        gradient_square: ‖∇L‖² over all parameters of N1.
        weight_square: ‖θ1‖² of the same parameters.
        lr: N1's learning rate.
        share: how much of each limit to use, :func:`batch_share`.

    Returns:
        A factor in (0, 1], a scalar.
    """
    gradient_square = gradient_square + _TINY
    longest = torch.minimum(
        KAPPA_POLYAK * loss / gradient_square, KAPPA_WEIGHTS * (weight_square / gradient_square).sqrt_()
    )
    return (share * longest / lr).clamp_(max=1.0)


def head_factor(prototypes_CK: Tensor, factors: Tensor, lr: float | Tensor) -> Tensor:
    """min(1, κ/(lr·½(E‖z‖² + 1))) for a linear N2 on samples z of the seam; + 1 is for its bias.

    Cross-entropy's second derivative in the logits is at most ½, so the curvature in N2's weights is at most
    ½·E‖(z, 1)‖², with E‖z‖² = mean ‖s_i‖² + tr Σ̃_i known without drawing a sample.

    Args:
        prototypes_CK: S, one prototype per class.
        factors: factors of Σ̃, of a shape of :mod:`protoseam.core.sampling`.
        lr: learning rate.

    Returns:
        A factor in (0, 1], a scalar.
    """
    C, K = prototypes_CK.shape
    # tr Σ̃ summed over the classes; a leading or trailing 1 of the factors stands for all classes or coordinates
    copies = C // len(factors) * (1 if factors.ndim == 3 else K // factors.shape[1])
    square = torch.linalg.vector_norm(prototypes_CK).square_()
    square = square + copies * torch.linalg.vector_norm(factors).square_()
    return (2 * KAPPA_HEAD * C / (lr * (square + C))).clamp_(max=1.0)


def prototype_factors(gradient_CK: Tensor, alpha: float, lr: float | Tensor) -> Tensor:
    """min(1, κ/(α·lr·‖∇_i‖)) for each prototype, ``(C, 1)``: no step is longer than κ/α.

    1/α is the distance over which repulsion fades, the only length the objective knows. Near-coincident prototypes
    repel with a force of ρα each, however close they are, so a step could otherwise throw them far apart.

    Args:
        gradient_CK: the prototypes' gradients.
        alpha: rate at which repulsion fades with distance; 2 in the paper.
        lr: learning rate.

    Returns:
        Factors in (0, 1], ``(C, 1)``.
    """
    length_C1 = torch.linalg.vector_norm(gradient_CK, dim=1, keepdim=True)
    return (KAPPA_PROTOTYPES / (alpha * lr) / length_C1).clamp_(max=1.0)
