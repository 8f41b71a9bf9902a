"""The head in closed form: what a linear N2 should be if the classes are Gaussians with one covariance.

Legend: C classes, K seam width.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear_discriminant", "pooled_covariance"]


def linear_discriminant(
    mean_CK: Tensor, covariance_KK: Tensor, prior_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The linear discriminant: softmax(W z + b) is the posterior of N(m_c, Σ) with prior π_c.

    W_c = Σ⁻¹ m_c and b_c = −½ m_cᵀ Σ⁻¹ m_c + log π_c, in float64. What all classes share cancels in the softmax, so
    the means are centred first: that keeps the weights small.

    Args:
        mean_CK: centres of the classes, here the prototypes.
        covariance_KK: Σ, positive definite.
        prior_C: π; uniform unless given. A class with prior 0 gets the smallest positive one instead.

    Returns:
        ``(weight_CK, bias_C)`` of ``nn.Linear(K, C)``.
    """
    mean_CK = mean_CK.double()
    centre_K = mean_CK.mean(0)
    m_CK = mean_CK - centre_K
    weight_CK = torch.linalg.solve(covariance_KK.double(), m_CK.T).T
    bias_C = -0.5 * (weight_CK * m_CK).sum(1)
    if prior_C is not None:
        prior_C = prior_C.double()
        bias_C = bias_C + torch.where(prior_C > 0, prior_C, prior_C[prior_C > 0].min()).log()
    # W(z − centre) + b, and no constant that the softmax would not see
    bias_C = bias_C - weight_CK @ centre_K
    return weight_CK, bias_C - bias_C.mean()


def pooled_covariance(factors: Tensor, dim: int) -> Tensor:
    """The mean of the classes' Σ̃ as ``(K, K)``, from factors of any structure (:mod:`protoseam.core.sampling`).

    Args:
        factors: factors of Σ̃, of a shape of :mod:`protoseam.core.sampling`.
        dim: the seam's width k.

    Returns:
        ``(K, K)``, float64.
    """
    factors = factors.double()
    if factors.ndim == 2:  # standard deviations
        return torch.diag(factors.square().mean(0).expand(dim))
    return (factors @ factors.mT).mean(0)
