"""The forward of :class:`~protoseam.lab.models.resnet.ResNet` with fused normalisation: same parameters, same maths.

For training in bf16 on CUDA. In eval mode the normalisations are folded into the convolutions' weights, which
makes a sweep over the data (evaluation, the exact covariance) little more than the convolutions themselves.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protoseam.lab.kernels import batch_norm as kernels
from protoseam.lab.kernels import stem as stem_kernels
from protoseam.lab.kernels.sums import column_sums
from protoseam.lab.models.resnet import BasicBlock, ResNet

_CHANNELS = 64  # channels of a reduction's tile
_ROWS = 64  # rows of a tile
_PARTS = 256  # partial sums of a reduction, at most
_WINDOW = 32  # numbers kept for a 3×3 window of a colour image: 27, a one, zeros


# What an activation yields besides, or instead of, itself: every second pixel of it, for a strided shortcut;
# itself once more, for an identity shortcut; the mean over the image alone.
Extra = Literal["nothing", "half", "twice", "pool"]


class _Norm:
    """The vectors of one BatchNorm2d: a, b, mean, rstd, k0, k1, dγ, dβ."""

    def __init__(self, bn: nn.BatchNorm2d) -> None:
        c, device = bn.num_features, bn.weight.device
        self.bn = bn
        self.vectors = torch.zeros(8, c, device=device)
        self.count = torch.zeros(2, c // _CHANNELS, dtype=torch.int32, device=device)
        self.part = torch.zeros(2 * _PARTS, 3, c, device=device)

    def programs(self, rows: int, tile: int) -> int:
        return _programs(_PARTS * _CHANNELS // self.bn.num_features, rows, tile)

    def measure(self, x: Tensor) -> None:
        n, c, h, w = x.shape
        m = n * h * w
        p = self.programs(m, _ROWS)
        bn, v = self.bn, self.vectors
        kernels.bn_statistics[(p, c // _CHANNELS)](
            x, self.part, self.count[0], bn.weight, bn.bias, bn.running_mean, bn.running_var,
            bn.num_batches_tracked, v[0], v[1], v[2], v[3], m, p, m // p, bn.eps, bn.momentum, m / (m - 1),
            C=c, BC=_CHANNELS, BM=_ROWS, BP=triton.next_power_of_2(p), num_warps=4,
        )  # fmt: skip


class _Spec(NamedTuple):
    """The parts of one fused activation, and what it yields besides itself."""

    norm: _Norm
    norm2: _Norm | None
    extra: Extra


class _Activation(torch.autograd.Function):
    """relu(bn(x) [+ res | + bn2(x2)])."""

    @staticmethod
    def forward(ctx: Any, spec: _Spec, x: Tensor, res: Tensor | None, x2: Tensor | None, *_: Tensor) -> Any:
        n, c, h, w = x.shape
        mode = 2 if x2 is not None else 1 if res is not None else 0
        spec.norm.measure(x)
        v = v2 = spec.norm.vectors
        if spec.norm2 is not None:
            assert x2 is not None
            spec.norm2.measure(x2)
            v2 = spec.norm2.vectors
        ctx.spec, ctx.mode, ctx.shape = spec, mode, x.shape
        other = x if x2 is None else x2
        if spec.extra == "pool":
            pooled = torch.empty(n, c, device=x.device, dtype=x.dtype)
            kernels.bn_apply_pool[(n, c // _CHANNELS)](
                x, v[0], v[1], other, v2[0], v2[1], pooled, C=c, HW=h * w, BC=_CHANNELS, num_warps=4
            )
            ctx.save_for_backward(x, x2, None)
            return pooled
        y = _nhwc(n, h, w, c, x)
        small = _nhwc(n, h // 2, w // 2, c, x) if spec.extra == "half" else y
        rows, cols = _ROWS, 128 if c % 128 == 0 else 64
        kernels.bn_apply[(n * h * w // rows, c // cols)](
            x, v[0], v[1], x if res is None else res, other, v2[0], v2[1], y, small,
            C=c, H=h, W=w, MODE=mode, SUB=spec.extra == "half", BM=rows, BC=cols, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x, x2, y if mode == 1 else None)
        if spec.extra == "half":
            return y, small
        return (y, y.view_as(y)) if spec.extra == "twice" else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        spec, mode = ctx.spec, ctx.mode
        n, c, h, w = ctx.shape
        m = n * h * w
        x, x2, y = ctx.saved_tensors
        if spec.extra == "pool":
            dy = dy2 = grads[0].contiguous()
            kind = 3
        else:
            dy = dy2 = grads[0].contiguous(memory_format=torch.channels_last)
            kind = 0
            if len(grads) == 2:
                dy2 = grads[1].contiguous(memory_format=torch.channels_last)
                kind = 2 if spec.extra == "half" else 1
        norm = spec.norm
        v = norm.vectors
        v2 = v if spec.norm2 is None else spec.norm2.vectors
        other = x if x2 is None else x2
        g = _nhwc(n, h, w, c, x) if mode == 1 else dy
        tile = 32 if mode == 2 else _ROWS
        p = norm.programs(m, tile)
        kernels.bn_backward_reduce[(p, c // _CHANNELS)](
            dy, dy2, x if y is None else y, x, other, g, norm.part, norm.count[1], v[0], v[1], v[2], v[3],
            v2[0], v2[1], v2[2], v2[3], v[6], v[7], v[4], v[5], v2[6], v2[4], v2[5], m, p, m // p,
            C=c, H=h, W=w, MODE=mode, DY=kind, BC=_CHANNELS, BM=tile, BP=triton.next_power_of_2(p), num_warps=4,
        )  # fmt: skip
        dx = _nhwc(n, h, w, c, x)
        dx2 = _nhwc(n, h, w, c, x) if mode == 2 else dx
        rows, cols = _ROWS, 128 if c % 128 == 0 else 64
        kernels.bn_backward_apply[(m // rows, c // cols)](
            g if mode == 1 else dy, dy2, x, other, v[0], v[1], v2[0], v2[1], v[4], v[5], v2[4], v2[5], dx, dx2,
            C=c, H=h, W=w, MODE=mode, DY=0 if mode == 1 else kind, BM=rows, BC=cols, num_warps=8,
        )  # fmt: skip
        # bn's own gradients are the vectors' last rows; both norms of MODE 2 share dβ = Σ g
        own = (v[6], v[7]) if mode != 2 else (v[6], v[7], v2[6], v[7])
        return None, dx, g if mode == 1 else None, dx2 if mode == 2 else None, *own


class _Stem(torch.autograd.Function):
    """relu(bn(conv(x))) of a colour image, twice: for the first block and for its identity shortcut."""

    @staticmethod
    def forward(ctx: Any, norm: _Norm, x: Tensor, weight: Tensor, *affine: Tensor) -> Any:
        n, _, h, w = x.shape
        m, c = n * h * w, weight.shape[0]
        bn, v = norm.bn, norm.vectors
        p = _programs(_PARTS, m, 128)
        windows = torch.empty(m, _WINDOW, device=x.device, dtype=x.dtype)
        part = torch.empty(p, _WINDOW * _WINDOW, device=x.device)
        stem_kernels.windows[(p,)](x, windows, part, m // p, H=h, W=w, BM=128, num_warps=4)
        total = column_sums(part[None], torch.float32)[0]
        mu, sw = torch.empty(_WINDOW, device=x.device), torch.empty(_WINDOW, c, device=x.device)
        stem_kernels.stem_statistics[(1,)](
            total, weight, bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked,
            v[0], v[1], v[2], v[3], mu, sw, m, bn.eps, bn.momentum, m / (m - 1), C=c, num_warps=8,
        )  # fmt: skip
        y = _nhwc(n, h, w, c, x)
        stem_kernels.stem_apply[(m // 128,)](windows, weight, v[0], v[1], y, C=c, BM=128, num_warps=8)
        ctx.norm = norm
        ctx.save_for_backward(windows, weight, mu, sw)
        return y, y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        windows, weight, mu, sw = ctx.saved_tensors
        dy, dy2 = (g.contiguous(memory_format=torch.channels_last) for g in grads)
        m, c, v = len(windows), weight.shape[0], ctx.norm.vectors
        p = _programs(_PARTS, m, 32)
        part = torch.empty(p, _WINDOW * c, device=dy.device)
        stem_kernels.stem_backward[(p,)](
            windows, weight, dy, dy2, v[0], v[1], part, m // p, C=c, BM=32, num_warps=4
        )
        dw = torch.empty_like(weight)
        total = column_sums(part[None], torch.float32)[0]
        stem_kernels.stem_gradients[(1,)](
            total, weight, v[0], v[2], v[3], mu, sw, dw, v[6], v[7], C=c, num_warps=8
        )
        return None, None, dw, v[6], v[7]


class FusedResNet:
    """``fused(x)`` is what ``model.features(x)`` computes."""

    def __init__(self, model: ResNet) -> None:
        self.model = model
        self.norms = {m: _Norm(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}

    @staticmethod
    def supports(model: ResNet, shape: tuple[int, ...]) -> bool:
        """Return whether tiles fill the network: channels in multiples of 64, image sides of 16, 32, 64 or 128.

        The limit of 128 is there because the last stage's image is one tile.
        """
        _, height, width = shape
        widths = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        square = height == width == triton.next_power_of_2(height) and 16 <= height <= 128
        whole = model.stem[0].stride == (1, 1)
        return square and whole and all(c % _CHANNELS == 0 for c in widths)

    def __call__(self, x: Tensor) -> Tensor:
        training = [bn.training for bn in self.norms]
        weight = self.model.stem[0].weight
        assert isinstance(weight, Tensor)
        low = x.dtype == weight.dtype == torch.bfloat16
        n, _, h, w = x.shape
        # row offsets are 32-bit, and the stem's output is the largest activation
        fits = n * h * w * max(weight.shape[0], _WINDOW) < 2**31
        with torch.cuda.device_of(x):  # Triton launches on the current device, torch on the tensor's
            if all(training) and low and fits and n % 64 == 0:
                return self._train(x)
            # some layers may use their batch's statistics while the rest evaluate: FSInit before the first step
            return self._plain(x) if any(training) else self._evaluate(x)

    def _plain(self, x: Tensor) -> Tensor:
        return torch.mean(self.model.stages(self.model.stem(x)), dim=(2, 3))

    def _train(self, x: Tensor) -> Tensor:
        stem, blocks = self.model.stem, self._blocks()
        assert isinstance(stem[0], nn.Conv2d)
        assert isinstance(stem[1], nn.BatchNorm2d)
        if _recomputable(stem[0], x):
            x = x.contiguous(memory_format=torch.channels_last)
            out = _Stem.apply(self.norms[stem[1]], x, stem[0].weight, stem[1].weight, stem[1].bias)
        else:
            out = self._act(stem[1], F.conv2d(x, stem[0].weight, padding=1), extra=_wanted(blocks[0]))
        for i, block in enumerate(blocks):
            a, extra = out
            h = self._act(block.bn1, F.conv2d(a, block.conv1.weight, stride=block.conv1.stride, padding=1))
            z = F.conv2d(h, block.conv2.weight, padding=1)
            last = i == len(blocks) - 1
            shortcut = block.shortcut
            extra_out: Extra = "nothing" if last else _wanted(blocks[i + 1])
            if isinstance(shortcut, nn.Sequential):
                conv, bn = shortcut[0], shortcut[1]
                assert isinstance(conv, nn.Conv2d)
                assert isinstance(bn, nn.BatchNorm2d)
                # the pixels a stride of 2 would skip are already gone from `extra`
                side = F.conv2d(extra, conv.weight)
                out = self._act(block.bn2, z, bn2=bn, x2=side, extra="pool" if last else extra_out)
                if last:
                    return out
            else:
                out = self._act(block.bn2, z, res=extra, extra=extra_out)
        return torch.mean(out, dim=(2, 3))

    def _act(
        self,
        bn: nn.BatchNorm2d,
        x: Tensor,
        *,
        res: Tensor | None = None,
        bn2: nn.BatchNorm2d | None = None,
        x2: Tensor | None = None,
        extra: Extra = "nothing",
    ) -> Any:
        spec = _Spec(self.norms[bn], None if bn2 is None else self.norms[bn2], extra)
        parameters = (bn.weight, bn.bias) if bn2 is None else (bn.weight, bn.bias, bn2.weight, bn2.bias)
        return _Activation.apply(spec, x, res, x2, *parameters)

    def _blocks(self) -> list[BasicBlock]:
        return [m for m in self.model.modules() if isinstance(m, BasicBlock)]

    def _evaluate(self, x: Tensor) -> Tensor:
        a = self._evaluate_stem(x)
        for block in self._blocks():
            weight, bias = _folded(block.conv1, block.bn1, x.dtype)
            h = _convolve(a, block.conv1, weight, bias)
            weight, bias = _folded(block.conv2, block.bn2, x.dtype)
            side = a
            if isinstance(block.shortcut, nn.Sequential):
                conv = block.shortcut[0]
                assert isinstance(conv, nn.Conv2d)
                side_weight, side_bias = _folded(conv, block.shortcut[1], x.dtype)
                # both sums get their bias at once: alone, it would be a pass over memory of its own
                side = F.conv2d(a, side_weight, stride=conv.stride)
                bias = bias + side_bias
            a = _convolve(h, block.conv2, weight, bias, side)
        return torch.mean(a, dim=(2, 3))

    def _evaluate_stem(self, x: Tensor) -> Tensor:
        conv, bn = self.model.stem[0], self.model.stem[1]
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(bn, nn.BatchNorm2d)
        n, _, h, w = x.shape
        m, c = n * h * w, conv.out_channels
        low = x.is_cuda and x.dtype == conv.weight.dtype == torch.bfloat16
        # row offsets are 32-bit
        if not (low and _recomputable(conv, x) and m % 128 == 0 and m * c < 2**31) or torch.is_grad_enabled():
            return _convolve(x, conv, *_folded(conv, bn, x.dtype))
        x = x.contiguous(memory_format=torch.channels_last)
        a, b = _affine(bn)
        windows, y = torch.empty(m, _WINDOW, device=x.device, dtype=x.dtype), _nhwc(n, h, w, c, x)
        p = _programs(m // 128, m, 128)
        part = torch.empty(p, _WINDOW * _WINDOW, device=x.device)
        stem_kernels.windows[(p,)](x, windows, part, m // p, H=h, W=w, BM=128, num_warps=4)
        stem_kernels.stem_apply[(m // 128,)](windows, conv.weight, a, b, y, C=c, BM=128, num_warps=8)
        return y


def _recomputable(stem: nn.Conv2d, x: Tensor) -> bool:
    """Whether `_Stem` applies: a channels_last 3×3 weight for colour images, which themselves need no gradient."""
    shape, order = (stem.in_channels, *stem.kernel_size), torch.channels_last
    fits = shape == (3, 3, 3) and stem.out_channels in (64, 128)
    return fits and stem.weight.is_contiguous(memory_format=order) and not x.requires_grad


def _wanted(following: BasicBlock) -> Extra:
    strided = isinstance(following.shortcut, nn.Sequential) and following.conv1.stride[0] == 2
    return "half" if strided else "twice"


def _affine(bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """What the normalisation is in eval mode: x ↦ a·x + b."""
    assert bn.running_mean is not None
    assert bn.running_var is not None
    a = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
    return a, bn.bias - a * bn.running_mean


def _folded(conv: nn.Conv2d, bn: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and (float32) bias of the convolution that is bn(conv(x)) in eval mode."""
    assert isinstance(bn, nn.BatchNorm2d)
    a, b = _affine(bn)
    weight = (conv.weight.float() * a[:, None, None, None]).to(dtype)
    return weight.contiguous(memory_format=torch.channels_last), b


def _convolve(x: Tensor, conv: nn.Conv2d, weight: Tensor, bias: Tensor, add: Tensor | None = None) -> Tensor:
    """relu(weight * x + bias + add), a convolution of ``conv``'s shape."""
    bias = bias.to(x.dtype)
    if x.is_cuda and conv.in_channels % 8 == 0 and not torch.is_grad_enabled():
        # cuDNN adds bias and residual and clips while it writes the result: one pass over memory, not three
        assert isinstance(conv.padding, tuple)
        shape = conv.stride, conv.padding, conv.dilation
        if add is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *shape, groups=conv.groups)
        return torch.cudnn_convolution_add_relu(x, weight, add, 1.0, bias, *shape, groups=conv.groups)
    y = F.conv2d(x, weight, bias, stride=conv.stride, padding=conv.padding)
    return (y if add is None else y + add).relu()


def _nhwc(n: int, h: int, w: int, c: int, like: Tensor) -> Tensor:
    return torch.empty(n, h, w, c, device=like.device, dtype=like.dtype).permute(0, 3, 1, 2)


def _programs(most: int, rows: int, tile: int) -> int:
    """At most ``most`` programs that share ``rows`` evenly, in whole tiles."""
    p = max(1, min(most, rows // tile))
    while rows % (p * tile):
        p -= 1
    return p
