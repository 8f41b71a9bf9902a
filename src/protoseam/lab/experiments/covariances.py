"""ProtoSeam's accuracy under each covariance estimate, beside the time that the estimate costs.

Data in: the study's runs, run directories with other estimates, the engine's benchmark; data out: a table.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any, Literal

from protoseam.lab.engine.files import read_json
from protoseam.lab.engine.schemas import SUMMARY, check
from protoseam.lab.experiments.aggregate import Runs, refused
from protoseam.lab.experiments.plans import Scope, covariance
from protoseam.lab.experiments.recipes import TITLES
from protoseam.lab.experiments.tables import MISSING, Table

# The setting lift.covariance, lift.structure → how a reader knows it.
_ESTIMATES: dict[tuple[Literal["exact", "running", "isotropic"], Literal["full", "diagonal"]], str] = {
    ("exact", "full"): "exact: one pass after each epoch",
    ("running", "full"): "running: from the training batches",
    ("running", "diagonal"): "running, diagonal",
    ("isotropic", "full"): "isotropic: ρ⁻¹, nothing is estimated",
}


def adopt(runs: Runs, scope: Scope, results: Path) -> Runs:
    """Return the runs, and for each covariance run they lack the directory in ``results/covariance`` that is it.

    A directory counts by its settings; its name does not matter.
    """
    others = _others(results)
    found = dict(runs)
    for name, config in covariance(scope):
        for other in others if name not in runs else []:
            if not refused(config, other):
                found[name] = {**other, "metrics": []}
    return found


def _others(results: Path | None) -> list[dict[str, Any]]:
    files = sorted((results / "covariance").glob("*/summary.json")) if results else []
    return [check(file, read_json(file), SUMMARY) for file in files]


def covariance_table(runs: Runs, scope: Scope, results: Path | None) -> Table:
    """Return ProtoSeam's accuracy by network and estimate, in %, and the time of an epoch against Unlifted's.

    Args:
        runs: the study's runs, by name.
        scope: names the data and the network; the paper's scope adds ResNet-8.
        results: the folder that may hold ``covariance/*/summary.json`` and ``bench/engine-h200.json``. A run that
            differs from a recipe in more than the estimate is left out.
    """
    bench = results / "bench" / "engine-h200.json" if results else None
    measured = read_json(bench)["epochs"] if bench and bench.exists() else {}
    everything = [run for name, run in runs.items() if name.startswith(("covariance-", *_pairs(scope)))]
    everything += _others(results)
    rows = []
    for pair in _pairs(scope):
        model = pair.partition("-")[2]
        for (estimate, structure), words in _ESTIMATES.items():
            by_seed: dict[int, float] = {}
            for seed in scope.seeds:
                base = scope.config(f"{pair}-protoseam", seed)
                lift = dataclasses.replace(base.lift, covariance=estimate, structure=structure)
                planned = dataclasses.replace(base, lift=lift)
                same = [run for run in everything if not refused(planned, run)]
                if same:
                    by_seed[seed] = 100 * same[0]["test_accuracy"]
            if by_seed:
                overhead = measured.get(model, {}).get("overhead", {}) if structure == "full" else {}
                cost = f"{100 * overhead[estimate]:+.1f} %" if estimate in overhead else "not measured"
                accuracies = [f"{by_seed[seed]:.2f}" if seed in by_seed else MISSING for seed in scope.seeds]
                mean = f"{statistics.fmean(by_seed.values()):.2f}"
                rows.append([TITLES[model], words, *accuracies, mean, cost])
    seeds = (f"seed {seed}" for seed in scope.seeds)
    data = TITLES[scope.sweep.partition("-")[0]]
    caption = f"Test accuracy in % of ProtoSeam on {data} by covariance estimate."
    header = ("network", "covariance", *seeds, "mean", "epoch against Unlifted")
    return Table(caption, header, rows, scope.note)


def _pairs(scope: Scope) -> tuple[str, ...]:
    """DATA-MODEL of the table's networks."""
    return tuple(dict.fromkeys(([] if scope.note else ["cifar100-resnet8"]) + [scope.sweep]))
