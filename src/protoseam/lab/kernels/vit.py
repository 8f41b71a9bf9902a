"""A transformer block's pieces between its plain matrix products: Triton kernels for bf16 tokens.

Separate layers read and write every activation several times, and attention over 64 tokens is too short for the
general kernels; here scores stay on the chip, a residual sum and the LayerNorm after it finish the matrix product
before them, and all bias and norm gradients are sums over rows, taken in passing and added up in a fixed order.

Legend: T = batch·L token rows, L tokens per image, D their width, A heads of width E, F the MLP's hidden width.
`part` (rows, width) holds partial sums, one row per program; `slot` is the first column of a kernel.
"""
# mypy: ignore-errors
# The bodies below are Triton's language, compiled when first launched.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _get(p, at, inside, FULL: tl.constexpr):
    """Rows whose width is no power of two are read with zeros behind them."""
    if FULL:
        v = tl.load(p + at)
    else:
        v = tl.load(p + at, mask=inside, other=0)
    return v


@triton.jit
def _put(p, at, v, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(p + at, v)
    else:
        tl.store(p + at, v, mask=inside)


@triton.jit
def linear_add_norm(
    a_desc, w_desc, bias, x, gamma, beta, total, out, mean, rstd, eps, mask, scale,
    K: tl.constexpr, D: tl.constexpr, XROWS: tl.constexpr, POOL: tl.constexpr, DROP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """total = x + a·wᵀ + bias and out = LayerNorm(total), or with POOL its mean over the BM rows; mean and 1/σ per row.

    a (T, K) and w (D, K) come as descriptors, which read zeros past K. XROWS > 0: x has that many rows and
    repeats, as learned positions do. DROP: of mask·scale times what is added to x, or with such an x times the sum.
    """
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    cols = tl.arange(0, D)
    at = rows[:, None] * D + cols[None, :]
    # under way while the product is taken
    if XROWS > 0:
        residual = tl.load(x + (rows % XROWS)[:, None] * D + cols[None, :])
    else:
        residual = tl.load(x + at)
    if DROP:
        kept = tl.load(mask + at)
    acc = tl.zeros((BM, D), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([first, k]), w_desc.load([0, k]).T, acc)
    acc += tl.load(bias + cols).to(tl.float32)[None, :]
    if DROP and XROWS == 0:
        acc *= kept.to(tl.float32) * scale
    acc += residual.to(tl.float32)
    if DROP and XROWS > 0:
        acc *= kept.to(tl.float32) * scale
    rounded = acc.to(tl.bfloat16)
    tl.store(total + at, rounded)
    v = rounded.to(tl.float32)
    m = tl.sum(v, 1) / D
    c = v - m[:, None]
    s = 1.0 / tl.sqrt(tl.sum(c * c, 1) / D + eps)
    tl.store(mean + rows, m)
    tl.store(rstd + rows, s)
    n = c * s[:, None]
    gv = tl.load(gamma + cols).to(tl.float32)
    bv = tl.load(beta + cols).to(tl.float32)
    if POOL:
        tl.store(out + tl.program_id(0) * D + cols, (tl.sum(n, 0) / BM * gv + bv).to(tl.bfloat16))
    else:
        tl.store(out + at, (n * gv[None, :] + bv[None, :]).to(tl.bfloat16))


@triton.jit
def add_norm(
    product, bias, x, gamma, beta, total, out, mean, rstd, eps, mask, scale,
    D: tl.constexpr, XROWS: tl.constexpr, DROP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`linear_add_norm` without the product, for rows too wide for its tile."""
    FULL: tl.constexpr = BD == D
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.arange(0, BD)
    inside = cols < D
    wide = inside[None, :]
    at = rows[:, None] * D + cols[None, :]
    v = _get(product, at, wide, FULL).to(tl.float32) + _get(bias, cols, inside, FULL).to(tl.float32)[None, :]
    if XROWS > 0:
        v += _get(x, (rows % XROWS)[:, None] * D + cols[None, :], wide, FULL).to(tl.float32)
    if DROP:
        v *= _get(mask, at, wide, FULL).to(tl.float32) * scale
    if XROWS == 0:
        v += _get(x, at, wide, FULL).to(tl.float32)
    rounded = v.to(tl.bfloat16)
    _put(total, at, rounded, wide, FULL)
    v = rounded.to(tl.float32)
    m = tl.sum(v, 1) / D
    c = v - m[:, None]
    if not FULL:
        c = tl.where(wide, c, 0.0)
    s = 1.0 / tl.sqrt(tl.sum(c * c, 1) / D + eps)
    tl.store(mean + rows, m)
    tl.store(rstd + rows, s)
    gv = _get(gamma, cols, inside, FULL).to(tl.float32)[None, :]
    bv = _get(beta, cols, inside, FULL).to(tl.float32)[None, :]
    _put(out, at, (c * s[:, None] * gv + bv).to(tl.bfloat16), wide, FULL)


@triton.jit
def norm_backward(
    dn, dres, x, mean, rstd, gamma, dx, part, slot, width, mask, dropped, scale,
    L: tl.constexpr, D: tl.constexpr, POOLED: tl.constexpr, DROP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx = LayerNorm'(dn) + dres, one image of L rows per program; POOLED: dn is the gradient of their mean.

    The image's sums are dγ, dβ and the gradient of the bias before the norm. DROP: dropped = dx·mask·scale, and that
    bias's gradient is its sum.
    """
    FULL: tl.constexpr = BD == D
    pid = tl.program_id(0)
    cols = tl.arange(0, BD)
    inside = cols < D
    wide = inside[None, :]
    gv = _get(gamma, cols, inside, FULL).to(tl.float32)[None, :]
    s0 = tl.zeros((BD,), tl.float32)
    s1 = tl.zeros((BD,), tl.float32)
    s2 = tl.zeros((BD,), tl.float32)
    for i in range(0, L, BM):
        rows = pid * L + i + tl.arange(0, BM)
        at = rows[:, None] * D + cols[None, :]
        v = _get(x, at, wide, FULL).to(tl.float32)
        if POOLED:
            d = _get(dn, (rows // L)[:, None] * D + cols[None, :], wide, FULL).to(tl.float32) * (1.0 / L)
        else:
            d = _get(dn, at, wide, FULL).to(tl.float32)
        sv = tl.load(rstd + rows)
        n = (v - tl.load(mean + rows)[:, None]) * sv[:, None]
        w = d * gv
        r = (w - (tl.sum(w, 1) / D)[:, None] - n * (tl.sum(w * n, 1) / D)[:, None]) * sv[:, None]
        if not POOLED:
            r += _get(dres, at, wide, FULL).to(tl.float32)
        rounded = r.to(tl.bfloat16)
        _put(dx, at, rounded, wide, FULL)
        if DROP:
            kept = _get(mask, at, wide, FULL).to(tl.float32)
            rounded = (rounded.to(tl.float32) * kept * scale).to(tl.bfloat16)
            _put(dropped, at, rounded, wide, FULL)
        s0 += tl.sum(d * n, 0)
        s1 += tl.sum(d, 0)
        s2 += tl.sum(rounded.to(tl.float32), 0)
    base = part + pid * width + slot
    _put(base, cols, s0, inside, FULL)
    _put(base + D, cols, s1, inside, FULL)
    _put(base + 2 * D, cols, s2, inside, FULL)


@triton.jit
def linear_norm_backward(
    d_desc, w_desc, dres, x, mean, rstd, gamma, dx, part, slot, width, mask, dropped, scale,
    K: tl.constexpr, D: tl.constexpr, DROP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dx = dres + LayerNorm'(d·w) and its sums over BM rows, as above: d (T, K), w (K, D)."""
    pid = tl.program_id(0)
    first = pid * BM
    cols = tl.arange(0, D)
    rows = first + tl.arange(0, BM)
    at = rows[:, None] * D + cols[None, :]
    # under way while the product is taken
    early = tl.load(x + at)
    residual = tl.load(dres + at)
    if DROP:
        kept = tl.load(mask + at)
    acc = tl.zeros((BM, D), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(d_desc.load([first, k]), w_desc.load([k, 0]), acc)
    v = early.to(tl.float32)
    sv = tl.load(rstd + rows)
    n = (v - tl.load(mean + rows)[:, None]) * sv[:, None]
    base = part + pid * width + slot + cols
    tl.store(base, tl.sum(acc * n, 0))
    tl.store(base + D, tl.sum(acc, 0))
    w = acc * tl.load(gamma + cols).to(tl.float32)[None, :]
    r = (w - (tl.sum(w, 1) / D)[:, None] - n * (tl.sum(w * n, 1) / D)[:, None]) * sv[:, None]
    rounded = (r + residual.to(tl.float32)).to(tl.bfloat16)
    tl.store(dx + at, rounded)
    if DROP:
        rounded = (rounded.to(tl.float32) * kept.to(tl.float32) * scale).to(tl.bfloat16)
        tl.store(dropped + at, rounded)
    tl.store(base + 2 * D, tl.sum(rounded.to(tl.float32), 0))


@triton.jit
def _normal_tail(v):
    """(1 − Φ(|v|), exp(−v²/2)); Abramowitz and Stegun 7.1.26, off by at most 1e-7."""
    z = tl.abs(v) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    e = tl.exp(-z * z)
    p = ((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t - 0.284496736) * t + 0.254829592
    return 0.5 * p * t * e, e


@triton.jit
def gelu(h, out, mask, scale, DROP: tl.constexpr, BLOCK: tl.constexpr):
    """out = GELU(h), and h becomes GELU'(h), all that the backward needs of it; DROP: both times mask·scale."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(h + at).to(tl.float32)
    tail, e = _normal_tail(v)
    below = tl.where(v >= 0.0, 1.0 - tail, tail)
    value = v * below
    slope = below + v * e * 0.3989422804014327
    if DROP:
        factor = tl.load(mask + at).to(tl.float32) * scale
        value *= factor
        slope *= factor
    tl.store(out + at, value.to(tl.bfloat16))
    tl.store(h + at, slope.to(tl.bfloat16))


@triton.jit
def linear_gelu(
    a_desc, w_desc, bias, out,
    K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = GELU(a·wᵀ + bias): a (T, K), w (F, K)."""
    # neighbouring programs share rows, which may exceed the second-level cache
    first = (tl.program_id(0) // (F // BN)) * BM
    col = (tl.program_id(0) % (F // BN)) * BN
    cols = col + tl.arange(0, BN)
    early = tl.load(bias + cols)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([first, k]), w_desc.load([col, k]).T, acc)
    # rounded as a layer of its own would
    v = (acc + early.to(tl.float32)[None, :]).to(tl.bfloat16).to(tl.float32)
    tail, _ = _normal_tail(v)
    at = (first + tl.arange(0, BM))[:, None] * F + cols[None, :]
    tl.store(out + at, (v * tl.where(v >= 0.0, 1.0 - tail, tail)).to(tl.bfloat16))


@triton.jit
def linear_scale_backward(
    d_desc, w_desc, slope, dh, part, slot, width,
    K: tl.constexpr, F: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dh = (d·w)·slope, with d (T, K), w (K, F); its sums over BM rows are those of the first of the BM/L images."""
    pid = tl.program_id(0) // (F // BN)
    first = pid * BM
    col = (tl.program_id(0) % (F // BN)) * BN
    cols = col + tl.arange(0, BN)
    at = (first + tl.arange(0, BM))[:, None] * F + cols[None, :]
    early = tl.load(slope + at)  # under way while the product is taken
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(d_desc.load([first, k]), w_desc.load([k, col]), acc)
    d = (acc * early.to(tl.float32)).to(tl.bfloat16)
    tl.store(dh + at, d)
    sums = tl.sum(d.to(tl.float32), 0)
    for i in tl.static_range(BM // L):
        tl.store(part + (pid * (BM // L) + i) * width + slot + cols, sums if i == 0 else sums * 0.0)


@triton.jit
def _scores(q, k, scale, L: tl.constexpr, BL: tl.constexpr):
    """exp(q·kᵀ·scale − the row's largest): BL rows and columns, the first L are tokens."""
    s = tl.dot(q, tl.trans(k)) * scale
    if BL > L:
        s = tl.where((tl.arange(0, BL) < L)[None, :], s, float("-inf"))
    return tl.exp(s - tl.max(s, 1)[:, None])


@triton.jit
def attention(qkv, out, scale, L: tl.constexpr, A: tl.constexpr, E: tl.constexpr, BL: tl.constexpr):
    """One image and head per program: qkv (B, L, 3, A, E), out (B, L, A, E)."""
    b = tl.program_id(0) // A
    head = tl.program_id(0) % A
    D = A * E
    FULL: tl.constexpr = BL == L
    r = tl.arange(0, BL)
    e = tl.arange(0, E)
    inside = (r < L)[:, None]
    at = b * L * 3 * D + r[:, None] * (3 * D) + head * E + e[None, :]
    q = _get(qkv, at, inside, FULL)
    k = _get(qkv, at + D, inside, FULL)
    v = _get(qkv, at + 2 * D, inside, FULL)
    p = _scores(q, k, scale, L, BL)
    o = tl.dot(p.to(tl.bfloat16), v) / tl.sum(p, 1)[:, None]
    _put(out, b * L * D + r[:, None] * D + head * E + e[None, :], o.to(tl.bfloat16), inside, FULL)


@triton.jit
def attention_backward(
    qkv, do, dqkv, part, scale, slot, width,
    L: tl.constexpr, A: tl.constexpr, E: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """The scores again, then dq, dk and dv and their sums over the image's tokens."""
    b = tl.program_id(0) // A
    head = tl.program_id(0) % A
    D = A * E
    FULL: tl.constexpr = BL == L
    r = tl.arange(0, BL)
    e = tl.arange(0, E)
    inside = (r < L)[:, None]
    at = b * L * 3 * D + r[:, None] * (3 * D) + head * E + e[None, :]
    q = _get(qkv, at, inside, FULL)
    k = _get(qkv, at + D, inside, FULL)
    v = _get(qkv, at + 2 * D, inside, FULL)
    g = _get(do, b * L * D + r[:, None] * D + head * E + e[None, :], inside, FULL)  # rows past L add nothing
    p = _scores(q, k, scale, L, BL)
    p = p / tl.sum(p, 1)[:, None]
    dv = tl.dot(tl.trans(p.to(tl.bfloat16)), g)
    dp = tl.dot(g, tl.trans(v))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(tl.bfloat16)
    dq = tl.dot(ds, k)
    dk = tl.dot(tl.trans(ds), q)
    _put(dqkv, at, dq.to(tl.bfloat16), inside, FULL)
    _put(dqkv, at + D, dk.to(tl.bfloat16), inside, FULL)
    _put(dqkv, at + 2 * D, dv.to(tl.bfloat16), inside, FULL)
    base = part + b * width + slot + head * E + e
    tl.store(base, tl.sum(dq, 0))
    tl.store(base + D, tl.sum(dk, 0))
    tl.store(base + 2 * D, tl.sum(dv, 0))


@triton.jit
def weight_gradients(
    d0, x0, d1, x1, d2, x2, d3, x3, part, T, steps, total,
    O0: tl.constexpr, I0: tl.constexpr, O1: tl.constexpr, I1: tl.constexpr,
    O2: tl.constexpr, I2: tl.constexpr, O3: tl.constexpr, I3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """part[s] = slice s, `steps` tiles of rows long, of the four products dᵀ·x: d (T, O), x (T, I), end to end.

    Alone none of the four has tiles enough to fill the device. d and x come as descriptors.
    """
    n0: tl.constexpr = (O0 // BM) * (I0 // BN)
    n1: tl.constexpr = n0 + (O1 // BM) * (I1 // BN)
    n2: tl.constexpr = n1 + (O2 // BM) * (I2 // BN)
    n3: tl.constexpr = n2 + (O3 // BM) * (I3 // BN)
    t = tl.program_id(0) % n3
    s = tl.program_id(0) // n3
    d = d0
    x = x0
    ins = I0
    base = 0
    tile = t
    if t >= n2:
        d = d3
        x = x3
        ins = I3
        base = O0 * I0 + O1 * I1 + O2 * I2
        tile = t - n2
    elif t >= n1:
        d = d2
        x = x2
        ins = I2
        base = O0 * I0 + O1 * I1
        tile = t - n1
    elif t >= n0:
        d = d1
        x = x1
        ins = I1
        base = O0 * I0
        tile = t - n0
    oc = (tile // (ins // BN)) * BM
    ic = (tile % (ins // BN)) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(s * steps, tl.minimum((s + 1) * steps, T // BK)):
        acc = tl.dot(d.load([i * BK, oc]).T, x.load([i * BK, ic]), acc)
    rows = oc + tl.arange(0, BM)
    cols = ic + tl.arange(0, BN)
    tl.store(part + s * total + base + rows[:, None] * ins + cols[None, :], acc)


@triton.jit
def add_slices(part, out, total, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(part + at)
    for s in tl.static_range(1, SLICES):
        acc += tl.load(part + s * total + at)
    tl.store(out + at, acc.to(tl.bfloat16))
