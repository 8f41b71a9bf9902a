"""From the raw files of a study to the numbers of its tables and figures.

Data in: finished runs by name (``study.read_study``) and a scope; data out: small records in percent. What a study
lacks is absent here too: an empty ``by_seed``, an interval that is None. Nothing is kept between calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protoseam.lab.engine.config import BESIDE, ConfigError, RunConfig, unlike
from protoseam.lab.engine.files import read_json
from protoseam.lab.engine.schemas import SUMMARY, check
from protoseam.lab.engine.settings import from_dict
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.plans import Scope, covariance, sweep_name
from protoseam.lab.experiments.recipes import network
from protoseam.lab.experiments.study import Planned

Runs = dict[str, dict[str, Any]]
PAIRS = (("protoseam", "baseline"), ("protoseam", "unlifted"), ("unlifted", "baseline"))


# How a run was computed, and what was looked at besides: not what it is.
_ASIDE = (*BESIDE, "epochs", "eval_every", "keep_embeddings", "compile", "graph")


def refused(config: RunConfig, row: dict[str, Any]) -> str:
    """Return why a file does not count as the run its name says, or "" if it does.

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
    """Return the plan's runs that are there and count."""
    return {name: runs[name] for name, config in plan if name in runs and not refused(config, runs[name])}


def adopt(runs: Runs, scope: Scope, results: Path) -> Runs:
    """Return the runs, and for each covariance run they lack the directory in ``results/covariance`` that is it.

    A directory counts by its settings; its name does not matter.
    """
    others = other_covariances(results)
    found = dict(runs)
    for name, config in covariance(scope):
        for other in others if name not in runs else []:
            if not refused(config, other):
                found[name] = {**other, "metrics": []}
    return found


def other_covariances(results: Path | None) -> list[dict[str, Any]]:
    """Return the summaries of ``results/covariance/*``: runs outside the study that may have other estimates."""
    files = sorted((results / "covariance").glob("*/summary.json")) if results else []
    return [check(file, read_json(file), SUMMARY) for file in files]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean by Student's t, from two values on."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # a second to import, so only when there is something to compute

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf(0.975, len(values) - 1)) * error
    return mean - reach, mean + reach


@dataclass(frozen=True)
class Cell:
    """A number of one data set, network and variant at each seed, beside the paper's mean.

    It is an accuracy in percent, or in points a difference between two variants ("protoseam − baseline") or a
    deviation.
    """

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
        """Largest minus smallest, from two seeds on."""
        values = self.by_seed.values()
        return max(values) - min(values) if len(values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean, Student's t over the seeds, from two seeds on."""
        return interval(list(self.by_seed.values()))


def _each(scope: Scope) -> Iterator[tuple[str, str, str, dict[int, str]]]:
    """Data set, network, variant and the names of its runs by seed, as Table 1 orders them."""
    for data, model, variant in itertools.product(scope.datasets, scope.models, scope.variants):
        yield data, model, variant, {seed: f"{data}-{model}-{variant}-{seed}" for seed in scope.seeds}


def cells(runs: Runs, scope: Scope) -> list[Cell]:
    """Return tab:main."""
    found = []
    for data, model, variant, names in _each(scope):
        stated = paper.TABLE_1.get((data, network(model), variant))
        mean = None if stated is None else statistics.fmean(stated)
        found.append(Cell(data, model, variant, _by_seed(runs, names), mean))
    return found


def _by_seed(runs: Runs, names: dict[int, str]) -> dict[int, float]:
    return {seed: 100 * runs[name]["test_accuracy"] for seed, name in names.items() if name in runs}


def differences(table: Sequence[Cell]) -> list[Cell]:
    """Return the differences between variants, paired over the seeds that both have."""
    by_key = {(cell.data, cell.model, cell.variant): cell for cell in table}
    found = []
    for data, model in dict.fromkeys((cell.data, cell.model) for cell in table):
        for pair in PAIRS:
            one, other = (by_key.get((data, model, variant)) for variant in pair)
            if one is None or other is None:
                continue  # a variant that was not asked for
            by_seed = {s: v - other.by_seed[s] for s, v in one.by_seed.items() if s in other.by_seed}
            published = difference(one.published, other.published)
            found.append(Cell(data, model, " − ".join(pair), by_seed, published))
    return found


def difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


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
    """Return fig:penalty-sweep, for ``setting`` rho_max or dim."""
    published = {"rho_max": paper.SWEEP_RHO, "dim": paper.SWEEP_K}[setting]
    points = []
    for value in scope.swept(setting):
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
    """Return fig:tin-vit-training-curves, for every data set and network that has runs."""
    bands = []
    for data, model, variant, names in _each(scope):
        metrics = [runs[name]["metrics"] for name in names.values() if name in runs]
        for quantity, series in _series(metrics):
            epochs = sorted(set.intersection(*(set(one) for one in series)))
            columns = [[one[epoch] for one in series] for epoch in epochs]
            mean, low, high = ([f(c) for c in columns] for f in (statistics.fmean, min, max))
            bands.append(Band(data, model, variant, quantity, epochs, mean, low, high, len(metrics)))
    return bands


def published_curve(data: str, model: str, variant: str) -> dict[int, float]:
    """Return the paper's mean validation accuracy by epoch, where it prints one."""
    return {5 * i: v for i, v in enumerate(paper.CURVES.get((data, network(model), variant), ()), start=1)}


def wavering(runs: Runs, scope: Scope) -> list[Cell]:
    """Return how unsteady the validation accuracy of one seed is in mid-training: a trace of the network."""
    found = []
    for data, model, variant, names in _each(scope):
        curves = {seed: _accuracy(runs[name]["metrics"]) for seed, name in names.items() if name in runs}
        by_seed = {seed: value for seed, curve in curves.items() if (value := stray(curve)) is not None}
        printed = stray(published_curve(data, model, variant))
        # errors of a mean over the seeds are smaller by the root of their number
        one_seed = None if printed is None else printed * math.sqrt(len(paper.SEEDS))
        if by_seed:
            found.append(Cell(data, model, variant, by_seed, one_seed))
    return found


def stray(curve: dict[int, float]) -> float | None:
    """Return the deviation of a curve from the mean of its values five epochs before and after, over epochs 15 to 100.

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
    """Each quantity as one {epoch: value} per seed."""
    if not metrics or not all(metrics):
        return
    yield "validation accuracy", [_accuracy(rows) for rows in metrics]
    for term in metrics[0][0]["loss"]:
        yield term, [{r["epoch"]: r["loss"][term] for r in rows if term in r["loss"]} for rows in metrics]
