"""AdamW and clipping on flat buffers, against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protoseam as ps
from protoseam.lab.engine.adamw import FlatAdamW
from protoseam.lab.engine.optim import FlatOptimizer, FlatSGD, Gathered


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    return model.to(memory_format=torch.channels_last)


def groups(model: nn.Module, lr: float = 0.01) -> list[dict[str, object]]:
    """Weights decay, vectors do not; the vectors' rate is twice the first group's."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "lr": lr, "weight_decay": 0.3},
        {"params": vectors, "lr": 2 * lr, "weight_decay": 0.0},
    ]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))) for _ in range(count)]


def train(
    model: nn.Module, optimizer: FlatOptimizer, data: list[tuple[Tensor, Tensor]], scale: float = 1.0
) -> None:
    for x, y in data:
        (scale * F.cross_entropy(model(x), y)).backward()
        optimizer.step(torch.tensor([0.01]))


def torch_trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    clip: float | None,
    scale: float,
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        (scale * F.cross_entropy(model(x), y)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_equals_torch_adamw_with_two_groups(momentum: float) -> None:
    ours = network()
    theirs = copy.deepcopy(ours)
    data = batches(8)
    train(ours, FlatAdamW(groups(ours), momentum=momentum), data)
    torch_trained(
        theirs, torch.optim.AdamW(groups(theirs), lr=0.01, betas=(momentum, 0.999)), data, None, 1.0
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3], ids=["about", "above", "below"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clipping_equals_torchs(kind: str, scale: float) -> None:
    ours = network()
    theirs = copy.deepcopy(ours)
    data = batches(5)
    if kind == "sgd":
        optimizer: FlatOptimizer = FlatSGD(groups(ours), clip=1.0)
        reference: torch.optim.Optimizer = torch.optim.SGD(
            groups(theirs), lr=0.01, momentum=0.9, nesterov=True
        )
    else:
        optimizer = FlatAdamW(groups(ours), clip=1.0)
        reference = torch.optim.AdamW(groups(theirs), lr=0.01)
    train(ours, optimizer, data, scale)
    torch_trained(theirs, reference, data, 1.0, scale)
    assert_close(ours, theirs)


def test_state_round_trip_continues_exactly() -> None:
    data = batches(6)
    straight = network()
    resumed = copy.deepcopy(straight)
    train(straight, FlatAdamW(groups(straight)), data)
    first = FlatAdamW(groups(resumed))
    train(resumed, first, data[:3])
    again = copy.deepcopy(resumed)
    second = FlatAdamW(groups(again))
    second.load_state_dict(first.state_dict())
    train(again, second, data[3:])
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), again.parameters(), strict=True))


def test_a_state_of_sgd_is_no_state_of_adamw() -> None:
    model = network()
    with pytest.raises(KeyError, match="second"):
        FlatAdamW(groups(model)).load_state_dict(FlatSGD(groups(model)).state_dict())


@pytest.mark.parametrize("device_decides", [False, True])
def test_a_step_that_does_not_count_changes_nothing(
    device_decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the weights nor the moments nor the count; by the masks of a captured step as by the host's decision."""
    model = network()
    optimizer = FlatAdamW(groups(model))
    train(model, optimizer, batches(2))
    before, weights = optimizer.state_dict(), [s.master.clone() for s in optimizer.segments]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.gather()
    ok = torch.zeros(1, dtype=torch.int32)
    if device_decides:
        monkeypatch.setattr(FlatAdamW, "apply", _as_on_a_device)
    optimizer.apply(torch.tensor([0.01]), ok)
    assert int(optimizer.count) == 2
    for name in ("momentum", "second"):
        for a, b in zip(before[name], optimizer.state_dict()[name], strict=True):
            assert torch.equal(a, b), name
    assert all(torch.equal(w, s.master) for w, s in zip(weights, optimizer.segments, strict=True))


class _Elsewhere(torch.Tensor):
    """A flag that says it lies on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


_apply = FlatAdamW.apply


def _as_on_a_device(self: FlatAdamW, lr: Tensor, ok: Tensor) -> None:
    _apply(self, lr, ok.as_subclass(_Elsewhere))


def test_masks_of_a_captured_step_give_the_hosts_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = network()
    theirs = copy.deepcopy(ours)
    a, b = FlatAdamW(groups(ours)), FlatAdamW(groups(theirs))
    for x, y in batches(3):
        for model, optimizer, apply in ((ours, a, _as_on_a_device), (theirs, b, _apply)):
            F.cross_entropy(model(x), y).backward()
            optimizer.gather()
            apply(optimizer, torch.tensor([0.01]), torch.ones(1, dtype=torch.int32))
    assert int(a.count) == int(b.count) == 3
    for s, t in zip(a.segments, b.segments, strict=True):
        assert torch.equal(s.master, t.master)


def test_gathered_gradients_raise_the_flag() -> None:
    model = network()
    optimizer = FlatAdamW(groups(model))
    update, flag = optimizer.in_place(), torch.zeros(1, dtype=torch.int32)
    assert isinstance(update, Gathered)
    for bad in (False, True):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if bad:
            model[1].bias.grad = torch.full_like(model[1].bias, torch.inf)
        update.check(flag)
        assert bool(flag) == bad


def test_low_precision_copies_follow_float32_masters() -> None:
    model = nn.Linear(16, 8)
    optimizer = FlatAdamW([{"params": list(model.parameters()), "lr": 0.1}], low=torch.bfloat16, clip=1.0)
    with optimizer.full_precision():
        start = model.weight.detach().clone()
    for _ in range(20):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(torch.tensor([1e-6]))
    with optimizer.full_precision():
        moved, master = start - model.weight, model.weight.detach().clone()
    assert (moved > 1e-5).all()
    assert torch.equal(model.weight, master.bfloat16())


@pytest.mark.parametrize(("kind", "limited"), [(FlatAdamW, False), (FlatSGD, True)])
def test_the_seam_limits_n1_for_sgd_alone_as_with_torchs_optimizers(
    kind: type[FlatOptimizer], limited: bool
) -> None:
    """Large features make steps that a limit must shorten; Adam divides by the gradient's size in any case."""
    x, y = 100 * torch.randn(64, 8), torch.arange(64) % 4
    net = ps.lift(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), num_classes=4, dim=4)
    net.initialize([(x, y)])
    net.set_progress(0, 2)
    free = copy.deepcopy(net)
    free.param_groups(0.1, bounded=False)
    kind(net.param_groups(0.1))
    for n in (net, free):
        n.objective(x, y, generator=torch.Generator().manual_seed(0)).total.backward()
    same = [
        torch.equal(p.grad, q.grad) for p, q in zip(net.n1.parameters(), free.n1.parameters(), strict=True)
    ]
    assert not any(same) if limited else all(same)
