"""Likelihood, calibration error and temperature, against loops and a search on a grid."""

from __future__ import annotations

import math

import pytest
import torch

from protoseam.core.calibration import calibration_error, fit_temperature, negative_log_likelihood


def logits(n: int = 400, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    return torch.randn(n, classes, generator=g) + 1.5 * torch.nn.functional.one_hot(y, classes), y


def test_the_calibration_error_is_the_loop_over_bins() -> None:
    scores, y = logits()
    p = scores.double().softmax(1)
    error = 0.0
    for b in range(15):
        inside = [i for i in range(len(y)) if b / 15 < float(p[i].max()) <= (b + 1) / 15]
        if inside:
            confidence = sum(float(p[i].max()) for i in inside) / len(inside)
            accuracy = sum(int(p[i].argmax()) == int(y[i]) for i in inside) / len(inside)
            error += len(inside) / len(y) * abs(confidence - accuracy)
    assert float(calibration_error(scores, y)) == pytest.approx(error, abs=1e-12)
    likelihood = -sum(math.log(float(p[i, y[i]])) for i in range(len(y))) / len(y)
    assert float(negative_log_likelihood(scores, y)) == pytest.approx(likelihood, abs=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_the_temperature_is_the_likelihoods_best(scale: float) -> None:
    scores, y = logits()
    found = fit_temperature(scale * scores, y)
    grid = torch.logspace(-1.5, 1.5, 3001, dtype=torch.float64)
    best = min(float(negative_log_likelihood(scale * scores / t, y)) for t in grid)
    assert float(negative_log_likelihood(scale * scores.double() / found, y)) <= best + 1e-12
    assert found == pytest.approx(scale * fit_temperature(scores, y), rel=1e-6)


@pytest.mark.parametrize("prior", [0.5, 3.0])
def test_the_prior_adds_labels_drawn_evenly(prior: float) -> None:
    scores, y = logits(30)
    found = fit_temperature(scores, y, prior=prior)

    def loss(t: float) -> float:
        p = (scores.double() / t).log_softmax(1)
        given = sum(float(p[i, y[i]]) for i in range(len(y)))
        added = prior * sum(float(row.sum()) / 5 for row in p) / len(y)
        return -(given + added)

    assert loss(found) <= min(loss(float(t)) for t in torch.logspace(-1.5, 1.5, 3001)) + 1e-9


@pytest.mark.parametrize("size", [10, 1000])
def test_with_a_prior_right_answers_alone_are_no_certainty(size: int) -> None:
    y = torch.arange(size) % 4
    sure = fit_temperature(torch.eye(4)[y], y, prior=0.5)
    p = (torch.eye(4)[y].double() / sure).softmax(1).max(1).values
    assert float(1 - p.mean()) == pytest.approx(
        0.5 / (size + 0.5) * 3 / 4, rel=1e-6
    )  # the share of wrong labels


def test_the_temperature_ends_where_nothing_is_wrong_or_known() -> None:
    y = torch.arange(4)
    assert fit_temperature(torch.eye(4), y) == pytest.approx(0.01, rel=1e-3)  # no mistake: ever surer
    assert fit_temperature(torch.zeros(4, 4), y) > 0  # nothing to scale
    assert fit_temperature(-torch.eye(4), y) == pytest.approx(100.0, rel=1e-3)  # always wrong: never sure
