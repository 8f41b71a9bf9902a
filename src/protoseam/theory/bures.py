"""Bures distance of covariances, without cancellation.

Legend: C classes (any leading batch shape), K seam width.

The trace form of eq:bures subtracts numbers of size tr A to obtain one that may be 10¹⁰ times smaller. The
variational form of the same number has no such subtraction:

    bures(A, B) = min over orthogonal U of ‖A^{1/2} − B^{1/2} U‖_F,

attained at the polar factor U = QPᵀ of A^{1/2}B^{1/2} = P diag(s) Qᵀ. Everything runs in float64, without gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.errors import ArgumentError


def psd_sqrt(matrix_CKK: Tensor) -> Tensor:
    """The symmetric root of positive semi-definite matrices, float64.

    Eigenvalues that rounding pushed below zero count as zero; anything more negative is an error, because a
    distance to a matrix that is no covariance means nothing.

    Args:
        matrix_CKK: positive semi-definite matrices.
    """
    if matrix_CKK.ndim < 2 or matrix_CKK.shape[-1] != matrix_CKK.shape[-2]:
        raise ArgumentError(
            f"psd_sqrt needs square matrices (..., K, K), got shape {tuple(matrix_CKK.shape)}"
        )
    if not bool(matrix_CKK.isfinite().all()):
        raise ArgumentError(
            "psd_sqrt: a matrix holds NaN or infinity; check the embeddings it was estimated from"
        )
    eps = torch.finfo(matrix_CKK.dtype if matrix_CKK.is_floating_point() else torch.float64).eps
    a_CKK = matrix_CKK.detach().double()
    values_CK, vectors_CKK = torch.linalg.eigh((a_CKK + a_CKK.mT) / 2)
    # a float32 covariance of rank < K has eigenvalues of about −K·ε·λ_max
    slack_C = 10 * values_CK.shape[-1] * eps * values_CK.abs().amax(-1)
    if bool((values_CK.amin(-1) < -slack_C).any()):
        worst = (values_CK.amin(-1) + slack_C).min().item()
        raise ArgumentError(
            f"psd_sqrt: smallest eigenvalue {worst:.3g} is negative beyond rounding, so the matrix is no "
            "covariance; estimate it centred (not as E[zzᵀ] − μμᵀ) and in float64"
        )
    return (vectors_CKK * values_CK.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors_CKK.mT


def bures(a_CKK: Tensor, b_CKK: Tensor) -> Tensor:
    """Bures distance (eq:bures) of each pair of positive semi-definite matrices; float64, shape ``(C,)``.

    Exactly 0 for equal inputs. Otherwise the absolute error is about √ε·(‖A‖ + ‖B‖)^{1/2}, that is 10⁻⁸ of
    the scale, for singular matrices (the root itself is no better conditioned there), and about ε·κ of the
    scale for matrices with condition number κ², however close they are to each other.

    Args:
        a_CKK: covariances.
        b_CKK: covariances of the same shape.
    """
    if a_CKK.shape[-2:] != b_CKK.shape[-2:]:
        raise ArgumentError(
            f"bures compares matrices of one size, got {tuple(a_CKK.shape)} and {tuple(b_CKK.shape)}: "
            "take both covariances at the same seam"
        )
    root_a_CKK, root_b_CKK = psd_sqrt(a_CKK), psd_sqrt(b_CKK)
    p_CKK, _, qt_CKK = torch.linalg.svd(root_a_CKK @ root_b_CKK)
    polar_CKK = qt_CKK.mT @ p_CKK.mT
    aligned_C = torch.linalg.matrix_norm(root_a_CKK - root_b_CKK @ polar_CKK)
    # U = I is admissible too. It is the minimiser for commuting matrices, and free of the SVD's rounding.
    return torch.minimum(aligned_C, torch.linalg.matrix_norm(root_a_CKK - root_b_CKK))


def trace(matrix_CKK: Tensor) -> Tensor:
    """Return tr A of each matrix, float64."""
    return matrix_CKK.double().diagonal(dim1=-2, dim2=-1).sum(-1)
