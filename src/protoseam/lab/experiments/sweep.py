"""A sweep: one search per variant, by any number of workers, on validation accuracy alone.

``DIR/VARIANT/`` is a study directory (see :mod:`protoseam.lab.experiments.study`) with a run ``SLOT-SEED`` per slot and
seed; :mod:`protoseam.lab.experiments.sweep_queue` knows which slots are taken or done. A worker locks a slot's
directories before it takes the slot's trial, and keeps them until it has reported the trial.

Its report is ``trials.csv`` and ``trials.md``, one line per slot, best first, and ``best.yaml``, a config to train by.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protoseam.errors import ModelError, SeamError
from protoseam.lab.data.names import for_markdown
from protoseam.lab.engine.config import ConfigError, RunConfig, resolved, to_dict
from protoseam.lab.engine.distributed import refuse_torchrun
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.engine.run import DivergedError
from protoseam.lab.engine.rundir import RunDirectory, RunLockedError
from protoseam.lab.engine.session import Interrupted, train
from protoseam.lab.engine.settings import to_yaml
from protoseam.lab.experiments import study
from protoseam.lab.experiments.space import Space, apply, describe, grid, suggest
from protoseam.lab.experiments.sweep_queue import Queue, heartbeats, open_queue
from protoseam.lab.experiments.tables import Table, csv_text, markdown

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial

NOT_RUN = "not run"  # how the reason begins for a point that cannot be run
_LOOK_AGAIN = 1.0  # seconds between two looks at trials that other workers have


@dataclass(frozen=True)
class Search:
    """The search of one variant: the settings that vary, the config they belong to, and the directory of its runs."""

    base: RunConfig
    space: Space
    seeds: tuple[int, ...]
    folder: Path
    queue: Queue

    def config(self, params: dict[str, Any], seed: int) -> RunConfig:
        return dataclasses.replace(apply(self.base, params), seed=seed)

    def names(self, slot: int) -> list[str]:
        """Return the names of a slot's runs, one per seed."""
        return [f"{slot:03d}-{seed}" for seed in self.seeds]

    def places(self, slot: int) -> list[Path]:
        return [study.working_directory(self.folder, name) for name in self.names(slot)]


Say = Callable[[Search, int, dict[str, Any]], None]


def plan_search(
    base: RunConfig,
    space: Space,
    seeds: Sequence[int],
    folder: Path,
    storage: RDBStorage,
    *,
    name: str,
    shared: bool,
    trials: int | None = None,
) -> Search:
    """Queue up the search of ``base``'s variant: every combination, or ``trials`` points of the sampler's choice."""
    if not base.validation:
        raise ConfigError("a sweep needs validation accuracy, but validation=0 holds nothing out: use 0.1")
    points = grid(space) if trials is None else [{} for _ in range(trials)]
    # where it runs may differ from machine to machine; everything else must not
    settings = to_dict(dataclasses.replace(resolved(base), data_root=None, device="auto"))
    settings |= {"space": describe(space), "seeds": list(seeds), "grid": trials is None}
    queue = open_queue(storage, name, points, shared, json.loads(json.dumps(settings)))
    return Search(base, space, tuple(seeds), folder, queue)


def run_sweep(
    searches: Sequence[Search],
    *,
    budget_seconds: float | None = None,
    quiet: bool = False,
    say: Say = lambda *_: None,
) -> bool:
    """Work until every slot of every search is done, by this worker or another; False if the budget ended it.

    ``say(search, slot, row)`` is called for each trial that this worker has finished.
    """
    refuse_torchrun("a sweep")
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    while waiting := [(s, slot, t) for s in searches for slot, t in s.queue.refill().items()]:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        with ExitStack() as locks:
            claim = _claim(waiting, locks, say)
            if claim is not None and not _work(claim, deadline, quiet, say):
                return False
        if claim is None:  # other workers have the rest; if one dies, its trial comes back
            time.sleep(_LOOK_AGAIN)
    _tidy(searches)
    return True


@dataclass(frozen=True)
class _Claim:
    """A trial that this worker owns, and the directories of its runs, one per seed."""

    search: Search
    slot: int
    trial: Trial
    params: dict[str, Any]
    directories: list[RunDirectory]


def _claim(waiting: list[tuple[Search, int, FrozenTrial]], locks: ExitStack, say: Say) -> _Claim | None:
    """Take a trial for this worker, one with a checkpoint here first. Impossible ones end here."""
    for search, slot, trial in sorted(waiting, key=lambda item: not item[0].places(item[1])[0].exists()):
        if search.queue.shared and trial.state.name == "RUNNING":
            continue
        with ExitStack() as mine:
            directories = _lock(search, slot, mine)
            if directories is None:
                continue
            taken = search.queue.take(trial, seed=slot)
            if taken is None:
                for directory in directories:
                    if not (directory.path / "config.yaml").exists():  # made for the lock alone
                        study.forget(search.folder, directory)
                continue
            claim = _Claim(search, slot, taken, suggest(taken, search.space), directories)
            try:
                for seed in search.seeds:
                    search.config(claim.params, seed)
            except ConfigError as error:
                _finish(claim, f"{NOT_RUN}: its settings do not go together ({error})", say)
                continue
            locks.push(mine.pop_all())
            return claim
    return None


def _lock(search: Search, slot: int, locks: ExitStack) -> list[RunDirectory] | None:
    """Return all directories of the slot, locked, or None while another worker of this machine has one."""
    try:
        return [locks.enter_context(RunDirectory.claim(place)) for place in search.places(slot)]
    except RunLockedError:
        return None


def _work(claim: _Claim, deadline: float | None, quiet: bool, say: Say) -> bool:
    """Train a trial and report it; False if it was interrupted, with everything saved."""
    try:
        with heartbeats(claim.search.queue.storage, claim.trial):
            _finish(claim, _train(claim, deadline, quiet), say)
    except Interrupted as stop:
        claim.search.queue.give_back(claim.trial)
        study.say_stopped(stop, quiet)
        return False
    return True


def _train(claim: _Claim, deadline: float | None, quiet: bool) -> str | None:
    """Train a trial's runs, one after the other; return None, or why one diverged or cannot be run."""
    try:
        for seed, directory in zip(claim.search.seeds, claim.directories, strict=True):
            config = claim.search.config(claim.params, seed)
            left = None if deadline is None else deadline - time.monotonic()
            train(config, directory.path, held=directory, quiet=quiet, budget_seconds=left, test=False)
    except (DivergedError, SeamError) as error:
        return str(error).partition("\n")[0]
    except ModelError as error:  # such as an image size that the network does not take
        return f"{NOT_RUN}: {error}"
    return None


def _finish(claim: _Claim, diverged: str | None, say: Say) -> None:
    """Keep the results, report the value, and then remove the directories."""
    search, value = claim.search, None
    notes: dict[str, Any] = {"diverged": diverged}
    if diverged is None:
        pairs = zip(search.names(claim.slot), claim.directories, strict=True)
        rows = [study.write_row(search.folder, name, directory) for name, directory in pairs]
        accuracies = [row["validation_accuracy"] for row in rows]
        slowed = [row["rate_scale"] for row in rows if "rate_scale" in row]
        if None in accuracies:
            raise ConfigError(
                f"validation={search.base.validation:g} holds none of these few samples out, and a sweep needs "
                "validation accuracy: raise it, and choose another --out"
            )
        if slowed:  # another learning rate's accuracy is not this one's
            notes = {"diverged": f"diverged, and went on with learning rates times {min(slowed):g}"}
        else:
            value = sum(accuracies) / len(accuracies)
            notes = {"accuracies": accuracies, "seconds": sum(row["seconds"] for row in rows)}
    counted = search.queue.tell(claim.trial, value, **notes)
    for directory in claim.directories:
        study.forget(search.folder, directory)
    say(search, claim.slot, {"params": claim.params, "value": value, "counted": counted, **notes})


def _tidy(searches: Sequence[Search]) -> None:
    """Remove directories whose worker died between reporting and removing them."""
    for search in searches:
        for slot in search.queue.finished():
            with ExitStack() as locks:
                if any(place.exists() for place in search.places(slot)):
                    for directory in _lock(search, slot, locks) or []:
                        study.forget(search.folder, directory)


Row = dict[str, Any]


def collect(search: Search) -> list[Row]:
    """Return one row per slot: highest validation accuracy first, then the diverged, those not run, and the missing.

    Equal accuracies stay in the order of the slots, so the first of the grid wins.
    """
    finished = search.queue.finished()
    rows: list[Row] = []
    for slot, point in enumerate(search.queue.points):
        row: Row = {"trial": slot, "state": "missing", "params": dict(point), "accuracy": None}
        row |= {"accuracies": [], "seconds": None}
        if slot in finished:
            trial = finished[slot]
            unable = str(trial.user_attrs.get("diverged")).startswith(NOT_RUN)
            state = "done" if trial.value is not None else NOT_RUN if unable else "diverged"
            row |= {"state": state, "params": trial.params}
            row |= {"accuracy": trial.value} | {k: v for k, v in trial.user_attrs.items() if k in row}
        rows.append(row)
    order = ("done", "diverged", NOT_RUN, "missing")
    return sorted(rows, key=lambda row: (order.index(row["state"]), -(row["accuracy"] or 0.0)))


def best_config(search: Search, rows: Sequence[Row]) -> RunConfig | None:
    """Return the config of the trial with the highest validation accuracy, with the first of the tuning seeds."""
    if not rows or rows[0]["state"] != "done":
        return None
    return search.config(rows[0]["params"], search.seeds[0])


def trials_table(search: Search, rows: Sequence[Row]) -> Table:
    """Return one line per trial: its settings, accuracies and time."""
    several = search.seeds if len(search.seeds) > 1 else ()
    seeds = (f"seed {seed}" for seed in several)
    header = ("trial", *search.space, "validation accuracy, %", *seeds, "seconds")
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
    if missing:
        why += f" ({missing} of {len(rows)} are still missing)"
    return write_best(search.folder, best, why)


def write_best(folder: Path, config: RunConfig, why: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "best.yaml"
    write_atomically(path, f"# {why}\n{to_yaml(config)}".encode())
    return path
