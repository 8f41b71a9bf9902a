"""Mixed images and smoothed labels in the lifted objective."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protoseam.core import prototype_gradient
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import begin_epoch, train_epoch
from protoseam.lab.engine.objectives import Lifting
from protoseam.lab.engine.run import Run

B, C, K = 12, 5, 3
SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
)


def run_of(**changes: Any) -> Run:
    return Run(dataclasses.replace(SMALL, **changes), load("digits"))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_prototypes_gradient_is_autograds(mixed: bool) -> None:
    z, s = torch.randn(B, K, dtype=torch.float64), torch.randn(C, K, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, C, (B,))
    q = F.one_hot(y, C).double()
    if mixed:
        q = 0.3 * q + 0.7 * q.roll(1, 0)
    rho = 1.7
    consensus = 0.5 * rho * (z - q @ s).square().sum(1).mean()
    (expected,) = torch.autograd.grad(consensus + s.square().sum(), s)
    slope = rho / B * (z - q @ s.detach())
    found = prototype_gradient(2 * s.detach(), q if mixed else y, slope)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(prototype_gradient(2 * s.detach(), q, slope), expected)


@pytest.mark.parametrize("covariance", ["exact", "isotropic"])
def test_a_lifted_run_with_mixed_images_resumes_exactly(covariance: Any) -> None:
    lift = dataclasses.replace(SMALL.lift, covariance=covariance)
    settings: dict[str, Any] = {"mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1, "lift": lift}
    whole, first, second = (run_of(**settings) for _ in range(3))
    for _ in range(4):
        train_epoch(whole)
    for _ in range(2):
        train_epoch(first)
    second.load_state(first.state())
    for _ in range(2):
        train_epoch(second)
    a, b = whole.state()["objective"], second.state()["objective"]
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_step_minimises_the_point_form() -> None:
    """ρ/2B Σ‖N1(x̃) − Σ_c q_c s_c‖², with label smoothing in N2's loss alone."""
    run = run_of(mixup=0.5, label_smoothing=0.2)
    begin_epoch(run)
    assert isinstance(run.objective, Lifting)
    net = run.objective.net
    x, q = run.step.batch(run.step.counter)
    z = net.embed(x).detach()
    expected = 0.5 * net.rho * (z - q @ net.prototypes.detach()).square().sum(1).mean()
    run.step.run()
    assert float(run.step.sums[1]) == pytest.approx(float(expected), rel=1e-5)


def test_smoothing_changes_the_classification_term_alone() -> None:
    plain, smooth = run_of(), run_of(label_smoothing=0.3)
    for run in (plain, smooth):
        begin_epoch(run)
        run.step.run()
    a, b = plain.step.sums.tolist(), smooth.step.sums.tolist()
    assert a[1] == b[1]
    assert a[3] == b[3]
    assert a[2] != b[2]
