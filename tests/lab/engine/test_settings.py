"""Every setting of a lifted run reaches the seam, and what a run reports of it is what it is."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from protoseam.core.covariance import class_factors
from protoseam.errors import DataError
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine import epoch
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.run import Run

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
)


def config(**lift: Any) -> RunConfig:
    return dataclasses.replace(SMALL, lift=dataclasses.replace(SMALL.lift, **lift))


def run_of(
    cfg: RunConfig, epochs: int = 1, data: ArrayDataset | None = None
) -> tuple[Any, list[dict[str, Any]]]:
    run: Any = Run(cfg, load("digits") if data is None else data)
    return run, [train_epoch(run) for _ in range(epochs)]


@pytest.mark.parametrize(
    ("setting", "value", "attribute"),
    [
        ("dim", 5, "dim"),
        ("init", "random", "init"),
        ("alpha", 0.5, "alpha"),
        ("repulsion", 3.0, "repulsion_scale"),
        ("draws", 4, "draws"),
        ("class_weights", "frequency", "class_weights"),
        ("rho_max", 7.0, "schedule.rho_max"),
        ("rho_min", 2.0, "schedule.rho_min"),
        ("floor", 0.3, "covariance.floor"),
        ("structure", "diagonal", "covariance.structure"),
    ],
)
def test_a_setting_reaches_the_seam(setting: str, value: Any, attribute: str) -> None:
    net: Any = Run(config(**{setting: value}), load("digits")).objective
    found = net.net
    for name in attribute.split("."):
        found = getattr(found, name)
    assert found == value != getattr(SMALL.lift, setting)


def test_antithetic_draws_reach_the_seam() -> None:
    run, _ = run_of(config(draws=2, antithetic=True))
    assert run.objective.net.antithetic


@pytest.mark.parametrize("clean", [True, False])
def test_the_exact_covariance_is_that_of_every_training_image(clean: bool) -> None:
    """Clean, or as this epoch augmented them."""
    cfg = dataclasses.replace(config(clean_pass=clean), augment="paper")
    run, _ = run_of(cfg)
    net, data = run.objective.net.eval(), run.data
    assert len(data.x) == data.size > data.steps * data.batch_size
    x, y = (data._normalised(data.images), data.labels) if clean else (data.x, data.y)
    with torch.no_grad():
        expected = class_factors(net.embed(x), y, 10, 0.1).factors
    assert torch.allclose(net.covariance.factors, expected, rtol=1e-4, atol=1e-5)
    assert net.class_count.tolist() == data.labels.bincount().tolist()


def test_a_sweep_leaves_no_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalisation without statistics takes them from its batch, and cannot from one image."""
    run, _ = run_of(SMALL)
    half = (len(run.data.x) - 1) // 2
    assert len(run.data.x) == 2 * half + 1
    monkeypatch.setattr(epoch, "_sweep_size", lambda run: half)
    sizes: list[int] = []

    def embed(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x.flatten(1)

    monkeypatch.setattr(run.objective.seam, "embed", embed)
    z, y = epoch.sweep(run)
    assert sizes == [half, half + 1]
    assert torch.equal(z, run.data.x.flatten(1))
    assert torch.equal(y, run.data.y)


def test_a_class_smaller_than_the_rest_of_a_permutation_keeps_its_prototype() -> None:
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(50), 4)
    data = ArrayDataset(
        "few", rng.random((200, 8), np.float32), classes, rng.random((50, 8), np.float32), np.arange(50),
        tuple(map(str, range(50))),
    )  # fmt: skip
    cfg = dataclasses.replace(config(structure="shared"), data="few", validation=0.0)
    for seed in range(5):
        run, _ = run_of(dataclasses.replace(cfg, seed=seed), data=data)
        assert run.objective.net.class_count.tolist() == [4] * 50


def test_validation_every_second_epoch() -> None:
    _, rows = run_of(dataclasses.replace(SMALL, eval_every=2), 4)
    assert [row["validation_accuracy"] is None for row in rows] == [True, False, True, False]


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared"])
def test_the_seams_geometry(structure: str) -> None:
    run, (row,) = run_of(config(structure=structure))
    s = run.objective.net.prototypes.detach().double()
    factors = run.objective.net.covariance.factors.double()
    gaps = [[float((a - b).norm()) for j, b in enumerate(s) if j != i] for i, a in enumerate(s)]
    spread = [
        float(factors[0 if structure == "shared" else i].square().sum()) for i in range(10)
    ]  # tr Σ̃ of a class
    expected = {
        "prototype_norm": float(np.mean([float(a.norm()) for a in s])),
        "prototype_gap_min": min(itertools.chain(*gaps)),
        "prototype_gap_mean": float(np.mean([min(g) for g in gaps])),
        "sample_spread": float(np.sqrt(np.mean(spread))),
    }
    assert row["seam"] == pytest.approx(expected, rel=1e-5)


def test_a_class_without_a_training_image_is_named_before_training() -> None:
    digits = load("digits")
    keep = digits.train_labels != 3
    data = dataclasses.replace(
        digits, train_images=digits.train_images[keep], train_labels=digits.train_labels[keep]
    )
    with pytest.raises(DataError, match=r"class 3 has no sample.*lift\.init"):
        run_of(SMALL, data=data)
