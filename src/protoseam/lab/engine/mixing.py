"""Mixup and CutMix on the device: pairs of images of a batch become one, and their labels become shares.

mixup (Zhang et al. 2018) blends two images; CutMix (Yun et al. 2019) pastes a rectangle of one into the other. As in
torchvision and timm, a batch has one share λ ~ Beta(α, α), and an image's partner is its neighbour in the batch, which
is random because the batch is. What is random is drawn on the host, an epoch at a time, as a function of (seed, epoch):
a resumed run draws the same, and a step only reads its row.

Legend: B batch, C classes, S steps per epoch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protoseam.lab.engine.config import ConfigError
from protoseam.lab.pipeline.resident import Resident, epoch_seed

_PURPOSE = 2**21  # for epoch_seed: above those of ranks, dropout and audits
# Columns of a row: share of the labels, share of the pixels, and the rectangle's top, bottom, left, right.
_COLUMNS = 6


def draw_shares(
    rng: np.random.Generator, steps: int, *, mixup: float, cutmix: float, height: int, width: int
) -> NDArray[np.float32]:
    """Return how each of ``steps`` batches is mixed, ``(S, 6)``: λ of the labels, λ of the pixels, and a rectangle.

    With both α above 0 a batch takes mixup or CutMix with probability ½ (timm's default). A batch of mixup has an
    empty rectangle; one of CutMix keeps the pixels outside its rectangle whole, and its λ is the area that is left.
    """
    rows = np.zeros((steps, _COLUMNS), dtype=np.float32)
    for row in rows:
        cuts = cutmix > 0 and (not mixup > 0 or rng.random() < 0.5)
        share = rng.beta(cutmix, cutmix) if cuts else rng.beta(mixup, mixup)
        row[:2] = share
        if cuts:
            # torchvision's law: the centre anywhere, the sides √(1−λ) of the image's, cut off at its border
            y, x, half = int(rng.integers(height)), int(rng.integers(width)), 0.5 * math.sqrt(1 - share)
            tall, wide = int(half * height), int(half * width)
            top, bottom = max(0, y - tall), min(height, y + tall)
            left, right = max(0, x - wide), min(width, x + wide)
            row[:] = 1 - (bottom - top) * (right - left) / (height * width), 1, top, bottom, left, right
    return rows


def mix_images(x: Tensor, row: Tensor) -> Tensor:
    """Return each image mixed with the one before it in the batch by the shares in ``row`` (6,), in the same layout."""
    before = torch.cat([x[-1:], x[:-1]])
    own = row[1]
    if x.ndim == 4:
        y_H1 = torch.arange(x.shape[2], device=x.device)[:, None]
        x_W = torch.arange(x.shape[3], device=x.device)
        inside = (y_H1 >= row[2]) & (y_H1 < row[3]) & (x_W >= row[4]) & (x_W < row[5])
        own = torch.where(inside, 0.0, own)
    own = own.to(x.dtype)
    mixed = x * own + before * (1 - own)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return mixed.contiguous(memory_format=torch.channels_last)
    return mixed


def mix_labels(y_B: Tensor, row: Tensor, num_classes: int) -> Tensor:
    """Return the shares of the classes in each mixed image, ``(B, C)`` float32."""
    hot_BC = (y_B[:, None] == torch.arange(num_classes, device=y_B.device)).float()
    return row[0] * hot_BC + (1 - row[0]) * torch.cat([hot_BC[-1:], hot_BC[:-1]])


class Mixing:
    """The shares of an epoch's batches, on the device; called with a batch and the step's number."""

    def __init__(self, data: Resident, *, mixup: float, cutmix: float) -> None:
        if data.flat and cutmix > 0:
            raise ConfigError(
                "cutmix pastes rectangles of images, and this data has rows of features: use mixup"
            )
        self.mixup, self.cutmix = mixup, cutmix
        self.size = (1, 1) if data.flat else (data.sample_shape[1], data.sample_shape[2])
        self.steps, self.num_classes = data.steps, data.num_classes
        self.rows = torch.zeros(data.steps, _COLUMNS, device=data.device)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        rng = np.random.default_rng(epoch_seed(seed, epoch, _PURPOSE))
        height, width = self.size
        drawn = draw_shares(rng, self.steps, mixup=self.mixup, cutmix=self.cutmix, height=height, width=width)
        self.rows.copy_(torch.from_numpy(drawn))

    def __call__(self, x: Tensor, y: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        row = self.rows.index_select(0, counter % self.steps)[0]
        return mix_images(x, row), mix_labels(y, row, self.num_classes)
