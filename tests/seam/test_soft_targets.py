"""Soft targets in the point form, bounded gradients, heads in closed form and temperatures."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, batches, lifted, network, same, sgd, step

import protoseam as ps

DATA = batches()
X, Y = DATA[0]


def mixed(lam: float = 0.7) -> tuple[Tensor, Tensor]:
    q = F.one_hot(Y, CLASSES).float()
    return lam * X + (1 - lam) * X.roll(1, 0), lam * q + (1 - lam) * q.roll(1, 0)


def test_the_pull_of_soft_targets_is_the_double_loop() -> None:
    net = lifted()
    x, q = mixed()
    z, s = net.embed(x).detach().double(), net.prototypes.detach().double()
    total = 0.0
    for b in range(len(z)):
        point = [sum(float(q[b, c] * s[c, k]) for c in range(CLASSES)) for k in range(DIM)]
        total += sum((float(z[b, k]) - point[k]) ** 2 for k in range(DIM))
    expected = 0.5 * float(net.rho) * total / len(z)
    assert float(net.objective(x, q).consensus.detach()) == pytest.approx(expected, rel=1e-5)
    slope = ps.core.consensus_slope(z, q.double(), s, net.rho.double())
    zz = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(ps.core.consensus(zz, q.double(), s, net.rho.double()), zz)
    assert torch.allclose(found, slope)


def test_one_hot_rows_are_labels_bit_for_bit() -> None:
    results = []
    for targets in (Y, F.one_hot(Y, CLASSES).float(), F.one_hot(Y, CLASSES).double()):
        torch.manual_seed(0)
        net = lifted(covariance=ps.RunningCovariance())
        optimizer = sgd(net)
        net.set_progress(0, 2)
        for _ in range(3):
            step(net, optimizer, X, targets)
        net.refresh()
        results.append(net.state_dict())
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.full((16, CLASSES), 0.5), "one row sums to 2"),
        (torch.cat([torch.full((16, 1), -0.5), torch.full((16, 3), 0.5)], 1), "the smallest is -0.5"),
        (torch.full((16, 5), 0.2), r"probabilities \(batch, 4\) as float, got .* of shape \(16, 5\)"),
        (torch.full((15, CLASSES), 0.25), "16 samples but 15 rows of soft targets"),
    ],
)
def test_what_is_no_probability_is_named(q: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lifted().objective(X, q)


def test_running_moments_leave_mixed_batches_out_and_then_look_at_the_data() -> None:
    net = lifted(init="fsinit", covariance=ps.RunningCovariance())
    exact = lifted(init="fsinit")
    exact.load_state_dict(net.state_dict(), strict=False)
    optimizer = sgd(net)
    for _ in net.epochs(DATA, 1):
        step(net, optimizer, *mixed())
        assert not net.covariance.count_C_0.any()
    exact.load_state_dict(
        {k: v for k, v in net.state_dict().items() if k != "covariance.factors"}, strict=False
    )
    exact.refresh(DATA)
    assert torch.equal(net.covariance.factors, exact.covariance.factors)
    soft = [
        (x, F.one_hot(y, CLASSES).float().roll(1, 0) * 0.1 + 0.9 * F.one_hot(y, CLASSES)) for x, y in DATA
    ]
    with pytest.raises(ValueError, match=r"yields mixed targets .* sweep=clean_loader"):
        next(iter(lifted(init="fsinit").epochs(soft, 2)))
    again = lifted(init="fsinit")
    for _ in again.epochs(soft, 2, sweep=DATA):
        step(again, sgd(again), *soft[0])


def test_torchvisions_mixup_goes_in_as_it_comes() -> None:
    from torchvision.transforms import v2

    x, q = v2.MixUp(num_classes=CLASSES)(torch.rand(16, 3, 8, 8), Y)
    net = ps.lift(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, CLASSES)), init="random"
    )
    net.objective(x, q).total.backward()
    assert net.prototypes.grad is not None


def test_label_smoothing_is_cross_entropys() -> None:
    plain, smooth = lifted(), lifted(label_smoothing=0.2)
    smooth.load_state_dict(plain.state_dict())

    def term(net: ps.Lifted) -> Tensor:
        return net.objective(X, Y, generator=torch.Generator().manual_seed(0)).classification

    z = ps.core.sample(
        plain.prototypes, plain.covariance.factors, generator=torch.Generator().manual_seed(0)
    )[0]
    expected = F.cross_entropy(plain.n2(z), torch.arange(CLASSES), label_smoothing=0.2)
    assert torch.allclose(term(smooth), expected)
    assert term(smooth) != term(plain)
    for wrong in ({"label_smoothing": 1.0}, {"label_smoothing": 0.1, "loss_fn": F.cross_entropy}):
        with pytest.raises(ValueError, match=r"label_smoothing.*1"):
            lifted(**wrong)


# ---------------------------------------------------------------------- gradients in bounds


def raw_and_bounded(net: ps.Lifted, lr: float, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for bounded in (False, True):
        net.param_groups(lr, bounded=bounded, **options)
        net.zero_grad()
        net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    return found[0], found[1]


def test_every_backward_ends_within_the_limits() -> None:
    net = lifted()
    lr = 5.0
    raw, kept = raw_and_bounded(net, lr, seam_lr=7.0)
    names = [name for name in raw if name.startswith("n1.")]
    square = sum(raw[name].double().square().sum() for name in names)
    curvature = ps.core.feature_curvature(net.n1[:2](X).detach().double())
    pull = net.objective(X, Y).consensus.detach().double()
    weights = sum(p.detach().double().square().sum() for p in net.n1.parameters())
    s = ps.core.consensus_factor(pull, square, weights, net.rho.double(), curvature, lr)
    assert 0 < float(s) < 1
    for name in names:
        assert torch.allclose(kept[name].double(), s * raw[name].double(), rtol=1e-4)
    head = ps.core.head_factor(net.prototypes.detach(), net.covariance.factors, 7.0)
    assert 0 < float(head) < 1
    assert torch.allclose(kept["n2.weight"], head * raw["n2.weight"], rtol=1e-5)
    rows = ps.core.prototype_factors(raw["prototypes"], net.alpha, 7.0)
    assert torch.allclose(kept["prototypes"], rows * raw["prototypes"], rtol=1e-5)


def test_small_rates_leave_gradients_as_they_are() -> None:
    raw, kept = raw_and_bounded(lifted(), 1e-6)
    assert all(torch.equal(raw[name], kept[name]) for name in raw)


def test_a_smaller_step_of_sgd_is_smaller_in_its_decay_too() -> None:
    net = lifted()
    raw, kept = raw_and_bounded(net, 5.0)
    share = kept["n1.0.weight"].norm() / raw["n1.0.weight"].norm()
    assert 0 < float(share) < 0.5
    # not told to the network: the optimizer leaves it in the groups
    torch.optim.SGD(net.param_groups(5.0), weight_decay=0.3)
    net.zero_grad()
    net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
    for name, p in net.n1.named_parameters():
        assert p.grad is not None
        # SGD adds 0.3·p itself: together share·(g + 0.3·p)
        expected = share * raw[f"n1.{name}"] - (1 - share) * 0.3 * p.detach()
        assert torch.allclose(p.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam],
)
def test_an_optimizer_that_rescales_gradients_gets_n1s_as_they_are(kind: type[torch.optim.Optimizer]) -> None:
    net = lifted()
    raw, kept = raw_and_bounded(net, 5.0)
    kind(net.param_groups(5.0), weight_decay=0.3)  # type: ignore[call-arg]
    net.zero_grad()
    net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
    for name, p in net.named_parameters():
        expected = raw[name] if name.startswith("n1.") else kept[name]  # the seam's own limits stay
        assert p.grad is not None
        assert torch.allclose(p.grad, expected, rtol=1e-5)
    assert not torch.allclose(kept["n2.weight"], raw["n2.weight"])


@pytest.mark.parametrize("none", [True, False])
def test_accumulated_gradients_are_bounded_as_one(none: bool) -> None:
    """Two halves of a batch, each at half weight, give the gradients of the whole."""
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    quiet = ps.IsotropicCovariance(1e-6, floor=1e-3)
    net.covariance = copy.deepcopy(quiet)
    net.covariance.bind(CLASSES, DIM)
    found = []
    for parts in (1, 2):
        net.zero_grad(set_to_none=none)
        for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
            g = torch.Generator().manual_seed(0)
            (net.objective(x, y, generator=g).total / parts).backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    for name, whole in found[0].items():
        if name != "prototypes":  # each half's is bounded by itself
            assert torch.allclose(found[1][name], whole, rtol=2e-2, atol=1e-4), name


def test_what_accumulates_is_bounded_by_the_mean_of_its_losses() -> None:
    net = lifted()
    with torch.no_grad():
        net.n1[-1].weight.mul_(1e4)  # so that Polyak's limit, the one with the loss in it, is the tightest
    parts = [(X[:2], Y[:2], 0.25), (X[2:], Y[2:], 0.75)]

    def accumulated(bounded: bool) -> dict[str, Tensor]:
        net.param_groups(5.0, bounded=bounded)
        net.zero_grad()
        for x, y, weight in parts:
            (weight * net.objective(x, y, generator=torch.Generator().manual_seed(0)).total).backward()
        return {name: p.grad.clone() for name, p in net.n1.named_parameters() if p.grad is not None}

    raw, kept = accumulated(False), accumulated(True)
    square = sum(g.double().square().sum() for g in raw.values())
    loss = sum(weight * net.objective(x, y).consensus.detach().double() for x, y, weight in parts)
    s = loss / (5.0 * square)
    assert 0 < float(s) < 1
    for name, gradient in raw.items():
        assert torch.allclose(kept[name].double(), s * gradient.double(), rtol=1e-4), name


def test_a_step_that_is_not_finite_leaves_no_trace_in_gradients_set_to_zero() -> None:
    """As GradScaler skips it: zero_grad(set_to_none=False), and the next batch counts alone."""
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0), weight_decay=0.3)
    found = []
    for scale in (1.0, math.nan, 1.0):
        net.zero_grad(set_to_none=False)
        terms = net.objective(X, Y, generator=torch.Generator().manual_seed(0))
        (scale * terms.total).backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        assert not found[1][name].isfinite().any(), name
        assert torch.allclose(found[2][name], gradient, rtol=1e-5), name


def test_parameters_that_took_the_place_of_others_are_bounded() -> None:
    net = lifted()
    _, kept = raw_and_bounded(net, 5.0)
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    net.zero_grad()
    net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, kept[name]), name


def test_a_loss_scale_changes_nothing_but_the_scale() -> None:
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    found = []
    for scale in (1.0, 1024.0):
        net.zero_grad()
        terms = net.objective(X, Y, generator=torch.Generator().manual_seed(0))
        (scale * terms.total).backward()
        found.append({name: p.grad / scale for name, p in net.named_parameters()})
    for name, one in found[0].items():
        assert torch.allclose(found[1][name], one, rtol=1e-4), name


def test_rates_far_beyond_the_limit_still_train() -> None:
    torch.manual_seed(0)
    net = ps.lift(network(), num_classes=CLASSES, dim=DIM)
    optimizer = torch.optim.SGD(net.param_groups(2.0), momentum=0.9)
    for _ in net.epochs(DATA, 40):
        for x, y in DATA:
            step(net, optimizer, x, y)
    right = [(net(x).argmax(1) == y).float().mean() for x, y in DATA]
    assert sum(right) / len(right) > 0.95


def test_a_deployed_or_saved_network_holds_nothing_of_the_bounds(tmp_path: Any) -> None:
    net = lifted()
    optimizer = sgd(net)
    step(net, optimizer, X, Y)
    assert not any(m._forward_pre_hooks for m in net.modules())
    torch.save(net, tmp_path / "whole.pt")
    copied = copy.deepcopy(net)
    step(copied, sgd(copied), X, Y)


# ---------------------------------------------------------------------- heads


def test_refit_head_is_the_discriminant_of_prototypes_and_pooled_covariance() -> None:
    net = lifted(init="fsinit", class_weights="frequency")
    net.initialize(DATA)
    net.refresh(DATA)
    net.refit_head()
    pooled = sum(f.double() @ f.double().T for f in net.covariance.factors) / CLASSES
    weight, bias = ps.core.linear_discriminant(
        net.prototypes, pooled, net.class_count / net.class_count.sum()
    )
    assert torch.allclose(net.n2.weight.double(), weight, rtol=1e-5)
    assert torch.allclose(net.n2.bias.double(), bias, rtol=1e-4, atol=1e-5)
    net.refit_head(DATA)
    z, y = net.embed(torch.cat([x for x, _ in DATA])).detach().double(), torch.cat([y for _, y in DATA])
    means = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    within = sum(torch.outer(r, r) for r in z - means[y]) / len(y) + 0.01 * torch.eye(
        DIM, dtype=torch.float64
    )
    weight, bias = ps.core.linear_discriminant(means, within, net.class_count)
    assert torch.allclose(net.n2.weight.double(), weight, rtol=1e-4)
    assert torch.allclose(net.n2.bias.double(), bias, rtol=1e-4, atol=1e-5)
    bare = ps.lift((nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES, bias=False)), init="random")
    with pytest.raises(ps.SeamError, match="it is a Linear without bias"):
        bare.refit_head()
    deep = ps.lift((nn.Linear(FEATURES, DIM), nn.Sequential(nn.Linear(DIM, CLASSES))), init="random")
    with pytest.raises(ps.SeamError, match="it is Sequential"):
        deep.refit_head()


@pytest.mark.parametrize("deep", [False, True])
def test_calibrate_folds_the_temperature_and_keeps_the_answers(deep: bool) -> None:
    torch.manual_seed(1)
    n2 = (
        nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        if deep
        else nn.Linear(DIM, CLASSES)
    )
    net = ps.lift((nn.Linear(FEATURES, DIM), n2), dim=DIM, num_classes=CLASSES, init="random")
    before = net.eval()(X).detach()
    everything = torch.cat([net(x).detach() for x, _ in DATA]), torch.cat([y for _, y in DATA])
    temperature = net.calibrate(DATA)
    assert temperature == pytest.approx(ps.core.fit_temperature(*everything, prior=0.5), rel=1e-4)
    assert torch.allclose(net(X), before / temperature, atol=1e-5)
    assert torch.equal(net(X).argmax(1), before.argmax(1))
    assert torch.equal(net.deploy()(X), net(X))


def test_calibrate_says_when_the_data_names_no_temperature() -> None:
    net = lifted()
    with pytest.warns(ps.SeamWarning, match="calibrate has 8 samples to go by.* hold out 50 or more"):
        net.calibrate([(X[:8], Y[:8])])
    with torch.no_grad():
        net.n2.weight.mul_(1000)
        answers = [(x, net(x).argmin(1)) for x, _ in DATA]
    with pytest.warns(ps.SeamWarning, match=r"0\.0 % of these 64 samples are classified rightly.* Train on"):
        net.calibrate(answers)
    relu = ps.lift(
        (nn.Linear(FEATURES, DIM), nn.Sequential(nn.Linear(DIM, CLASSES), nn.Identity())), init="random"
    )
    with pytest.warns(ps.SeamWarning), pytest.raises(ps.SeamError, match="N2 ends with Identity"):
        relu.calibrate([(x, y.roll(1)) for x, y in answers])
