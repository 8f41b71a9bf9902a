"""The Bures distance against scipy and POT, its metric properties, and the places where it loses digits."""

from __future__ import annotations

import math

import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import PROPERTY, bures_trace, normal, random_psd, rng

from protoseam.theory import bures, psd_sqrt

seeds = st.integers(0, 10**6)
dims = st.integers(1, 7)


@PROPERTY
@given(seeds, dims)
def test_equals_the_trace_form_of_eq_bures(seed: int, dim: int) -> None:
    a, b = random_psd(rng(seed), 3, dim), random_psd(rng(seed + 1), 3, dim)
    expected = torch.tensor([bures_trace(x.numpy(), y.numpy()) for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(bures(a, b), expected.double(), rtol=1e-6, atol=1e-7)


def test_equals_pot() -> None:
    a, b = random_psd(rng(0), 1, 6)[0], random_psd(rng(1), 1, 6)[0]
    zero = torch.zeros(6).double()
    expected = ot.gaussian.bures_wasserstein_distance(zero, zero, a, b)
    assert float(bures(a, b)) == pytest.approx(float(expected), rel=1e-9)


@PROPERTY
@given(seeds, dims, st.integers(1, 7))
def test_is_a_metric(seed: int, dim: int, rank: int) -> None:
    generator = rng(seed)
    a, b, c = (random_psd(generator, 4, dim, min(rank, dim)) for _ in range(3))
    scale = float((a + b + c).diagonal(dim1=-2, dim2=-1).sum(-1).max()) ** 0.5
    assert (bures(a, a) == 0).all()
    torch.testing.assert_close(bures(a, b), bures(b, a), rtol=1e-7, atol=1e-7 * scale)
    assert (bures(a, c) <= bures(a, b) + bures(b, c) + 1e-7 * scale).all()


@PROPERTY
@given(seeds, dims)
def test_variational_form_is_the_minimum_over_orthogonal_matrices(seed: int, dim: int) -> None:
    generator = rng(seed)
    a, b = random_psd(generator, 1, dim)[0], random_psd(generator, 1, dim)[0]
    distance = float(bures(a, b))
    for _ in range(5):
        u, _ = torch.linalg.qr(normal(generator, dim, dim))
        assert distance <= float((psd_sqrt(a) - psd_sqrt(b) @ u).norm()) + 1e-9
    # U = I: the step of cor:controlled from Bures to Frobenius
    assert distance <= float((psd_sqrt(a) - psd_sqrt(b)).norm()) + 1e-9


@PROPERTY
@given(seeds, dims, st.floats(1e-6, 1e6))
def test_scales_and_rotates_like_a_length(seed: int, dim: int, scale: float) -> None:
    generator = rng(seed)
    a, b = random_psd(generator, 2, dim), random_psd(generator, 2, dim)
    u, _ = torch.linalg.qr(normal(generator, dim, dim))
    torch.testing.assert_close(bures(scale * a, scale * b), math.sqrt(scale) * bures(a, b), rtol=1e-6, atol=0)
    torch.testing.assert_close(bures(u @ a @ u.T, u @ b @ u.T), bures(a, b), rtol=1e-6, atol=1e-9)


def test_singular_matrices_in_closed_form() -> None:
    a, b = normal(rng(0), 5), normal(rng(1), 5)
    expected = math.sqrt(float(a @ a + b @ b - 2 * (a @ b).abs()))  # rank one against rank one
    assert float(bures(a.outer(a), b.outer(b))) == pytest.approx(expected, rel=1e-7)
    c = random_psd(rng(2), 1, 5)[0]
    zero = torch.zeros(5, 5, dtype=torch.float64)
    assert float(bures(c, zero)) == pytest.approx(math.sqrt(float(c.trace())), rel=1e-12)
    assert float(bures(zero, zero)) == 0
    # the same line, scaled: (√α − √β)‖a‖
    assert float(bures(4 * a.outer(a), a.outer(a))) == pytest.approx(float(a.norm()), rel=1e-7)


def test_commuting_matrices_in_closed_form() -> None:
    a, b = torch.tensor([0.0, 1.0, 4.0]), torch.tensor([9.0, 1.0, 0.0])
    assert float(bures(a.diag(), b.diag())) == pytest.approx(math.sqrt(9 + 0 + 4), rel=1e-12)


@pytest.mark.parametrize("t", [1e-4, 1e-7, 1e-10])
def test_nearly_equal_matrices_keep_their_digits(t: float) -> None:
    a = random_psd(rng(0), 1, 6)[0] + 0.1 * torch.eye(6, dtype=torch.float64)
    e = normal(rng(1), 6, 6)
    e = t * (e + e.T)
    values, vectors = torch.linalg.eigh(a)
    rotated = vectors.T @ e @ vectors
    # first order: bures² = ½ Σ_jl E_jl²/(λ_j + λ_l)
    expected = math.sqrt(float((rotated.square() / (values[:, None] + values[None, :])).sum()) / 2)
    assert float(bures(a, a + e)) == pytest.approx(expected, rel=max(10 * t, 1e-4))
    if t <= 1e-7:  # where the trace form, in the same precision, has no digit left
        assert abs(bures_trace(a.numpy(), (a + e).numpy()) / expected - 1) > 1e-3


def test_batches_broadcast_and_float32_of_low_rank_is_a_covariance() -> None:
    a = random_psd(rng(0), 3, 20, rank=4)
    b = random_psd(rng(1), 1, 20)[0]
    torch.testing.assert_close(bures(a, b), torch.stack([bures(x, b) for x in a]))
    assert bures(a.float(), b.float()).dtype == torch.float64
    torch.testing.assert_close(bures(a.float(), b.float()), bures(a, b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(2, 3), "square matrices"),
        (-torch.eye(2), "negative beyond rounding"),
        (torch.full((2, 2), math.nan), "NaN or infinity"),
    ],
)
def test_refuses_what_is_no_covariance(matrix: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        psd_sqrt(matrix)


def test_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="matrices of one size"):
        bures(torch.eye(2), torch.eye(3))
