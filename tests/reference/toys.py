"""Small networks, data and loops that the tests of the seam share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protoseam as ps

FEATURES, HIDDEN, CLASSES, DIM = 6, 16, 4, 3
Batch = tuple[Tensor, Tensor]


def network(classes: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes))


class Noisy(nn.Module):
    """With batch statistics and dropout, so that buffers and the random state matter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Dropout(0.2)
        )
        self.fc = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def batches(n: int = 64, size: int = 16, seed: int = 0) -> list[Batch]:
    """Four separated blobs, every class equally often, in a fixed order that can be iterated again."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    x = 2 * F.one_hot(y, FEATURES) + 0.5 * torch.randn(n, FEATURES, generator=g)
    order = torch.randperm(n, generator=g)
    return list(zip(x[order].split(size), y[order].split(size), strict=True))


class Own(nn.Module):
    """A user's model: containers, functions between layers, a classifier without a bias."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.head = nn.ModuleDict(
            {"norm": nn.LayerNorm(HIDDEN), "out": nn.Linear(HIDDEN, classes, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head["out"](self.head["norm"](x))


def lifted(model: nn.Module | None = None, **options: Any) -> ps.Lifted:
    usual: dict[str, Any] = {"dim": DIM, "init": "random", "schedule": ps.SineAnneal(4, 8), "draws": 1}
    options = {**usual, "covariance": ps.ExactCovariance(), **options}
    return ps.lift(network() if model is None else model, num_classes=CLASSES, **options)


def sgd(net: ps.Lifted, lr: float = 0.05, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.param_groups(lr=lr, weight_decay=1e-3), momentum=0.9, nesterov=True, **options)


def step(net: ps.Lifted, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> ps.Terms:
    terms = net.objective(x, y)
    optimizer.zero_grad()
    terms.total.backward()
    optimizer.step()
    return terms


def train(
    net: ps.Lifted,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    epochs: Iterable[int],
    total: int,
) -> None:
    """The README's loop, with learning rates that decay tenfold halfway, the seam's twice that of N1."""
    for epoch in epochs:
        lr = 0.05 if epoch < total / 2 else 0.004
        for group in optimizer.param_groups:
            group["lr"] = 2 * lr if group.get("name") in ("n2", "prototypes") else lr
        net.set_progress(epoch, total, lr=lr)
        for x, y in data:
            step(net, optimizer, x, y)
        net.refresh(data)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
