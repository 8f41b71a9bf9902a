"""The forward of :class:`~protoseam.lab.models.vit.VisionTransformer` with a hand-written backward.

For bf16 on CUDA, in training and, without a graph for the gradients, in sweeps over the data. The matrix products
that nothing can be fused to with profit stay the library's; the rest is in :mod:`~protoseam.lab.kernels.vit_launches`.
Where it does not apply (another dtype, a gradient with respect to the images) the module's own layers run.

Legend: B batch, L tokens, D their width, T = B·L, A heads, E = D/A, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protoseam.lab.kernels import vit_launches as launch
from protoseam.lab.kernels.sums import column_sums
from protoseam.lab.models.vit import Block, ConvStem, PatchStem, VisionTransformer

_SWEPT = 2048  # images per launch without gradients, so that launches cost little
_BLOCK_PARAMETERS = 12  # in the order of `_parameters`
_BLOCK_SAVED = 10  # activations of a block that its backward needs


class _Shape(NamedTuple):
    batch: int
    heads: int
    eps: float
    keep: bool  # the activations, for the backward
    drop: float  # share of the activations that dropout zeroes


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
        drop = launch.dropout(mask, share, T, D, F, depth)
        saved: list[Tensor] = []
        # what enters the next residual sum: a product still to be taken, its bias, and the stream it joins
        a, weight, bias, x, repeats = patches, stem_weight, stem_bias, positions, L
        for i in range(depth):
            g1, b1, wqkv, bqkv, wo, bo, g2, b2, w1, c1, w2, c2 = blocks[
                _BLOCK_PARAMETERS * i : _BLOCK_PARAMETERS * (i + 1)
            ]
            x0, n1, stats1 = launch.linear_add_norm(
                a, weight, bias, x, (g1, b1), eps, drop=drop[3 * i], repeats=repeats, many=not keep
            )
            qkv = torch.addmm(bqkv, n1, wqkv.t())
            o = launch.attention(qkv, B, A)
            x1, n2, stats2 = launch.linear_add_norm(
                o, wo, bo, x0, (g2, b2), eps, drop=drop[3 * i + 1], many=not keep
            )
            slope, a = launch.linear_gelu(n2, w1, c1, drop[3 * i + 2], keep)
            if keep:
                saved += [x0, stats1, n1, qkv, o, x1, stats2, n2, slope, a]
            weight, bias, x, repeats = w2, c2, x1, 0
        mean = L == launch.TOKENS
        last, pooled, stats = launch.linear_add_norm(
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
        L, tiles = T // B, T // launch.TOKENS
        drop = launch.dropout(mask, share, T, D, F, depth)
        # columns of a block's partial sums: dγ1 dβ1 Σdx0, dγ2 dβ2 Σdx1, dbqkv, dc1; one row per tile or image
        width = 9 * D + F
        new = torch.empty if tiles == B else torch.zeros  # not every row has both
        part = new(depth, max(tiles, B), width, device=last.device)
        final = torch.empty(tiles, 3 * D, device=last.device)
        # the gradient of the residual stream, and behind the dropout of what joined it last
        dy, dyd = launch.pooled_norm_backward(dpooled, last, stats, gamma, final, drop[-1])
        weights: list[list[Tensor]] = [[]] * depth
        for i in reversed(range(depth)):
            g1, _, wqkv, _, wo, _, g2, _, w1, _, w2, _ = blocks[
                _BLOCK_PARAMETERS * i : _BLOCK_PARAMETERS * (i + 1)
            ]
            x0, stats1, n1, qkv, o, x1, stats2, n2, slope, a = saved[
                _BLOCK_SAVED * i : _BLOCK_SAVED * (i + 1)
            ]
            dh = launch.linear_scale_backward(dyd, w2, slope, part[i], 9 * D)
            dx1, dx1d = launch.linear_norm_backward(
                dh, w1, dy, x1, stats2, g2, part[i], 3 * D, drop[3 * i + 1]
            )
            dqkv = launch.attention_backward(qkv, torch.mm(dx1d, wo), B, A, part[i], 6 * D)
            dx0, dx0d = launch.linear_norm_backward(dqkv, wqkv, dx1, x0, stats1, g1, part[i], 0, drop[3 * i])
            weights[i] = launch.weight_gradients([(dqkv, n1), (dx1d, o), (dh, n2), (dyd, a)])
            dy, dyd = dx0, dx0d
        vectors = column_sums(part, last.dtype)
        (ends,) = column_sums(final[None], last.dtype)
        dpositions = column_sums(dyd.view(1, B, L * D), last.dtype).view_as(positions)
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
        """Return whether the network has 64 tokens, averaged or with a class token, and widths that fill the tiles.

        D is 128, 256, 384 or 512, heads are 16, 32 or 64 wide, the MLP's width is a multiple of 128, a patch's of 8.
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
            tokens == model.positions.shape[1] - (model.pool == "cls") == launch.TOKENS
            and width in (128, 256, 384, 512)
            and width // block.attention.heads in (16, 32, 64)
            and block.mlp[0].out_features % launch.TILE == 0
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
        whole = x.shape[0] * tokens % launch.TOKENS == 0 or not (keep or model.training)
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
        """Return features without gradients; a batch with class tokens is padded with empty images to whole tiles."""
        lacking = -x.shape[0] % launch.TOKENS if self.model.pool == "cls" else 0
        if lacking == 0:
            return self._features(x, False, 0.0)
        return self._features(
            torch.cat([x, torch.zeros_like(x[:1]).expand(lacking, -1, -1, -1)]), False, 0.0
        )[: x.shape[0]]

    def _rates(self) -> set[float]:
        """Return the present rates of dropout; each layer may have its own."""
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
        """Return the linear stem's weight, if the first norm's kernel multiplies by it, and all other parameters."""
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
