"""What a sweep found: all trials as a table, and the best as a config.

``trials.csv`` and ``trials.md`` have one line per slot, best first; ``best.yaml`` is a config to train with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protoseam.lab.data.names import for_markdown
from protoseam.lab.engine.config import RunConfig, Variant
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.engine.settings import to_yaml
from protoseam.lab.experiments.space import apply
from protoseam.lab.experiments.sweep import Search
from protoseam.lab.experiments.tables import Table, csv_text, markdown

Row = dict[str, Any]


def collect(search: Search) -> list[Row]:
    """Return one row per slot: highest validation accuracy first, then the diverged, then the missing.

    Equal accuracies stay in the order of the slots, so the first of the grid wins.
    """
    finished = search.queue.finished()
    rows: list[Row] = []
    for slot, point in enumerate(search.queue.points):
        row: Row = {"trial": slot, "state": "missing", "params": dict(point), "accuracy": None}
        row |= {"accuracies": [], "seconds": None}
        if slot in finished:
            trial = finished[slot]
            row |= {"state": "diverged" if trial.value is None else "done", "params": trial.params}
            row |= {"accuracy": trial.value} | {k: v for k, v in trial.user_attrs.items() if k in row}
        rows.append(row)
    order = {"done": 0, "diverged": 1, "missing": 2}
    return sorted(rows, key=lambda row: (order[row["state"]], -(row["accuracy"] or 0.0)))


def best_config(search: Search, rows: Sequence[Row]) -> RunConfig | None:
    """Return the config of the trial with the highest validation accuracy, with the first of the tuning seeds."""
    if not rows or rows[0]["state"] != "done":
        return None
    return dataclasses.replace(apply(search.base, rows[0]["params"]), seed=search.seeds[0])


def inherit(config: RunConfig, variant: Variant) -> RunConfig:
    """Return the same settings for another variant: the paper's Unlifted has Baseline's (rem:confound)."""
    return dataclasses.replace(config, variant=variant)


def trials_table(search: Search, rows: Sequence[Row]) -> Table:
    """Return one line per trial: its settings, accuracies and time."""
    several = search.seeds if len(search.seeds) > 1 else ()
    header = (
        "trial",
        *search.space,
        "validation accuracy, %",
        *(f"seed {seed}" for seed in several),
        "seconds",
    )
    lines = []
    for row in rows:
        accuracy = _percent(row["accuracy"]) if row["state"] == "done" else row["state"]
        by_seed = [_percent(a) for a in row["accuracies"]] or [""] * len(several)
        settings = [_plain(row["params"].get(key)) for key in search.space]
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        lines.append([str(row["trial"]), *settings, accuracy, *(by_seed if several else []), seconds])
    return Table("", header, lines)


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else for_markdown(str(value))


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f}"


def write_report(search: Search, rows: Sequence[Row]) -> Path | None:
    """Write the tables, and ``best.yaml`` if there is a best trial; several workers may do so at once."""
    search.folder.mkdir(parents=True, exist_ok=True)
    table = trials_table(search, rows)
    write_atomically(search.folder / "trials.md", markdown(table).encode())
    write_atomically(search.folder / "trials.csv", csv_text(table).encode())
    best = best_config(search, rows)
    if best is None:
        return None
    missing = sum(row["state"] == "missing" for row in rows)
    why = f"validation accuracy {_percent(rows[0]['accuracy'])} %, the best of {len(rows) - missing} trials"
    return write_best(
        search.folder, best, why + (f" ({missing} of {len(rows)} are still missing)" if missing else "")
    )


def write_best(folder: Path, config: RunConfig, why: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "best.yaml"
    write_atomically(path, f"# {why}\n{to_yaml(config)}".encode())
    return path
