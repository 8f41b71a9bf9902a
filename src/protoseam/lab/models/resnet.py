"""Residual networks for small images, as the paper's experiments use them."""

# B batch, C channels, H height, W width

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.errors import ArgumentError


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016, figure 2).

    The shortcut is the identity where input and output agree in shape, else a 1×1 convolution.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        h_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        return F.relu(self.bn2(self.conv2(h_BCHW)) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """3×3 stem, stages of basic blocks that halve the image from the second on, mean pool, `fc`.

    Parameters
    ----------
    num_classes: rows of the classifier `fc`, whose output is the network's.
    widths: channels of each stage; the stem has the first stage's.
    blocks: basic blocks of each stage.
    in_channels: channels of the images.
    stem_stride: 2 halves the image before the first stage.
    """

    def __init__(
        self,
        num_classes: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        in_channels: int = 3,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        if not widths or len(widths) != len(blocks):
            raise ArgumentError(
                f"ResNet got {len(widths)} widths and {len(blocks)} block counts: give one each a stage"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, stem_stride, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
        )
        stages, channels = nn.Sequential(), widths[0]
        for index, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            first = BasicBlock(channels, width, 1 if index == 0 else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width) for _ in range(1, count))))
            channels = width
        self.stages = stages
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al. 2015: the variance that ReLU halves, counted on the way back.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    # A faster way to compute `features`, set by `protoseam.lab.kernels.accelerate`.
    fused: Callable[[Tensor], Tensor] | None = None

    def features(self, x_BCHW: Tensor) -> Tensor:
        """What the classifier reads: (B, C)."""
        if self.fused is not None:
            return self.fused(x_BCHW)
        h_BCHW = self.stages(self.stem(x_BCHW))
        return torch.mean(h_BCHW, dim=(2, 3))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.fc(self.features(x_BCHW))


def resnet8(num_classes: int, in_channels: int = 3, stem_stride: int = 1) -> ResNet:
    """The paper's ResNet-8: three stages of one block, 4.94 M parameters for 100 classes.

    The paper names the network only; widths 128-256-512 are those that reach its CIFAR-100 baseline.
    """
    return ResNet(num_classes, (128, 256, 512), (1, 1, 1), in_channels, stem_stride)


def resnet18(num_classes: int, in_channels: int = 3) -> ResNet:
    """ResNet-18 with the 3×3 stem customary for 32×32 images, 11.2 M parameters."""
    return ResNet(num_classes, widths=(64, 128, 256, 512), blocks=(2, 2, 2, 2), in_channels=in_channels)
