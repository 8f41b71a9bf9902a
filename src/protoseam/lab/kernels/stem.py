"""A 3×3 stem with its batch normalisation, without ever storing the convolution's output: Triton kernels, NHWC bf16.

A colour image has 27 numbers under a 3×3 window: so few that convolving again costs less than reading the result
back, and that the batch's statistics follow from the moments of the windows alone. With p a window (27 numbers, a
one, zeros: 32), c = w·p the convolution, μ and Σ the mean and covariance of p over the batch:

    E c = w·μ,  Var c = wᵀΣw;   G = Σ_rows p gᵀ holds dβ = G[one] and, with w, dγ = rstd·(w·G − E c·dβ);
    dw = a·(G − μ dβ) − a·rstd·dγ·(Σw),  where a = γ·rstd and g is the gradient past the ReLU.

Legend: M = batch·height·width rows, C channels of the stem's output.
"""
# mypy: ignore-errors
# The bodies below are Triton's language, compiled when first launched.

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(tl.PropagateNan.ALL)  # NaN stays NaN, as in torch's relu

ONE = tl.constexpr(27)  # the place of the one in a window
PADDED = tl.constexpr(32)


@triton.jit
def windows(x, out, part, rows, H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr):
    """Every pixel's window, zero outside the image, and Σ p pᵀ of this program's `rows` of them."""
    k = tl.arange(0, PADDED)
    moments = tl.zeros((PADDED, PADDED), tl.float32)
    for i in range(0, rows, BM):
        r = tl.program_id(0) * rows + i + tl.arange(0, BM)
        h = ((r // W) % H)[:, None] + (k // 9)[None, :] - 1
        w = (r % W)[:, None] + ((k // 3) % 3)[None, :] - 1
        ok = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (k < ONE)[None, :]
        at = (((r // (H * W)) * (H * W))[:, None] + h * W + w) * 3 + (k % 3)[None, :]
        v = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        p = tl.where((k == ONE)[None, :], 1.0, v).to(tl.bfloat16)
        tl.store(out + r[:, None] * PADDED + k[None, :], p)
        moments = tl.dot(tl.trans(p), p, moments)
    at = k[:, None] * PADDED + k[None, :]
    tl.store(part + tl.program_id(0) * (PADDED * PADDED) + at, moments)


@triton.jit
def load_weight(w, C: tl.constexpr):
    """(PADDED, C), zero below the 27: a channels_last weight is (C, 27) in memory, in the windows' order."""
    k = tl.arange(0, PADDED)
    c = tl.arange(0, C)
    return tl.load(w + c[None, :] * ONE + k[:, None], mask=(k < ONE)[:, None], other=0.0)


@triton.jit
def stem_statistics(
    total, w, gamma, beta, running_mean, running_var, tracked, a_out, b_out, mean_out, rstd_out, mu_out, sw_out,
    M, eps, momentum, unbias, C: tl.constexpr,
):  # fmt: skip
    """The normalisation's a, b, mean and 1/σ from Σ p pᵀ; also μ and Σw, for the backward. One program."""
    k = tl.arange(0, PADDED)
    c = tl.arange(0, C)
    mu = tl.load(total + k * PADDED + ONE) / M
    mu_again = tl.load(total + ONE * PADDED + k) / M
    cov = tl.load(total + k[:, None] * PADDED + k[None, :]) / M - mu[:, None] * mu_again[None, :]
    wt = load_weight(w, C).to(tl.float32)
    sw = tl.dot(cov, wt, input_precision="ieee")
    mean = tl.sum(wt * mu[:, None], 0)
    var = tl.maximum(tl.sum(wt * sw, 0), 0.0, propagate_nan=_ALL)
    rstd = 1.0 / tl.sqrt(var + eps)
    a = tl.load(gamma + c) * rstd
    tl.store(a_out + c, a)
    tl.store(b_out + c, tl.load(beta + c) - mean * a)
    tl.store(mean_out + c, mean)
    tl.store(rstd_out + c, rstd)
    tl.store(mu_out + k, mu)
    tl.store(sw_out + k[:, None] * C + c[None, :], sw)
    old = tl.load(running_mean + c)
    tl.store(running_mean + c, old + momentum * (mean - old))
    old = tl.load(running_var + c)
    tl.store(running_var + c, old + momentum * (var * unbias - old))
    tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def stem_apply(p, w, a, b, y, C: tl.constexpr, BM: tl.constexpr):
    """relu(a·c + b)."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, PADDED)
    cols = tl.arange(0, C)
    c = tl.dot(tl.load(p + r[:, None] * PADDED + k[None, :]), load_weight(w, C))
    v = tl.maximum(c * tl.load(a + cols)[None, :] + tl.load(b + cols)[None, :], 0.0, propagate_nan=_ALL)
    tl.store(y + r[:, None] * C + cols[None, :], v.to(tl.bfloat16))


@triton.jit
def stem_backward(p, w, dy, dy2, a, b, part, rows, C: tl.constexpr, BM: tl.constexpr):
    """part[pid] = Σ p gᵀ over this program's `rows`, g = dy + dy2 where the ReLU passed."""
    k = tl.arange(0, PADDED)
    cols = tl.arange(0, C)
    wt = load_weight(w, C)
    av = tl.load(a + cols)[None, :]
    bv = tl.load(b + cols)[None, :]
    acc = tl.zeros((PADDED, C), tl.float32)
    for i in range(0, rows, BM):
        r = tl.program_id(0) * rows + i + tl.arange(0, BM)
        at = r[:, None] * C + cols[None, :]
        g = tl.load(dy + at).to(tl.float32) + tl.load(dy2 + at).to(tl.float32)
        pv = tl.load(p + r[:, None] * PADDED + k[None, :])
        g = tl.where(tl.dot(pv, wt) * av + bv > 0.0, g, 0.0)
        acc = tl.dot(tl.trans(pv), g.to(tl.bfloat16), acc)
    tl.store(part + tl.program_id(0) * (PADDED * C) + k[:, None] * C + cols[None, :], acc)


@triton.jit
def stem_gradients(total, w, a, mean, rstd, mu, sw, dw, dgamma, dbeta, C: tl.constexpr):
    """dw, dγ and dβ from G, as above. One program."""
    k = tl.arange(0, PADDED)
    c = tl.arange(0, C)
    at = k[:, None] * C + c[None, :]
    g = tl.load(total + at)
    db = tl.load(total + ONE * C + c)
    av = tl.load(a + c)
    rv = tl.load(rstd + c)
    dg = rv * (tl.sum(load_weight(w, C).to(tl.float32) * g, 0) - tl.load(mean + c) * db)
    tl.store(dgamma + c, dg)
    tl.store(dbeta + c, db)
    d = av[None, :] * (g - tl.load(mu + k)[:, None] * db[None, :]) - (av * rv * dg)[None, :] * tl.load(
        sw + at
    )
    tl.store(dw + c[None, :] * ONE + k[:, None], d.to(tl.bfloat16), mask=(k < ONE)[:, None])
