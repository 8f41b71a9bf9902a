"""What the eigenvalues of the class covariances say, averaged over the classes.

Legend: C classes, K seam width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError


@dataclass(frozen=True)
class Spectrum:
    """``eigenvalue_K``: the largest eigenvalue averaged over the classes, then the second largest, …"""

    eigenvalue_K: Tensor
    trace: float  # mean of tr Σ_i
    effective_rank: (
        float  # mean of exp(entropy of λ/tr Σ_i): K when isotropic, 1 when one direction has it all
    )
    condition_median: float  # of λ_max/λ_min; infinite for a class with n ≤ K samples and no floor
    condition_max: float


def covariance_spectrum(covariance_CKK: Tensor) -> Spectrum:
    """Spectrum of a stack of covariances, each class with the same weight; float64."""
    if covariance_CKK.ndim != 3 or covariance_CKK.shape[-1] != covariance_CKK.shape[-2]:
        raise ArgumentError(
            f"covariance_spectrum needs one square matrix a class, (C, K, K); got {tuple(covariance_CKK.shape)}"
        )
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
