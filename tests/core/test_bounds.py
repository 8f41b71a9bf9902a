"""The limits of a step, against what they claim: quadratics, least squares, cross-entropy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protoseam.core.bounds import (
    batch_share,
    consensus_factors,
    head_factor,
    prototype_factors,
)

HEAVY = torch.tensor(1e12, dtype=torch.float64)  # weights so large that their limit never counts


def of_one_part(
    loss: Tensor, gradient_square: Tensor, weight_square: Tensor, lr: float, share: float = 1.0
) -> Tensor:
    return consensus_factors(loss, gradient_square[None], weight_square[None], lr, share)[0]


@pytest.mark.parametrize("curvature", [0.01, 1.0, 50.0])
def test_polyaks_step_measures_the_curvature_of_a_quadratic(curvature: float) -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.float64)
    loss, gradient = 0.5 * curvature * x.square().sum(), curvature * x
    factor = of_one_part(loss, gradient.square().sum(), HEAVY, lr=0.7)
    assert float(factor) == pytest.approx(min(1.0, 1 / (2 * curvature * 0.7)), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_small_batch_has_the_share_of_the_gradients_that_a_velocity_is_worth(
    batch: int, momentum: float
) -> None:
    weights = [momentum**j for j in range(1000)]
    worth = sum(weights) ** 2 / sum(w * w for w in weights)
    assert batch_share(batch, momentum) == pytest.approx(min(1.0, batch / worth), rel=1e-9)
    assert float(batch_share(torch.tensor(batch), momentum)) == pytest.approx(
        batch_share(batch, momentum), rel=1e-6
    )
    loss, square = torch.tensor(8.0), torch.tensor(4.0)
    whole = of_one_part(loss, square, HEAVY, lr=10.0)
    assert float(of_one_part(loss, square, HEAVY, lr=10.0, share=0.3)) == pytest.approx(0.3 * float(whole))


def test_the_tighter_limit_counts() -> None:
    loss, square = (torch.tensor(v, dtype=torch.float64) for v in (8.0, 4.0))
    light = torch.tensor(
        1e-4, dtype=torch.float64
    )  # ‖θ‖ = .01, ‖∇‖ = 2: a hundredth of it is 1e-4 = .1 · 5e-4 · 2
    assert float(of_one_part(loss, square, light, 0.1)) == pytest.approx(5e-4)
    assert float(of_one_part(loss, 1e6 * square, HEAVY, lr=0.1)) == pytest.approx(8 / (0.1 * 4e6))
    assert float(of_one_part(loss, square, HEAVY, lr=1e-6)) == 1.0
    assert float(of_one_part(0 * loss, 0 * square, HEAVY, lr=0.1)) == 0.0  # and not 0/0


def test_each_part_has_the_limit_of_its_own_weights() -> None:
    loss, lr = torch.tensor(1e12, dtype=torch.float64), 0.1
    gradients, weights = [4.0, 9.0, 0.0, 1.0], [25.0, 1.0, 0.0, 1e-9]
    found = consensus_factors(
        loss, *(torch.tensor(v, dtype=torch.float64) for v in (gradients, weights)), lr
    ).tolist()
    # a part that starts near 0 counts as a hundredth of all: ‖θ‖² = 26, so 0.0026 instead of 1e-9
    for factor, square, weight in zip(found, gradients, [25.0, 1.0, 0.0026, 0.0026], strict=True):
        length = 0.01 * math.sqrt(weight)
        assert factor == pytest.approx(
            min(1.0, length / (lr * math.sqrt(square))) if square else 1.0, rel=1e-6
        )


@pytest.mark.parametrize("lr", [0.5, 5.0, 500.0])
def test_least_squares_at_the_bounded_rate_converge(lr: float) -> None:
    """Single samples, as noisy as a gradient can be, at rates far beyond the limit."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(200, 8, generator=g, dtype=torch.float64)
    target = h @ torch.randn(8, 3, generator=g, dtype=torch.float64)
    w = torch.zeros(8, 3, dtype=torch.float64)
    first = (h @ w - target).square().mean()
    for _ in range(5):
        for x, t in zip(h, target, strict=True):
            residual = x @ w - t
            gradient = torch.outer(x, residual)
            factor = of_one_part(0.5 * residual.square().sum(), gradient.square().sum(), HEAVY, lr)
            w -= lr * factor * gradient
    assert (h @ w - target).square().mean() < 1e-6 * first


@pytest.mark.parametrize(
    "factors", [torch.full((1, 1), 0.3), torch.rand(4, 3), torch.rand(1, 3, 3), torch.rand(4, 3, 3)]
)
def test_the_heads_curvature_is_bounded(factors: torch.Tensor) -> None:
    """½·E‖(z, 1)‖² is above the largest eigenvalue of cross-entropy's Hessian in N2's weights, and of that size."""
    g = torch.Generator().manual_seed(0)
    s = 2 * torch.randn(4, 3, generator=g)
    lr = 1e6
    curvature = 1 / (lr * float(head_factor(s, factors, lr)))
    spread = [
        float((f @ f.T).trace()) if factors.ndim == 3 else float(f.expand(3).square().sum())
        for f in factors.expand(4, *factors.shape[1:])
    ]
    square = sum(float(p.square().sum()) + v for p, v in zip(s, spread, strict=True)) / 4
    assert curvature == pytest.approx(0.5 * (square + 1), rel=1e-5)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(s, flat[:12].view(4, 3), flat[12:]), torch.arange(4))

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(16))
    assert torch.linalg.eigvalsh(hessian)[-1] <= curvature
    assert float(head_factor(s, factors, 1e-6)) == 1.0


def test_no_prototype_moves_further_than_a_tenth_of_the_length_of_repulsion() -> None:
    gradient = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [0.0, 0.0]])
    lr, alpha = 2.0, 2.0
    moved = (lr * prototype_factors(gradient, alpha, lr) * gradient).norm(dim=1)
    assert moved.tolist() == pytest.approx([0.05, 2e-3, 0.0])
    assert not math.isnan(float(prototype_factors(gradient, alpha, lr).sum()))
