"""prop:smoothing: Hessian, penalty, remainder and its order, Jensen, and the floor inequalities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import (
    PROPERTY,
    central_moment,
    gauss_expectation,
    hessian_loops,
    log_log_slope,
    losses,
    normal,
    random_psd,
    rng,
)
from torch import Tensor, nn

from protoseam import theory

seeds = st.integers(0, 10**6)


def _problem(
    seed: int, classes: int = 3, dim: int = 2, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A linear head, its bias, prototypes, and covariances with a floor."""
    generator = rng(seed)
    covariance = random_psd(generator, classes, dim, scale=scale) + 0.01 * scale * torch.eye(
        dim, dtype=torch.float64
    )
    return (
        normal(generator, classes, dim),
        normal(generator, classes),
        normal(generator, classes, dim),
        covariance,
    )


def _head(weight: Tensor, bias: Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0]).double()
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return head


def _gaps(weight: Tensor, bias: Tensor, s: Tensor, covariance: Tensor) -> Tensor:
    """E_{Q_i}ℓ_i − ℓ_i(s_i) by quadrature."""
    gaps = []
    for i in range(len(s)):
        loss = losses(weight, bias, i)
        # the constant inside the expectation: no cancellation between two large numbers
        gaps.append(gauss_expectation(lambda z, f=loss, at=s[i]: f(z) - f(at), s[i], covariance[i]))
    return torch.tensor(gaps, dtype=torch.float64)


@PROPERTY
@given(seeds, st.integers(2, 5), st.integers(1, 4))
def test_curvature_penalty_and_spread_equal_their_oracles(seed: int, classes: int, dim: int) -> None:
    weight, bias, s, covariance = _problem(seed, classes, dim)
    expected = torch.stack([hessian_loops(weight, bias, z) for z in s])
    torch.testing.assert_close(theory.loss_hessian(_head(weight, bias), s), expected, rtol=1e-9, atol=1e-12)
    trace = expected.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(theory.curvature_spread(weight, bias, s), trace, rtol=1e-9, atol=1e-12)
    penalty = torch.stack([0.5 * torch.trace(c @ h) for c, h in zip(covariance, expected, strict=True)])
    torch.testing.assert_close(
        theory.second_order_penalty(weight, bias, s, covariance), penalty, rtol=1e-9, atol=1e-12
    )


def test_large_problems_are_done_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, s, covariance = _problem(0, 5, 3)
    whole = theory.second_order_penalty(weight, bias, s, covariance), theory.curvature_spread(weight, bias, s)
    monkeypatch.setattr("protoseam.theory.smoothing._BLOCK_ELEMENTS", 2 * weight.numel())
    monkeypatch.setattr("protoseam.theory.smoothing._BLOCK_ROWS", 45)
    torch.testing.assert_close(theory.second_order_penalty(weight, bias, s, covariance), whole[0])
    torch.testing.assert_close(theory.curvature_spread(weight, bias, s), whole[1])
    found = theory.sampled_loss(_head(weight, bias), s, covariance, generator=rng(0), pairs=7)
    assert found.mean_C.isfinite().all()


@PROPERTY
@given(seeds, st.integers(2, 6))
def test_third_and_fourth_moments_of_a_bounded_variable(seed: int, count: int) -> None:
    p = torch.softmax(2 * normal(rng(seed), count), 0)
    v = torch.rand(count, generator=rng(seed), dtype=torch.float64)
    r = float(v.max() - v.min())
    third, fourth = central_moment(p, v, 3), central_moment(p, v, 4) - 3 * central_moment(p, v, 2) ** 2
    assert abs(third) <= r**3 / (6 * math.sqrt(3)) + 1e-15  # the paper's r³/4 is 2.6 times this
    assert -(r**4) / 8 - 1e-15 <= fourth <= r**4 / 12 + 1e-15


@PROPERTY
@given(seeds, st.integers(2, 5), st.integers(1, 4))
def test_third_derivative_is_bounded_by_both_constants(seed: int, classes: int, dim: int) -> None:
    weight, bias, s, _ = _problem(seed, classes, dim)
    u = normal(rng(seed + 1), dim)
    w, p = weight @ u, torch.softmax(s[0] @ weight.T + bias, 0)
    third = abs(central_moment(p, w, 3))
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = losses(weight, bias, 0)(s[0] + t * u)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, t, create_graph=True)
    assert abs(float(value.detach())) == pytest.approx(third, rel=1e-6, abs=1e-10)
    sharp, paper = (theory.third_derivative_constant(weight, sharp=x) for x in (True, False))
    assert third <= sharp * float(u.norm()) ** 3 + 1e-12
    assert paper / sharp == pytest.approx(6 * math.sqrt(3) / 4)


def test_sharp_third_derivative_constant_is_attained() -> None:
    weight = torch.eye(2, dtype=torch.float64)
    p = (3 - math.sqrt(3)) / 6
    probabilities = torch.tensor([p, 1 - p], dtype=torch.float64)
    u = torch.tensor([1.0, -1.0]).double() / math.sqrt(2)
    third = abs(central_moment(probabilities, weight @ u, 3))
    assert third == pytest.approx(theory.third_derivative_constant(weight, sharp=True), rel=1e-12)


@PROPERTY
@given(seeds, st.floats(1e-3, 2.0), st.integers(1, 2))
def test_expansion_remainder_and_jensen(seed: int, scale: float, dim: int) -> None:
    weight, bias, s, covariance = _problem(seed, 3, dim, scale)
    gap = _gaps(weight, bias, s, covariance)
    remainder = (gap - theory.second_order_penalty(weight, bias, s, covariance)).abs()
    assert (gap >= -1e-9).all()  # eq:jensen-prototype
    paper, sharp = (theory.remainder_bound(weight, covariance, sharp=x) for x in (False, True))
    assert (remainder <= paper + 1e-9).all()  # eq:sensitivity-penalty
    assert (remainder <= sharp + 1e-9).all()
    assert (remainder <= theory.remainder_bound_fourth_order(weight, covariance) + 1e-9).all()


def test_remainder_is_of_fourth_order_in_the_standard_deviation() -> None:
    weight, bias, s, covariance = _problem(0)
    scales = [0.02, 0.04, 0.08, 0.16]
    remainder, paper, fourth = [], [], []
    for t in scales:
        c = t**2 * covariance
        r = _gaps(weight, bias, s, c) - theory.second_order_penalty(weight, bias, s, c)
        remainder.append(float(r.abs().sum()))
        paper.append(float(theory.remainder_bound(weight, c).sum()))
        fourth.append(float(theory.remainder_bound_fourth_order(weight, c).sum()))
    assert log_log_slope(scales, remainder) == pytest.approx(4, abs=0.1)
    assert log_log_slope(scales, paper) == pytest.approx(3, abs=1e-6)
    assert log_log_slope(scales, fourth) == pytest.approx(4, abs=1e-6)


@PROPERTY
@given(seeds, st.floats(0.05, 1.0))
def test_floor_inequalities(seed: int, floor: float) -> None:
    weight, bias, s, estimate = _problem(seed, scale=0.5)
    eye = floor**2 * torch.eye(2, dtype=torch.float64)
    smoothed, floored = _gaps(weight, bias, s, estimate + eye), _gaps(weight, bias, s, eye.expand(3, 2, 2))
    assert (smoothed >= floored - 1e-8).all()  # eq:floor-smoothing
    penalty = theory.second_order_penalty(weight, bias, s, estimate + eye)
    least = theory.floor_regularization(weight, bias, s, floor)
    assert (penalty >= least - 1e-12).all()  # eq:floor-regularization
    torch.testing.assert_close(theory.second_order_penalty(weight, bias, s, eye.expand(3, 2, 2)), least)


@PROPERTY
@given(seeds)
def test_monte_carlo_gaps_have_the_right_sign_for_any_draws(seed: int) -> None:
    weight, bias, s, estimate = _problem(seed, 4, 5)
    head = _head(weight, bias)
    assert (theory.jensen_gap(head, s, estimate, generator=rng(seed), pairs=2).mean_C >= 0).all()
    assert (theory.floor_excess(head, s, estimate, 0.3, generator=rng(seed), pairs=2).mean_C >= 0).all()


def test_monte_carlo_agrees_with_quadrature() -> None:
    weight, bias, s, estimate = _problem(3, scale=0.5)
    head, eye = _head(weight, bias), 0.09 * torch.eye(2, dtype=torch.float64)
    gap = theory.jensen_gap(head, s, estimate, generator=rng(0), pairs=4000)
    assert ((gap.mean_C - _gaps(weight, bias, s, estimate)).abs() <= 4 * gap.error_C).all()
    loss = theory.sampled_loss(head, s, estimate, generator=rng(0), pairs=4000)
    torch.testing.assert_close(loss.mean_C, gap.mean_C + theory.point_loss(head, s), rtol=1e-9, atol=1e-12)
    assert (loss.error_C < 0.1 * loss.mean_C).all()
    excess = theory.floor_excess(head, s, estimate, 0.3, generator=rng(1), pairs=4000)
    exact = _gaps(weight, bias, s, estimate + eye) - _gaps(weight, bias, s, eye.expand(3, 2, 2))
    assert ((excess.mean_C - exact).abs() <= 4 * excess.error_C).all()


def test_floor_regularises_the_average_curvature_not_that_at_the_prototype() -> None:
    """The excess over E_Γ ℓ for a saturated head: the paper's second-order form is off by orders of magnitude."""
    weight = torch.tensor([[8.0], [-8.0]]).double()
    bias, s = torch.zeros(2).double(), torch.tensor([[1.0], [-1.0]]).double()
    sigma, floor = torch.full((2, 1, 1), 0.25).double(), 0.05
    excess = _gaps(weight, bias, s, sigma + floor**2) - _gaps(weight, bias, s, sigma)
    grid = torch.linspace(-8, 8, 2001).double()
    density = torch.exp(-(grid**2) / 2) / (2 * torch.pi) ** 0.5
    spread = torch.stack([theory.curvature_spread(weight, bias, s + 0.5 * float(t)) for t in grid])
    average_C = torch.trapezoid(density[:, None] * spread, grid, dim=0)  # over N(s, σ²)
    assert ((excess - floor**2 / 2 * average_C).abs() <= 0.05 * excess).all()
    assert (theory.floor_regularization(weight, bias, s, floor) < 1e-3 * excess).all()


@PROPERTY
@given(seeds, st.floats(0.05, 0.5))
def test_sampled_loss_exceeds_the_end_to_end_loss_of_a_matched_gaussian(seed: int, floor: float) -> None:
    weight, bias, mean, covariance = _problem(seed, 3, 1)
    generator = rng(seed)
    z = normal(generator, 3, 9) ** 3
    mean, covariance = z.mean(1, keepdim=True), z.var(1, correction=0)[:, None, None]
    delta = theory.w1_to_gaussian(z, mean[:, 0], covariance[:, 0, 0].sqrt())
    sharp = theory.class_lipschitz(_head(weight, bias))
    for i in range(3):
        loss = losses(weight, bias, i)
        matched = gauss_expectation(loss, mean[i], covariance[i], 160)
        assert gauss_expectation(loss, mean[i], covariance[i] + floor**2, 160) >= matched - 1e-7
        assert matched >= float(loss(z[i, :, None]).mean() - sharp[i] * delta[i]) - 1e-7


def test_scaling_the_head_removes_the_penalty_only_away_from_ties() -> None:
    s = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    small, large = (theory.curvature_spread(c * weight, None, s) for c in (10.0, 20.0))
    assert (large[:2] < 1e-3 * small[:2]).all()  # clear margins: exponentially fast
    assert float(large[2] / small[2]) == pytest.approx(4)  # s_3 = 0 ties all classes: it grows like c²


def test_deeper_heads_use_automatic_differentiation() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    s = normal(rng(0), 4, 3)
    covariance = 1e-4 * torch.eye(3, dtype=torch.float64).expand(4, 3, 3)
    penalty = 0.5 * (theory.loss_hessian(head, s) * covariance).sum((-2, -1))
    gap = theory.jensen_gap(head, s, covariance, generator=rng(1), pairs=20_000)
    assert ((gap.mean_C - penalty).abs() <= 4 * gap.error_C + 1e-3 * penalty.abs()).all()


def test_refusals() -> None:
    weight, bias, s, covariance = _problem(0)
    with pytest.raises(ValueError, match=r"weight must be \(C, K\)"):
        theory.curvature_spread(weight.T, bias, s)
    with pytest.raises(ValueError, match="at least 2 antithetic pairs"):
        theory.sampled_loss(_head(weight, bias), s, covariance, generator=rng(0), pairs=1)
    with pytest.raises(ValueError, match="there are 3 prototypes"):
        theory.point_loss(nn.Linear(2, 5).double(), s)
