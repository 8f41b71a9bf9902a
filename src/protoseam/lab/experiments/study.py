"""A study: many runs, one JSON file each, in a directory that can be copied and merged with others.

``DIR/NAME.json`` is a finished run (config, metrics of every epoch, accuracies, environment, cost);
``DIR/unfinished/NAME/`` is one under way. Started again, a study skips what is done and resumes what was interrupted.

Several workers may share DIR: a run belongs to the worker that holds the lock of its directory. The kernel drops the
lock with its process, so a run whose worker died is free again, and the next worker resumes it from its checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protoseam.errors import DataError, ProtoSeamError, SeamError
from protoseam.lab.data.links import refuse_links
from protoseam.lab.data.names import for_terminal
from protoseam.lab.engine.config import ConfigError, RunConfig, unlike
from protoseam.lab.engine.cost import read_cost
from protoseam.lab.engine.distributed import refuse_torchrun
from protoseam.lab.engine.files import StorageError, read_json, write_json
from protoseam.lab.engine.run import DivergedError
from protoseam.lab.engine.rundir import RunDirectory, RunLockedError
from protoseam.lab.engine.schemas import ROW, TOY, UNTESTED_ROW, problem
from protoseam.lab.engine.session import Interrupted, train

UNTESTED = "grid-"  # runs of that prefix are a search: the test data is taken away before they begin

Planned = tuple[str, RunConfig]
Claimed = tuple[str, RunConfig, RunDirectory]


class StudyError(ProtoSeamError):
    """Some runs of a study could not be finished; all others are."""


_LOOK_AGAIN = 0.5  # seconds between two looks at runs that other workers hold


def done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def working_directory(folder: Path, name: str) -> Path:
    return folder / "unfinished" / name


def run_study(
    plan: Sequence[Planned], folder: Path, *, budget_seconds: float | None = None, quiet: bool = False
) -> bool:
    """Run what the plan still lacks, one after the other; False if the budget ended it early.

    Runs that another worker holds are left to it. This worker waits for them at the end, and takes them over if the
    other dies.

    Args:
        plan: names and configs, the most wanted first; an interrupted run comes before all others.
        folder: the study's directory.
        budget_seconds: save and stop within this time; None: no limit.
        quiet: show no progress.

    Raises:
        StudyError: at the end, if runs diverged, have data that cannot be read, or have a directory that holds a run
            with other settings. All other runs are finished then.
        Interrupted: by the user; everything is saved.
    """
    refuse_torchrun("a study")
    deadline = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    waiting = False
    failed: dict[str, str] = {}

    def cut_short() -> bool:
        for name, why in failed.items():
            print(for_terminal(f"{name}: {why}"), file=sys.stderr)
        return False

    while missing := [item for item in plan if item[0] not in failed and not done(folder, item[0])]:
        left = deadline - time.monotonic()
        if left <= 0:
            return cut_short()
        claimed = _claim(missing, folder, failed)
        if claimed is not None:
            try:
                whole = _run(claimed, folder, left, quiet, failed)
            except Interrupted:
                cut_short()
                raise
            if not whole:
                return cut_short()
        elif any(name not in failed for name, _ in missing):
            if not (waiting or quiet):
                print(f"other workers hold the last {len(missing)} runs; waiting for them", flush=True)
            waiting = True
            time.sleep(min(_LOOK_AGAIN, left))
    _tidy([item for item in plan if item[0] not in failed], folder)
    if failed:
        raise StudyError("\n".join(f"{name}: {why}" for name, why in failed.items()))
    return True


def _claim(missing: list[Planned], folder: Path, failed: dict[str, str]) -> Claimed | None:
    """Lock a run that no worker holds; one that was interrupted comes first."""
    for name, config in sorted(missing, key=lambda item: not working_directory(folder, item[0]).exists()):
        directory = _claim_one(folder, name)
        if directory is None:
            continue
        if why := _another(directory, config):
            failed[name] = why
            directory.close()
            continue
        return name, config, directory
    return None


def _another(directory: RunDirectory, config: RunConfig) -> str:
    """Return why the unfinished run in a directory is not this one, or "" if it is or there is none yet."""
    if not (directory.path / "config.yaml").exists():
        return ""
    try:
        found = unlike(directory.read_config(), config)
    except ConfigError as error:
        return str(error)
    if not found:
        return ""
    return (
        f"{directory.path} holds an unfinished run with other settings ({'; '.join(found)}). Remove it to start this "
        "one, or give the study another --out"
    )


def _claim_one(folder: Path, name: str) -> RunDirectory | None:
    try:
        directory = RunDirectory.claim(working_directory(folder, name))
    except RunLockedError:
        return None
    if done(folder, name):  # finished between our look and our lock
        forget(folder, directory)
        return None
    return directory


def _run(claimed: Claimed, folder: Path, left: float, quiet: bool, failed: dict[str, str]) -> bool:
    """Train what was claimed and keep its results; False if the budget ended it, with everything saved."""
    name, config, directory = claimed
    budget = None if math.isinf(left) else left
    try:
        test = not name.startswith(UNTESTED)
        train(config, directory.path, quiet=quiet, budget_seconds=budget, held=directory, test=test)
        write_row(folder, name, directory)
        forget(folder, directory)
    except (DivergedError, SeamError, DataError) as error:
        failed[name] = str(error)
    except Interrupted as stop:
        say_stopped(stop, quiet)
        return False
    finally:
        directory.close()
    return True


def say_stopped(stop: Interrupted, quiet: bool) -> None:
    """Print why training stopped; raise Interrupted again if the user asked for it."""
    if stop.by_user:
        raise Interrupted(
            "interrupted: everything is saved, and the same command goes on", by_user=True
        ) from stop
    if not quiet:
        print(str(stop).partition(";")[0])


def write_row(folder: Path, name: str, directory: RunDirectory) -> dict[str, Any]:
    """Write the results of a finished run into its one file, which appears whole, and return them."""
    summary = directory.read_summary()
    assert summary is not None
    summary.pop("classes")
    summary["config"]["data_root"] = None  # a path of this machine
    cost = read_cost(directory.path)
    row = {
        "name": name,
        **summary,
        **({"cost": cost} if cost else {}),
        "environment": directory.read_environment(),
        "metrics": directory.read_metrics(),
    }
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
    """Return all finished runs of a study, or of several copied together, by name."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _read(path: Path) -> dict[str, Any]:
    row = read_json(path)
    schema = TOY if path.stem == "toy" else UNTESTED_ROW if path.stem.startswith(UNTESTED) else ROW
    if wrong := problem(row, schema):
        raise StorageError(f"{path} is no finished run, {wrong}: restore it, or move it elsewhere")
    return row
