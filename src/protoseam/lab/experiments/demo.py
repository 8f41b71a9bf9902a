"""The demo: Baseline, Unlifted and ProtoSeam on the 8×8 digits that scikit-learn ships.

``protoseam demo``: 40 epochs × 3 variants × 3 seeds and one two-dimensional seam for the picture; about 45 s
on one CPU core. Expect Baseline 98.8 %, Unlifted 98.7 %, ProtoSeam 99.5 % on the 600 test images.

The three variants are the paper's (§protocol). They share data, network, optimizer, schedule and epochs, and
differ in one line of :func:`train`: where the loss comes from.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps
from protoseam.lab.models.small import convnet

Variant = Literal["Baseline", "Unlifted", "ProtoSeam"]
VARIANTS: tuple[Variant, ...] = ("Baseline", "Unlifted", "ProtoSeam")


@dataclass(frozen=True)
class Recipe:
    """Settings of the optimizer; everything but ``lr`` and ``weight_decay`` is the same for all variants."""

    lr: float
    weight_decay: float
    momentum: float = 0.9
    batch_size: int = 64
    warmup: float = 0.1  # share of the steps


# Chosen on the validation images alone, each variant by itself: the best mean accuracy over seeds 0, 1, 2 (not the
# seeds reported) among lr {.005, .01, .02, .05, .1, .2, .5} × decay {1e-4, 2e-4, 5e-4, 1e-3, 2e-3}, ties broken by
# cross-entropy. That is the paper's grid, longer at both ends so that no winner lies on an edge of lr; and unlike
# the paper's, this Unlifted is tuned too. `python benchmarks/demo_grid.py` repeats the search.
RECIPES: dict[Variant, Recipe] = {
    "Baseline": Recipe(lr=0.2, weight_decay=5e-4),
    "Unlifted": Recipe(lr=0.1, weight_decay=1e-3),
    "ProtoSeam": Recipe(lr=0.01, weight_decay=5e-4),
}
DIM = 32  # paper, §protocol
EPOCHS = 40
# The picture's seam: two dimensions, and three times the epochs to sort ten classes in them. The floor is wide
# enough to see: after training, the training images' own clusters have all but collapsed.
PICTURE = "the picture, k=2"
PICTURE_EPOCHS = 3
PICTURE_FLOOR = 0.3


@dataclass(frozen=True)
class Data:
    """The fixed split. Images ``(N, 1, 8, 8)`` are normalised with the training images' mean and deviation."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_data() -> Data:
    """Split the 1,797 digits into 897 to train on, 300 to choose with and 600 to report, stratified by class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=600, stratify=labels, random_state=0)
    x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=300, stratify=y, random_state=0)
    mean, std = x_train.mean(), x_train.std()

    def tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor((x - mean) / std, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)

    return Data(tensors(x_train, y_train), tensors(x_val, y_val), tensors(x_test, y_test))


def build(variant: Variant, seed: int, **options: Any) -> nn.Module:
    """Build two convolutions and a Linear(256→10); with a seam, Linear(256→k) and Linear(k→10) in its place."""
    torch.manual_seed(seed)
    model = convnet(num_classes=10, in_channels=1, image_size=8)
    if variant == "Baseline":
        return model
    # the settings its rates were searched with, the paper's
    papers: dict[str, Any] = {"dim": DIM, "covariance": ps.ExactCovariance(), "draws": 1, "refit": False}
    lifted = ps.lift(model, num_classes=10, **{**papers, **options})
    # The control: the network ProtoSeam deploys, trained end to end without prototypes
    return lifted.deploy().train() if variant == "Unlifted" else lifted


def train(
    net: nn.Module,
    data: Data,
    recipe: Recipe,
    epochs: int = EPOCHS,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
) -> nn.Module:
    """Train one network in place; ``on_epoch`` gets a row of metrics after each epoch.

    A lifted network brings its own loss, and its epochs do FSInit, ρ(t) and Σ̂; the rest is the same for all.
    """
    loader = DataLoader(TensorDataset(*data.train), recipe.batch_size, shuffle=True, drop_last=True)
    lifted = net if isinstance(net, ps.Lifted) else None
    parameters = (
        lifted.param_groups(recipe.lr, recipe.weight_decay, seam_lr=recipe.lr, bounded=False)
        if lifted
        else net.parameters()
    )
    lr, decay = recipe.lr, recipe.weight_decay
    optimizer = torch.optim.SGD(parameters, lr, recipe.momentum, weight_decay=decay, nesterov=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_cosine(epochs * len(loader), recipe.warmup))
    # the training images are few enough to be one batch of the sweeps
    for epoch in lifted.epochs(loader, epochs, sweep=[data.train]) if lifted else range(epochs):
        sums: dict[str, float] = {}
        for x, y in loader:
            terms = lifted.objective(x, y)._asdict() if lifted else {"total": F.cross_entropy(net(x), y)}
            optimizer.zero_grad()
            terms["total"].backward()
            optimizer.step()
            rate.step()
            sums = {name: sums.get(name, 0.0) + float(value.detach()) for name, value in terms.items()}
        if on_epoch is not None:
            on_epoch(
                {
                    "epoch": epoch + 1,
                    "loss": {name: value / len(loader) for name, value in sums.items()},
                    "validation_accuracy": accuracy(net, *data.val) / 100,
                    "rho": float(lifted.rho) if lifted else None,
                    "lr": rate.get_last_lr()[0],
                    "seam": _distances(lifted) if lifted else {},
                }
            )
    return net


def _distances(net: ps.Lifted) -> dict[str, float]:
    """How far the prototypes are from their nearest rivals."""
    s_CK = net.prototypes.detach()
    nearest_C = torch.cdist(s_CK, s_CK).fill_diagonal_(torch.inf).amin(1)
    return {"prototype_gap_min": float(nearest_C.min()), "prototype_gap_mean": float(nearest_C.mean())}


def _warmup_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    return factor


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the deployed network's share of right answers in %, in eval mode."""
    was_training = net.training
    right = (net.eval()(x).argmax(1) == y).double().mean()
    net.train(was_training)
    return 100 * float(right)


class Watcher(Protocol):
    """Receives the progress of the runs."""

    def epoch(self, name: str, row: dict[str, Any], net: nn.Module, data: Data) -> None:
        """Run ``name`` has finished an epoch; ``row`` has its losses and the validation accuracy."""

    def end(self, name: str, test: float, seconds: float) -> None:
        """Run ``name`` has finished."""


def run_name(variant: str, seed: int) -> str:
    return f"{variant}, seed {seed}"


def run(
    seeds: Sequence[int] = (42, 43, 44),  # paper, tab:main
    epochs: int = EPOCHS,
    watcher: Watcher | None = None,
) -> tuple[dict[str, Any], ps.Lifted, Data]:
    """Train everything; returns the results as plain numbers, the two-dimensional seam of the picture, and the data."""
    started = time.perf_counter()
    data = load_data()

    def one(name: str, net: nn.Module, recipe: Recipe, epochs: int) -> dict[str, float]:
        begun = time.perf_counter()
        told = None if watcher is None else lambda row: watcher.epoch(name, row, net, data)
        train(net, data, recipe, epochs, on_epoch=told)
        test = accuracy(net, *data.test)  # looked at once, after the last step
        seconds = time.perf_counter() - begun
        if watcher is not None:
            watcher.end(name, test, seconds)
        return {"test": test, "val": accuracy(net, *data.val), "seconds": round(seconds, 3)}

    runs = [
        {"variant": v, "seed": seed, **one(run_name(v, seed), build(v, seed), RECIPES[v], epochs)}
        for v in VARIANTS
        for seed in seeds
    ]
    flat = build("ProtoSeam", seeds[0], dim=2, covariance=ps.ExactCovariance(floor=PICTURE_FLOOR))
    assert isinstance(flat, ps.Lifted)
    picture = one(PICTURE, flat, RECIPES["ProtoSeam"], PICTURE_EPOCHS * epochs)
    config = {
        "data": {"name": "scikit-learn digits", **{name: len(y) for name, (_, y) in vars(data).items()}},
        "epochs": epochs,
        "seeds": list(seeds),
        "dim": DIM,
        "schedule": str(ps.SineAnneal()),
        "covariance": str(ps.ExactCovariance()),
        "recipes": {v: asdict(RECIPES[v]) for v in VARIANTS},
        "picture": {"dim": 2, "floor": PICTURE_FLOOR, "epochs": PICTURE_EPOCHS * epochs, "seed": seeds[0]},
    }
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    results = {
        "summary": summarize(runs),
        "runs": runs,
        "picture": picture,
        "config": config,
        "versions": {"protoseam": ps.__version__, "python": platform.python_version(), **packages},
        "seconds": round(time.perf_counter() - started, 3),
    }
    return results, flat, data


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean, spread (max − min) and difference to Baseline of each variant's test accuracy, in points."""
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        test = [r["test"] for r in runs if r["variant"] == variant]
        mean = sum(test) / len(test)
        base = found["Baseline"]["mean"] if found else mean
        found[variant] = {"mean": mean, "spread": max(test) - min(test), "difference": mean - base}
    return found
