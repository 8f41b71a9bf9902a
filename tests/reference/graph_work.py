"""What `net.backward` leaves to a CUDA graph touches the device alone: it hands no value to the host, and reads none.

A stream that is captured refuses both, and there is no such stream here. A device without memory stands in for it,
where tensors have shapes but no values. tests/seam/test_graphs.py runs this file in a process of its own: torch counts
devices once per process, at its first backward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from toys import CLASSES, FEATURES, Noisy

import protoseam as ps
from protoseam.seam import backward
from protoseam.seam.graphs import Graph, Graphs

BATCH = 32
OPTIMIZERS: list[Callable[[ps.Lifted], torch.optim.Optimizer]] = [
    lambda net: torch.optim.SGD(net.param_groups(lr=0.1, weight_decay=5e-4), momentum=0.9),
    lambda net: torch.optim.AdamW(net.param_groups(lr=0.01)),
    lambda net: torch.optim.SGD(net.param_groups(lr=0.01, bounded=False)),
    lambda net: torch.optim.SGD(
        [{**g, "lr": torch.empty((), device="nowhere")} for g in net.param_groups(lr=0.1)]
    ),
]
COVARIANCES = [
    ps.RunningCovariance(),
    ps.RunningCovariance("auto"),
    ps.RunningCovariance(structure="diagonal"),
    ps.RunningCovariance(structure="shared"),
    ps.ExactCovariance(),
    ps.SwitchCovariance(),
    ps.IsotropicCovariance(),
]


class Captured(TorchDispatchMode):
    """Refuses operations between this device and another; the tensors themselves refuse to give a value."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)}
        assert devices <= {"nowhere"}, f"{func} works on {devices}"
        Captured.operations += 1
        return found


def run(_: Graphs, work: Callable[..., Any], inputs: list[Any], **__: Any) -> Any:
    graph = Graph(work, inputs, None)
    graph._fill(inputs)
    with Captured():
        return work(*graph._places)


def main() -> None:
    _setup_privateuseone_for_python_backend("nowhere")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    Graphs.run = run  # type: ignore[method-assign]
    backward._can_replay = lambda net: net._bounds is None or net._bounds.can_copy(net)
    for make, covariance, soft in product(OPTIMIZERS, COVARIANCES, (False, True)):
        net = ps.lift(
            Noisy(),
            num_classes=CLASSES,
            init="random",
            covariance=covariance,
            label_smoothing=0.1,
        )
        net._checks.own = False  # they ask for values, outside of the graph
        net._proved = True
        Captured.operations = 0
        with FakeTensorMode():
            net._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="nowhere"))
            _optimizer = make(net)  # which the limits follow
            y = torch.empty(BATCH, dtype=torch.int64, device="nowhere")
            if soft:
                y = torch.empty(BATCH, CLASSES, device="nowhere")
            net.backward(torch.empty(BATCH, FEATURES, device="nowhere"), y)
        assert Captured.operations > 100


if __name__ == "__main__":
    main()
