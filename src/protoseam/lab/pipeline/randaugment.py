"""RandAugment, one operation and one sign *per image*, for a whole batch at once on its device.

The policy and every operation are torchvision's (`transforms.v2.RandAugment` on uint8 tensors: 14 operations,
nearest interpolation, zero fill), reproduced to the bit. Every image goes through the same few tensor
operations, with parameters under which the ones it did not draw are the identity, so nothing depends on the
data and the whole compiles into a handful of kernels:

* the five geometric operations are one gather through a tabulated source map, one map per (operation, sign);
* Brightness, Contrast, Posterize, Solarize, AutoContrast and Equalize are one 256-entry table per channel;
* Color and Sharpness are one blend.

Reference: Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced search
space", 2019.
"""

# B images, C channels (1 or 3), H × W pixels, P = H·W, V = 256 levels, R rows of a table kept for the policy

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from protoseam.errors import ArgumentError

# torchvision's operations in its order, so that a drawn number means the same operation
OPS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
(IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOR, CONTRAST) = range(9)
(SHARPNESS, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE) = range(9, 14)


@dataclass(frozen=True)
class RandAugment:
    """The policy's numbers: how many operations an image gets, and how strong they are."""

    num_ops: int = 2  # torchvision default; the paper uses "RandAugment (default policy)"
    magnitude: int = 9  # torchvision default, a bin number
    bins: int = 31  # torchvision default

    def __post_init__(self) -> None:
        if self.num_ops < 0:
            raise ArgumentError(f"RandAugment: num_ops={self.num_ops} is negative; use 0 for no operation")
        if self.bins < 2 or not 0 <= self.magnitude < self.bins:
            raise ArgumentError(
                f"RandAugment: magnitude={self.magnitude} is no bin of bins={self.bins}; "
                f"take bins >= 2 and 0 <= magnitude < bins"
            )

    def strength(self, op: int, height: int, width: int) -> float:
        """The magnitude of `op` before its sign, rounded to float32 as torchvision's table is."""
        ends = {
            **dict.fromkeys((SHEAR_X, SHEAR_Y), (0.0, 0.3)),
            TRANSLATE_X: (0.0, 150.0 / 331.0 * width),  # 150 of 331 pixels: AutoAugment's ImageNet size
            TRANSLATE_Y: (0.0, 150.0 / 331.0 * height),
            ROTATE: (0.0, 30.0),
            **dict.fromkeys((BRIGHTNESS, COLOR, CONTRAST, SHARPNESS), (0.0, 0.9)),
            SOLARIZE: (1.0, 0.0),
        }
        if op == POSTERIZE:
            return float(round(8 - self.magnitude / ((self.bins - 1) / 4)))  # bits kept: 8 … 4
        if op not in ends:
            return 0.0
        return float(torch.linspace(*ends[op], self.bins, dtype=torch.float32, device="cpu")[self.magnitude])


_GEOMETRIC = (SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE)
_OUTSIDE = -(2**20)  # the source row of a pixel that comes from outside the image, whatever is added to it
# torchvision's luma weights .2989, .587, .114, as the float32 numbers it multiplies by
GRAY = (0.29890000820159912, 0.5870000123977661, 0.11400000005960464)


def _fma(base: Tensor, other: Tensor, share: Tensor | float) -> Tensor:
    """float32 base + other·share with one rounding: what torchvision's `add_(other, alpha=share)` computes.

    Whether a compiler contracts a multiply and an add is its own choice, and truncating to a level makes the
    difference visible. The float64 product of two float32 is exact and so, at these magnitudes, is the sum.
    """
    return (base.to(torch.float64) + other.to(torch.float64) * share).to(torch.float32)


def _to_level(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


# --- Tables of the policy: small, exact, computed once on the host and kept on the device. -----------------
# A compiled graph holds them as constants; eager code finds them in the cache, so no call copies from the host.


def _inverse_matrix(op: int, magnitude: float, height: int, width: int) -> list[list[float]]:
    """Output → source pixel, about the image's centre: torchvision's inverse matrix for the signed magnitude."""
    if op == ROTATE:
        angle = math.radians(-(magnitude % 360))  # counter-clockwise, on an axis that points down
        return [[math.cos(angle), math.sin(angle), 0.0], [-math.sin(angle), math.cos(angle), 0.0]]
    if op in (TRANSLATE_X, TRANSLATE_Y):
        shift = -float(int(magnitude))  # whole pixels, towards zero
        along_x, along_y = (shift, 0.0) if op == TRANSLATE_X else (0.0, shift)
        return [[1.0, 0.0, along_x], [0.0, 1.0, along_y]]
    # Shears keep the top-left corner, (−W/2, −H/2) from the centre, so the offset is slope·H/2 or slope·W/2.
    slope = math.tan(math.radians(math.degrees(math.atan(magnitude))))
    if op == SHEAR_X:
        return [[1.0, slope, slope * (height * 0.5)], [0.0, 1.0, 0.0]]
    return [[1.0, 0.0, 0.0], [slope, 1.0, slope * (width * 0.5)]]


def _source_map(matrix: list[list[float]], height: int, width: int) -> Tensor:
    """Source (row, column) of every pixel, (2, P) int32, as float32 grid and grid_sample's rounding give it."""
    half_2 = torch.tensor([0.5 * width, 0.5 * height], dtype=torch.float32)
    theta_23 = torch.tensor(matrix, dtype=torch.float32) / half_2.unsqueeze(1)
    x_W = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, width, dtype=torch.float32)
    y_H = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, height, dtype=torch.float32)
    # (x·θ₁ + y·θ₂) + θ₃, each step rounded. torchvision has a matrix product here, which autocast and precision
    # settings reach and whose last bit depends on the BLAS library; it shows where a source is a half pixel off.
    grid = [x_W * theta_3[0] + y_H.unsqueeze(1) * theta_3[1] + theta_3[2] for theta_3 in theta_23]
    # Sampling the picture of pixel numbers (from 1; 0 is outside) leaves the last rounding to grid_sample itself.
    number_HW = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    sampled = F.grid_sample(number_HW, torch.stack(grid, dim=-1)[None], mode="nearest", align_corners=False)
    source_P = sampled.flatten().to(torch.int32) - 1
    return torch.stack([torch.where(source_P < 0, _OUTSIDE, source_P // width), source_P % width])


def _host_tables(policy: RandAugment, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    # (2, R, P) int32 source maps: the identity, then each geometric operation with its + and its − sign
    maps = [_source_map([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], height, width)]
    for op in _GEOMETRIC:
        strength = policy.strength(op, height, width)
        for signed in (strength, -strength):
            maps.append(_source_map(_inverse_matrix(op, signed, height, width), height, width))

    # (R, V) uint8 level tables: identity, Brightness +, Brightness −, Posterize, Solarize
    level_V = torch.arange(256, dtype=torch.uint8)
    value_V = level_V.to(torch.float32)
    strength = policy.strength(BRIGHTNESS, height, width)
    bright = [_to_level(value_V * ratio) for ratio in (1.0 + strength, 1.0 - strength)]
    bits = int(policy.strength(POSTERIZE, height, width))
    posterized = level_V & (256 - 2 ** (8 - bits))
    threshold = 255.0 * policy.strength(SOLARIZE, height, width)
    solarized = torch.where(value_V >= threshold, 255 - level_V, level_V)

    # (2, 2) float32 shares of a blend ratio·image + (1 − ratio)·other, ratio = 1 ± strength; Brightness, Color,
    # Contrast and Sharpness have one range of strengths. Both shares are rounded from float64.
    ratios = (1.0 + strength, 1.0 - strength)
    shares = torch.tensor([ratios, [1.0 - ratio for ratio in ratios]], dtype=torch.float32)

    levels = torch.stack([level_V, *bright, posterized, solarized])
    return torch.stack(maps, dim=1), levels, shares


@lru_cache(maxsize=64)
def _tables(magnitude: int, bins: int, height: int, width: int, device: torch.device) -> list[Tensor]:
    # Independent of the default device and the mode that the first caller happens to be in
    with torch.inference_mode(False), torch.device("cpu"):
        tables = _host_tables(RandAugment(magnitude=magnitude, bins=bins), height, width)
        return [table.to(device) for table in tables]


def _constant(which: int, magnitude: int, bins: int, height: int, width: int, device: torch.device) -> Tensor:
    return _tables(magnitude, bins, height, width, device)[which]


# What torch.compiler.assume_constant_result would set, without its import of the whole compiler: more than a second
# for everyone who never compiles.
_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def table(which: int, policy: RandAugment, images_BCHW: Tensor) -> Tensor:
    # index() makes a size that a compiled graph would keep symbolic a number: the tables depend on it.
    height, width = images_BCHW.shape[2:]
    magnitude, bins = index(policy.magnitude), index(policy.bins)
    return _constant(which, magnitude, bins, index(height), index(width), images_BCHW.device)


# --- Geometry ----------------------------------------------------------------------------------------------


def warp(
    images_BCHW: Tensor,
    op_B: Tensor | None = None,
    negative_B: Tensor | None = None,
    *,
    policy: RandAugment,
    offset_2B: Tensor | None = None,
    flip_B: Tensor | None = None,
) -> Tensor:
    """Crop and flip, then the geometric operations: one gather; any other operation moves nothing.

    Source of output pixel p: m = map[p] in the flipped crop, then the flip x → W − 1 − x, then the crop's
    offset (rows, columns) in the image. What falls outside is 0, at either step.
    """
    B, C, H, W = images_BCHW.shape
    maps_2RP = table(0, policy, images_BCHW)
    if op_B is None or negative_B is None:
        y_BP, x_BP = maps_2RP[:, :1].unbind(0)
    else:
        moves_B = (op_B >= SHEAR_X) & (op_B <= ROTATE)
        row_B = torch.where(moves_B, 2 * op_B - 1 + negative_B.to(torch.int64), 0)
        y_BP, x_BP = maps_2RP[0].index_select(0, row_B), maps_2RP[1].index_select(0, row_B)
    if flip_B is not None:
        x_BP = torch.where(flip_B.unsqueeze(1), W - 1 - x_BP, x_BP)
    if offset_2B is not None:
        offset_2B1 = offset_2B.to(torch.int32).unsqueeze(-1)
        y_BP, x_BP = y_BP + offset_2B1[0], x_BP + offset_2B1[1]
    inside_B1P = ((y_BP >= 0) & (y_BP < H) & (x_BP >= 0) & (x_BP < W)).unsqueeze(1)
    source_B1P = torch.where(inside_B1P, (y_BP * W + x_BP).unsqueeze(1), 0).to(torch.int64)
    moved_BCP = images_BCHW.flatten(2).gather(2, source_B1P.expand(B, C, H * W))
    return torch.where(inside_B1P, moved_BCP, 0).view(B, C, H, W)


# --- Photometry --------------------------------------------------------------------------------------------


def _gray(image_BCP: Tensor) -> Tensor:
    """torchvision's gray levels, (B, 1, P) float32 with whole values."""
    if image_BCP.shape[1] == 1:
        return image_BCP
    red, green, blue = image_BCP.split(1, dim=1)
    # The clamp changes nothing: it keeps graph optimisers from removing the rounding between the two sums.
    partial = _fma(red * GRAY[0], green, GRAY[1]).clamp(max=256.0)
    return _fma(partial, blue, GRAY[2]).floor()


def _level_table(
    index_BCP: Tensor,
    gray_B1P: Tensor,
    op_B11: Tensor,
    negative_B11: Tensor,
    levels_RV: Tensor,
    shares_2B11: Tensor,
) -> Tensor:
    """(B, C, V) uint8: what each level of each channel becomes under the image's pointwise operation."""
    B, C, P = index_BCP.shape
    level_V = torch.arange(256, dtype=torch.float32, device=index_BCP.device)

    # The operations that depend on the level alone
    row_B11 = torch.where(op_B11 == BRIGHTNESS, 1 + negative_B11.to(torch.int64), 0)
    row_B11 = row_B11 + 3 * (op_B11 == POSTERIZE) + 4 * (op_B11 == SOLARIZE)
    table_BCV = levels_RV.index_select(0, row_B11.flatten()).unsqueeze(1)

    # Contrast: a blend with the mean gray level of the image
    mean_B11 = (gray_B1P.sum(2, keepdim=True, dtype=torch.float64) / P).to(torch.float32)
    contrast_B1V = _to_level(_fma(level_V * shares_2B11[0], mean_B11, shares_2B11[1]))
    table_BCV = torch.where(op_B11 == CONTRAST, contrast_B1V, table_BCV)

    # AutoContrast: the channel's range stretched to 0 … 255. A float64 quotient of two float32 rounds to the
    # float32 quotient (Figueroa 1995), whichever division the device has.
    low_BC1, high_BC1 = index_BCP.amin(2, keepdim=True), index_BCP.amax(2, keepdim=True)
    flat_BC1 = low_BC1 == high_BC1
    range_BC1 = torch.where(flat_BC1, 1.0, (high_BC1 - low_BC1).to(torch.float32) * (1.0 / 255.0))
    start_BC1 = torch.where(flat_BC1, 0, low_BC1).to(torch.float32)
    stretched_BCV = ((level_V - start_BC1).to(torch.float64) / range_BC1.to(torch.float64)).to(torch.float32)
    table_BCV = torch.where(op_B11 == AUTOCONTRAST, _to_level(stretched_BCV), table_BCV)

    # Equalize, Pillow's rule: (pixels below the level + step/2) / step, step = pixels not of the top level / 255
    count_BCV = torch.zeros(B, C, 256, dtype=torch.int32, device=index_BCP.device)
    one_BCP = torch.ones((), dtype=torch.int32, device=index_BCP.device).expand(B, C, P)
    count_BCV = count_BCV.scatter_add(2, index_BCP, one_BCP)
    below_BCV = count_BCV.cumsum(2, dtype=torch.int32) - count_BCV
    step_BC1 = (P - count_BCV.gather(2, high_BC1)) // 255
    equalized_BCV = (below_BCV + step_BC1 // 2) // step_BC1.clamp(min=1)
    equalized_BCV = torch.where(step_BC1 == 0, level_V.to(torch.int32), equalized_BCV)
    return torch.where(op_B11 == EQUALIZE, _to_level(equalized_BCV), table_BCV)


def _sharpening(image_BCHW: Tensor) -> Tensor:
    """Smoothed minus plain image, 0 on the border, which torchvision leaves alone; float32 with whole values.

    The kernel is 1 around a 5, over 13. k/13 is never nearer than 1/26 to a half, so rounding is unambiguous.
    """
    height, width = image_BCHW.shape[2:]
    if height < 3 or width < 3:
        return torch.zeros_like(image_BCHW)
    rows = image_BCHW[:, :, :-2] + image_BCHW[:, :, 1:-1] + image_BCHW[:, :, 2:]
    inner = image_BCHW[:, :, 1:-1, 1:-1]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4.0 * inner
    return F.pad((total * (1.0 / 13.0)).round() - inner, (1, 1, 1, 1))


def photometric(images_BCHW: Tensor, op_B: Tensor, negative_B: Tensor, *, policy: RandAugment) -> Tensor:
    """The operations that change levels and move nothing; a geometric one leaves its image as it is."""
    C = images_BCHW.shape[1]
    levels_RV, shares_22 = table(1, policy, images_BCHW), table(2, policy, images_BCHW)
    op_B11, negative_B11 = op_B.view(-1, 1, 1), negative_B.view(-1, 1, 1)
    shares_2B11 = torch.where(
        negative_B11, shares_22[:, 1].view(2, 1, 1, 1), shares_22[:, 0].view(2, 1, 1, 1)
    )

    pixel_BCP = images_BCHW.flatten(2)
    index_BCP = pixel_BCP.to(torch.int64)
    value_BCP = pixel_BCP.to(torch.float32)
    gray_B1P = _gray(value_BCP)
    table_BCV = _level_table(index_BCP, gray_B1P, op_B11, negative_B11, levels_RV, shares_2B11)
    mapped_BCP = table_BCV.expand(-1, C, -1).gather(2, index_BCP).to(torch.float32)

    # Color:      ratio·x + (1 − ratio)·gray           (one channel: the image itself)
    # Sharpness:  x + (1 − ratio)·(smoothed − x)
    # any other:  the mapped level, by shares 1 and 0
    color_B11, sharp_B11 = (op_B11 == COLOR) & (C == 3), op_B11 == SHARPNESS
    other_BCP = torch.where(sharp_B11, _sharpening(value_BCP.view_as(images_BCHW)).flatten(2), gray_B1P)
    own_B11 = torch.where(color_B11, shares_2B11[0], 1.0)
    share_B11 = torch.where(color_B11 | sharp_B11, shares_2B11[1], 0.0)
    return _to_level(_fma(mapped_BCP * own_B11, other_BCP, share_B11)).view(images_BCHW.shape)


def check_images(images_BCHW: Tensor, caller: str) -> None:
    """Refuse anything but a (B, 1 or 3, H, W) uint8 batch."""
    if images_BCHW.ndim != 4 or images_BCHW.shape[1] not in (1, 3) or images_BCHW.dtype != torch.uint8:
        raise ArgumentError(
            f"{caller}: images are {tuple(images_BCHW.shape)} {images_BCHW.dtype}; "
            f"pass a (B, 1 or 3, H, W) uint8 tensor of levels 0 to 255"
        )
