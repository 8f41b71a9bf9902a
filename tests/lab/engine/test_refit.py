"""The last step of a run: for data of one's own, and never for the paper's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from protoseam.core.logistic import logistic_regression
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import LiftConfig, RunConfig, resolved
from protoseam.lab.engine.epoch import sweep, train_epoch
from protoseam.lab.engine.run import Run
from protoseam.seam.last_step import FeatureReader

EPOCHS = 2
OWN = RunConfig(
    data="./digits", model="mlp", device="cpu", epochs=EPOCHS, lift=LiftConfig(covariance="running")
)


def trained(config: RunConfig) -> Run:
    run = Run(config, load("digits"))
    for _ in range(EPOCHS):
        metrics = train_epoch(run)
    assert metrics["validation_accuracy"] == run.accuracy("validation")
    return run


@pytest.mark.parametrize(("covariance", "average"), [("running", None), ("exact", None), ("running", 0.9)])
def test_a_short_run_on_own_data_ends_with_the_fitted_classifier(
    covariance: str, average: float | None
) -> None:
    config = dataclasses.replace(OWN, average=average, lift=LiftConfig(covariance=covariance))
    run = trained(config)
    seam = run.objective.seam
    assert seam is not None
    with run.averaged():
        h, y = sweep(run, FeatureReader(seam))
        weight, bias = logistic_regression(h, y, 10, class_weights=torch.bincount(y).double() ** -0.5)
        found = seam.n2(torch.nn.functional.linear(h, *_last(seam))).double()
    expected = h.double() @ weight.T + bias
    assert torch.allclose(found - found.mean(1, keepdim=True), expected, atol=1e-3)
    without = trained(dataclasses.replace(config, lift=dataclasses.replace(config.lift, refit=False)))
    assert without.objective.seam is not None
    assert torch.equal(without.objective.seam.n2.weight, seam.n2.weight) is (average is not None)
    assert run.accuracy("validation") > without.accuracy("validation")


def _last(seam: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    last = FeatureReader(seam).last  # type: ignore[arg-type]
    assert last is not None
    return last.weight, last.bias


def test_who_gets_it() -> None:
    assert resolved(OWN).lift.refit
    assert not resolved(dataclasses.replace(OWN, data="digits")).lift.refit
    assert resolved(dataclasses.replace(OWN, average=0.99)).lift.refit
