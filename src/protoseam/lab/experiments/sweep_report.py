"""What a sweep found: all trials as a table, and the best as a config. Reads the storage, writes files, owns nothing.

``trials.csv`` and ``trials.md`` have a line for each slot, best first; ``best.yaml`` is a config to train with.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protoseam.lab.data.names import for_markdown
from protoseam.lab.engine.config import RunConfig, Variant
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.engine.settings import to_yaml
from protoseam.lab.experiments.space import apply
from protoseam.lab.experiments.sweep import Search

__all__ = ["best_config", "collect", "inherit", "markdown", "write_report"]

Row = dict[str, Any]


def collect(search: Search) -> list[Row]:
    """A row for each slot: highest validation accuracy first, then the diverged, then the missing.

    Equal accuracies stay in the order of the slots, so the first of the grid wins.
    """
    finished = search.queue.finished()
    rows = []
    for slot, point in enumerate(search.queue.points):
        trial = finished.get(slot)
        rows.append(
            {
                "trial": slot,
                "state": "missing" if trial is None else "done" if trial.value is not None else "diverged",
                "params": dict(point) if trial is None else trial.params,
                "accuracy": None if trial is None else trial.value,
                "accuracies": [] if trial is None else trial.user_attrs.get("accuracies", []),
                "seconds": None if trial is None else trial.user_attrs.get("seconds"),
            }
        )
    order = {"done": 0, "diverged": 1, "missing": 2}
    return sorted(rows, key=lambda row: (order[row["state"]], -(row["accuracy"] or 0.0)))


def best_config(search: Search, rows: Sequence[Row]) -> RunConfig | None:
    """The config of the trial with the highest validation accuracy, with the first of the tuning seeds."""
    if not rows or rows[0]["state"] != "done":
        return None
    return dataclasses.replace(apply(search.base, rows[0]["params"]), seed=search.seeds[0])


def inherit(config: RunConfig, variant: Variant) -> RunConfig:
    """The same settings for another variant: the paper's Unlifted has Baseline's (rem:confound)."""
    return dataclasses.replace(config, variant=variant)


def _cells(search: Search, rows: Sequence[Row]) -> list[list[str]]:
    head = ["trial", *search.space, "validation accuracy, %"]
    if len(search.seeds) > 1:
        head += [f"seed {seed}" for seed in search.seeds]
    cells = [[*head, "seconds"]]
    for row in rows:
        line = [str(row["trial"]), *(_plain(row["params"].get(key)) for key in search.space)]
        line.append(_percent(row["accuracy"]) if row["state"] == "done" else row["state"])
        if len(search.seeds) > 1:
            line += [_percent(a) for a in row["accuracies"]] or [""] * len(search.seeds)
        cells.append([*line, "" if row["seconds"] is None else f"{row['seconds']:.1f}"])
    return cells


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f}"


def markdown(search: Search, rows: Sequence[Row]) -> str:
    head, *body = [[for_markdown(cell) for cell in line] for line in _cells(search, rows)]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _csv(search: Search, rows: Sequence[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_cells(search, rows))
    return text.getvalue()


def write_report(search: Search, rows: Sequence[Row]) -> Path | None:
    """The tables, and ``best.yaml`` as far as there is a best; several workers may write it at once."""
    search.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(search.folder / "trials.md", markdown(search, rows).encode())
    write_atomically(search.folder / "trials.csv", _csv(search, rows).encode())
    best = best_config(search, rows)
    if best is None:
        return None
    missing = sum(row["state"] == "missing" for row in rows)
    return write_best(
        search.folder,
        best,
        f"validation accuracy {_percent(rows[0]['accuracy'])} %, the best of {len(rows) - missing} trials"
        + (f" ({missing} of {len(rows)} are still missing)" if missing else ""),
    )


def write_best(folder: Path, config: RunConfig, why: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "best.yaml"
    write_atomically(path, f"# {why}\n{to_yaml(config)}".encode())
    return path
