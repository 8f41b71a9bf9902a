"""The paper's own lift: the model's last Linear becomes Linear(d→k), and N2 is Linear(k→n).

Data in: a model and the name of its classifier. Data out: the model with a seam, or, for deployment, the two
Linears put back as one plain module. Nothing here keeps state.
"""

from __future__ import annotations

import difflib

import torch
from torch import nn

__all__ = ["deploy_at", "find_classifier", "fold_linears", "get_layer", "seam_linear"]


def get_layer(model: nn.Module, name: str) -> nn.Module:
    layers = dict(model.named_modules())
    if name and name in layers:
        return layers[name]
    close = difflib.get_close_matches(name, list(layers), n=3, cutoff=0.4)
    shown = close or [n for n in layers if n and "." not in n]
    raise ValueError(
        f"{type(model).__name__} has no layer named {name!r}. "
        f"{'Did you mean' if close else 'It has'} {', '.join(map(repr, shown))}? "
        "dict(model.named_modules()) lists them all"
    )


def find_classifier(model: nn.Module, num_classes: int | None) -> str:
    """The name of the last Linear, which must have ``num_classes`` outputs (if that is given)."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to lift. Cut it yourself and lift the halves: "
            "ps.lift(ps.split(model, at='layer name', probe=x), num_classes=…), or ps.lift((n1, n2), …)"
        )
    matching = [n for n, m in linears.items() if num_classes is None or m.out_features == num_classes]
    if matching:
        return matching[-1]
    last, layer = list(linears.items())[-1]
    raise ValueError(
        f"num_classes={num_classes}, but the last Linear of {type(model).__name__}, {last!r}, has "
        f"{layer.out_features} outputs. Build the model for {num_classes} classes, or say at={last!r} "
        f"to replace that layer by a new {num_classes}-class head"
    )


def seam_linear(old: nn.Linear, dim: int) -> nn.Linear:
    """Linear(d→k) where Linear(d→n) was: same input, bias, device and dtype, fresh weights."""
    return nn.Linear(
        old.in_features, dim, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
    )


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
        if not (isinstance(first, nn.Linear) and isinstance(n2, nn.Linear)):
            raise ValueError(
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
