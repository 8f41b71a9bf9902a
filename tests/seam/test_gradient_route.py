"""`net.backward`, which training on CUDA runs, leaves the gradients that autograd leaves, for every setting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import CLASSES, FEATURES, HIDDEN, Noisy, batches, lifted

import protoseam as ps

DATA = batches()
STRUCTURES = ("full", "diagonal", "shared")
ESTIMATORS: dict[str, ps.AbstractCovariance] = {
    **{f"exact {s}": ps.ExactCovariance(structure=s) for s in STRUCTURES},
    **{f"running {s}": ps.RunningCovariance(structure=s) for s in STRUCTURES},
    "running auto": ps.RunningCovariance(floor="auto"),
    "switch": ps.SwitchCovariance(),
    "isotropic": ps.IsotropicCovariance(),
}
TARGETS = {
    "labels": DATA[0][1],
    "one-hot": F.one_hot(DATA[0][1], CLASSES).float(),
    "soft": torch.softmax(torch.randn(16, CLASSES, generator=torch.Generator().manual_seed(3)), 1),
}


def two(net: ps.Lifted, y: torch.Tensor) -> tuple[ps.Terms, ps.Terms, ps.Lifted]:
    """The terms by each route, and a copy of the network that took autograd's."""
    other = copy.deepcopy(net)
    other._bounds = net._bounds if net._bounds is None else copy.copy(net._bounds)
    x = DATA[0][0].to(next(net.n1.parameters()).dtype)
    torch.manual_seed(5)
    by_hand = net.backward(x, y, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    by_graph = other.objective(x, y, generator=torch.Generator().manual_seed(1))
    by_graph.total.backward()
    return by_hand, by_graph, other


def assert_same(net: ps.Lifted, y: torch.Tensor) -> None:
    by_hand, by_graph, other = two(net, y)
    for name in ps.Terms._fields:
        torch.testing.assert_close(getattr(by_hand, name), getattr(by_graph, name).detach(), msg=name)
        assert not getattr(by_hand, name).requires_grad
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=name)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)  # what the estimator and BatchNorm saw


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("weights", ["uniform", "frequency"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_by_hand_are_autograds(estimator: str, weights: str, targets: str) -> None:
    net = lifted(Noisy(), covariance=ESTIMATORS[estimator], class_weights=weights, draws=2)
    net.initialize(DATA)
    net.set_progress(1, 4, lr=0.1)
    for x, y in DATA:
        net(x, y)
    net.refresh(DATA)
    if targets == "one-hot":  # autograd's route counts these as labels
        by_hand, by_graph, _ = two(net, TARGETS[targets])
        torch.testing.assert_close(by_hand.total, by_graph.total.detach())
    else:
        assert_same(net, TARGETS[targets])


@pytest.mark.parametrize(
    "options",
    [
        {"repulsion_scale": 0.3},
        {"draws": 4, "antithetic": True},
        {"label_smoothing": 0.1},
        {"loss_fn": nn.MultiMarginLoss(reduction="none")},
    ],
    ids=str,
)
def test_so_it_is_with_other_options(options: dict[str, Any]) -> None:
    net = lifted(**options)
    assert_same(net, TARGETS["labels"])


def test_so_it_is_where_gradients_are_bounded() -> None:
    net = lifted(Noisy(), alpha=3.0)
    net.param_groups(lr=2.0, seam_lr=5.0)  # rates at which each limit holds
    assert_same(net, TARGETS["labels"])


def test_so_it_is_behind_a_convolution() -> None:
    body = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3)
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES))
    assert_same(ps.lift((body, head), probe=DATA[0][0], init="random"), TARGETS["labels"])


class Spare(nn.Module):
    """A head with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.used(z)


@pytest.mark.parametrize("targets", ["labels", "soft"])
@pytest.mark.parametrize("case", ["frozen N1", "float64 N1", "unused layer"])
def test_so_it_is_with_halves_of_other_kinds(case: str, targets: str) -> None:
    head = Spare() if case == "unused layer" else nn.Linear(5, CLASSES)
    net = ps.lift((nn.Linear(FEATURES, 5), head), dim=5, num_classes=CLASSES, init="random")
    net.n1.requires_grad_(case != "frozen N1")
    if case == "float64 N1":
        net.n1.double()
    assert_same(net, TARGETS[targets])


def test_gradients_are_not_added_up() -> None:
    net = lifted()
    net.backward(*DATA[0])
    with pytest.raises(ps.SeamError, match="zero_grad"):
        net.backward(*DATA[0])


def test_several_processes_are_sent_to_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protoseam.seam.backward.world_size", lambda: 2)
    with pytest.raises(ps.SeamError, match=r"which nothing averages.*DistributedDataParallel"):
        lifted().backward(*DATA[0])
