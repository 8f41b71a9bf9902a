"""ProtoSeam's accuracy under each covariance estimate, beside the time that the estimate costs.

Data in: the study's runs, run directories with other estimates, the engine's benchmark; data out: a table.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from protoseam.lab.engine.files import read_json
from protoseam.lab.engine.schemas import SUMMARY, check
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.aggregate import Runs, refused
from protoseam.lab.experiments.recipes import STUDIED, TITLES, recipe
from protoseam.lab.experiments.tables import MISSING, Table, markdown

__all__ = ["blocks", "covariance_table"]

# The setting lift.covariance, lift.structure → how a reader knows it.
_ESTIMATES: dict[tuple[Literal["exact", "running", "isotropic"], Literal["full", "diagonal"]], str] = {
    ("exact", "full"): "exact: one pass after each epoch",
    ("running", "full"): "running: from the training batches",
    ("running", "diagonal"): "running, diagonal",
    ("isotropic", "full"): "isotropic: ρ⁻¹, nothing is estimated",
}


def blocks(runs: Runs, results: Path) -> dict[str, str]:
    """Return the generated block ``covariance``, or nothing where ``results`` has no such runs.

    Args:
        runs: the study's runs, which use the exact estimate.
        results: the folder that holds ``covariance/*/summary.json`` and ``bench/engine-h200.json``.
    """
    files = sorted((results / "covariance").glob("*/summary.json"))
    if not files:
        return {}
    measured = read_json(results / "bench" / "engine-h200.json")["epochs"]
    overhead = {model: times["overhead"] for model, times in measured.items()}
    others = [check(file, read_json(file), SUMMARY) for file in files]
    return {"covariance": markdown(covariance_table(runs, others, overhead))}


def covariance_table(
    runs: Runs, others: Sequence[dict[str, Any]], overhead: dict[str, dict[str, float]]
) -> Table:
    """Return accuracy by network and estimate on CIFAR-100, in %, and the time of an epoch against Unlifted's.

    Args:
        runs: the study's runs, by name.
        others: summaries of runs with other estimates; one that differs from a recipe in anything else is left out.
        overhead: network → estimate → share by which ProtoSeam's epoch is longer than Unlifted's.
    """
    rows = []
    for model in STUDIED:
        name = f"cifar100-{model}-protoseam"
        found = [runs[f"{name}-{seed}"] for seed in paper.SEEDS if f"{name}-{seed}" in runs]
        for (covariance, structure), words in _ESTIMATES.items():
            base = recipe(name)
            lift = dataclasses.replace(base.lift, covariance=covariance, structure=structure)
            by_seed = {
                seed: 100 * run["test_accuracy"]
                for seed in paper.SEEDS
                for run in [*found, *others]
                if not refused(dataclasses.replace(base, lift=lift, seed=seed), run)
            }
            if not by_seed:
                continue
            accuracies = [f"{by_seed[seed]:.2f}" if seed in by_seed else MISSING for seed in paper.SEEDS]
            mean = f"{statistics.fmean(by_seed.values()):.2f}"
            cost = overhead.get(model, {}).get(covariance) if structure == "full" else None
            shown = "not measured" if cost is None else f"{100 * cost:+.1f} %"
            rows.append([TITLES[model], words, *accuracies, mean, shown])
    seeds = (f"seed {seed}" for seed in paper.SEEDS)
    header = ("network", "covariance", *seeds, "mean", "epoch against Unlifted")
    return Table("ProtoSeam on CIFAR-100 by covariance estimate.", header, rows)
