"""Soft targets in the point form, heads in closed form and temperatures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, batches, lifted, same, sgd, step

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
    net = lifted(init="fsinit", covariance=ps.RunningCovariance(), refit=False)
    exact = lifted(init="fsinit", refit=False)
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
