"""A run's probabilities: one temperature from the validation data, for data of one's own and never for the paper's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from protoseam.core import fit_temperature, negative_log_likelihood
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import RunConfig, Variant, resolved
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.session import train

OWN = RunConfig(data="./digits", model="mlp", device="cpu", epochs=3)


def answers(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = next(iter(run.data.batches("validation")))
    with torch.no_grad():
        return run.deployed()(x), y


@pytest.mark.parametrize("variant", ["baseline", "unlifted", "protoseam"])
@pytest.mark.parametrize("average", [None, 0.9])
def test_the_deployed_network_has_the_temperature(variant: Variant, average: float | None) -> None:
    run = Run(dataclasses.replace(OWN, variant=variant, average=average), load("digits"))
    train_epoch(run)
    state = {name: t.clone() for name, t in run.objective.state_dict().items()}
    before, y = answers(run)
    run.calibrate()
    assert run.temperature == pytest.approx(fit_temperature(before, y, prior=0.5), rel=1e-5)
    assert abs(run.temperature - 1) > 0.01
    after, _ = answers(run)
    assert torch.allclose(after, before / run.temperature, rtol=1e-4, atol=1e-5)
    assert torch.equal(after.argmax(1), before.argmax(1))
    assert all(torch.equal(t, state[name]) for name, t in run.objective.state_dict().items())  # a copy has it


def test_who_gets_it() -> None:
    assert resolved(OWN).calibrate
    assert not resolved(dataclasses.replace(OWN, data="digits")).calibrate
    few = Run(dataclasses.replace(OWN, validation=0.03), load("digits"))
    few.calibrate()
    assert len(few.data.validation[1]) < 50
    assert few.temperature == 1


def test_what_eval_reads_is_calibrated(tmp_path: Path) -> None:
    config = RunConfig(data="digits", model="mlp", device="cpu", epochs=3, variant="baseline")
    found = {}
    for calibrate in (False, True):
        summary = train(
            dataclasses.replace(config, calibrate=calibrate), tmp_path / str(calibrate), quiet=True
        )
        assert ("temperature" in summary) == calibrate
        found[calibrate] = evaluate(tmp_path / str(calibrate), split="validation", device="cpu")
    assert found[True]["nll"] < found[False]["nll"]
    assert found[True]["accuracy"] == found[False]["accuracy"]


def test_a_layer_behind_the_last_linear_is_left_alone() -> None:
    run = Run(dataclasses.replace(OWN, variant="baseline"), load("digits"))
    plain = run.deployed()
    run.objective.deploy = lambda: torch.nn.Sequential(plain, torch.nn.LogSoftmax(1))  # type: ignore[method-assign]
    run.calibrate()
    assert run.temperature == 1
    assert negative_log_likelihood(*answers(run)) > 0
