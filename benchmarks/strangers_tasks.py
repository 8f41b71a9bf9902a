"""Tasks and networks that no default was chosen on: small, made, shipped with scikit-learn, or parts of CIFAR.

Data in: a seed; data out: ``first_try_tasks.Task``. Photographs are read from ``$PROTOSEAM_DATA/cifar10``, ``cifar100``
and ``fashion_mnist``: ``train_images.npy`` and ``test_images.npy`` (uint8, N×H×W×channels), ``train_labels.npy`` and
``test_labels.npy``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from first_try_tasks import Task, _split
from sklearn import datasets
from torch import Tensor, nn


def _photos(name: str, classes: int, train: int, seed: int) -> Task:
    """``train`` training images of the first classes, drawn by the seed, and 2,000 test images of them."""
    folder = Path(os.environ["PROTOSEAM_DATA"]) / name
    draw = np.random.default_rng(seed)
    parts = []
    for part, wanted in (("train", train), ("test", 2000)):
        y = np.load(folder / f"{part}_labels.npy")
        rows = draw.permutation(np.flatnonzero(y < classes))[:wanted]
        x = np.load(folder / f"{part}_images.npy", mmap_mode="r")[np.sort(rows)]
        images = torch.tensor(x, dtype=torch.float32).permute(0, 3, 1, 2).contiguous() / 255
        parts += [(images - 0.47) / 0.25, torch.tensor(y[np.sort(rows)], dtype=torch.int64)]
    return Task(parts[0], parts[1], parts[2], parts[3], classes)


def cifar10(seed: int) -> Task:
    """4,000 training images."""
    return _photos("cifar10", 10, 4000, seed)


def cifar100_20(seed: int) -> Task:
    """The first twenty classes of CIFAR-100, 4,000 training images."""
    return _photos("cifar100", 20, 4000, seed)


def cifar10_600(seed: int) -> Task:
    """600 training images."""
    return _photos("cifar10", 10, 600, seed)


def fashion(seed: int) -> Task:
    """Fashion-MNIST, 2,000 training images."""
    return _photos("fashion_mnist", 10, 2000, seed)


def fashion_200(seed: int) -> Task:
    """200 training images."""
    return _photos("fashion_mnist", 10, 200, seed)


def waves(seed: int) -> Task:
    """Six shapes of a noisy signal of 128 values, at random phase, frequency and height."""
    draw = np.random.default_rng(11)
    y = draw.integers(6, size=3000)
    t = np.linspace(0, 1, 128)
    x = np.empty((3000, 1, 128))
    for i, shape in enumerate(y):
        angle = 2 * np.pi * (draw.uniform(3, 8) * t * (1 + t * (shape == 3)) + draw.uniform())
        saw = (angle / (2 * np.pi)) % 1
        wave = (
            np.sin(angle),
            np.sign(np.sin(angle)),
            2 * saw - 1,
            np.sin(angle),  # a chirp: the frequency rises
            2 * np.abs(2 * saw - 1) - 1,
            np.sin(angle) * np.sin(3 * angle),
        )[shape]
        x[i, 0] = draw.uniform(0.5, 1.5) * wave + 0.5 * draw.normal(size=128)
    return _split(x, y, 1500, seed, standardise=False)


def tokens(seed: int) -> Task:
    """Eight languages of 30 words, told apart by which word follows which; 32 words a sample."""
    draw = np.random.default_rng(12)
    follow = np.exp(1.2 * draw.normal(size=(8, 30, 30)))
    bounds = np.cumsum(follow / follow.sum(-1, keepdims=True), axis=-1)
    y = draw.integers(8, size=4000)
    words = np.empty((4000, 32), dtype=np.int64)
    words[:, 0] = draw.integers(30, size=4000)
    for at in range(1, 32):
        chosen = (draw.random(4000)[:, None] > bounds[y, words[:, at - 1]]).sum(1)
        words[:, at] = np.minimum(chosen, 29)
    task = _split(words.astype(float), y, 2000, seed, standardise=False)
    return task._replace(x_train=task.x_train.long(), x_test=task.x_test.long())


def _tabular(classes: int, size: int, columns: int, informative: int, sep: float, per_class: int) -> tuple:
    return datasets.make_classification(
        size, columns, n_informative=informative, n_redundant=2, n_classes=classes, n_clusters_per_class=per_class,
        class_sep=sep, flip_y=0.0, random_state=13,
    )  # fmt: skip


def tabular3(seed: int) -> Task:
    return _split(*_tabular(3, 2000, 20, 8, 1.0, 2), 1000, seed, standardise=True)


def tabular8(seed: int) -> Task:
    return _split(*_tabular(8, 4000, 30, 15, 1.5, 2), 2000, seed, standardise=True)


def tabular30(seed: int) -> Task:
    return _split(*_tabular(30, 8000, 40, 25, 2.0, 1), 4000, seed, standardise=True)


def wrong_labels(seed: int) -> Task:
    """``tabular8`` with a tenth of the training labels replaced by chance; the test has the right ones."""
    task = tabular8(seed)
    draw = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(task.y_train), generator=draw) < 0.1
    other = torch.randint(8, task.y_train.shape, generator=draw)
    return task._replace(y_train=torch.where(wrong, other, task.y_train))


def moons(seed: int) -> Task:
    x, y = datasets.make_moons(1400, noise=0.2, random_state=14)
    return _split(x, y, 400, seed, standardise=True)


def skewed(seed: int) -> Task:
    """Four classes with 90, 6, 3 and 1 % of the samples."""
    x, y = datasets.make_classification(
        6000, 20, n_informative=10, n_classes=4, weights=[0.9, 0.06, 0.03, 0.01], class_sep=1.5, flip_y=0.0,
        random_state=15,
    )  # fmt: skip
    return _split(x, y, 3000, seed, standardise=True)


def iris(seed: int) -> Task:
    found = datasets.load_iris()
    return _split(found.data, found.target, 100, seed, standardise=True)


def forest(seed: int) -> Task:
    """Ten measures and two one-hot columns of 4 and 40 kinds; seven unequal classes by a noisy rule, without gaps."""
    draw = np.random.default_rng(16)
    measures = draw.normal(size=(10000, 10))
    area = np.eye(4)[draw.integers(4, size=10000)]
    soil = np.eye(40)[np.clip(20 + 8 * measures[:, 0] + 4 * draw.normal(size=10000), 0, 39).astype(int)]
    x = np.concatenate([measures, area, soil], 1)
    hidden = np.tanh(x @ draw.normal(size=(54, 30)) / 2)
    scores = 1.5 * hidden @ draw.normal(size=(30, 7)) + np.array([2.0, 2.5, 0, -1, -0.5, 0, 0.5])
    y = (scores + draw.gumbel(size=scores.shape)).argmax(1)
    return _split(x, y, 6000, seed, standardise=True)


def diabetes(seed: int) -> Task:
    """scikit-learn's diabetes progression in three equal parts: a measured quantity cut into classes that touch."""
    found = datasets.load_diabetes()
    y = np.digitize(found.target, np.quantile(found.target, [1 / 3, 2 / 3]))
    return _split(found.data, y, 300, seed, standardise=True)


def five_each(seed: int) -> Task:
    """Twelve Gaussian classes in 40 dimensions, five training samples each."""
    draw = np.random.default_rng(17)
    centres = draw.normal(size=(12, 40))
    y = np.tile(np.arange(12), 105)
    x = centres[y] + draw.normal(size=(len(y), 40))
    order = np.random.default_rng(seed).permutation(105)
    rows = (order[:, None] * 12 + np.arange(12)).ravel()
    first, rest = rows[:60], rows[60:]
    data, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64)
    return Task(data[first], labels[first], data[rest], labels[rest], 12)


def spirals(seed: int) -> Task:
    """Three noisy spiral arms in two dimensions."""
    draw = np.random.default_rng(18)
    y = draw.integers(3, size=2000)
    t = draw.uniform(0.2, 1, size=2000)
    angle = 2 * np.pi * (y / 3 + 1.5 * t)
    x = np.stack([t * np.cos(angle), t * np.sin(angle)], 1) + 0.03 * draw.normal(size=(2000, 2))
    return _split(x, y, 600, seed, standardise=True)


def shells(seed: int) -> Task:
    """Four classes by the distance from the centre, in ten dimensions: they touch."""
    x, y = datasets.make_gaussian_quantiles(n_samples=4000, n_features=10, n_classes=4, random_state=19)
    return _split(x, y, 2000, seed, standardise=True)


def fifty(seed: int) -> Task:
    """Fifty Gaussian classes in 16 dimensions that overlap a little, forty training samples each."""
    x, y = datasets.make_blobs(4000, 16, centers=50, cluster_std=5.0, center_box=(-10, 10), random_state=20)
    return _split(x, y, 2000, seed, standardise=True)


def motifs(seed: int) -> Task:
    """Noise of 96 values in which one of five motifs stands somewhere."""
    draw = np.random.default_rng(21)
    shapes, y = draw.normal(size=(5, 12)), draw.integers(5, size=3000)
    x = 0.7 * draw.normal(size=(3000, 1, 96))
    for i, start in enumerate(draw.integers(84, size=3000)):
        x[i, 0, start : start + 12] += shapes[y[i]]
    return _split(x, y, 1500, seed, standardise=False)


TASKS: dict[str, Callable[[int], Task]] = {
    f.__name__: f
    for f in (
        cifar10, cifar100_20, waves, tokens, tabular3, tabular8, tabular30, wrong_labels, moons, skewed, iris, forest,
        diabetes, five_each, cifar10_600, fashion, fashion_200, spirals, shells, fifty, motifs,
    )
}  # fmt: skip


class _Residual(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.GroupNorm(4, wide), nn.ReLU(), nn.Conv2d(wide, out, 3, stride, 1),
            nn.GroupNorm(4, out), nn.ReLU(), nn.Conv2d(out, out, 3, 1, 1),
        )  # fmt: skip
        self.way = nn.Conv2d(wide, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.way(x) + self.branch(x)
        return found


def resnet_gn(task: Task) -> nn.Module:
    """Three residual blocks with GroupNorm, and dropout before the classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), _Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2),
        nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(64, task.classes),
    )  # fmt: skip


def vgg(task: Task) -> nn.Module:
    """Convolutions and ReLU without any norm, two dense layers."""
    layers: list[nn.Module] = []
    for wide, out in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(wide, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, task.classes))


def lenet(task: Task) -> nn.Module:
    """Two convolutions with tanh, dropout, two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(12, 24, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(600, 84), nn.Tanh(), nn.Dropout(0.2), nn.Linear(84, task.classes),
    )  # fmt: skip


def depthwise(task: Task) -> nn.Module:
    """Depthwise separable convolutions with BatchNorm and SiLU."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.SiLU()]
    for wide, out, stride in ((24, 48, 1), (48, 96, 2), (96, 96, 1)):
        layers += [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.BatchNorm2d(wide), nn.SiLU()]
        layers += [nn.Conv2d(wide, out, 1), nn.BatchNorm2d(out), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, task.classes))


class _Mix(nn.Module):
    def __init__(self, places: int, wide: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(wide), nn.LayerNorm(wide)])
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norms[0](x).mT).mT
        found: Tensor = x + self.channels(self.norms[1](x))
        return found


class Mixer(nn.Module):
    """An MLP-Mixer of 4×4 patches, three blocks of 64."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.Sequential(*(_Mix(64, 64) for _ in range(3)), nn.LayerNorm(64))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x).flatten(2).mT).mean(1))
        return logits


def mixer(task: Task) -> nn.Module:
    return Mixer(task.classes)


def timm_resnet10t(task: Task) -> nn.Module:
    """timm's resnet10t, made for larger images."""
    import timm

    net: nn.Module = timm.create_model("resnet10t", num_classes=task.classes)
    return net


def cnn1d(task: Task) -> nn.Module:
    """Three one-dimensional convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for wide, out in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv1d(wide, out, 7, 2, 3), nn.BatchNorm1d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, task.classes))


class TwoPart(nn.Module):
    """A one-dimensional CNN whose classifier has a hidden layer of its own behind ``squeeze``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 7, 2, 3), nn.ReLU(), nn.Conv1d(16, 32, 7, 2, 3), nn.ReLU(), nn.Conv1d(32, 64, 7, 2, 3),
            nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )  # fmt: skip
        self.squeeze = nn.Linear(64, 24)
        self.top = nn.Sequential(nn.GELU(), nn.Linear(24, 64), nn.GELU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.top(self.squeeze(self.body(x)))
        return logits


def two_part(task: Task) -> nn.Module:
    return TwoPart(task.classes)


class Gru(nn.Module):
    """Word vectors, one GRU, its last state."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(self.words(x))
        logits: Tensor = self.out(last[0])
        return logits


def gru(task: Task) -> nn.Module:
    return Gru(task.classes)


class Encoder(nn.Module):
    """A small Transformer encoder with dropout, norm behind each part, and the mean of its words."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(30, 48), nn.Parameter(torch.randn(32, 48) * 0.02)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layers(self.words(x) + self.place).mean(1))
        return logits


def encoder(task: Task) -> nn.Module:
    return Encoder(task.classes)


def mlp_ln(task: Task) -> nn.Module:
    """LayerNorm and GELU, dropout."""
    wide = task.x_train.shape[1]
    return nn.Sequential(
        nn.Linear(wide, 96), nn.LayerNorm(96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.LayerNorm(96),
        nn.GELU(), nn.Linear(96, task.classes),
    )  # fmt: skip


def wide_tanh(task: Task) -> nn.Module:
    """One hidden layer of 512 tanh."""
    return nn.Sequential(nn.Linear(task.x_train.shape[1], 512), nn.Tanh(), nn.Linear(512, task.classes))


def small_mlp(task: Task) -> nn.Module:
    """Sixteen and sixteen ReLU."""
    wide = task.x_train.shape[1]
    return nn.Sequential(
        nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, task.classes)
    )


NETWORKS: dict[str, Callable[[Task], nn.Module]] = {
    f.__name__: f
    for f in (
        resnet_gn, vgg, lenet, depthwise, mixer, timm_resnet10t, cnn1d, two_part, gru, encoder, mlp_ln, wide_tanh,
        small_mlp,
    )
}  # fmt: skip
