"""On a GPU: the same values, no sync in a step, and a step that a CUDA graph can capture."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from toys import batches, lifted, sgd, train

import protoseam as ps
from protoseam.seam.graphs import Graphs

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


@each_estimator
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_replayed_gradients_are_those_of_the_pieces(
    make: Callable[[], ps.AbstractCovariance], optimizer: str
) -> None:
    """In every step of two epochs, with one rate after the other: N1's, N2's and the prototypes'."""
    net = lifted(covariance=make(), refit=False).cuda()
    loader = data()
    net.initialize(loader)
    chosen = {"sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9), "adamw": torch.optim.AdamW}
    trained = chosen[optimizer](net.param_groups(lr=0.5 if optimizer == "sgd" else 0.01))
    for epoch in range(2):
        net.set_progress(epoch, 2, lr=0.5)
        for x, y in [*loader, (loader[0][0][:5], loader[0][1][:5])]:
            other = copy.deepcopy(net)
            other._bounds = net._bounds
            torch.manual_seed(7)
            net.zero_grad()
            terms = net.backward(x, y)
            torch.manual_seed(7)
            other.zero_grad()
            torch.testing.assert_close(terms, other.backward(x, y, capture=False), rtol=1e-5, atol=1e-6)
            for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)
            for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
                torch.testing.assert_close(a, b, msg=name)
            for group in trained.param_groups:
                group["lr"] *= 1.1
            trained.step()
        net.refresh(loader)
    assert any(graph._replay for graph in net._graphs._graphs.values())


def test_a_replayed_step_draws_new_noise_and_makes_no_sync(request: pytest.FixtureRequest) -> None:
    net, noise = lifted().cuda(), torch.Generator("cuda").manual_seed(1)
    x, y = data()[0]
    found = []
    for step in range(5):
        if step == 3:
            request.getfixturevalue("no_sync")
        net.zero_grad()
        found.append(net.backward(x, y, generator=noise, casting=autocast).classification)
    torch.cuda.set_sync_debug_mode("default")
    assert len({float(value) for value in found}) == 5
    assert noise.initial_seed() == 1


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def test_work_that_cannot_be_captured_is_refused_in_words() -> None:
    graphs, x = Graphs(), torch.ones(2).cuda()

    def run() -> list[torch.Tensor]:
        return graphs.run(lambda x: [x * x.sum().item()], [x], reads=[], kind=0)

    assert len(run()) == 1
    with pytest.raises(ps.SeamError, match=r"capture=False"):
        run()
    torch.cuda.synchronize()


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
