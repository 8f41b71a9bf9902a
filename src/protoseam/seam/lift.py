"""``lift``: from a model (or two halves) to a :class:`Lifted` module."""

from __future__ import annotations

import copy
from operator import index

import torch
from torch import Tensor, nn

from protoseam.core.objective import Loss
from protoseam.core.schedules import Schedule
from protoseam.seam.calling import accepted_names, call
from protoseam.seam.classifier import check_replaceable, find_classifier, get_layer, refuse_meta, seam_linear
from protoseam.seam.covariance import AbstractCovariance
from protoseam.seam.guards import check_output
from protoseam.seam.lifted import ClassWeights, Lifted
from protoseam.seam.prototypes import Init
from protoseam.seam.split import SplitError, evaluating, guess_probe, one_sided_tail, split

__all__ = ["lift"]

DEFAULT_DIM = 32  # paper, §protocol


def lift(
    model: nn.Module | tuple[nn.Module, nn.Module],
    *,
    num_classes: int | None = None,
    dim: int | None = None,
    at: str | None = None,
    probe: Tensor | None = None,
    allow_relu: bool = False,
    covariance: AbstractCovariance | None = None,
    schedule: Schedule | None = None,
    init: Init | Tensor = "fsinit",
    alpha: float = 2.0,
    repulsion_scale: float | None = None,
    draws: int | None = None,
    antithetic: bool = False,
    class_weights: ClassWeights = "uniform",
    loss_fn: Loss | None = None,
    label_smoothing: float = 0.0,
) -> Lifted:
    """Lift a classifier at one seam.

    ``lift(model, num_classes=100, dim=32)``
        replaces the last Linear(d→n) by Linear(d→k) + Linear(k→n), the paper's form. ``at="fc"`` names that
        layer; naming it also allows another class count than it had (a new head on pretrained features).
    ``lift(model, at="layer4", probe=x)``
        cuts behind any other layer; the seam is then as wide as that layer's output.
    ``lift((n1, n2), num_classes=…, dim=…)``
        takes the halves as they are; the sizes are read off where a Linear shows them.

    A model is copied, so the one passed in stays as it is; halves are taken, not copied. A seam right after a
    ReLU-like activation is refused (§design), unless ``allow_relu=True``.
    """
    seam_shape: tuple[int, ...] | None = None
    seam_layer: str | None = None
    num_classes, dim = _whole("num_classes", num_classes), _whole("dim", dim)
    if not isinstance(model, tuple | nn.Module):
        raise TypeError(f"lift takes a model (nn.Module) or two halves (n1, n2), got {model!r:.100}")
    refuse_meta(model)
    if isinstance(model, tuple):
        if len(model) != 2 or not all(isinstance(half, nn.Module) for half in model):
            raise TypeError("the halves must be two nn.Modules: ps.lift((n1, n2), …)")
        if at is not None:
            raise ValueError(f"at={at!r} says where to cut a whole model, but two halves were given")
        n1, n2 = model
        _refuse_shared(n1, n2)
    elif at is None or _is_classifier(model, at, dim, probe):
        n1 = copy.deepcopy(model)
        seam_layer = find_classifier(n1, num_classes) if at is None else at
        old = get_layer(n1, seam_layer) if seam_layer else n1
        assert isinstance(old, nn.Linear)
        check_replaceable(n1, seam_layer, old)
        num_classes = old.out_features if num_classes is None else num_classes
        dim = DEFAULT_DIM if dim is None else dim
        _positive(num_classes, dim)
        new = seam_linear(old, dim)
        n1 = _replaced(n1, seam_layer, new)
        n2 = nn.Linear(
            dim,
            num_classes,
            bias=old.bias is not None,
            device=new.weight.device,
            dtype=new.weight.dtype,
        )
    else:
        if dim is not None:
            raise ValueError(
                f"the seam behind {at!r} is as wide as that layer's output: leave dim out. Only the layer whose output "
                "the model returns as it is can be replaced by one of another width"
            )
        probe = guess_probe(model) if probe is None else probe
        n1, n2 = split(copy.deepcopy(model), at, probe=probe)
        if not any(True for _ in n2.parameters()):
            raise ValueError(
                f"nothing that could learn lies behind {at!r}: N2 would have no parameter. Cut earlier, or leave "
                "at= out to replace the last Linear"
            )
    if seam_layer is None:
        _refuse_one_sided(n1, allow_relu)
        dim, num_classes, seam_shape = _sizes(n1, n2, dim, num_classes, probe)
        _positive(num_classes, dim)
    assert dim is not None
    assert num_classes is not None
    return Lifted(
        n1,
        n2,
        num_classes=num_classes,
        dim=dim,
        seam_shape=seam_shape,
        seam_layer=seam_layer,
        covariance=covariance,
        schedule=schedule,
        init=init,
        alpha=alpha,
        repulsion_scale=repulsion_scale,
        draws=draws,
        antithetic=antithetic,
        class_weights=class_weights,
        loss_fn=loss_fn,
        label_smoothing=label_smoothing,
    )


def _whole(name: str, value: int | None) -> int | None:
    try:
        return None if value is None else index(value)  # numpy's and torch's integers, too
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None


def _positive(num_classes: int, dim: int) -> None:
    if num_classes < 2 or dim < 1:
        raise ValueError(
            f"a seam needs at least 2 classes and 1 dimension, got num_classes={num_classes}, dim={dim}"
        )


def _is_classifier(model: nn.Module, at: str, dim: int | None, probe: Tensor | None) -> bool:
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
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    try:
        with evaluating(model), torch.no_grad():
            logits = call(model, probe, accepted_names(model))
            check_output(model, logits)
    finally:
        handle.remove()
    return len(seen) == 1 and (logits is seen[0] or torch.equal(logits, seen[0]))


def _replaced(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    if not name:  # the model is the Linear itself
        return layer
    model.set_submodule(name, layer)
    return model


def _refuse_shared(n1: nn.Module, n2: nn.Module) -> None:
    mine = {id(p) for p in n1.parameters()}
    shared = [name for name, p in n2.named_parameters() if id(p) in mine]
    if shared:
        raise ValueError(
            f"N2's {shared[0]!r} is also a parameter of N1: it would carry gradients over the seam. Give each half "
            "its own"
        )


def _refuse_one_sided(n1: nn.Module, allow_relu: bool) -> None:
    tail = one_sided_tail(n1)
    if tail is not None and not allow_relu:
        raise ValueError(
            f"the seam would lie right after {tail}: N1's output is then confined to the non-negative orthant, "
            "and a Gaussian cannot surround a prototype on its boundary. Cut before the activation or behind a "
            "Linear, or insist with allow_relu=True"
        )


def _sizes(
    n1: nn.Module, n2: nn.Module, dim: int | None, num_classes: int | None, probe: Tensor | None
) -> tuple[int, int, tuple[int, ...] | None]:
    """Width and class count of given halves: from a probe, from their Linears, or from the caller."""
    shape: tuple[int, ...] | None = None
    if probe is not None:
        with evaluating(n1, n2), torch.no_grad():
            z = n1(probe)
            logits = n2(z)
        shape, seen = tuple(z.shape[1:]), int(logits.shape[1])
    else:
        first = next((m for m in n2.modules() if isinstance(m, nn.Linear)), None)
        last = next((m for m in reversed(list(n2.modules())) if isinstance(m, nn.Linear)), None)
        if first is not None and dim is None and (n2 is first or isinstance(n2, nn.Sequential)):
            shape = (first.in_features,)
        elif dim is not None:
            shape = (dim,)
        seen = last.out_features if last is not None else 0
    if shape is None or not (seen or num_classes):
        raise ValueError(
            "cannot tell the seam's width and the number of classes from these halves: pass probe=x (a batch of "
            "inputs), or dim=… and num_classes=…"
        )
    width = 1
    for side in shape:
        width *= side
    if dim is not None and dim != width:
        raise ValueError(f"dim={dim}, but N1 gives {width} numbers a sample (shape {shape})")
    if num_classes is not None and seen and seen != num_classes:
        raise ValueError(f"num_classes={num_classes}, but N2 has {seen} outputs: make them agree")
    return width, num_classes or seen, shape
