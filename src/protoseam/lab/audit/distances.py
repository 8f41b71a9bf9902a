"""Transport distances of an audit: Δ_i from both sides, W1(P_i, Q_i) from above, and a quick Bures distance.

Legend: N held-out samples, P classes that have held-out samples, K seam width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from protoseam.lab.audit.terms import CONFIDENCE
from protoseam.theory.bounds import non_gaussianity_cap
from protoseam.theory.bures import trace
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


def seam_distances(
    z_NK: Tensor,
    label_N: Tensor,
    mean_PK: Tensor,
    covariance_PKK: Tensor,
    prototype_PK: Tensor,
    sampling_PKK: Tensor,
    generator: torch.Generator,
    settings: AuditSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Δ_i from above and from below, the latter's null, and W1(P_i, Q_i) from above."""
    unknown_P = torch.full((len(mean_PK),), math.nan, dtype=torch.float64)
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
        delta, direct = certify(mean_PK, covariance_PKK), certify(prototype_PK, sampling_PKK)
        upper_P, transport_P = delta.upper_C, direct.upper_C
    else:
        upper_P = non_gaussianity_cap(covariance_PKK)
        spread_P = (mean_PK - prototype_PK).square().sum(1) + trace(covariance_PKK)
        transport_P = (spread_P + trace(sampling_PKK)).sqrt()
    if not settings.directions:
        return upper_P, unknown_P, unknown_P, transport_P
    sliced = sliced_w1(
        z_NK, label_N, len(mean_PK), generator=generator, directions=settings.directions, null_repeats=2
    )
    return upper_P, sliced.value_C, sliced.null_C, transport_P


def quick_bures(covariance_PKK: Tensor, root_PKK: Tensor) -> Tensor:
    """Bures distance to Σ̃ = LLᵀ from the eigenvalues of LᵀΣL alone: a tenth of the time of :func:`bures`.

    The trace form of eq:bures, so about 10⁻³ of the scale is lost where the two nearly agree.
    """
    value_PK = torch.linalg.eigvalsh(root_PKK.mT @ covariance_PKK @ root_PKK).clamp_min(0)
    square_P = trace(covariance_PKK) + root_PKK.square().sum((-2, -1)) - 2 * value_PK.sqrt().sum(-1)
    return square_P.clamp_min(0).sqrt()
