"""On a GPU: the same values, no sync in a step, and a step that a CUDA graph can capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from toys import batches, lifted, sgd, train

import protoseam as ps

pytestmark = pytest.mark.cuda

ESTIMATORS: dict[str, Callable[[], ps.AbstractCovariance]] = {
    "exact": ps.ExactCovariance,
    "exact auto": lambda: ps.ExactCovariance("auto"),
    "running": ps.RunningCovariance,
    "running diagonal": lambda: ps.RunningCovariance(structure="diagonal"),
    "running shared": lambda: ps.RunningCovariance(structure="shared"),
    "running auto": lambda: ps.RunningCovariance("auto"),
    "isotropic": ps.IsotropicCovariance,
    "switch": ps.SwitchCovariance,
}
each_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.cuda(), y.cuda()) for x, y in batches()]


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # torch says once that this mode may change
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_estimator
def test_training_gives_what_the_cpu_gives(make: Callable[[], ps.AbstractCovariance]) -> None:
    """Up to the noise, which another generator draws: so with as good as none of it."""
    nets = [lifted(covariance=make(), init="fsinit") for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[1].cuda()
    for net, loader in zip(nets, (batches(), data()), strict=True):
        net.initialize(loader)
        net.refresh(loader)
        net.eval()
    assert torch.allclose(nets[0].prototypes, nets[1].prototypes.cpu(), atol=1e-5)
    assert torch.allclose(nets[0].covariance.factors, nets[1].covariance.factors.cpu(), atol=1e-4)
    for term in ("consensus", "repulsion"):
        a, b = (getattr(net(*loader[0]), term) for net, loader in zip(nets, (batches(), data()), strict=True))
        assert torch.allclose(a, b.cpu(), rtol=1e-4)
    train(nets[1].train(), sgd(nets[1]), data(), range(3), 4)


@each_estimator
def test_a_step_makes_no_sync(
    make: Callable[[], ps.AbstractCovariance], request: pytest.FixtureRequest
) -> None:
    net = lifted(covariance=make(), draws=2, antithetic=True).cuda()
    optimizer = sgd(net)
    loader = data()
    net.initialize(loader)
    request.getfixturevalue("no_sync")
    for x, y in loader:
        terms = net(x, y)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()


@each_estimator
def test_a_step_can_be_captured(make: Callable[[], ps.AbstractCovariance]) -> None:
    net = lifted(covariance=make()).cuda()
    loader = data()
    net.initialize(loader)
    x, y = (t.clone() for t in loader[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net.zero_grad()
            net(x, y).total.backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    net.zero_grad()
    with torch.cuda.graph(graph):
        terms = net(x, y)
        terms.total.backward()
    x.copy_(loader[1][0])
    y.copy_(loader[1][1])
    graph.replay()
    replayed = terms.consensus.clone()
    gradient = net.prototypes.grad.clone()
    assert torch.allclose(replayed, net(*loader[1]).consensus, rtol=1e-5)
    assert gradient.isfinite().all()


def test_under_autocast_the_terms_are_float32() -> None:
    net = lifted(covariance=ps.RunningCovariance()).cuda()
    x, y = data()[0]
    with torch.autocast("cuda", torch.bfloat16):
        terms = net(x, y)
    assert {t.dtype for t in terms} == {torch.float32}


def test_divergence_is_noticed_at_the_epochs_end() -> None:
    net = lifted().cuda()
    x, y = data()[0]
    net(x * torch.nan, y)
    with pytest.raises(ps.SeamError, match="the objective is not finite"):
        net.set_progress(1, 9)


def test_embeddings_kept_on_the_host_give_the_same_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from protoseam.seam import passes

    net = ps.lift(nn.Linear(6, 4), num_classes=4, dim=5, init="random").cuda()
    data = [(torch.randn(40, 6), torch.arange(40) % 4) for _ in range(3)]
    net.refresh(data)
    expected = net.covariance.factors.clone()
    monkeypatch.setattr(passes, "_DEVICE_BYTES", 1000)
    net.initialize(data)
    net.refresh(data)
    torch.testing.assert_close(net.covariance.factors, expected)
