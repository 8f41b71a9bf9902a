"""What `net.backward` leaves to a CUDA graph touches the device alone: it hands no value to the host, and reads none.

A stream that is captured refuses both, and there is no such stream here. A device without memory stands in for it,
where tensors have shapes but no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from toys import CLASSES, FEATURES, HIDDEN

import protoseam as ps
from protoseam.seam import backward
from protoseam.seam.graphs import Graph, Graphs

BATCH = 32


class Captured(TorchDispatchMode):
    """Refuses operations between this device and another; the tensors themselves refuse to give a value."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)}
        assert devices <= {"nowhere"}, f"{func} works on {devices}"
        self.operations += 1
        return found


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    _setup_privateuseone_for_python_backend("nowhere")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Captured]]:
    made: list[Captured] = []

    def run(_: Graphs, work: Callable[..., Any], inputs: list[Any], **__: Any) -> Any:
        graph = Graph(work, inputs, None)
        graph._fill(inputs)
        with Captured() as mode:
            made.append(mode)
            return work(*graph._places)

    monkeypatch.setattr(Graphs, "run", run)
    monkeypatch.setattr(backward, "_can_replay", lambda net: net._bounds is None or net._bounds.can_copy(net))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield made
    torch.__future__.set_overwrite_module_params_on_conversion(before)


OPTIMIZERS: dict[str, Callable[[ps.Lifted], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.param_groups(lr=0.1, weight_decay=5e-4), momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.param_groups(lr=0.01)),
    "free": lambda net: torch.optim.SGD(net.param_groups(lr=0.01, bounded=False)),
    "a rate on the device": lambda net: torch.optim.SGD(
        [{**g, "lr": torch.empty((), device="nowhere")} for g in net.param_groups(lr=0.1)]
    ),
}
COVARIANCES = [
    ps.RunningCovariance(),
    ps.RunningCovariance("auto"),
    ps.RunningCovariance(structure="diagonal"),
    ps.RunningCovariance(structure="shared"),
    ps.ExactCovariance(),
    ps.SwitchCovariance(),
    ps.IsotropicCovariance(),
]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("covariance", COVARIANCES, ids=str)
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft targets"])
def test_what_is_captured_leaves_the_host_alone(
    soft: bool,
    covariance: ps.AbstractCovariance,
    make: Callable[[ps.Lifted], torch.optim.Optimizer],
    captures: list[Captured],
) -> None:
    body = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )
    net = ps.lift(body, num_classes=CLASSES, init="random", covariance=covariance, label_smoothing=0.1)
    net._checks.own = False  # they ask for values, outside of the graph
    net._proved = True
    with FakeTensorMode():
        net._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="nowhere"))
        _optimizer = make(net)  # which the limits follow
        y = torch.empty(BATCH, dtype=torch.int64, device="nowhere")
        if soft:
            y = torch.empty(BATCH, CLASSES, device="nowhere")
        net.backward(torch.empty(BATCH, FEATURES, device="nowhere"), y)
    assert [mode.operations > 100 for mode in captures] == [True]
