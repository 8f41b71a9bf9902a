"""Small networks for digits and tables: quick on a CPU, and enough for the MNIST figure."""

# B batch, C channels, H height, W width, F features

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from protoseam.errors import ArgumentError


class ConvNet(nn.Module):
    """Two 3×3 convolutions, each with ReLU and 2×2 max pooling, then `fc`; for 28×28 (MNIST) or 8×8 (digits) images."""

    def __init__(
        self, num_classes: int, in_channels: int = 1, image_size: int = 28, widths: tuple[int, int] = (32, 64)
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise ArgumentError(f"image_size={image_size} is too small to be halved twice; give at least 4")
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(widths[0], widths[1], 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(widths[1] * (image_size // 4) ** 2, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.fc(self.features(x_BCHW))


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened input; `fc` is the last."""

    def __init__(self, num_features: int, num_classes: int, hidden: Sequence[int] = (128, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = num_features
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x_BF: Tensor) -> Tensor:
        return self.fc(self.features(x_BF))


convnet, mlp = ConvNet, MLP  # the names that `build` knows
