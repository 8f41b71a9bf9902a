"""The seam's work, replayed: what `net.backward` does on CUDA, here with a stand-in for the capture."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import CLASSES, FEATURES, HIDDEN, Batch, batches, lifted, sgd

import protoseam as ps
from protoseam.seam import backward
from protoseam.seam.graphs import Graph, Graphs

captures: list[Graph] = []


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record reads the places of its inputs, writes where it wrote before, and changes no attribute in Python."""

    def captured(graph: Graph) -> Callable[[], None]:
        captures.append(graph)

        def replay() -> None:
            net = inspect.getclosurevars(graph._work).nonlocals.get("net")
            bounds = net and net._bounds
            before = bounds and dict(vars(bounds)), [p.grad for p in net.parameters()] if net else ()
            found = graph._work(*graph._places)
            if bounds:
                vars(bounds).update(before[0])
            for p, gradient in zip(net.parameters() if net else (), before[1], strict=True):
                p.grad = gradient
            graph._outputs = graph._outputs or found
            pairs = zip(*(torch.utils._pytree.tree_leaves(o) for o in (graph._outputs, found)), strict=True)
            for place, value in pairs:
                if isinstance(value, torch.Tensor) and place is not value:
                    place.copy_(value)

        return replay

    captures.clear()
    monkeypatch.setattr(Graph, "_captured", captured)
    monkeypatch.setattr(backward, "_can_replay", lambda net: True)


def train(
    net: ps.Lifted, optimizer: torch.optim.Optimizer, data: list[Batch], epochs: int, **how: Any
) -> None:
    """With a rate, a ρ and factors that change, and with batches of two sizes and two kinds of targets."""
    noise = torch.Generator().manual_seed(1)
    for epoch in range(epochs):
        net.set_progress(epoch, epochs, lr=optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["lr"] *= 1.5  # above the given rates, so that the limits follow
        for at, (x, y) in enumerate([*data, (data[0][0][:7], data[0][1][:7])]):
            soft = epoch == 1 and at < 3
            targets = torch.softmax(4.0 * F.one_hot(y, CLASSES).to(x), 1) if soft else y
            optimizer.zero_grad()
            net.backward(x, targets, generator=noise, **how)
            optimizer.step()
        net.refresh(data)


OPTIMIZERS: dict[str, Callable[[ps.Lifted], torch.optim.Optimizer]] = {
    "sgd": lambda net: sgd(net, lr=2.0),  # where each limit holds
    "adamw": lambda net: torch.optim.AdamW(net.param_groups(lr=0.01)),
    "frozen": lambda net: torch.optim.SGD(net.param_groups(lr=0.1, body_lr=0.0)),
    "free": lambda net: torch.optim.SGD(net.param_groups(lr=0.01, bounded=False)),
    "a rate on the device": lambda net: torch.optim.SGD(
        [{**g, "lr": torch.tensor(g["lr"])} for g in net.param_groups(lr=0.5)]
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize(
    "covariance", [ps.RunningCovariance(), ps.RunningCovariance("auto"), ps.SwitchCovariance()], ids=str
)
def test_a_training_that_is_replayed_ends_where_one_in_pieces_ends(
    covariance: ps.AbstractCovariance, make: Callable[[ps.Lifted], torch.optim.Optimizer]
) -> None:
    data = [(x.double(), y) for x, y in batches()]
    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Dropout(0.2), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    net = lifted(body, covariance=covariance, class_weights="frequency", refit=False).double()
    net.initialize(data)
    other = copy.deepcopy(net)
    for each, how in ((net, {}), (other, {"capture": False})):
        torch.manual_seed(3)  # dropout's
        train(each, make(each), data, 3, **how)
    assert len(captures) == 2, "one for labels, one for soft targets; a last batch comes once in a row"
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_another_batch_can_be_added_to_replayed_gradients() -> None:
    found, noise = [], torch.Generator()
    for how in ({}, {"capture": False}):
        torch.manual_seed(0)
        net, ((x, y), other, *_) = lifted(), batches()
        torch.optim.SGD(net.param_groups(lr=5.0, weight_decay=0.1))
        for scale in (1.0, 2.0, 3.0):  # limits of which the last ones count
            net.zero_grad()
            net.backward(scale * x, y, generator=noise.manual_seed(1), **how)
        net.objective(*other, generator=noise).total.backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found)


def test_the_terms_outlive_the_next_call() -> None:
    net, (x, y) = lifted(), batches()[0]
    found = []
    for _ in range(4):
        net.zero_grad()
        found.append(net.backward(x, y))
        with torch.no_grad():
            net.prototypes.mul_(1.5)
    assert len({float(terms.repulsion) for terms in found}) == 4


def test_what_decides_on_the_work_makes_another_graph() -> None:
    net, (x, y) = lifted(), batches()[0]
    made: list[torch.optim.Optimizer] = []
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: setattr(net, "alpha", 3.0),
        lambda: net.eval(),
        lambda: net.n2.weight.requires_grad_(False),
        lambda: setattr(net.prototypes, "data", net.prototypes.data.clone()),
        lambda: made.append(sgd(net)),
        lambda: made[0].param_groups[0].update(weight_decay=0.5),
        *(lambda p=p: setattr(p, "data", p.data.clone()) for p in (*net.n1.parameters(), net.n2.bias)),
        lambda: setattr(net.covariance, "factors", net.covariance.factors.clone()),
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(3):
            net.zero_grad()
            net.backward(x, y)
        assert len(captures) == number


def test_graphs_are_forgotten_when_there_are_many() -> None:
    graphs, x = Graphs(), torch.ones(2)
    for kind in [*range(20), 0]:
        for _ in range(2):
            assert graphs.run(lambda x, k: [x * k], [x, float(kind)], reads=[], kind=kind)[0][0] == kind
    assert len(captures) == 21


def test_a_copy_captures_its_own() -> None:
    net, (x, y) = lifted(), batches()[0]
    for _ in range(2):
        net.zero_grad()
        net.backward(x, y)
    other = copy.deepcopy(net)
    assert other._graphs is not net._graphs
    other.zero_grad()
    other.backward(x, y)
    assert len(captures) == 1


def test_the_checks_are_those_of_the_objective() -> None:
    net, (x, y) = lifted(), batches()[0]
    with pytest.raises(ps.ArgumentError, match="label"):
        net.backward(x, y + CLASSES)
    with pytest.raises(ps.SeamError, match="initialize"):
        lifted(init="fsinit").backward(x, y)
    with pytest.raises(ps.SeamError, match="non-finite"):
        net.backward(x * torch.nan, y)


def test_what_is_captured_leaves_the_host_alone() -> None:
    script = Path(__file__).parents[1] / "reference" / "graph_work.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
