"""The fused vision transformer's kernels, each with the grid and tiles it is launched in.

Data in: tensors of rows, one a token; data out: new tensors, and partial sums into memory the caller gives.

Legend: B batch, L tokens, D their width, T = B·L, A heads, E = D/A, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from protoseam.lab.kernels import vit as kernels

TOKENS = 64  # tokens of an image without its class token, and rows of a tile
TILE = 128  # rows of a weight gradient's tile, and of the MLP's backward
_ROWS = 16  # rows at a time of a norm without a product
_FUSED = 256  # widest rows whose norm a product finishes


class Dropped(NamedTuple):
    """A layer's dropout: a mask of what it keeps, as bytes, and 1/(1 - share dropped). No mask means no dropout."""

    mask: Tensor | None = None
    scale: float = 1.0

    def arguments(self, instead: Tensor) -> tuple[Tensor, float]:
        return (instead if self.mask is None else self.mask), self.scale


def dropout(mask: Tensor | None, drop: float, T: int, D: int, F: int, depth: int) -> list[Dropped]:
    """Return the dropout of the stem, then of each block's attention, hidden layer and MLP, from one mask."""
    count = 1 + 3 * depth
    if mask is None:
        return [Dropped()] * count
    masks = mask.split([T * D] + [T * D, T * F, T * D] * depth)
    return [Dropped(m, 1.0 / (1.0 - drop)) for m in masks]


def linear_add_norm(
    a: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    x: Tensor,
    norm: tuple[Tensor, Tensor],
    eps: float,
    *,
    drop: Dropped,
    repeats: int = 0,
    pool: bool = False,
    many: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``total = x + a·weightᵀ + bias``, its LayerNorm (``pool``: averaged over an image's tokens), mean and 1/σ.

    No weight: ``a`` is the product. ``repeats``: ``x`` has this many rows per repetition.
    """
    (T, K), D = a.shape, bias.shape[0]
    total = torch.empty(T, D, device=a.device, dtype=a.dtype)
    out = torch.empty(T // TOKENS if pool and D <= _FUSED else T, D, device=a.device, dtype=a.dtype)
    stats = torch.empty(2, T, device=a.device)
    mask, scale = drop.arguments(x)
    dropping = drop.mask is not None
    if weight is None or D > _FUSED:
        product = a if weight is None else torch.mm(a, weight.t())
        kernels.add_norm[(T // _ROWS,)](
            product, bias, x, *norm, total, out, stats[0], stats[1], eps, mask, scale,
            D=D, XROWS=repeats, DROP=dropping, BM=_ROWS, BD=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip
        return total, out.view(-1, TOKENS, D).mean(1) if pool else out, stats
    # among many images two at a time read the weights half as often
    rows = _rows(T) if many and not pool else TOKENS
    kernels.linear_add_norm[(T // rows,)](
        described(a, [rows, 64]), described(weight, [D, 64]), bias, x, *norm, total, out, stats[0],
        stats[1], eps, mask, scale, K=K, D=D, XROWS=repeats, POOL=pool,
        DROP=dropping, BM=rows, BK=64, num_warps=8, num_stages=_stages(a),
    )  # fmt: skip
    return total, out, stats


def linear_norm_backward(
    d: Tensor,
    weight: Tensor,
    dres: Tensor,
    x: Tensor,
    stats: Tensor,
    gamma: Tensor,
    part: Tensor,
    slot: int,
    drop: Dropped,
) -> tuple[Tensor, Tensor]:
    """dx of ``x + …`` where LayerNorm(x) went into a layer with ``weight``, whose output has the gradient ``d``.

    And dx behind the dropout of the layer that made x.
    """
    (T, K), D = d.shape, weight.shape[1]
    dx = torch.empty_like(x)
    dropped = dx if drop.mask is None else torch.empty_like(x)
    mask, scale = drop.arguments(x)
    dropping = drop.mask is not None
    if D > _FUSED:
        kernels.norm_backward[(T // TOKENS,)](
            torch.mm(d, weight), dres, x, stats[0], stats[1], gamma, dx, part, slot, part.shape[1], mask, dropped,
            scale, L=TOKENS, D=D, POOLED=False, DROP=dropping, BM=_ROWS, BD=triton.next_power_of_2(D), num_warps=8,
        )  # fmt: skip
        return dx, dropped
    kernels.linear_norm_backward[(T // TOKENS,)](
        described(d, [TOKENS, 64]), described(weight, [64, D]), dres, x, stats[0], stats[1], gamma, dx, part,
        slot, part.shape[1], mask, dropped, scale, K=K, D=D, DROP=dropping, BM=TOKENS, BK=64, num_warps=8,
        num_stages=_stages(d),
    )  # fmt: skip
    return dx, dropped


def linear_gelu(n: Tensor, weight: Tensor, bias: Tensor, drop: Dropped, keep: bool) -> tuple[Tensor, Tensor]:
    """GELU' (if to ``keep``) and GELU of a layer's output."""
    (T, K), F = n.shape, weight.shape[0]
    if keep:
        h = torch.addmm(bias, n, weight.t())
        a = torch.empty_like(h)
        kernels.gelu[(h.numel() // 4096,)](
            h, a, *drop.arguments(h), DROP=drop.mask is not None, BLOCK=4096, num_warps=8
        )
        return h, a
    a = torch.empty(T, F, device=n.device, dtype=n.dtype)
    rows = _rows(T)
    kernels.linear_gelu[(T // rows * (F // 128),)](
        described(n, [rows, 64]), described(weight, [128, 64]), bias, a,
        K=K, F=F, BM=rows, BN=128, BK=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return a, a


def _rows(T: int) -> int:
    """Return the rows of a tile, which spans two images if their number is even."""
    return 2 * TOKENS if T % (2 * TOKENS) == 0 else TOKENS


def linear_scale_backward(d: Tensor, weight: Tensor, slope: Tensor, part: Tensor, slot: int) -> Tensor:
    """``(d·weight)·slope``, and its sums into ``part``, one row per image."""
    (T, K), F = d.shape, weight.shape[1]
    dh = torch.empty_like(slope)
    rows = _rows(T)
    kernels.linear_scale_backward[(T // rows * (F // 128),)](
        described(d, [rows, 64]), described(weight, [64, 128]), slope, dh, part, slot, part.shape[1],
        K=K, F=F, L=TOKENS, BM=rows, BN=128, BK=64, num_warps=4 if _roomy(d) else 8, num_stages=3,
    )  # fmt: skip
    return dh


def _shared_memory(t: Tensor) -> int:
    """Return the KiB of shared memory per program on the tensor's device."""
    properties = torch.cuda.get_device_properties(t.device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) // 1024


def _stages(t: Tensor) -> int:
    """Return the stages of a product with a norm: as many as fit, with one program per multiprocessor.

    Four take 160 KiB on a data-centre card; a consumer card of the latest generation has 99.
    """
    return 4 if _shared_memory(t) >= 160 or torch.cuda.get_device_capability(t.device) < (9, 0) else 3


def _roomy(t: Tensor) -> bool:
    """Return whether a few warps hold a large tile, as on Hopper and later data-centre cards; on others they spill."""
    return _shared_memory(t) >= 200


class _Tiling(NamedTuple):
    columns: int  # of a tile
    stages: int
    programs: int  # at most


def _gradient_tiling(t: Tensor, widths: list[int]) -> _Tiling:
    """Return the tiling of the weight gradients: large tiles, one per multiprocessor of an H200, where they fit."""
    if _roomy(t) and all(width % 256 == 0 for width in widths):
        return _Tiling(256, 4, 132)
    return _Tiling(128, 3, 264)


def described(t: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def weight_gradients(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """dᵀ·x of four pairs (d, x)."""
    T = pairs[0][0].shape[0]
    shapes = [(d.shape[1], x.shape[1]) for d, x in pairs]
    sizes = [o * i for o, i in shapes]
    columns, stages, programs = _gradient_tiling(pairs[0][0], [i for _, i in shapes])
    total, tiles = sum(sizes), sum(o // TILE * (i // columns) for o, i in shapes)
    slices = max(1, min(T // 64, programs // tiles))
    part = torch.empty(slices, total, device=pairs[0][0].device)
    widths = {f"{side}{j}": n for j, pair in enumerate(shapes) for side, n in zip("OI", pair, strict=True)}
    kernels.weight_gradients[(tiles * slices,)](
        *(described(t, [64, c]) for pair in pairs for t, c in zip(pair, (TILE, columns), strict=True)),
        part, T, -(-(T // 64) // slices), total, **widths, BM=TILE, BN=columns, BK=64, num_warps=8, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(total, device=part.device, dtype=pairs[0][0].dtype)
    kernels.add_slices[(total // 1024,)](part, out, total, SLICES=slices, BLOCK=1024, num_warps=4)
    return [g.view(shape) for g, shape in zip(out.split(sizes), shapes, strict=True)]


def _attention_tile(L: int) -> dict[str, int]:
    """Launch options: scores in the next power of two of rows, and twice the warps where those are 128."""
    return {"L": L, "BL": triton.next_power_of_2(L), "num_warps": 4 if L <= 64 else 8}


def attention(qkv: Tensor, B: int, A: int) -> Tensor:
    """softmax(q·kᵀ/√E)·v of every image and head: (T, 3·D) to (T, D)."""
    T, D = qkv.shape[0], qkv.shape[1] // 3
    o = torch.empty(T, D, device=qkv.device, dtype=qkv.dtype)
    kernels.attention[(B * A,)](qkv, o, (D // A) ** -0.5, A=A, E=D // A, **_attention_tile(T // B))
    return o


def attention_backward(qkv: Tensor, do: Tensor, B: int, A: int, part: Tensor, slot: int) -> Tensor:
    """dqkv, and its sums into ``part``, one row per image."""
    T, D = do.shape
    dqkv = torch.empty_like(qkv)
    kernels.attention_backward[(B * A,)](
        qkv, do, dqkv, part, (D // A) ** -0.5, slot, part.shape[1], A=A, E=D // A, **_attention_tile(T // B)
    )
    return dqkv


def pooled_norm_backward(
    dpooled: Tensor, x: Tensor, stats: Tensor, gamma: Tensor, part: Tensor, drop: Dropped
) -> tuple[Tensor, Tensor]:
    """dx of LayerNorm(x) averaged over 64 tokens, or its first row of more; and dx behind the dropout before it."""
    (T, D), B = x.shape, dpooled.shape[0]
    mean = T // B == TOKENS
    dx = torch.empty_like(x)
    dropped = dx if drop.mask is None else torch.empty_like(x)
    mask, scale = drop.arguments(x)
    dn, dres = dpooled.contiguous(), x
    if not mean:
        dn, dres = torch.zeros_like(x), torch.zeros_like(x)
        dn.view(B, T // B, D)[:, 0] = dpooled
    kernels.norm_backward[(T // TOKENS,)](
        dn, dres, x, stats[0], stats[1], gamma, dx, part, 0, part.shape[1], mask, dropped, scale,
        L=TOKENS, D=D, POOLED=mean, DROP=drop.mask is not None, BM=_ROWS, BD=triton.next_power_of_2(D), num_warps=8,
    )  # fmt: skip
    return dx, dropped
