"""What each part of the paper's study consists of: names and configs of its runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from protoseam.engine.config import RunConfig
from protoseam.experiments import paper
from protoseam.experiments.recipes import recipe
from protoseam.experiments.study import Planned

__all__ = ["sweep_k", "sweep_rho", "table_1"]


def _named(name: str, seed: int, epochs: int, data_root: str | None) -> RunConfig:
    return dataclasses.replace(recipe(name), seed=seed, epochs=epochs, data_root=data_root)


def table_1(
    datasets: Sequence[str] = paper.DATASETS,
    models: Sequence[str] = paper.MODELS,
    seeds: Sequence[int] = paper.SEEDS,
    variants: Sequence[str] = paper.VARIANTS,
    *,
    epochs: int = 200,
    data_root: str | None = None,
) -> list[Planned]:
    """tab:main: every data set × network × variant × seed, a seed at a time so that tables fill evenly."""
    return [
        (f"{data}-{model}-{variant}-{seed}", _named(f"{data}-{model}-{variant}", seed, epochs, data_root))
        for data in datasets
        for model in models
        for seed in seeds
        for variant in variants
    ]


def sweep_rho(
    seeds: Sequence[int] = paper.SEEDS, *, epochs: int = 200, data_root: str | None = None
) -> list[Planned]:
    """fig:penalty-sweep (a): ρmax at k = 32, ViT-S on CIFAR-100."""
    return _sweep("rho_max", paper.SWEEP_RHO, seeds, epochs, data_root)


def sweep_k(
    seeds: Sequence[int] = paper.SEEDS, *, epochs: int = 200, data_root: str | None = None
) -> list[Planned]:
    """fig:penalty-sweep (b): k at ρmax = 16, ViT-S on CIFAR-100."""
    return _sweep("dim", paper.SWEEP_K, seeds, epochs, data_root)


def _sweep(
    setting: str,
    values: dict[int, tuple[float, float, float]],
    seeds: Sequence[int],
    epochs: int,
    root: str | None,
) -> list[Planned]:
    plan = []
    for value in values:
        for seed in seeds:
            base = _named("cifar100-vit_s-protoseam", seed, epochs, root)
            changed: dict[str, Any] = {setting: value}
            lift = dataclasses.replace(base.lift, **changed)
            lift = dataclasses.replace(lift, rho_min=min(lift.rho_min, lift.rho_max))
            plan.append((f"sweep-{setting}-{value}-{seed}", dataclasses.replace(base, lift=lift)))
    return plan
