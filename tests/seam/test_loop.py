"""The loop that cannot be forgotten, and the sentences for loops that were written by hand."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toys import CLASSES, DIM, batches, lifted, network, same, sgd, step

import protoseam as ps

DATA = batches()


class Calls(ps.Lifted):
    """Notes what an epoch calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nn.Linear(6, DIM), nn.Linear(DIM, CLASSES), num_classes=CLASSES, dim=DIM, **options)
        self.calls: list[str] = []

    def initialize(self, *args: Any, **options: Any) -> None:
        self.calls.append("initialize")
        super().initialize(*args, **options)

    def set_progress(self, epoch: int, epochs: int, **options: Any) -> None:
        self.calls.append(f"{epoch}/{epochs}")
        super().set_progress(epoch, epochs, **options)

    def refresh(self, *args: Any, **options: Any) -> None:
        self.calls.append("refresh")
        super().refresh(*args, **options)


def trained(net: ps.Lifted, optimizer: torch.optim.Optimizer, epochs: int, **options: Any) -> None:
    for _ in net.epochs(DATA, epochs, **options):
        for x, y in DATA:
            step(net, optimizer, x, y)


def test_an_epoch_has_all_it_needs_in_its_order() -> None:
    net = Calls()
    trained(net, sgd(net), 2)
    assert net.calls == ["initialize", "0/2", "refresh", "1/2", "refresh"]
    assert net.rho.item() == 16.0


@pytest.mark.parametrize("init", ["random", "fsinit"])
def test_it_is_the_loop_by_hand(init: str) -> None:
    nets = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        net = lifted(init=init)
        optimizer = sgd(net)
        if by_hand:
            net.initialize(DATA)
            for epoch in range(3):
                net.set_progress(epoch, 3)
                for x, y in DATA:
                    step(net, optimizer, x, y)
                net.refresh(DATA)
        else:
            trained(net, optimizer, 3)
        nets.append(net)
    assert same(nets[0].state_dict(), nets[1].state_dict())


@pytest.mark.parametrize("covariance", [ps.ExactCovariance(), ps.RunningCovariance()])
def test_after_a_checkpoint_it_goes_on_bit_for_bit(covariance: ps.AbstractCovariance) -> None:
    def begun() -> tuple[ps.Lifted, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = lifted(init="fsinit", covariance=covariance)
        return net, sgd(net)

    whole, optimizer = begun()
    trained(whole, optimizer, 4)
    first, optimizer = begun()
    for epoch in first.epochs(DATA, 4):
        for x, y in DATA:
            step(first, optimizer, x, y)
        if epoch == 1:  # an epoch that is left early has had no refresh
            first.refresh(DATA)
            break
    saved = first.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    second, optimizer = begun()
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    trained(second, optimizer, 4, start=2)
    assert same(second.state_dict(), whole.state_dict())


def test_loaders_without_a_length_and_those_that_can_be_read_once() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(DATA)

    loader = torch.utils.data.DataLoader(Endless(), batch_size=None)
    net = lifted(init="fsinit")
    optimizer = sgd(net)
    for _ in net.epochs(loader, 2):
        for x, y in loader:
            step(net, optimizer, x, y)
    for once in (iter(DATA), (batch for batch in DATA), itertools.cycle(DATA)):
        with pytest.raises(TypeError, match="can be read only once: pass a DataLoader"):
            net.epochs(once, 2)
    for start, epochs in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"start={start}, epochs={epochs}"):
            net.epochs(DATA, epochs, start=start)


def test_a_loader_without_a_batch_is_refused() -> None:
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    loader = DataLoader(TensorDataset(x, y), 100, drop_last=True)
    net = lifted()
    for use in (net.initialize, lambda data: net.epochs(data, 3)):
        with pytest.raises(ValueError, match=r"no batch of its 64 samples.*drop_last=False"):
            use(loader)
    with pytest.raises(ValueError, match="it has no batch, so"):
        net.epochs([], 3)


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_an_epoch_over_a_stream_that_is_used_up_is_told_once() -> None:
    net = lifted(refit=False, covariance=ps.RunningCovariance())
    loader = DataLoader(Stream(iter(DATA)), batch_size=None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = sgd(net)
        for _ in net.epochs(loader, 3):
            for x, y in loader:
                step(net, optimizer, x, y)
    assert len(said) == 1
    assert re.match("this epoch took no step.*generator is empty from the second pass", str(said[0].message))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
def test_an_epoch_over_a_stream_with_steps_of_any_kind_is_left_in_peace() -> None:
    net = lifted(refit=False, covariance=ps.RunningCovariance())
    loader = DataLoader(Stream(DATA), batch_size=None)
    optimizer, compiled = sgd(net), torch.compile(net, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "this epoch took no step")
        for _ in net.epochs(loader, 3):
            for x, y in loader:  # a compiled step is not counted
                optimizer.zero_grad()
                compiled(x, y).total.backward()
                optimizer.step()


def test_batches_evaluated_often_are_no_forgotten_call() -> None:
    net = lifted()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=6)

    def closure(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        total = net.objective(x, y).total
        total.backward()
        return float(total.detach())

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "net.objective has seen")
        warnings.filterwarnings("ignore", "this epoch had|N2 classifies")
        for _ in net.epochs(DATA, 2):
            for batch in DATA:
                optimizer.step(functools.partial(closure, *batch))
    assert forgetful(net, progress=False, refresh=False)  # without the loop they are asked for again


def test_an_exception_passes_and_the_loop_can_go_on() -> None:
    net = lifted(init="fsinit")
    optimizer = sgd(net)

    def interrupted() -> None:
        for epoch in net.epochs(DATA, 3):
            if epoch == 1:
                raise KeyboardInterrupt
            for x, y in DATA:
                step(net, optimizer, x, y)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    trained(net, optimizer, 3, start=1)
    assert net.progress.tolist() == [2, 3]


def test_switching_covariance_follows_the_optimizers_rate() -> None:
    net = lifted(covariance=ps.SwitchCovariance())
    optimizer = sgd(net)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.01)
    switched = []
    for _ in net.epochs(DATA, 2):
        switched.append(bool(net.covariance.switched))
        for x, y in DATA:
            step(net, optimizer, x, y)
        decay.step()
    assert switched == [False, True]


# ---------------------------------------------------------------------- what a loop by hand forgets


def forgetful(net: ps.Lifted, *, progress: bool, refresh: bool) -> list[str]:
    net.initialize(DATA)
    optimizer = sgd(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(4):
            if progress:
                net.set_progress(epoch, 4)
            for x, y in DATA:
                step(net, optimizer, x, y)
            if refresh:
                net.refresh(DATA)
    return [str(w.message) for w in said if "net.objective has seen" in str(w.message)]


def test_forgotten_calls_are_named_once() -> None:
    both = forgetful(lifted(init="fsinit"), progress=False, refresh=False)
    assert len(both) == 1
    assert (
        "has seen 144 samples, 2.2 times the training data" in both[0]
    )  # the first batch of the third epoch
    assert "net.set_progress(epoch, epochs)" in both[0]
    assert "net.refresh(loader)" in both[0]
    assert "for epoch in net.epochs(loader, epochs):" in both[0]
    (no_refresh,) = forgetful(lifted(init="fsinit"), progress=True, refresh=False)
    assert "set_progress" not in no_refresh
    (no_progress,) = forgetful(lifted(init="fsinit"), progress=False, refresh=True)
    assert "net.refresh" not in no_progress
    assert not forgetful(lifted(init="fsinit"), progress=True, refresh=True)


def test_an_estimator_without_a_refresh_asks_for_none() -> None:
    assert not forgetful(lifted(covariance=ps.IsotropicCovariance()), progress=True, refresh=False)


# ---------------------------------------------------------------------- is this learning?


def epoch_of(net: ps.Lifted, steps: int, epoch: int, epochs: int) -> None:
    net.prototypes.requires_grad_(False)  # nothing is meant to move
    net.set_progress(epoch, epochs)
    for x, y in (DATA * steps)[:steps]:
        net.objective(x, y)
    net.refresh(DATA)


def test_epochs_of_few_steps_are_told_once() -> None:
    net = lifted(init="fsinit")
    net.initialize(DATA)
    with pytest.warns(ps.SeamWarning, match="this epoch had 4 steps.*smaller batches"):
        epoch_of(net, 4, 0, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch_of(net, 4, 1, 9)
    quiet = lifted(init="fsinit")
    quiet.initialize(DATA * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch_of(quiet, 10, 0, 90)


def placed(gap: float, head: float) -> ps.Lifted:
    """Four prototypes this far apart, and a head that is right about them to that degree."""
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]) * gap
    net = lifted(network(), init=corners, covariance=ps.IsotropicCovariance(0.01))
    with torch.no_grad():
        net.n2.weight.copy_(head * corners)
        net.n2.bias.copy_(-0.5 * head * corners.square().sum(1))
    return net


@pytest.mark.parametrize(
    ("gap", "head", "message"),
    [
        (0.1, 1000.0, r"classes 0 and 1 are 0\.1 apart, closer than the 1/α = 0\.5"),
        (
            3.0,
            -10.0,
            r"0 % of its own samples rightly.*discriminant would get 100 %: its steps are too large\. Lower",
        ),
        (3.0, -1e-9, r"0 % of its own samples rightly.*net\.refit_head\(\)"),
        (
            3.0,
            0.01,
            r"100 % of its own samples rightly, with a mean confidence of 2\d %.*undertrained\. Raise",
        ),
    ],
)
def test_a_seam_that_does_not_learn_is_told_after_a_fifth_of_the_epochs(
    gap: float, head: float, message: str
) -> None:
    net = placed(gap, head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch_of(net, 10, 18, 100)
    with pytest.warns(ps.SeamWarning, match=message):
        epoch_of(net, 10, 19, 100)
    drawn = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.refresh(DATA)  # once
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_seam_that_learns_is_left_in_peace() -> None:
    net = placed(3.0, 10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch_of(net, 10, 19, 100)


def test_a_look_at_the_head_changes_nothing_of_it(recwarn: pytest.WarningsRecorder) -> None:
    n2 = nn.Sequential(nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    halves = nn.Linear(6, DIM), n2
    net = ps.lift(halves, dim=DIM, num_classes=CLASSES, init="random", covariance=ps.IsotropicCovariance())
    net.set_progress(19, 100)
    before, drawn = {k: v.clone() for k, v in n2.state_dict().items()}, torch.get_rng_state()
    net.refresh()
    assert "head" in net._checks._said  # it did look
    assert not any("refit_head" in str(w.message) for w in recwarn)  # this N2 has no closed form
    assert same(n2.state_dict(), before)
    assert torch.equal(drawn, torch.get_rng_state())
    assert n2.training


def test_very_many_classes_are_not_looked_at() -> None:
    """A look at n classes takes n×n numbers, which the rest of the seam avoids."""
    halves = nn.Linear(6, 2), nn.Linear(2, 2001)
    net = ps.lift(halves, init="random", covariance=ps.IsotropicCovariance())
    net.set_progress(19, 100)
    net.refresh()
    assert not net._checks._said


def grouped(**options: Any) -> list[tuple[str, float, int]]:
    net = lifted()
    return [(g["name"], g["lr"], len(g["params"])) for g in net.param_groups(0.1, **options)]


def test_the_body_can_be_slower_or_frozen() -> None:
    assert grouped(body_lr=0.01) == [
        ("body", 0.01, 2),
        ("n1", 0.1, 2),
        ("n2", 3.0, 2),
        ("prototypes", 3.0, 1),
    ]
    assert grouped(body_lr=0.0) == [("n1", 0.1, 2), ("n2", 3.0, 2), ("prototypes", 3.0, 1)]
    net = lifted()
    optimizer = torch.optim.SGD(net.param_groups(0.1, body_lr=0.0))
    before: list[Tensor] = [p.detach().clone() for p in net.n1[0].parameters()]
    step(net, optimizer, *DATA[0])
    assert all(torch.equal(a, b) for a, b in zip(before, net.n1[0].parameters(), strict=True))
    assert all(p.grad is None for p in net.n1[0].parameters())
    halves = ps.lift((nn.Sequential(nn.Linear(6, DIM), nn.LayerNorm(DIM)), nn.Linear(DIM, CLASSES)))
    with pytest.raises(ValueError, match="this N1 does not end in one"):
        halves.param_groups(0.1, body_lr=0.01)
