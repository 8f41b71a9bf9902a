"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import get_args

from protoseam.lab.engine.config import ConfigError, RunConfig, Variant


def spelled(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the options as this parser spells them: --on-nonfinite and --on_nonfinite are the same."""

    def known(word: str) -> str:
        name, equals, value = word.partition("=")
        forms = (name, "--" + name[2:].replace("-", "_"), "--" + name[2:].replace("_", "-"))
        found = next((form for form in forms if form in parser._option_string_actions), name)
        return found + equals + value

    return [known(word) if word.startswith("--") else word for word in argv]


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"--{name} must be at least 1, got {value}")


def distinct(name: str, values: Sequence[object] | None) -> None:
    if values is not None and len(set(values)) < len(values):
        raise ConfigError(f"--{name} names one twice: {' '.join(map(str, values))}")


def known_variants(asked: Sequence[str]) -> list[Variant]:
    """Return the variants of these names; raise ConfigError for an unknown one."""
    known = {str(variant): variant for variant in get_args(Variant)}
    for name in asked:
        if name not in known:
            raise ConfigError(f"there is no variant {name!r}; there are {', '.join(known)}")
    return [known[name] for name in asked]


def budget_seconds(minutes: float | None) -> float | None:
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--budget-minutes must be above 0, got {minutes:g}; leave it out for no limit")
    return None if minutes is None else 60 * minutes


def one_thread() -> None:
    """Use one thread, which is fastest for very small networks, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def spare_threads(config: RunConfig) -> None:
    """Use one thread for the digits, when a run is resumed too: other threads would sum in another order."""
    if config.data == "digits":
        one_thread()
