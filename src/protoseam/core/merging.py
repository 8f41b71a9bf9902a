"""Moments of a union from the moments of its parts, never un-centred; and a batch merged into running moments.

Legend: B batch, C classes, c classes of a block, K seam width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protoseam.core.covariance import BLOCK_ELEMENTS, Moments, is_shared, or_one
from protoseam.core.devices import cuda_kernels

__all__ = ["between_scatter", "merge_batch_", "merge_moments"]


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of the union of two samples (Chan, Golub & LeVeque 1983), never un-centring either.

    Args:
        a: moments of one sample.
        b: moments of another.

    Returns:
        ``Moments`` of the union.
    """
    n_C = a.count_C + b.count_C
    share_C = b.count_C / or_one(n_C)
    delta_CK = b.mean_CK - a.mean_CK
    mean_CK = a.mean_CK + delta_CK * share_C[:, None]
    between = between_scatter(a.count_C * share_C, delta_CK, a.scatter)
    return Moments(n_C, mean_CK, a.scatter + b.scatter + between)


def between_scatter(weight_C: Tensor, delta_CK: Tensor, like: Tensor) -> Tensor:
    """w_c δ_c δ_cᵀ a class, in the structure of ``like``: what moving a mean by δ adds to a scatter."""
    if like.ndim == 2:
        return weight_C[:, None] * delta_CK.square()
    if is_shared(like, len(weight_C)):
        return ((weight_C[:, None] * delta_CK).T @ delta_CK)[None]
    return (weight_C[:, None] * delta_CK)[:, :, None] * delta_CK[:, None, :]


def merge_batch_(
    moments: Moments, z_BK: Tensor, y_B: Tensor, *, window: float, mean_window: float = math.inf
) -> None:
    """Merge one batch into running moments, in place, with static shapes and no host sync.

    Same algebra as :func:`merge_moments`, after old statistics have been given the weight of at most
    ``window`` − n_b samples: a class is described by about its last ``window`` samples, so embeddings that
    drift within an epoch leave no more than a window's worth of trace.

    The mean may follow faster, after ``mean_window`` samples: if it drifts by v per sample, it lags v·mean_window
    behind, and the square of that lag counts as spread. What is paid is the mean's own noise, a share of
    about 1/(2·mean_window) of Σ̂. With both windows larger than the data this is exactly the union.

    Args:
        moments: the moments so far; updated in place.
        z_BK: embeddings N1(x).
        y_B: labels.
        window: samples per class to remember.
        mean_window: samples per class that the mean remembers.
    """
    count_C, mean_CK, scatter = moments
    C, K = mean_CK.shape
    kernels = cuda_kernels(mean_CK)
    full = scatter.ndim == 3 and not is_shared(scatter, C)
    if kernels is not None and full and kernels.MAX_WIDTH >= K and len(y_B) <= kernels.MAX_BATCH:
        kernels.merge_batch(count_C, mean_CK, scatter, z_BK.detach(), y_B, window, mean_window)
        return
    z_BK = z_BK.detach().double()
    new_C = torch.zeros_like(count_C).index_add_(0, y_B, torch.ones_like(z_BK[:, 0]))
    batch_mean_CK = torch.zeros_like(mean_CK).index_add_(0, y_B, z_BK) / or_one(new_C)[:, None]
    r_BK = z_BK - batch_mean_CK.index_select(0, y_B)
    # a non-finite sample must spoil its own class (its mean does), not the others through 0·NaN below
    r_BK = torch.where(r_BK.isfinite(), r_BK, 0.0)
    kept_C = torch.minimum(count_C, (window - new_C).clamp_min(0))
    keep_C = kept_C / or_one(count_C)
    anchor_C = kept_C.clamp_max(mean_window)  # the old mean's weight against the batch's
    share_C = new_C / or_one(anchor_C + new_C)
    delta_CK = batch_mean_CK - mean_CK  # whatever it is for a class without new samples, its share is 0
    weight_C = anchor_C * share_C
    if scatter.ndim == 2:
        scatter.mul_(keep_C[:, None]).index_add_(0, y_B, r_BK.square())
        scatter.add_(between_scatter(weight_C, delta_CK, scatter))
    elif is_shared(scatter, C):
        # pooled: the old sum keeps the share of samples that stay
        scatter.mul_(kept_C.sum() / or_one(count_C.sum())).add_(r_BK.T @ r_BK)
        scatter.add_(between_scatter(weight_C, delta_CK, scatter))
    else:
        # one masked product per block of classes: deterministic, no sort, no atomics, no B×K×K tensor
        step = max(1, BLOCK_ELEMENTS // (K * max(K, len(y_B))))
        label_C = torch.arange(C, device=y_B.device)
        for lo in range(0, C, step):
            block = slice(lo, lo + step)
            mask_cB = label_C[block, None] == y_B
            within = (mask_cB[:, None, :] * r_BK.T) @ r_BK
            scatter[block].mul_(keep_C[block, None, None]).add_(within)
            scatter[block].baddbmm_(
                (weight_C[block, None] * delta_CK[block])[:, :, None], delta_CK[block, None, :]
            )
    mean_CK.add_(delta_CK * share_C[:, None])
    count_C.copy_(kept_C + new_C)
