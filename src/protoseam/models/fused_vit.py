"""The forward of :class:`~protoseam.models.vit.VisionTransformer` with a backward by hand: same parameters, same maths.

For bf16 on CUDA, in training and, without a graph for the gradients, in sweeps over the data. The matrix products
that nothing can be fused to with profit stay the library's; the rest is in :mod:`~protoseam.models.vit_kernels`.
Where it does not apply (another dtype, a gradient with respect to the images) the module's own layers run.

Legend: B batch, L tokens, D their width, T = B·L, A heads, E = D/A, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protoseam.models.vit import Block, ConvStem, PatchStem, VisionTransformer

try:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from protoseam.models import vit_kernels as kernels
except ImportError:  # no Triton on this machine: `supports` still answers
    kernels = None  # type: ignore[assignment]

__all__ = ["FusedViT"]

_TOKENS = 64  # of an image, besides a class token; and a tile of rows
_ROWS = 16  # at a time, where a norm stands alone
_FUSED = 256  # widest rows whose norm a product finishes
_TILE = 128  # rows of a weight gradient's tile, and of the MLP's backward
_SWEPT = 2048  # images at a time without gradients: many enough that launching is not what takes the time
_BLOCK_PARAMETERS = 12  # in the order of `_parameters`
_BLOCK_SAVED = 10  # activations of a block that its backward needs


class _Shape(NamedTuple):
    batch: int
    heads: int
    eps: float
    keep: bool  # the activations, for the backward
    drop: float  # share of the activations that dropout zeroes


class _Dropped(NamedTuple):
    """A layer's dropout: what it keeps, as bytes, and 1/(1 - share dropped); no mask, no dropout."""

    mask: Tensor | None = None
    scale: float = 1.0

    def arguments(self, instead: Tensor) -> tuple[Tensor, float]:
        return (instead if self.mask is None else self.mask), self.scale


def _dropout(mask: Tensor | None, drop: float, T: int, D: int, F: int, depth: int) -> list[_Dropped]:
    """Of the stem, then of each block's attention, hidden layer and MLP, out of one mask for all."""
    count = 1 + 3 * depth
    if mask is None:
        return [_Dropped()] * count
    masks = mask.split([T * D] + [T * D, T * F, T * D] * depth)
    return [_Dropped(m, 1.0 / (1.0 - drop)) for m in masks]


def _linear_add_norm(
    a: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    x: Tensor,
    norm: tuple[Tensor, Tensor],
    eps: float,
    *,
    drop: _Dropped,
    repeats: int = 0,
    pool: bool = False,
    many: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``total = x + a·weightᵀ + bias``, its LayerNorm (``pool``: averaged over an image's tokens), mean and 1/σ.

    No weight: ``a`` is the product. ``repeats``: so many rows has ``x``, over and over.
    """
    (T, K), D = a.shape, bias.shape[0]
    total = torch.empty(T, D, device=a.device, dtype=a.dtype)
    out = torch.empty(T // _TOKENS if pool and D <= _FUSED else T, D, device=a.device, dtype=a.dtype)
    stats = torch.empty(2, T, device=a.device)
    mask, scale = drop.arguments(x)
    dropping = drop.mask is not None
    if weight is None or D > _FUSED:
        product = a if weight is None else torch.mm(a, weight.t())
        kernels.add_norm[(T // _ROWS,)](
            product, bias, x, *norm, total, out, stats[0], stats[1], eps, mask, scale,
            D=D, XROWS=repeats, DROP=dropping, BM=_ROWS, BD=_power_of_two(D), num_warps=8,
        )  # fmt: skip
        return total, out.view(-1, _TOKENS, D).mean(1) if pool else out, stats
    # among many images two at a time read the weights half as often
    rows = _rows(T) if many and not pool else _TOKENS
    kernels.linear_add_norm[(T // rows,)](
        _described(a, [rows, 64]), _described(weight, [D, 64]), bias, x, *norm, total, out, stats[0],
        stats[1], eps, mask, scale, K=K, D=D, XROWS=repeats, POOL=pool,
        DROP=dropping, BM=rows, BK=64, num_warps=8, num_stages=_stages(a),
    )  # fmt: skip
    return total, out, stats


def _linear_norm_backward(
    d: Tensor,
    weight: Tensor,
    dres: Tensor,
    x: Tensor,
    stats: Tensor,
    gamma: Tensor,
    part: Tensor,
    slot: int,
    drop: _Dropped,
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
        kernels.norm_backward[(T // _TOKENS,)](
            torch.mm(d, weight), dres, x, stats[0], stats[1], gamma, dx, part, slot, part.shape[1], mask, dropped,
            scale, L=_TOKENS, D=D, POOLED=False, DROP=dropping, BM=_ROWS, BD=_power_of_two(D), num_warps=8,
        )  # fmt: skip
        return dx, dropped
    kernels.linear_norm_backward[(T // _TOKENS,)](
        _described(d, [_TOKENS, 64]), _described(weight, [64, D]), dres, x, stats[0], stats[1], gamma, dx, part,
        slot, part.shape[1], mask, dropped, scale, K=K, D=D, DROP=dropping, BM=_TOKENS, BK=64, num_warps=8,
        num_stages=_stages(d),
    )  # fmt: skip
    return dx, dropped


def _linear_gelu(
    n: Tensor, weight: Tensor, bias: Tensor, drop: _Dropped, keep: bool
) -> tuple[Tensor, Tensor]:
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
        _described(n, [rows, 64]), _described(weight, [128, 64]), bias, a,
        K=K, F=F, BM=rows, BN=128, BK=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return a, a


def _rows(T: int) -> int:
    """Of a tile that may span two images, if there are two."""
    return 2 * _TOKENS if T % (2 * _TOKENS) == 0 else _TOKENS


def _linear_scale_backward(d: Tensor, weight: Tensor, slope: Tensor, part: Tensor, slot: int) -> Tensor:
    """``(d·weight)·slope``, and its sums into ``part``, a row an image."""
    (T, K), F = d.shape, weight.shape[1]
    dh = torch.empty_like(slope)
    rows = _rows(T)
    kernels.linear_scale_backward[(T // rows * (F // 128),)](
        _described(d, [rows, 64]), _described(weight, [64, 128]), slope, dh, part, slot, part.shape[1],
        K=K, F=F, L=_TOKENS, BM=rows, BN=128, BK=64, num_warps=4 if _roomy(d) else 8, num_stages=3,
    )  # fmt: skip
    return dh


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _shared_memory(t: Tensor) -> int:
    """KiB that a program may have on the tensor's device."""
    properties = torch.cuda.get_device_properties(t.device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) // 1024


def _stages(t: Tensor) -> int:
    """Of a product with a norm behind it: as many as fit, for it is one program a multiprocessor.

    Four take 160 KiB on a data-centre card; a consumer's of the latest generation has 99.
    """
    return 4 if _shared_memory(t) >= 160 or torch.cuda.get_device_capability(t.device) < (9, 0) else 3


def _roomy(t: Tensor) -> bool:
    """Hopper's and later data-centre cards, where a few warps hold a large tile; on others they would spill."""
    return _shared_memory(t) >= 200


class _Tiling(NamedTuple):
    columns: int  # of a tile
    stages: int
    programs: int  # at most


def _gradient_tiling(t: Tensor, widths: list[int]) -> _Tiling:
    """Of the weight gradients: large tiles, one to a multiprocessor of an H200, where they fit; else two."""
    if _roomy(t) and all(width % 256 == 0 for width in widths):
        return _Tiling(256, 4, 132)
    return _Tiling(128, 3, 264)


def _described(t: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def _weight_gradients(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """dᵀ·x of four pairs (d, x)."""
    T = pairs[0][0].shape[0]
    shapes = [(d.shape[1], x.shape[1]) for d, x in pairs]
    sizes = [o * i for o, i in shapes]
    columns, stages, programs = _gradient_tiling(pairs[0][0], [i for _, i in shapes])
    total, tiles = sum(sizes), sum(o // _TILE * (i // columns) for o, i in shapes)
    slices = max(1, min(T // 64, programs // tiles))
    part = torch.empty(slices, total, device=pairs[0][0].device)
    widths = {f"{side}{j}": n for j, pair in enumerate(shapes) for side, n in zip("OI", pair, strict=True)}
    kernels.weight_gradients[(tiles * slices,)](
        *(_described(t, [64, c]) for pair in pairs for t, c in zip(pair, (_TILE, columns), strict=True)),
        part, T, -(-(T // 64) // slices), total, **widths, BM=_TILE, BN=columns, BK=64, num_warps=8, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(total, device=part.device, dtype=pairs[0][0].dtype)
    kernels.add_slices[(total // 1024,)](part, out, total, SLICES=slices, BLOCK=1024, num_warps=4)
    return [g.view(shape) for g, shape in zip(out.split(sizes), shapes, strict=True)]


def _attention_tile(L: int) -> dict[str, int]:
    """Launch options: scores in the next power of two of rows, and twice the warps where those are 128."""
    return {"L": L, "BL": _power_of_two(L), "num_warps": 4 if L <= 64 else 8}


def _column_sums(part: Tensor, like: Tensor) -> Tensor:
    """Sums over the rows of ``part`` (count, rows, width)."""
    count, rows, width = part.shape
    out = torch.empty(count, width, device=like.device, dtype=like.dtype)
    kernels.column_sums[(-(-width // 32), count)](part, out, rows, width, BP=128, BC=32, num_warps=4)
    return out


class _Trunk(torch.autograd.Function):
    """Patches (T, P) to pooled features (B, D); with no weight for the stem, its products (T, D) before the bias.

    The features are the mean over an image's 64 tokens, or the first of 65.
    """

    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, patches: Tensor, stem_weight: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        B, A, eps, keep, share = shape
        stem_bias, positions, gamma, beta, *blocks = parameters
        T, D, F = patches.shape[0], stem_bias.shape[0], blocks[8].shape[0]
        L = T // B
        depth = len(blocks) // _BLOCK_PARAMETERS
        mask = None
        if share > 0:
            size = T * D + depth * T * (2 * D + F)
            mask = torch.empty(size, dtype=torch.uint8, device=patches.device).bernoulli_(1.0 - share)
        drop = _dropout(mask, share, T, D, F, depth)
        saved: list[Tensor] = []
        # what enters the next residual sum: a product still to be taken, its bias, and the stream it joins
        a, weight, bias, x, repeats = patches, stem_weight, stem_bias, positions, L
        for i in range(depth):
            g1, b1, wqkv, bqkv, wo, bo, g2, b2, w1, c1, w2, c2 = blocks[
                _BLOCK_PARAMETERS * i : _BLOCK_PARAMETERS * (i + 1)
            ]
            x0, n1, stats1 = _linear_add_norm(
                a, weight, bias, x, (g1, b1), eps, drop=drop[3 * i], repeats=repeats, many=not keep
            )
            qkv = torch.addmm(bqkv, n1, wqkv.t())
            o = torch.empty_like(x0)
            kernels.attention[(B * A,)](qkv, o, (D // A) ** -0.5, A=A, E=D // A, **_attention_tile(L))
            x1, n2, stats2 = _linear_add_norm(
                o, wo, bo, x0, (g2, b2), eps, drop=drop[3 * i + 1], many=not keep
            )
            slope, a = _linear_gelu(n2, w1, c1, drop[3 * i + 2], keep)
            if keep:
                saved += [x0, stats1, n1, qkv, o, x1, stats2, n2, slope, a]
            weight, bias, x, repeats = w2, c2, x1, 0
        mean = L == _TOKENS
        last, pooled, stats = _linear_add_norm(
            a, weight, bias, x, (gamma, beta), eps, drop=drop[-1], pool=mean, many=not keep
        )
        assert last.shape == (T, D)
        if not mean:
            pooled = pooled.view(B, L, D)[:, 0].contiguous()
        ctx.shape = shape
        if keep:
            ctx.save_for_backward(
                mask, None if stem_weight is None else patches, last, stats, *parameters, *saved
            )
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpooled: Tensor) -> Any:
        B, A, *_, share = ctx.shape
        mask, patches, last, stats, _, positions, gamma, _, *rest = ctx.saved_tensors
        depth = len(rest) // (_BLOCK_PARAMETERS + _BLOCK_SAVED)
        blocks, saved = rest[: _BLOCK_PARAMETERS * depth], rest[_BLOCK_PARAMETERS * depth :]
        (T, D), F = last.shape, saved[-1].shape[1]
        L, tiles = T // B, T // _TOKENS
        drop = _dropout(mask, share, T, D, F, depth)
        # columns of a block's partial sums: dγ1 dβ1 Σdx0, dγ2 dβ2 Σdx1, dbqkv, dc1; a row a tile, or an image
        width = 9 * D + F
        new = torch.empty if tiles == B else torch.zeros  # not every row has both
        part = new(depth, max(tiles, B), width, device=last.device)
        final = torch.empty(tiles, 3 * D, device=last.device)
        # the gradient of the residual stream, and behind the dropout of what joined it last
        dy = torch.empty_like(last)
        dyd = dy if mask is None else torch.empty_like(last)
        kept, scale = drop[-1].arguments(last)
        mean = L == _TOKENS
        dn, dres = dpooled.contiguous(), last
        if not mean:
            dn, dres = torch.zeros_like(last), torch.zeros_like(last)
            dn.view(B, L, D)[:, 0] = dpooled
        kernels.norm_backward[(tiles,)](
            dn, dres, last, stats[0], stats[1], gamma, dy, final, 0, 3 * D, kept, dyd, scale,
            L=_TOKENS, D=D, POOLED=mean, DROP=mask is not None, BM=_ROWS, BD=_power_of_two(D), num_warps=8,
        )  # fmt: skip
        weights: list[list[Tensor]] = [[]] * depth
        for i in reversed(range(depth)):
            g1, _, wqkv, _, wo, _, g2, _, w1, _, w2, _ = blocks[
                _BLOCK_PARAMETERS * i : _BLOCK_PARAMETERS * (i + 1)
            ]
            x0, stats1, n1, qkv, o, x1, stats2, n2, slope, a = saved[
                _BLOCK_SAVED * i : _BLOCK_SAVED * (i + 1)
            ]
            dh = _linear_scale_backward(dyd, w2, slope, part[i], 9 * D)
            dx1, dx1d = _linear_norm_backward(dh, w1, dy, x1, stats2, g2, part[i], 3 * D, drop[3 * i + 1])
            dqkv = torch.empty_like(qkv)
            kernels.attention_backward[(B * A,)](
                qkv, torch.mm(dx1d, wo), dqkv, part[i], (D // A) ** -0.5, 6 * D, width,
                A=A, E=D // A, **_attention_tile(L),
            )  # fmt: skip
            dx0, dx0d = _linear_norm_backward(dqkv, wqkv, dx1, x0, stats1, g1, part[i], 0, drop[3 * i])
            weights[i] = _weight_gradients([(dqkv, n1), (dx1d, o), (dh, n2), (dyd, a)])
            dy, dyd = dx0, dx0d
        vectors = _column_sums(part, last)
        (ends,) = _column_sums(final[None], last)
        dpositions = _column_sums(dyd.view(1, B, L * D), last).view_as(positions)
        # the bias before a norm is added to every row, so its gradient is Σdx of that norm; a block's last
        # bias is followed by the next block's first norm
        entering = [v[2 * D : 3 * D] for v in vectors] + [ends[2 * D :]]
        stem = (dyd, None) if patches is None else (None, torch.mm(dyd.t(), patches))
        out = [entering[0], dpositions, ends[:D], ends[D : 2 * D]]
        for i, v in enumerate(vectors):
            dg1, db1, _, dg2, db2, dbo = v[: 6 * D].split(D)
            dwqkv, dwo, dw1, dw2 = weights[i]
            dbqkv, dc1 = v[6 * D : 9 * D], v[9 * D :]
            out += [dg1, db1, dwqkv, dbqkv, dwo, dbo, dg2, db2, dw1, dc1, dw2, entering[i + 1]]
        return None, *stem, *out


class FusedViT:
    """``fused(x)`` is what ``model.features(x)`` computes."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    @staticmethod
    def supports(model: VisionTransformer, shape: tuple[int, ...]) -> bool:
        """64 tokens, averaged or with a class token, whole blocks, and widths that fill the tiles.

        D is 128, 256, 384 or 512, heads are 16, 32 or 64 wide, the MLP's width comes in 128s, a patch in 8s.
        """
        stem = model.stem
        if not isinstance(stem, PatchStem | ConvStem) or len(model.blocks) == 0:
            return False
        if any(getattr(block, "drop_path", 0.0) > 0 for block in model.blocks):
            return False
        tokens = (shape[1] // stem.patch) * (shape[2] // stem.patch)
        width, block = model.positions.shape[2], model.blocks[0]
        assert isinstance(block, Block)
        assert isinstance(block.mlp[0], nn.Linear)
        return (
            tokens == model.positions.shape[1] - (model.pool == "cls") == _TOKENS
            and width in (128, 256, 384, 512)
            and width // block.attention.heads in (16, 32, 64)
            and block.mlp[0].out_features % _TILE == 0
            and (isinstance(stem, ConvStem) or stem.proj.in_features % 8 == 0)
        )

    def __call__(self, x: Tensor) -> Tensor:
        model = self.model
        low = x.dtype == model.positions.dtype == torch.bfloat16
        # row offsets are 32-bit
        tokens = model.positions.shape[1]
        fits = x.shape[0] * tokens * max(p.shape[0] for p in self._parameters()[1]) < 2**31
        rates = self._rates()
        keep = torch.is_grad_enabled() or max(rates) > 0
        # images can be filled up where none of them is looked at by another
        whole = x.shape[0] * tokens % _TOKENS == 0 or not (keep or model.training)
        if not (low and fits and whole) or x.requires_grad or len(rates) > 1 or 1.0 in rates:
            return model.plain_features(x)
        (drop,) = rates
        with torch.cuda.device_of(x):  # Triton launches on the current device, torch on the tensor's
            # with dropout in the same way whether or not there is a graph, for the same draws
            if keep:
                return self._features(x, True, drop)
            # BN in training mode takes its statistics from all images
            images = max(x.shape[0], 1) if model.training else _SWEPT
            return torch.cat([self._swept(part) for part in x.split(images)])

    def _swept(self, x: Tensor) -> Tensor:
        """Without gradients; filled up with images of nothing where a class token would leave a tile unfilled."""
        lacking = -x.shape[0] % _TOKENS if self.model.pool == "cls" else 0
        if lacking == 0:
            return self._features(x, False, 0.0)
        return self._features(
            torch.cat([x, torch.zeros_like(x[:1]).expand(lacking, -1, -1, -1)]), False, 0.0
        )[: x.shape[0]]

    def _rates(self) -> set[float]:
        """Of dropout, as it is now; each of the layers may have been told its own."""
        model: Any = self.model
        layers = [model.drop]
        for block in model.blocks:
            layers += [block.attention.drop, block.mlp[2], block.mlp[4]]
        return {layer.p if layer.training else 0.0 for layer in layers}

    def _features(self, x: Tensor, keep: bool, drop: float) -> Tensor:
        model = self.model
        stem: Any = model.stem
        weight, parameters = self._parameters()
        if model.cls_token is not None:
            tokens = torch.cat([model.cls_token.expand(x.shape[0], -1, -1), stem(x)], dim=1)
        else:
            tokens = stem.products(x) if weight is None else stem.patches(x)
        attention: Any = model.blocks[0].attention
        shape = _Shape(x.shape[0], attention.heads, model.norm.eps, keep, drop)
        rows = tokens.reshape(x.shape[0] * model.positions.shape[1], -1)
        pooled: Tensor = _Trunk.apply(shape, rows, weight, *parameters)
        return pooled

    def _parameters(self) -> tuple[Tensor | None, list[Tensor]]:
        """The linear stem's weight, where it is taken with the first norm, and the rest."""
        model: Any = self.model
        last = model.stem.proj if isinstance(model.stem, PatchStem) else model.stem.layers[-1]
        bias = last.bias if model.cls_token is None else torch.zeros_like(last.bias)
        out = [bias, model.positions, model.norm.weight, model.norm.bias]
        for block in model.blocks:
            for layer in (block.norm1, block.attention.qkv, block.attention.proj, block.norm2):
                out += [layer.weight, layer.bias]
            for layer in (block.mlp[0], block.mlp[3]):
                out += [layer.weight, layer.bias]
        linear = isinstance(last, nn.Linear) and model.cls_token is None
        return (last.weight if linear else None), out
