"""Samples around the prototypes: z_i = s_i + Σ̃_i^{1/2} ξ.

Legend: M draws per class, C classes, K seam width.

A *factor* is any of the shapes below; the leading 1 broadcasts over the classes and the trailing 1 over the
coordinates, so one function serves every covariance structure:

==============  =====================================================
``(C, K, K)``   one lower-triangular Cholesky factor per class (full)
``(1, K, K)``   one factor for all classes (shared)
``(C, K)``      standard deviations (diagonal)
``(1, 1)``      one standard deviation for everything (isotropic)
==============  =====================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.core.precision import at_least_float32, no_autocast
from protoseam.errors import ArgumentError

__all__ = ["apply_factors", "sample"]


def apply_factors(factors: Tensor, xi_MCK: Tensor) -> Tensor:
    """Σ̃^{1/2} ξ for each draw and class, for any of the factor shapes above."""
    if factors.ndim == 2:  # standard deviations: (C or 1, K or 1)
        return factors * xi_MCK
    if factors.ndim != 3:
        raise ArgumentError(
            f"factors must be (C, K, K), (1, K, K), (C, K) or (1, 1); got shape {tuple(factors.shape)}"
        )
    if factors.shape[0] == 1:  # one matrix: a single GEMM over all draws of all classes
        return xi_MCK @ factors[0].mT
    # (C, K, K) @ (C, K, M): each factor is read once, however many draws there are
    return torch.bmm(factors, xi_MCK.permute(1, 2, 0)).permute(2, 0, 1)


def check_draws(draws: int, antithetic: bool) -> None:
    if draws < 1:
        raise ArgumentError(f"draws must be at least 1, got {draws}")
    if antithetic and draws % 2:
        raise ArgumentError(f"antithetic draws come in pairs: draws must be even, got {draws}")


def sample(
    prototypes_CK: Tensor,
    factors: Tensor,
    *,
    draws: int = 1,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """eq:reparam: ``(draws, C, K)`` samples z_i = s_i + Σ̃_i^{1/2} ξ with ξ ~ N(0, I).

    Gradients flow to the prototypes and nowhere else: the factors are constants within an epoch.
    ``antithetic`` pairs every ξ with −ξ, which cancels the odd-order Monte-Carlo error; ``draws`` must then
    be even.

    Args:
        prototypes_CK: S, one prototype per class.
        factors: factors of Σ̃, of a shape of :mod:`protoseam.core.sampling`.
        draws: samples per class; 1 (alg:lifted, line 5).
        antithetic: pair every ξ with −ξ; needs an even number of draws.
        generator: of every draw.

    Returns:
        ``(draws, C, K)``.

    Raises:
        ArgumentError: the number of draws is below 1, or odd with ``antithetic``.
    """
    check_draws(draws, antithetic)
    s_CK = at_least_float32(prototypes_CK)
    C, K = s_CK.shape
    with no_autocast(s_CK.device):  # a bf16 product would coarsen every sample
        xi_MCK = torch.randn(
            draws // 2 if antithetic else draws,
            C,
            K,
            dtype=s_CK.dtype,
            device=s_CK.device,
            generator=generator,
        )
        if antithetic:
            xi_MCK = torch.cat([xi_MCK, -xi_MCK])
        return s_CK + apply_factors(factors.detach().to(s_CK.dtype), xi_MCK)
