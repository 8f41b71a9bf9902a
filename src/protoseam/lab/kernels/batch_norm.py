"""Batch normalisation with ReLU and the residual sum, in few passes over memory: Triton kernels for NHWC bf16.

A training step of a small residual network spends as long moving activations as multiplying them. Written with
separate layers each activation is read and written about fifteen times; here seven. Statistics are sums of
(x − running mean) and its square, so a large mean cancels nothing, and every sum has a fixed order.

Legend: M = batch·height·width rows, C channels (contiguous); a, b: the affine form y = a·x + b of normalisation;
k0, k1: dx = a·g + k1·x + k0, what remains of the derivative through the statistics.
MODE 0: relu(bn(x)). MODE 1: relu(bn(x) + res). MODE 2: relu(bn(x) + bn(x2)).
"""
# mypy: ignore-errors
# The bodies below are Triton's language, compiled when first launched.

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(tl.PropagateNan.ALL)  # NaN stays NaN, as in torch's relu


@triton.jit
def bn_statistics(
    x, part, count, gamma, beta, running_mean, running_var, tracked, a_out, b_out, mean_out, rstd_out,
    M, P, rows, eps, momentum, unbias,
    C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Mean and variance of each channel; the last program to finish adds the partial sums up."""
    pid, block = tl.program_id(0), tl.program_id(1)
    cols = block * BC + tl.arange(0, BC)
    shift = tl.load(running_mean + cols)
    s = tl.zeros((BM, BC), tl.float32)
    q = tl.zeros((BM, BC), tl.float32)
    start = pid * rows
    for i in tl.range(0, rows, BM, num_stages=4):  # loads run ahead of the sums
        r = start + i + tl.arange(0, BM)
        v = tl.load(x + r[:, None] * C + cols[None, :]).to(tl.float32) - shift[None, :]
        s += v
        q += v * v
    tl.store(part + (pid * 2) * C + cols, tl.sum(s, 0))
    tl.store(part + (pid * 2 + 1) * C + cols, tl.sum(q, 0))
    tl.debug_barrier()
    if tl.atomic_add(count + block, 1) == P - 1:
        rp = tl.arange(0, BP)
        ok = (rp < P)[:, None]
        at = part + (rp * 2)[:, None] * C + cols[None, :]
        s1 = tl.sum(tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        q1 = tl.sum(tl.load(at + C, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        d = s1 / M
        var = tl.maximum(q1 / M - d * d, 0.0, propagate_nan=_ALL)
        mean = d + shift
        rstd = 1.0 / tl.sqrt(var + eps)
        a = tl.load(gamma + cols) * rstd
        tl.store(a_out + cols, a)
        tl.store(b_out + cols, tl.load(beta + cols) - mean * a)
        tl.store(mean_out + cols, mean)
        tl.store(rstd_out + cols, rstd)
        tl.store(running_mean + cols, shift + momentum * (mean - shift))
        old = tl.load(running_var + cols)
        tl.store(running_var + cols, old + momentum * (var * unbias - old))
        if block == 0:
            tl.store(tracked, tl.load(tracked) + 1)
        tl.store(count + block, 0)


@triton.jit
def bn_apply(
    x, a, b, res, x2, a2, b2, y, ysub,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, MODE: tl.constexpr, SUB: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The activation; with SUB also every second pixel of it, which is all a strided 1×1 shortcut reads."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    at = rows[:, None] * C + cols[None, :]
    v = tl.load(x + at).to(tl.float32) * tl.load(a + cols)[None, :] + tl.load(b + cols)[None, :]
    if MODE == 1:
        v += tl.load(res + at).to(tl.float32)
    if MODE == 2:
        v += tl.load(x2 + at).to(tl.float32) * tl.load(a2 + cols)[None, :] + tl.load(b2 + cols)[None, :]
    v = tl.maximum(v, 0.0, propagate_nan=_ALL).to(tl.bfloat16)
    tl.store(y + at, v)
    if SUB:
        w = rows % W
        h = (rows // W) % H
        sub = (rows // (H * W)) * ((H // 2) * (W // 2)) + (h // 2) * (W // 2) + w // 2
        keep = ((h % 2) == 0) & ((w % 2) == 0)
        tl.store(ysub + sub[:, None] * C + cols[None, :], v, mask=keep[:, None])


@triton.jit
def bn_apply_pool(x, a, b, x2, a2, b2, pooled, C: tl.constexpr, HW: tl.constexpr, BC: tl.constexpr):
    """The mean over each image of relu(bn(x) + bn(x2)); the activation itself is never written."""
    n = tl.program_id(0)
    rows = n * HW + tl.arange(0, HW)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    at = rows[:, None] * C + cols[None, :]
    v = tl.load(x + at).to(tl.float32) * tl.load(a + cols)[None, :] + tl.load(b + cols)[None, :]
    v += tl.load(x2 + at).to(tl.float32) * tl.load(a2 + cols)[None, :] + tl.load(b2 + cols)[None, :]
    v = tl.maximum(v, 0.0, propagate_nan=_ALL)
    tl.store(pooled + n * C + cols, (tl.sum(v, 0) / HW).to(tl.bfloat16))


@triton.jit
def load_gradient(dy, dy2, rows, cols, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DY: tl.constexpr):
    """DY 0: dy. 1: dy + dy2. 2: dy + dy2 on every second pixel. 3: a pooled gradient, spread over the image."""
    if DY == 3:
        g = tl.load(dy + (rows // (H * W))[:, None] * C + cols[None, :]).to(tl.float32) * (1.0 / (H * W))
    else:
        at = rows[:, None] * C + cols[None, :]
        g = tl.load(dy + at).to(tl.float32)
        if DY == 1:
            g += tl.load(dy2 + at).to(tl.float32)
        if DY == 2:
            w = rows % W
            h = (rows // W) % H
            sub = (rows // (H * W)) * ((H // 2) * (W // 2)) + (h // 2) * (W // 2) + w // 2
            keep = ((h % 2) == 0) & ((w % 2) == 0)
            g += tl.load(dy2 + sub[:, None] * C + cols[None, :], mask=keep[:, None], other=0.0).to(tl.float32)
    return g


@triton.jit
def bn_backward_reduce(
    dy, dy2, y, x, x2, g_out, part, count, a, b, mean, rstd, a2, b2, mean2, rstd2,
    dgamma, dbeta, k0, k1, dgamma2, k02, k12, M, P, rows,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, MODE: tl.constexpr, DY: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g(x − mean) of the gradient past the ReLU: all that dγ, dβ and dx need of the batch."""
    pid, block = tl.program_id(0), tl.program_id(1)
    cols = block * BC + tl.arange(0, BC)
    av, bv, mv = tl.load(a + cols), tl.load(b + cols), tl.load(mean + cols)
    s0 = tl.zeros((BM, BC), tl.float32)
    s1 = tl.zeros((BM, BC), tl.float32)
    if MODE == 2:
        a2v, b2v, m2v = tl.load(a2 + cols), tl.load(b2 + cols), tl.load(mean2 + cols)
        s2 = tl.zeros((BM, BC), tl.float32)
    start = pid * rows
    for i in tl.range(0, rows, BM, num_stages=3):
        r = start + i + tl.arange(0, BM)
        at = r[:, None] * C + cols[None, :]
        g = load_gradient(dy, dy2, r, cols, C, H, W, DY)
        xv = tl.load(x + at).to(tl.float32)
        if MODE == 0:
            g = tl.where(xv * av[None, :] + bv[None, :] > 0.0, g, 0.0)
        if MODE == 1:
            g = tl.where(tl.load(y + at).to(tl.float32) > 0.0, g, 0.0)
            gb = g.to(tl.bfloat16)
            tl.store(g_out + at, gb)
            g = gb.to(tl.float32)
        if MODE == 2:
            x2v = tl.load(x2 + at).to(tl.float32)
            g = tl.where(xv * av[None, :] + bv[None, :] + x2v * a2v[None, :] + b2v[None, :] > 0.0, g, 0.0)
            s2 += g * (x2v - m2v[None, :])
        s0 += g
        s1 += g * (xv - mv[None, :])
    base = part + pid * 3 * C + cols
    tl.store(base, tl.sum(s0, 0))
    tl.store(base + C, tl.sum(s1, 0))
    if MODE == 2:
        tl.store(base + 2 * C, tl.sum(s2, 0))
    tl.debug_barrier()
    if tl.atomic_add(count + block, 1) == P - 1:
        rp = tl.arange(0, BP)
        ok = (rp < P)[:, None]
        at = part + (rp * 3)[:, None] * C + cols[None, :]
        t0 = tl.sum(tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        t1 = tl.sum(tl.load(at + C, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        rv = tl.load(rstd + cols)
        dg = t1 * rv
        tl.store(dgamma + cols, dg)
        tl.store(dbeta + cols, t0)
        kk = -av * rv * dg / M
        tl.store(k1 + cols, kk)
        tl.store(k0 + cols, -av * t0 / M - kk * mv)
        if MODE == 2:
            t2 = tl.sum(tl.load(at + 2 * C, mask=ok, other=0.0, cache_modifier=".cg"), 0)
            r2 = tl.load(rstd2 + cols)
            dg2 = t2 * r2
            tl.store(dgamma2 + cols, dg2)
            kk2 = -a2v * r2 * dg2 / M
            tl.store(k12 + cols, kk2)
            tl.store(k02 + cols, -a2v * t0 / M - kk2 * m2v)
        tl.store(count + block, 0)


@triton.jit
def bn_backward_apply(
    dy, dy2, x, x2, a, b, a2, b2, k0, k1, k02, k12, dx, dx2,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, MODE: tl.constexpr, DY: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = a·g + k1·x + k0, with g masked again from x (MODE 1: dy is the masked g already)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    at = rows[:, None] * C + cols[None, :]
    g = load_gradient(dy, dy2, rows, cols, C, H, W, DY)
    xv = tl.load(x + at).to(tl.float32)
    av = tl.load(a + cols)[None, :]
    if MODE == 0:
        g = tl.where(xv * av + tl.load(b + cols)[None, :] > 0.0, g, 0.0)
    if MODE == 2:
        x2v = tl.load(x2 + at).to(tl.float32)
        a2v = tl.load(a2 + cols)[None, :]
        before = xv * av + tl.load(b + cols)[None, :] + x2v * a2v + tl.load(b2 + cols)[None, :]
        g = tl.where(before > 0.0, g, 0.0)
        d2 = a2v * g + tl.load(k12 + cols)[None, :] * x2v + tl.load(k02 + cols)[None, :]
        tl.store(dx2 + at, d2.to(tl.bfloat16))
    d = av * g + tl.load(k1 + cols)[None, :] * xv + tl.load(k0 + cols)[None, :]
    tl.store(dx + at, d.to(tl.bfloat16))
