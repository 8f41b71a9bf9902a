"""The optimizer's update as one Triton kernel: each number is read and written once."""
# mypy: ignore-errors
# The kernel's body is Triton's language, compiled when first launched.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _sgd(
    master, velocity, grad, work, lr_ptr, ok_ptr, scale, n, momentum, decay,
    GUARDED: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if GUARDED:
        mask = mask & (tl.load(ok_ptr) != 0)
    lr = tl.load(lr_ptr) * scale
    p = tl.load(master + at, mask=mask, other=0.0)
    v = tl.load(velocity + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) + decay * p
    v = momentum * v + g
    p = p - lr * (g + momentum * v)
    tl.store(master + at, p, mask=mask)
    tl.store(velocity + at, v, mask=mask)
    if SEPARATE:
        tl.store(work + at, p.to(work.dtype.element_ty), mask=mask)


def sgd_update(
    master: Tensor,
    velocity: Tensor,
    grad: Tensor,
    work: Tensor,
    lr: Tensor,
    ok: Tensor | None,
    scale: float,
    momentum: float,
    decay: float,
) -> None:
    """g ← ∇ + λp;  v ← μv + g;  p ← p − η(g + μv), and the working copy follows; nothing if ``ok`` is 0."""
    n = master.numel()
    _sgd[(triton.cdiv(n, _BLOCK),)](
        master, velocity, grad, work, lr, master if ok is None else ok, scale, n, momentum, decay,
        GUARDED=ok is not None, SEPARATE=work is not master, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
