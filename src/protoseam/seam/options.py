"""The options of a seam, declared once: name, type, default, bounds and description.

``lift`` and ``Lifted`` take them as keywords, and the settings of a run read the same table. This module does not
import torch, so that a command line can show its help at once.
"""

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
)

from protoseam.errors import ArgumentError, ArgumentTypeError, ProtoSeamError

if TYPE_CHECKING:
    from torch import Tensor

    from protoseam.core.objective import Loss
    from protoseam.core.schedules import Schedule
    from protoseam.seam.covariance import AbstractCovariance

DEFAULT_DIM = 32  # paper, §protocol
ClassWeights = Literal["uniform", "frequency"]
Init = Literal["fsinit", "random", "unit"]


@dataclass(frozen=True)
class Option:
    """One option: its default, a description for people, and the values it may have.

    Args:
        default: the value where the user gives none.
        description: what the option does, and where the default comes from.
        least: the smallest number allowed, or None.
        above: a number that the value must exceed, or None.
        below: a number that the value must stay below, or None.
        choices: the words allowed, or none.
    """

    default: Any
    description: str
    least: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def bounds(self) -> str:
        """The values allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        words = {"at least": self.least, "above": self.above, "below": self.below}
        limits = [f"{word} {value:g}" for word, value in words.items() if value is not None]
        return " and ".join(["a finite number", *limits]) if limits else ""

    def check(self, name: str, value: Any, error: type[ProtoSeamError] = ArgumentError) -> None:
        """Refuse a word or a number that is out of bounds; values of other types are left to their users.

        Args:
            name: the option's name, for the message.
            value: what the user gave.
            error: the error to raise.

        Raises:
            ArgumentError: the value is out of bounds (or what ``error`` names instead).
        """
        wrong = False
        if isinstance(value, str):
            wrong = bool(self.choices) and value not in self.choices
        elif isinstance(value, int | float) and self.bounds:
            low = -math.inf if self.least is None else self.least
            inside = low <= value < (math.inf if self.below is None else self.below)
            wrong = not (inside and (self.above is None or value > self.above))
        if wrong:
            default = f"; the default is {self.default!r}" if self.default is not None else ""
            raise error(f"{name} must be {self.bounds}, got {value!r}{default}")


class Options(TypedDict, total=False):
    """The options of a seam, as keywords of ``lift``. ``OPTIONS`` has their defaults and descriptions."""

    covariance: Annotated[
        "AbstractCovariance | None",
        Option(
            None,
            "how Σ̂ is estimated, for instance ``ps.ExactCovariance()``; None: ``ps.RunningCovariance()``",
        ),
    ]
    schedule: Annotated[
        "Schedule | None",
        Option(None, "ρ as a function of ``(epoch, epochs)``; None: ``ps.SineAnneal()``, 1 to 16 (paper)"),
    ]
    init: Annotated[
        "Init | Tensor",
        Option(
            "fsinit",
            "where the prototypes start: on the class means (fsinit; paper, FSInit), at Gaussian draws (random), on "
            "the unit vectors (unit; needs k = n), or at a given ``(classes, width)`` tensor",
            choices=get_args(Init),
        ),
    ]
    alpha: Annotated[
        float,
        Option(2.0, "rate at which the repulsion of prototypes fades with their distance (paper)", above=0),
    ]
    repulsion_scale: Annotated[
        float | None,
        Option(
            None,
            "weight of the repulsion; None: ρ (paper). It sums n²/2 pairs of classes: for thousands of "
            "classes give something like 1/n",
            least=0,
        ),
    ]
    draws: Annotated[
        int | None,
        Option(
            None,
            "samples per class and step (the paper draws 1); None: enough for 64 samples per step",
            least=1,
        ),
    ]
    antithetic: Annotated[bool, Option(False, "draw noise ξ and −ξ together; ``draws`` must then be even")]
    class_weights: Annotated[
        ClassWeights,
        Option(
            "uniform",
            "weight of a class in N2's loss: 1/n (uniform; paper) or its share of the samples (frequency)",
            choices=get_args(ClassWeights),
        ),
    ]
    loss_fn: Annotated[
        "Loss | None",
        Option(
            None, "N2's loss ``(logits, labels)``, one value per sample or their mean; None: cross-entropy"
        ),
    ]
    label_smoothing: Annotated[
        float,
        Option(
            0.0, "label smoothing of N2's cross-entropy, a share; only without ``loss_fn``", least=0, below=1
        ),
    ]
    refit: Annotated[
        bool,
        Option(
            True,
            "after the last epoch, fit the two Linears around the seam as one classifier on N1's features, by logistic "
            "regression, unless samples left out of the fit speak against it; only where N2 is one Linear with a bias",
        ),
    ]


OPTIONS: dict[str, Option] = {
    name: annotated.__metadata__[0] for name, annotated in Options.__annotations__.items()
}


def checked(options: Options) -> Options:
    """Return all options, with defaults where none was given.

    Args:
        options: what the user gave.

    Returns:
        One value per option.

    Raises:
        ArgumentError: a value is out of bounds, or label smoothing was given beside a loss function.
        ArgumentTypeError: a value is of the wrong kind, or there is no option of that name.
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ArgumentTypeError(
            f"a seam has no option {', '.join(map(_and_its_place, unknown))}. help(ps.lift) lists them all"
        )
    values: Any = {name: option.default for name, option in OPTIONS.items()} | options
    for name, option in OPTIONS.items():
        _check_type(name, option, values[name])
        option.check(name, values[name])
    if values["label_smoothing"] and values["loss_fn"] is not None:
        raise ArgumentError(
            f"label_smoothing={values['label_smoothing']} belongs to the cross-entropy that loss_fn replaces: smooth "
            "inside loss_fn"
        )
    complete: Options = values
    return complete


def _and_its_place(name: str) -> str:
    """A name that is no option, with what the user may have meant."""
    # these modules import torch, and lift imports this one
    from protoseam.core.schedules import ConstantRho, SineAnneal
    from protoseam.seam.covariance import IsotropicCovariance, RunningCovariance, SwitchCovariance
    from protoseam.seam.lift import lift
    from protoseam.seam.lifted import Lifted

    homes: dict[str, Callable[..., Any]] = {
        "schedule=ps.SineAnneal": SineAnneal,
        "schedule=ps.ConstantRho": ConstantRho,
        "covariance=ps.RunningCovariance": RunningCovariance,
        "covariance=ps.SwitchCovariance": SwitchCovariance,
        "covariance=ps.IsotropicCovariance": IsotropicCovariance,
        "net.param_groups": Lifted.param_groups,
    }
    for home, takes in homes.items():
        if name in inspect.signature(takes).parameters:
            return f"{name!r} (write {home}({name}=…))"
    close = difflib.get_close_matches(name, inspect.signature(lift).parameters, n=1)
    return f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name)


def _check_type(name: str, option: Option, value: Any) -> None:
    """Refuse a value of the wrong kind; estimators, schedules, functions and tensors are left to their users."""
    kind = Options.__annotations__[name].__origin__
    if value is option.default or isinstance(kind, ForwardRef):
        return
    if get_origin(kind) is Literal:
        fits, words = isinstance(value, str), option.bounds
    elif kind is bool:
        fits, words = isinstance(value, bool), "True or False"
    else:
        number = Integral if kind == int | None else Real
        words = "a whole number" if number is Integral else "a number"
        fits = isinstance(value, number) and not isinstance(value, bool)
    if not fits:
        raise ArgumentTypeError(
            f"{name} must be {words}, got {value!r:.100}; the default is {option.default!r}"
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options(function: _Function) -> _Function:
    """Write the options into the signature and the Args of a function with ``**options``, for ``help()``.

    Args:
        function: a function whose docstring has the line ``**options: …``.

    Returns:
        The same function.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = []
    for name, annotated in Options.__annotations__.items():
        shown = getattr(annotated.__origin__, "__forward_arg__", annotated.__origin__)
        default = OPTIONS[name].default
        added.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=shown)
        )
    function.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    text = function.__doc__ or ""
    for line in [line for line in text.split("\n") if "**options: " in line]:
        indent = line[: len(line) - len(line.lstrip())]
        words = [f"{indent}{name}: {option.description}." for name, option in OPTIONS.items()]
        text = text.replace(line, "\n".join(words))
    function.__doc__ = text
    return function
