"""Optimizers that leave the prototypes out, or everything, and those that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, FEATURES, batches, lifted, network, sgd, train

import protoseam as ps

X, Y = batches()[0]
DATA = batches()
Optimizers = list[torch.optim.Optimizer]


def steps(net: ps.Lifted, optimizers: Optimizers, count: int, zero: Callable[[], None] | None = None) -> None:
    for at in range(count):
        terms = net.objective(*DATA[at % len(DATA)])
        for optimizer in optimizers if zero is None else ():
            optimizer.zero_grad()
        if zero is not None:
            zero()
        terms.total.backward()
        for optimizer in optimizers:
            optimizer.step()


def without_prototypes(net: ps.Lifted, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD([*net.n1.parameters(), *net.n2.parameters()], lr=0.01, **options)


# ---------------------------------------------------------------------- prototypes that are left out


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}], ids=str)
def test_prototypes_in_no_optimizer(options: dict[str, bool]) -> None:
    net = lifted()
    with pytest.raises(
        ps.SeamError, match=r"optimizer steps changed the network but not the prototypes.*param_groups"
    ):
        steps(net, [without_prototypes(net, **options)], 12)


def test_prototypes_in_no_optimizer_are_noticed_soon_but_not_at_once() -> None:
    """Alternating schemes may leave them out for a few steps."""
    net = lifted()
    optimizer = without_prototypes(net)
    steps(net, [optimizer], 8)
    with pytest.raises(ps.SeamError, match=r"^8 optimizer steps"):
        steps(net, [optimizer], 1)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_the_epochs_end_notices_what_the_steps_cannot(options: dict[str, bool]) -> None:
    """A fused kernel leaves no trace of its steps, and zeroed gradients none of the ones left out."""
    net = lifted()
    net.set_progress(0, 2)
    optimizer = without_prototypes(net, **options)
    for x, y in DATA * 3:
        net.zero_grad()
        net.objective(x, y).total.backward()
        optimizer.step()
    with pytest.raises(ps.SeamError, match="the head moved during the epoch but the prototypes did not"):
        net.refresh(DATA)


def test_a_learning_rate_of_zero() -> None:
    net = lifted()
    optimizer = torch.optim.SGD(net.param_groups(lr=0.1, prototype_lr=0.0))
    net.set_progress(0, 3)
    steps(net, [optimizer], 20)
    with pytest.raises(ps.SeamError, match=r"learning rate is 0 .*net\.prototypes\.requires_grad_\(False\)"):
        net.set_progress(1, 3)


def test_an_optimizer_on_the_model_that_was_lifted_is_named() -> None:
    original = network()
    net = ps.lift(original, dim=2)
    net.initialize(DATA)
    net.set_progress(0, 30)
    steps(net, [torch.optim.SGD(original.parameters(), lr=0.1)], 8)
    with pytest.warns(ps.SeamWarning, match=r"8 batches .* moved neither .* ps\.lift copies the model"):
        net.refresh(DATA)
    net.set_progress(1, 30)  # once an epoch, and not for epochs without batches
    net.set_progress(2, 30)


def test_cross_entropy_on_the_logits_is_named() -> None:
    net = lifted()
    optimizer = sgd(net)
    net.set_progress(0, 3)
    for x, y in DATA:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with pytest.raises(
        ps.SeamError, match=r"net\.objective was not called.*Take net\.objective\(x, y\)\.total"
    ):
        net.refresh(DATA)


# ---------------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_ordinary_training(kind: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    net = lifted()
    optimizer = kind(net.param_groups(lr=0.01), **options)
    train(net, optimizer, DATA * 4, range(3), 3)


def test_gradient_accumulation() -> None:
    net = lifted()
    optimizer = sgd(net)
    net.set_progress(0, 4)
    for _ in range(3):
        for at in range(64):
            (net.objective(*DATA[at % len(DATA)]).total / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.refresh(DATA)


@pytest.mark.parametrize("fused", ["head", "prototypes", "both", "neither"])
def test_two_optimizers(fused: str) -> None:
    net = lifted()
    head = without_prototypes(net, fused=fused in ("head", "both"))
    own = torch.optim.SGD([net.prototypes], lr=0.01, fused=fused in ("prototypes", "both"))
    net.set_progress(0, 4)
    steps(net, [head, own], 40)
    net.refresh(DATA)


def test_an_optimizer_that_writes_through_data() -> None:
    class Through(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad, alpha=-group["lr"])

    net = lifted()
    steps(net, [without_prototypes(net), Through([net.prototypes], lr=0.01)], 40)


def test_prototypes_in_every_fourth_step() -> None:
    net = lifted()
    head, own = without_prototypes(net), torch.optim.SGD([net.prototypes], lr=0.01)
    net.set_progress(0, 4)
    for _ in range(10):
        steps(net, [head], 3, zero=net.zero_grad)
        steps(net, [head, own], 1)
    net.set_progress(1, 4)


def test_prototypes_that_have_moved_may_stand_still_at_the_end_of_a_schedule() -> None:
    """Steps can become too small for a few numbers to change while others still do."""
    net = lifted()
    net.set_progress(0, 3)
    steps(net, [sgd(net)], 4)
    net.set_progress(1, 3)
    still = torch.optim.SGD(net.param_groups(lr=0.01, prototype_lr=0.0), fused=True)
    steps(net, [still], 4)
    net.set_progress(2, 3)
    resumed = lifted()
    resumed.load_state_dict(net.state_dict())  # of an epoch after the first
    resumed.set_progress(2, 4)
    steps(resumed, [torch.optim.SGD(resumed.param_groups(lr=0.01, prototype_lr=0.0), fused=True)], 4)
    resumed.set_progress(3, 4)


def test_frozen_prototypes() -> None:
    net = lifted()
    net.prototypes.requires_grad_(False)
    train(net, without_prototypes(net), DATA * 4, range(3), 3)
    assert net.prototypes.grad is None


def test_a_head_without_parameters() -> None:
    class Distances(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return -torch.cdist(z, torch.eye(CLASSES)).square()

    net = ps.lift(
        (nn.Linear(FEATURES, CLASSES), Distances()),
        dim=CLASSES,
        num_classes=CLASSES,
        init="unit",
        schedule=ps.ConstantRho(2.0),
    )
    assert [g["name"] for g in net.param_groups(lr=0.1)] == ["n1", "prototypes"]
    train(net, sgd(net), DATA * 4, range(2), 2)
    assert torch.equal(net.deploy()(X), net(X))


def test_evaluation_between_steps_is_not_counted() -> None:
    net = lifted()
    optimizer = without_prototypes(net)
    for _ in range(20):
        with torch.no_grad():
            net(X, Y)
        steps(net.eval(), [optimizer], 1)
        net.train()


def test_loading_a_state_forgets_suspicions() -> None:
    net = lifted()
    optimizer = without_prototypes(net)
    for _ in range(3):
        steps(net, [optimizer], 7)
        net.load_state_dict(net.state_dict())
