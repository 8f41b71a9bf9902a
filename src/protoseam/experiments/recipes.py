"""The paper's settings, one function for each data set and network: tab:hyperparameters.

A recipe is a function from a variant to a config. ``protoseam train --recipe cifar100-resnet8-protoseam``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from protoseam.engine.config import ConfigError, OptimConfig, RunConfig, Variant

__all__ = ["NAMES", "recipe"]


def _tuned(
    data: str, model: str, variant: Variant, end_to_end: tuple[float, float], lifted: tuple[float, float]
) -> RunConfig:
    """Unlifted inherits Baseline's learning rate and weight decay (paper, rem:confound)."""
    lr, decay = lifted if variant == "protoseam" else end_to_end
    return RunConfig(
        data=data, model=model, variant=variant, epochs=200, optim=OptimConfig(lr=lr, weight_decay=decay)
    )


def cifar10_resnet8(variant: Variant) -> RunConfig:
    return _tuned("cifar10", "resnet8", variant, (0.02, 1e-3), (0.05, 5e-4))


def cifar10_vit_s(variant: Variant) -> RunConfig:
    return _tuned("cifar10", "vit_s", variant, (0.02, 1e-4), (0.01, 5e-4))


def cifar100_resnet8(variant: Variant) -> RunConfig:
    return _tuned("cifar100", "resnet8", variant, (0.05, 2e-3), (0.02, 2e-3))


def cifar100_vit_s(variant: Variant) -> RunConfig:
    return _tuned("cifar100", "vit_s", variant, (0.01, 1e-4), (0.01, 5e-4))


def tinyimagenet_resnet8(variant: Variant) -> RunConfig:
    return _tuned("tinyimagenet", "resnet8", variant, (0.05, 1e-3), (0.02, 2e-3))


def tinyimagenet_vit_s(variant: Variant) -> RunConfig:
    return _tuned("tinyimagenet", "vit_s", variant, (0.1, 2e-4), (0.01, 5e-4))


_FAMILIES: dict[str, Callable[[Variant], RunConfig]] = {
    "cifar10-resnet8": cifar10_resnet8,
    "cifar10-vit_s": cifar10_vit_s,
    "cifar100-resnet8": cifar100_resnet8,
    "cifar100-vit_s": cifar100_vit_s,
    "tinyimagenet-resnet8": tinyimagenet_resnet8,
    "tinyimagenet-vit_s": tinyimagenet_vit_s,
}
_VARIANTS: tuple[Variant, ...] = ("baseline", "unlifted", "protoseam")
NAMES: tuple[str, ...] = tuple(f"{family}-{variant}" for family in _FAMILIES for variant in _VARIANTS)


def recipe(name: str) -> RunConfig:
    """The config of DATA-MODEL-VARIANT, e.g. ``cifar100-resnet8-protoseam``."""
    family, _, last = name.rpartition("-")
    for variant in _VARIANTS:
        if variant == last and family in _FAMILIES:
            return _FAMILIES[family](variant)
    close = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(NAMES)}"
    raise ConfigError(f"there is no recipe {name!r}; {hint}")
