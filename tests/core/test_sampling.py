"""z_i = s_i + Σ̃_i^{1/2} ξ for every factor shape, and the draws' moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protoseam.core import sample
from protoseam.core.sampling import apply_factors

C, K = 4, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrices(factors: Tensor) -> Tensor:
    """Any factor shape as one K×K matrix a class."""
    if factors.ndim == 3:
        return factors.expand(C, K, K)
    return torch.diag_embed(factors.expand(C, K))


FACTORS = {
    "full": (C, K, K),
    "shared": (1, K, K),
    "diagonal": (C, K),
    "isotropic": (1, 1),
    "one deviation a class": (C, 1),
}


@pytest.mark.parametrize("shape", FACTORS.values(), ids=FACTORS.keys())
@pytest.mark.parametrize("draws", [1, 3])
def test_each_sample_is_its_prototype_plus_its_factor_times_noise(shape: tuple[int, ...], draws: int) -> None:
    factors = torch.randn(shape, dtype=torch.float64)
    s = torch.randn(C, K, dtype=torch.float64)
    xi = torch.randn(draws, C, K, dtype=torch.float64, generator=seeded())
    found = sample(s, factors, draws=draws, generator=seeded())
    assert found.shape == (draws, C, K)
    for m in range(draws):
        for c in range(C):
            assert torch.allclose(found[m, c], s[c] + matrices(factors)[c] @ xi[m, c], rtol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, K])
def test_two_classes_have_two_factors(dim: int) -> None:
    factors = torch.stack([torch.eye(dim), 3 * torch.eye(dim)])
    z = sample(torch.zeros(2, dim), factors, generator=seeded())
    xi = torch.randn(1, 2, dim, generator=seeded())
    assert torch.allclose(z, xi * torch.tensor([1.0, 3.0])[:, None])


def test_one_draw_by_default_and_not_antithetic() -> None:
    s, factors = torch.randn(C, K), torch.ones(1, 1)
    assert sample(s, factors).shape == (1, C, K)
    z = sample(s, factors, draws=2)
    assert not torch.allclose(z[0] - s, s - z[1])


def test_antithetic_pairs() -> None:
    s, factors = torch.randn(C, K), torch.randn(C, K, K).tril()
    z = sample(s, factors, draws=6, antithetic=True)
    assert z.shape == (6, C, K)
    assert torch.allclose(z[:3] - s, s - z[3:], atol=1e-6)
    assert torch.allclose(z.mean(0), s, atol=1e-6)
    assert not torch.allclose(z[0], z[1])


def test_the_generator_decides_the_draws() -> None:
    s, factors = torch.randn(C, K), torch.randn(C, K, K)
    first = sample(s, factors, generator=seeded(5))
    torch.randn(17)  # the global state does not matter
    assert torch.equal(first, sample(s, factors, generator=seeded(5)))
    assert not torch.equal(first, sample(s, factors, generator=seeded(6)))
    torch.manual_seed(1)
    a = sample(s, factors)
    torch.manual_seed(1)
    assert torch.equal(a, sample(s, factors))


@pytest.mark.parametrize("shape", [(C, K, K), (1, K, K), (C, K), (1, 1)])
def test_moments_of_many_draws(shape: tuple[int, ...]) -> None:
    factors = torch.randn(shape, dtype=torch.float64)
    s = torch.randn(C, K, dtype=torch.float64)
    z = sample(s, factors, draws=40_000, generator=seeded())
    covariance = torch.einsum("mci,mcj->cij", z - s, z - s) / len(z)
    expected = matrices(factors) @ matrices(factors).mT
    assert torch.allclose(z.mean(0), s, atol=0.05)
    assert torch.allclose(covariance, expected, atol=0.03 * expected.abs().max().item())


def test_gradients_reach_the_prototypes_alone() -> None:
    s = torch.randn(C, K, requires_grad=True)
    factors = torch.randn(C, K, K, requires_grad=True)
    sample(s, factors, draws=2).sum().backward()
    assert torch.equal(s.grad, torch.full((C, K), 2.0))
    assert factors.grad is None


def test_dtype_follows_the_prototypes_but_not_below_float32() -> None:
    factors = torch.ones(1, 1, dtype=torch.float64)
    assert sample(torch.zeros(C, K), factors).dtype == torch.float32
    assert sample(torch.zeros(C, K).double(), factors.float()).dtype == torch.float64
    assert sample(torch.zeros(C, K).half(), factors).dtype == torch.float32


@pytest.mark.parametrize("shape", [(C, K, K), (1, K, K)])
def test_autocast_does_not_coarsen_the_samples(shape: tuple[int, ...]) -> None:
    s, factors = torch.randn(C, K), torch.randn(shape)
    plain = sample(s, factors, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sample(s, factors, generator=seeded()), plain)


def test_refusals() -> None:
    s, factors = torch.zeros(C, K), torch.ones(1, 1)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        sample(s, factors, draws=0)
    with pytest.raises(ValueError, match="draws must be even, got 3"):
        sample(s, factors, draws=3, antithetic=True)
    for wrong in (torch.ones(3), torch.ones(1, 1, K, K)):
        with pytest.raises(ValueError, match=r"factors must be .*got shape \("):
            apply_factors(wrong, torch.zeros(1, C, K))
