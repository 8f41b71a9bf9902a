"""Class moments and positive definite factors: accuracy, empty and collapsed classes, floors, blocks."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from torch import Tensor

from protoseam.core import (
    automatic_floor,
    class_factors,
    class_moments,
    covariance,
    factorize,
    split_half_error,
)
from protoseam.core.covariance import MIN_AUTO_FLOOR, Structure, normalise_scatter, scatter_shape

C, K = 4, 3
STRUCTURES: list[Structure] = ["full", "diagonal", "shared"]


def data(n: int = 40, classes: int = C, k: int = K, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Labelled Gaussians with different covariances; labels in no order."""
    y = torch.randint(classes, (n,))
    shape = torch.randn(classes, k, k, dtype=torch.float64)
    mean = torch.randn(classes, k, dtype=torch.float64)
    noise = (shape[y] @ torch.randn(n, k, 1, dtype=torch.float64))[..., 0]
    return offset + mean[y] + noise, y


def expected_covariance(z: Tensor, y: Tensor, structure: Structure, classes: int = C) -> Tensor:
    counts, _, full = oracles.moments(z.tolist(), y.tolist(), classes)
    full = torch.tensor(full, dtype=torch.float64)
    if structure == "diagonal":
        return full.diagonal(dim1=1, dim2=2)
    if structure == "shared":
        n = torch.tensor(counts, dtype=torch.float64)
        return ((n[:, None, None] * full).sum(0) / n.sum())[None]
    return full


def product(factors: Tensor) -> Tensor:
    factors = factors.double()
    return factors.square() if factors.ndim == 2 else factors @ factors.mT


# ---------------------------------------------------------------------- moments


@pytest.mark.parametrize("structure", STRUCTURES)
def test_moments_match_the_loops(structure: Structure) -> None:
    z, y = data()
    count, mean, found = class_moments(z, y, C, structure=structure)
    counts, means, _ = oracles.moments(z.tolist(), y.tolist(), C)
    assert count.tolist() == counts
    assert torch.allclose(mean, torch.tensor(means, dtype=torch.float64), rtol=1e-12)
    assert found.shape == scatter_shape(C, K, structure)
    assert torch.allclose(found, expected_covariance(z, y, structure), rtol=1e-11, atol=1e-14)


def test_full_is_the_default_structure() -> None:
    z, y = data()
    assert torch.equal(class_moments(z, y, C)[2], class_moments(z, y, C, structure="full")[2])
    assert class_factors(z, y, C, 0.1).factors.shape == (C, K, K)
    assert covariance.empty_moments(C, K).scatter.shape == (C, K, K)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_large_means_cost_nothing(structure: Structure) -> None:
    """Float32 embeddings 1e5 away from the origin: one pass in float32 would return noise."""
    z, y = data(offset=1e5)
    z = z.float()
    _, _, found = class_moments(z, y, C, structure=structure)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected_covariance(z, y, structure), rtol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_empty_classes_and_single_samples(structure: Structure) -> None:
    z, y = torch.randn(6, K), torch.tensor([2, 0, 0, 0, 0, 0])
    count, mean, found = class_moments(z, y, C, structure=structure)
    assert count.tolist() == [5, 0, 1, 0]
    assert torch.equal(mean[2], z[0].double())
    assert torch.equal(mean[[1, 3]], torch.zeros(2, K, dtype=torch.float64))
    assert torch.allclose(found, expected_covariance(z, y, structure), atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_samples_at_all(structure: Structure) -> None:
    """A process may hold none of the data."""
    count, mean, found = class_moments(torch.zeros(0, K), torch.zeros(0).long(), C, structure=structure)
    assert count.tolist() == [0] * C
    assert not mean.any()
    assert not found.any()
    assert mean.shape == (C, K)
    assert found.shape == scatter_shape(C, K, structure)


def test_one_class() -> None:
    z = torch.randn(9, K)
    for structure in ("full", "shared"):
        _, _, found = class_moments(z, torch.zeros(9).long(), 1, structure=structure)
        assert torch.allclose(found[0], torch.cov(z.double().T, correction=0))


def test_embeddings_may_carry_gradients() -> None:
    z, y = data()
    with_grad = class_moments(z.clone().requires_grad_(), y, C)
    assert all(torch.equal(a, b) for a, b in zip(with_grad, class_moments(z, y, C), strict=True))
    assert not with_grad[2].requires_grad


@pytest.mark.parametrize("structure", STRUCTURES)
def test_labels_past_the_last_class(structure: Structure) -> None:
    z, y = torch.randn(3, K), torch.tensor([1, 2, 4])
    for call in (
        lambda: class_moments(z, y, C, structure=structure),
        lambda: class_factors(z, y, C, 0.1, structure=structure),
    ):
        with pytest.raises(ValueError, match=r"0…3, but the largest is 4: .*subtract 1"):
            call()


def test_unknown_structure() -> None:
    with pytest.raises(ValueError, match="full, diagonal or shared, got 'banded'"):
        scatter_shape(C, K, "banded")  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_processes_add_up(structure: Structure) -> None:
    """`reduce` sums over processes: two threads of samples give the moments of the union."""
    z, y = data()
    mine, theirs = slice(0, 15), slice(15, None)
    whole = class_moments(z, y, C, structure=structure)
    n = torch.bincount(y[theirs], minlength=C)
    sums = torch.zeros(C, K, dtype=torch.float64).index_add_(0, y[theirs], z[theirs])
    r = z[theirs] - whole[1][y[theirs]]
    scatter = {
        "full": torch.stack([r[y[theirs] == c].T @ r[y[theirs] == c] for c in range(C)]),
        "diagonal": torch.zeros(C, K, dtype=torch.float64).index_add_(0, y[theirs], r.square()),
        "shared": (r.T @ r)[None],
    }[structure]
    others = iter([n, sums, scatter])
    found = class_moments(z[mine], y[mine], C, structure=structure, reduce=lambda t: t.add_(next(others)))
    for a, b in zip(found, whole, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-10)
    assert next(others, None) is None


def test_a_share_of_less_than_one_sample_counts_as_it_is() -> None:
    n, scatter = torch.tensor([0.5, 0.0], dtype=torch.float64), torch.tensor([[1.0], [0.0]])
    assert normalise_scatter(n, scatter).tolist() == [[2.0], [0.0]]
    pooled = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    assert normalise_scatter(n, pooled).item() == 6.0
    assert normalise_scatter(torch.zeros(2), pooled).item() == 3.0


# ---------------------------------------------------------------------- factors


@pytest.mark.parametrize("floor", [0.1, 1.0])
def test_factors_are_the_cholesky_of_the_shifted_covariance(floor: float) -> None:
    z, y = data()
    full = expected_covariance(z, y, "full")
    found, used = factorize(full, floor)
    for c in range(C):
        expected = oracles.cholesky((full[c] + floor**2 * torch.eye(K)).tolist())
        assert torch.allclose(found[c], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(used, torch.full((C,), floor, dtype=torch.float64), rtol=1e-15)


def test_diagonal_factors_are_standard_deviations() -> None:
    variances = torch.tensor([[4.0, 0.0, 1.0], [0.0, 0.0, 9.0]])
    found, used = factorize(variances, 0.5)
    assert torch.allclose(found, (variances.double() + 0.25).sqrt())
    assert used.tolist() == [0.5, 0.5]


def test_the_floor_may_be_a_tensor() -> None:
    z, y = data()
    full = class_moments(z, y, C)[2]
    assert torch.equal(factorize(full, torch.tensor(0.25))[0], factorize(full, 0.25)[0])


@pytest.mark.parametrize("floor", [1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("k", [8, 64])
def test_singular_covariances_factor_at_every_floor_and_scale(floor: float, scale: float, k: int) -> None:
    """k ≥ |D_i|, duplicates, one sample, full collapse, a line: rank-deficient all of them, and huge."""
    line = torch.randn(30, 1) * torch.randn(1, k)
    groups = [
        torch.randn(k // 2, k),
        torch.randn(1, k).repeat(9, 1),
        torch.randn(1, k),
        torch.zeros(5, k),
        line,
    ]
    z = scale * (torch.cat(groups) + 3.0)
    y = torch.cat([torch.full((len(g),), c) for c, g in enumerate(groups)])
    full = class_moments(z, y, 5)[2]
    found, used = factorize(full, floor)
    trace = full.diagonal(dim1=1, dim2=2).sum(1)
    limit = 4 * (k + 64) * torch.finfo(torch.float64).eps * trace
    assert torch.allclose(used, torch.maximum(limit.sqrt(), torch.full((5,), floor).double()), rtol=1e-12)
    assert found.isfinite().all()
    assert (found.diagonal(dim1=1, dim2=2) > 0).all()
    target = full + used.square()[:, None, None] * torch.eye(k)
    error = (product(found) - target).abs().amax((1, 2))
    assert (error <= 1e-14 * (trace + used.square())).all()


def test_many_samples_on_a_line() -> None:
    """The product of 10⁵ rows rounds to a matrix with an eigenvalue of about −50·ε·tr."""
    y = torch.zeros(100_000).long()
    for _ in range(8):
        z = 1e4 * torch.randn(100_000, 1) @ torch.randn(1, 3)
        full = class_moments(z, y, 1)[2]
        found, used = factorize(full, 1e-6)
        assert (found.diagonal(dim1=1, dim2=2) > 0.1 * used).all()
        assert torch.allclose(product(found), full + used.square() * torch.eye(3), rtol=1e-12)


def test_only_the_class_that_needs_it_gets_a_higher_floor() -> None:
    huge = torch.zeros(2, K, K, dtype=torch.float64)
    huge[0] = 1e18
    huge[1] = torch.eye(K)
    found, used = factorize(huge, 0.1)
    assert used[0] > 10
    assert used[1].item() == pytest.approx(0.1, rel=1e-15)
    assert found.isfinite().all()
    assert (found[0].diagonal() > 0).all()


def test_a_non_finite_covariance_gives_the_floor_and_says_so() -> None:
    full = torch.eye(K).repeat(3, 1, 1)
    full[1, 0, 1] = torch.inf
    full[2, 2, 2] = torch.nan
    found, used = factorize(full, 0.1)
    assert torch.allclose(found[1:], 0.1 * torch.eye(K).double().expand(2, K, K))
    assert torch.allclose(found[0], 1.01**0.5 * torch.eye(K).double())
    assert used.isnan().tolist() == [False, True, True]
    found, used = factorize(torch.tensor([[1.0, torch.nan], [1.0, 3.0]]), 0.1)
    assert torch.allclose(found, torch.tensor([[0.1, 0.1], [1.01**0.5, 3.01**0.5]]).double())
    assert used.isnan().tolist() == [True, False]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_class_factors_in_one_go(structure: Structure) -> None:
    z, y = data()
    found = class_factors(z, y, C, 0.2, structure=structure)
    shift = 0.04 if structure == "diagonal" else 0.04 * torch.eye(K)
    assert found.factors.dtype == torch.float32
    assert torch.allclose(
        product(found.factors), expected_covariance(z, y, structure) + shift, rtol=1e-5, atol=1e-5
    )
    counts, means, _ = oracles.moments(z.tolist(), y.tolist(), C)
    assert found.count_C.tolist() == counts
    assert torch.allclose(found.mean_CK, torch.tensor(means, dtype=torch.float64))
    assert found.floor.item() == 0.2
    assert torch.allclose(found.floor_used, torch.tensor(0.2, dtype=torch.float64))


def test_class_factors_write_where_told() -> None:
    z, y = data()
    out = torch.full((C, K, K), torch.nan, dtype=torch.float64)
    found = class_factors(z, y, C, 0.2, out=out)
    assert found.factors is out
    assert torch.allclose(product(out), expected_covariance(z, y, "full") + 0.04 * torch.eye(K), rtol=1e-10)


@pytest.mark.parametrize("floor", [0.2, "auto"])
@pytest.mark.parametrize("elements", [1, 2 * K * K, 3 * K * K + 1])
def test_blocks_of_classes_change_nothing(
    monkeypatch: pytest.MonkeyPatch, floor: float | str, elements: int
) -> None:
    y = torch.arange(C).repeat_interleave(torch.tensor([6, 8, 2, 4]))  # even: the halves agree in every block
    z = torch.randn(20, K)
    order = torch.randperm(20)
    z, y = z[order], y[order]
    whole = class_factors(z, y, C, floor)
    sizes: list[int] = []

    def spy(matrices: Tensor, sigma0: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(matrices))
        return factorize(matrices, sigma0)

    monkeypatch.setattr(covariance, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(covariance, "factorize", spy)
    blocks = class_factors(z, y, C, floor)
    for a, b in zip(whole, blocks, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)
    step = max(1, elements // K**2)
    assert sizes == [min(step, C - lo) for lo in range(0, C, step)]


def test_a_block_is_16_mebibytes() -> None:
    assert covariance.BLOCK_ELEMENTS * 8 == 16 * 2**20


@pytest.mark.parametrize("structure", ["diagonal", "shared"])
def test_structures_without_matrices_a_class_are_never_cut(
    monkeypatch: pytest.MonkeyPatch, structure: Structure
) -> None:
    z, y = data()
    whole = class_factors(z, y, C, 0.2, structure=structure)
    monkeypatch.setattr(covariance, "BLOCK_ELEMENTS", 1)
    for a, b in zip(class_factors(z, y, C, 0.2, structure=structure), whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("floor", "sweeps"), [(0.2, 1), ("auto", 3)])
def test_every_sweep_is_summed_over_the_processes(floor: float | str, sweeps: int) -> None:
    """Another process with the same samples: twice the counts, the same covariances."""
    z, y = data()
    alone = class_factors(z, y, C, floor)
    sums: list[Tensor] = []
    both = class_factors(z, y, C, floor, reduce=lambda t: sums.append(t.mul_(2)))
    assert torch.equal(both.count_C, 2 * alone.count_C)
    assert torch.allclose(both.factors, alone.factors, rtol=1e-6)
    assert len(sums) == 3 * sweeps


# ---------------------------------------------------------------------- floor="auto"


@pytest.mark.parametrize(("epsilon", "k"), [(0.5, 4), (2.0, 32), (1e-3, 9)])
def test_optimal_floor_minimises_the_bound(epsilon: float, k: int) -> None:
    best = automatic_floor(torch.tensor(epsilon, dtype=torch.float64), k).item()
    assert best == pytest.approx(math.sqrt(epsilon / (2 * math.sqrt(k))), rel=1e-14)

    def bound(sigma0: float) -> float:
        return math.sqrt(k) * sigma0 + epsilon / (2 * sigma0)

    assert bound(best) < min(bound(0.99 * best), bound(1.01 * best))


def test_the_automatic_floor_never_vanishes() -> None:
    assert automatic_floor(torch.tensor(0.0), 4).item() == pytest.approx(MIN_AUTO_FLOOR) == 1e-3
    collapsed = class_factors(torch.ones(8, K), torch.arange(8) % 2, 2, "auto")
    assert torch.allclose(collapsed.factors, 1e-3 * torch.eye(K))


def test_split_half_error_by_hand() -> None:
    a = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 3.0]]])
    b = torch.tensor([[[4.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
    assert split_half_error(a, b).item() == pytest.approx(0.5 * (5 + 2) / 2)
    assert split_half_error(a[:, 0], b[:, 0]).item() == pytest.approx(0.5 * (5 + 0) / 2)


@pytest.mark.parametrize("n", [60, 400])
def test_split_halves_estimate_the_true_error(n: int) -> None:
    """On Gaussian data the estimate is close to the mean of ‖Σ̂ − Σ‖_F itself."""
    classes, k = 40, 6
    root = torch.randn(classes, k, k, dtype=torch.float64)
    z = (root[:, None] @ torch.randn(classes, n, k, 1, dtype=torch.float64))[..., 0].flatten(0, 1)
    y = torch.arange(classes).repeat_interleave(n)
    error = (class_moments(z, y, classes)[2] - root @ root.mT).flatten(1).norm(dim=1).mean()
    floor = class_factors(z, y, classes, "auto").floor
    estimated = 2 * k**0.5 * floor.square()
    assert estimated.item() == pytest.approx(error.item(), rel=0.15)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_automatic_floor_halves_each_class(structure: Structure) -> None:
    y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 2, 2, 2, 2])
    z = torch.randn(12, K)
    even, odd = [0, 1, 4, 5, 8, 10], [2, 3, 6, 7, 9, 11]
    halves = [class_moments(z[rows], y[rows], 3, structure=structure)[2] for rows in (even, odd)]
    found = class_factors(z, y, 3, "auto", structure=structure)
    expected = automatic_floor(split_half_error(*halves), K)
    assert found.floor.dtype == torch.float64
    assert found.floor.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(found.floor_used, expected.expand_as(found.floor_used))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_labels_that_cannot_index_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"labels must be int64 or int32, got {dtype}: pass y\.long\(\)"):
        class_moments(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]).to(dtype), 2)
