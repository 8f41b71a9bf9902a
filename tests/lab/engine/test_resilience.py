"""What a run does after the accidents that the torture scripts provoke at length, one by one and without chance."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from protoseam.lab.engine import checkpoint, epoch, session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.distributed import LostProcessError, Processes, naming_lost_processes
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.run import DivergedError, Run
from protoseam.lab.engine.rundir import RunDirectory

TORTURE = Path(__file__).resolve().parents[3] / "torture"
SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)


@pytest.mark.parametrize("part", ["kills", "ranks"])
def test_the_short_form_of_the_torture_holds(part: str, tmp_path: Path) -> None:
    """Every estimator and several runs killed twice; one of two ranks lost under torchrun."""
    command = [sys.executable, str(TORTURE / f"{part}.py"), "--quick", "--out", str(tmp_path / "report.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["held"] == found["tries"] > 0


def test_a_run_that_ended_between_its_last_checkpoint_and_its_results_gets_them(tmp_path: Path) -> None:
    summary = session.train(SMALL, tmp_path, quiet=True)
    weights = (tmp_path / "model.safetensors").read_bytes()
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / name).unlink()
    assert session.resume(tmp_path, quiet=True) == summary
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_a_start_cut_short_leaves_no_run_that_lacks_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def cut(source: Any, target: Any) -> None:
        replace(source, target)
        raise SystemExit  # as if killed after the first file

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(SystemExit):
        RunDirectory.create(tmp_path, SMALL)
    monkeypatch.undo()
    assert not (tmp_path / "config.yaml").exists()
    session.train(dataclasses.replace(SMALL, epochs=1), tmp_path, quiet=True)  # a second start finds it free


def test_what_a_killed_write_left_is_cleared_away_and_the_users_files_are_not(tmp_path: Path) -> None:
    session.train(dataclasses.replace(SMALL, epochs=1), tmp_path, quiet=True)
    left, theirs = tmp_path / ".model.safetensors.ab12cd34", tmp_path / ".notes.ab12cd34"
    left.touch()
    theirs.touch()
    session.resume(tmp_path, quiet=True)
    assert not left.exists()
    assert theirs.exists()


def test_saving_an_earlier_epoch_forgets_the_later_ones(tmp_path: Path) -> None:
    for number in (8, 9, 10, 5):
        checkpoint.save(tmp_path, number, {"epoch": number})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == 5


def test_a_kill_after_going_back_keeps_the_smaller_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abandoned way's checkpoints must not come back with a resume."""
    original, begun = epoch.begin_epoch, []

    def begin(run: Run) -> None:
        original(run)
        begun.append(run.epoch)
        if len(begun) in (4, 5):  # the fourth epoch, twice: back to 3, then to 2
            run.data.x.fill_(torch.nan)
        if len(begun) == 6:
            raise SystemExit  # as if killed

    monkeypatch.setattr(epoch, "begin_epoch", begin)
    config = dataclasses.replace(SMALL, on_nonfinite="rewind")
    with pytest.warns(session.DivergenceWarning), pytest.raises(SystemExit):
        session.train(config, tmp_path, quiet=True)
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert (found[0], found[1]["rate_scale"], found[1]["rewinds"]) == (begun[-1], 0.25, 2)
    session.resume(tmp_path, quiet=True)
    assert [row["epoch"] for row in RunDirectory(tmp_path).read_metrics()] == [1, 2, 3, 4]


def test_a_manifest_of_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"epoch": 1})
    file = tmp_path / "epoch-000001" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    with (
        pytest.warns(checkpoint.CheckpointWarning, match="format 3"),
        pytest.raises(checkpoint.CheckpointError),
    ):
        checkpoint.latest(tmp_path)


def test_the_systems_refusal_to_write_is_named_whatever_torch_makes_of_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"w": torch.zeros(10)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write a checkpoint .* size limit .* --resume"):
            checkpoint.save(tmp_path, 2, {"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001"]


def test_a_read_only_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session.train(dataclasses.replace(SMALL, epochs=1), tmp_path, quiet=True)

    opening = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith("lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opening(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="read-only file system"):
        session.resume(tmp_path, quiet=True)


def test_started_again_by_torchrun_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    session.train(SMALL, whole, quiet=True)
    with pytest.raises(session.Interrupted):
        session.train(SMALL, lost, quiet=True, budget_seconds=0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    other = dataclasses.replace(SMALL, optim=dataclasses.replace(SMALL.optim, lr=0.5))
    with pytest.raises(ConfigError, match=r"other settings \(optim\.lr: 0\.02 there, 0\.5 here\)"):
        session.train(other, lost, quiet=True)
    session.train(dataclasses.replace(SMALL, device="auto"), lost, quiet=True)
    assert (whole / "model.safetensors").read_bytes() == (lost / "model.safetensors").read_bytes()


def test_a_run_that_could_not_begin_does_not_hold_its_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(session.Interrupted):
        session.train(SMALL, out, quiet=True, budget_seconds=0)
    short = dataclasses.replace(SMALL, epochs=1)
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        session.train(short, out, quiet=True)
    (out / "metrics.jsonl").unlink()
    session.train(short, out, quiet=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        session.train(short, out, quiet=True)


def test_a_lost_connection_is_named_and_other_errors_are_left_alone() -> None:
    several = Processes(rank=1, world=2)
    for error in (RuntimeError("[gloo/transport] Connection closed by peer"), dist.DistBackendError("gone")):
        with (
            pytest.raises(LostProcessError, match="process 1 of 2 lost the connection"),
            naming_lost_processes(several),
        ):
            raise error
        with pytest.raises(RuntimeError, match=r"peer|gone"), naming_lost_processes(Processes()):
            raise error
    with pytest.raises(DivergedError, match=r"^1$"), naming_lost_processes(several):
        raise DivergedError("1")
    with pytest.raises(RuntimeError, match=r"^shapes$"), naming_lost_processes(several):
        raise RuntimeError("shapes")


def test_processes_that_see_different_files_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda t: t.add_(3))  # the other process is at epoch 3
    several = Processes(rank=0, world=2)
    several.agree(3, "the last checkpoint's epoch")
    with pytest.raises(LostProcessError, match=r"process 0 of 2 has 5 .* file system they share"):
        several.agree(5, "the last checkpoint's epoch")
