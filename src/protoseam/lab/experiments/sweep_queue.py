"""The trials of a sweep as an Optuna study from which any number of workers draw, each point run once.

A sweep has a fixed number of *slots*: a grid point each, or a point for the sampler to choose. A slot is one Optuna
trial that waits, runs, and is complete (or pruned: it diverged). Optuna's storage holds all of this state.

Four gaps in Optuna 5's code are closed here:

- Its grid sampler draws points at random and may draw one twice. Here every worker queues all slots at the start.
  If two queue the same slot at once, the trial with the lower number counts and the other is never run. Numbers are
  given under a lock on the study, so a worker that sees the higher one sees the lower one as well.
- On SQLite two workers can both take a waiting trial (measured with three workers: 2 of 100), because it reads and
  writes in two transactions. Here every transaction on SQLite takes the write lock first.
- It never notices a trial whose worker died before its first heartbeat. Here the heartbeat comes before the claim.
- Its retry callback fails the old trial and then queues the new one; a worker killed in between loses the slot. Here
  the first worker that finds a slot without a trial that waits, runs or is finished queues it again.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.cost import every

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial

_GRACE = 3  # heartbeats that may be missed before a worker counts as dead
_ATTEMPTS = 5
_ALREADY_FINISHED = RuntimeError  # what Optuna raises when a finished trial is to be changed, since version 4


class SweepError(ProtoSeamError, RuntimeError):
    """The sweep's storage cannot be used, or Optuna is not installed."""


def open_storage(url: str, heartbeat: int) -> RDBStorage:
    """Connect to a storage and make its tables if there are none; ``heartbeat`` in seconds."""
    try:
        from optuna.logging import WARNING, set_verbosity
        from optuna.storages import RDBStorage
        from sqlalchemy import event
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import SQLAlchemyError
        from sqlalchemy.pool import NullPool
    except ImportError as error:
        raise SweepError("a sweep needs Optuna: pip install -e '.[tune]' in the clone") from error
    set_verbosity(WARNING)
    sqlite = url.startswith("sqlite")
    # a server may drop idle connections during an epoch; SQLite makes a worker wait while another writes, and its
    # connections are cheap, so none is kept open
    options: dict[str, Any] = {"pool_pre_ping": True}
    if sqlite:
        options = {"connect_args": {"timeout": 120, "isolation_level": None}, "poolclass": NullPool}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with _experiments():
                grace = _GRACE * heartbeat
                storage = RDBStorage(url, options, heartbeat_interval=heartbeat, grace_period=grace)
            break
        except (SQLAlchemyError, ImportError, ValueError) as error:
            # workers that start together make the tables together, and all but one of them fail
            if attempt == _ATTEMPTS or not isinstance(error, SQLAlchemyError):
                shown = "given"  # what cannot be parsed may hold a password anywhere
                with suppress(SQLAlchemyError, ValueError):
                    shown = make_url(url).set(query={}).render_as_string(hide_password=True)
                said = str(error).replace(url, shown)
                if shown == "given":
                    said = "it is no address such as postgresql://user:password@host/database"
                # without its cause, which quotes the address
                raise SweepError(f"cannot use the storage {shown}: {said}") from None
            time.sleep(0.2 * attempt)
    if sqlite:

        @event.listens_for(storage.engine, "begin")
        def lock_first(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return storage


@contextmanager
def _experiments() -> Iterator[None]:
    """Ignore Optuna's warnings of features that may change, which depend on its version."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _failed(trial: FrozenTrial) -> bool:
    return bool(trial.state.name == "FAIL")


def _ended(trial: FrozenTrial) -> bool:
    return trial.state.name in ("COMPLETE", "PRUNED")


@dataclass
class Queue:
    """One Optuna study and the points of its slots; ``shared``: its workers need not share a file system."""

    study: Study
    storage: RDBStorage
    points: Sequence[dict[str, Any]]  # what each slot fixes; the sampler chooses the rest
    shared: bool

    def trials(self) -> list[list[FrozenTrial]]:
        """Return the trials of each slot, oldest first, as the storage has them now."""
        slots: list[list[FrozenTrial]] = [[] for _ in self.points]
        for trial in sorted(self.study.get_trials(deepcopy=False), key=lambda t: t.number):
            slot = trial.user_attrs.get("slot", len(slots))
            if slot < len(slots):
                slots[slot].append(trial)
        return slots

    def finished(self) -> dict[int, FrozenTrial]:
        """Return the trial that counts of each slot that is done."""
        ended = [[trial for trial in trials if _ended(trial)] for trials in self.trials()]
        return {slot: trials[0] for slot, trials in enumerate(ended) if trials}

    def refill(self) -> dict[int, FrozenTrial]:
        """Queue every slot that has no trial waiting, running or finished; return the trials still to be done."""
        if self.shared:
            from optuna.storages import fail_stale_trials

            with _experiments():
                fail_stale_trials(self.study)
        # until one look finds nothing missing: others fail trials, too, between a look and the next
        slots = self.trials()
        while lacking := [slot for slot, trials in enumerate(slots) if all(map(_failed, trials))]:
            for slot in lacking:
                # a retry is the same trial again: it keeps the point the sampler chose for the first
                point = slots[slot][-1].params if slots[slot] else {}
                self.study.enqueue_trial(dict(self.points[slot]) | point, user_attrs={"slot": slot})
            slots = self.trials()
        still_open: dict[int, FrozenTrial] = {}
        for slot, trials in enumerate(slots):
            if any(map(_ended, trials)):
                self._withdraw([trial for trial in trials if trial.state.name == "WAITING"])
            else:
                still_open[slot] = next(trial for trial in trials if not _failed(trial))
        return still_open

    def _withdraw(self, trials: Sequence[FrozenTrial | Trial]) -> None:
        import optuna

        for trial in trials:
            with suppress(_ALREADY_FINISHED):
                self.storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)

    def take(self, trial: FrozenTrial, seed: int) -> Trial | None:
        """Give the trial to this worker; None if another was faster. The caller holds the slot's directory."""
        import optuna

        now = self.storage.get_trial(trial._trial_id)
        with suppress(_ALREADY_FINISHED):
            if now.state.name == "RUNNING" and not self.shared:
                pass  # the directory was free, so the worker that ran it is dead: go on where it stopped
            elif now.state.name != "WAITING":
                return None
            else:
                self.storage.record_heartbeat(trial._trial_id)
                if not self.storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.RUNNING):
                    return None
            # one seed per slot: the first points are then the same for any number of workers
            with _experiments():
                self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            return optuna.trial.Trial(self.study, trial._trial_id)
        return None

    def tell(self, trial: Trial, value: float | None, **notes: Any) -> bool:
        """Finish a trial: its value, or None if it diverged. False if it had been given to another worker."""
        import optuna

        state = optuna.trial.TrialState.PRUNED if value is None else optuna.trial.TrialState.COMPLETE
        try:
            for name, note in notes.items():
                trial.set_user_attr(name, note)
            self.study.tell(trial, value, state)
        except (ValueError, _ALREADY_FINISHED):
            if not self.storage.get_trial(trial._trial_id).state.is_finished():
                raise
            return False
        return True

    def give_back(self, trial: Trial) -> None:
        """Let another worker have an interrupted trial; on one file system its directory shows that already."""
        if self.shared:
            self._withdraw([trial])
            self.refill()


def open_queue(
    storage: RDBStorage, name: str, points: Sequence[dict[str, Any]], shared: bool, settings: dict[str, Any]
) -> Queue:
    """Return the study of this name, made by the first worker; refuse one that was started with other settings."""
    import optuna

    study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get("settings")
    if before is None:
        study.set_user_attr("settings", settings)
    elif before != settings:
        keys = sorted(before.keys() | settings.keys())
        pairs = [(k, before.get(k), settings.get(k)) for k in keys]
        changed = [f"{k}: was {was}, is {now}" for k, was, now in pairs if was != now]
        raise ConfigError(
            f"the sweep {name} was started with other settings ({'; '.join(changed)}). Choose another --out "
            "(and --name, in a shared storage), or start with the settings it has"
        )
    return Queue(study, storage, points, shared)


@contextmanager
def heartbeats(storage: RDBStorage, trial: Trial) -> Iterator[None]:
    """Record heartbeats of this trial, at the storage's interval, while the context is open."""
    interval = storage.get_heartbeat_interval()
    assert interval is not None

    def beat() -> None:
        # training goes on if the storage does not answer; the next beat may reach it
        with suppress(Exception):
            storage.record_heartbeat(trial._trial_id)

    with every(interval, beat):
        yield
