"""The three terms against loops over floats: values, gradients, and what each term may reach."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.core import (
    consensus,
    consensus_slope,
    objective,
    repulsion,
    sample,
    sampled_classification,
    squared_residuals,
)
from protoseam.core.precision import at_least_float32, no_autocast

B, C, K = 7, 5, 3


def tensor(rows: list[list[float]], **options: bool) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, **options)


@pytest.fixture
def seam() -> tuple[Tensor, Tensor, Tensor]:
    z, s = torch.randn(B, K, dtype=torch.float64), torch.randn(C, K, dtype=torch.float64)
    return z.requires_grad_(), torch.tensor([0, 4, 2, 2, 1, 4, 4]), s.requires_grad_()


# ---------------------------------------------------------------------- consensus


def test_consensus_value_and_gradients(seam: tuple[Tensor, Tensor, Tensor]) -> None:
    z, y, s = seam
    loss = consensus(z, y, s, 3.0)
    assert loss.item() == pytest.approx(oracles.consensus(z.tolist(), y.tolist(), s.tolist(), 3.0), rel=1e-13)
    loss.backward()
    by_z = oracles.derivative(lambda v: oracles.consensus(v, y.tolist(), s.tolist(), 3.0), z.tolist())
    by_s = oracles.derivative(lambda v: oracles.consensus(z.tolist(), y.tolist(), v, 3.0), s.tolist())
    assert torch.allclose(z.grad, tensor(by_z), atol=1e-9)
    assert torch.allclose(s.grad, tensor(by_s), atol=1e-9)
    assert torch.equal(s.grad[3], torch.zeros(K))  # class 3 is not in the batch


def test_residuals_are_sums_over_coordinates_not_means(seam: tuple[Tensor, Tensor, Tensor]) -> None:
    z, y, s = seam
    found = squared_residuals(z, y, s)
    expected = [oracles.distance(z[b].tolist(), s[y[b]].tolist()) ** 2 for b in range(B)]
    assert found.tolist() == pytest.approx(expected, rel=1e-13)


def test_consensus_takes_rho_as_a_tensor(seam: tuple[Tensor, Tensor, Tensor]) -> None:
    z, y, s = seam
    assert torch.equal(consensus(z, y, s, torch.tensor(3.0)), consensus(z, y, s, 3.0))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_embeddings_are_lifted_before_subtracting(low: torch.dtype) -> None:
    z, s = (100 + torch.randn(B, K)).to(low), 100 + torch.randn(C, K)
    y = torch.arange(B) % C
    loss = consensus(z, y, s, 1.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(oracles.consensus(z.tolist(), y.tolist(), s.tolist(), 1.0), rel=1e-5)
    assert consensus(z, y, s.to(low), 1.0).dtype == torch.float32


def test_precision_rule() -> None:
    for kept in (torch.float32, torch.float64):
        t = torch.zeros(1, dtype=kept)
        assert at_least_float32(t) is t
    for low in (torch.bfloat16, torch.float16):
        assert at_least_float32(torch.ones(1, dtype=low)).dtype == torch.float32


def test_products_without_autocast() -> None:
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with no_autocast(a.device):
            assert torch.equal(a @ a, torch.mm(a, a))
    with no_autocast(torch.device("meta")):
        assert torch.zeros(1, device="meta").device.type == "meta"


# ---------------------------------------------------------------------- repulsion


@pytest.mark.parametrize("alpha", [2.0, 0.3])
def test_repulsion_value_and_gradient(alpha: float) -> None:
    s = (0.4 * torch.randn(C, K, dtype=torch.float64)).requires_grad_()
    loss = repulsion(s, alpha)
    assert loss.item() == pytest.approx(oracles.repulsion(s.tolist(), alpha), rel=1e-13)
    (2.5 * loss).backward()
    expected = oracles.derivative(lambda v: 2.5 * oracles.repulsion(v, alpha), s.tolist())
    assert torch.allclose(s.grad, tensor(expected), atol=1e-8)
    assert torch.autograd.gradcheck(lambda v: repulsion(v, alpha), (s,))


def test_repulsion_defaults_to_the_papers_alpha() -> None:
    s = torch.randn(C, K)
    assert torch.equal(repulsion(s), repulsion(s, 2.0))


def test_coincident_prototypes_have_a_finite_gradient() -> None:
    """Where the norm has no derivative the subgradient is 0; the other pairs still count."""
    s = tensor([[1.0, 2.0], [1.0, 2.0], [1.5, 2.0]], requires_grad=True)
    loss = repulsion(s)
    assert loss.item() == pytest.approx(1 + 2 * math.exp(-1), rel=1e-12)
    loss.backward()
    pull = 2 * math.exp(-1)  # −α e^{−αd} along the unit vector away from the third
    assert torch.allclose(s.grad, tensor([[pull, 0.0], [pull, 0.0], [-2 * pull, 0.0]]), atol=1e-12)


def test_all_prototypes_in_one_point() -> None:
    s = torch.zeros(4, K, requires_grad=True)
    loss = repulsion(s)
    loss.backward()
    assert loss.item() == 6.0
    assert torch.equal(s.grad, torch.zeros(4, K))


def test_close_pairs_still_repel() -> None:
    """A distance of 1e-5 at norm 1 is far above the resolution of float32, and of the formula."""
    s = tensor([[1.0, 0.0], [1.0, 1e-5], [-2.0, 0.0]], requires_grad=True)
    loss = repulsion(s)
    assert loss.item() == pytest.approx(oracles.repulsion(s.tolist(), 2.0), rel=1e-9)
    loss.backward()
    assert s.grad[0, 1].item() == pytest.approx(2 * math.exp(-2e-5), rel=1e-3)


@pytest.mark.parametrize(("apart", "repels"), [(5e-7, True), (4e-7, False), (1e-9, False)])
def test_what_float32_cannot_tell_apart_counts_as_coincident(apart: float, repels: bool) -> None:
    """The limit, at norm 1, is √(2·1e-13) = 4.5e-7: a few units in the last place of a float32."""
    s = tensor([[1.0, 0.0], [1.0, apart], [-2.0, 0.0]], requires_grad=True)
    repulsion(s).backward()
    assert s.grad[0, 1].item() == pytest.approx(2.0 if repels else 0.0, abs=0.01)


@pytest.mark.parametrize("elements", [1, C, 2 * C, 3 * C + 1])
def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    s = torch.randn(C, K, dtype=torch.float64, requires_grad=True)
    whole = repulsion(s)
    (gradient,) = torch.autograd.grad(whole, s)
    seen: list[int] = []
    addmm = torch.addmm

    def spy(base: Tensor, rows: Tensor, *rest: Tensor, **options: float) -> Tensor:
        seen.append(len(rows))
        return addmm(base, rows, *rest, **options)

    monkeypatch.setattr(objective, "_BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(torch, "addmm", spy)
    blocks = repulsion(s)
    assert torch.allclose(blocks, whole, rtol=1e-14)
    assert torch.allclose(torch.autograd.grad(blocks, s)[0], gradient, rtol=1e-13)
    rows = max(1, elements // C)
    assert max(seen) == rows
    assert len(seen) == math.ceil(C / rows)


def test_a_thousand_prototypes_are_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **o: (calls.append(1), addmm(*a, **o))[1])
    repulsion(torch.randn(1000, 2))
    assert len(calls) == 1
    repulsion(torch.randn(1500, 1))
    assert len(calls) == 3


def test_a_common_offset_costs_nothing() -> None:
    s = torch.randn(C, K, dtype=torch.float64)
    near, far = s.clone().requires_grad_(), (s + 1e6).requires_grad_()
    a, b = repulsion(near), repulsion(far)
    (a + b).backward()
    assert b.item() == pytest.approx(a.item(), rel=1e-8)
    assert torch.allclose(near.grad, far.grad, rtol=1e-7)


def test_repulsion_keeps_float64_inside() -> None:
    """Float32 prototypes, far from the origin and close together: the loss of float32 is avoided."""
    s = (1000 + 0.01 * torch.randn(C, K)).requires_grad_()
    loss = repulsion(s)
    loss.backward()
    assert loss.dtype == s.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(oracles.repulsion(s.tolist(), 2.0), rel=1e-6)
    half = s.detach().bfloat16().requires_grad_()
    repulsion(half).backward()
    assert repulsion(half).dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16


def test_prototypes_that_are_not_numbers_show() -> None:
    for value in (torch.nan, torch.inf):
        s = torch.randn(C, K)
        s[1, 0] = value
        assert repulsion(s).isnan()


def test_repulsion_is_differentiable_once() -> None:
    s = torch.randn(C, K, requires_grad=True)
    (gradient,) = torch.autograd.grad(repulsion(s).square(), s, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


# ---------------------------------------------------------------------- sampled classification


def logits_by_hand(head: nn.Module, samples: Tensor) -> list[list[list[float]]]:
    return [[head(samples[m, c]).tolist() for c in range(C)] for m in range(len(samples))]


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("antithetic", [False, True])
def test_classification_value(draws: int, antithetic: bool) -> None:
    draws *= 2
    head, s = nn.Linear(K, C).double(), torch.randn(C, K, dtype=torch.float64)
    factors = torch.randn(C, K, K, dtype=torch.float64).tril()
    options = {"draws": draws, "antithetic": antithetic}
    z = sample(s, factors, **options, generator=torch.Generator().manual_seed(3))
    found = sampled_classification(head, s, factors, **options, generator=torch.Generator().manual_seed(3))
    expected = oracles.classification(logits_by_hand(head, z))
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_classification_draws_once_by_default() -> None:
    seen: list[Tensor] = []
    sampled_classification(
        lambda z: (seen.append(z), z @ torch.ones(K, C))[1], torch.zeros(C, K), torch.ones(1, 1)
    )
    assert seen[0].shape == (C, K)


def test_classification_gradients_reach_head_and_prototypes() -> None:
    head, s = nn.Linear(K, C).double(), torch.randn(C, K, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(C, K, K, dtype=torch.float64).tril().requires_grad_()
    noise = sample(
        torch.zeros(C, K, dtype=torch.float64), factors, generator=torch.Generator().manual_seed(1)
    )

    def by_hand(rows: list[list[float]]) -> float:
        return oracles.classification(logits_by_hand(head, tensor(rows) + noise))

    sampled_classification(head, s, factors, generator=torch.Generator().manual_seed(1)).backward()
    assert torch.allclose(s.grad, tensor(oracles.derivative(by_hand, s.tolist())), atol=1e-9)
    assert head.weight.grad.abs().sum() > 0
    assert factors.grad is None  # constants within an epoch


def test_class_weights_replace_the_uniform_ones() -> None:
    head, s = nn.Linear(K, C).double(), torch.randn(C, K, dtype=torch.float64)
    factors, weights = torch.ones(1, 1, dtype=torch.float64), tensor([0.5, 0.2, 0.1, 0.15, 0.05])
    z = sample(s, factors, draws=3, generator=torch.Generator().manual_seed(2))
    found = sampled_classification(
        head, s, factors, draws=3, class_weights=weights, generator=torch.Generator().manual_seed(2)
    )
    expected = oracles.classification(logits_by_hand(head, z), weights.tolist())
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_any_loss_a_row_or_their_mean(reduction: str) -> None:
    head, s, factors = nn.Linear(K, C), torch.randn(C, K), torch.ones(1, 1)

    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        assert labels.tolist() == [*range(C), *range(C)]
        return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction=reduction)

    draw = {"draws": 2, "generator": torch.Generator().manual_seed(0)}
    found = sampled_classification(head, s, factors, loss_fn=smoothed, **draw)
    draw["generator"].manual_seed(0)
    z = sample(s, factors, **draw).flatten(0, 1)
    expected = F.cross_entropy(head(z), torch.arange(C).repeat(2), label_smoothing=0.1)
    assert torch.allclose(found, expected)


def test_a_column_of_losses_is_one_a_row() -> None:
    found = sampled_classification(
        nn.Identity(), torch.eye(3), torch.ones(1, 1), loss_fn=lambda a, y: a.gather(1, y[:, None])
    )
    assert found.shape == ()


def test_losses_come_back_in_float32() -> None:
    head, s, factors = nn.Linear(K, C).bfloat16(), torch.randn(C, K), torch.ones(1, 1)
    for loss_fn in (None, lambda a, y: a.bfloat16().sum(1), lambda a, y: a.bfloat16().sum()):
        found = sampled_classification(lambda z: head(z.bfloat16()), s, factors, loss_fn=loss_fn)
        assert found.dtype == torch.float32


def test_weights_need_a_loss_a_row() -> None:
    with pytest.raises(ValueError, match=r"class weights .*loss_fn.*reduction='none'"):
        sampled_classification(
            nn.Linear(K, C),
            torch.randn(C, K),
            torch.ones(1, 1),
            loss_fn=F.cross_entropy,
            class_weights=torch.full((C,), 1 / C),
        )


def test_a_loss_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_fn .*\(10 of them\).*shape \(10, 5\)"):
        sampled_classification(
            nn.Linear(K, C), torch.randn(C, K), torch.ones(1, 1), draws=2, loss_fn=lambda a, y: a.exp()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_slope_of_the_consensus_is_its_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    z = torch.randn(9, 4, generator=generator).to(dtype).requires_grad_()
    s = torch.randn(3, 4, generator=generator).requires_grad_()
    y = torch.arange(9) % 3
    rho = torch.tensor(3.0)
    dz, ds = torch.autograd.grad(consensus(z, y, s, rho), [z, s])
    slope = consensus_slope(z.detach(), y, s.detach(), rho)
    assert slope.dtype == torch.float32
    torch.testing.assert_close(slope.to(dtype), dz)
    torch.testing.assert_close(-torch.zeros(3, 4).index_add_(0, y, slope), ds)
