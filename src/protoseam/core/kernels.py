"""Two of this room's formulas as one Triton kernel each, for CUDA: beside a network, what counts is their number.

The functions in :mod:`~protoseam.core.objective` and :mod:`~protoseam.core.covariance` say what is computed and call
these where they apply; everything is float64 inside, as there.
"""
# mypy: ignore-errors
# The bodies below are Triton's language, compiled when first launched.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements a program works on at once
MAX_WIDTH = 64  # of a class's moments: a scatter lives in one program's registers
MAX_BATCH = 4096  # whose labels a program holds


@triton.jit
def _repulsion(s, value, gradient, alpha: tl.float64, C, K: tl.constexpr, KP: tl.constexpr, BJ: tl.constexpr):
    """One prototype per program: half its energy, and ∂P/∂s_i = −α Σ_j e^{−αd}/d (s_i − s_j)."""
    i = tl.program_id(0)
    k = tl.arange(0, KP)
    own = tl.load(s + i * K + k, mask=k < K, other=0.0).to(tl.float64)
    force = tl.zeros((KP,), tl.float64)
    energy = tl.zeros((BJ,), tl.float64)
    for first in range(0, C, BJ):
        j = first + tl.arange(0, BJ)
        inside = (j < C)[:, None] & (k < K)[None, :]
        difference = own[None, :] - tl.load(s + j[:, None] * K + k[None, :], mask=inside, other=0.0).to(
            tl.float64
        )
        difference = tl.where(inside, difference, 0.0)
        squared = tl.sum(difference * difference, 1)
        distance = tl.sqrt(squared)
        e = tl.where((j != i) & (j < C), tl.exp(-alpha * distance), 0.0)
        # Coincident prototypes get the subgradient 0; NaN is not zero, and shows. Differences are exact here, so unlike
        # in the blocks' matrix products only what is equal to the last bit coincides.
        w = tl.where(squared == 0.0, 0.0, e / distance)
        force += tl.sum(w[:, None] * difference, 0)
        energy += e
    tl.store(value + i, 0.5 * tl.sum(energy, 0))
    tl.store(gradient + i * K + k, (-alpha * force).to(gradient.dtype.element_ty), mask=k < K)


def repulsion(s_CK: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """P(S), float64, and its gradient in the dtype of ``s_CK``."""
    C, K = s_CK.shape
    s_CK = s_CK.contiguous()
    value_C = torch.empty(C, dtype=torch.float64, device=s_CK.device)
    gradient_CK = torch.empty_like(s_CK)
    padded = triton.next_power_of_2(K)
    with torch.cuda.device_of(s_CK):  # Triton launches on the current device, torch on the tensor's
        _repulsion[(C,)](
            s_CK, value_C, gradient_CK, alpha, C, K=K, KP=padded, BJ=max(1, _TILE // padded), num_warps=4
        )
    return value_C.sum(), gradient_CK


@triton.jit
def _merge(
    z,
    y,
    count,
    mean,
    scatter,
    window: tl.float64,
    mean_window: tl.float64,
    B,
    K: tl.constexpr,
    KP: tl.constexpr,
    BP: tl.constexpr,
):
    """One class per program: its samples of the batch in order, their moments, and the merge of `merge_batch_`."""
    c = tl.program_id(0)
    row = tl.arange(0, BP)
    mine = tl.load(y + row, mask=row < B, other=-1) == c
    first = tl.min(tl.where(mine, row, BP), 0)
    k = tl.arange(0, KP)
    inside = k < K
    old = tl.load(count + c)
    old_mean = tl.load(mean + c * K + k, mask=inside, other=0.0)
    new = tl.sum(mine.to(tl.float64), 0)
    total = tl.zeros((KP,), tl.float64)
    b = first
    while b < BP:
        total += tl.load(z + b * K + k, mask=inside, other=0.0).to(tl.float64)
        b = tl.min(tl.where(mine & (row > b), row, BP), 0)
    batch_mean = total / tl.where(new > 0.0, new, 1.0)
    at = c * K * K + k[:, None] * K + k[None, :]
    square = inside[:, None] & inside[None, :]
    kept = tl.minimum(old, tl.maximum(window - new, 0.0))
    keep = kept / tl.where(old > 0.0, old, 1.0)
    anchor = tl.minimum(kept, mean_window)
    whole = anchor + new
    share = new / tl.where(whole > 0.0, whole, 1.0)
    delta = batch_mean - old_mean
    sums = tl.load(scatter + at, mask=square, other=0.0) * keep
    b = first
    while b < BP:
        r = tl.load(z + b * K + k, mask=inside, other=0.0).to(tl.float64) - batch_mean
        r = tl.where(tl.abs(r) < float("inf"), r, 0.0)
        sums += r[:, None] * r[None, :]
        b = tl.min(tl.where(mine & (row > b), row, BP), 0)
    sums += (anchor * share) * delta[:, None] * delta[None, :]
    tl.store(scatter + at, sums, mask=square)
    tl.store(mean + c * K + k, old_mean + delta * share, mask=inside)
    tl.store(count + c, kept + new)


def merge_batch(
    count_C: Tensor,
    mean_CK: Tensor,
    scatter_CKK: Tensor,
    z_BK: Tensor,
    y_B: Tensor,
    window: float,
    mean_window: float,
) -> None:
    """`merge_batch_` for full scatters at most ``MAX_WIDTH`` wide and batches of at most ``MAX_BATCH``."""
    C, K = mean_CK.shape
    z_BK, y_B = z_BK.contiguous(), y_B.contiguous()
    # far beyond any count, and unlike infinity a number that every product and minimum below takes
    mean_window = min(mean_window, 1e18)
    with torch.cuda.device_of(mean_CK):
        _merge[(C,)](
            z_BK, y_B, count_C, mean_CK, scatter_CKK, window, mean_window, len(y_B), K=K,
            KP=triton.next_power_of_2(K), BP=triton.next_power_of_2(max(1, len(y_B))), num_warps=4,
        )  # fmt: skip
