"""The space of a sweep: settings of a run, each with the values it may take.

Data in: words such as ``optim.lr=loguniform:1e-3:1e-1``; data out: a :class:`Choice` or :class:`Range` per setting.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protoseam.lab.engine.config import ConfigError, RunConfig, to_dict
from protoseam.lab.engine.settings import from_dict, settings

if TYPE_CHECKING:
    from optuna.trial import Trial

# these decide what is measured, or where: trials that differ in them could not be compared
_FIXED = ("data", "data_root", "device", "seed", "validation", "variant")
# What a sweep tries for AdamW, whose rates are far below the paper's for SGD: around torch's defaults.
ADAMW_GRID: dict[str, tuple[float, ...]] = {
    "optim.lr": (3e-4, 1e-3, 3e-3),
    "optim.weight_decay": (1e-4, 1e-2, 5e-2),
}
_FORMS = "choice:A,B,C  uniform:LOW:HIGH  loguniform:LOW:HIGH  int:LOW:HIGH"


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    kind: str  # uniform, loguniform or int

    @property
    def values(self) -> tuple[float, float]:
        return self.low, self.high


Space = Mapping[str, Choice | Range]


def parse_space(words: Sequence[str]) -> dict[str, Choice | Range]:
    """Return the space of ``["lift.rho_max=choice:4,8,16", …]``."""
    space: dict[str, Choice | Range] = {}
    for word in words:
        key, equals, form = word.partition("=")
        if not equals:
            raise ConfigError(f"--space {word}: write SETTING=FORM, where FORM is one of  {_FORMS}")
        _check_name(key)
        if key in space:
            raise ConfigError(f"--space names {key} twice")
        space[key] = _parse_form(word, form)
    return space


def _check_name(key: str) -> None:
    known = [name for name in settings() if name not in _FIXED]
    if key in known:
        return
    if key in _FIXED:
        raise ConfigError(
            f"{key} cannot be searched over: it decides what is measured. Start one sweep per value"
        )
    by_part = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    close = difflib.get_close_matches(key, by_part, n=1)
    hint = f"did you mean {by_part[close[0]]}?" if close else f"known are {', '.join(known)}"
    raise ConfigError(f"unknown setting {key}; {hint}")


def _parse_form(word: str, form: str) -> Choice | Range:
    kind, _, rest = form.partition(":")
    if kind == "choice":
        values = tuple(_value(text) for text in rest.split(","))
        if not rest or len(set(values)) < len(values):
            raise ConfigError(f"--space {word}: choice needs values that differ, choice:A,B,C")
        return Choice(values)
    if kind not in ("uniform", "loguniform", "int"):
        close = difflib.get_close_matches(kind, ("choice", "uniform", "loguniform", "int"), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"--space {word}: there is no form {kind!r}; {hint}the forms are  {_FORMS}")
    try:
        low, high = (int(end) if kind == "int" else float(end) for end in rest.split(":"))
    except ValueError:
        raise ConfigError(f"--space {word}: {kind} needs two numbers, {kind}:LOW:HIGH") from None
    if not (low < high and math.isfinite(low) and math.isfinite(high)) or (kind == "loguniform" and low <= 0):
        positive = " and above 0" if kind == "loguniform" else ""
        raise ConfigError(f"--space {word}: LOW must be below HIGH{positive}, and both finite")
    return Range(low, high, kind)


def _value(text: str) -> Any:
    """Return a number, a truth value, None or a word; 1e-3 is a number, which YAML takes for a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None}.get(text.lower(), text)


def grid(space: Space) -> list[dict[str, Any]]:
    """Return every combination; the first setting changes slowest."""
    endless = [key for key, values in space.items() if isinstance(values, Range)]
    if endless:
        raise ConfigError(
            f"{', '.join(endless)} is a range, and a grid needs a list: give the number of points with --trials N, "
            "or list them (choice:…)"
        )
    points = itertools.product(*(form.values for form in space.values()))
    return [dict(zip(space, point, strict=True)) for point in points]


def suggest(trial: Trial, space: Space) -> dict[str, Any]:
    """Return the trial's point: what was fixed for it or drawn before, and the sampler's choice for the rest."""
    params: dict[str, Any] = {}
    for key, values in space.items():
        if isinstance(values, Choice):
            params[key] = trial.suggest_categorical(key, values.values)
        elif values.kind == "int":
            params[key] = trial.suggest_int(key, int(values.low), int(values.high))
        else:
            params[key] = trial.suggest_float(key, values.low, values.high, log=values.kind == "loguniform")
    return params


def apply(config: RunConfig, params: Mapping[str, Any]) -> RunConfig:
    return from_dict(to_dict(config) | dict(params))


def describe(space: Space) -> dict[str, Any]:
    """Return the space as JSON, to compare with that of an earlier start."""
    return {
        key: list(values.values) if isinstance(values, Choice) else [values.kind, values.low, values.high]
        for key, values in space.items()
    }
