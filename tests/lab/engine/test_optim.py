from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.lab.engine.optim import FlatSGD


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    return model.to(memory_format=torch.channels_last)


def groups(model: nn.Module, lr: float = 0.05) -> list[dict[str, object]]:
    """Weights decay, vectors do not; the vectors' rate is twice the first group's."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "lr": lr, "weight_decay": 5e-3},
        {"params": vectors, "lr": 2 * lr, "weight_decay": 0.0},
    ]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))) for _ in range(count)]


def train(model: nn.Module, optimizer: FlatSGD, data: list[tuple[Tensor, Tensor]], lr: float = 0.05) -> None:
    rate = torch.tensor(lr)
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step(rate)


def test_equals_torch_sgd_with_two_groups() -> None:
    ours = network()
    theirs = copy.deepcopy(ours)
    data = batches(6)
    reference = torch.optim.SGD(groups(theirs), lr=0.05, momentum=0.9, nesterov=True)
    train(ours, FlatSGD(groups(ours)), data)
    for x, y in data:
        reference.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_the_rate_is_read_at_every_step() -> None:
    model = network()
    optimizer = FlatSGD(groups(model))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1), lr=0.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    train(model, optimizer, batches(1), lr=0.1)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_are_released() -> None:
    model = network()
    train(model, FlatSGD(groups(model)), batches(1))
    assert all(p.grad is None for p in model.parameters())


def test_memory_order_is_kept() -> None:
    model = network()
    FlatSGD(groups(model))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_two_runs_agree_bit_for_bit() -> None:
    first = network()
    second = copy.deepcopy(first)
    data = batches(4)
    train(first, FlatSGD(groups(first)), data)
    train(second, FlatSGD(groups(second)), data)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_low_precision_copies_follow_float32_masters() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))
    kept = model[1].weight
    optimizer = FlatSGD([{"params": list(model.parameters()), "lr": 0.1}], low=torch.bfloat16, keep={kept})
    assert model[0].weight.dtype == torch.bfloat16
    assert kept.dtype == torch.float32
    # Steps far below the resolution of bfloat16 still add up in the master.
    with optimizer.full_precision():
        start = model[0].weight.detach().clone()
    for _ in range(50):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(torch.tensor(1e-6))
    with optimizer.full_precision():
        assert model[0].weight.dtype == torch.float32
        moved = start - model[0].weight
        master = model[0].weight.detach().clone()
    assert (moved > 0).all()
    assert torch.equal(model[0].weight, master.bfloat16())


def test_state_round_trip_continues_exactly() -> None:
    data = batches(6)
    straight = network()
    resumed = copy.deepcopy(straight)
    train(straight, FlatSGD(groups(straight)), data)
    first = FlatSGD(groups(resumed))
    train(resumed, first, data[:3])
    state = first.state_dict()
    again = copy.deepcopy(resumed)
    second = FlatSGD(groups(again))
    second.load_state_dict(state)
    train(again, second, data[3:])
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), again.parameters(), strict=True))


def test_state_of_another_network_is_refused() -> None:
    state = FlatSGD(groups(network())).state_dict()
    other = FlatSGD([{"params": list(nn.Linear(3, 2).parameters()), "lr": 0.1}])
    with pytest.raises(ValueError, match="belongs to another network"):
        other.load_state_dict(state)


def test_a_gradient_that_is_not_finite_leaves_no_trace_in_a_clipped_buffer() -> None:
    """Between parameters lie gaps, whose zeros times a factor of NaN would be NaN in every step to come."""
    model = nn.Linear(3, 2)
    optimizer = FlatSGD([{"params": list(model.parameters()), "lr": 0.1}], clip=0.5)
    for value, finite in ((torch.nan, False), (torch.inf, False), (2.0, True)):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        assert bool(torch.isfinite(optimizer.gather())) == finite
    squares = [s.grad.square().sum() for s in optimizer.segments]
    assert float(sum(squares)) == pytest.approx(0.25, rel=1e-4)
