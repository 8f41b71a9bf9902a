"""Settings that are left out: what they become, for catalogued data and for one's own."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import OptimConfig, RunConfig, resolved, unlike
from protoseam.lab.engine.run import Run
from protoseam.lab.experiments.recipes import NAMES, recipe
from protoseam.lab.experiments.space import apply


@pytest.mark.parametrize(("data", "batch_size", "clip"), [("digits", 128, None), ("./digits", 64, 1.0)])
def test_batch_and_clip_follow_the_data(data: str, batch_size: int, clip: float | None) -> None:
    run = Run(RunConfig(data=data, model="mlp", device="cpu", variant="baseline"), load("digits"))
    assert run.data.batch_size == batch_size  # 1,294 samples: 64 gives 20 steps
    assert run.config.optim.clip == run.optimizer.clip == clip


@pytest.mark.parametrize(("name", "lr", "decay"), [("sgd", 0.02, 5e-4), ("adamw", 1e-3, 1e-2)])
def test_rates_follow_the_optimizer(name: str, lr: float, decay: float) -> None:
    given = resolved(RunConfig(optim=OptimConfig(name=name))).optim  # type: ignore[arg-type]
    assert (given.lr, given.weight_decay) == (lr, decay)
    own = resolved(RunConfig(optim=OptimConfig(0.3, 0.0, name=name))).optim  # type: ignore[arg-type]
    assert (own.lr, own.weight_decay) == (0.3, 0.0)
    searched = resolved(apply(RunConfig(), {"optim.name": name})).optim
    assert (searched.lr, searched.weight_decay) == (lr, decay)


def test_lifting_ones_own_data_takes_more_weight_decay() -> None:
    own = RunConfig(data="./digits")
    assert resolved(own).optim.weight_decay == 0.3
    assert resolved(dataclasses.replace(own, variant="baseline")).optim.weight_decay == 0.01
    assert resolved(dataclasses.replace(own, optim=OptimConfig(weight_decay=0.1))).optim.weight_decay == 0.1


def test_weight_decay_of_ones_own_table_follows_its_steps() -> None:
    """It shrinks a weight to 1/e in ten epochs, whatever the rate; images keep theirs, in mlp too."""
    images = load("digits")
    table = dataclasses.replace(
        images,
        **{f"{part}_images": getattr(images, f"{part}_images").reshape(-1, 64) for part in ("train", "test")},
    )
    own = RunConfig(data="./digits", model="mlp", device="cpu", optim=OptimConfig(lr=0.002))
    run = Run(own, table)
    assert run.weight_decay == pytest.approx(1 / (10 * 0.002 * run.data.steps))
    assert run.optimizer.segments[0].weight_decay == run.weight_decay
    assert Run(own, images).weight_decay == 0.3
    assert Run(dataclasses.replace(own, variant="baseline"), table).weight_decay == 0.01
    given = dataclasses.replace(own, optim=OptimConfig(weight_decay=0.1))
    assert Run(given, table).weight_decay == 0.1


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_bounded_gradients_are_clipped_too(name: Literal["sgd", "adamw"]) -> None:
    assert resolved(RunConfig(data="./digits", optim=OptimConfig(name=name))).optim.clip == 1.0


def test_a_default_and_its_value_are_the_same_run() -> None:
    config = RunConfig(data="digits")
    explicit = dataclasses.replace(config, batch_size=128, optim=OptimConfig(0.02, 5e-4))
    assert unlike(config, explicit) == []
    assert unlike(config, dataclasses.replace(config, batch_size=64)) == ["batch_size: 128 there, 64 here"]
    faster = dataclasses.replace(config, optim=OptimConfig(lr=0.1))
    assert unlike(config, faster) == ["optim.lr: 0.02 there, 0.1 here"]  # and not the whole table


@pytest.mark.parametrize("name", NAMES)
def test_recipes_have_the_papers_settings_and_none_beyond(name: str) -> None:
    config = resolved(recipe(name))
    assert config == recipe(name)  # nothing is left to a default that may change
    assert config.optim.name == "sgd"
    assert config.optim.clip is None
    assert config.batch_size == (64 if name.startswith("digits") else 128)
    beyond = (config.image_size, config.average, config.init_from)
    assert beyond == (None, None, None)
    assert config.mixup == config.cutmix == config.label_smoothing == 0
