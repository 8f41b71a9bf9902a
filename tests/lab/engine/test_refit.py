"""N2 in closed form at the end of a run: for data of one's own, and never for the paper's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from protoseam.core.covariance import class_moments
from protoseam.core.discriminant import linear_discriminant
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import ConfigError, LiftConfig, RunConfig, resolved
from protoseam.lab.engine.epoch import sweep, train_epoch
from protoseam.lab.engine.run import Run

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


def test_a_short_run_on_own_data_ends_with_the_discriminant() -> None:
    run = trained(OWN)
    seam = run.objective.seam
    assert seam is not None
    z, y = sweep(run)
    _, means, (pooled,) = class_moments(z, y, 10, structure="shared")
    weight, bias = linear_discriminant(means, pooled + 0.1**2 * torch.eye(32).to(pooled))
    scale = seam.n2.weight.detach().double().norm() / weight.norm()  # no surer than N2 was
    assert 0 < scale <= 1
    assert torch.allclose(seam.n2.weight.double(), scale * weight, rtol=1e-4, atol=1e-5)
    assert torch.allclose(seam.n2.bias.double(), scale * bias, rtol=1e-4, atol=1e-4)
    without = trained(dataclasses.replace(OWN, lift=dataclasses.replace(OWN.lift, refit=False)))
    assert without.objective.seam is not None
    assert torch.equal(without.objective.seam.prototypes, seam.prototypes)
    assert not torch.equal(without.objective.seam.n2.weight, seam.n2.weight)
    assert run.accuracy("validation") > without.accuracy("validation")


def test_who_gets_it() -> None:
    assert resolved(OWN).lift.refit
    assert not resolved(dataclasses.replace(OWN, data="digits")).lift.refit
    assert not resolved(dataclasses.replace(OWN, average=0.99)).lift.refit
    with pytest.raises(ConfigError, match=r"lift\.refit sets the last N2, and average deploys an average"):
        dataclasses.replace(OWN, average=0.99, lift=LiftConfig(refit=True))
