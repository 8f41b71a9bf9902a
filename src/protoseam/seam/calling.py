"""How a network is called: with a tensor, or with a dict by name; and where its logits are in what it returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from protoseam.errors import ArgumentTypeError

LABEL_KEYS = ("labels", "label")


def may_be_compiled() -> bool:
    """Whether this process can have compiled anything: that loads dynamo, which takes seconds."""
    return "torch._dynamo" in sys.modules


def eagerly() -> AbstractContextManager[None]:
    """Within, compiled modules run as they are written: a graph leaves out hooks that are newer than it is."""
    return torch.compiler.set_stance("force_eager") if may_be_compiled() else nullcontext()


def accepted_names(model: nn.Module) -> frozenset[str] | None:
    """The names of the arguments that a forward accepts; None if it accepts every name."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def takes_one(model: nn.Module) -> bool:
    """Whether a forward can be called with one argument."""
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError:
        return False
    return True


def call(model: nn.Module, x: Any, names: frozenset[str] | None) -> Any:
    """``model(x)``, or ``model(**x)`` for a dict whose keys the forward accepts; ``.logits`` of an output object."""
    if isinstance(x, Mapping) and not x.keys().isdisjoint(LABEL_KEYS):  # N1 has no use for them
        x = {name: part for name, part in x.items() if name not in LABEL_KEYS}
    by_name = isinstance(x, Mapping) and (names is None or names.issuperset(x))
    output = model(**x) if by_name else model(x)
    if isinstance(output, Tensor | fx.Proxy):  # a proxy: the model is being traced
        return output
    return getattr(output, "logits", output)


def inputs_and_labels(batch: Any, what: str) -> tuple[Any, Any]:
    """The two parts of a batch: ``(inputs, labels, …)``, or a dict that holds labels among the inputs."""
    if isinstance(batch, Mapping):
        key = next((key for key in LABEL_KEYS if key in batch), None)
        if key is None:
            raise ArgumentTypeError(
                f"{what} found no labels in a batch with the keys {', '.join(map(repr, batch))}: name them "
                "'labels', or yield (inputs, labels) pairs"
            )
        return {name: part for name, part in batch.items() if name != key}, batch[key]
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise ArgumentTypeError(
            f"{what} needs a loader of (inputs, labels) pairs, but it yielded {type(batch).__name__}"
        )
    if len(batch) > 2 and _index_first(batch):
        raise ArgumentTypeError(
            f"{what} needs a loader whose batches begin with (inputs, labels), but they begin with an index or "
            "a label: leave it out, as in [(x, y) for _, x, y in loader]"
        )
    if (
        len(batch) > 2
        and isinstance(batch[1], Tensor)
        and not _targets(batch[1])
        and any(map(_targets, batch[2:]))
    ):
        raise ArgumentTypeError(
            f"{what} takes the second of the {len(batch)} parts of a batch for the labels, but that is "
            f"{batch[1].dtype} of shape {tuple(batch[1].shape)}: yield (inputs, labels, …) with a whole number per "
            "sample, and several inputs as a dict, ({'a': a, 'b': b}, labels)"
        )
    return batch[0], batch[1]


def _targets(part: Any) -> bool:
    """Whether a part of a batch may be its labels, or probabilities of classes."""
    if not isinstance(part, Tensor):
        return False
    if part.is_floating_point():
        return part.ndim == 2 and bool((part >= 0).all()) and bool(((part.sum(1) - 1).abs() < 1e-2).all())
    return part.ndim == 1


def _index_first(batch: Any) -> bool:
    """Whether a batch is (index, inputs, labels): one number per sample, and something larger where labels belong."""
    one, two = (part if isinstance(part, Tensor) else None for part in batch[:2])
    return one is not None and two is not None and one.ndim == 1 and two.ndim > 1
