"""The average of weights: against two Python loops, in evaluation, in checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from protoseam.lab.data.loading import load
from protoseam.lab.engine import session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import begin_epoch, end_epoch, train_epoch
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.run import Run
from protoseam.lab.experiments.audit import audit_run

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    epochs=2,
    augment="none",
    average=0.95,
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
)


def run_of(**changes: Any) -> Run:
    return Run(dataclasses.replace(SMALL, **changes), load("digits"))


@pytest.mark.parametrize(("variant", "model"), [("protoseam", "mlp"), ("baseline", "resnet8")])
def test_the_average_is_what_two_loops_give(variant: str, model: str) -> None:
    """After t updates: a ← d·a + (1−d)·w with d = min(decay, (1+t)/(10+t)); BatchNorm's statistics alike."""
    options = {"hidden": [32]} if model == "mlp" else {}
    run = run_of(variant=variant, model=model, model_options=options)
    begin_epoch(run)
    expected = {k: v.double().clone() for k, v in run.objective.state_dict().items() if v.is_floating_point()}
    for t in range(run.data.steps):
        run.step.run()
        decay = min(0.95, (1 + t) / (10 + t))
        for name, value in run.objective.state_dict().items():
            if name in expected:
                expected[name] = decay * expected[name] + (1 - decay) * value.double()
    end_epoch(run, time.perf_counter())
    found = run.state()["average"]["tensors"]
    assert {name for name, _ in run.objective.named_parameters()} <= set(found)
    assert any(name.endswith("running_var") for name in found) == (model == "resnet8")
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-5)
    assert not any("covariance" in name or "rho" in name for name in found)


def test_the_average_is_evaluated_and_deployed_and_training_goes_on_from_the_weights() -> None:
    run = run_of(variant="baseline", model="resnet8", model_options={})
    train_epoch(run)
    weights = {k: v.clone() for k, v in run.objective.state_dict().items()}
    average = run.state()["average"]["tensors"]
    deployed = run.deployed().state_dict()
    statistics = [name for name in average if name.endswith("running_var")]
    assert statistics
    for name, value in average.items():
        assert torch.equal(deployed[name.removeprefix("model.")], value), name
    assert any(not torch.equal(weights[name], value) for name, value in average.items())
    with run.averaged():
        logits = run.objective.eval().logits(next(run.data.batches("test"))[0])
        with run.averaged():  # within itself it changes nothing
            pass
        again = run.objective.logits(next(run.data.batches("test"))[0])
    assert torch.equal(logits, again)
    assert torch.equal(logits, run.deployed()(next(run.data.batches("test"))[0]))
    run.accuracy("validation")
    for name, value in run.objective.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_training_itself_is_not_changed_by_an_average() -> None:
    with_, without = run_of(), run_of(average=None)
    for run in (with_, without):
        train_epoch(run)
    a, b = with_.state()["objective"], without.state()["objective"]
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_step_that_does_not_count_leaves_the_average() -> None:
    run = run_of()
    train_epoch(run)
    assert run.average is not None
    before = run.average.state_dict()
    run.average.optimizer.segments[0].master.add_(1.0)
    run.average.update(torch.zeros(1, dtype=torch.int32))
    after = run.average.state_dict()
    assert torch.equal(before["count"], after["count"])
    assert all(torch.equal(value, after["tensors"][name]) for name, value in before["tensors"].items())


def test_a_run_directory_holds_the_average(tmp_path: Path) -> None:
    """What is evaluated and audited afterwards is what the run said of itself."""
    config = dataclasses.replace(SMALL, epochs=4)
    summary = session.train(config, tmp_path / "run", quiet=True)
    assert evaluate(tmp_path / "run", device="cpu")["accuracy"] == summary["test_accuracy"]
    audit = audit_run(tmp_path / "run", split="validation", device="cpu")
    assert audit["totals"]["as_sampled"]["accuracy"] == pytest.approx(
        summary["validation_accuracy"], abs=1e-6
    )
