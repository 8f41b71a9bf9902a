"""The runs of each part of the study, by name and config, and the order in which the study runs them.

Data in: a scope (which data sets, networks, seeds, …; the paper's by default); data out: lists of planned runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from protoseam.lab.engine.config import LiftConfig, RunConfig
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.recipes import STUDIED, recipe
from protoseam.lab.experiments.space import apply
from protoseam.lab.experiments.study import UNTESTED, Planned


@dataclass(frozen=True)
class Scope:
    """The extent of a study; the defaults are the paper's, with one candidate for its undescribed ViT-S.

    ``epochs=None`` and ``picture_epochs=None`` stand for each recipe's own number. ``sweep`` is DATA-MODEL of the
    sweeps and the covariance runs, ``picture`` of the cluster figure, ``grid`` of Unlifted's own search. ``besides``
    names networks that are run after everything else. ``note`` is printed on every output.
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
    grid: str = "cifar100-resnet8"
    rates: Sequence[float] = paper.GRID["optim.lr"]
    decays: Sequence[float] = paper.GRID["optim.weight_decay"]
    besides: Sequence[str] = ("vit_s",)
    picture: str = "mnist-convnet"
    picture_epochs: int | None = None
    toy: tuple[int, int] = (200_000, 25)  # samples and seeds of the simulation (paper, §toy-numerics)
    note: str = ""

    def config(self, name: str, seed: int, epochs: int | None = None, **changed: Any) -> RunConfig:
        """Return a recipe at a seed, with this scope's epochs (else ``epochs``, else the recipe's) and data folder.

        ``changed`` has settings by their dotted names.
        """
        found = recipe(name)
        here = {"seed": seed, "data_root": self.data_root, "epochs": self.epochs or epochs or found.epochs}
        return apply(found, here | changed)

    def swept(self, setting: str) -> Sequence[int]:
        return {"rho_max": self.rhos, "dim": self.dims}[setting]


QUICK = Scope(
    datasets=("digits",),
    models=("convnet", "mlp"),
    sweep="digits-mlp",
    rhos=(1, 4, 16),
    dims=(4, 8, 32),
    grid="digits-mlp",
    rates=(0.05, 0.1),
    decays=(5e-4,),
    besides=(),
    picture="digits-convnet",
    picture_epochs=60,  # two dimensions take longer to sort ten classes in
    toy=(20_000, 10),
    note="quick: digits, small networks, not the paper's numbers",
)


def table_1(scope: Scope) -> list[Planned]:
    """tab:main: every data set, network, variant and seed, seed by seed so that tables fill evenly."""
    return [
        (f"{data}-{model}-{variant}-{seed}", scope.config(f"{data}-{model}-{variant}", seed))
        for data in scope.datasets
        for model in scope.models
        for seed in scope.seeds
        for variant in scope.variants
    ]


def sweep_name(scope: Scope, setting: str, value: int, seed: int) -> str:
    """Return the name of a sweep's run; at the usual settings it is Table 1's own, which is not trained twice."""
    usual = value == getattr(LiftConfig(), setting)
    return f"{scope.sweep}-protoseam-{seed}" if usual else f"sweep-{scope.sweep}-{setting}-{value}-{seed}"


def _sweep(scope: Scope, setting: str) -> list[Planned]:
    plan = []
    for value, seed in itertools.product(scope.swept(setting), scope.seeds):
        changed: dict[str, Any] = {f"lift.{setting}": value}
        if setting == "rho_max":
            changed["lift.rho_min"] = min(LiftConfig().rho_min, value)
        config = scope.config(f"{scope.sweep}-protoseam", seed, **changed)
        plan.append((sweep_name(scope, setting, value, seed), config))
    return plan


# fig:penalty-sweep: (a) ρmax at the usual k, 32, and (b) k at the usual ρmax, 16; the paper's is ViT-S on CIFAR-100.
sweep_rho = functools.partial(_sweep, setting="rho_max")
sweep_k = functools.partial(_sweep, setting="dim")


def cluster_name(scope: Scope, variant: str) -> str:
    return f"clusters-{scope.picture}-{variant}-{scope.seeds[0]}"


def clusters(scope: Scope) -> list[Planned]:
    """fig:cluster: a seam of width 2, the first seed, test embeddings kept in the run's file."""
    seed, changed = scope.seeds[0], {"lift.dim": 2, "keep_embeddings": 2000}
    return [
        (cluster_name(scope, v), scope.config(f"{scope.picture}-{v}", seed, scope.picture_epochs, **changed))
        for v in scope.variants
    ]


def covariance(scope: Scope) -> list[Planned]:
    """ProtoSeam with the two estimates of Σ̂ that need no pass of their own, on the sweeps' data and network."""
    plan = []
    for estimate, seed in itertools.product(("running", "isotropic"), scope.seeds):
        changed: dict[str, Any] = {"lift.covariance": estimate}
        config = scope.config(f"{scope.sweep}-protoseam", seed, **changed)
        plan.append((f"covariance-{scope.sweep}-{estimate}-{seed}", config))
    return plan


def grid_names(scope: Scope) -> dict[tuple[float, float], str]:
    """Return the runs of Unlifted's own search by learning rate and weight decay.

    At Baseline's settings it is Table 1's own run, which is not trained twice.
    """
    seed = scope.seeds[0]
    usual = scope.config(f"{scope.grid}-unlifted", seed).optim
    names = {
        (rate, decay): f"{UNTESTED}{scope.grid}-unlifted-{rate:g}-{decay:g}-{seed}"
        for rate, decay in itertools.product(scope.rates, scope.decays)
    }
    own = {(usual.lr, usual.weight_decay): f"{scope.grid}-unlifted-{seed}"}
    return names | {point: name for point, name in own.items() if point in names}


def unlifted_grid(scope: Scope) -> list[Planned]:
    """Unlifted over the paper's grid, first seed, which removes rem:confound; the test data is left alone.

    The point that Table 1 has already is not among them.
    """
    plan = []
    for (rate, decay), name in grid_names(scope).items():
        if name.startswith(UNTESTED):
            changed: dict[str, Any] = {"optim.lr": rate, "optim.weight_decay": decay}
            plan.append((name, scope.config(f"{scope.grid}-unlifted", scope.seeds[0], **changed)))
    return plan


# Curves are drawn from Table 1's runs.
PLANS: dict[str, Callable[[Scope], list[Planned]]] = {
    "table1": table_1,
    "sweep-rho": sweep_rho,
    "sweep-k": sweep_k,
    "curves": table_1,
    "clusters": clusters,
    "covariance": covariance,
    "unlifted-grid": unlifted_grid,
    # the networks that are run after everything else: ViT-S with linear patches
    "vit_s": lambda scope: table_1(dataclasses.replace(scope, models=scope.besides)),
}

# The order of the whole study, by patterns of names; what fits none comes after tinyimagenet-resnet8.
_ORDER = (
    "tinyimagenet-resnet8-baseline-42",  # first: it shows whether the network is the paper's there
    "tinyimagenet-vit_s_conv-*",
    "cifar10-vit_s_conv-*",
    "tinyimagenet-resnet8-*",
    "",  # the rest of Table 1, and the cluster figure
    "sweep-*-42",
    "covariance-*",
    "sweep-*",
    f"{UNTESTED}*",
    "*-vit_s-*",
)


def agenda(parts: Sequence[str], scope: Scope) -> dict[str, tuple[str, RunConfig]]:
    """Return every run of these parts once, the most wanted first: name → the first part that has it, its config."""
    runs: dict[str, tuple[str, RunConfig]] = {}
    for part in parts:
        for name, config in PLANS[part](scope) if part in PLANS else []:
            runs.setdefault(name, (part, config))

    def rank(name: str) -> int:
        return next((i for i, pattern in enumerate(_ORDER) if fnmatchcase(name, pattern)), _ORDER.index(""))

    return {name: runs[name] for name in sorted(runs, key=rank)}
