"""What each part of the study consists of: names and configs of its runs.

Data in: a scope (which data sets, networks, seeds, …; the paper's by default); data out: lists of planned runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protoseam.lab.engine.config import LiftConfig, RunConfig
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.recipes import STUDIED, recipe
from protoseam.lab.experiments.study import Planned

__all__ = [
    "PLANS",
    "QUICK",
    "Scope",
    "cluster_name",
    "clusters",
    "sweep_k",
    "sweep_name",
    "sweep_rho",
    "table_1",
]


@dataclass(frozen=True)
class Scope:
    """Which runs belong to a study; the defaults are the paper's, with one candidate for its undescribed ViT-S.

    ``epochs=None`` and ``picture_epochs=None`` are each recipe's own number. ``sweep`` and ``picture`` are DATA-MODEL
    of the sweeps and of the cluster figure; ``note`` is printed on every output.
    """

    datasets: Sequence[str] = paper.DATASETS
    models: Sequence[str] = STUDIED
    variants: Sequence[str] = paper.VARIANTS
    seeds: Sequence[int] = paper.SEEDS
    epochs: int | None = None
    data_root: str | None = None
    sweep: str = "cifar100-vit_s_conv"
    rhos: Sequence[int] = tuple(paper.SWEEP_RHO)
    dims: Sequence[int] = tuple(paper.SWEEP_K)
    picture: str = "mnist-convnet"
    picture_epochs: int | None = None
    toy: tuple[int, int] = (200_000, 25)  # samples and seeds of the simulation (paper, §toy-numerics)
    note: str = ""

    def config(self, name: str, seed: int, epochs: int | None = None) -> RunConfig:
        """A recipe at a seed, with this scope's epochs (else ``epochs``, else the recipe's) and data folder."""
        found = recipe(name)
        return dataclasses.replace(
            found, seed=seed, data_root=self.data_root, epochs=self.epochs or epochs or found.epochs
        )


QUICK = Scope(
    datasets=("digits",),
    models=("convnet", "mlp"),
    sweep="digits-mlp",
    rhos=(1, 4, 16),
    dims=(4, 8, 32),
    picture="digits-convnet",
    picture_epochs=60,  # two dimensions take longer to sort ten classes in
    toy=(20_000, 10),
    note="quick: digits, small networks, not the paper's numbers",
)


def table_1(scope: Scope) -> list[Planned]:
    """tab:main: every data set × network × variant × seed, a seed at a time so that tables fill evenly."""
    return [
        (f"{data}-{model}-{variant}-{seed}", scope.config(f"{data}-{model}-{variant}", seed))
        for data in scope.datasets
        for model in scope.models
        for seed in scope.seeds
        for variant in scope.variants
    ]


def sweep_rho(scope: Scope) -> list[Planned]:
    """fig:penalty-sweep (a): ρmax at the usual k; the paper's is ViT-S on CIFAR-100 at k = 32."""
    return _sweep(scope, "rho_max", scope.rhos)


def sweep_k(scope: Scope) -> list[Planned]:
    """fig:penalty-sweep (b): k at the usual ρmax, 16."""
    return _sweep(scope, "dim", scope.dims)


def sweep_name(scope: Scope, setting: str, value: int, seed: int) -> str:
    """Where both settings are the usual ones, the run is Table 1's own: it is not trained twice."""
    usual = value == getattr(LiftConfig(), setting)
    return f"{scope.sweep}-protoseam-{seed}" if usual else f"sweep-{scope.sweep}-{setting}-{value}-{seed}"


def _sweep(scope: Scope, setting: str, values: Sequence[int]) -> list[Planned]:
    plan = []
    for value in values:
        for seed in scope.seeds:
            base = scope.config(f"{scope.sweep}-protoseam", seed)
            changed: dict[str, Any] = {setting: value}
            lift = dataclasses.replace(base.lift, **changed)
            lift = dataclasses.replace(lift, rho_min=min(lift.rho_min, lift.rho_max))
            plan.append((sweep_name(scope, setting, value, seed), dataclasses.replace(base, lift=lift)))
    return plan


def cluster_name(scope: Scope, variant: str) -> str:
    return f"clusters-{scope.picture}-{variant}-{scope.seeds[0]}"


def clusters(scope: Scope) -> list[Planned]:
    """fig:cluster: a seam of width 2, the first seed, test embeddings kept in the run's file."""
    plan = []
    for variant in scope.variants:
        config = scope.config(f"{scope.picture}-{variant}", scope.seeds[0], scope.picture_epochs)
        lift = dataclasses.replace(config.lift, dim=2)
        config = dataclasses.replace(config, lift=lift, keep_embeddings=2000)
        plan.append((cluster_name(scope, variant), config))
    return plan


# In this order everything is run: the tables fill first. Curves are drawn from Table 1's runs.
PLANS: dict[str, Callable[[Scope], list[Planned]]] = {
    "table1": table_1,
    "sweep-rho": sweep_rho,
    "sweep-k": sweep_k,
    "curves": table_1,
    "clusters": clusters,
}
