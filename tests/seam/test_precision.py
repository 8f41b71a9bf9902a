"""The seam stays at float32 or better, makes no host sync, and compiles without a break."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, DIM, Own, batches, lifted, same, sgd, train

import protoseam as ps

X, Y = batches()[0]
ESTIMATORS: dict[str, Callable[[], ps.AbstractCovariance]] = {
    "exact": ps.ExactCovariance,
    "exact diagonal": lambda: ps.ExactCovariance(structure="diagonal"),
    "exact shared": lambda: ps.ExactCovariance(structure="shared"),
    "running": ps.RunningCovariance,
    "running diagonal": lambda: ps.RunningCovariance(structure="diagonal"),
    "running shared": lambda: ps.RunningCovariance(structure="shared"),
    "running auto": lambda: ps.RunningCovariance("auto"),
    "isotropic": ps.IsotropicCovariance,
    "switch": ps.SwitchCovariance,
}
each_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seam_tensors(net: ps.Lifted) -> dict[str, Tensor]:
    own = {"prototypes": net.prototypes, "rho": net.rho}
    return own | {name: b for name, b in net.covariance.named_buffers() if b.is_floating_point()}


# ---------------------------------------------------------------------- autocast


@each_estimator
def test_under_autocast_the_seam_is_float32(make: Callable[[], ps.AbstractCovariance]) -> None:
    """The network runs in bfloat16, the terms do not; they equal float32's up to the embeddings' rounding."""
    net = lifted(covariance=make(), draws=2)
    plain = net(X, Y, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        assert net.embed(X).dtype == torch.bfloat16
        terms = net(X, Y, generator=seeded())
    terms.total.backward()
    for name, value in terms._asdict().items():
        assert value.dtype == torch.float32, name
        assert torch.allclose(value, getattr(plain, name), rtol=0.03), name
    assert torch.equal(terms.repulsion, plain.repulsion)  # no embedding, no head: nothing to round
    for name, t in seam_tensors(net).items():
        assert t.dtype in (torch.float32, torch.float64), name
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_under_autocast_the_consensus_loses_only_what_the_embeddings_lost() -> None:
    net = lifted()
    with torch.autocast("cpu", torch.bfloat16):
        z, found = net.embed(X), net(X, Y).consensus
    expected = 0.5 * net.rho * (z.float() - net.prototypes[Y]).square().sum(1).mean()
    assert torch.allclose(found, expected, rtol=1e-6)


def test_a_whole_training_under_autocast() -> None:
    net = lifted(covariance=ps.RunningCovariance("auto"), init="fsinit")
    optimizer = sgd(net)
    with torch.autocast("cpu", torch.bfloat16):
        net.initialize(batches())
        train(net, optimizer, batches(), range(2), 2)
    assert all(t.dtype in (torch.float32, torch.float64) for t in seam_tensors(net).values())
    assert net.covariance.mean_CK_0.dtype == torch.float64


# ---------------------------------------------------------------------- conversions


@each_estimator
@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "float"])
def test_converting_the_network_keeps_the_seam(
    make: Callable[[], ps.AbstractCovariance], convert: str
) -> None:
    net = lifted(covariance=make())
    before = {name: t.detach().clone() for name, t in seam_tensors(net).items()}
    getattr(net, convert)()
    dtype = {
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
        "float": torch.float32,
    }[convert]
    assert {p.dtype for p in [*net.n1.parameters(), *net.n2.parameters()]} == {dtype}
    for name, t in seam_tensors(net).items():
        wider = before[name].dtype == torch.float64 or convert == "double"
        assert t.dtype == (torch.float64 if wider else torch.float32), name
        assert torch.equal(t, before[name].to(t.dtype)), name
    assert isinstance(net.prototypes, nn.Parameter)
    net.float()
    assert net.prototypes.dtype == torch.float32
    for name, t in seam_tensors(net).items():
        assert t.dtype.itemsize >= before[name].dtype.itemsize, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_converted_network_trains(dtype: torch.dtype) -> None:
    net = lifted(covariance=ps.RunningCovariance(), init="fsinit").to(dtype)
    data = [(x.to(dtype), y) for x, y in batches()]
    net.initialize(data)
    train(net, sgd(net, lr=0.01), data, range(2), 2)
    assert net.prototypes.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(net.deploy()(data[0][0]), net(data[0][0]))


def test_a_double_network_is_swept_in_double() -> None:
    net = lifted(init="fsinit").double()
    data = [(x.double() + 1e-9, y) for x, y in batches()]
    net.initialize(data)
    z, y = torch.cat([net.embed(x) for x, _ in data]), torch.cat([y for _, y in data])
    expected = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    assert torch.allclose(net.prototypes, expected, rtol=1e-13, atol=1e-15)


# ---------------------------------------------------------------------- no host sync


@each_estimator
def test_the_objective_never_reads_a_value(make: Callable[[], ps.AbstractCovariance]) -> None:
    """Meta tensors have no values: whatever would wait for a device, `.item()` or `if tensor`, raises here."""
    net = lifted(covariance=make(), draws=2, antithetic=True)
    net.class_weights, net._checks.counted = "frequency", True
    net.to("meta")
    x, y = X.to("meta"), Y.to("meta")
    with pytest.raises(RuntimeError, match="meta tensors"):
        bool(x.sum() > 0)
    optimizer = torch.optim.SGD(net.param_groups(lr=0.1), momentum=0.9)
    for _ in range(3):
        terms = net(x, y)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    assert {t.device.type for t in terms} == {"meta"}


@each_estimator
def test_new_factors_need_no_sync_either(make: Callable[[], ps.AbstractCovariance]) -> None:
    from protoseam.core import factorize

    covariance = make()
    covariance.bind(CLASSES, DIM)
    covariance.to("meta")
    if isinstance(covariance, ps.RunningCovariance):
        covariance.refresh(None, None, None)
    factors, used = factorize(torch.empty(CLASSES, DIM, DIM, device="meta"), 0.1)
    assert factors.device.type == used.device.type == "meta"


# ---------------------------------------------------------------------- torch.compile


@each_estimator
def test_compiled_without_a_break_and_with_the_same_values(make: Callable[[], ps.AbstractCovariance]) -> None:
    torch._dynamo.reset()
    net = lifted(covariance=make(), draws=2)
    other = lifted(covariance=make(), draws=2)
    other.load_state_dict(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own tracing
        compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
        results = []
        for module, owner in ((net, net), (compiled, other)):
            torch.manual_seed(0)
            terms = module(X, Y)
            terms.total.backward()
            results.append((terms, [p.grad for p in owner.parameters()], owner.state_dict()))
    (a, a_grads, a_state), (b, b_grads, b_state) = results
    assert all(torch.allclose(p, q, rtol=1e-6) for p, q in zip(a, b, strict=True))
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(a_grads, b_grads, strict=True))
    assert all(torch.allclose(a_state[name], b_state[name]) for name in a_state)


@pytest.mark.parametrize("route", ["objective", "backward"])
def test_compiled_inside_a_network_trains_as_an_uncompiled_one(route: str) -> None:
    """Also the second one of its kind, which finds the first one's graphs; with logits asked for in between."""
    torch._dynamo.reset()

    def trained(compiled: bool) -> ps.Lifted:
        torch.manual_seed(0)
        net = lifted(Own(), covariance=ps.RunningCovariance())
        if compiled:
            net.n1.compile(backend="eager")
        optimizer = sgd(net, lr=2.0)  # beyond the limits
        for _ in net.epochs(batches(), 2):
            for x, y in batches():
                optimizer.zero_grad()
                net(x)
                if route == "objective":
                    net.objective(x, y).total.backward()
                else:
                    net.backward(x, y)
                optimizer.step()
        return net

    plain, *others = (trained(compiled) for compiled in (False, True, True))
    for other in others:  # all the way to the last step, which reads what a hook sees
        assert same(plain.state_dict(), other.state_dict())


def test_a_step_compiled_as_a_whole_is_told_that_nothing_bounds_it() -> None:
    torch._dynamo.reset()
    net = lifted(refit=False)
    optimizer, compiled = sgd(net), torch.compile(net, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own tracing
        compiled(X, Y).total.backward()
    optimizer.step()
    with pytest.warns(ps.SeamWarning, match=r"no limits.*net\.n1\.compile\(\)"):
        net.refresh(batches())
    net.refresh(batches())  # once
