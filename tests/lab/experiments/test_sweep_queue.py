"""The queue's promises: trials cut off, retried, offered to others, and no trial twice."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from small_sweep import BASE, silence

from protoseam.lab.engine import session
from protoseam.lab.engine.config import RunConfig
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.experiments import sweep, sweep_queue
from protoseam.lab.experiments.space import Choice
from protoseam.lab.experiments.sweep_queue import Queue, SweepError, open_queue, open_storage

POINTS = [{"x": 1}, {"x": 2}]


def queue(path: Path, *, shared: bool = True) -> Queue:
    """What a worker that has just started holds."""
    storage = open_storage(f"sqlite:///{path}", heartbeat=60)
    return open_queue(storage, "s", POINTS, shared, {})


def take(worker: Queue, slot: int) -> optuna.trial.Trial | None:
    trial = worker.take(worker.refill()[slot], seed=0)
    if trial is not None:
        trial.suggest_categorical("x", [1, 2])
    return trial


def states(worker: Queue) -> list[list[str]]:
    return [[trial.state.name for trial in trials] for trials in worker.trials()]


def test_a_slot_queued_twice_is_offered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = queue(tmp_path / "db"), queue(tmp_path / "db")
    first.refill()
    empty: list[list[Any]] = [[], []]
    real = second.trials
    answers = iter([empty])  # the first look only
    monkeypatch.setattr(second, "trials", lambda: next(answers, None) or real())
    offered = second.refill()  # it looked before the first had queued anything
    assert states(first) == [["WAITING", "WAITING"]] * 2
    assert {slot: trial.number for slot, trial in offered.items()} == {0: 0, 1: 1}
    trial = take(first, 0)
    assert trial is not None
    assert second.take(offered[0], seed=0) is None
    assert first.tell(trial, 0.5)
    assert set(second.refill()) == {1}
    assert states(second)[0] == ["COMPLETE", "FAIL"]  # the one too many is withdrawn, not run


def test_on_sqlite_a_claim_holds_the_write_lock_from_its_first_look(tmp_path: Path) -> None:
    worker = queue(tmp_path / "db")
    other = sqlite3.connect(tmp_path / "db", timeout=0, isolation_level=None)
    with worker.storage.engine.begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.close()


def test_on_a_shared_storage_a_silent_workers_trial_is_retried(tmp_path: Path) -> None:
    dead, alive = queue(tmp_path / "db"), queue(tmp_path / "db")
    trial = take(dead, 1)
    assert trial is not None
    assert alive.take(alive.refill()[1], seed=0) is None  # it was heard of lately
    silence(tmp_path / "db")
    retried = take(alive, 1)
    assert retried is not None
    assert retried.params == trial.params == {"x": 2}
    assert retried.number != trial.number
    assert not dead.tell(trial, 0.1)  # it was only slow: what it says now does not count
    assert alive.tell(retried, 0.9)
    assert alive.finished()[1].value == 0.9


def test_a_worker_killed_while_it_claims_is_heard_to_fall_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = queue(tmp_path / "db"), queue(tmp_path / "db")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optuna.trial, "Trial", killed)
    with pytest.raises(KeyboardInterrupt):
        take(dead, 0)
    monkeypatch.undo()
    assert states(alive)[0] == ["RUNNING"]
    silence(tmp_path / "db")
    assert take(alive, 0) is not None


def test_a_slot_whose_retry_was_never_queued_is_queued(tmp_path: Path) -> None:
    worker = queue(tmp_path / "db")
    first = worker.refill()[0]
    worker.storage.set_trial_state_values(first._trial_id, optuna.trial.TrialState.FAIL)
    assert set(queue(tmp_path / "db").refill()) == {0, 1}


def test_a_slot_that_another_worker_fails_meanwhile_is_queued_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = queue(tmp_path / "db")
    first, second = (trial._trial_id for trial in worker.refill().values())
    worker.storage.set_trial_state_values(first, optuna.trial.TrialState.FAIL)
    honest = worker.study.enqueue_trial
    failed: list[int] = []

    def while_another_fails_the_second(*args: Any, **kwargs: Any) -> None:
        if not failed:
            worker.storage.set_trial_state_values(second, optuna.trial.TrialState.FAIL)
            failed.append(second)
        honest(*args, **kwargs)

    monkeypatch.setattr(worker.study, "enqueue_trial", while_another_fails_the_second)
    assert set(worker.refill()) == {0, 1}
    assert states(worker) == [["FAIL", "WAITING"]] * 2


def test_on_one_file_system_a_dead_workers_trial_goes_on(tmp_path: Path) -> None:
    dead, alive = queue(tmp_path / "db", shared=False), queue(tmp_path / "db", shared=False)
    trial, same = take(dead, 0), take(alive, 0)
    assert trial is not None
    assert same is not None
    assert same.number == trial.number
    assert alive.tell(same, 0.5)


def test_a_trial_whose_directory_is_held_is_left_alone_until_its_worker_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"sqlite:///{tmp_path / 'db'}", heartbeat=60)
    search = sweep.plan_search(
        BASE, {"optim.lr": Choice((0.05, 0.02))}, [1], tmp_path / "f", storage, name="s", shared=False
    )
    other = RunDirectory.claim(tmp_path / "f" / "unfinished" / "000-1")
    seen_while_waiting = []

    def the_other_dies(_: float) -> None:
        seen_while_waiting.append(set(search.queue.finished()))
        other.close()

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=the_other_dies, monotonic=time.monotonic))
    assert sweep.run_sweep([search], quiet=True)
    assert seen_while_waiting == [{1}]
    assert set(search.queue.finished()) == {0, 1}


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna.storages", None)
    with pytest.raises(SweepError, match=r"pip install -e '\.\[tune\]'"):
        open_storage(f"sqlite:///{tmp_path / 'db'}", heartbeat=60)


def test_a_storage_that_cannot_be_reached_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_queue, "_ATTEMPTS", 1)
    url = f"postgresql+psycopg://me:secret@/base?host={tmp_path}"
    with pytest.raises(SweepError, match=r"me:\*\*\*@") as error:
        open_storage(url, heartbeat=60)
    assert "secret" not in str(error.value)


LONGER = dataclasses.replace(BASE, epochs=3)
THREE_RATES = (0.05, 0.02, 0.01)


def search_of(folder: Path, base: RunConfig = LONGER, *, shared: bool = False) -> sweep.Search:
    """The search of a worker whose runs go to ``folder``; all of them draw from the storage beside it."""
    storage = open_storage(f"sqlite:///{folder.parent / 'db'}", heartbeat=60)
    space = {"optim.lr": Choice(THREE_RATES)}
    return sweep.plan_search(base, space, [1], folder, storage, name="s", shared=shared)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that were trained, in order. Each takes a second; nothing else takes time or waits."""
    epochs: list[int] = []
    honest = session.train_epoch

    def counted(run: Any) -> Any:
        found = honest(run)
        epochs.append(found["epoch"])
        return found

    def wait(_: float) -> None:
        pytest.fail("it waits for others, and there are none")

    clock = SimpleNamespace(monotonic=lambda: float(len(epochs)), sleep=wait)
    monkeypatch.setattr(session, "train_epoch", counted)
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(sweep, "time", clock)
    return epochs


def test_what_has_a_checkpoint_here_is_gone_on_with_first(tmp_path: Path, trained: list[int]) -> None:
    search = search_of(tmp_path / "f")
    begun = search.config({"optim.lr": THREE_RATES[2]}, seed=1)
    with pytest.raises(session.Interrupted):
        session.train(begun, tmp_path / "f" / "unfinished" / "002-1", quiet=True, budget_seconds=2.5)
    order: list[int] = []
    assert sweep.run_sweep([search], quiet=True, say=lambda _, slot, __: order.append(slot))
    assert order == [2, 0, 1]
    assert trained == [1, 2, 3] * 3


@pytest.mark.parametrize(
    "where", [{"data_root": "elsewhere"}, {"device": "cuda"}], ids=lambda w: next(iter(w))
)
def test_a_worker_may_have_its_data_or_its_device_elsewhere(tmp_path: Path, where: dict[str, Any]) -> None:
    first = search_of(tmp_path / "a", shared=True)
    second = search_of(tmp_path / "b", dataclasses.replace(LONGER, **where), shared=True)
    offered = [{slot: t.number for slot, t in s.queue.refill().items()} for s in (first, second)]
    assert offered[0] == offered[1] == {0: 0, 1: 1, 2: 2}  # one search, not one each
    theirs = [s.config({"optim.lr": 0.02}, seed=1) for s in (first, second)]
    assert theirs[1] == dataclasses.replace(theirs[0], **where)


def test_a_budget_that_ends_within_a_trial_stops_it_saved(tmp_path: Path, trained: list[int]) -> None:
    search = search_of(tmp_path / "f")
    # after the first trial's three seconds 2.5 are left: one epoch, as a second might take twice as long
    assert not sweep.run_sweep([search], quiet=True, budget_seconds=5.5)
    assert set(search.queue.finished()) == {0}
    assert trained == [1, 2, 3, 1]
    assert sweep.run_sweep([search_of(tmp_path / "f")], quiet=True)
    assert trained[4:] == [2, 3, 1, 2, 3]  # no epoch twice
    row = json.loads((tmp_path / "f" / "001-1.json").read_text())
    assert [epoch["epoch"] for epoch in row["metrics"]] == [1, 2, 3]


def test_on_a_shared_storage_a_trial_cut_off_is_offered_to_others_at_once(
    tmp_path: Path, trained: list[int]
) -> None:
    first, second = (search_of(tmp_path / name, shared=True) for name in ("a", "b"))
    assert not sweep.run_sweep([first], quiet=True, budget_seconds=2.5)
    assert trained == [1]
    assert sweep.run_sweep([second], quiet=True)  # without waiting until the first counts as dead
    assert {path.name for path in (tmp_path / "b").glob("*.json")} == {
        f"00{slot}-1.json" for slot in range(3)
    }
    assert [trial.params["optim.lr"] for trial in first.queue.finished().values()] == list(THREE_RATES)


def test_a_retried_trial_keeps_the_point_the_sampler_chose(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path / 'db'}", heartbeat=60)
    dead, alive = (open_queue(storage, "s", [{}], True, {}) for _ in range(2))
    first = dead.take(dead.refill()[0], seed=0)
    assert first is not None
    chosen = first.suggest_float("x", 0, 1)
    silence(tmp_path / "db")
    retried = alive.take(alive.refill()[0], seed=1)  # a sampler that would choose otherwise
    assert retried is not None
    assert retried.number != first.number
    assert retried.suggest_float("x", 0, 1) == chosen


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@host:port/db",
        "s3cret",
        "://me:s3cret@host",
        "foo://me:s3cret@host/db?p=s3cret",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    with pytest.raises(SweepError, match="cannot use the storage") as caught:
        open_storage(url, heartbeat=60)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_worker_is_given_up_after_three_heartbeats(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path / 'db'}", heartbeat=60)
    assert (storage.heartbeat_interval, storage.grace_period) == (60, 180)


def test_of_equal_trials_the_first_of_the_grid_is_best() -> None:
    values = {0: 0.5, 1: 0.9, 2: 0.9, 3: None}
    finished = {
        slot: SimpleNamespace(value=v, params={"x": slot}, user_attrs={}) for slot, v in values.items()
    }
    points = [{"x": slot} for slot in range(5)]
    search = SimpleNamespace(queue=SimpleNamespace(finished=lambda: finished, points=points))
    rows = sweep.collect(search)
    assert [row["trial"] for row in rows] == [1, 2, 0, 3, 4]
    assert [row["state"] for row in rows] == ["done", "done", "done", "diverged", "missing"]
