"""``lift``: from a model (or two halves) to a :class:`Lifted` module."""

from __future__ import annotations

import copy
import math
from operator import index
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from protoseam.errors import ArgumentError, ArgumentTypeError, SplitError
from protoseam.seam.calling import accepted_names, call
from protoseam.seam.classifier import check_replaceable, find_classifier, get_layer, refuse_meta
from protoseam.seam.guards import check_output, is_output_of
from protoseam.seam.lifted import Lifted
from protoseam.seam.options import DEFAULT_DIM, Options, takes_options
from protoseam.seam.split import evaluating, guess_probe, one_sided_tail, split


@takes_options
def lift(
    model: nn.Module | tuple[nn.Module, nn.Module],
    *,
    num_classes: int | None = None,
    dim: int | None = None,
    at: str | None = None,
    probe: Any = None,
    allow_relu: bool = False,
    **options: Unpack[Options],
) -> Lifted:
    """Lift a classifier at one seam.

    ``lift(model, num_classes=100, dim=32)``
        replaces the last Linear(d→n) by Linear(d→k) + Linear(k→n), the paper's form. ``at="fc"`` names that
        layer; naming it also allows another class count than it had (a new head on pretrained features).
    ``lift(model, at="layer4", probe=x)``
        cuts behind any other layer; the seam is then as wide as that layer's output.
    ``lift((n1, n2), num_classes=…, dim=…)``
        takes the halves as they are; the sizes are read off where a Linear shows them.

    Args:
        model: a classifier, which is copied; or its two halves, which are taken and not copied.
        num_classes: number of classes; None: as many as the last Linear has outputs.
        dim: the seam's width k; None: 32 (paper, §protocol) for a replaced Linear, else the width of N1's output.
        at: name of the layer to replace or to cut behind; None: the last Linear.
        probe: a batch of inputs, to prove a cut and to read sizes; None: guessed where possible.
        allow_relu: accept a seam right after a ReLU-like activation, which the paper (§design) advises against.
        **options: the options of the seam, see ``protoseam.seam.options.Options``.

    Returns:
        The lifted network, in train mode; of a model in train mode, layers that are in eval mode stay in it.

    Raises:
        ArgumentError: the model cannot be lifted there, or an option is out of bounds.
        ArgumentTypeError: the model is neither a module nor two modules, or an option has a wrong type.
        SplitError: the model cannot be cut behind ``at``.
    """
    num_classes, dim = _whole("num_classes", num_classes), _whole("dim", dim)
    if not isinstance(model, tuple | nn.Module):
        raise ArgumentTypeError(f"lift takes a model (nn.Module) or two halves (n1, n2), got {model!r:.100}")
    refuse_meta(model)
    if isinstance(model, Lifted):
        raise ArgumentError("the model is lifted already: train it as it is, or lift net.deploy(fold=True)")
    if isinstance(model, tuple):
        _check_halves(model, at)
        return _sized(*model, dim, num_classes, probe, allow_relu, options)
    if at is None or _is_classifier(model, at, dim, probe):
        return _replacing(copy.deepcopy(model), at, num_classes, dim, options)
    if dim is not None:
        raise ArgumentError(
            f"the seam behind {at!r} is as wide as that layer's output: leave dim out. Only the layer whose output "
            "the model returns as it is can be replaced by one of another width"
        )
    model = copy.deepcopy(model)
    probe = guess_probe(model) if probe is None else probe
    n1, n2 = split(model, at, probe=probe)
    if not any(True for _ in n2.parameters()):
        raise ArgumentError(
            f"nothing that could learn lies behind {at!r}: N2 would have no parameter. Cut earlier, or leave "
            "at= out to replace the last Linear"
        )
    return _sized(n1, n2, dim, num_classes, probe, allow_relu, options)


def _check_halves(halves: tuple[nn.Module, ...], at: str | None) -> None:
    if len(halves) != 2 or not all(isinstance(half, nn.Module) for half in halves):
        raise ArgumentTypeError("the halves must be two nn.Modules: ps.lift((n1, n2), …)")
    if at is not None:
        raise ArgumentError(f"at={at!r} says where to cut a whole model, but two halves were given")
    mine = {id(p) for p in halves[0].parameters()}
    shared = [name for name, p in halves[1].named_parameters() if id(p) in mine]
    if shared:
        raise ArgumentError(
            f"N2's {shared[0]!r} is also a parameter of N1: it would carry gradients over the seam. Give each half "
            "its own"
        )


def _replacing(
    model: nn.Module, at: str | None, num_classes: int | None, dim: int | None, options: Options
) -> Lifted:
    """Two Linears in the place of the one named ``at``, or of the last one."""
    name = find_classifier(model, num_classes) if at is None else at
    old = get_layer(model, name) if name else model
    assert isinstance(old, nn.Linear)
    check_replaceable(model, name, old)
    num_classes = old.out_features if num_classes is None else num_classes
    dim = DEFAULT_DIM if dim is None else dim
    _positive(num_classes, dim)
    like: Any = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    seam, n2 = nn.Linear(old.in_features, dim, **like), nn.Linear(dim, num_classes, **like)
    if name:
        model.set_submodule(name, seam)
    n1 = model if name else seam  # without a name the model is the Linear itself
    return Lifted(n1, n2, num_classes=num_classes, dim=dim, seam_layer=name, **options)


def _whole(name: str, value: int | None) -> int | None:
    try:
        return None if value is None else index(value)  # numpy's and torch's integers, too
    except TypeError:
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}") from None


def _positive(num_classes: int, dim: int) -> None:
    if num_classes < 2 or dim < 1:
        raise ArgumentError(
            f"a seam needs at least 2 classes and 1 dimension, got num_classes={num_classes}, dim={dim}"
        )


def _is_classifier(model: nn.Module, at: str, dim: int | None, probe: Any) -> bool:
    """Whether ``at`` names the Linear that gives the model's output (to be replaced) rather than a place to cut."""
    layer = get_layer(model, at)
    if not isinstance(layer, nn.Linear):
        return False
    try:
        probe = guess_probe(model) if probe is None else probe
    except SplitError:  # then what the caller asks for decides, and the first batch proves it
        linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        return dim is not None or linears[-1] == at
    seen: list[Tensor] = []
    watched = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    with watched, evaluating(model), torch.no_grad():
        logits = call(model, probe, accepted_names(model))
        check_output(model, logits)
    return len(seen) == 1 and is_output_of(seen[0], logits)


def _sized(
    n1: nn.Module,
    n2: nn.Module,
    dim: int | None,
    num_classes: int | None,
    probe: Any,
    allow_relu: bool,
    options: Options,
) -> Lifted:
    """Lift two halves. Their width and class count come from a probe, from their Linears, or from the caller."""
    tail = one_sided_tail(n1)
    if tail is not None and not allow_relu:
        raise ArgumentError(
            f"the seam would lie right after {tail}: N1's output is then confined to the non-negative orthant, "
            "and a Gaussian cannot surround a prototype on its boundary. Cut before the activation or behind a "
            "Linear, or insist with allow_relu=True"
        )
    shape: tuple[int, ...] | None = None
    if probe is not None:
        with evaluating(n1, n2), torch.no_grad():
            z = call(n1, probe, accepted_names(n1))
            logits = n2(z)
        shape, seen = tuple(z.shape[1:]), int(logits.shape[1])
    else:
        linears = [m for m in n2.modules() if isinstance(m, nn.Linear)]
        if dim is not None:
            shape = (dim,)
        elif linears and (n2 is linears[0] or isinstance(n2, nn.Sequential)):
            shape = (linears[0].in_features,)
        seen = linears[-1].out_features if linears else 0
    if shape is None or not (seen or num_classes):
        raise ArgumentError(
            "cannot tell the seam's width and the number of classes from these halves: pass probe=x (a batch of "
            "inputs), or dim=… and num_classes=…"
        )
    width = math.prod(shape)
    if dim is not None and dim != width:
        raise ArgumentError(f"dim={dim}, but N1 gives {width} numbers per sample (shape {shape})")
    if num_classes is not None and seen and seen != num_classes:
        raise ArgumentError(f"num_classes={num_classes}, but N2 has {seen} outputs: make them agree")
    classes = num_classes or seen
    _positive(classes, width)
    return Lifted(n1, n2, num_classes=classes, dim=width, seam_shape=shape, **options)
