"""Naive float64 oracles for the appendix: loops, scipy and quadrature, nothing clever.

Legend: C classes, K seam width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import scipy.integrate
import scipy.linalg
import scipy.stats
import torch
from hypothesis import settings
from torch import Tensor

# derandomized: the same examples on every machine, so that a failure is a failure of the code
PROPERTY = settings(max_examples=30, derandomize=True, deadline=None, database=None)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_psd(
    generator: torch.Generator, count: int, dim: int, rank: int | None = None, scale: float = 1.0
) -> Tensor:
    """``count`` matrices of the given rank, with eigenvalues spread over two decades."""
    factor = normal(generator, count, dim, dim if rank is None else rank)
    factor = factor * torch.logspace(-1, 0, factor.shape[-1], dtype=torch.float64)
    return scale * factor @ factor.mT


def bures_trace(a: np.ndarray, b: np.ndarray) -> float:
    """eq:bures as printed: square roots by scipy, then the trace."""
    root_b = np.real(scipy.linalg.sqrtm(b))
    cross = np.real(scipy.linalg.sqrtm(root_b @ a @ root_b))
    return math.sqrt(max(0.0, float(np.trace(a) + np.trace(b) - 2 * np.trace(cross))))


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / sum(weights) for weight in weights]


def hessian_loops(weight: Tensor, bias: Tensor, z: Tensor) -> Tensor:
    """W2ᵀ(diag p − ppᵀ)W2, entry by entry."""
    C, K = weight.shape
    p = softmax([float(weight[j] @ z + bias[j]) for j in range(C)])
    out = torch.zeros(K, K, dtype=torch.float64)
    for u, v in itertools.product(range(K), repeat=2):
        for i, j in itertools.product(range(C), repeat=2):
            h = (p[i] if i == j else 0.0) - p[i] * p[j]
            out[u, v] += weight[i, u] * h * weight[j, v]
    return out


def losses(weight: Tensor, bias: Tensor, label: int) -> Callable[[Tensor], Tensor]:
    """ℓ_i as a function of a batch of embeddings."""

    def loss(z: Tensor) -> Tensor:
        logits = z @ weight.T + bias
        return torch.logsumexp(logits, -1) - logits[..., label]

    return loss


def gauss_expectation(
    f: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, nodes: int = 80
) -> float:
    """E f(z) for z ∼ N(mean, covariance) by tensor Gauss–Hermite quadrature; for K ≤ 2."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    K = len(mean)
    grid = torch.tensor(list(itertools.product(x.tolist(), repeat=K)), dtype=torch.float64)
    weights = torch.tensor([math.prod(c) for c in itertools.product((w / w.sum()).tolist(), repeat=K)])
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()
    return float(weights.double() @ f(mean + grid @ root.T))


def w1_to_gaussian_quad(samples: list[float], mean: float, std: float) -> float:
    """∫ |F_N(t) − Φ((t − m)/σ)| dt, piece by piece between the samples."""
    xs = sorted(samples)
    edges = [min(xs[0], mean) - 12 * std, *xs, max(xs[-1], mean) + 12 * std]
    total = 0.0
    for j, (low, high) in enumerate(itertools.pairwise(edges)):
        level = j / len(xs)
        # the integrand has one kink in the piece, where the two functions cross
        kink = scipy.stats.norm.ppf(level, mean, std) if 0 < level < 1 else low
        for a, b in itertools.pairwise(sorted({low, high, min(max(kink, low), high)})):
            total += scipy.integrate.quad(
                lambda t, c=level: abs(c - scipy.stats.norm.cdf(t, mean, std)), a, b
            )[0]
    return total


def central_moment(p: Tensor, v: Tensor, order: int) -> float:
    return float((p * (v - (p * v).sum()) ** order).sum())


def log_log_slope(x: list[float], y: list[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
