"""Triton kernels for what a captured step does besides the network: take a batch, keep the books, update.

As separate operations these would be about forty launches between those of the network.
"""
# mypy: ignore-errors
# The kernel's body is Triton's language, compiled when first launched.

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_COMPILING = threading.Lock()


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the Triton kernels that this thread launches inside the context, in parallel, without running them.

    A step needs about twenty kernels; compiled one by one they make the first start slow. A kernel that fails to
    compile raises its error when it is launched.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # an older Triton
        yield
        return
    owner = threading.get_ident()
    with _COMPILING, ThreadPoolExecutor(os.cpu_count()) as pool:
        run = triton.JITFunction.run

        def compile_only(self, *args, warmup, **more):
            return run(self, *args, warmup=warmup or threading.get_ident() == owner, **more)

        triton.JITFunction.run = compile_only
        try:
            # a backward in this thread, not in one that it shares with others
            with (
                torch.autograd.set_multithreading_enabled(False),
                triton.AsyncCompileMode(pool, ignore_errors=True),
            ):
                yield
        finally:
            triton.JITFunction.run = run


@triton.jit
def _take(
    images, labels, rates, counter, x, y, lr, steps, batch, row, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.load(counter)
    first = (t % steps) * batch
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < batch * row
    tl.store(x + at, tl.load(images + first * row + at, mask=mask), mask=mask)
    if tl.program_id(0) == 0:
        j = tl.arange(0, PADDED)
        tl.store(y + j, tl.load(labels + first + j, mask=j < batch), mask=j < batch)
        tl.store(lr, tl.load(rates + t))


def take_batch(
    images: Tensor,
    labels: Tensor,
    rates: Tensor,
    counter: Tensor,
    x: Tensor,
    y: Tensor,
    lr: Tensor,
    steps: int,
) -> None:
    """Write batch ``counter % steps`` of an epoch's images and labels into ``x`` and ``y``, and its rate into ``lr``.

    Rows of ``images`` are contiguous in memory, in the order of ``x``'s.
    """
    batch = len(y)
    _take[(triton.cdiv(x.numel(), _BLOCK),)](
        images, labels, rates, counter, x, y, lr, steps, batch, x.numel() // batch,
        PADDED=triton.next_power_of_2(batch), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _book(
    losses, flag, ok, sums, bad, first_bad, counter, terms, KEEP_GOING: tl.constexpr, PADDED: tl.constexpr
):
    j = tl.arange(0, PADDED)
    term = tl.load(losses + j, mask=j < terms, other=0.0)
    total = tl.load(losses)
    before = tl.load(bad)
    finite = (tl.load(flag) == 0) & (tl.abs(total) < float("inf"))  # NaN is not less either
    good = finite if KEEP_GOING else finite & (before == 0)
    t = tl.load(counter)
    tl.store(ok, good.to(tl.int32))
    tl.store(sums + j, tl.load(sums + j, mask=j < terms) + tl.where(good, term, 0.0), mask=j < terms)
    tl.store(first_bad, tl.where((before == 0) & (good == 0), t, tl.load(first_bad)))
    tl.store(bad, before + (good == 0).to(tl.int64))
    tl.store(counter, t + 1)
    tl.store(flag, 0)


def keep_books(
    losses: Tensor,
    flag: Tensor,
    ok: Tensor,
    sums: Tensor,
    bad: Tensor,
    first_bad: Tensor,
    counter: Tensor,
    *,
    keep_going: bool,
) -> None:
    """Decide whether the step counts and count it, as :func:`protoseam.lab.engine.step.keep_books`."""
    _book[(1,)](
        losses, flag, ok, sums, bad, first_bad, counter, len(losses), KEEP_GOING=keep_going,
        PADDED=triton.next_power_of_2(len(losses)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _nesterov(g, p, v, lr, momentum, decay):
    """g ← ∇ + λp;  v ← μv + g;  p ← p − η(g + μv)"""
    g += decay * p
    v = momentum * v + g
    return p - lr * (g + momentum * v), v


@triton.jit
def _block(addresses, tensors, starts, b, DTYPE: tl.constexpr):
    """Where block b's gradients begin. Blocks start at multiples of their length, tensors at 16 bytes."""
    grad = tl.load(addresses + tl.load(tensors + b)).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(grad, 16) + tl.multiple_of(tl.load(starts + b), 128)


@triton.jit
def _finite(addresses, tensors, starts, counts, flag, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    grad = _block(addresses, tensors, starts, b, DTYPE)
    count = tl.load(counts + b)
    at = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask, so that loads are wide
        g = tl.load(grad + at)
    else:
        g = tl.load(grad + at, mask=at < count, other=0.0)
    finite = tl.abs(g.to(tl.float32)) < float("inf")
    if tl.min(finite.to(tl.int32), 0) == 0:
        tl.atomic_max(flag, 1)


@triton.jit
def _sgd_scattered(
    master, velocity, addresses, tensors, starts, counts, places, work, lr_ptr, ok_ptr, scale, momentum, decay,
    DTYPE: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if tl.load(ok_ptr) != 0:
        grad = _block(addresses, tensors, starts, b, DTYPE)
        count = tl.load(counts + b)
        lr = tl.load(lr_ptr) * scale
        at = tl.arange(0, BLOCK)
        to = tl.multiple_of(tl.load(places + b), 128) + at
        if count == BLOCK:
            g = tl.load(grad + at).to(tl.float32)
            p, v = _nesterov(g, tl.load(master + to), tl.load(velocity + to), lr, momentum, decay)
            tl.store(master + to, p)
            tl.store(velocity + to, v)
            if SEPARATE:
                tl.store(work + to, p.to(work.dtype.element_ty))
        else:
            mask = at < count
            g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
            p, v = tl.load(master + to, mask=mask, other=0.0), tl.load(velocity + to, mask=mask, other=0.0)
            p, v = _nesterov(g, p, v, lr, momentum, decay)
            tl.store(master + to, p, mask=mask)
            tl.store(velocity + to, v, mask=mask)
            if SEPARATE:
                tl.store(work + to, p.to(work.dtype.element_ty), mask=mask)


class Scattered:
    """Gradients left where the backward wrote them: a table of blocks, and the addresses of a captured step.

    A graph's replays find every gradient at the address it had during capture, so the addresses are written once,
    after it. ``offsets`` are the parameters' places in the flat buffers.
    """

    def __init__(
        self, sizes: Sequence[int], offsets: Sequence[int], dtype: torch.dtype, device: torch.device
    ):
        rows = [
            (i, lo, min(_BLOCK, size - lo), offset + lo)
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
            for lo in range(0, size, _BLOCK)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        self.tensors, self.starts, self.counts, self.places = (column.contiguous() for column in table.T)
        self.addresses = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        self.dtype = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32

    def check(self, flag: Tensor) -> None:
        """Set ``flag`` if a gradient is not finite."""
        _finite[(len(self.tensors),)](
            self.addresses,
            self.tensors,
            self.starts,
            self.counts,
            flag,
            DTYPE=self.dtype,
            BLOCK=_BLOCK,
            num_warps=8,
        )

    def update(
        self, master: Tensor, velocity: Tensor, work: Tensor, lr: Tensor, ok: Tensor, scale: float, momentum: float,
        decay: float,
    ) -> None:  # fmt: skip
        """:func:`sgd_update` with these gradients."""
        _sgd_scattered[(len(self.tensors),)](
            master, velocity, self.addresses, self.tensors, self.starts, self.counts, self.places, work, lr, ok,
            scale, momentum, decay, DTYPE=self.dtype, SEPARATE=work is not master, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _sgd(
    master, velocity, grad, work, lr_ptr, ok_ptr, scale, n, momentum, decay,
    GUARDED: tl.constexpr, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if GUARDED:
        n = tl.where(tl.load(ok_ptr) != 0, n, 0)
    mask = at < n
    lr = tl.load(lr_ptr) * scale
    p = tl.load(master + at, mask=mask, other=0.0)
    v = tl.load(velocity + at, mask=mask, other=0.0)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    p, v = _nesterov(g, p, v, lr, momentum, decay)
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
    with torch.cuda.device_of(master):  # Triton launches on the current device, torch on the tensor's
        _sgd[(triton.cdiv(n, _BLOCK),)](
            master, velocity, grad, work, lr, master if ok is None else ok, scale, n, momentum, decay,
            GUARDED=ok is not None, SEPARATE=work is not master, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
