"""Mahalanobis distances against loops over Python floats, an inverse, and pytorch-ood."""

from __future__ import annotations

import oracles
import pytest
import torch

from protoseam.core import class_moments, distances, mahalanobis

B, C, K = 7, 5, 3


def triangles(n: int) -> torch.Tensor:
    return torch.randn(n, K, K).tril(-1) + torch.diag_embed(0.1 + torch.rand(n, K))


FACTORS = {
    "full": lambda: triangles(C),
    "shared": lambda: triangles(1),
    "diagonal": lambda: 0.1 + torch.rand(C, K),
    "isotropic": lambda: torch.tensor([[0.3]]),
}


@pytest.mark.parametrize("structure", FACTORS)
@pytest.mark.parametrize(
    "block", [2 * B * K, 2**21]
)  # two classes per block, the last block is smaller; all at once
def test_against_loops(structure: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_BLOCK_ELEMENTS", block)
    z, s, factors = torch.randn(B, K), torch.randn(C, K), FACTORS[structure]()
    full = factors.expand(C, K, K) if factors.ndim == 3 else torch.diag_embed(factors.expand(C, K))
    found = mahalanobis(z, s, factors)
    assert found.dtype == torch.float64
    expected = [
        [oracles.mahalanobis(row, s[c].tolist(), full[c].tolist()) for c in range(C)] for row in z.tolist()
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_an_affine_map_of_the_seam_changes_nothing() -> None:
    z, s, factors = torch.randn(B, K).double(), torch.randn(C, K).double(), triangles(C).double()
    a, b = torch.randn(K, K).double(), torch.randn(K).double()
    covariance = a @ factors @ factors.mT @ a.T
    moved = mahalanobis(z @ a.T + b, s @ a.T + b, torch.linalg.cholesky(covariance))
    torch.testing.assert_close(moved, mahalanobis(z, s, factors))


def test_pytorch_ood_ranks_alike_where_the_covariance_is_shared() -> None:
    from pytorch_ood.detector import Mahalanobis

    y = torch.arange(60) % C
    z = torch.randn(60, K) + 3 * y[:, None]
    _, mean, covariance = class_moments(z, y, C, structure="shared")
    ours = mahalanobis(z, mean, torch.linalg.cholesky(covariance)).amin(1)
    theirs = Mahalanobis(None).fit_features(z, y).predict_features(z)
    # half the square, and a covariance that is not divided by the number of samples
    torch.testing.assert_close(ours, 2 * 60 * theirs.double(), rtol=1e-3, atol=1e-4)


def test_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="embeddings have width 3 but prototypes 4"):
        mahalanobis(torch.randn(2, 3), torch.randn(5, 4), torch.ones(1, 1))
