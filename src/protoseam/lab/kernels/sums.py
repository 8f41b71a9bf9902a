"""Sums over the rows of partial results, in a fixed order: the last step of every reduction over a batch."""
# mypy: ignore-errors
# The kernel's body is Triton's language, compiled when first launched.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32  # columns per program


@triton.jit
def _column_sums(part, out, rows, width, BP: tl.constexpr, BC: tl.constexpr):
    """out[z] = Σ over the rows of part[z] (rows, width)."""
    z = tl.program_id(1).to(tl.int64)
    part += z * rows * width
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    acc = tl.zeros((BP, BC), tl.float32)
    for i in range(0, rows, BP):
        r = i + tl.arange(0, BP)
        ok = (r < rows)[:, None] & (cols < width)[None, :]
        acc += tl.load(part + r[:, None] * width + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(out + z * width + cols, tl.sum(acc, 0).to(out.dtype.element_ty), mask=cols < width)


def column_sums(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``part.sum(1)`` of ``(count, rows, width)``, added in float32, as ``dtype``."""
    count, rows, width = part.shape
    out = torch.empty(count, width, device=part.device, dtype=dtype)
    _column_sums[(triton.cdiv(width, _COLUMNS), count)](
        part, out, rows, width, BP=128, BC=_COLUMNS, num_warps=4
    )
    return out
