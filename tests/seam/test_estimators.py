"""The four covariance estimators as modules: what they hold, when they refresh, what they report."""

from __future__ import annotations

import copy

import oracles
import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, DIM, batches, lifted, sgd, step, train

import protoseam as ps
from protoseam.core import automatic_floor, class_factors, merge_moments, split_half_error
from protoseam.core.covariance import Structure, normalise_scatter

STRUCTURES: list[Structure] = ["full", "diagonal", "shared"]
ESTIMATING = [ps.ExactCovariance, ps.RunningCovariance, ps.SwitchCovariance]
SHAPES = {"full": (CLASSES, DIM, DIM), "diagonal": (CLASSES, DIM), "shared": (1, DIM, DIM)}


def bound(covariance: ps.AbstractCovariance) -> ps.AbstractCovariance:
    covariance.bind(CLASSES, DIM)
    return covariance


def embeddings(net: ps.Lifted) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return torch.cat([net.embed(x) for x, _ in batches()]), torch.cat([y for _, y in batches()])


def product(factors: Tensor) -> Tensor:
    return factors.square() if factors.ndim == 2 else factors @ factors.mT


# ---------------------------------------------------------------------- all of them


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ESTIMATING)
@pytest.mark.parametrize("floor", [0.25, "auto"])
def test_first_factors_are_the_floor(kind: type, structure: Structure, floor: float | str) -> None:
    factors = bound(kind(floor=floor, structure=structure)).factors
    assert factors.shape == SHAPES[structure]
    assert factors.dtype == torch.float32
    sigma0 = 0.1 if floor == "auto" else 0.25
    expected = sigma0 * (torch.ones(DIM) if structure == "diagonal" else torch.eye(DIM))
    assert torch.equal(factors, expected.expand_as(factors))


def test_the_callers_object_is_copied() -> None:
    mine = ps.RunningCovariance()
    a, b = lifted(covariance=mine), lifted(covariance=mine)
    train(a, sgd(a), batches(), range(1), 2)
    assert a.covariance is not b.covariance
    assert not b.covariance.count_C_0.any()
    assert not hasattr(mine, "factors")


def test_the_default_is_the_papers() -> None:
    covariance = lifted().covariance
    assert isinstance(covariance, ps.ExactCovariance)
    assert (covariance.floor, covariance.structure, covariance.needs_pass) == (0.1, "full", True)


def test_they_say_what_they_are() -> None:
    assert "floor=0.1, structure='full'" in repr(ps.ExactCovariance())
    assert "floor=auto" in repr(ps.RunningCovariance("auto"))
    assert "window=None, mean_window=32" in repr(ps.RunningCovariance())
    assert "variance=1/ρ, floor=0.1" in repr(ps.IsotropicCovariance())
    assert "variance=2.0" in repr(ps.IsotropicCovariance(variance=2.0))
    assert "lr_below=0.1" in repr(ps.SwitchCovariance())


@pytest.mark.parametrize("kind", [*ESTIMATING, ps.IsotropicCovariance])
@pytest.mark.parametrize("floor", [0.0, -1.0, float("inf"), float("nan"), "large"])
def test_floors_that_are_none(kind: type, floor: float | str) -> None:
    with pytest.raises(ValueError, match="floor σ0 must be a positive number or 'auto'"):
        kind(floor=floor)


def test_other_settings_that_are_none() -> None:
    for wrong, message in (
        (lambda: ps.RunningCovariance(window=1), "window .*2.* got 1"),
        (lambda: ps.RunningCovariance(mean_window=0), "mean_window is a number of samples"),
        (lambda: ps.IsotropicCovariance(variance=0.0), "variance must be positive"),
        (lambda: ps.IsotropicCovariance(floor="auto"), "estimates nothing"),
        (lambda: ps.SwitchCovariance(lr_below=1.0), r"lr_below .*in \(0, 1\); got 1.0"),
        (lambda: ps.SwitchCovariance(lr_below=0.0), r"lr_below .*in \(0, 1\)"),
        (lambda: bound(ps.ExactCovariance(structure="banded")), "full, diagonal or shared"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("floor", [0.2, "auto"])
def test_exact_factors_are_the_functions(structure: Structure, floor: float | str) -> None:
    net = lifted(covariance=ps.ExactCovariance(floor=floor, structure=structure))
    net.refresh(batches())
    expected = class_factors(*embeddings(net), CLASSES, floor, structure=structure)
    assert torch.equal(net.covariance.factors, expected.factors)
    assert net.class_count.tolist() == expected.count_C.tolist() == [16] * CLASSES
    if structure == "full" and floor == 0.2:
        _, _, covariances = oracles.moments(*(t.tolist() for t in embeddings(net)), CLASSES)
        shifted = torch.tensor(covariances) + 0.04 * torch.eye(DIM)
        assert torch.allclose(product(net.covariance.factors), shifted, atol=1e-5)


def test_exact_takes_no_notice_of_training_batches() -> None:
    net = lifted()
    before = copy.deepcopy(net.covariance.state_dict())
    step(net, sgd(net), *batches()[0])
    assert all(torch.equal(before[name], value) for name, value in net.covariance.state_dict().items())
    assert before.keys() == {"factors"}


def test_exact_needs_the_data() -> None:
    with pytest.raises(
        ValueError, match=r"net\.refresh\(loader\) with the training loader, or .*RunningCovariance"
    ):
        lifted().refresh()
    with pytest.raises(ValueError, match="estimated from the data"):
        bound(ps.ExactCovariance()).refresh(None, None, None)


def test_a_higher_floor_is_reported_with_its_class() -> None:
    net = lifted(covariance=ps.ExactCovariance(floor=1e-6))
    z, y = embeddings(net)
    z[y == 2] *= 1e5
    with pytest.warns(ps.SeamWarning, match=r"covariance of class 2 is too large for the floor 1e-06"):
        net.refresh(embeddings=(z, y))
    assert net.covariance.factors.isfinite().all()


# ---------------------------------------------------------------------- running


@pytest.mark.parametrize("structure", STRUCTURES)
def test_running_statistics_of_a_network_that_stands_still(structure: Structure) -> None:
    """Nothing forgotten, nothing moving: the running estimate is the exact one."""
    net = lifted(covariance=ps.RunningCovariance(floor=0.2, structure=structure))
    for x, y in batches():
        net(x, y)
    net.refresh()
    expected = class_factors(*embeddings(net), CLASSES, 0.2, structure=structure).factors
    assert torch.allclose(net.covariance.factors, expected, atol=1e-6)


def test_running_observes_in_training_only() -> None:
    net = lifted(covariance=ps.RunningCovariance())
    net.eval()
    net(*batches()[0])
    net.train()
    net(batches()[0][0])
    assert not net.covariance.count_C_0.any()
    net(*batches()[0])
    assert net.covariance.count_C_0.sum() == 16


@pytest.mark.parametrize("structure", STRUCTURES)
def test_running_automatic_floor_compares_halves_of_each_class(structure: Structure) -> None:
    covariance = bound(ps.RunningCovariance("auto", structure))
    z, y = torch.randn(40, DIM), torch.arange(40) % CLASSES
    for rows in torch.arange(40).split(8):
        covariance.observe(z[rows], y[rows])
    found = covariance.refresh(None, None, None)
    halves = [covariance._moments(half) for half in (0, 1)]
    # within a batch of 8 a class has rows c and c + 4; the step decides which of them is the first half's
    starts = [(b * 2654435769 % 2**32) // 2**31 for b in range(5)]
    first = torch.tensor(
        [8 * b + c + 4 * (start % 2) for b, start in enumerate(starts) for c in range(CLASSES)]
    )
    second = torch.tensor([row for row in range(40) if row not in first.tolist()])
    assert [half.count_C.tolist() for half in halves] == [[5.0] * CLASSES] * 2
    parts = [normalise_scatter(half.count_C, half.scatter) for half in halves]
    for part, rows in zip(parts, (first, second), strict=True):
        direct = class_factors(z[rows], y[rows], CLASSES, 1e-3, structure=structure).factors
        assert torch.allclose(product(direct).double(), part, atol=1e-5)
    assert found.floor.item() == pytest.approx(automatic_floor(split_half_error(*parts), DIM).item())
    whole = merge_moments(*halves)
    expected = normalise_scatter(whole.count_C, whole.scatter)
    shift = found.floor.square() * (1 if structure == "diagonal" else torch.eye(DIM))
    assert torch.allclose(product(covariance.factors).double(), expected + shift, atol=1e-5)
    assert found.count_C is None


@pytest.mark.parametrize("in_batch", [1, 2, 3])
def test_running_halves_of_balanced_batches(in_batch: int) -> None:
    """Samplers that repeat one order of classes must not fill the halves with different classes."""
    covariance = bound(ps.RunningCovariance("auto"))
    for _ in range(20):
        y = torch.arange(CLASSES).repeat(in_batch)
        covariance.observe(torch.randn(len(y), DIM), y)
    assert (covariance.count_C_0 + covariance.count_C_1).tolist() == [20.0 * in_batch] * CLASSES
    assert (covariance.count_C_0 - covariance.count_C_1).abs().max() <= 4


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("in_turn", [True, False], ids=["classes in turn", "classes at random"])
def test_running_halves_get_samples_whatever_the_batch(
    structure: Structure, batch: int, in_turn: bool
) -> None:
    """True Σ = I, 250 samples a class: ε̄ is about that of 125 against 125 however they come."""
    covariance = bound(ps.RunningCovariance("auto", structure, window=10**6, mean_window=10**6))
    y = torch.arange(250 * CLASSES) % CLASSES
    y = y if in_turn else y[torch.randperm(len(y))]
    z = torch.randn(len(y), DIM)
    for rows in torch.arange(len(y)).split(batch):
        covariance.observe(z[rows], y[rows])
    share = covariance.count_C_0 / (covariance.count_C_0 + covariance.count_C_1)
    assert share.sub(0.5).abs().max() < 0.25  # of three samples two go to the first half
    whole = bound(ps.RunningCovariance("auto", structure, window=10**6, mean_window=10**6))
    whole.observe(z, y)  # in one batch every other sample of a class goes to the first half
    found, expected = (c.refresh(None, None, None).floor.item() for c in (covariance, whole))
    assert expected / 1.7 < found < 1.7 * expected


@pytest.mark.parametrize(("dim", "expected"), [(3, 256.0), (32, 256.0), (64, 512.0)])
def test_default_window(dim: int, expected: float) -> None:
    covariance = ps.RunningCovariance()
    covariance.bind(2, dim)
    assert covariance.effective_window == expected


def test_running_counts_saturate_at_the_window() -> None:
    covariance = bound(ps.RunningCovariance(window=10, mean_window=4))
    halved = bound(ps.RunningCovariance("auto", window=10))
    for _ in range(40):
        z, y = torch.randn(8, DIM), torch.arange(8) % CLASSES
        covariance.observe(z, y)
        halved.observe(z, y)
    assert covariance.count_C_0.tolist() == [10.0] * CLASSES
    assert torch.cat([halved.count_C_0, halved.count_C_1]).tolist() == [5.0] * 2 * CLASSES


def test_running_estimates_survive_a_drift() -> None:
    """Ten standard deviations within an epoch of 500 samples a class, as on CIFAR-100."""
    steady, drifting, hoarding = (
        bound(ps.RunningCovariance(floor=0.01, **options))
        for options in ({}, {}, {"window": 10**6, "mean_window": 10**6})
    )
    for at in range(500):
        z, y = torch.randn(CLASSES, DIM), torch.arange(CLASSES)
        moved = z + torch.tensor([10.0 * at / 500, 0.0, 0.0])
        steady.observe(z, y)
        drifting.observe(moved, y)
        hoarding.observe(moved, y)
    variances = []
    for covariance in (steady, drifting, hoarding):
        covariance.refresh(None, None, None)
        variances.append(product(covariance.factors).diagonal(dim1=1, dim2=2).mean(0))
    assert torch.allclose(variances[0], torch.ones(DIM), atol=0.15)
    assert torch.allclose(variances[1], torch.tensor([1.4, 1.0, 1.0]), atol=0.2)
    assert variances[2][0] > 8


def test_running_statistics_that_were_spoilt_are_reported() -> None:
    """On an accelerator nothing looks at a batch, so the epoch's end has to."""
    net = lifted(covariance=ps.RunningCovariance())
    net(*batches()[0])
    net.covariance.observe(torch.full((2, DIM), torch.nan), torch.tensor([1, 3]))
    with pytest.raises(ps.SeamError, match="running covariance of class 1, 3 is not finite"):
        net.refresh()


# ---------------------------------------------------------------------- isotropic


def test_isotropic_follows_rho() -> None:
    net = lifted(covariance=ps.IsotropicCovariance(floor=0.5), schedule=lambda epoch, epochs: 2.0 + 2 * epoch)
    assert net.covariance.factors.item() == pytest.approx((1 / 4 + 0.25) ** 0.5)  # before any epoch, too
    for epoch, rho in enumerate((2.0, 4.0)):
        net.set_progress(epoch, 2)
        assert net.covariance.factors.item() == pytest.approx((1 / rho + 0.25) ** 0.5)
    before = net.covariance.factors.clone()
    net.refresh()
    net.refresh(batches())
    assert torch.equal(net.covariance.factors, before)


def test_isotropic_with_a_variance_of_its_own() -> None:
    net = lifted(covariance=ps.IsotropicCovariance(variance=2.0, floor=0.5))
    assert net.covariance.factors.shape == (1, 1)
    for _ in range(2):
        assert net.covariance.factors.item() == pytest.approx(1.5)
        net.set_progress(1, 2)


# ---------------------------------------------------------------------- switch


def test_switch_from_exact_to_running_for_good() -> None:
    net = lifted(covariance=ps.SwitchCovariance(floor=0.2))
    for epoch, (lr, exact) in enumerate(
        [(0.01, True), (0.1, True), (0.011, True), (0.0099, False), (0.1, False)]
    ):
        net.set_progress(epoch, 9, lr=lr)
        assert net.covariance.needs_pass is exact
        for x, y in batches():
            net(x, y)
        if exact:
            net.refresh(batches())
            expected = class_factors(*embeddings(net), CLASSES, 0.2).factors
            assert torch.equal(net.covariance.factors, expected)
        else:
            net.refresh()
            moments = net.covariance.running._moments(0)
            found = product(net.covariance.factors).double() - 0.04 * torch.eye(DIM)
            assert torch.allclose(found, normalise_scatter(moments.count_C, moments.scatter), atol=1e-5)
    assert net.covariance.peak_lr.item() == pytest.approx(0.1)


def test_switch_needs_the_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"net\.set_progress\(epoch, epochs, lr="):
        lifted(covariance=ps.SwitchCovariance()).set_progress(0, 2)


def test_an_estimator_of_ones_own() -> None:
    """The interface is enough: no registration, no base state."""

    class Fixed(ps.AbstractCovariance):
        def bind(self, num_classes: int, dim: int) -> None:
            self.register_buffer("factors", torch.full((1, 1), 0.3))

        def refresh(self, z_NK: Tensor | None, y_N: Tensor | None, reduce: object) -> None:
            return None

    net = lifted(covariance=Fixed())
    train(net, sgd(net), batches(), range(2), 2)
    assert isinstance(net.covariance, nn.Module)
    assert net.covariance.factors.item() == pytest.approx(0.3)
