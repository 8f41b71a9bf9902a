"""Cut any module at a named layer: N = N2∘N1, proved on a probe.

The model is traced with torch.fx. The cut is clean when everything after the layer reads nothing from before
it but the layer's own output; the two halves are then plain ``GraphModule`` objects on the same parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from protoseam.errors import SplitError
from protoseam.seam.classifier import get_layer
from protoseam.seam.guards import check_output

# Activations whose range is (almost) the non-negative half line: §design, "Lifting location".
ONE_SIDED_MODULES = (
    nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.Softmax, nn.Threshold,
    nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish,
)  # fmt: skip
ONE_SIDED_FUNCTIONS = {
    F.relu, F.relu6, F.sigmoid, F.hardsigmoid, F.softplus, F.softmax, F.gelu, F.silu, F.hardswish, F.mish,
    torch.relu, torch.relu_, torch.sigmoid, torch.softmax,
}  # fmt: skip
ONE_SIDED_METHODS = {"relu", "relu_", "sigmoid", "softmax", "clamp_min"}
# What changes a value's shape or nothing at all: the activation before it still decides.
PASSIVE_MODULES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Flatten, nn.Unflatten)
PASSIVE_FUNCTIONS = {torch.flatten, F.dropout, torch.squeeze, operator.getitem}
PASSIVE_METHODS = {"flatten", "view", "reshape", "squeeze", "contiguous"}


def split(model: nn.Module, at: str, *, probe: Tensor | None = None) -> tuple[nn.Module, nn.Module]:
    """``(n1, n2)`` with ``n2(n1(x)) == model(x)``: n1 ends with the output of the layer named ``at``.

    The halves share the model's parameters. The equality is checked on ``probe`` (a batch of inputs; guessed
    from the first layer if not given), in eval mode, bit for bit.

    Args:
        model: the model to cut; the halves share its parameters.
        at: name of the layer whose output ends the first half.
        probe: a batch of inputs on which the equality is checked; None: guessed from the first layer.

    Returns:
        ``(n1, n2)``.

    Raises:
        ArgumentError: there is no layer of that name.
        SplitError: the model cannot be traced, or the cut is not clean.
    """
    get_layer(model, at)
    probe = guess_probe(model) if probe is None else probe
    n1, n2 = _cut(model, at)
    with evaluating(model, n1, n2), torch.no_grad():
        expected, found = model(probe), n2(n1(probe))
        check_output(model, expected)
    if not torch.equal(expected, found):
        raise SplitError(
            f"cutting {type(model).__name__} at {at!r} does not give the same output on the probe: the forward "
            "does something tracing cannot see. Write the two halves yourself and lift them: ps.lift((n1, n2))"
        )
    return n1, n2


def _cut(model: nn.Module, at: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    graph = _trace(model, at)
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == at]
    if len(calls) != 1:
        why = "is called more than once" if calls else "is not called as a whole by the forward"
        raise SplitError(f"layer {at!r} of {type(model).__name__} {why}: name a layer that runs exactly once")
    cut = calls[0]
    nodes = list(graph.nodes)
    before = set(nodes[: nodes.index(cut)])
    after = nodes[nodes.index(cut) + 1 :]
    # Parameters and constants may be fetched anywhere; each half fetches its own.
    fetched: list[fx.Node] = []
    for node in after:
        for source in node.all_input_nodes:
            if source in before and source.op == "get_attr":
                fetched += [source] if source not in fetched else []
            elif source in before:
                raise SplitError(
                    f"the output of {at!r} is not all that the rest of {type(model).__name__} needs: "
                    f"{source.name!r}, computed before it, is read again by {node.name!r} (a skip "
                    "connection?). Cut where only one value passes, e.g. after the block"
                )
    needed = _ancestors(cut)
    shared = _parameters_of(needed, model) & _parameters_of([*fetched, *after], model)
    if shared:
        raise SplitError(
            f"both halves would use {sorted(shared)[0]!r}: parameters tied across the seam would carry "
            "gradients over it. Cut elsewhere"
        )
    first = [node for node in nodes if node in needed or node.op == "placeholder"]
    *second, output = after
    return _half(model, "N1", first, cut), _half(model, "N2", [*fetched, *second], output.args[0], seam=cut)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _half(
    model: nn.Module, suffix: str, nodes: list[fx.Node], output: Any, seam: fx.Node | None = None
) -> fx.GraphModule:
    """These nodes as a module; its input takes the place of ``seam``, if that is given."""
    graph = fx.Graph()
    copies = {} if seam is None else {seam: graph.placeholder("z")}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(fx.map_arg(output, lambda n: copies[n]))
    return fx.GraphModule(model, graph, class_name=f"{type(model).__name__}{suffix}")


class _Tracer(fx.Tracer):
    """Traces only the forwards of the layers around the cut; every other layer stays a black box."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.at.startswith(module_qualified_name + ".")


def _trace(model: nn.Module, at: str) -> fx.Graph:
    """The model's graph, which must not depend on whether it is training."""
    code = {}
    try:
        with evaluating(model):
            for mode in (True, False):
                model.train(mode)
                graph = _Tracer(at).trace(model)
                code[mode] = graph.python_code("self").src
    except Exception as error:  # fx raises whatever the traced forward raises
        raise SplitError(
            f"{type(model).__name__} cannot be traced ({type(error).__name__}: {error}): its forward depends on "
            "values, not only on shapes. Write the two halves yourself and lift them: ps.lift((n1, n2))"
        ) from error
    if code[True] != code[False]:
        raise SplitError(
            f"the forward of {type(model).__name__} differs between train() and eval() (a functional dropout, "
            "for instance): a traced half would freeze one of them. Use nn.Dropout modules, or write the "
            "halves yourself and lift them: ps.lift((n1, n2))"
        )
    return graph


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Eval mode for a while; every layer gets its own mode back, also one frozen by hand."""
    was = {m: m.training for module in modules for m in module.modules()}
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for m, mode in was.items():
            m.training = mode


def _parameters_of(nodes: Iterable[fx.Node], model: nn.Module) -> set[str]:
    """The parameters these nodes use, by the first of their names (a tied one has several)."""
    names = {id(p): name for name, p in model.named_parameters()}
    every = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    for node in nodes:
        if node.op == "call_module":
            found |= {names[id(p)] for p in get_layer(model, str(node.target)).parameters()}
        elif node.op == "get_attr" and node.target in every:
            found.add(every[node.target])
    return found


def guess_probe(model: nn.Module) -> Tensor:
    """Two random inputs of a shape the model accepts, or an error that asks for one."""
    generator = torch.Generator().manual_seed(0)  # the caller's draws stay as they are
    for shape in dict.fromkeys(_shapes(model)):
        probe = torch.randn(2, *shape, generator=generator).to(next(model.parameters()))
        try:
            with evaluating(model), torch.no_grad():
                model(probe)
        except Exception:  # whatever it says, this is not the shape the model wants
            continue
        return probe
    raise SplitError(f"cannot guess an input for {type(model).__name__}: pass a batch of inputs, probe=x")


def _shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """What the layers take, in the order of their names: the first is usually the one that sees the input."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            yield (m.in_features,)
        elif isinstance(m, nn.Conv2d):
            yield from ((m.in_channels, side, side) for side in (32, 28, 64, 224, 8))


def one_sided_tail(n1: nn.Module) -> str | None:
    """The name of the one-sided activation that ``n1`` ends with, if it can be seen to end with one."""
    if isinstance(n1, PASSIVE_MODULES):
        return None
    if isinstance(n1, ONE_SIDED_MODULES):
        return type(n1).__name__
    if isinstance(n1, nn.Sequential):
        active = [m for m in n1 if not isinstance(m, PASSIVE_MODULES)]
        return one_sided_tail(active[-1]) if active else None
    try:
        graph = n1.graph if isinstance(n1, fx.GraphModule) else fx.Tracer().trace(n1)
    except Exception:  # not traceable: initialize() still looks at the embeddings' signs
        return None
    node: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    while isinstance(node, fx.Node):
        module = get_layer(n1, str(node.target)) if node.op == "call_module" else None
        if isinstance(module, PASSIVE_MODULES) or node.target in PASSIVE_FUNCTIONS | PASSIVE_METHODS:
            node = node.all_input_nodes[0]
        elif module is not None:
            return one_sided_tail(module)
        elif node.target in ONE_SIDED_FUNCTIONS or node.target in ONE_SIDED_METHODS:
            return getattr(node.target, "__name__", str(node.target))
        else:
            return None
    return None
