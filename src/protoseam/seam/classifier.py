"""The paper's own lift: the model's last Linear becomes Linear(d→k), and N2 is Linear(k→n).

Data in: a model and the name of its classifier. Data out: the model with a seam, or, for deployment, the two
Linears put back as one plain module. Nothing here keeps state.
"""

from __future__ import annotations

import difflib
from itertools import chain
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from protoseam.errors import ArgumentError
from protoseam.seam.guards import warn


def get_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of that name ('' for a model that is a Linear), or name similar ones in the error."""
    if not name and isinstance(model, nn.Linear):
        return model
    layers = {other: layer for other, layer in model.named_modules() if other}
    if name in layers:
        return layers[name]
    close = difflib.get_close_matches(name, list(layers), n=3, cutoff=0.4)
    shown = close or [n for n in layers if "." not in n]
    raise ArgumentError(
        f"{type(model).__name__} has no layer named {name!r}. "
        f"{'Did you mean' if close else 'It has'} {', '.join(map(repr, shown))}? "
        "dict(model.named_modules()) lists them all"
    )


def refuse_meta(model: nn.Module | tuple[nn.Module, ...]) -> None:
    """Raise ValueError for a model whose parameters have shapes only, and no values."""
    for half in model if isinstance(model, tuple) else (model,):
        parts = (half.named_parameters(), half.named_buffers()) if isinstance(half, nn.Module) else ()
        for name, value in chain(*parts):
            if value.is_meta:
                raise ArgumentError(
                    f"{name!r} of {type(half).__name__} is on the meta device, where tensors have no values: build the "
                    "model on a real device, or model.to_empty(device='cpu') and load its weights"
                )


def find_classifier(model: nn.Module, num_classes: int | None) -> str:
    """The name of the last Linear, which must have ``num_classes`` outputs (if that is given)."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ArgumentError(
            f"{type(model).__name__} has no nn.Linear to lift. Cut it behind another layer: ps.lift(model, "
            "at='layer name', probe=x) with a batch of inputs x, or lift two halves: ps.lift((n1, n2), probe=x)"
        )
    matching = [n for n, m in linears.items() if num_classes is None or m.out_features == num_classes]
    if matching:
        return matching[-1]
    last, layer = list(linears.items())[-1]
    raise ArgumentError(
        f"num_classes={num_classes}, but the last Linear of {type(model).__name__}, {last!r}, has "
        f"{layer.out_features} outputs. Build the model for {num_classes} classes, or say at={last!r} "
        f"to replace that layer by a new {num_classes}-class head"
    )


def check_replaceable(model: nn.Module, name: str, layer: nn.Linear) -> None:
    """Two plain Linears take the layer's place: refuse one without sizes yet, say what is lost with another."""
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        raise ArgumentError(
            f"the last layer, {name!r}, has no sizes yet ({type(layer).__name__}): run one batch through the model, "
            "then lift it"
        )
    lost = []
    if not is_plain(layer):
        lost.append(f"what {type(layer).__name__} computes beyond Wx + b")
    if layer._forward_hooks or layer._forward_pre_hooks:
        lost.append("its hooks")
    own = f"{name}.weight" if name else "weight"
    weights = model.named_parameters(remove_duplicate=False)
    tied = [other for other, p in weights if p is layer.weight and other != own]
    if tied:
        lost.append(f"the weight it shares with {tied[0]!r}")
    if lost:
        warn(
            f"two plain Linears take the place of {name!r}. Lost with it: {', '.join(lost)}. So deploy(fold=True) has "
            "a plain Linear there, whose weights do not belong into the model as it was. To keep the layer, write the "
            "two halves yourself: ps.lift((n1, n2), …)"
        )


def is_plain(layer: nn.Linear) -> bool:
    """Whether it computes Wx + b of parameters W and b."""
    return {name for name, _ in layer.named_parameters()} <= {"weight", "bias"} and _is_affine(layer)


@torch.no_grad()
def _is_affine(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a Linear that computes Wx + b, whatever its class: timm's has a forward of its own that does."""
    if not isinstance(layer, nn.Linear):
        return False
    if type(layer).forward is nn.Linear.forward or layer.weight.is_meta:
        return True
    x = torch.linspace(-2, 2, 2 * layer.in_features).view(2, -1).to(layer.weight)
    try:
        return torch.equal(layer.forward(x), F.linear(x, layer.weight, layer.bias))
    except Exception:  # it wants more than an input
        return False


def last_layer(half: nn.Module, name: str | None = None) -> nn.Module:
    """The layer ``name`` of a half, or what it is or ends with."""
    last = half.get_submodule(name) if name else half
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    return last


def last_linear(n1: nn.Module, name: str | None) -> nn.Linear | None:
    """The Linear whose output is N1's (see :func:`last_layer`); None if that is no Linear."""
    last = last_layer(n1, name)
    return last if isinstance(last, nn.Linear) else None


def fold_linears(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """W = W2 W1, b = W2 b1 + b2, multiplied in float64: one Linear that computes what the two did."""
    folded = nn.Linear(
        first.in_features,
        second.out_features,
        bias=first.bias is not None or second.bias is not None,
        device=first.weight.device,
        dtype=first.weight.dtype,
    )
    with torch.no_grad():
        w2 = second.weight.double()
        folded.weight.copy_(w2 @ first.weight.double())
        if folded.bias is not None:
            bias = w2.new_zeros(second.out_features) if second.bias is None else second.bias.double()
            folded.bias.copy_(bias if first.bias is None else bias + w2 @ first.bias.double())
    return folded


def deploy_at(n1: nn.Module, name: str, n2: nn.Module, *, fold: bool) -> nn.Module:
    """Put N2 behind the seam layer ``name`` of ``n1`` (both already copies of the caller's)."""
    first = get_layer(n1, name) if name else n1
    if fold:
        if not (_is_affine(first) and _is_affine(n2)):
            raise ArgumentError(
                f"fold=True merges two Linears, but the seam lies between {type(first).__name__} and "
                f"{type(n2).__name__}; deploy() without fold works for every seam"
            )
        joined: nn.Module = fold_linears(first, n2)
    else:
        joined = nn.Sequential(first, n2)
    if not name:
        return joined
    n1.set_submodule(name, joined)
    return n1


def deploy_halves(n1: nn.Module, n2: nn.Module, *, fold: bool) -> nn.Module:
    """N2∘N1 of two halves; folded, the Linear that N1 is or ends with becomes one with N2."""
    if not fold:
        return nn.Sequential(n1, n2)
    last = last_layer(n1)
    *_, name = (name for name, m in n1.named_modules(remove_duplicate=False) if m is last)
    return deploy_at(n1, name, n2, fold=True)
