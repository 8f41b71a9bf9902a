"""A loss or gradient that is not finite: the update is not applied, and the run stops, skips or rewinds."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from protoseam.lab.data.loading import load
from protoseam.lab.engine import checkpoint, session
from protoseam.lab.engine import epoch as engine_epoch
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.run import DivergedError, Run
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.step import TrainStep

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, weight_decay=1e-3, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
    checkpoint_every=1,
)


def poison(monkeypatch: pytest.MonkeyPatch, epoch: int, step: int, label: int = 3) -> None:
    """Make one class's images of one batch not finite, every time that epoch is loaded."""
    original = engine_epoch.begin_epoch

    def begin(run: Run) -> None:
        original(run)
        if run.epoch == epoch:
            rows = slice(step * run.data.local_batch, (step + 1) * run.data.local_batch)
            run.data.x[rows][run.data.y[rows] == label] = torch.nan

    monkeypatch.setattr(engine_epoch, "begin_epoch", begin)


@pytest.mark.parametrize("variant", ["baseline", "protoseam"])
def test_the_update_is_not_applied_and_step_term_and_class_are_named(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(dataclasses.replace(SMALL, variant=variant), load("digits"))
    train_epoch(run)
    poison(monkeypatch, epoch=1, step=4)
    engine_epoch.begin_epoch(run)
    for _ in range(4):
        run.step.run()
    before = {name: p.detach().clone() for name, p in run.objective.named_parameters()}
    for _ in range(run.data.steps - 4):
        run.step.run()
    for name, p in run.objective.named_parameters():
        assert torch.equal(p, before[name]), name
    step = run.data.steps + 4
    term = "total" if variant == "baseline" else "consensus"
    with pytest.raises(DivergedError, match=rf"step {step} \(epoch 2\).*the {term} loss.*class 3\."):
        engine_epoch.end_epoch(run, time.perf_counter())


def test_stop_keeps_the_last_good_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, epoch=2, step=0)
    cfg = dataclasses.replace(SMALL, checkpoint_every=100)
    with pytest.raises(
        DivergedError,
        match=r"(?s)epoch 3.*state after epoch 2 is kept.*protoseam train --resume .*same step",
    ):
        session.train(cfg, tmp_path / "run", quiet=True)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found[0] == 2
    assert all(t.isfinite().all() for t in found[1]["objective"].values() if t.is_floating_point())


def test_skip_leaves_the_bad_step_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, epoch=1, step=2)
    for covariance in ("exact", "running"):
        lift = dataclasses.replace(SMALL.lift, covariance=covariance)
        run = Run(dataclasses.replace(SMALL, on_nonfinite="skip", lift=lift), load("digits"))
        train_epoch(run)
        engine_epoch.begin_epoch(run)
        for _ in range(run.data.steps):
            run.step.run()
        state = {k: v for k, v in run.objective.state_dict().items() if v.is_floating_point()}
        assert all(v.isfinite().all() for v in state.values())
        run.data.load_epoch(1)  # the refresh sweeps the same images; here they are whole again
        row = engine_epoch.end_epoch(run, time.perf_counter())
        assert row["skipped_steps"] == 1
        assert all(map(torch.isfinite, map(torch.tensor, row["loss"].values())))


def test_skipped_steps_do_not_dilute_the_loss_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    still = dataclasses.replace(
        SMALL, variant="baseline", on_nonfinite="skip", optim=OptimConfig(lr=1e-9, warmup_epochs=0)
    )
    whole = train_epoch(Run(still, load("digits")))["loss"]["total"]
    original, calls = TrainStep.losses, [0]

    def losses(self: TrainStep, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return original(self, x, y) + (torch.inf if calls[0] <= 5 else 0.0)

    monkeypatch.setattr(TrainStep, "losses", losses)
    row = train_epoch(Run(still, load("digits")))
    assert row["skipped_steps"] == 5
    assert row["loss"]["total"] == pytest.approx(whole, rel=0.1)


def test_rewind_recovers_from_an_abrupt_rho(tmp_path: Path) -> None:
    """A linear N1 whose rate is too large for the ρ to come grows without bound; halved rates do not."""
    cfg = dataclasses.replace(
        SMALL,
        model_options={"hidden": []},
        epochs=12,
        optim=OptimConfig(lr=0.1, weight_decay=1e-3, warmup_epochs=0.0),
        lift=LiftConfig(dim=6, rho_min=1.0, rho_max=16.0),
        on_nonfinite="rewind",
    )
    with pytest.raises(DivergedError, match=r"the weights have grown to .* by epoch 1"):
        session.train(dataclasses.replace(cfg, on_nonfinite="stop"), tmp_path / "stop", quiet=True)
    with pytest.warns(session.DivergenceWarning) as record:
        summary = session.train(cfg, tmp_path / "rewind", quiet=True)
    said = [str(warning.message) for warning in record]
    assert "Going back to epoch 0 with learning rates times 0.5" in said[0]
    assert summary["test_accuracy"] > 0.3  # a lost network guesses one in ten
    rows = [row["epoch"] for row in RunDirectory(tmp_path / "rewind").read_metrics()]
    assert rows == list(range(1, 13))
    found = checkpoint.latest(tmp_path / "rewind" / "checkpoints")
    assert found is not None
    assert found[1]["rate_scale"] == summary["rate_scale"] == 0.5 ** len(said)
    assert found[1]["rewinds"] == len(said)


def test_each_rewind_goes_further_back_and_a_resumed_run_goes_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three divergences in one epoch: again, from one before it, from two. A resume grants no five more."""
    begun: list[int] = []
    real_begin, real_end = engine_epoch.begin_epoch, engine_epoch.end_epoch

    def begin(run: Run) -> None:
        begun.append(run.epoch)
        real_begin(run)

    def end(run: Run, started: float) -> dict[str, Any]:
        if run.epoch == 5 and run.rate_scale > 0.2:
            raise DivergedError("inf")
        return real_end(run, started)

    monkeypatch.setattr(engine_epoch, "begin_epoch", begin)
    monkeypatch.setattr(engine_epoch, "end_epoch", end)
    cfg = dataclasses.replace(SMALL, epochs=7, on_nonfinite="rewind")
    with pytest.warns(session.DivergenceWarning):
        session.train(cfg, tmp_path / "run", quiet=True)
    assert begun == [0, 1, 2, 3, 4, 5, 5, 4, 5, 3, 4, 5, 6]

    def lost(run: Run, started: float) -> dict[str, Any]:
        raise DivergedError("inf")

    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(
        tmp_path / "run" / "checkpoints" / "epoch-000007"
    )  # an epoch from the end, three rewinds spent
    monkeypatch.setattr(engine_epoch, "end_epoch", lost)
    with pytest.warns(session.DivergenceWarning) as record, pytest.raises(DivergedError):
        session.resume(tmp_path / "run", quiet=True)
    assert sum("Going back" in str(warning.message) for warning in record) == 2


def test_a_loaded_state_brings_its_learning_rates() -> None:
    one, other = Run(SMALL, load("digits")), Run(SMALL, load("digits"))
    one.slow_down(0.5)
    other.load_state(one.state())
    assert torch.equal(other.rates, one.rates)
    assert torch.equal(other.step.rates, one.step.rates)


def test_rewinding_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, epoch=1, step=0)
    cfg: Any = dataclasses.replace(SMALL, on_nonfinite="rewind")
    with pytest.warns(session.DivergenceWarning), pytest.raises(DivergedError) as end:
        session.train(cfg, tmp_path / "run", quiet=True)
    assert "set on_nonfinite to rewind" not in str(end.value)  # it was
