"""Parameter groups of a lifted network: N1 at the user's rate, the seam faster, the body slower where wanted."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from protoseam.errors import ArgumentError

__all__ = [
    "SEAM_SPEED",
    "FollowedGroups",
    "layer_of",
    "names_without_decay",
    "parameter_groups",
    "table_decay",
    "trainable",
]

# N2 and the prototypes learn from n samples per step and from nothing else, so at N1's rate they fall behind it. Of 10,
# 20, 40 and 100 times N1's rate, and of 1 and 5 with prototypes that started apart, 20 and 40 did best on the panel of
# first tries (results/first_try/trials.jsonl).
SEAM_SPEED = 30.0
_TABLE_EPOCHS = 10  # docs/hosts/sklearn.md has the measurement


def parameter_groups(
    n1: nn.Module,
    n2: nn.Module,
    prototypes: nn.Parameter,
    last: nn.Linear | None,
    *,
    lr: float,
    weight_decay: float | None,
    seam_lr: float | None,
    body_lr: float | None,
    prototype_lr: float | None,
    prototype_weight_decay: float | None,
) -> list[dict[str, Any]]:
    """Named groups, without the settings that were not given; ``last`` is the Linear that ends N1."""
    given = {"lr": lr, "weight_decay": weight_decay, "seam_lr": seam_lr, "body_lr": body_lr}
    given |= {"prototype_lr": prototype_lr, "prototype_weight_decay": prototype_weight_decay}
    for name, value in given.items():
        if value is not None and not value >= 0:
            raise ArgumentError(f"{name} must not be negative, got {value}")
    seam_lr = SEAM_SPEED * lr if seam_lr is None else seam_lr
    s_lr = seam_lr if prototype_lr is None else prototype_lr

    def decay(rate: float) -> float:
        """A step shrinks a weight by rate × decay: the same share at every rate. None given: the seam has none."""
        if weight_decay is None:
            return 0.0
        return weight_decay if rate in (lr, 0.0) else weight_decay * lr / rate

    s_decay = decay(s_lr) if prototype_weight_decay is None else prototype_weight_decay
    groups: list[dict[str, Any]] = [
        {"name": "n1", "params": trainable(n1), "lr": lr, "weight_decay": weight_decay},
        {"name": "n2", "params": trainable(n2), "lr": seam_lr, "weight_decay": decay(seam_lr)},
        {"name": "prototypes", "params": [prototypes], "lr": s_lr, "weight_decay": s_decay},
    ]
    if body_lr is not None:
        groups[:1] = _body_and_seam(groups[0], last, body_lr)
    return [{k: v for k, v in group.items() if v is not None} for group in groups if group["params"]]


def _body_and_seam(n1: dict[str, Any], last: nn.Linear | None, body_lr: float) -> list[dict[str, Any]]:
    """N1's group in two: the body, slower or frozen, and the Linear that ends it."""
    if last is None:
        raise ArgumentError(
            "body_lr= parts N1 before the Linear that ends it, but this N1 does not end in one"
        )
    own = {id(p) for p in last.parameters()}
    body = [p for p in n1["params"] if id(p) not in own]
    if body_lr == 0:
        for p in body:
            p.requires_grad_(False)
        body = []
    seam = [p for p in n1["params"] if id(p) in own]
    return [{**n1, "name": "body", "params": body, "lr": body_lr}, {**n1, "params": seam}]


class FollowedGroups:
    """Parameter groups as their optimizer has them now; schedulers change the rates in them.

    A torch optimizer keeps the dicts that it was made from, until its ``load_state_dict`` puts others in their place.
    So each step of an optimizer renews those that it holds.

    Args:
        groups: the groups, as ``parameter_groups`` returns them.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.now, self.given = list(groups), [float(group["lr"]) for group in groups]
        # the groups that an optimizer has may lack the names, or be fewer
        self.names, self.firsts = zip(*((group["name"], group["params"][0]) for group in groups), strict=True)
        _watch_steps()
        _FOLLOWED.update((id(first), self) for first in self.firsts)

    def rate(self, *names: str) -> float | Tensor:
        """Return the highest rate of the groups with these names, now or as given; on the device if it is a tensor."""
        chosen = [i for i, name in enumerate(self.names) if name in names]
        rates = [*(self.now[i]["lr"] for i in chosen), *(self.given[i] for i in chosen)]
        tensors = [rate for rate in rates if isinstance(rate, Tensor)]
        given = max((rate for rate in rates if not isinstance(rate, Tensor)), default=0.0)
        return torch.stack(tensors).max().clamp_(min=max(given, 1e-30)) if tensors else given


# By the first parameter of each. A network that is gone takes its groups along.
_FOLLOWED: weakref.WeakValueDictionary[int, FollowedGroups] = weakref.WeakValueDictionary()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_renew)


def _renew(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        followed = _FOLLOWED.get(id(group["params"][0])) if group["params"] else None
        if followed is not None and not any(group is mine for mine in followed.now):
            theirs = {id(p): other for other in optimizer.param_groups for p in other["params"]}
            pairs = zip(followed.firsts, followed.now, strict=True)
            followed.now = [theirs.get(id(first), mine) for first, mine in pairs]


def table_decay(lr: float, steps: int) -> float:
    """Return AdamW's weight decay for a network of Linears on a table, which N1 otherwise fits too closely.

    In ten epochs of so many steps at the full rate it shrinks a weight to 1/e. Counted in epochs the best time hardly
    changes with the sizes of network and data (Wang & Aitchison, arXiv 2405.13698).
    """
    return 1 / (_TABLE_EPOCHS * lr * steps)


def trainable(half: nn.Module) -> list[nn.Parameter]:
    """The parameters of a half that are not frozen."""
    return [p for p in half.parameters() if p.requires_grad]


def names_without_decay(**halves: nn.Module) -> set[str]:
    """What timm's ``no_weight_decay()`` of each half names, by the names that the lifted network has for it."""
    return {
        f"{half}.{name}"
        for half, module in halves.items()
        for name in getattr(module, "no_weight_decay", set)()
    }


def layer_of(matcher: dict[str, Any] | Callable[[str], Any]) -> Callable[[str], tuple[float, ...]]:
    """A timm group matcher of N1 as one of the lifted network: the ordinal of a parameter's layer, by its name.

    A dict of regular expressions is read as ``timm.models.group_with_matcher`` reads it; what matches none of them (the
    head), N2 and the prototypes come last.
    """
    expressions = []
    if isinstance(matcher, dict):
        for ordinal, spec in enumerate(matcher.values()):
            several = spec if isinstance(spec, list | tuple) else [] if spec is None else [(spec, None)]
            expressions += [(re.compile(regex), ordinal, suffix) for regex, suffix in several]

    def ordinal_of(name: str) -> tuple[float, ...]:
        if not name.startswith("n1."):
            return (math.inf,)
        own = name.removeprefix("n1.")
        if callable(matcher):
            found = matcher(own)
            return tuple(found) if isinstance(found, tuple | list) else (found,)
        for expression, ordinal, suffix in expressions:
            if match := expression.match(own):
                return tuple(map(float, (ordinal, *match.groups(), *(suffix or ()))))
        return (math.inf,)

    return ordinal_of
