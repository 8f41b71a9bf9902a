"""A study: many runs, one small JSON file each, in a directory that can be stopped, copied and merged.

``DIR/NAME.json`` is a finished run (config, metrics of every epoch, accuracies, environment, seconds);
``DIR/unfinished/NAME/`` is one under way. Started again, a study skips what is done and picks up what was cut off.

Several workers may share DIR: a run belongs to whoever holds the lock of its directory. The kernel drops that lock
with its process, so a run whose worker died is free again, and the next one goes on from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protoseam.engine.config import ConfigError, RunConfig
from protoseam.engine.files import read_json, write_json
from protoseam.engine.rundir import RunDirectory, RunLockedError
from protoseam.engine.session import Interrupted, train_packed

__all__ = ["Planned", "done", "forget", "read_study", "run_study", "working_directory", "write_row"]

Planned = tuple[str, RunConfig]

_LOOK_AGAIN = 0.5  # seconds between two looks at runs that other workers hold


def done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def working_directory(folder: Path, name: str) -> Path:
    return folder / "unfinished" / name


def run_study(
    plan: Sequence[Planned],
    folder: Path,
    *,
    pack: int = 1,
    budget_seconds: float | None = None,
    quiet: bool = False,
) -> bool:
    """Run what the plan still lacks, ``pack`` runs at a time; False if the budget ended it early.

    Runs that another worker holds are left to it, and waited for at the end: should it die, they are taken over.
    """
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    waiting = False
    while missing := [(name, config) for name, config in plan if not done(folder, name)]:
        left = None if budget_seconds is None else budget_seconds - (time.monotonic() - started)
        if left is not None and left <= 0:
            return False
        claimed = _claim(missing, folder, pack)
        if not claimed:
            if not (waiting or quiet):
                print(f"other workers hold the last {len(missing)} runs; waiting for them", flush=True)
            waiting = True
            time.sleep(_LOOK_AGAIN if left is None else min(_LOOK_AGAIN, left))
        elif not _run(claimed, folder, left, quiet):
            return False
    _tidy(plan, folder)
    return True


def _claim(missing: list[Planned], folder: Path, most: int) -> list[tuple[str, RunConfig, RunDirectory]]:
    """Lock up to ``most`` runs that nobody is at; those cut off earlier first: a checkpoint is half the work."""
    claimed: list[tuple[str, RunConfig, RunDirectory]] = []
    for name, config in sorted(missing, key=lambda item: not working_directory(folder, item[0]).exists()):
        directory = _claim_one(folder, name)
        if directory is not None:
            claimed.append((name, config, directory))
        if len(claimed) == most:
            break
    return claimed


def _claim_one(folder: Path, name: str) -> RunDirectory | None:
    try:
        directory = RunDirectory.claim(working_directory(folder, name))
    except RunLockedError:
        return None
    if done(folder, name):  # finished between our look and our lock
        forget(folder, directory)
        return None
    return directory


def _run(
    claimed: list[tuple[str, RunConfig, RunDirectory]], folder: Path, left: float | None, quiet: bool
) -> bool:
    """Train what was claimed and keep its results; False if it was interrupted (with everything saved)."""
    directories = [directory for _, _, directory in claimed]
    runs = [(config, directory.path) for _, config, directory in claimed]
    try:
        train_packed(runs, quiet=quiet, budget_seconds=left, held=directories)
        for name, _, directory in claimed:
            write_row(folder, name, directory)
            forget(folder, directory)
    except Interrupted as stop:
        if not quiet:
            print(str(stop).partition("\n")[0])
        return False
    finally:
        for directory in directories:
            directory.close()
    return True


def write_row(folder: Path, name: str, directory: RunDirectory) -> dict[str, Any]:
    """Put all that is worth keeping of a finished run into its one file, which appears whole."""
    summary = directory.read_summary()
    assert summary is not None
    summary.pop("classes")
    summary["config"]["data_root"] = None  # where the data lay on that machine is of no use on another
    environment = read_json(directory.path / "env.json")
    row = {"name": name, **summary, "environment": environment, "metrics": directory.read_metrics()}
    write_json(folder / f"{name}.json", row)
    return row


def forget(folder: Path, directory: RunDirectory) -> None:
    """Remove the directory of a run whose results are kept."""
    directory.remove()
    with suppress(OSError):  # other runs are still in it
        (folder / "unfinished").rmdir()


def _tidy(plan: Sequence[Planned], folder: Path) -> None:
    """Remove directories whose worker died between keeping the results and clearing up."""
    for name, _ in plan:
        if working_directory(folder, name).exists():
            _claim_one(folder, name)


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
