"""A study: many runs, one small JSON file each, in a directory that can be stopped, copied and merged.

``DIR/NAME.json`` is a finished run (config, metrics of every epoch, accuracies, environment, seconds);
``DIR/unfinished/NAME/`` is one under way. Started again, a study skips what is done and picks up what was cut off.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protoseam.engine.config import ConfigError, RunConfig
from protoseam.engine.files import read_json, write_json
from protoseam.engine.rundir import RunDirectory
from protoseam.engine.session import Interrupted, train_packed

__all__ = ["Planned", "done", "read_study", "run_study"]

Planned = tuple[str, RunConfig]


def done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def run_study(
    plan: Sequence[Planned],
    folder: Path,
    *,
    pack: int = 1,
    budget_seconds: float | None = None,
    quiet: bool = False,
) -> bool:
    """Run what the plan still lacks, ``pack`` runs at a time; False if the budget ended it early."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [(name, config) for name, config in plan if not done(folder, name)]
    # runs cut off earlier come first: their checkpoints are half the work
    missing.sort(key=lambda item: not (folder / "unfinished" / item[0]).exists())
    for lo in range(0, len(missing), pack):
        group = missing[lo : lo + pack]
        left = None if budget_seconds is None else budget_seconds - (time.monotonic() - started)
        if left is not None and left <= 0:
            return False
        runs = [(config, folder / "unfinished" / name) for name, config in group]
        try:
            train_packed(runs, quiet=quiet, budget_seconds=left, resuming=True)
        except Interrupted as stop:
            if not quiet:
                print(str(stop).partition("\n")[0])
            return False
        for name, _ in group:
            _collect(folder, name)
    return True


def _collect(folder: Path, name: str) -> None:
    """Turn a finished run directory into its one file."""
    work = folder / "unfinished" / name
    directory = RunDirectory(work)
    summary = directory.read_summary()
    assert summary is not None
    summary.pop("classes")
    summary["config"]["data_root"] = None  # where the data lay on that machine is of no use on another
    environment = read_json(work / "env.json")
    row = {"name": name, **summary, "environment": environment, "metrics": directory.read_metrics()}
    write_json(folder / f"{name}.json", row)
    shutil.rmtree(work)
    if not any((folder / "unfinished").iterdir()):
        (folder / "unfinished").rmdir()


def read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """All finished runs of a study (or of several, copied together), by name."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _read(path: Path) -> dict[str, Any]:
    row = read_json(path)
    lacking = {"epochs", "test_accuracy", "config", "metrics"}.difference(row) if "rows" not in row else set()
    if lacking:  # "rows" is the toy model's file
        raise ConfigError(
            f"{path} is no finished run, it has no {', '.join(sorted(lacking))}: move it elsewhere"
        )
    return dict(row)
