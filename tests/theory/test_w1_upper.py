"""The upper bound of W1 to a Gaussian: above the exact distance, and as concentrated as its margin says."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import PROPERTY, normal, rng

from protoseam import theory

seeds = st.integers(0, 10**6)


@PROPERTY
@given(seeds, st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_w1_upper_is_above_the_exact_distance_on_a_line(
    seed: int, samples: int, points: int, own: bool
) -> None:
    """Few points make blocks, many make copies; both must stay above, for Δ_i and for any other Gaussian."""
    g = rng(seed)
    z_CN = normal(g, 3, samples) ** 3
    mean_C = z_CN.mean(1) if own else normal(g, 3)
    variance_C = z_CN.var(1, correction=0) if own else normal(g, 3).square()
    exact_C = theory.w1_to_gaussian(z_CN, mean_C, variance_C.sqrt())
    y_N = torch.arange(3).repeat_interleave(samples)
    found = theory.w1_upper(
        z_CN.reshape(-1, 1), y_N, mean_C[:, None], variance_C[:, None, None], generator=g, points=points
    )
    assert (exact_C <= found.upper_C + 1e-9).all()
    cap_C = ((z_CN - mean_C[:, None]).square().mean(1) + variance_C).sqrt()
    torch.testing.assert_close(found.cap_C, cap_C)
    assert (found.upper_C <= cap_C + 1e-12).all()
    draws = max(1, points // samples) * samples * 2  # copies, and two repeats
    margin_C = (2 * variance_C * math.log(3 / 0.001) / draws).sqrt()
    torch.testing.assert_close(found.margin_C, margin_C)


def test_w1_upper_in_expectation_and_what_copies_gain() -> None:
    """The mean of the estimate is above W1; more draws for the same samples bring it down towards W1."""
    g = rng(0)
    z_N = normal(g, 6) ** 3
    exact = float(theory.w1_to_gaussian(z_N[None], z_N.mean()[None], z_N.std(correction=0)[None]))
    moments = z_N.mean().reshape(1, 1), z_N.var(correction=0).reshape(1, 1, 1)
    y_N = torch.zeros(6, dtype=torch.int64)
    values = {
        points: float(
            theory.w1_upper(z_N[:, None], y_N, *moments, generator=rng(1), points=points, repeats=400).value_C
        )
        for points in (2, 6, 120)
    }
    assert values[2] > values[6] > values[120] > exact
    assert values[120] < 1.05 * exact


def test_w1_upper_concentrates_as_its_margin_says() -> None:
    """Of 300 single estimates none is further below their mean than the margin at 99 %, and some are not far."""
    g = rng(3)
    z_NK, y_N = normal(g, 12, 3), torch.zeros(12, dtype=torch.int64)
    mean_CK, covariance_CKK = z_NK.mean(0, keepdim=True), torch.cov(z_NK.T, correction=0)[None]
    found = [
        theory.w1_upper(
            z_NK, y_N, mean_CK, covariance_CKK, generator=g, points=12, repeats=1, confidence=0.99
        )
        for _ in range(300)
    ]
    value = torch.stack([f.value_C[0] for f in found])
    below = (value.mean() - value.min()) / found[0].margin_C[0]
    assert 0.2 < float(below) < 1.0
