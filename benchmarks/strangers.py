"""The defaults on cells they were not chosen on: other tasks, networks, optimizers, schedules and seeds than the panel.

    PROTOSEAM_DATA=... python benchmarks/strangers.py      # all cells, two seeds: about 24 minutes on one core
    python benchmarks/strangers.py --only tabular --seeds 7
    PROTOSEAM_DATA=... python benchmarks/strangers.py --list later  # cells of a later day: about ten minutes
    PROTOSEAM_DATA=... python benchmarks/strangers.py --list sgd  # cells for the limits of N1's gradients: five minutes
    PROTOSEAM_DATA=... python benchmarks/strangers.py --list parts  # others for the same: ten minutes
    python benchmarks/strangers.py --table                 # print the table of what was measured

``benchmarks/first_try.py`` is the panel on which the defaults were chosen. The cells here were written down before any
of them was run, and all of them are kept. Defaults changed after these had been seen, so LATER, SGD and PARTS have
others, each written down after a change and before any of them was run. Both sides get the same of everything but the
loss. The lifted side is the README's loop, as it stands. The cells of photographs read arrays from $PROTOSEAM_DATA
(strangers_tasks.py says which files), and two cells need timm. Raw results go to results/first_try/strangers.jsonl,
strangers-later.jsonl, strangers-sgd.jsonl and strangers-parts.jsonl, one line per cell and seed; what is there is not
run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from first_try import OUT as PANEL
from first_try import Batches, accuracy, cosine
from strangers_tasks import NETWORKS, TASKS
from torch import Tensor, nn

import protoseam as ps

OUT = PANEL.with_name("strangers.jsonl")


class Cell(NamedTuple):
    """One combination; ``extra``: mixup, accumulate (four batches a step), bfloat16 (autocast), augment or nothing."""

    task: str
    network: str
    optimizer: str
    lr: float
    weight_decay: float
    epochs: int
    batch: int
    schedule: str
    extra: str = ""


CELLS = [
    Cell("cifar10", "resnet_gn", "nesterov", 0.05, 5e-4, 8, 64, "cosine"),
    Cell("cifar10", "resnet_gn", "adamw", 2e-3, 0.01, 3, 32, "onecycle"),
    Cell("cifar10", "vgg", "adam", 1e-3, 1e-4, 8, 128, "constant"),
    Cell("cifar10", "depthwise", "nadam", 2e-3, 0.0, 12, 100, "constant"),
    Cell("cifar10", "mixer", "adamw", 1e-3, 0.05, 10, 64, "warm-up"),
    Cell("cifar100_20", "timm_resnet10t", "adamw", 1e-3, 0.05, 6, 64, "onecycle"),
    Cell("cifar100_20", "depthwise", "sgd", 0.05, 5e-4, 15, 64, "cosine", "mixup"),
    Cell("waves", "cnn1d", "rmsprop", 1e-3, 0.0, 15, 32, "constant"),
    Cell("waves", "cnn1d", "plain sgd", 0.05, 0.0, 20, 16, "constant"),
    Cell("waves", "cnn1d", "sgd", 0.02, 1e-4, 10, 8, "linear", "accumulate"),
    Cell("waves", "two_part", "adamw", 1e-3, 0.01, 15, 32, "cosine"),
    Cell("tokens", "gru", "adam", 3e-3, 0.0, 10, 32, "constant"),
    Cell("tokens", "encoder", "adamw", 1e-3, 0.01, 12, 64, "warm-up"),
    Cell("tokens", "encoder", "adamw", 1e-3, 0.01, 12, 64, "onecycle, one rate"),
    Cell("tabular3", "mlp_ln", "radam", 1e-3, 0.0, 30, 128, "constant"),
    Cell("tabular8", "mlp_ln", "adagrad", 0.02, 0.0, 20, 64, "constant"),
    Cell("wrong_labels", "mlp_ln", "adamw", 1e-3, 0.01, 30, 64, "cosine"),
    Cell("tabular30", "wide_tanh", "nesterov", 0.1, 5e-4, 30, 128, "steps"),
    Cell("tabular30", "mlp_ln", "adadelta", 1.0, 0.0, 20, 64, "constant"),
    Cell("tabular30", "mlp_ln", "adamw", 1e-3, 0.01, 10, 256, "cosine", "bfloat16"),
    Cell("moons", "wide_tanh", "adam", 1e-2, 0.0, 60, 32, "constant"),
    Cell("skewed", "mlp_ln", "nadam", 1e-3, 0.0, 20, 64, "exponential"),
    Cell("iris", "small_mlp", "plain sgd", 0.1, 0.0, 60, 8, "constant"),
    Cell("forest", "mlp_ln", "adamw", 3e-3, 0.01, 20, 512, "exponential"),
    Cell("diabetes", "mlp_ln", "adam", 1e-3, 1e-3, 30, 16, "constant"),
    Cell("five_each", "wide_tanh", "adam", 1e-3, 0.0, 40, 8, "constant"),
]


LATER = [
    Cell("cifar10_600", "vgg", "adamw", 1e-3, 0.01, 30, 32, "cosine", "augment"),
    Cell("cifar10_600", "depthwise", "sgd", 0.05, 5e-4, 40, 32, "cosine", "augment"),
    Cell("cifar10", "depthwise", "adamw", 3e-3, 0.05, 12, 64, "warm-up", "augment"),
    Cell("cifar100_20", "resnet_gn", "nesterov", 0.1, 5e-4, 12, 64, "onecycle", "augment"),
    Cell("fashion", "lenet", "sgd", 0.05, 0.0, 6, 64, "linear"),
    Cell("fashion", "lenet", "adam", 1e-3, 0.0, 15, 100, "constant", "augment"),
    Cell("fashion_200", "lenet", "adamw", 2e-3, 0.01, 40, 20, "cosine", "augment"),
    Cell("spirals", "mlp_ln", "adamw", 3e-3, 0.01, 40, 32, "cosine"),
    Cell("spirals", "wide_tanh", "sgd", 0.05, 0.0, 60, 32, "constant"),
    Cell("shells", "mlp_ln", "adam", 2e-3, 0.0, 25, 64, "constant"),
    Cell("shells", "wide_tanh", "nesterov", 0.05, 5e-4, 30, 64, "cosine"),
    Cell("fifty", "mlp_ln", "rmsprop", 5e-4, 0.0, 20, 64, "exponential"),
    Cell("fifty", "small_mlp", "plain sgd", 0.1, 0.0, 40, 32, "steps"),
    Cell("motifs", "cnn1d", "nadam", 2e-3, 0.0, 10, 50, "linear"),
    Cell("motifs", "two_part", "adamw", 1e-3, 0.05, 25, 32, "cosine"),
    Cell("tokens", "gru", "adamw", 2e-3, 0.01, 6, 64, "onecycle"),
]

# Written down when the Linear that ends N1 got a limit of its own, which concerns SGD alone.
SGD = [
    Cell("spirals", "mlp_ln", "nesterov", 0.1, 0.0, 40, 32, "cosine"),
    Cell("moons", "small_mlp", "sgd", 0.02, 0.0, 60, 16, "constant"),
    Cell("tabular8", "wide_tanh", "sgd", 0.05, 5e-4, 30, 64, "cosine"),
    Cell("tabular30", "wide_tanh", "sgd", 0.02, 0.0, 20, 64, "linear"),
    Cell("motifs", "cnn1d", "nesterov", 0.02, 0.0, 20, 50, "cosine"),
    Cell("tokens", "gru", "sgd", 0.1, 0.0, 12, 32, "cosine"),
    Cell("tokens", "encoder", "nesterov", 0.05, 0.0, 15, 64, "warm-up"),
    Cell("forest", "mlp_ln", "sgd", 0.1, 0.0, 20, 256, "exponential"),
    Cell("diabetes", "wide_tanh", "plain sgd", 0.05, 0.0, 30, 16, "constant"),
    Cell("fashion", "lenet", "nesterov", 0.02, 0.0, 10, 64, "cosine"),
    Cell("cifar10", "vgg", "sgd", 0.05, 5e-4, 10, 64, "cosine"),
    Cell("fifty", "wide_tanh", "nesterov", 0.05, 0.0, 30, 64, "cosine"),
]
# Written down when each part of N1 got a limit by the size of its own weights, which again concerns SGD alone.
PARTS = [
    Cell("cifar100_20", "timm_resnet10t", "sgd", 0.05, 5e-4, 15, 64, "cosine"),
    Cell("cifar100_20", "mixer", "nesterov", 0.05, 0.0, 12, 64, "warm-up"),
    Cell("cifar10", "depthwise", "nesterov", 0.1, 5e-4, 15, 128, "onecycle"),
    Cell("cifar10", "mixer", "sgd", 0.02, 0.0, 10, 64, "linear"),
    Cell("cifar10_600", "vgg", "sgd", 0.01, 0.0, 40, 32, "cosine", "augment"),
    Cell("waves", "two_part", "sgd", 0.05, 0.0, 20, 32, "cosine"),
    Cell("tokens", "gru", "nesterov", 0.05, 0.0, 15, 64, "linear"),
    Cell("motifs", "cnn1d", "plain sgd", 0.1, 0.0, 20, 32, "constant"),
    Cell("tabular30", "mlp_ln", "sgd", 0.05, 0.0, 20, 64, "cosine"),
    Cell("shells", "small_mlp", "sgd", 0.05, 0.0, 30, 32, "steps"),
    Cell("wrong_labels", "wide_tanh", "nesterov", 0.02, 5e-4, 20, 64, "cosine"),
    Cell("skewed", "mlp_ln", "sgd", 0.1, 0.0, 20, 128, "exponential"),
]
LISTS = {
    "first": (CELLS, (7, 8), OUT),
    "later": (LATER, (11, 12), PANEL.with_name("strangers-later.jsonl")),
    "sgd": (SGD, (21, 22), PANEL.with_name("strangers-sgd.jsonl")),
    "parts": (PARTS, (31, 32), PANEL.with_name("strangers-parts.jsonl")),
}


def optimizer(cell: Cell, groups: Any) -> torch.optim.Optimizer:
    made: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
        "plain sgd": (torch.optim.SGD, {}),
        "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "nadam": (torch.optim.NAdam, {}),
        "radam": (torch.optim.RAdam, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "adadelta": (torch.optim.Adadelta, {}),
    }
    kind, settings = made[cell.optimizer]
    found: torch.optim.Optimizer = kind(groups, lr=cell.lr, weight_decay=cell.weight_decay, **settings)  # type: ignore[call-arg]
    return found


def scheduler(cell: Cell, opt: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Steps once per optimizer step."""
    if cell.schedule == "cosine":
        return cosine(opt, steps)
    if cell.schedule == "onecycle":  # a highest rate for each group
        return torch.optim.lr_scheduler.OneCycleLR(
            opt, [g["lr"] for g in opt.param_groups], total_steps=steps
        )
    if (
        cell.schedule == "onecycle, one rate"
    ):  # one highest rate for all groups, as one writes it for cross-entropy
        return torch.optim.lr_scheduler.OneCycleLR(opt, cell.lr, total_steps=steps)
    first = steps // 10
    share: dict[str, Callable[[int], float]] = {
        "constant": lambda t: 1.0,
        "linear": lambda t: 1 - t / steps,
        "exponential": lambda t: 0.05 ** (t / steps),
        "steps": lambda t: 0.1 ** ((t >= steps / 2) + (t >= 3 * steps / 4)),
        "warm-up": lambda t: (
            (t + 1) / first if t < first else 0.5 * (1 + math.cos(math.pi * (t - first) / (steps - first)))
        ),
    }
    return torch.optim.lr_scheduler.LambdaLR(opt, share[cell.schedule])


def mixed(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mixup of a batch with itself, Beta(0.2, 0.2)."""
    part = float(torch.distributions.Beta(0.2, 0.2).sample())
    other, q = torch.randperm(len(y)), F.one_hot(y, classes).float()
    return part * x + (1 - part) * x[other], part * q + (1 - part) * q[other]


class Augmented(Batches):
    """Each batch of images flipped and moved by up to three pixels, as a whole, with a square cut out of each."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().__iter__():
            flip, across, down = torch.randint(7, (3,), generator=self.generator).tolist()
            x = (x.flip(3) if flip % 2 else x).roll((across - 3, down - 3), (2, 3)).clone()
            corners = torch.randint(x.shape[2] - 8, (len(x), 2), generator=self.generator).tolist()
            for image, (top, left) in zip(x, corners, strict=True):
                image[:, top : top + 8, left : left + 8] = 0
            yield x, y


def train(
    cell: Cell,
    loader: Batches,
    epochs: Iterable[int],
    groups: Any,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The loop of both sides: they differ in the loss, the parameter groups and what goes over the epochs."""
    each = 4 if cell.extra == "accumulate" else 1
    opt = optimizer(cell, groups)
    decay = scheduler(cell, opt, cell.epochs * len(loader) // each + 1)
    done = 0
    for _ in epochs:
        for x, y in loader:
            if cell.extra == "mixup":
                x, y = mixed(x, y, loader.task.classes)
            with torch.autocast("cpu", torch.bfloat16, enabled=cell.extra == "bfloat16"):
                loss = loss_of(x, y) / each
            if done % each == 0:
                opt.zero_grad()
            loss.backward()
            done += 1
            if done % each == 0:
                opt.step()
                decay.step()


def cross_entropy(cell: Cell, model: nn.Module, loader: Batches) -> nn.Module:
    train(
        cell,
        loader,
        range(cell.epochs),
        model.parameters(),
        lambda x, y: F.cross_entropy(model(x).float(), y),
    )
    return model


def lifted(cell: Cell, model: nn.Module, loader: Batches) -> nn.Module:
    classes = loader.task.classes
    if cell.network == "two_part":
        net = ps.lift(model, num_classes=classes, at="squeeze", probe=loader.task.x_train[:4])
    else:
        net = ps.lift(model, num_classes=classes)
    groups = net.param_groups(lr=cell.lr)
    train(cell, loader, net.epochs(loader, cell.epochs), groups, lambda x, y: net.objective(x, y).total)
    return net.deploy(fold=cell.network != "two_part")


def run(cell: Cell, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = TASKS[cell.task](seed)
    batches = Augmented if cell.extra == "augment" else Batches
    row: dict[str, Any] = {**cell._asdict(), "seed": seed}
    said: list[str] = []
    start = time.perf_counter()
    for side, learn in (("cross_entropy", cross_entropy), ("lifted", lifted)):
        torch.manual_seed(seed)
        model = NETWORKS[cell.network](task)
        torch.manual_seed(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                row[side] = accuracy(learn(cell, model, batches(task, cell.batch, seed)), task)
            except ps.SeamError as error:  # a training that diverges is told so, and counts as not finite
                said.append(str(error))
                row[side] = math.nan
        said += [str(w.message) for w in caught if side == "lifted"]
    chance = 100 * float(task.y_test.bincount().max() / len(task.y_test))  # the share of the largest class
    seconds = round(time.perf_counter() - start, 1)
    return {**row, "chance": round(chance, 2), "seconds": seconds, "warnings": sorted(set(said))}


def read(path: Path) -> dict[tuple[Cell, int], dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(Cell(*(r[field] for field in Cell._fields)), r["seed"]): r for r in rows}


def table(found: dict[tuple[Cell, int], dict[str, Any]], cells: list[Cell] = CELLS) -> str:
    lines = [
        "| task | network | optimizer | schedule | epochs | batch | chance | cross-entropy | lifted | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    gaps = []
    for cell in cells:
        rows = [row for (other, _), row in found.items() if other == cell]
        if not rows:
            continue
        mean = {key: statistics.fmean(r[key] for r in rows) for key in ("chance", "cross_entropy", "lifted")}
        gaps.append(mean["lifted"] - mean["cross_entropy"])
        shown = [
            cell.task,
            cell.network,
            f"{cell.optimizer} {cell.lr:g}" + (f", decay {cell.weight_decay:g}" if cell.weight_decay else ""),
            cell.schedule + (f", {cell.extra}" if cell.extra else ""),
            str(cell.epochs),
            str(cell.batch),
            *(f"{value:.1f}" for value in mean.values()),
            f"{gaps[-1]:+.1f}",
        ]
        lines.append("| " + " | ".join(shown) + " |")
    lines += [
        "",
        f"{len(gaps)} cells: {sum(g >= -1.5 for g in gaps)} within 1.5 points of cross-entropy or above, "
        f"{sum(g > 0 for g in gaps)} above it, {sum(g >= -0.5 for g in gaps)} within 0.5; "
        f"{sum(math.isnan(g) for g in gaps)} not finite.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose description contains this")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--list", choices=LISTS, default="first", help="which cells (default: the first ones)"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    cells, seeds, out = LISTS[args.list]
    out = args.out or out
    found = read(out)
    if not args.table:
        out.parent.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds or seeds:
            for cell in cells:
                if args.only in " ".join(map(str, cell)) and (cell, seed) not in found:
                    row = run(cell, seed)
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        found = read(out)
    print(table(found, cells))


if __name__ == "__main__":
    main()
