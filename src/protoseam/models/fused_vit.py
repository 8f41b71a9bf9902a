"""The forward of :class:`~protoseam.models.vit.VisionTransformer` with a backward by hand: same parameters, same maths.

For training in bf16 on CUDA. The matrix products that nothing can be fused to with profit stay the library's; the
rest is in :mod:`~protoseam.models.vit_kernels`. Where it does not apply (eval mode, another dtype, a gradient with
respect to the images) the module's own layers run.

Legend: B batch, L tokens, D their width, T = B·L, A heads, E = D/A, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protoseam.models.vit import Block, PatchStem, VisionTransformer

try:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from protoseam.models import vit_kernels as kernels
except ImportError:  # no Triton on this machine: `supports` still answers
    kernels = None  # type: ignore[assignment]

__all__ = ["FusedViT"]

_TOKENS = 64  # of an image: one tile of rows
_ROWS = 32  # that a partial sum of the backward covers
_TILE = 128  # sides of a weight gradient's tile
_PROGRAMS = 264  # at most, for the weight gradients: two for each multiprocessor of an H200
_BLOCK_PARAMETERS = 12  # in the order of `_parameters`


class _Shape(NamedTuple):
    batch: int
    heads: int
    eps: float


def _linear_add_norm(
    a: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    norm: tuple[Tensor, Tensor],
    eps: float,
    *,
    repeats: bool = False,
    pool: bool = False,
) -> tuple[Tensor, Tensor]:
    """``total = x + a·weightᵀ + bias`` and its LayerNorm, with ``pool`` averaged over each image's tokens."""
    (T, K), D = a.shape, weight.shape[0]
    total = torch.empty(T, D, device=a.device, dtype=a.dtype)
    out = torch.empty(T // _TOKENS if pool else T, D, device=a.device, dtype=a.dtype)
    kernels.linear_add_norm[(T // _TOKENS,)](
        _described(a, [_TOKENS, 64]), _described(weight, [D, 64]), bias, x, *norm, total, out, eps,
        K=K, D=D, XROWS=_TOKENS if repeats else 0, POOL=pool, BM=_TOKENS, BK=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return total, out


def _described(t: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def _weight_gradients(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """dᵀ·x of four pairs (d, x)."""
    T = pairs[0][0].shape[0]
    shapes = [(d.shape[1], x.shape[1]) for d, x in pairs]
    sizes = [o * i for o, i in shapes]
    total, tiles = sum(sizes), sum(o // _TILE * (i // _TILE) for o, i in shapes)
    slices = max(1, min(T // 64, _PROGRAMS // tiles))
    part = torch.empty(slices, total, device=pairs[0][0].device)
    widths = {f"{side}{j}": n for j, pair in enumerate(shapes) for side, n in zip("OI", pair, strict=True)}
    kernels.weight_gradients[(tiles * slices,)](
        *(t for pair in pairs for t in pair), part, T, -(-(T // 64) // slices), total, **widths,
        BM=_TILE, BN=_TILE, BK=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty(total, device=part.device, dtype=pairs[0][0].dtype)
    kernels.add_slices[(total // 1024,)](part, out, total, SLICES=slices, BLOCK=1024, num_warps=4)
    return [g.view(shape) for g, shape in zip(out.split(sizes), shapes, strict=True)]


def _column_sums(part: Tensor, like: Tensor, few: int | None = None, split: int | None = None) -> Tensor:
    """Sums over the rows of ``part`` (count, rows, width); columns from ``split`` on have ``few`` rows."""
    count, rows, width = part.shape
    out = torch.empty(count, width, device=like.device, dtype=like.dtype)
    kernels.column_sums[(-(-width // 32), count)](
        part, out, rows, rows if few is None else few, width if split is None else split, width,
        BP=128, BC=32, num_warps=4,
    )  # fmt: skip
    return out


class _Trunk(torch.autograd.Function):
    """Patches (T, P) to pooled features (B, D)."""

    @staticmethod
    def forward(ctx: Any, shape: _Shape, patches: Tensor, *parameters: Tensor) -> Tensor:
        B, A, eps = shape
        stem_weight, stem_bias, positions, gamma, beta, *blocks = parameters
        T, D = patches.shape[0], stem_weight.shape[0]
        saved: list[Tensor] = []
        # what enters the next residual sum: a product still to be taken, its bias, and the stream it joins
        a, weight, bias, x, repeats = patches, stem_weight, stem_bias, positions, True
        for i in range(0, len(blocks), _BLOCK_PARAMETERS):
            g1, b1, wqkv, bqkv, wo, bo, g2, b2, w1, c1, w2, c2 = blocks[i : i + _BLOCK_PARAMETERS]
            x0, n1 = _linear_add_norm(a, weight, bias, x, (g1, b1), eps, repeats=repeats)
            qkv = torch.addmm(bqkv, n1, wqkv.t())
            o = torch.empty_like(x0)
            kernels.attention[(B * A,)](qkv, o, (D // A) ** -0.5, L=_TOKENS, A=A, E=D // A, num_warps=4)
            x1, n2 = _linear_add_norm(o, wo, bo, x0, (g2, b2), eps)
            h = torch.addmm(c1, n2, w1.t())
            a = torch.empty_like(h)
            kernels.gelu[(h.numel() // 4096,)](h, a, BLOCK=4096, num_warps=8)
            saved += [x0, n1, qkv, o, x1, n2, h, a]
            weight, bias, x, repeats = w2, c2, x1, False
        last, pooled = _linear_add_norm(a, weight, bias, x, (gamma, beta), eps, pool=True)
        assert last.shape == (T, D)
        ctx.shape = shape
        ctx.save_for_backward(patches, last, *parameters, *saved)
        return pooled

    @staticmethod
    def backward(ctx: Any, dpooled: Tensor) -> Any:
        B, A, eps = ctx.shape
        patches, last, _, _, positions, gamma, _, *rest = ctx.saved_tensors
        depth = len(rest) // (_BLOCK_PARAMETERS + 8)
        blocks, saved = rest[: _BLOCK_PARAMETERS * depth], rest[_BLOCK_PARAMETERS * depth :]
        (T, D), F = last.shape, saved[6].shape[1]
        # columns of a block's partial sums: dγ1 dβ1 Σdx0, dγ2 dβ2 Σdx1, dc1, dbqkv (one row an image, not 32)
        width, rows = 9 * D + F, T // _ROWS
        part = torch.empty(depth, rows, width, device=last.device)

        def norm_backward(dn: Tensor, dres: Tensor, x: Tensor, g: Tensor, to: Tensor, slot: int) -> Tensor:
            dx = torch.empty_like(x)
            kernels.norm_backward[(rows,)](
                dn, dres, x, g, dx, to, eps, slot, to.shape[1],
                POOLED=_TOKENS if dn.shape[0] == B else 0, D=D, BM=_ROWS, num_warps=8,
            )  # fmt: skip
            return dx

        final = torch.empty(rows, 3 * D, device=last.device)
        dpooled = dpooled.contiguous()
        dy = norm_backward(dpooled, dpooled, last, gamma, final, 0)
        weights: list[list[Tensor]] = [[]] * depth
        for i in reversed(range(depth)):
            g1, _, wqkv, _, wo, _, g2, _, w1, _, w2, _ = blocks[
                _BLOCK_PARAMETERS * i : _BLOCK_PARAMETERS * (i + 1)
            ]
            x0, n1, qkv, o, x1, n2, h, a = saved[8 * i : 8 * i + 8]
            dh = torch.empty_like(h)
            kernels.gelu_backward[(rows, F // 128)](
                torch.mm(dy, w2), h, dh, part[i], 6 * D, width, F=F, BC=128, BM=_ROWS, num_warps=8
            )
            dx1 = norm_backward(torch.mm(dh, w1), dy, x1, g2, part[i], 3 * D)
            dqkv = torch.empty_like(qkv)
            kernels.attention_backward[(B * A,)](
                qkv, torch.mm(dx1, wo), dqkv, part[i], (D // A) ** -0.5, 6 * D + F, width,
                L=_TOKENS, A=A, E=D // A, num_warps=4,
            )  # fmt: skip
            dx0 = norm_backward(torch.mm(dqkv, wqkv), dx1, x0, g1, part[i], 0)
            weights[i] = _weight_gradients([(dqkv, n1), (dx1, o), (dh, n2), (dy, a)])
            dy = dx0
        vectors = _column_sums(part, last, few=B, split=6 * D + F)
        (ends,) = _column_sums(final[None], last)
        dpositions = _column_sums(dy.view(1, B, _TOKENS * D), last).view_as(positions)
        # the bias before a norm is added to every row, so its gradient is Σdx of that norm; a block's last
        # bias is followed by the next block's first norm
        entering = [v[2 * D : 3 * D] for v in vectors] + [ends[2 * D :]]
        out = [torch.mm(dy.t(), patches), entering[0], dpositions, ends[:D], ends[D : 2 * D]]
        for i, v in enumerate(vectors):
            dg1, db1, _, dg2, db2, dbo = v[: 6 * D].split(D)
            dwqkv, dwo, dw1, dw2 = weights[i]
            dc1, dbqkv = v[6 * D : 6 * D + F], v[6 * D + F :]
            out += [dg1, db1, dwqkv, dbqkv, dwo, dbo, dg2, db2, dw1, dc1, dw2, entering[i + 1]]
        return None, None, *out


class FusedViT:
    """``fused(x)`` is what ``model.features(x)`` computes."""

    def __init__(self, model: VisionTransformer) -> None:
        self.model = model

    @staticmethod
    def supports(model: VisionTransformer, shape: tuple[int, ...]) -> bool:
        """Linear patches, 64 tokens averaged, nothing dropped, and widths that fill the tiles.

        D is 128 or 256, heads are 16, 32 or 64 wide, the MLP's width comes in 128s, a patch in 8s.
        """
        if not isinstance(model.stem, PatchStem) or model.pool != "mean" or len(model.blocks) == 0:
            return False
        dropped = any(m.p > 0 for m in model.modules() if isinstance(m, nn.Dropout))
        if dropped or any(getattr(block, "drop_path", 0.0) > 0 for block in model.blocks):
            return False
        tokens = (shape[1] // model.stem.patch) * (shape[2] // model.stem.patch)
        width, block = model.positions.shape[2], model.blocks[0]
        assert isinstance(block, Block)
        assert isinstance(block.mlp[0], nn.Linear)
        return (
            tokens == model.positions.shape[1] == _TOKENS
            and width in (128, 256)
            and width // block.attention.heads in (16, 32, 64)
            and block.mlp[0].out_features % _TILE == 0
            and model.stem.proj.in_features % 8 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        model = self.model
        low = x.dtype == model.positions.dtype == torch.bfloat16
        # row offsets are 32-bit
        fits = x.shape[0] * _TOKENS * max(p.shape[0] for p in self._parameters()) < 2**31
        if not (model.training and low and fits) or x.requires_grad:
            return model.plain_features(x)
        assert isinstance(model.stem, PatchStem)
        patches = model.stem.patches(x).reshape(x.shape[0] * _TOKENS, -1)
        attention: Any = model.blocks[0].attention
        shape = _Shape(x.shape[0], attention.heads, model.norm.eps)
        pooled: Tensor = _Trunk.apply(shape, patches, *self._parameters())
        return pooled

    def _parameters(self) -> list[Tensor]:
        model: Any = self.model
        out = [
            model.stem.proj.weight,
            model.stem.proj.bias,
            model.positions,
            model.norm.weight,
            model.norm.bias,
        ]
        for block in model.blocks:
            for layer in (block.norm1, block.attention.qkv, block.attention.proj, block.norm2):
                out += [layer.weight, layer.bias]
            for layer in (block.mlp[0], block.mlp[3]):
                out += [layer.weight, layer.bias]
        return out
