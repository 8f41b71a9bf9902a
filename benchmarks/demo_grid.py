"""The demo's hyperparameter search: validation accuracy only, on seeds the demo does not report.

``python benchmarks/demo_grid.py``: 3 variants × 35 settings × 3 seeds; about 12 min on one CPU core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import protoseam as ps
from protoseam.lab.experiments import demo

# The paper's grid (§tech_details), longer at both ends so that no winner lies on an edge.
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DECAYS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
SEEDS = (0, 1, 2)


def score(variant: demo.Variant, recipe: demo.Recipe, data: demo.Data) -> dict[str, float]:
    """Mean validation accuracy and cross-entropy over the seeds; a run that diverges counts as chance."""
    accuracies, losses = [], []
    for seed in SEEDS:
        try:
            net = demo.train(demo.build(variant, seed), data, recipe)
        except ps.SeamError:
            accuracies.append(10.0)
            losses.append(math.log(10))
            continue
        accuracies.append(demo.accuracy(net, *data.val))
        with torch.no_grad():
            loss = float(F.cross_entropy(net.eval()(data.val[0]), data.val[1]))
        losses.append(loss if math.isfinite(loss) else math.log(10))
    return {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "val": sum(accuracies) / len(SEEDS),
        "val_loss": sum(losses) / len(SEEDS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write all scores as JSON")
    args = parser.parse_args()
    data = demo.load_data()
    found: dict[str, list[dict[str, float]]] = {}
    for variant in demo.VARIANTS:
        rows = []
        for lr, decay in itertools.product(RATES, DECAYS):
            row = score(variant, demo.Recipe(lr, decay), data)
            rows.append(row)
            print(
                f"{variant:9s}  lr {lr:<5g}  decay {decay:<6g}  val {row['val']:6.2f} %  loss {row['val_loss']:.4f}"
            )
        best = max(rows, key=lambda row: (row["val"], -row["val_loss"]))
        print(
            f"{variant:9s}  best: lr {best['lr']:g}, decay {best['weight_decay']:g}, val {best['val']:.2f} %\n"
        )
        found[variant] = rows
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
