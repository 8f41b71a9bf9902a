"""What the last step is worth: the classifiers of the same lifted networks as trained and as fitted, on a CPU.

    python benchmarks/last_step.py panel  # the cells of first_try.py: about ten minutes on two cores
    PROTOSEAM_DATA=DIR python benchmarks/last_step.py photos  # CIFAR in longer schedules: 15 minutes on one core
    python benchmarks/last_step.py table  # print the tables of what was measured

Each network is trained with ``refit=False``. Then its classifier, N2∘(the Linear that ends N1), is judged as it was
trained, with N2 as the linear discriminant of the embeddings, with N2 alone fitted to the embeddings, and fitted to
N1's features with several penalties (in units of the default) and class weights. Raw results go to
results/first_try/last-step-panel.jsonl and last-step-photos.jsonl: errors in % on training and test data, and on
training data that was left out of a fit, test NLL, and whether the library takes the fitted one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import first_try as panel
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protoseam as ps
from protoseam.core.logistic import effective_dimension, logistic_regression
from protoseam.seam.last_step import FeatureReader, held_out_errors, is_worth_it

OUT = {name: panel.OUT.with_name(f"last-step-{name}.jsonl") for name in ("panel", "photos")}
PENALTIES = (0.1, 0.3, 1, 3, 10)
# data, training samples, epochs, optimizer, learning rate
PHOTOS = [
    ("cifar10", 5_000, 5, "adamw", 1e-3),
    ("cifar10", 5_000, 20, "adamw", 1e-3),
    ("cifar10", 5_000, 60, "adamw", 1e-3),
    ("cifar10", 5_000, 200, "adamw", 1e-3),
    ("cifar10", 5_000, 60, "sgd", 0.05),
    ("cifar100", 10_000, 10, "adamw", 1e-3),
    ("cifar100", 10_000, 40, "adamw", 1e-3),
    ("cifar100", 10_000, 40, "sgd", 0.05),
]
Photo = tuple[str, int, int, str, float]


@torch.no_grad()
def judged(
    net: ps.Lifted, train: Iterable[tuple[Tensor, Tensor]], test: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """Errors and NLL of a trained network's classifiers; ``train`` is what the last step would sweep."""
    net.eval()
    reader = FeatureReader(net)
    pairs = [(reader(x), y) for x, y in train]
    h, y = torch.cat([h for h, _ in pairs]), torch.cat([y for _, y in pairs])
    rows = {"train": (h, y), "test": (torch.cat([reader(x) for x in test[0].split(500)]), test[1])}
    last, classes = reader.last, net.num_classes
    assert last is not None
    z = {name: F.linear(h, last.weight, last.bias) for name, (h, _) in rows.items()}
    logits = {"as trained": {name: net.head(z[name]) for name in rows}}

    def add(name: str, inputs: dict[str, Tensor], weight: Tensor, bias: Tensor) -> None:
        logits[name] = {part: inputs[part].double() @ weight.T + bias for part in rows}

    features = {name: h for name, (h, _) in rows.items()}
    count, means, (pooled,) = ps.core.class_moments(z["train"], y, classes, structure="shared")
    floored = pooled + 0.1**2 * torch.eye(net.dim).to(pooled)
    add("discriminant", z, *ps.core.linear_discriminant(means, floored, None))
    between, x = count.double().rsqrt(), h.double() - h.double().mean(0)
    scale = x.square().mean(0).sqrt()
    x = x[:, scale > 0] / scale[scale > 0]
    usual = float(effective_dimension(x.T @ x / len(x))) / (2 * len(x))
    add("N2 alone", z, *logistic_regression(z["train"], y, classes, class_weights=between))
    for factor in PENALTIES:
        fit = logistic_regression(h, y, classes, penalty=factor * usual, class_weights=between, rank=net.dim)
        add(f"penalty × {factor:g}", features, *fit)
    for name, weights in (("samples alike", None), ("classes alike", 1 / count.double())):
        add(name, features, *logistic_regression(h, y, classes, class_weights=weights, rank=net.dim))

    def as_trained(h: Tensor) -> Tensor:
        return net.head(F.linear(h, last.weight, last.bias))

    def fitted(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return logistic_regression(h, y, classes, class_weights=between, rank=net.dim)

    held = [100 * wrong / len(y) for wrong in held_out_errors(as_trained, fitted, h, y)]
    worth = is_worth_it(as_trained, fitted(h, y), fitted, h, y)
    found: dict[str, Any] = {
        "worth": worth,
        "left_out": [round(v, 3) for v in held],
        "train": {},
        "test": {},
        "nll": {},
    }
    for name, parts in logits.items():
        for part, (_, labels) in rows.items():
            found[part][name] = round(100 * float((parts[part].argmax(1) != labels).double().mean()), 3)
        found["nll"][name] = round(float(F.cross_entropy(parts["test"].double(), test[1])), 4)
    return found


def cell(job: tuple[panel.Cell, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ps.SeamWarning)
    lift, made = ps.lift, []
    ps.lift = lambda model, **options: made.append(lift(model, refit=False, **options)) or made[0]
    try:
        _, task = panel.trained(job[0], "lifted", job[1])
    finally:
        ps.lift = lift
    found = judged(made[0], [(task.x_train, task.y_train)], (task.x_test, task.y_test))
    return {"cell": list(job[0]), "seed": job[1], **found}


class Augmented:
    """Batches of 64 images, flipped at random and moved by up to three pixels."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.generator = x, y, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.y) // 64

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.y), generator=self.generator)
        for rows in order[: len(self) * 64].split(64):
            flip = torch.rand(64, generator=self.generator) < 0.5
            x = torch.where(flip[:, None, None, None], self.x[rows].flip(3), self.x[rows])
            yield x.roll(torch.randint(-3, 4, (2,), generator=self.generator).tolist(), (2, 3)), self.y[rows]


def photos(job: Photo) -> dict[str, Any]:
    data, size, epochs, name, lr = job
    warnings.simplefilter("ignore", ps.SeamWarning)
    root = Path(os.environ["PROTOSEAM_DATA"]) / data

    def read(part: str) -> tuple[Tensor, Tensor]:
        x, y = (torch.from_numpy(np.load(root / f"{part}_{what}.npy")) for what in ("images", "labels"))
        return ((x.float() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).contiguous(), y

    x, y = read("train")
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(3))[:size]
    test, classes = read("test"), int(y.max()) + 1

    def fresh() -> tuple[nn.Module, Augmented]:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((3, 32), (32, 64), (64, 128))
        ]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)
        return nn.Sequential(*blocks, *head), Augmented(x[rows], y[rows])

    model, loader = fresh()
    plain = panel.cross_entropy(model, loader, name, lr, epochs).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        wrong = torch.cat([plain(part).argmax(1) for part in test[0].split(500)]) != test[1]
    model, loader = fresh()
    net = ps.lift(model, num_classes=classes, refit=False)
    step = panel.Step(panel.optimizer(name, net.param_groups(lr=lr), lr), epochs * len(loader))
    for _ in net.epochs(loader, epochs):
        for batch, labels in loader:
            step(net.objective(batch, labels).total)
    return {
        "run": list(job),
        "cross_entropy": round(100 * float(wrong.double().mean()), 3),
        **judged(net, loader, test),
    }


def chosen(row: dict[str, Any]) -> str:
    """What the library takes."""
    return "penalty × 1" if row["worth"] else "as trained"


def panel_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| classifier | test errors, % | test NLL |", "|---|---|---|"]
    for name in rows[0]["test"]:
        mean = {part: statistics.fmean(row[part][name] for row in rows) for part in ("test", "nll")}
        lines.append(f"| {name} | {mean['test']:.2f} | {mean['nll']:.3f} |")
    mean = {part: statistics.fmean(row[part][chosen(row)] for row in rows) for part in ("test", "nll")}
    lines.append(f"| as the library chooses | {mean['test']:.2f} | {mean['nll']:.3f} |")
    return "\n".join(lines)


def photos_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| data | epochs | optimizer | errors on training data, trained → fitted (left out of the fit) "
        "| test accuracy, trained → fitted | taken | cross-entropy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        data, size, epochs, name, lr = row["run"]
        train, test = ([row[part][k] for k in ("as trained", "penalty × 1")] for part in ("train", "test"))
        taken = "fitted" if chosen(row) == "penalty × 1" else "trained"
        errors = f"{train[0]:.1f} → {train[1]:.1f} ({row['left_out'][1]:.1f})"
        errors = f"{train[0]:.1f} → {train[1]:.1f} ({row['left_out'][1]:.1f})"
        right = f"{100 - test[0]:.1f} → {100 - test[1]:.1f}"
        lines.append(
            f"| {data}, {size:,} images | {epochs} | {name} {lr:g} | {errors} | {right} | {taken} "
            f"| {100 - row['cross_entropy']:.1f} |"
        )
    return "\n".join(lines)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in OUT[name].read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("panel", "photos", "table"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if args.what != "table":
        jobs: Any = [(c, s) for s in range(3) for c in panel.CELLS] if args.what == "panel" else PHOTOS
        work: Any = cell if args.what == "panel" else photos
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.workers) as pool, OUT[args.what].open("w", encoding="utf-8") as file:
            for row in pool.imap(work, jobs):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
    if OUT["panel"].exists():
        print(panel_table(read("panel")), end="\n\n")
    if OUT["photos"].exists():
        print(photos_table(read("photos")))


if __name__ == "__main__":
    main()
