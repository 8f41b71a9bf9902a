"""W1 to the moment-matched Gaussian: exact on the line, from below by slices, from above by assignment."""

from __future__ import annotations

import math

import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import PROPERTY, normal, random_psd, rng, w1_to_gaussian_quad

from protoseam.theory import discrete_w1, non_gaussianity_cap, projection_constant, sliced_w1, w1_to_gaussian
from protoseam.theory.wasserstein import assignment_w1


@PROPERTY
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0.05, 5), st.floats(-3, 3))
def test_line_distance_equals_the_integral_of_distribution_functions(
    seed: int, count: int, std: float, mean: float
) -> None:
    x = normal(rng(seed), count) ** 3
    expected = w1_to_gaussian_quad(x.tolist(), mean, std)
    moments = torch.tensor([[mean], [std]], dtype=torch.float64)
    found = w1_to_gaussian(x[None], moments[0], moments[1])
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_line_distance_to_a_point_mass_and_of_many_samples() -> None:
    x = torch.tensor([[1.0, 3.0, -2.0]])
    assert float(w1_to_gaussian(x, torch.tensor([0.0]), torch.tensor([0.0]))) == pytest.approx(2.0)
    many = normal(rng(0), 1, 100_000)
    # about 1/√N: cancellation in the closed form would show here
    assert 1e-4 < float(w1_to_gaussian(many, torch.zeros(1), torch.ones(1))) < 1e-2


@pytest.mark.parametrize(("dim", "expected"), [(1, 1.0), (2, 2 / math.pi), (3, 0.5)])
def test_projection_constant_in_low_dimensions(dim: int, expected: float) -> None:
    assert projection_constant(dim) == pytest.approx(expected, rel=1e-12)


def test_projection_constant_equals_the_mean_over_the_sphere() -> None:
    theta = normal(rng(0), 200_000, 20)
    theta /= theta.norm(dim=1, keepdim=True)
    assert projection_constant(20) == pytest.approx(float(theta[:, 0].abs().mean()), rel=5e-3)


def test_slices_are_exact_on_the_line() -> None:
    z = normal(rng(0), 60, 1) ** 3
    y = torch.arange(60) % 2
    found = sliced_w1(z, y, 2, generator=rng(1), directions=8, null_repeats=0)
    for c in range(2):
        x = z[y == c].T
        expected = w1_to_gaussian(x, x.mean(1), x.std(1, correction=0))
        assert float(found.value_C[c]) == pytest.approx(float(expected), rel=1e-9)
    assert found.null_C.isnan().all()


def test_slices_recover_w1_when_everything_lies_on_one_line() -> None:
    v = normal(rng(0), 6)
    t = torch.tensor([-1.0, 1.0] * 50).double()
    z, y = t[:, None] * v, torch.zeros(100, dtype=torch.long)
    exact = float(v.norm()) * float(w1_to_gaussian(t[None], torch.zeros(1), torch.ones(1)))
    found = sliced_w1(z, y, 1, generator=rng(1), directions=4000)
    assert float(found.value_C) == pytest.approx(exact, abs=4 * float(found.error_C))
    undivided = float(found.value_C) * projection_constant(6)
    assert undivided < 0.5 * exact  # without c_K the average is a much weaker bound


@PROPERTY
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_slices_stay_below_the_assignment_and_both_below_the_cap(seed: int, dim: int) -> None:
    generator = rng(seed)
    z = normal(generator, 80, dim) ** 3 @ normal(generator, dim, dim)
    y = torch.arange(80) % 2
    low = sliced_w1(z, y, 2, generator=generator, directions=200, null_repeats=1)
    high = discrete_w1(z, y, 2, generator=generator, points=40, repeats=3)
    slack = 3 * (low.error_C + high.error_C)
    assert (low.value_C <= high.value_C + slack).all()
    centred = [z[y == c] - z[y == c].mean(0) for c in range(2)]
    covariance = torch.stack([r.T @ r / len(r) for r in centred])
    assert (low.value_C - 3 * low.error_C <= non_gaussianity_cap(covariance)).all()


def test_assignment_equals_pot() -> None:
    a, b = normal(rng(0), 30, 4), normal(rng(1), 30, 4)
    weights = torch.full((30,), 1 / 30, dtype=torch.float64)
    expected = ot.emd2(weights, weights, torch.cdist(a, b))
    assert float(assignment_w1(a, b)) == pytest.approx(float(expected), rel=1e-9)


def test_assignment_is_above_the_truth_in_expectation() -> None:
    z = normal(rng(0), 64, 1) ** 3
    exact = float(w1_to_gaussian(z.T, z.mean(0), z.std(0, correction=0)))
    found = discrete_w1(z, torch.zeros(64, dtype=torch.long), 1, generator=rng(1), points=64, repeats=40)
    assert float(found.value_C) >= exact - 2 * float(found.error_C)


def test_null_level_tells_gaussian_classes_from_others() -> None:
    generator = rng(0)
    gaussian = normal(generator, 400, 8) @ random_psd(generator, 1, 8)[0]
    signs = torch.randint(0, 2, (400, 1), generator=generator).double() * 2 - 1
    bimodal = 0.2 * normal(generator, 400, 8) + 3 * signs
    z, y = torch.cat([gaussian, bimodal]), torch.arange(2).repeat_interleave(400)
    sliced = sliced_w1(z, y, 2, generator=generator, null_repeats=8)
    exact = discrete_w1(z, y, 2, generator=generator, points=200)
    for found in (sliced, exact):
        noise = 4 * (found.error_C + found.null_error_C)
        assert float(found.value_C[0] - found.null_C[0]) < float(noise[0])
        assert float(found.debiased_C[1]) > float(noise[1])
    # eight dimensions, 200 points: the assignment's null is most of what it reports for a Gaussian class
    assert float(exact.null_C[0] / exact.value_C[0]) > 0.8


def test_randomness_is_the_generator_and_nothing_else() -> None:
    z, y = normal(rng(0), 40, 3), torch.arange(40) % 2
    for function in (sliced_w1, discrete_w1):
        first, again, other = (function(z, y, 2, generator=rng(seed)) for seed in (5, 5, 6))
        assert torch.equal(first.value_C, again.value_C)
        assert not torch.equal(first.value_C, other.value_C)


def test_one_sample_is_its_own_gaussian() -> None:
    z, y = normal(rng(0), 3, 4), torch.tensor([0, 1, 1])
    assert float(sliced_w1(z, y, 2, generator=rng(0)).value_C[0]) == pytest.approx(0, abs=1e-12)
    assert float(discrete_w1(z, y, 2, generator=rng(0)).value_C[0]) == pytest.approx(0, abs=1e-12)


def test_refusals_name_the_class() -> None:
    z, y = torch.zeros(4, 2), torch.tensor([0, 0, 2, 2])
    with pytest.raises(ValueError, match="class 1 has no sample"):
        sliced_w1(z, y, 3, generator=rng(0))
    with pytest.raises(ValueError, match="label 2 is outside 0…1"):
        discrete_w1(z, y, 2, generator=rng(0))
    with pytest.raises(ValueError, match=r"must be \(N, K\)"):
        sliced_w1(z, y[:2], 3, generator=rng(0))
