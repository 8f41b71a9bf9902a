"""Nothing hard-codes a device: everything made on the way lives where the inputs live.

The meta device stands in for an accelerator. It has no values, so it also refuses whatever would read one.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from protoseam.core import (
    automatic_floor,
    consensus,
    empty_moments,
    factorize,
    merge_batch_,
    merge_moments,
    repulsion,
    sample,
    sampled_classification,
    split_half_error,
)
from protoseam.core.covariance import Structure, normalise_scatter

B, C, K = 6, 4, 3
META = torch.device("meta")


def elsewhere(*shape: int) -> Tensor:
    return torch.empty(*shape, device=META, requires_grad=True)


def test_the_terms() -> None:
    z, s, y = elsewhere(B, K), elsewhere(C, K), torch.empty(B, dtype=torch.int64, device=META)
    weight = elsewhere(K, C)
    classified = sampled_classification(
        lambda v: v @ weight, s, elsewhere(C, K, K), draws=2, class_weights=elsewhere(C)
    )
    total = consensus(z, y, s, 2.0) + repulsion(s) + classified
    total.backward()
    assert total.device == s.grad.device == z.grad.device == weight.grad.device == META


@pytest.mark.parametrize("shape", [(C, K, K), (1, K, K), (C, K), (1, 1)])
@pytest.mark.parametrize("antithetic", [True, False])
def test_samples(shape: tuple[int, ...], antithetic: bool) -> None:
    assert sample(elsewhere(C, K), elsewhere(*shape), draws=2, antithetic=antithetic).device == META


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared"])
def test_running_statistics_and_factors(structure: Structure) -> None:
    moments = empty_moments(C, K, structure, META)
    y = torch.empty(B, dtype=torch.int64, device=META)
    merge_batch_(moments, elsewhere(B, K), y, window=9.0, mean_window=math.inf)
    whole = merge_moments(moments, moments)
    covariance = normalise_scatter(whole.count_C, whole.scatter)
    floor = automatic_floor(split_half_error(covariance, covariance), K)
    for given in (floor, 0.1):
        factors, used = factorize(covariance, given)
        assert factors.device == used.device == META
