"""NC1–NC4 at perfect collapse, away from it, and where no simplex exists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import PROPERTY, normal, random_psd, rng
from torch import Tensor

from protoseam import theory
from protoseam.theory import angle_deviation_floor, max_cosine_floor

seeds = st.integers(0, 10**6)


def _simplex(classes: int, dim: int) -> Tensor:
    """C unit vectors with cosines −1/(C−1), in R^dim, rotated and shifted."""
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    basis = torch.linalg.svd(centred)[2][: classes - 1]
    vectors = torch.zeros(classes, dim, dtype=torch.float64)
    vectors[:, : classes - 1] = centred @ basis.T
    rotation, _ = torch.linalg.qr(normal(rng(classes), dim, dim))
    return vectors @ rotation / vectors.norm(dim=1, keepdim=True) + normal(rng(1), dim)


def _harmonic(classes: int, dim: int) -> Tensor:
    """A real harmonic frame: centred, unit-norm and tight, for even dim < C − 1."""
    angle = 2 * math.pi * torch.arange(classes, dtype=torch.float64)[:, None] / classes
    frequency = torch.arange(1, dim // 2 + 1, dtype=torch.float64)
    return torch.cat([torch.cos(angle * frequency), torch.sin(angle * frequency)], 1) / math.sqrt(dim / 2)


@pytest.mark.parametrize(("classes", "dim"), [(2, 1), (4, 3), (4, 7), (10, 9)])
def test_simplex_is_perfect_collapse(classes: int, dim: int) -> None:
    mean = 3 * _simplex(classes, dim)
    found = theory.nc2(mean)
    for name in ("equinorm", "angle", "frame_excess", "angle_floor"):
        assert found[name] == pytest.approx(0, abs=1e-9), name
    assert (
        found["max_cosine"] == pytest.approx(found["max_cosine_floor"]) == pytest.approx(-1 / (classes - 1))
    )
    zero = torch.zeros(classes, dim, dim, dtype=torch.float64)
    assert theory.nc1(torch.full((classes,), 5), mean, zero) == (0, 0)
    assert theory.nc3(0.7 * mean + 2, mean) == pytest.approx(
        0, abs=1e-12
    )  # a common shift of the rows is free
    assert theory.nc3(-mean, mean) == pytest.approx(2)


@pytest.mark.parametrize(("classes", "dim"), [(10, 2), (10, 4), (100, 32), (7, 4)])
def test_tight_frames_attain_the_floor_below_the_simplex(classes: int, dim: int) -> None:
    found = theory.nc2(_harmonic(classes, dim))
    assert found["angle_floor"] > 0
    assert found["angle"] == pytest.approx(found["angle_floor"], rel=1e-9)
    assert found["frame_excess"] == pytest.approx(0, abs=1e-9)
    assert found["equinorm"] == pytest.approx(0, abs=1e-9)


@PROPERTY
@given(seeds, st.integers(2, 24), st.integers(1, 8))
def test_floors_are_floors(seed: int, classes: int, dim: int) -> None:
    found = theory.nc2(normal(rng(seed), classes, dim))
    assert found["angle"] >= found["angle_floor"] - 1e-9
    assert found["max_cosine"] >= found["max_cosine_floor"] - 1e-9
    assert found["frame_excess"] >= -1e-9


def test_sign_flips_are_tight_but_not_equiangular() -> None:
    flipped = _simplex(4, 3) - _simplex(4, 3).mean(0)
    flipped[0] *= -1
    unit = flipped / flipped.norm(dim=1, keepdim=True)
    cosine = unit @ unit.T
    assert float(cosine.square().sum()) == pytest.approx(16 / 3)  # the frame potential does not notice
    assert theory.nc2(flipped)["angle"] > 0.1  # the cosines do


@pytest.mark.parametrize(
    ("classes", "dim", "expected"),
    [
        (5, 2, math.cos(2 * math.pi / 5)),  # the pentagon
        (6, 3, 0.0),  # the octahedron
        (275, 22, 1 / 6),  # the McLaughlin graph's code: Levenshtein's bound is attained
        (4, 3, -1 / 3),
        (64, 32, 0.0),
    ],
)
def test_largest_cosine_of_known_optimal_codes(classes: int, dim: int, expected: float) -> None:
    assert max_cosine_floor(classes, dim) == pytest.approx(expected, abs=1e-12)


@PROPERTY
@given(st.integers(2, 40), st.integers(2, 400))
def test_floors_are_monotone_in_the_number_of_classes(dim: int, classes: int) -> None:
    assert max_cosine_floor(classes, dim) <= max_cosine_floor(classes + 1, dim) + 1e-12
    assert max_cosine_floor(classes, dim + 1) <= max_cosine_floor(classes, dim) + 1e-12
    assert angle_deviation_floor(classes, dim + 1) <= angle_deviation_floor(classes, dim) + 1e-12


def test_a_hundred_classes_in_32_dimensions_cannot_be_equiangular() -> None:
    assert max_cosine_floor(100, 32) == pytest.approx(0.0338, abs=1e-4)
    assert angle_deviation_floor(100, 32) == pytest.approx(0.1462, abs=1e-4)


@PROPERTY
@given(seeds, st.integers(2, 6), st.integers(1, 8))
def test_nc1_equals_the_naive_pseudo_inverse(seed: int, classes: int, dim: int) -> None:
    generator = rng(seed)
    mean, covariance = normal(generator, classes, dim), random_psd(generator, classes, dim)
    count = torch.randint(1, 50, (classes,), generator=generator)
    within = sum(int(n) * c.numpy() for n, c in zip(count, covariance, strict=True)) / int(count.sum())
    between = np.zeros((dim, dim))
    for row in (mean - mean.mean(0)).numpy():
        between += np.outer(row, row) / classes
    expected = float(np.trace(within @ np.linalg.pinv(between, rcond=1e-12, hermitian=True))) / classes
    value, ratio = theory.nc1(count, mean, covariance)
    assert value == pytest.approx(expected, rel=1e-5)
    assert ratio == pytest.approx(float(np.trace(within) / np.trace(between)), rel=1e-9)
    scaled, _ = theory.nc1(count, 7 * mean + 100, 49 * covariance)
    assert scaled == pytest.approx(value, rel=1e-5)


def test_nc4_counts_disagreements_with_the_nearest_mean() -> None:
    z, mean = normal(rng(0), 50, 3) + 1000, normal(rng(1), 4, 3) + 1000
    nearest = torch.tensor([int(torch.stack([(x - m).norm() for m in mean]).argmin()) for x in z])
    assert theory.nc4(z, nearest, mean) == 0
    wrong = nearest.clone()
    wrong[:5] = (wrong[:5] + 1) % 4
    assert theory.nc4(z, wrong, mean) == pytest.approx(0.1)


def test_all_measures_in_one_object() -> None:
    mean = _simplex(3, 2)
    arguments = torch.ones(3), mean, torch.zeros(3, 2, 2)
    found = theory.collapse_measures(*arguments, mean.clone().requires_grad_(), mean, torch.arange(3))
    assert (found.nc1, found.nc4) == (0, 0)
    assert found.nc3 == pytest.approx(0, abs=1e-9)
    assert math.isnan(theory.collapse_measures(*arguments, None, mean, torch.arange(3)).nc3)


def test_refusals() -> None:
    mean, covariance = torch.zeros(3, 2), torch.zeros(3, 2, 2)
    with pytest.raises(ValueError, match="class 1 has no sample"):
        theory.nc1(torch.tensor([1, 0, 1]), mean, covariance)
    with pytest.raises(ValueError, match="class means coincide"):
        theory.nc1(torch.ones(3), mean, covariance)
    with pytest.raises(ValueError, match="has no direction"):
        theory.nc2(mean)
    with pytest.raises(ValueError, match="not defined for a deeper head"):
        theory.nc3(torch.zeros(3, 4), mean)
    with pytest.raises(ValueError, match="got 1 class"):
        theory.nc2(torch.zeros(1, 2))
