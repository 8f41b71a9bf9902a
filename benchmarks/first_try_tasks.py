"""The tasks and networks of the first-try panel: small, made or shipped with scikit-learn, seconds on a CPU.

Data in: a seed; data out: ``Task(x_train, y_train, x_test, y_test, classes)`` of float inputs and int64 labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn


class Task(NamedTuple):
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int


def _split(x: np.ndarray, y: np.ndarray, train: int, seed: int, *, standardise: bool) -> Task:
    order = np.random.default_rng(seed).permutation(len(y))
    first, rest = order[:train], order[train:]
    if standardise:
        mean, std = x[first].mean(0), x[first].std(0)
        x = (x - mean) / np.where(std > 0, std, 1)
    data = torch.tensor(x, dtype=torch.float32)
    labels = torch.tensor(y, dtype=torch.int64)
    return Task(data[first], labels[first], data[rest], labels[rest], int(y.max()) + 1)


def digits(seed: int) -> Task:
    """Handwritten digits as images, 8×8, values in 0…1."""
    found = datasets.load_digits()
    return _split(found.images[:, None] / 16, found.target, 1200, seed, standardise=False)


def digits32(seed: int) -> Task:
    """The same images, 32×32, for networks that shrink them five times."""
    task = digits(seed)
    x_train, x_test = (nn.functional.interpolate(x, scale_factor=4.0) for x in (task.x_train, task.x_test))
    return task._replace(x_train=x_train, x_test=x_test)


def digits_flat(seed: int) -> Task:
    """The digits as a table of 64 standardised columns."""
    found = datasets.load_digits()
    return _split(found.data, found.target, 1200, seed, standardise=True)


def wine(seed: int) -> Task:
    found = datasets.load_wine()
    return _split(found.data, found.target, 120, seed, standardise=True)


def cancer(seed: int) -> Task:
    found = datasets.load_breast_cancer()
    return _split(found.data, found.target, 380, seed, standardise=True)


def clusters(seed: int) -> Task:
    """Ten classes of three clusters each in 20 dimensions: a class is several things at once."""
    draw = np.random.default_rng(1)
    centres = draw.normal(size=(10, 3, 20)) * 1.5
    y = draw.integers(10, size=4000)
    x = centres[y, draw.integers(3, size=4000)] + draw.normal(size=(4000, 20))
    return _split(x, y, 2000, seed, standardise=True)


def imbalanced(seed: int) -> Task:
    """Fifteen classes of 400 down to 20 training samples, and as unequal in the test."""
    draw = np.random.default_rng(2)
    sizes = np.geomspace(800, 40, 15).astype(int)
    centres = draw.normal(size=(15, 30)) * 0.9
    y = np.repeat(np.arange(15), sizes)
    x = centres[y] + draw.normal(size=(len(y), 30))
    return _split(x, y, len(y) // 2, seed, standardise=True)


def overlapping(seed: int) -> Task:
    """A hundred overlapping Gaussian classes behind a fixed tanh layer, 60 training samples per class."""
    draw = np.random.default_rng(3)
    centres = draw.normal(size=(100, 24))
    mix = draw.normal(size=(24, 64)) / 24**0.5
    y = np.repeat(np.arange(100), 120)
    x = np.tanh((centres[y] + 1.5 * draw.normal(size=(len(y), 24))) @ mix)
    return _split(x, y, 6000, seed, standardise=True)


def fine_tuning(seed: int) -> Task:
    """Digits 5 to 9, 300 training images: for a network trained on digits 0 to 4."""
    found = datasets.load_digits()
    keep = found.target >= 5
    return _split(found.images[keep][:, None] / 16, found.target[keep] - 5, 300, seed, standardise=False)


TASKS: dict[str, Callable[[int], Task]] = {
    f.__name__: f
    for f in (digits, digits32, digits_flat, wine, cancer, clusters, imbalanced, overlapping, fine_tuning)
}


def cnn_bn(task: Task) -> nn.Module:
    """Conv-BatchNorm-ReLU twice, dropout, Linear."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, task.classes),
    )  # fmt: skip


def cnn(task: Task) -> nn.Module:
    """The same without BatchNorm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, task.classes),
    )  # fmt: skip


def mlp(task: Task) -> nn.Module:
    wide = task.x_train.shape[1]
    return nn.Sequential(
        nn.Linear(wide, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, task.classes)
    )


def mlp_bn(task: Task) -> nn.Module:
    wide = task.x_train.shape[1]
    return nn.Sequential(
        nn.Linear(wide, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, task.classes),
    )  # fmt: skip


class Vit(nn.Module):
    """A tiny vision transformer: 2×2 patches, 48 wide, two layers, the mean of its tokens."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 48, 2, stride=2)
        self.place = nn.Parameter(torch.randn(16, 48) * 0.02)
        layer = nn.TransformerEncoderLayer(
            48, 4, 96, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(48)
        self.fc = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT + self.place
        logits: Tensor = self.fc(self.norm(self.layers(tokens)).mean(1))
        return logits


def vit(task: Task) -> nn.Module:
    return Vit(task.classes)


def timm_resnet(task: Task) -> nn.Module:
    """timm's smallest ResNet, for 32×32 images."""
    import timm

    net: nn.Module = timm.create_model("test_resnet", in_chans=1, num_classes=task.classes)
    return net


NETWORKS: dict[str, Callable[[Task], nn.Module]] = {
    f.__name__: f for f in (cnn_bn, cnn, mlp, mlp_bn, vit, timm_resnet)
}


def pretrained(network: str, task: Task, seed: int) -> nn.Module:
    """A network trained on digits 0 to 4 by cross-entropy, with a new classifier for ``task``."""
    found = datasets.load_digits()
    keep = found.target < 5
    x = torch.tensor(found.images[keep][:, None] / 16, dtype=torch.float32)
    y = torch.tensor(found.target[keep], dtype=torch.int64)
    model = NETWORKS[network](Task(x, y, x, y, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        for rows in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    assert isinstance(model, nn.Sequential)
    last = model[-1]
    assert isinstance(last, nn.Linear)
    model[-1] = nn.Linear(last.in_features, task.classes)
    return model
