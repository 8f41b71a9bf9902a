"""How large a step may be: limits that follow from the objective, so that no threshold has to be tuned.

Each half of a lifted network minimises a term whose shape is known, which says how far a gradient can be trusted at a
learning rate. Plain gradient steps (SGD) beyond these limits diverge. Everything stays on the device: no value is read
by the host.

Legend: C classes, K seam width, P parts of N1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["batch_share", "consensus_factors", "head_factor", "prototype_factors"]

# Measured with SGD (momentum .9) on the first-try panel (benchmarks/first_try.py); docs/method-card.md has the figures.
KAPPA_POLYAK = 1.0
KAPPA_WEIGHTS = 0.01
KAPPA_HEAD = 1.0
KAPPA_PROTOTYPES = 0.1
_LEAST_PART = 0.01
_TINY = 1e-30


def batch_share(batch: float | Tensor, momentum: float) -> float | Tensor:
    """min(1, B(1 − μ)/(1 + μ)): how much of a step's limit SGD with momentum μ can use on B samples.

    The limits of :func:`consensus_factors` hold for one step along the gradient. A velocity Σ_j μʲ g_{t−j} is worth the
    mean of (Σ μʲ)²/Σ μ²ʲ = (1 + μ)/(1 − μ) gradients, 19 for μ = 0.9. With fewer samples than that per step, single
    samples decide too much of it: measured in docs/method-card.md.

    Args:
        batch: samples behind the gradient.
        momentum: SGD's μ.

    Returns:
        A share in (0, 1]; a scalar tensor if ``batch`` is one.
    """
    share = batch * (1 - momentum) / (1 + momentum)
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share)


def consensus_factors(
    loss: Tensor,
    gradient_square_P: Tensor,
    weight_square_P: Tensor,
    lr: float | Tensor,
    share: float | Tensor = 1.0,
) -> Tensor:
    """The share of its gradient that each part of N1 can take at rate ``lr``, at most 1: the smaller of two limits.

    *The curvature along the gradient,* of all parts together. A quadratic of curvature c with minimum 0 has
    L/‖∇L‖² = 1/(2c), which gives Polyak's step L/(lr·‖∇L‖²), here as in ALI-G (Berrada, Zisserman & Kumar 2020).

    *The size of the weights,* of each part. A step is at most a hundredth of a part's weights, lr·‖∇_p‖ ≤ 0.01·‖θ_p‖:
    larger ones, noisy in small batches, can kill every ReLU before the curvature has grown. Weights below a hundredth
    of all count as that hundredth, so that a part which starts at 0 can leave it.

    Args:
        loss: the consensus term L of the batch.
        gradient_square_P: ‖∇_p L‖² over the parameters of each part.
        weight_square_P: ‖θ_p‖² of the same parameters.
        lr: N1's learning rate.
        share: how much of each limit to use, :func:`batch_share`.

    Returns:
        Factors in (0, 1], ``(P,)``.
    """
    gradient_square_P = gradient_square_P + _TINY
    weight_square_P = torch.maximum(weight_square_P, _LEAST_PART**2 * weight_square_P.sum())
    longest_P = torch.minimum(
        KAPPA_POLYAK * loss / gradient_square_P.sum(),
        KAPPA_WEIGHTS * (weight_square_P / gradient_square_P).sqrt_(),
    )
    return (share * longest_P / lr).clamp_(max=1.0)


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
