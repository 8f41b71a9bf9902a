"""Finished runs of the plan, made up, as their files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protoseam.lab.engine.config import to_dict
from protoseam.lab.experiments import aggregate, paper
from protoseam.lab.experiments.plans import PLANS, Scope
from protoseam.lab.experiments.recipes import NETWORKS

SCOPE = Scope(datasets=("cifar100",), models=("resnet8",))
PLANNED = {name: config for plan in PLANS.values() for name, config in plan(Scope(models=NETWORKS))}


def row(name: str, accuracy: float, epochs: int = 200) -> dict[str, Any]:
    """A finished run of the plan, as its file has it."""
    losses = {"total": 2.0, "consensus": 1.0}
    metrics = [
        {"epoch": e, "validation_accuracy": None if e % 2 else accuracy * e / 4, "loss": losses}
        for e in (1, 2, 3, 4)
    ]
    config = to_dict(PLANNED[name])
    return {"epochs": epochs, "test_accuracy": accuracy, "config": config, "metrics": metrics}


def three_seeds() -> aggregate.Runs:
    values = {"baseline": (0.76, 0.77, 0.78), "protoseam": (0.78, 0.80, 0.79)}
    return {
        f"cifar100-resnet8-{variant}-{seed}": row(f"cifar100-resnet8-{variant}-{seed}", value)
        for variant, of_seeds in values.items()
        for seed, value in zip(paper.SEEDS, of_seeds, strict=True)
    }


def written(folder: Path, runs: aggregate.Runs) -> Path:
    folder.mkdir(exist_ok=True)
    for name, run in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(run))
    return folder
