"""The paper's training augmentation (§tech_details), per image, for a whole batch at once on its device.

Crop with zero padding → horizontal flip → RandAugment → normalise → random erasing. Every random number is a
pure function of (seed, epoch, dataset index, draw number), so an image is augmented alike in whatever batch,
on whatever device and after whatever interruption it comes up. Nothing here synchronises with the host or has
a shape that depends on the data: `torch.compile(augment, fullgraph=True)` works; give it `seed` and `epoch` as
0-dim tensors, since Python integers are compiled in. For small images on CUDA there are kernels, faster still and
with the same bits: :mod:`~protoseam.lab.kernels.augment`.
"""

# B images, C channels (1 or 3), H × W pixels, S slots = RandAugment operations per image, A erasing attempts

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protoseam.errors import ArgumentError
from protoseam.lab.pipeline.counter_rng import bernoulli, random_words, uniform, uniform_integer
from protoseam.lab.pipeline.randaugment import OPS, RandAugment, check_images, photometric, table, warp

PerChannel = Sequence[float] | Tensor
Scalar = int | Tensor  # a 0-dim tensor in compiled code

# Outside a compiled graph, intermediate results are int64 and float64 tensors of this many elements at most
# (8 bytes each, about six alive at a time): as few kernels as that memory allows on an accelerator, the cache's
# size on a CPU. A compiled graph fuses them away and takes the batch whole.
CHUNK_ELEMENTS = 2**24
CHUNK_ELEMENTS_CPU = 2**18

# Draw numbers. Fixed places, so that switching one part off leaves the others' draws as they were.
_CROP_ROW, _CROP_COLUMN, _FLIP, _ERASE, _ERASE_ROW, _ERASE_COLUMN = range(6)
_ERASE_SHAPE = 8  # two per attempt
_ATTEMPTS = 10  # torchvision's RandomErasing gives up after ten
_SLOT = 32  # two per slot: operation, sign


@dataclass(frozen=True)
class Erase:
    """Random erasing (Zhong et al. 2017) with torchvision's law: a rectangle set to `value` after normalising."""

    probability: float = 0.5  # paper, §tech_details
    area: tuple[float, float] = (0.02, 0.33)  # share of the image; paper, §tech_details
    aspect: tuple[float, float] = (0.3, 3.3)  # height / width, uniform in its logarithm; torchvision default
    value: float = 0.0  # torchvision default

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ArgumentError(f"Erase: probability={self.probability} is outside [0, 1]")
        if not 0.0 <= self.area[0] <= self.area[1] <= 1.0:
            raise ArgumentError(f"Erase: area={self.area} is not an increasing pair of shares in [0, 1]")
        if not 0.0 < self.aspect[0] <= self.aspect[1]:
            raise ArgumentError(f"Erase: aspect={self.aspect} is not an increasing pair of positive ratios")


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of training images; the defaults are the paper's pipeline."""

    crop_padding: int = 4  # paper, §tech_details
    flip: bool = True  # paper, §tech_details; probability 1/2
    randaugment: RandAugment | None = field(default_factory=RandAugment)  # paper: "default policy"
    erase: Erase | None = field(default_factory=Erase)

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise ArgumentError(
                f"Augmentation: crop_padding={self.crop_padding} is negative; use 0 for no crop"
            )

    @classmethod
    def none(cls) -> Augmentation:
        """Normalisation only."""
        return cls(crop_padding=0, flip=False, randaugment=None, erase=None)


class Draws(NamedTuple):
    """Everything random about a batch; integers are int64. Where nothing is erased, its height is 0."""

    crop_2B: Tensor  # row and column of the crop in the padded image, 0 … 2·crop_padding
    flip_B: Tensor  # bool
    op_SB: Tensor  # positions in `OPS`
    negative_SB: Tensor  # bool: the magnitude's sign
    erase_4B: Tensor  # top, left, height, width


def draw_parameters(
    indices_B: Tensor, *, policy: Augmentation, seed: Scalar, epoch: Scalar, height: int, width: int
) -> Draws:
    """Return the random choices for the images at these dataset positions in this epoch."""
    slots = policy.randaugment.num_ops if policy.randaugment is not None else 0
    words_DB = random_words(indices_B, seed=seed, epoch=epoch, count=_SLOT + 2 * slots)
    crop_2B = uniform_integer(words_DB[_CROP_ROW : _CROP_COLUMN + 1], 2 * policy.crop_padding + 1)
    flip_B = bernoulli(words_DB[_FLIP], 0.5 if policy.flip else 0.0)
    words_S2B = words_DB[_SLOT:].unflatten(0, (slots, 2))
    op_SB = uniform_integer(words_S2B[:, 0], len(OPS))
    negative_SB = bernoulli(words_S2B[:, 1], 0.5)
    erase_4B = _draw_erasure(words_DB, policy.erase or Erase(probability=0.0), height, width)
    return Draws(crop_2B, flip_B, op_SB, negative_SB, erase_4B)


def _draw_erasure(words_DB: Tensor, erase: Erase, height: int, width: int) -> Tensor:
    """torchvision's law: up to ten (area, aspect) pairs, the first whose rectangle fits strictly inside.

    float64, where devices agree on exp and sqrt to far less than the rounding to whole pixels can see.
    """
    shape_A2B = uniform(words_DB[_ERASE_SHAPE : _ERASE_SHAPE + 2 * _ATTEMPTS]).unflatten(0, (_ATTEMPTS, 2))
    area_AB = height * width * (erase.area[0] + (erase.area[1] - erase.area[0]) * shape_A2B[:, 0])
    log_low, log_high = math.log(erase.aspect[0]), math.log(erase.aspect[1])
    aspect_AB = torch.exp(log_low + (log_high - log_low) * shape_A2B[:, 1])
    height_AB = torch.sqrt(area_AB * aspect_AB).round().to(torch.int64)
    width_AB = torch.sqrt(area_AB / aspect_AB).round().to(torch.int64)
    fits_AB = (height_AB < height) & (width_AB < width)
    first_1B = fits_AB.to(torch.int32).argmax(0, keepdim=True)  # the first of several
    erased_B = fits_AB.any(0) & bernoulli(words_DB[_ERASE], erase.probability)
    height_B = torch.where(erased_B, height_AB.gather(0, first_1B)[0], 0)
    width_B = torch.where(erased_B, width_AB.gather(0, first_1B)[0], 0)
    top_B = uniform_integer(words_DB[_ERASE_ROW], height - height_B + 1)
    left_B = uniform_integer(words_DB[_ERASE_COLUMN], width - width_B + 1)
    return torch.stack([top_B, left_B, height_B, width_B])


def _channel_vector(values: PerChannel, channels: int, device: torch.device, name: str) -> Tensor:
    """(C, 1, 1) float64, filled on the device: copying a list there would make the host wait."""
    if len(values) != channels:
        raise ArgumentError(
            f"normalise: {name} has {len(values)} values for {channels} channels; give one each"
        )
    if isinstance(values, Tensor):
        return values.to(device, torch.float64).view(-1, 1, 1)
    filled = [torch.full((1, 1), float(value), dtype=torch.float64, device=device) for value in values]
    return torch.stack(filled)


def normalise(
    images_BCHW: Tensor, mean: PerChannel, std: PerChannel, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(levels/255 − mean)/std per channel, computed in float32; evaluation images get nothing else."""
    check_images(images_BCHW, "normalise")
    scale_C11, shift_C11 = scale_and_shift(mean, std, images_BCHW.shape[1], images_BCHW.device)
    return (images_BCHW.to(torch.float32) * scale_C11 - shift_C11).to(dtype)


def scale_and_shift(
    mean: PerChannel, std: PerChannel, channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """a and b of a·level − b = (level/255 − μ)/σ, (C, 1, 1) float32: one multiply-add per pixel."""
    mean_C11 = _channel_vector(mean, channels, device, "mean")
    std_C11 = _channel_vector(std, channels, device, "std")
    if not isinstance(std, Tensor) and min(std) <= 0.0:
        raise ArgumentError(
            f"normalise: std={tuple(std)} is not positive; give each channel's on the scale of [0, 1]"
        )
    return (1.0 / (255.0 * std_C11)).to(torch.float32), (mean_C11 / std_C11).to(torch.float32)


def _erase(values_BCHW: Tensor, erase_4B: Tensor, value: float) -> Tensor:
    height, width = values_BCHW.shape[2:]
    top, left, tall, wide = erase_4B.view(4, -1, 1, 1, 1)
    y_H1 = torch.arange(height, device=values_BCHW.device).unsqueeze(1)
    x_W = torch.arange(width, device=values_BCHW.device)
    erased_B1HW = (y_H1 >= top) & (y_H1 < top + tall) & (x_W >= left) & (x_W < left + wide)
    return torch.where(erased_B1HW, value, values_BCHW)


def _augment_levels(images_BCHW: Tensor, draws: Draws, policy: Augmentation) -> Tensor:
    """uint8 to uint8: crop, flip and RandAugment."""
    choice = policy.randaugment or RandAugment(num_ops=0)
    crop: dict[str, Tensor] = {}
    if policy.crop_padding > 0 or policy.flip:
        crop = {"offset_2B": draws.crop_2B - policy.crop_padding, "flip_B": draws.flip_B}
    if crop and choice.num_ops == 0:
        return warp(images_BCHW, policy=choice, **crop)
    for slot in range(choice.num_ops):
        op_B, negative_B = draws.op_SB[slot], draws.negative_SB[slot]
        images_BCHW = warp(images_BCHW, op_B, negative_B, policy=choice, **crop)
        images_BCHW = photometric(images_BCHW, op_B, negative_B, policy=choice)
        crop = {}  # once
    return images_BCHW


def augment(
    images_BCHW: Tensor,
    indices_B: Tensor,
    *,
    policy: Augmentation,
    seed: Scalar,
    epoch: Scalar,
    mean: PerChannel,
    std: PerChannel,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """uint8 images at dataset positions `indices_B` → augmented, normalised (B, C, H, W) in `dtype`.

    The result is channels_last where the images are. `mean` and `std` are per channel, for levels in [0, 1].
    """
    check_images(images_BCHW, "augment")
    B, C, H, W = images_BCHW.shape
    if indices_B.shape != (B,):
        raise ArgumentError(
            f"augment: {B} images but indices of shape {tuple(indices_B.shape)}; give one index each"
        )
    channels_last = (
        images_BCHW.is_contiguous(memory_format=torch.channels_last) and not images_BCHW.is_contiguous()
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    draws = draw_parameters(indices_B, policy=policy, seed=seed, epoch=epoch, height=H, width=W)

    def whole(images: Tensor, draws: Draws) -> Tensor:
        values = normalise(_augment_levels(images, draws, policy), mean, std, dtype)
        if policy.erase is not None:
            values = _erase(values, draws.erase_4B, policy.erase.value)
        return values.contiguous(memory_format=layout)

    limit = CHUNK_ELEMENTS_CPU if images_BCHW.device.type == "cpu" else CHUNK_ELEMENTS
    step = max(1, limit // (C * H * W))
    if torch.compiler.is_compiling() or step >= B:
        return whole(images_BCHW, draws)
    result_BCHW = torch.empty(B, C, H, W, dtype=dtype, device=images_BCHW.device, memory_format=layout)
    for start in range(0, B, step):
        chunk = slice(start, start + step)
        result_BCHW[chunk] = whole(images_BCHW[chunk], Draws(*(drawn[..., chunk] for drawn in draws)))
    return result_BCHW


def augment_with(
    kernels: Any,
    out_BCHW: Tensor,
    images_NCHW: Tensor,
    rows_B: Tensor,
    *,
    policy: Augmentation,
    seed: Scalar,
    epoch: Scalar,
    mean: PerChannel,
    std: PerChannel,
) -> None:
    """Write ``augment(images[rows], rows, …)`` into ``out``, by :mod:`protoseam.lab.kernels.augment`."""
    check_images(images_NCHW, "augment_with")
    C, H, W = out_BCHW.shape[1:]
    choice = policy.randaugment or RandAugment(num_ops=0)
    kernels.augment_rows(
        out_BCHW,
        images_NCHW,
        rows_B,
        draw_parameters(rows_B, policy=policy, seed=seed, epoch=epoch, height=H, width=W),
        [table(which, choice, images_NCHW) for which in range(3)],
        scale_and_shift(mean, std, C, out_BCHW.device),
        padding=policy.crop_padding,
        fill=0.0 if policy.erase is None else policy.erase.value,
    )
