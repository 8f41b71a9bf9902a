"""SGD with momentum in batches of one to 32 samples: lifted with its defaults against cross-entropy, on a CPU.

    python benchmarks/small_batches.py     # about three minutes on one core

A small MLP on 600 of scikit-learn's digits (300 for batches of one), constant rates, the README's loop. The side
"lifted, whole limits" leaves out the share of N1's limits that small batches get (``ps.core.batch_share``). Raw results
go to results/first_try/small-batches.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps
from protoseam.seam import bounding

OUT = Path(__file__).parents[1] / "results" / "first_try" / "small-batches.jsonl"
# batch size, learning rate, epochs, training samples
CELLS = (
    (1, 0.01, 2, 300),
    (4, 0.01, 4, 600),
    (4, 0.1, 4, 600),
    (8, 0.02, 6, 600),
    (8, 0.05, 6, 600),
    (8, 0.2, 6, 600),
    (16, 0.05, 8, 600),
    (32, 0.05, 10, 600),
)
SIDES = ("cross-entropy", "lifted", "lifted, whole limits")


def run(cell: tuple[int, float, int, int], side: str, seed: int) -> float:
    size, lr, epochs, count = cell
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(x[:count], y[:count]), batch_size=size, shuffle=True)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    lifted = side != "cross-entropy"
    net = ps.lift(model, num_classes=10) if lifted else None
    optimizer = torch.optim.SGD(net.param_groups(lr) if net else model.parameters(), lr=lr, momentum=0.9)
    try:
        for _ in net.epochs(loader, epochs) if net else range(epochs):
            for inputs, target in loader:
                loss = net.objective(inputs, target).total if net else F.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except ps.SeamError:
        return float("nan")
    with torch.no_grad():
        answers = (net or model).eval()(x[1200:]).argmax(1)
    return 100 * float((answers == y[1200:]).double().mean())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| batch | rate | cross-entropy | lifted | lifted, whole limits |", "|---|---|---|---|---|"]
    for cell in CELLS:
        means = [
            statistics.fmean(r["accuracy"] for r in rows if r["cell"] == list(cell) and r["side"] == side)
            for side in SIDES
        ]
        lines.append(f"| {cell[0]} | {cell[1]:g} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ps.SeamWarning)
    share = bounding.batch_share
    rows = []
    for cell in CELLS:
        for side in SIDES:
            bounding.batch_share = (lambda *_: 1.0) if side == SIDES[2] else share
            for seed in range(3):
                rows.append(
                    {
                        "cell": list(cell),
                        "side": side,
                        "seed": seed,
                        "accuracy": round(run(cell, side, seed), 3),
                    }
                )
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
