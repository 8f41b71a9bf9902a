"""The captured step's own kernels against what they stand for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protoseam import core
from protoseam.lab.engine.optim import FlatSGD

pytestmark = pytest.mark.cuda


def test_a_batch_is_taken_by_the_counter_alone() -> None:
    from protoseam.lab.kernels.step import take_batch

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 5, 5, generator=generator).cuda().to(memory_format=torch.channels_last)
    labels, rates = torch.arange(40).cuda(), torch.rand(20, generator=generator).cuda()
    x, y, lr = torch.empty_like(images[:8]), torch.empty_like(labels[:8]), torch.zeros(1).cuda()
    for step in (0, 7, 19):
        take_batch(images, labels, rates, torch.tensor([step]).cuda(), x, y, lr, 5)
        rows = slice(8 * (step % 5), 8 * (step % 5) + 8)
        assert torch.equal(x, images[rows])
        assert torch.equal(y, labels[rows])
        assert lr == rates[step]


def test_while_compiling_nothing_of_this_thread_runs_and_afterwards_all_is_there() -> None:
    from protoseam.lab.kernels import step as kernels

    def update(p: Tensor) -> None:  # no other test has a working copy of this dtype
        kernels.sgd_update(p, v, g, work, lr, None, 1.0, 0.9, 0.0)

    class Launched(torch.autograd.Function):  # a backward usually launches from a thread of its own
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Tensor:
            update(p)
            return d

    p, other, g = (torch.ones(999, device="cuda") for _ in range(3))
    v, lr = torch.zeros(999, device="cuda"), torch.full((1,), 0.5, device="cuda")
    work = torch.zeros(999, device="cuda", dtype=torch.float16)
    x = torch.zeros(1, device="cuda", requires_grad=True)
    with kernels.compiling():
        Launched.apply(x).backward()
        update(p)
        thread = threading.Thread(target=update, args=(other,))
        thread.start()
        thread.join()
    assert torch.equal(p, torch.ones_like(p))
    assert torch.allclose(other, torch.full_like(other, 1 - 0.5 * 1.9))
    v.zero_()
    Launched.apply(x).backward()
    assert torch.allclose(p, torch.full_like(p, 1 - 0.5 * 1.9))


@pytest.mark.parametrize(
    ("loss", "flag", "bad", "keep_going", "good"),
    [
        (1.0, 0, 0, False, True),
        (float("nan"), 0, 0, False, False),
        (float("-inf"), 0, 0, True, False),
        (1.0, 1, 0, False, False),
        (1.0, 0, 2, False, False),
        (1.0, 0, 2, True, True),
    ],
)
def test_the_books(loss: float, flag: int, bad: int, keep_going: bool, good: bool) -> None:
    from protoseam.lab.kernels.step import keep_books

    losses, sums = torch.tensor([loss, 2.0, 3.0]).cuda(), torch.ones(3).cuda()
    raised, ok = torch.tensor([flag], dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda()
    count, first, step = torch.tensor([bad]).cuda(), torch.tensor([-1]).cuda(), torch.tensor([5]).cuda()
    keep_books(losses, raised, ok, sums, count, first, step, keep_going=keep_going)
    assert bool(ok) == good
    assert sums.tolist() == ([1 + loss, 3.0, 4.0] if good else [1.0, 1.0, 1.0])
    assert int(count) == bad + (not good)
    assert int(first) == (5 if bad == 0 and not good else -1)
    assert int(step) == 6
    assert int(raised) == 0


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(100,), (70, 90), (64, 32, 3, 3), (1,), (2048,)]
    values = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    values[2] = values[2].to(memory_format=torch.channels_last)
    return [nn.Parameter(v) for v in values]


def gradients(step: int) -> list[Tensor]:
    """In orders of memory that do and do not match the parameters', and once none at all."""
    generator = torch.Generator().manual_seed(2 + step)
    out = [torch.randn(p.shape, generator=generator).cuda() for p in parameters()]
    if step == 1:
        out[2] = out[2].to(memory_format=torch.channels_last)
    return out


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_gradients_in_place_give_the_gathered_update(low: torch.dtype | None) -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": [], "lr": 0.1, "weight_decay": 0.01}]
    a = FlatSGD([{**groups[0], "params": ours}], low=low, keep={ours[3]})
    b = FlatSGD([{**groups[0], "params": theirs}], low=low, keep={theirs[3]})
    update = a.in_place()
    lr, ok = torch.tensor([0.1]).cuda(), torch.ones(1, dtype=torch.int32).cuda()
    flag = torch.zeros(1, dtype=torch.int32).cuda()
    for step in range(3):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.to(p.dtype), g.to(q.dtype)
        if step == 2:
            ours[0].grad = theirs[0].grad = None
        update.check(flag)
        update.apply(lr, ok)
        b.step(lr)
    assert int(flag) == 0
    for s, t in zip(a.segments, b.segments, strict=True):
        assert torch.equal(s.master, t.master)
        assert torch.equal(s.momentum, t.momentum)
        assert torch.equal(s.work, t.work)


@pytest.mark.parametrize("place", [(0, 99), (1, 6299), (4, 0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_raises_the_flag(place: tuple[int, int], value: float) -> None:
    params = parameters()
    optimizer = FlatSGD([{"params": params, "lr": 0.1}])
    before = optimizer.segments[0].master.clone()
    update, flag = optimizer.in_place(), torch.zeros(1, dtype=torch.int32).cuda()
    for p, g in zip(params, gradients(0), strict=True):
        p.grad = g
    grad = params[place[0]].grad
    assert grad is not None
    grad.view(-1)[place[1]] = value
    update.check(flag)
    assert int(flag) == 1
    update.apply(torch.tensor([0.1]).cuda(), torch.zeros(1, dtype=torch.int32).cuda())
    assert torch.equal(optimizer.segments[0].master, before)


@pytest.mark.parametrize(("classes", "width"), [(7, 5), (100, 32), (200, 70)])
def test_repulsion_on_the_device(classes: int, width: int) -> None:
    generator = torch.Generator().manual_seed(6)
    s = 0.3 * torch.randn(classes, width, generator=generator)
    s[1] = s[0]  # coincident: no gradient between the two
    here, there = s.clone().requires_grad_(), s.cuda().requires_grad_()
    a, b = core.repulsion(here, 1.3), core.repulsion(there, 1.3)
    torch.testing.assert_close(a, b.cpu())
    expected, found = torch.autograd.grad(a, here)[0], torch.autograd.grad(b, there)[0]
    torch.testing.assert_close(expected, found.cpu())
    with torch.no_grad():
        there[2, 0] = float("nan")
    value = core.repulsion(there, 1.3)
    assert value.isnan()
    assert torch.autograd.grad(value, there)[0].isnan().any()


@pytest.mark.parametrize("width", [5, 32, 64, 80])  # 80: too wide for the kernel
@pytest.mark.parametrize("windows", [(25.1, 32 / 3), (1e9, float("inf"))])  # 25.1 is no float32
def test_running_moments_on_the_device(width: int, windows: tuple[float, float]) -> None:
    window, mean_window = windows
    generator = torch.Generator().manual_seed(7)
    here, there = core.empty_moments(6, width, "full"), core.empty_moments(6, width, "full")
    there = core.Moments(*(t.cuda() for t in there))
    for step in range(5):
        y = torch.randint(0, 5, (37,), generator=generator)  # class 5 never comes
        z = step + torch.randn(37, width, generator=generator).bfloat16()
        core.merge_batch_(here, z, y, window=window, mean_window=mean_window)
        core.merge_batch_(there, z.cuda(), y.cuda(), window=window, mean_window=mean_window)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-10, atol=1e-10)
    z[y == 2] = float("nan")
    core.merge_batch_(there, z.cuda(), y.cuda(), window=window, mean_window=mean_window)
    spoilt = there.mean_CK.isnan().any(1).cpu()
    assert spoilt.tolist() == [c == 2 for c in range(6)]


def test_running_moments_of_labels_that_lie_apart_and_of_no_samples() -> None:
    table = torch.arange(64).view(32, 2) % 4  # the first column holds 0 and 2
    z = torch.randn(32, 5, generator=torch.Generator().manual_seed(8))
    here = core.empty_moments(4, 5, "full")
    there = core.Moments(*(t.cuda() for t in core.empty_moments(4, 5, "full")))
    for rows in (slice(0, 32), slice(0, 0)):
        core.merge_batch_(here, z[rows], table[rows, 0], window=1e9)
        core.merge_batch_(there, z.cuda()[rows], table.cuda()[rows, 0], window=1e9)
    assert here.count_C.tolist() == [16, 0, 16, 0]
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-10, atol=1e-10)
