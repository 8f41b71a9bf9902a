"""Merging moments: unions without un-centring, windows that forget, means that follow a drift."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from torch import Tensor

from protoseam.core import Moments, class_moments, empty_moments, merge_batch_, merge_moments, merging
from protoseam.core.covariance import Structure, normalise_scatter
from protoseam.core.merging import between_scatter

C, K = 4, 3
STRUCTURES: list[Structure] = ["full", "diagonal", "shared"]
Batches = list[tuple[Tensor, Tensor]]


def batches(steps: int = 6, size: int = 9, offset: float = 0.0) -> Batches:
    return [(offset + torch.randn(size, K).double(), torch.randint(C - 1, (size,))) for _ in range(steps)]


def direct(z: Tensor, y: Tensor, structure: Structure) -> Moments:
    count, mean, found = class_moments(z, y, C, structure=structure)
    n = count.double()
    weight = n.sum() if structure == "shared" else n.reshape(-1, *[1] * (found.ndim - 1))
    return Moments(n, mean, found * weight)


def union(parts: Batches, structure: Structure) -> Moments:
    return direct(torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts]), structure)


def close(a: Moments, b: Moments, rtol: float = 1e-10) -> bool:
    return all(torch.allclose(p, q, rtol=rtol, atol=1e-12) for p, q in zip(a, b, strict=True))


def merged(parts: Batches, structure: Structure = "full", **windows: float) -> Moments:
    moments = empty_moments(C, K, structure)
    for z, y in parts:
        merge_batch_(moments, z, y, **{"window": math.inf, **windows})
    return moments


# ---------------------------------------------------------------------- unions


def test_empty_moments() -> None:
    moments = empty_moments(C, K, "shared", device="cpu")
    assert [tuple(t.shape) for t in moments] == [(C,), (C, K), (1, K, K)]
    assert all(t.dtype == torch.float64 and not t.any() for t in moments)
    assert empty_moments(C, K, device="meta").scatter.device.type == "meta"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_two_samples_merge_into_their_union(structure: Structure, offset: float) -> None:
    a, b = batches(2, 25, offset)
    found = merge_moments(direct(*a, structure), direct(*b, structure))
    assert close(found, union([a, b], structure), rtol=1e-6 if offset else 1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_merging_with_nothing(structure: Structure) -> None:
    some = direct(*batches(1)[0], structure)
    nothing = empty_moments(C, K, structure)
    assert close(merge_moments(some, nothing), some)
    assert close(merge_moments(nothing, some), some)


def test_shares_of_a_sample_merge_like_samples() -> None:
    """A process's share may be a fraction: scaling all counts scales the result and nothing else."""
    a, b = (direct(*batch, "full") for batch in batches(2, 5))
    tiny = [Moments(m.count_C / 16, m.mean_CK, m.scatter / 16) for m in (a, b)]
    whole, share = merge_moments(a, b), merge_moments(*tiny)
    assert torch.allclose(share.count_C * 16, whole.count_C)
    assert torch.allclose(share.mean_CK, whole.mean_CK)
    assert torch.allclose(share.scatter * 16, whole.scatter)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_between_scatter(structure: Structure) -> None:
    weight, delta = torch.rand(C).double(), torch.randn(C, K).double()
    full = torch.stack([w * torch.outer(d, d) for w, d in zip(weight, delta, strict=True)])
    expected = {"full": full, "diagonal": full.diagonal(dim1=1, dim2=2), "shared": full.sum(0)[None]}
    found = between_scatter(weight, delta, empty_moments(C, K, structure).scatter)
    assert torch.allclose(found, expected[structure])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_batches_merge_into_their_union(structure: Structure, offset: float) -> None:
    parts = batches(offset=offset)
    assert close(merged(parts, structure), union(parts, structure), rtol=1e-6 if offset else 1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_windows_larger_than_the_data_forget_nothing(structure: Structure) -> None:
    parts = batches()
    assert close(merged(parts, structure, window=1000, mean_window=1000), union(parts, structure))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_seam_one_wide(structure: Structure) -> None:
    moments, z, y = empty_moments(C, 1, structure), torch.randn(20, 1), torch.arange(20) % C
    for rows in torch.arange(20).split(7):
        merge_batch_(moments, z[rows], y[rows], window=math.inf)
    found = normalise_scatter(moments.count_C, moments.scatter)
    assert torch.allclose(found, class_moments(z, y, C, structure=structure)[2])


def test_one_class_is_not_mistaken_for_a_shared_structure() -> None:
    moments, z = empty_moments(1, K), torch.randn(7, K)
    for row in z:
        merge_batch_(moments, row[None], torch.tensor([0]), window=3.5)
    count, mean, scatter = oracles.windowed_moments([([row.tolist()], [0]) for row in z], 0, 3.5, math.inf)
    assert moments.count_C.item() == count == 3.5
    assert torch.allclose(moments.mean_CK[0], torch.tensor(mean).double())
    assert torch.allclose(moments.scatter[0], torch.tensor(scatter).double())


# ---------------------------------------------------------------------- forgetting


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize(
    ("window", "mean_window"), [(10.0, math.inf), (10.0, 4.0), (2.0, 2.0), (100.0, 5.0), (7.5, 2.5)]
)
def test_windows_by_the_loops(structure: Structure, window: float, mean_window: float) -> None:
    parts = batches()
    found = merged(parts, structure, window=window, mean_window=mean_window)
    for label in range(C):
        steps = [(z.tolist(), y.tolist()) for z, y in parts]
        count, mean, scatter = oracles.windowed_moments(steps, label, window, mean_window)
        expected = torch.tensor(scatter, dtype=torch.float64)
        expected = expected.diagonal() if structure == "diagonal" else expected
        assert found.count_C[label].item() == pytest.approx(count)
        assert torch.allclose(found.mean_CK[label], torch.tensor(mean, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(found.scatter[label], expected, atol=1e-12)


def test_a_pooled_scatter_forgets_the_share_of_samples_that_leave() -> None:
    first, second = batches(2, 8)
    one = merged([first], "shared")
    both = merged([first, second], "shared", window=6.0)
    kept = torch.minimum(one.count_C, 6.0 - torch.bincount(second[1], minlength=C)).clamp_min(0)
    new = direct(*second, "shared")
    weight = kept * new.count_C / (kept + new.count_C).clamp_min(1)
    between = between_scatter(weight, new.mean_CK - one.mean_CK, one.scatter)
    expected = one.scatter * kept.sum() / one.count_C.sum() + new.scatter + between
    assert torch.allclose(both.scatter, expected)


def test_a_class_outside_the_batch_stays_as_it_is() -> None:
    moments = merged(batches())
    before = Moments(*(t.clone() for t in moments))
    merge_batch_(moments, torch.randn(4, K), torch.zeros(4).long(), window=math.inf)
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(moments, before, strict=True))
    assert not torch.equal(moments.scatter[0], before.scatter[0])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_share_of_less_than_one_sample_is_kept_whole(structure: Structure) -> None:
    """After pooling over many processes a rare class holds a fraction of a sample: it must not fade."""
    moments = merged(batches(), structure)
    for t in (moments.count_C, moments.scatter):
        t.div_(64)
    before = moments.scatter.clone()
    elsewhere = (torch.zeros(0, K).double(), torch.zeros(0).long())
    merge_batch_(moments, *elsewhere, window=100.0)
    assert torch.allclose(moments.scatter, before)


@pytest.mark.parametrize("elements", [1, K * 9, 2 * K * 9, 3 * K * 9])
def test_blocks_of_classes_change_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    parts = batches()
    whole = merged(parts, window=8.0)
    sizes: list[int] = []
    baddbmm_ = Tensor.baddbmm_

    def spy(self: Tensor, *matrices: Tensor) -> Tensor:
        sizes.append(len(self))
        return baddbmm_(self, *matrices)

    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(Tensor, "baddbmm_", spy)
    assert close(merged(parts, window=8.0), whole)
    step = max(1, elements // (K * 9))
    assert sizes[: math.ceil(C / step)] == [min(step, C - lo) for lo in range(0, C, step)]


def test_the_embeddings_graph_is_not_kept() -> None:
    moments = empty_moments(C, K)
    z, y = batches(1)[0]
    merge_batch_(moments, z.float().requires_grad_(), y, window=math.inf)
    assert not any(t.requires_grad for t in moments)
    assert all(t.dtype == torch.float64 for t in moments)


def test_a_non_finite_sample_spoils_its_class_alone() -> None:
    z, y = batches(1)[0]
    z[0, 0], y[0], y[1] = torch.nan, 3, 2
    found = merged([(z, y)])
    spoilt = ~found.scatter.flatten(1).isfinite().all(1)
    assert spoilt.tolist() == [False, False, False, True]
    assert close(*(Moments(*(t[:3] for t in m)) for m in (found, merged([(z[1:], y[1:])]))))


# ---------------------------------------------------------------------- drift


def drifting(samples_a_class: int, drift: float, **windows: float) -> tuple[float, float]:
    """Mean variance along and across the drift of 50 classes of unit Gaussians, after one epoch."""
    classes, size, k = 50, 64, 4
    steps = samples_a_class * classes // size
    moments = empty_moments(classes, k)
    for step in range(steps):
        z, y = torch.randn(size, k), torch.randint(classes, (size,))
        z[:, 0] += drift * step / steps
        merge_batch_(moments, z, y, **windows)
    variances = normalise_scatter(moments.count_C, moments.scatter).diagonal(dim1=1, dim2=2).mean(0)
    return variances[0].item(), variances[1:].mean().item()


def test_statistics_survive_a_drift_of_ten_deviations() -> None:
    along, across = drifting(500, 10.0, window=256.0, mean_window=32.0)
    assert 0.9 < along < 1.6
    assert across == pytest.approx(1.0, rel=0.03)
    remembered, _ = drifting(500, 10.0, window=math.inf)
    assert remembered > 8  # (10 σ)²/12 on top of 1


def test_without_a_drift_the_short_mean_costs_little() -> None:
    along, across = drifting(500, 0.0, window=256.0, mean_window=32.0)
    assert along == pytest.approx(1.0, rel=0.04)
    assert across == pytest.approx(1.0, rel=0.03)
