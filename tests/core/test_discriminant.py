"""The linear discriminant is the posterior of Gaussians that share a covariance."""

from __future__ import annotations

import pytest
import torch

from protoseam.core.discriminant import linear_discriminant, pooled_covariance


@pytest.mark.parametrize("prior", [None, torch.tensor([0.7, 0.2, 0.1])])
def test_the_softmax_is_the_posterior(prior: torch.Tensor | None) -> None:
    g = torch.Generator().manual_seed(0)
    means = torch.randn(3, 4, generator=g, dtype=torch.float64) + 5
    a = torch.randn(4, 4, generator=g, dtype=torch.float64)
    covariance = a @ a.T + 0.1 * torch.eye(4, dtype=torch.float64)
    weight, bias = linear_discriminant(means, covariance, prior)
    z = torch.randn(20, 4, generator=g, dtype=torch.float64) + 5
    density = torch.stack(
        [torch.distributions.MultivariateNormal(m, covariance).log_prob(z).exp() for m in means], dim=1
    )
    joint = density * (torch.full((3,), 1 / 3) if prior is None else prior)
    assert torch.allclose((z @ weight.T + bias).softmax(1), joint / joint.sum(1, keepdim=True), atol=1e-9)


def test_a_class_without_samples_gets_the_smallest_prior() -> None:
    means, one = torch.randn(3, 2), torch.eye(2)
    counted = linear_discriminant(means, one, torch.tensor([0.5, 0.5, 0.0]))[1]
    assert counted.isfinite().all()
    assert torch.equal(counted, linear_discriminant(means, one, torch.tensor([0.5, 0.5, 0.5]))[1])


def test_the_pooled_covariance_of_every_structure() -> None:
    full = torch.rand(5, 3, 3).tril()
    expected = sum(f.double() @ f.double().T for f in full) / 5
    assert torch.allclose(pooled_covariance(full, 3), expected)
    assert torch.allclose(pooled_covariance(full[:1], 3), full[0].double() @ full[0].double().T)
    diagonal = torch.rand(5, 3)
    assert torch.allclose(pooled_covariance(diagonal, 3), torch.diag(diagonal.double().square().mean(0)))
    assert torch.allclose(
        pooled_covariance(torch.full((1, 1), 0.5), 3), 0.25 * torch.eye(3, dtype=torch.float64)
    )
