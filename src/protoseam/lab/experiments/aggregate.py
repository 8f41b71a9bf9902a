"""From the raw files of a study to the numbers of its tables and figures.

Data in: finished runs by name (``study.read_study``) and a scope; data out: small records in percent. What a study
lacks is absent here too: an empty ``by_seed``, an interval that is None. Nothing is kept between calls.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protoseam.lab.engine.config import BESIDE, ConfigError, RunConfig, unlike
from protoseam.lab.engine.settings import from_dict
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.plans import Scope, sweep_name
from protoseam.lab.experiments.recipes import network
from protoseam.lab.experiments.study import Planned

__all__ = [
    "PAIRS", "Band", "Cell", "Difference", "Point", "Wavering", "cells", "counted", "curves", "differences",
    "published_curve", "refused", "stray", "sweep", "wavering",
]  # fmt: skip

Runs = dict[str, dict[str, Any]]
PAIRS = (("protoseam", "baseline"), ("protoseam", "unlifted"), ("unlifted", "baseline"))


# How a run was computed, and what was looked at besides: not what it is.
_ASIDE = (*BESIDE, "epochs", "eval_every", "keep_embeddings", "compile", "graph")


def refused(config: RunConfig, row: dict[str, Any]) -> str:
    """Why a file does not count as the run its name says; nothing if it does.

    On the paper's data sets only its 200 epochs count; everything that decides the numbers must be the plan's.
    """
    needed = paper.EPOCHS if config.data in paper.DATASETS else config.epochs
    if row["epochs"] != needed:
        return f"of {row['epochs']} epochs"
    if config.keep_embeddings and "embeddings" not in row:
        return "without embeddings"
    try:
        there = from_dict(row["config"])
    except ConfigError as error:
        return f"with other settings ({error})"
    if (there.augment, config.augment) == ("paper", "auto") and config.data in paper.DATASETS:
        there = dataclasses.replace(there, augment="auto")  # the same for these images
    found = unlike(there, config, but=_ASIDE)
    return f"with other settings ({'; '.join(found)})" if found else ""


def counted(plan: Sequence[Planned], runs: Runs) -> Runs:
    """The plan's runs that are there and count."""
    return {name: runs[name] for name, config in plan if name in runs and not refused(config, runs[name])}


@dataclass(frozen=True)
class Cell:
    """One row of tab:main: a data set, a network and a variant over its seeds, in percent."""

    data: str
    model: str
    variant: str
    by_seed: dict[int, float]
    published: float | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        values = self.by_seed.values()
        return max(values) - min(values) if len(values) > 1 else None


def cells(runs: Runs, scope: Scope) -> list[Cell]:
    """tab:main."""
    found = []
    for data in scope.datasets:
        for model in scope.models:
            for variant in scope.variants:
                by_seed = _by_seed(runs, {s: f"{data}-{model}-{variant}-{s}" for s in scope.seeds})
                published = paper.TABLE_1.get((data, network(model), variant))
                mean = None if published is None else statistics.fmean(published)
                found.append(Cell(data, model, variant, by_seed, mean))
    return found


def _by_seed(runs: Runs, names: dict[int, str]) -> dict[int, float]:
    return {seed: 100 * runs[name]["test_accuracy"] for seed, name in names.items() if name in runs}


@dataclass(frozen=True)
class Difference:
    """One variant minus another on the same data set, network and seeds, in points."""

    data: str
    model: str
    variants: tuple[str, str]
    by_seed: dict[int, float]
    published: float | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean, Student's t over the seeds; None with fewer than two."""
        values = list(self.by_seed.values())
        if len(values) < 2:
            return None
        from scipy.stats import t  # a second to import, so only when there is something to compute

        mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
        reach = float(t.ppf(0.975, len(values) - 1)) * error
        return mean - reach, mean + reach


def differences(table: Sequence[Cell]) -> list[Difference]:
    """Paired over seeds: a seed counts where both variants have it."""
    by_key = {(cell.data, cell.model, cell.variant): cell for cell in table}
    found = []
    for data, model in dict.fromkeys((cell.data, cell.model) for cell in table):
        for pair in PAIRS:
            one, other = (by_key.get((data, model, variant)) for variant in pair)
            if one is None or other is None:
                continue  # a variant that was not asked for
            by_seed = {s: v - other.by_seed[s] for s, v in one.by_seed.items() if s in other.by_seed}
            stated = one.published, other.published
            published = None if stated[0] is None or stated[1] is None else stated[0] - stated[1]
            found.append(Difference(data, model, pair, by_seed, published))
    return found


@dataclass(frozen=True)
class Point:
    """One setting of a sweep over its seeds, in percent; ``published`` is the paper's (mean, lowest, highest)."""

    value: int
    by_seed: dict[int, float]
    published: tuple[float, float, float] | None

    @property
    def measured(self) -> tuple[float, float, float] | None:
        """Mean, lowest and highest."""
        values = self.by_seed.values()
        return (statistics.fmean(values), min(values), max(values)) if values else None


def sweep(runs: Runs, scope: Scope, setting: str) -> list[Point]:
    """fig:penalty-sweep, for ``setting`` rho_max or dim."""
    values, published = {
        "rho_max": (scope.rhos, paper.SWEEP_RHO),
        "dim": (scope.dims, paper.SWEEP_K),
    }[setting]
    points = []
    for value in values:
        by_seed = _by_seed(runs, {s: sweep_name(scope, setting, value, s) for s in scope.seeds})
        mean, above, below = published.get(value, (math.nan,) * 3)
        stated = (mean, mean - below, mean + above)
        points.append(Point(value, by_seed, None if scope.note else stated))
    return points


@dataclass(frozen=True)
class Band:
    """A quantity over the epochs: mean, lowest and highest of the seeds."""

    data: str
    model: str
    variant: str
    quantity: str  # "validation accuracy", or a term of the loss
    epochs: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int = 1


def curves(runs: Runs, scope: Scope) -> list[Band]:
    """fig:tin-vit-training-curves, for every data set and network that has runs."""
    bands = []
    for data in scope.datasets:
        for model in scope.models:
            for variant in scope.variants:
                names = [f"{data}-{model}-{variant}-{seed}" for seed in scope.seeds]
                metrics = [runs[name]["metrics"] for name in names if name in runs]
                for quantity, series in _series(metrics):
                    epochs = sorted(set.intersection(*(set(one) for one in series)))
                    columns = [[one[epoch] for one in series] for epoch in epochs]
                    mean, low, high = ([f(c) for c in columns] for f in (statistics.fmean, min, max))
                    bands.append(Band(data, model, variant, quantity, epochs, mean, low, high, len(metrics)))
    return bands


def published_curve(data: str, model: str, variant: str) -> dict[int, float]:
    """The paper's mean validation accuracy by epoch, where it prints one."""
    return {5 * i: v for i, v in enumerate(paper.CURVES.get((data, network(model), variant), ()), start=1)}


@dataclass(frozen=True)
class Wavering:
    """How unsteady the validation accuracy of one seed is in mid-training, in points: a trace of the network."""

    data: str
    model: str
    variant: str
    by_seed: dict[int, float]
    published: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())


def wavering(runs: Runs, scope: Scope) -> list[Wavering]:
    found = []
    for data in scope.datasets:
        for model in scope.models:
            for variant in scope.variants:
                by_seed = {}
                for seed in scope.seeds:
                    run = runs.get(f"{data}-{model}-{variant}-{seed}")
                    strays = None if run is None else stray(_accuracy(run["metrics"]))
                    if strays is not None:
                        by_seed[seed] = strays
                printed = stray(published_curve(data, model, variant))
                # errors of a mean over the seeds are smaller by the root of their number
                one_seed = None if printed is None else printed * math.sqrt(len(paper.SEEDS))
                if by_seed:
                    found.append(Wavering(data, model, variant, by_seed, one_seed))
    return found


def stray(curve: dict[int, float]) -> float | None:
    """Deviation of a curve from the mean of its values five epochs before and after, over epochs 15 to 100.

    Independent errors of deviation s make differences of deviation s·√1.5; the factor is taken out.
    """
    strays = [
        curve[e] - (curve[e - 5] + curve[e + 5]) / 2
        for e in range(15, 101)
        if {e - 5, e, e + 5} <= curve.keys()
    ]
    return math.sqrt(statistics.fmean(s * s for s in strays) / 1.5) if strays else None


def _accuracy(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {r["epoch"]: 100 * r["validation_accuracy"] for r in rows if r["validation_accuracy"] is not None}


def _series(metrics: list[list[dict[str, Any]]]) -> Iterator[tuple[str, list[dict[int, float]]]]:
    """Each quantity as one {epoch: value} a seed."""
    if not metrics or not all(metrics):
        return
    yield "validation accuracy", [_accuracy(rows) for rows in metrics]
    for term in metrics[0][0]["loss"]:
        yield term, [{r["epoch"]: r["loss"][term] for r in rows if term in r["loss"]} for rows in metrics]
