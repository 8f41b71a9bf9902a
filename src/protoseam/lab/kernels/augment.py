"""The augmentation of :mod:`~protoseam.lab.pipeline.augment` as one Triton kernel per RandAugment slot.

There every image goes through every operation, because tensors do not branch; here a program takes the one that its
image drew, so an epoch of CIFAR reads and writes each image twice and does little else. The formulas are those of
:mod:`~protoseam.lab.pipeline.randaugment`, in its order and its precision, without contractions: the bits are the same.
"""
# mypy: ignore-errors
# The bodies below are Triton's language, compiled when first launched.

# B images, C channels (1 or 3), H × W pixels, P = H·W

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BYTES = 2**28  # largest size of the images between two slots
_PIXELS = 64 * 64  # largest image that a program holds without too many spills

# Numbers of operations, and the weights of gray: those of randaugment.OPS and randaugment.GRAY.
_SHEAR_X, _ROTATE = tl.constexpr(1), tl.constexpr(5)
_BRIGHTNESS, _COLOR, _CONTRAST, _SHARPNESS = (tl.constexpr(op) for op in range(6, 10))
_POSTERIZE, _SOLARIZE, _AUTOCONTRAST, _EQUALIZE = (tl.constexpr(op) for op in range(10, 14))
_RED, _GREEN = tl.constexpr(0.29890000820159912), tl.constexpr(0.5870000123977661)
_BLUE = tl.constexpr(0.11400000005960464)


@triton.jit
def _fma(base, other, share):
    """base + other·share with one rounding, as ``randaugment._fma``."""
    return (base.to(tl.float64) + other.to(tl.float64) * share).to(tl.float32)


@triton.jit
def _to_level(values):
    return tl.minimum(tl.maximum(values, 0.0), 255.0).to(tl.int32)


@triton.jit
def _gray(red, green, blue, C: tl.constexpr):
    r = red.to(tl.float32)
    if C == 1:
        return r
    partial = _fma(r * _RED, green.to(tl.float32), _GREEN)
    return tl.floor(_fma(partial, blue.to(tl.float32), _BLUE))


@triton.jit
def _blended(level, other, own, share):
    return _to_level(_fma(level.to(tl.float32) * own, other, share.to(tl.float64)))


@triton.jit
def _autocontrast(level, inside):
    """The channel's range stretched to 0 … 255."""
    low = tl.min(tl.where(inside, level, 255), 0)
    high = tl.max(tl.where(inside, level, 0), 0)
    flat = low == high
    span = tl.where(flat, 1.0, (high - low).to(tl.float32) * (1.0 / 255.0))
    start = tl.where(flat, 0, low).to(tl.float32)
    stretched = (level.to(tl.float32) - start).to(tl.float64) / span.to(tl.float64)
    return _to_level(stretched.to(tl.float32))


@triton.jit
def _equalize(level, inside, P: tl.constexpr):
    """Pillow's rule: (pixels below the level + step/2) / step, step = pixels not of the top level / 255."""
    count = tl.histogram(level, 256, mask=inside)
    below = tl.cumsum(count, 0) - count
    levels = tl.arange(0, 256)
    top = tl.sum(tl.where(levels == tl.max(tl.where(inside, level, 0), 0), count, 0), 0)
    step = (P - top) // 255
    table = (below + step // 2) // tl.maximum(step, 1)
    table = tl.where(step == 0, levels, tl.minimum(table, 255))
    return tl.gather(table, level, 0)


@triton.jit
def _normalised(level, scale, shift):
    """scale·level − shift, each rounded: the product in float64, or an assembler that packs pairs may contract it."""
    return (level.to(tl.float64) * tl.load(scale).to(tl.float64)).to(tl.float32) - tl.load(shift)


@triton.jit
def _from(y, x, inside, flipped, dy, dx, H: tl.constexpr, W: tl.constexpr):
    """Return where a pixel of the flipped crop lies in the image, and whether it lies inside."""
    y, x = y + dy, tl.where(flipped, W - 1 - x, x) + dx
    inside = inside & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return y * W + x, inside


@triton.jit
def _sharpened(
    image, level, y, x, inside, flipped, dy, dx, share, SP: tl.constexpr, H: tl.constexpr, W: tl.constexpr
):
    """level + share·(smoothed − level), kernel 1 around a 5, over 13; the border stays."""
    inner = inside & (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
    own = level.to(tl.float32)
    total = 4.0 * own
    for i in range(9):  # unrolled it takes twice the registers
        at, there = _from(y + i // 3 - 1, x + i % 3 - 1, inner, flipped, dy, dx, H, W)
        total += tl.load(image + at * SP, mask=there, other=0).to(tl.float32)
    smoothed = tl.floor(total * (1.0 / 13.0) + 0.5)  # k/13 is never nearer than 1/26 to a half
    return _blended(level, tl.where(inner, smoothed - own, 0.0), 1.0, share)


@triton.jit
def _slot(
    source, rows, out, op, negative, crop, flip, erase, maps, levels, shares, scale, shift, fill, B, SB, OB,
    PADDING: tl.constexpr, SC: tl.constexpr, SP: tl.constexpr, OC: tl.constexpr, OP: tl.constexpr, C: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, MAPS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One operation of one image. FIRST: row ``rows[b]`` of all, cropped and flipped; LAST: normalised, erased."""
    P: tl.constexpr = H * W
    b = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    inside = p < P
    which, minus = tl.load(op + b).to(tl.int32), tl.load(negative + b).to(tl.int32)
    image, flipped, dy, dx = source + b * SB, which < 0, 0, 0
    if FIRST:
        image = source + tl.load(rows + b) * SB
        flipped = tl.load(flip + b) != 0
        dy, dx = tl.load(crop + b).to(tl.int32) - PADDING, tl.load(crop + B + b).to(tl.int32) - PADDING

    moves = (which >= _SHEAR_X) & (which <= _ROTATE)
    mapped = maps + tl.where(moves, 2 * which - 1 + minus, 0) * P + p
    y, x = tl.load(mapped, mask=inside, other=0), tl.load(mapped + MAPS * P, mask=inside, other=0)
    at, there = _from(y, x, inside, flipped, dy, dx, H, W)
    red = tl.load(image + at * SP, mask=there, other=0).to(tl.int32)
    green, blue = red, red
    if C == 3:
        green = tl.load(image + at * SP + SC, mask=there, other=0).to(tl.int32)
        blue = tl.load(image + at * SP + 2 * SC, mask=there, other=0).to(tl.int32)

    own, share = tl.load(shares + minus), tl.load(shares + 2 + minus)
    if (which == _BRIGHTNESS) | (which == _POSTERIZE) | (which == _SOLARIZE):
        row = tl.where(which == _BRIGHTNESS, 1 + minus, tl.where(which == _POSTERIZE, 3, 4))
        red = tl.load(levels + row * 256 + red).to(tl.int32)
        if C == 3:
            green = tl.load(levels + row * 256 + green).to(tl.int32)
            blue = tl.load(levels + row * 256 + blue).to(tl.int32)
    elif (which == _CONTRAST) | ((which == _COLOR) & (C == 3)):
        gray = _gray(red, green, blue, C)
        if which == _CONTRAST:
            mean = (tl.sum(tl.where(inside, gray, 0.0).to(tl.float64), 0) / (P * 1.0)).to(tl.float32)
            gray = tl.zeros_like(gray) + mean
        red = _blended(red, gray, own, share)
        if C == 3:
            green, blue = _blended(green, gray, own, share), _blended(blue, gray, own, share)
    elif which == _SHARPNESS:
        red = _sharpened(image, red, y, x, inside, flipped, dy, dx, share, SP, H, W)
        if C == 3:
            green = _sharpened(image + SC, green, y, x, inside, flipped, dy, dx, share, SP, H, W)
            blue = _sharpened(image + 2 * SC, blue, y, x, inside, flipped, dy, dx, share, SP, H, W)
    elif which == _AUTOCONTRAST:
        red = _autocontrast(red, inside)
        if C == 3:
            green, blue = _autocontrast(green, inside), _autocontrast(blue, inside)
    elif which == _EQUALIZE:
        red = _equalize(red, inside, P)
        if C == 3:
            green, blue = _equalize(green, inside, P), _equalize(blue, inside, P)

    to = out + b * OB + p * OP
    if LAST:
        top, left = tl.load(erase + b).to(tl.int32), tl.load(erase + B + b).to(tl.int32)
        tall, wide = tl.load(erase + 2 * B + b).to(tl.int32), tl.load(erase + 3 * B + b).to(tl.int32)
        y, x = p // W, p % W
        erased = (y >= top) & (y < top + tall) & (x >= left) & (x < left + wide)
        value = tl.where(erased, fill, _normalised(red, scale, shift))
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)
        if C == 3:
            value = tl.where(erased, fill, _normalised(green, scale + 1, shift + 1))
            tl.store(to + OC, value.to(out.dtype.element_ty), mask=inside)
            value = tl.where(erased, fill, _normalised(blue, scale + 2, shift + 2))
            tl.store(to + 2 * OC, value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(to, red.to(tl.uint8), mask=inside)
        if C == 3:
            tl.store(to + OC, green.to(tl.uint8), mask=inside)
            tl.store(to + 2 * OC, blue.to(tl.uint8), mask=inside)


def _strides(t: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of images, channels and pixels; None if rows do not follow each other."""
    image, channel, row, pixel = t.stride()
    return (image, channel, pixel) if row == t.shape[3] * pixel else None


def supports(images_NCHW: Tensor) -> bool:
    """Return whether a program can hold such an image; both memory formats will do."""
    C, H, W = images_NCHW.shape[1:]
    return C in (1, 3) and H * W <= _PIXELS and _strides(images_NCHW) is not None


def chunk(images_NCHW: Tensor) -> int:
    """Return how many images to augment at a time, which bounds the memory between two slots and for the draws."""
    return max(1, min(2**16, _BYTES // images_NCHW[0].numel()))


def augment_rows(
    out_BCHW: Tensor,
    images_NCHW: Tensor,
    rows_B: Tensor,
    draws: Any,
    tables: Sequence[Tensor],
    scale_and_shift: tuple[Tensor, Tensor],
    *,
    padding: int,
    fill: float,
) -> None:
    """Write the augmented images at ``rows_B`` into ``out_BCHW``.

    Args:
        out_BCHW: what :func:`~protoseam.lab.pipeline.augment.augment` would return.
        images_NCHW: all images, uint8.
        rows_B: which of them.
        draws: what was drawn for them, :class:`~protoseam.lab.pipeline.augment.Draws`.
        tables: of RandAugment: source maps, levels, shares.
        scale_and_shift: of the normalisation.
        padding: of the crop.
        fill: value of erased pixels.
    """
    B, C, H, W = out_BCHW.shape
    rows_B = rows_B.contiguous()
    maps, levels, shares = tables
    op_SB, negative_SB = draws.op_SB, draws.negative_SB
    if len(op_SB) == 0:  # one slot all the same, for the identity
        op_SB = torch.zeros(1, B, dtype=torch.int64, device=out_BCHW.device)
        negative_SB = op_SB != 0
    crop_2B, erase_4B = draws.crop_2B.contiguous(), draws.erase_4B.contiguous()
    block = triton.next_power_of_2(H * W)
    source, last = images_NCHW, len(op_SB) - 1
    for slot in range(last + 1):
        target = out_BCHW
        if slot < last:
            target = torch.empty(B, H, W, C, dtype=torch.uint8, device=out_BCHW.device).permute(0, 3, 1, 2)
        (SB, SC, SP), (OB, OC, OP) = _strides(source), _strides(target)
        with torch.cuda.device_of(out_BCHW):  # Triton launches on the current device, torch on the tensor's
            _slot[(B,)](
                source, rows_B, target, op_SB[slot], negative_SB[slot], crop_2B, draws.flip_B, erase_4B,
                maps, levels, shares, *scale_and_shift, fill, B, SB, OB,
                PADDING=padding, SC=SC, SP=SP, OC=OC, OP=OP, C=C, H=H, W=W, MAPS=maps.shape[1],
                FIRST=slot == 0, LAST=slot == last, BLOCK=block, num_warps=max(1, min(16, block // 256)),
                enable_fp_fusion=False,
            )  # fmt: skip
        source = target
