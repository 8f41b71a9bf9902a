"""How far embeddings lie from the classes' Gaussians N(s_c, Σ̃_c).

Legend: B batch, C classes, K seam width. Factors have one of the shapes of :mod:`protoseam.core.sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.errors import ArgumentError

__all__ = ["mahalanobis"]

# Doubles in one block of whitened residuals: 2 Mi are 16 MiB.
_BLOCK_ELEMENTS = 2**21


def mahalanobis(z_BK: Tensor, prototypes_CK: Tensor, factors: Tensor) -> Tensor:
    """Squared Mahalanobis distances (z − s_c)ᵀ Σ̃_c⁻¹ (z − s_c), in float64.

    With Σ̃ = L Lᵀ this is ‖L⁻¹(z − s_c)‖²: a triangular solve per class, no inverse.

    Args:
        z_BK: embeddings.
        prototypes_CK: centres of the classes.
        factors: L, as ``(C, K, K)`` or ``(1, K, K)`` lower triangular, or standard deviations ``(C, K)`` or ``(1, 1)``.

    Returns:
        ``(B, C)``.

    Raises:
        ArgumentError: if embeddings and prototypes differ in width.
    """
    B, K = z_BK.shape
    C = len(prototypes_CK)
    if prototypes_CK.shape[1] != K:
        raise ArgumentError(
            f"embeddings have width {K} but prototypes {prototypes_CK.shape[1]}: give both from one seam"
        )
    z_BK, s_CK, factors = z_BK.double(), prototypes_CK.double(), factors.double()
    step = max(1, _BLOCK_ELEMENTS // max(1, B * K))
    blocks = []
    for lo in range(0, C, step):
        r_cKB = (z_BK - s_CK[lo : lo + step, None]).mT
        own = factors if len(factors) == 1 else factors[lo : lo + step]
        if factors.ndim == 2:  # standard deviations
            white_cKB = r_cKB / own[:, :, None]
        else:
            white_cKB = torch.linalg.solve_triangular(own.expand(len(r_cKB), K, K), r_cKB, upper=False)
        blocks.append(white_cKB.square().sum(1))
    return torch.cat(blocks).mT
