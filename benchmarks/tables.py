"""Which weight decay ``ProtoSeamClassifier`` needs on tables, beside scikit-learn's ``MLPClassifier``.

    python benchmarks/tables.py                # about 20 minutes on two cores
    python benchmarks/tables.py --list others  # tables on which the default was not chosen: about 5 minutes
    python benchmarks/tables.py --table        # print what was measured

Each table is split in halves (teacher: 500 rows for training; the panel's tables as there), standardised, and fitted
with MLPClassifier as it comes, and with ProtoSeamClassifier at several decays. ``shrinking`` is the power of 1/e to
which a weight without gradients would shrink in the whole training; 0 stands for a decay of 0.01. Raw results go to
results/first_try/tables.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from first_try_tasks import TASKS
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

import protoseam as ps
from protoseam.adapters.sklearn import ProtoSeamClassifier

OUT = Path(__file__).parents[1] / "results" / "first_try" / "tables.jsonl"
Rows = tuple[np.ndarray, np.ndarray]
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _made(
    seed: int, rows: int, columns: int, informative: int, classes: int, apart: float, wrong: float
) -> Rows:
    found: Rows = datasets.make_classification(
        n_samples=rows, n_features=columns, n_informative=informative, n_classes=classes, class_sep=apart,
        flip_y=wrong, random_state=seed,
    )  # fmt: skip
    return found


def _taught(seed: int, rows: int, columns: int, hidden: int | None, classes: int) -> Rows:
    """Labels by a random linear function, or by a random network with one hidden layer."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, columns))
    if hidden is None:
        return x, (x @ draw.normal(size=(columns, classes))).argmax(1)
    inner = np.maximum(x @ draw.normal(size=(columns, hidden)), 0)
    return x, (inner @ draw.normal(size=(hidden, classes))).argmax(1)


def _thirds(x: np.ndarray, y: np.ndarray) -> Rows:
    return x, np.digitize(y, np.quantile(y, [0.33, 0.66]))


MADE: dict[str, Callable[[], Rows]] = {
    "make1000x20c4": lambda: _made(0, 1000, 20, 10, 4, 1.0, 0.01),
    "make2000x30c2": lambda: _made(1, 2000, 30, 8, 2, 0.7, 0.05),
    "make4000x40c8": lambda: _made(2, 4000, 40, 15, 8, 1.0, 0.01),
    "make600x10c3": lambda: _made(3, 600, 10, 6, 3, 0.8, 0.0),
    "make3000x20c2": lambda: _made(4, 3000, 20, 5, 2, 1.0, 0.1),
    "teacher": lambda: _taught(0, 2500, 20, None, 5),
    "teacher_mlp": lambda: _taught(1, 4000, 10, 16, 3),
    "friedman": lambda: _thirds(*datasets.make_friedman1(3000, n_features=10, noise=1.0, random_state=0)),
    "quantiles": lambda: datasets.make_gaussian_quantiles(n_samples=2000, n_features=6, n_classes=4, random_state=0),
    "moons": lambda: datasets.make_moons(1000, noise=0.25, random_state=0),
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "diabetes": lambda: _thirds(*datasets.load_diabetes(return_X_y=True)),
    # the tables of the list "others"
    "make1500x15c3": lambda: _made(11, 1500, 15, 9, 3, 1.2, 0.03),
    "make800x50c2": lambda: _made(12, 800, 50, 12, 2, 1.0, 0.0),
    "make6000x25c10": lambda: _made(13, 6000, 25, 18, 10, 1.5, 0.02),
    "make2000x12c6": lambda: _made(14, 2000, 12, 10, 6, 1.0, 0.1),
    "teacher_wide": lambda: _taught(15, 3000, 60, None, 3),
    "teacher_deep": lambda: _taught(16, 6000, 20, 30, 8),
    "friedman2": lambda: _thirds(*datasets.make_friedman2(2000, noise=100.0, random_state=17)),
    "friedman3": lambda: _thirds(*datasets.make_friedman3(2000, noise=0.2, random_state=18)),
    "hastie": lambda: _hastie(),
    "circles": lambda: datasets.make_circles(1000, noise=0.15, factor=0.6, random_state=20),
    "blobs": lambda: datasets.make_blobs(1500, n_features=5, centers=12, cluster_std=3.5, random_state=21),
    "sums": lambda: _thirds(*_sums()),
}  # fmt: skip


def _hastie() -> Rows:
    x, y = datasets.make_hastie_10_2(4000, random_state=19)
    return x, (y > 0).astype(int)


def _sums() -> Rows:
    draw = np.random.default_rng(22)
    x = draw.uniform(-1, 1, size=(3000, 8))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] ** 2 + draw.normal(size=3000) * 0.2


OF_PANEL = ("wine", "cancer", "digits_flat", "clusters", "imbalanced")
CHOSEN_ON = (*list(MADE)[:12], *OF_PANEL)
OTHERS = tuple(list(MADE)[12:])


def split(name: str, seed: int) -> Split:
    if name in OF_PANEL:
        task = TASKS[name](seed)
        return task.x_train.numpy(), task.x_test.numpy(), task.y_train.numpy(), task.y_test.numpy()
    x, y = MADE[name]()
    share = 0.2 if name == "teacher" else 0.5
    x_train, x_test, y_train, y_test = train_test_split(
        x.astype(np.float32), y, train_size=share, random_state=seed, stratify=y
    )
    scaler = StandardScaler().fit(x_train)
    return scaler.transform(x_train), scaler.transform(x_test), y_train, y_test


def classifier(rows: int, epochs: int, shrinking: float | None, seed: int) -> Any:
    if shrinking is None:
        return MLPClassifier(random_state=seed)
    steps = epochs * max(math.ceil(rows / 64), 10)
    decay = shrinking / (1e-3 * steps / 2) if shrinking else 0.01
    return ProtoSeamClassifier(epochs=epochs, weight_decay=decay, random_state=seed)


def run(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ps.SeamWarning)
    warnings.simplefilter("ignore", ConvergenceWarning)
    x_train, x_test, y_train, y_test = split(job["table"], job["seed"])
    model = classifier(len(x_train), job["epochs"], job["shrinking"], job["seed"])
    return {**job, "accuracy": round(100 * model.fit(x_train, y_train).score(x_test, y_test), 3)}


def jobs(names: tuple[str, ...], seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    ways: list[tuple[str, int, float | None]] = [("MLPClassifier", 200, None)]
    powers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0) if names == CHOSEN_ON else (0.0, 1.0, 3.0)
    ways += [("ProtoSeamClassifier", epochs, shrinking) for epochs in (20, 60) for shrinking in powers]
    return [
        {"table": name, "kind": kind, "epochs": epochs, "shrinking": shrinking, "seed": seed}
        for name in names
        for kind, epochs, shrinking in ways
        for seed in seeds
    ]


def read(path: Path = OUT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Column = tuple[str, str, int, float | None]
MLP: Column = ("MLPClassifier", "MLPClassifier", 200, None)
# the default's time of ten epochs is a strength of 1 in 20 epochs, and of 3 in 60
DEFAULTS: list[Column] = [
    MLP,
    *(
        (f"{epochs} epochs, {'0.01' if s == 0 else 'the default'}", "ProtoSeamClassifier", epochs, s)
        for epochs in (20, 60)
        for s in (0.0, epochs / 20)
    ),
]


def strengths(epochs: int) -> list[Column]:
    names = {0.0: "0.01", 0.5: "e^−0.5", 1.0: "e^−1", 1.5: "e^−1.5", 2.0: "e^−2", 3.0: "e^−3"}
    return [MLP, *((name, "ProtoSeamClassifier", epochs, s) for s, name in names.items())]


def table(rows: list[dict[str, Any]], names: tuple[str, ...], columns: list[Column]) -> str:
    """Test accuracy in %, the mean over the seeds, of each table and of all."""
    lines = [
        "| table | " + " | ".join(column[0] for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    means = []
    for name in names:
        means.append(
            [
                statistics.fmean(
                    row["accuracy"]
                    for row in rows
                    if (row["table"], row["kind"], row["epochs"], row["shrinking"]) == (name, *column[1:])
                )
                for column in columns
            ]
        )
        lines.append(f"| {name} | " + " | ".join(f"{mean:.1f}" for mean in means[-1]) + " |")
    total = [statistics.fmean(column) for column in zip(*means, strict=True)]
    return "\n".join([*lines, "| **mean** | " + " | ".join(f"{mean:.1f}" for mean in total) + " |"])


LISTS = {"chosen": (CHOSEN_ON, (0, 1)), "others": (OTHERS, (11, 12, 13))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=LISTS, default="chosen")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    names, seeds = LISTS[args.list]
    if not args.table:
        done = [{k: v for k, v in row.items() if k != "accuracy"} for row in read()]
        todo = [job for job in jobs(names, seeds) if job not in done]
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool, OUT.open("a") as file:
            for row in pool.imap_unordered(run, todo):
                file.write(json.dumps(row) + "\n")
                file.flush()
    if args.list == "chosen":
        for epochs in (20, 60):
            print(f"{epochs} epochs\n\n{table(read(), names, strengths(epochs))}\n")
    print(table(read(), names, DEFAULTS))


if __name__ == "__main__":
    main()
