"""Penalised logistic regression: against a naive oracle, scikit-learn, and the conditions of its minimum."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from protoseam.core.logistic import effective_dimension, logistic_regression

C, D, N = 4, 6, 80


def data(n: int = N) -> tuple[Tensor, Tensor]:
    """Overlapping classes of unequal size, and features far from mean 0 and variance 1."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(C, (n,), generator=g) * torch.randint(2, (n,), generator=g)
    h = torch.randn(C, D, generator=g)[y] + torch.randn(n, D, generator=g)
    return 50 + h * torch.logspace(-2, 2, D), y


def standard(h: Tensor) -> Tensor:
    h = h.double()
    return (h - h.mean(0)) / h.std(0, correction=0)


def in_standard_units(h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = h.double()
    return weight * h.std(0, correction=0), bias + weight @ h.mean(0)


def value(h: Tensor, y: Tensor, weight: Tensor, bias: Tensor, penalty: float, share: list[float]) -> float:
    w, b = in_standard_units(h, weight, bias)
    logits = (standard(h) @ w.T + b).tolist()
    return oracles.penalised_cross_entropy(logits, y.tolist(), w.tolist(), penalty, share)


@pytest.mark.parametrize("share", [[1.0] * C, [1.0, 3.0, 0.5, 2.0]])
def test_nothing_near_it_is_better(share: list[float]) -> None:
    h, y = data()
    g = torch.Generator().manual_seed(1)
    weight, bias = logistic_regression(h, y, C, penalty=0.05, class_weights=torch.tensor(share))
    least = value(h, y, weight, bias, 0.05, share)
    scale = h.double().std(0)
    for size in (0.1, 0.001):
        for _ in range(20):
            w = weight + size * torch.randn(C, D, generator=g, dtype=torch.float64) / scale
            b = bias + size * torch.randn(C, generator=g, dtype=torch.float64)
            assert value(h, y, w, b, 0.05, share) >= least


@pytest.mark.parametrize("penalty", [0.3, 1e-3])
def test_scikit_learn_finds_the_same(penalty: float) -> None:
    h, y = data()
    weight, bias = logistic_regression(h, y, C, penalty=penalty)
    other = LogisticRegression(C=1 / (2 * penalty * N), tol=1e-10, max_iter=10_000).fit(standard(h), y)
    w, b = in_standard_units(h, weight, bias)
    np.testing.assert_allclose(w, other.coef_ - other.coef_.mean(0), atol=2e-4)
    np.testing.assert_allclose(b, other.intercept_ - other.intercept_.mean(), atol=2e-4)


def test_the_default_penalty_counts_directions() -> None:
    h, y = data()
    size = float(effective_dimension(standard(h).T @ standard(h)))
    weight, _ = logistic_regression(h, y, C)
    assert torch.allclose(weight, logistic_regression(h, y, C, penalty=size / (2 * N))[0])
    assert not torch.allclose(weight, logistic_regression(h, y, C, penalty=size / N)[0])
    twice = torch.cat([h, 3 * h], 1)  # copies say nothing new
    both = standard(twice)
    assert torch.allclose(effective_dimension(both.T @ both), torch.tensor(size, dtype=torch.float64))


def test_the_effective_dimension_of_known_spectra() -> None:
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    for spectrum, expected in (([2, 2, 2, 0, 0], 3.0), ([1, 1, 1, 1, 1], 5.0), ([3, 1, 0, 0, 0], 1.6)):
        r = turn * torch.tensor(spectrum, dtype=torch.float64) @ turn.T
        assert float(effective_dimension(r)) == pytest.approx(expected)
    assert float(effective_dimension(torch.zeros(3, 3))) == 0


def test_a_rank_limits_the_logits_and_keeps_what_matters() -> None:
    h, y = data(400)
    whole, _ = logistic_regression(h, y, C, penalty=1e-3)
    weight, bias = logistic_regression(h, y, C, penalty=1e-3, rank=2)
    assert torch.linalg.matrix_rank(whole) == C - 1
    assert torch.linalg.matrix_rank(weight, rtol=1e-9) == 2
    right = ((h.double() @ weight.T + bias).argmax(1) == y).double().mean()
    left, size, other = torch.linalg.svd(whole * h.double().std(0))
    cut = (left[:, :2] * size[:2]) @ other[:2]
    assert right >= ((standard(h) @ cut.T).argmax(1) == y).double().mean()
    same, _ = logistic_regression(h, y, C, penalty=1e-3, rank=C - 1)
    assert torch.equal(same, whole)


def test_more_classes_than_features_and_more_features_than_samples() -> None:
    """Each has a shorter way to the main directions and to the penalty; here it is compared with the plain one."""
    g = torch.Generator().manual_seed(2)
    y = torch.arange(90) % 9
    h = 2 * torch.randn(9, 5, generator=g)[y] + torch.randn(90, 5, generator=g)
    weight, bias = logistic_regression(h, y, 9, penalty=0.01, rank=2)
    padded = torch.cat([h, torch.zeros(90, 9)], 1)  # nine classes, fourteen features
    same, shift = logistic_regression(padded, y, 9, penalty=0.01, rank=2)
    assert torch.linalg.matrix_rank(weight, rtol=1e-9) == 2
    assert torch.allclose(same[:, :5], weight, atol=1e-5)
    assert torch.allclose(shift, bias, atol=1e-5)
    wide = torch.randn(20, 30, generator=g)
    x = standard(wide)
    penalty = float(effective_dimension(x.T @ x)) / 40
    expected, bias = logistic_regression(wide, y[:20], 9, penalty=penalty)
    assert torch.allclose(logistic_regression(wide, y[:20], 9)[0], expected)
    plain, shift = logistic_regression(
        wide, y[:20], 9, penalty=penalty, reduce=lambda t: None
    )  # as one of many
    assert torch.allclose(expected, plain, atol=1e-4)
    assert torch.allclose(wide.double() @ plain.T + shift, wide.double() @ expected.T + bias, atol=1e-4)


def test_a_short_memory_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    h, y = data()
    weight, _ = logistic_regression(h, y, C)
    monkeypatch.setattr("protoseam.core.logistic._HISTORY_ELEMENTS", 1)
    assert torch.allclose(logistic_regression(h, y, C)[0], weight, rtol=1e-3)


def test_constant_features_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    h, y = data()
    weight, bias = logistic_regression(h, y, C)
    more = torch.cat([h, torch.full((N, 1), 7.0)], 1)
    wider, shift = logistic_regression(more, y, C)
    assert not wider[:, -1].any()
    assert torch.allclose(wider[:, :-1], weight, rtol=1e-6)
    assert torch.allclose(shift, bias, rtol=1e-6)
    monkeypatch.setattr("protoseam.core.logistic._BLOCK_ELEMENTS", 7 * C)
    assert torch.allclose(logistic_regression(h, y, C)[0], weight, rtol=1e-6)


@pytest.mark.parametrize("features", [D, 2 * N])
def test_equal_features_leave_the_frequencies(features: int) -> None:
    _, y = data()
    weight, bias = logistic_regression(torch.full((N, features), 3.0), y, C)
    assert weight.shape == (C, features)
    assert not weight.any()
    assert torch.allclose(bias.softmax(0), torch.bincount(y, minlength=C).double() / N, atol=1e-6)
