"""The settings of every run: one function for each data set × network × variant, documented from its numbers.

Data in: a name, DATA-MODEL-VARIANT; data out: a config. ``protoseam train --recipe cifar100-resnet8-protoseam``;
``protoseam reproduce recipes`` lists them. The paper's own numbers come from :mod:`protoseam.lab.experiments.paper`.
"""

from __future__ import annotations

import dataclasses
import difflib
import statistics
from collections.abc import Callable
from typing import Any, cast

from protoseam.lab.engine.config import (
    CATALOGUED_BATCH,
    ConfigError,
    LiftConfig,
    OptimConfig,
    RunConfig,
    Variant,
)
from protoseam.lab.experiments import paper

__all__ = [
    "EPOCH_SECONDS",
    "MINUTES",
    "NAMES",
    "NETWORKS",
    "RECIPES",
    "STUDIED",
    "TITLES",
    "Recipe",
    "network",
    "recipe",
]

Recipe = Callable[[], RunConfig]

TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
    "mnist": "MNIST",
    "digits": "Digits",
    "resnet8": "ResNet-8",
    "vit_s": "ViT-S, linear patches",
    "vit_s_conv": "ViT-S, convolutional stem",
    "convnet": "small ConvNet",
    "mlp": "small MLP",
    "baseline": "Baseline",
    "unlifted": "Unlifted",
    "protoseam": "ProtoSeam",
}

# The paper does not describe its ViT-S, and no candidate fits all of its Baselines (docs/vit-s-search.md). Two stand
# beside its numbers; neither is called the paper's. Name → the key of the paper's numbers, options.
_ALSO: dict[str, tuple[str, dict[str, Any]]] = {"vit_s_conv": ("vit_s", {"stem": "conv"})}
STUDIED = ("resnet8", "vit_s_conv")  # the study runs these in full
NETWORKS = (*STUDIED, "vit_s")


def network(model: str) -> str:
    """The network of the paper whose numbers stand beside those of ``model``."""
    return _ALSO[model][0] if model in _ALSO else model


# Measured: minutes a run of 200 epochs on one H200, least and most, depending on how many ran side by side. A test
# holds them to the files of results/paper/.
MINUTES: dict[str, tuple[float, float]] = {
    "cifar10-resnet8-baseline": (4.9, 5.0),
    "cifar10-resnet8-unlifted": (4.9, 5.0),
    "cifar10-resnet8-protoseam": (5.4, 5.5),
    "cifar10-vit_s-baseline": (1.4, 1.4),
    "cifar10-vit_s_conv-baseline": (5.0, 5.4),
    "cifar10-vit_s_conv-unlifted": (5.1, 5.3),
    "cifar10-vit_s_conv-protoseam": (5.6, 5.8),
    "cifar100-resnet8-baseline": (5.4, 9.4),
    "cifar100-resnet8-unlifted": (5.4, 9.2),
    "cifar100-resnet8-protoseam": (4.3, 9.7),
    "cifar100-vit_s-baseline": (3.8, 4.9),
    "cifar100-vit_s-unlifted": (4.6, 4.9),
    "cifar100-vit_s-protoseam": (4.6, 5.3),
    "cifar100-vit_s_conv-baseline": (1.8, 1.8),
    "cifar100-vit_s_conv-unlifted": (1.8, 2.1),
    "cifar100-vit_s_conv-protoseam": (2.3, 2.5),
    "tinyimagenet-vit_s-baseline": (2.8, 2.8),
    "tinyimagenet-vit_s-protoseam": (4.2, 4.2),
}
# The fastest epoch, in seconds, of recipes begun and not yet run to the end (results/trials/).
EPOCH_SECONDS = {
    "cifar10-vit_s-unlifted": 0.42,
    "cifar10-vit_s-protoseam": 0.54,
    "tinyimagenet-resnet8-baseline": 3.82,
    "tinyimagenet-resnet8-unlifted": 3.84,
    "tinyimagenet-resnet8-protoseam": 4.89,
    "tinyimagenet-vit_s-unlifted": 0.83,
}

# Not the paper's: what stands in for its runs on a CPU (the digits), and the MNIST figure, whose settings it does not
# state. ConvNet on the digits: the demo's search, at 40 epochs. The rest was chosen, not searched; the MLP's lifted
# rate is .01 because at .02 one run of k = 4 was lost in a short schedule, and MNIST's .005 because its seam reads
# 3,136 features: at .02 a trial diverged as soon as ρ passed 4.
_OWN: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("digits", "convnet"): {"baseline": (0.2, 5e-4), "unlifted": (0.1, 1e-3), "protoseam": (0.01, 5e-4)},
    ("digits", "mlp"): {"baseline": (0.1, 5e-4), "unlifted": (0.1, 5e-4), "protoseam": (0.01, 5e-4)},
    ("mnist", "convnet"): {"baseline": (0.05, 5e-4), "unlifted": (0.05, 5e-4), "protoseam": (0.005, 5e-4)},
}
_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {
        "batch_size": 64,
        "epochs": 25,
        "optim": {"warmup_epochs": 1.0},
        "on_nonfinite": "rewind",
        "device": "cpu",
    },
    "mnist": {
        "batch_size": CATALOGUED_BATCH,
        "epochs": 30,
        "optim": {"warmup_epochs": 1.0},
        "lift": {"dim": 2},
        "on_nonfinite": "rewind",
    },
}


# alg:lifted: one draw per class, S and N2 trained like the rest, gradients as they are.
_PAPER_LIFT = LiftConfig(draws=1, seam_speed=1.0, bounded=False)


def _audited(config: RunConfig) -> RunConfig:
    # 20: ten looks at the theory's terms in the paper's 200 epochs, together less than a tenth of one epoch.
    return dataclasses.replace(config, audit_every=20) if config.variant == "protoseam" else config


def _of_the_paper(data: str, model: str, variant: Variant) -> Recipe:
    """tab:hyperparameters. Unlifted inherits Baseline's learning rate and weight decay (rem:confound)."""
    built, options = _ALSO.get(model, (model, {}))
    lr, decay = paper.TUNED[data, built, "protoseam" if variant == "protoseam" else "baseline"]

    def make() -> RunConfig:
        optim = OptimConfig(lr=lr, weight_decay=decay, name="sgd")
        return _audited(
            RunConfig(
                data=data,
                model=built,
                model_options=dict(options),
                variant=variant,
                epochs=paper.EPOCHS,
                batch_size=CATALOGUED_BATCH,
                optim=optim,
                lift=_PAPER_LIFT,
            )
        )

    seeds = paper.TABLE_1[data, built, variant]
    runtime = _runtime(f"{data}-{model}-{variant}")
    inherited = " (Baseline's)" if variant == "unlifted" else ""
    expect = "Compare with" if built == "vit_s" else "Expect"
    return _documented(
        make,
        data,
        model,
        variant,
        f"learning rate {lr:g}, weight decay {decay:g}{inherited}, {paper.EPOCHS} epochs",
        runtime,
        f"{expect} {statistics.fmean(seeds):.2f} % test accuracy (paper; at seeds "
        f"{', '.join(map(str, paper.SEEDS))}: {', '.join(f'{value:.2f}' for value in seeds)}).",
    )


def _runtime(name: str) -> str:
    if name in MINUTES:
        minutes = " to ".join(f"{end:g}" for end in sorted(set(MINUTES[name])))
        return f"{minutes} min on one H200, alone or beside others"
    if name in EPOCH_SECONDS:
        return f"about {EPOCH_SECONDS[name] * paper.EPOCHS / 60:.0f} min on one H200, by its fastest epoch"
    return "not measured yet"


def _of_our_own(data: str, model: str, variant: Variant) -> Recipe:
    lr, decay = _OWN[data, model][variant]

    def make() -> RunConfig:
        settings = dict(_OWN_SETTINGS[data])
        optim = OptimConfig(lr=lr, weight_decay=decay, name="sgd", **settings.pop("optim"))
        lift = dataclasses.replace(_PAPER_LIFT, **settings.pop("lift", {}))
        return _audited(
            RunConfig(
                data=data, model=model, variant=variant, augment="none", optim=optim, lift=lift, **settings
            )
        )

    epochs = _OWN_SETTINGS[data]["epochs"]
    settings = f"learning rate {lr:g}, weight decay {decay:g}, {epochs} epochs"
    runtime = "seconds on a CPU" if data == "digits" else "10 to 12 s on an H200"
    return _documented(make, data, model, variant, settings, runtime, "The paper has no such number.")


def _documented(
    make: Recipe, data: str, model: str, variant: str, settings: str, runtime: str, expected: str
) -> Recipe:
    name = f"{data}-{model}-{variant}"
    make.__name__ = make.__qualname__ = name.replace("-", "_")
    make.__doc__ = (
        f"{TITLES[data]}, {TITLES[model]}, {TITLES[variant]}: {settings}.\n\n"
        f"``protoseam train --recipe {name}``; {runtime}.\n{expected}\n"
    )
    return make


def _all() -> dict[str, Recipe]:
    variants = cast("tuple[Variant, ...]", paper.VARIANTS)
    families = [(data, model, _of_the_paper) for data in paper.DATASETS for model in NETWORKS]
    families += [(data, model, _of_our_own) for data, model in _OWN]
    return {
        f"{data}-{model}-{variant}": make(data, model, variant)
        for data, model, make in families
        for variant in variants
    }


RECIPES = _all()
NAMES: tuple[str, ...] = tuple(RECIPES)


def recipe(name: str) -> RunConfig:
    """The config of DATA-MODEL-VARIANT, e.g. ``cifar100-resnet8-protoseam``."""
    if name in RECIPES:
        return RECIPES[name]()
    longer = [known for known in NAMES if known.startswith(f"{name}-")]
    close = longer or difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(NAMES)}"
    raise ConfigError(f"there is no recipe {name!r}; {hint}")
