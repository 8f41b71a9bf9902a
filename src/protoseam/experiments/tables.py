"""Tables from raw results only: what is not there is said to be missing."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protoseam.experiments import paper

__all__ = ["Cell", "csv_table", "markdown_table", "table_1"]

TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
    "resnet8": "ResNet-8",
    "vit_s": "ViT-S",
    "baseline": "Baseline",
    "unlifted": "Unlifted",
    "protoseam": "ProtoSeam",
}


@dataclass(frozen=True)
class Cell:
    """One row of tab:main: a data set, a network and a variant over its seeds, in percent."""

    data: str
    model: str
    variant: str
    by_seed: dict[int, float]
    published: float

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        values = self.by_seed.values()
        return max(values) - min(values) if len(values) > 1 else None


def table_1(
    runs: dict[str, dict[str, Any]],
    datasets: Sequence[str] = paper.DATASETS,
    models: Sequence[str] = paper.MODELS,
    seeds: Sequence[int] = paper.SEEDS,
) -> list[Cell]:
    """tab:main from the files of a study, runs of other lengths than the paper's left out."""
    cells = []
    for data in datasets:
        for model in models:
            for variant in paper.VARIANTS:
                found = {seed: runs.get(f"{data}-{model}-{variant}-{seed}") for seed in seeds}
                by_seed = {
                    s: 100 * run["test_accuracy"] for s, run in found.items() if run and run["epochs"] == 200
                }
                published = statistics.fmean(paper.TABLE_1[data, model, variant])
                cells.append(Cell(data, model, variant, by_seed, published))
    return cells


def _columns(cell: Cell, seeds: Sequence[int]) -> list[str]:
    def shown(value: float | None, form: str = ".2f") -> str:
        return "missing" if value is None else format(value, form)

    difference = None if cell.mean is None else cell.mean - cell.published
    spread = "" if cell.spread is None else f"{cell.spread:.2f}"
    names = [TITLES[cell.data], TITLES[cell.model], TITLES[cell.variant]]
    by_seed = [shown(cell.by_seed.get(seed)) for seed in seeds]
    to_paper = "" if difference is None else f"{difference:+.2f}"
    return [*names, *by_seed, shown(cell.mean), spread, f"{cell.published:.2f}", to_paper]


def _header(seeds: Sequence[int]) -> list[str]:
    return [
        "data",
        "network",
        "variant",
        *(f"seed {s}" for s in seeds),
        "mean",
        "spread",
        "paper",
        "to paper",
    ]


def markdown_table(cells: Sequence[Cell], seeds: Sequence[int] = paper.SEEDS) -> str:
    rows = [_header(seeds), ["---"] * (7 + len(seeds)), *(_columns(cell, seeds) for cell in cells)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def csv_table(cells: Sequence[Cell], seeds: Sequence[int] = paper.SEEDS) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_header(seeds))
    writer.writerows(_columns(cell, seeds) for cell in cells)
    return text.getvalue()
