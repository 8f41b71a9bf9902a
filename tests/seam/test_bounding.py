"""Gradients within limits that follow from the objective, whatever a loop does with them and with the rates."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, DIM, batches, lifted, network, sgd, step

import protoseam as ps

DATA = batches()
X, Y = DATA[0]


def raw_and_bounded(net: ps.Lifted, lr: float, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for bounded in (False, True):
        net.param_groups(lr, bounded=bounded, **options)
        net.zero_grad()
        net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    return found[0], found[1]


@pytest.mark.parametrize("large", ["n1.0.weight", "n1.2.weight"])
def test_every_backward_ends_within_the_limits(large: str) -> None:
    """Of two large weights one is limited by its own size, the other by Polyak's step."""
    net = lifted()
    net.get_parameter(large).data.mul_(100)
    lr = 5.0
    raw, kept = raw_and_bounded(net, lr, seam_lr=7.0)
    parts = [["n1.0.weight", "n1.0.bias"], ["n1.2.weight", "n1.2.bias"]]
    weights = dict(net.named_parameters())
    squares_2P = [
        torch.stack([sum(values[name].detach().double().square().sum() for name in part) for part in parts])
        for values in (raw, weights)
    ]
    pull = net.objective(X, Y).consensus.detach().double()
    factors_P = ps.core.consensus_factors(pull, *squares_2P, lr)
    polyak = pull / (lr * squares_2P[0].sum())
    at = large == "n1.2.weight"
    assert factors_P[int(at)] == pytest.approx(float(polyak))
    assert factors_P[1 - int(at)] < 0.9 * polyak
    for factor, part in zip(factors_P, parts, strict=True):
        for name in part:
            assert torch.allclose(kept[name].double(), factor * raw[name].double(), rtol=1e-4)
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
    shares = {name: kept[name].norm() / raw[name].norm() for name in raw if name.startswith("n1.")}
    assert all(0 < float(share) < 0.5 for share in shares.values())
    # not told to the network: the optimizer leaves it in the groups
    torch.optim.SGD(net.param_groups(5.0), weight_decay=0.3)
    net.zero_grad()
    net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
    for name, p in net.n1.named_parameters():
        assert p.grad is not None
        share = shares[f"n1.{name}"]
        # SGD adds 0.3·p itself: together share·(g + 0.3·p)
        expected = share * raw[f"n1.{name}"] - (1 - share) * 0.3 * p.detach()
        assert torch.allclose(p.grad, expected, rtol=1e-4, atol=1e-6)


def test_a_copy_of_network_and_optimizer_goes_on_as_they_do() -> None:
    net = lifted()
    pair = net, torch.optim.SGD(net.param_groups(5.0, weight_decay=3.0))
    kept = limits(net)
    net, _ = copy.deepcopy(pair)
    for name, gradient in limits(net).items():
        assert torch.equal(gradient, kept[name]), name


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


@pytest.mark.parametrize("how", ["in turn", "in turn, from zeros", "as a sum"])
def test_accumulated_gradients_are_bounded_as_one(how: str) -> None:
    """Four quarters of a batch, each at a quarter's weight, give the gradients of the whole."""
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    quiet = ps.IsotropicCovariance(1e-6, floor=1e-3)
    net.covariance = copy.deepcopy(quiet)
    net.covariance.bind(CLASSES, DIM)
    found = []
    for parts in (1, 4):
        net.zero_grad(set_to_none=how != "in turn, from zeros")
        losses = []
        for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
            g = torch.Generator().manual_seed(0)
            losses.append(net.objective(x, y, generator=g).total / parts)
        pairs = [sum(losses[i : i + 2]) for i in range(0, parts, 2)]  # which are added to what is there
        for loss in pairs if how == "as a sum" else losses:
            loss.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    for name, whole in found[0].items():
        if name != "prototypes":  # each part's is bounded by itself
            assert torch.allclose(found[1][name], whole, rtol=2e-2, atol=1e-4), name


def test_gradients_accumulate_where_n1_is_frozen() -> None:
    net = lifted()
    net.n1.requires_grad_(False)
    torch.optim.SGD(net.param_groups(5.0))
    found = []
    for parts in (1, 2):
        net.zero_grad()
        for _ in range(parts):
            (net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total / parts).backward()
        found.append([p.grad for p in (net.prototypes, *net.n2.parameters())])
    torch.testing.assert_close(*found)


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


@pytest.mark.parametrize("none", [True, False])
def test_a_loss_of_which_the_backward_came_before_is_one_that_was_added(none: bool) -> None:
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    found = []
    for apart in (False, False, True):  # the one before leaves its limits behind
        net.zero_grad(set_to_none=none)
        terms = net.objective(X, Y, generator=torch.Generator().manual_seed(0))
        other = net.embed(X).square().mean()
        if apart:
            other.backward()
        (terms.total + (0 if apart else other)).backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    torch.testing.assert_close(found[2], found[1])


def test_an_objective_of_weight_zero_leaves_the_gradients_of_other_losses() -> None:
    """As one whose weight rises from 0."""
    net = lifted()
    torch.optim.SGD(net.param_groups(1e-6))
    (0 * net.objective(X, Y).total + net.embed(X).square().mean()).backward()
    kept = [p.grad for p in (*net.n1.parameters(), net.prototypes)]
    expected = torch.autograd.grad(net.embed(X).square().mean(), list(net.n1.parameters()))
    torch.testing.assert_close(kept, [*expected, torch.zeros_like(net.prototypes)])


def test_the_total_can_be_divided_in_place() -> None:
    """As loops that accumulate write it: loss /= batches."""
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    found = []
    for in_place in (False, True):
        net.zero_grad()
        loss = net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total
        if in_place:
            loss /= 2
        else:
            loss = loss / 2
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_autograd_grad_leaves_gradients_as_they_are() -> None:
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0, weight_decay=0.3))
    terms = [net.objective(X, Y, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    terms[0].total.backward()
    kept = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    x = X.clone().requires_grad_()
    torch.autograd.grad(net.objective(x, Y).total, x)  # for adversarial inputs, say
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, kept[name], rtol=1e-5), name
    terms[1].total.backward()
    for name, p in net.n1.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, 2 * kept[f"n1.{name}"], rtol=1e-4), name


def test_a_loop_that_sets_gradients_by_hand_is_told_that_nothing_bounds_them() -> None:
    net = lifted(covariance=ps.IsotropicCovariance())
    optimizer = sgd(net)
    net.set_progress(0, 2)
    for x, y in 3 * DATA:
        optimizer.zero_grad()
        gradients = torch.autograd.grad(net.objective(x, y).total, list(net.parameters()))
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    with pytest.warns(ps.SeamWarning, match="no limits.* act in the backward of"):
        net.refresh(DATA)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_bounded_as_dense_ones(kind: type[torch.optim.Optimizer]) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        n1 = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=sparse), nn.Linear(8, DIM))
        net = ps.lift((n1, nn.Linear(DIM, CLASSES)), init="random")
        kind(net.param_groups(5.0))
        words = torch.randint(20, (len(X), 6), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            terms = net.objective(words, Y, generator=torch.Generator().manual_seed(0))
            (terms.total / 2).backward()
        assert n1[0].weight.grad.is_sparse == sparse
        found.append([p.grad.to_dense() for p in net.parameters()])
    for dense, thin in zip(*found, strict=True):
        assert torch.allclose(dense, thin, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- rates that change


def limits(net: ps.Lifted) -> dict[str, Tensor]:
    net.zero_grad()
    net.objective(X, Y, generator=torch.Generator().manual_seed(0)).total.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_limits_follow_a_rate_that_rises(resumed: bool, optimizers: int) -> None:
    """OneCycleLR, say, takes its own highest rate, whatever the groups were made with."""
    net = lifted()
    _, expected = raw_and_bounded(net, 5.0)
    n1, *seam = net.param_groups(1e-6)
    made = [torch.optim.SGD(groups) for groups in ([[n1], seam] if optimizers == 2 else [[n1, *seam]])]
    start = copy.deepcopy(net.state_dict())
    for optimizer in made:
        if resumed:  # the optimizer then has other dicts, which its next step shows
            optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] *= 5e6
    limits(net)
    for optimizer in made:
        optimizer.step()
    net.load_state_dict(start)
    for name, gradient in limits(net).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4), name
    for group in made[0].param_groups:
        group["lr"] = 1e-9  # a rate that falls leaves the limits of the one that was given
    net.param_groups(5.0)  # the optimizers hold other groups, so these count until it steps
    assert torch.allclose(limits(net)["n1.0.weight"], expected["n1.0.weight"], rtol=1e-4)


@pytest.mark.parametrize("one", [False, True])
def test_the_limits_follow_groups_that_were_made_anew(one: bool) -> None:
    """Without their names, or as one: the optimizer's first step shows them."""
    net = lifted()
    raw, _ = raw_and_bounded(net, 5.0)
    groups = net.param_groups(5.0)
    groups.insert(0, {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.0})
    groups[1:] = [{"params": g["params"], "lr": g["lr"]} for g in groups[1:]]
    optimizer = torch.optim.AdamW(net.parameters() if one else groups, lr=5.0)
    start = copy.deepcopy(net.state_dict())
    limits(net)
    optimizer.step()
    net.load_state_dict(start)
    assert torch.allclose(limits(net)["n1.0.weight"], raw["n1.0.weight"], rtol=1e-4)


def test_a_rate_may_be_a_tensor() -> None:
    net = lifted()
    _, expected = raw_and_bounded(net, 5.0)
    optimizer = torch.optim.SGD(net.param_groups(1e-6))
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"] * 5e6)
    for name, gradient in limits(net).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4), name


def test_momentum_leaves_small_batches_a_share_of_n1s_limit() -> None:
    net = lifted()
    torch.optim.SGD(net.param_groups(5.0))
    plain = limits(net)
    torch.optim.SGD(net.param_groups(5.0), momentum=0.9)
    for name, gradient in limits(net).items():
        share = len(X) * (1 - 0.9) / (1 + 0.9) if name.startswith("n1.") else 1.0
        assert share == 1.0 or share < 1
        assert torch.allclose(gradient, share * plain[name], rtol=1e-4), name


@pytest.mark.filterwarnings("ignore:(all embeddings|no embedding)")  # of zeros, before the first step
@pytest.mark.parametrize("start", [1.0, 0.0])
def test_rates_far_beyond_the_limit_still_train(start: float) -> None:
    """Also from a last Linear of zeros, a hundredth of which is no step at all."""
    torch.manual_seed(0)
    net = ps.lift(network(), num_classes=CLASSES, dim=DIM, init="random", refit=False)
    with torch.no_grad():
        net.n1[-1].weight.mul_(start)
        net.n1[-1].bias.mul_(start)
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
