"""The paper's formulas as plain loops over Python floats: slow, and short enough to check by eye.

Matrices are lists of rows. Nothing here uses torch or this library, and Python floats are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]


def distance(a: Vector, b: Vector) -> float:
    total = 0.0
    for p, q in zip(a, b, strict=True):
        total += (p - q) ** 2
    return math.sqrt(total)


def consensus(z: Matrix, y: Sequence[int], prototypes: Matrix, rho: float) -> float:
    """ρ/(2|B|) Σ ‖z − s_y‖²."""
    total = 0.0
    for embedding, label in zip(z, y, strict=True):
        total += distance(embedding, prototypes[label]) ** 2
    return rho / (2 * len(z)) * total


def repulsion(prototypes: Matrix, alpha: float) -> float:
    """Σ_{i<j} exp(−α‖s_i − s_j‖)."""
    total = 0.0
    for i in range(len(prototypes)):
        for j in range(i + 1, len(prototypes)):
            total += math.exp(-alpha * distance(prototypes[i], prototypes[j]))
    return total


def cross_entropy(logits: Vector, label: int) -> float:
    top = max(logits)
    return top + math.log(sum(math.exp(v - top) for v in logits)) - logits[label]


def classification(logits: Sequence[Matrix], weights: Vector | None = None) -> float:
    """Σ_i w_i · mean over draws of Lcls(N2(z_i), i); ``logits[draw][class]``; w_i = 1/n unless given."""
    draws, classes = len(logits), len(logits[0])
    total = 0.0
    for label in range(classes):
        of_class = sum(cross_entropy(logits[draw][label], label) for draw in range(draws)) / draws
        total += of_class * (1 / classes if weights is None else weights[label])
    return total


def penalised_cross_entropy(
    logits: Matrix, y: Sequence[int], weight: Matrix, penalty: float, share: Vector
) -> float:
    """Σ_i w_{y_i} CE_i / Σ_i w_{y_i} + λ‖W‖²."""
    total = sum(share[label] * cross_entropy(row, label) for row, label in zip(logits, y, strict=True))
    squares = sum(entry**2 for row in weight for entry in row)
    return total / sum(share[label] for label in y) + penalty * squares


def moments(z: Matrix, y: Sequence[int], classes: int) -> tuple[list[int], list[list[float]], list]:
    """(|D_i|, μ̂_i, Σ̂_i): centred on μ̂_i, divided by |D_i|; zeros for a class without samples."""
    k = len(z[0])
    counts, means, covariances = [], [], []
    for label in range(classes):
        own = [row for row, of in zip(z, y, strict=True) if of == label]
        n = len(own)
        mean = [math.fsum(row[p] for row in own) / n if n else 0.0 for p in range(k)]
        covariance = [[0.0] * k for _ in range(k)]
        for p in range(k):
            for q in range(k):
                products = ((row[p] - mean[p]) * (row[q] - mean[q]) for row in own)
                covariance[p][q] = math.fsum(products) / n if n else 0.0
        counts.append(n)
        means.append(mean)
        covariances.append(covariance)
    return counts, means, covariances


def cholesky(a: Matrix) -> list[list[float]]:
    k = len(a)
    factor = [[0.0] * k for _ in range(k)]
    for i in range(k):
        for j in range(i + 1):
            rest = a[i][j] - sum(factor[i][p] * factor[j][p] for p in range(j))
            factor[i][j] = math.sqrt(rest) if i == j else rest / factor[j][j]
    return factor


def mahalanobis(z: Vector, centre: Vector, factor: Matrix) -> float:
    """(z − s)ᵀ (L Lᵀ)⁻¹ (z − s): solve L w = z − s from the first row down, then ‖w‖²."""
    w: list[float] = []
    for i, row in enumerate(factor):
        rest = z[i] - centre[i]
        for j in range(i):
            rest -= row[j] * w[j]
        w.append(rest / row[i])
    return sum(v * v for v in w)


def anneal(t: int, epochs: int, rho_min: float, rho_max: float) -> float:
    """eq:anneal, with the paper's t = 1…T."""
    return rho_min + (rho_max - rho_min) * math.sin(math.pi / 2 * (t - 1) / (epochs - 1))


def windowed_moments(
    batches: Sequence[tuple[Matrix, Sequence[int]]], label: int, window: float, mean_window: float
) -> tuple[float, list[float], list[list[float]]]:
    """(weight, mean, scatter) of one class after merging the batches one by one, forgetting as it goes."""
    k = len(batches[0][0][0])
    count, mean, scatter = 0.0, [0.0] * k, [[0.0] * k for _ in range(k)]
    for z, y in batches:
        own = [row for row, of in zip(z, y, strict=True) if of == label]
        n = len(own)
        if n == 0:
            continue
        kept = min(count, max(window - n, 0.0))
        anchor = min(kept, mean_window)
        fresh = [sum(row[p] for row in own) / n for p in range(k)]
        delta = [fresh[p] - mean[p] for p in range(k)]
        for p in range(k):
            for q in range(k):
                within = sum((row[p] - fresh[p]) * (row[q] - fresh[q]) for row in own)
                between = anchor * n / (anchor + n) * delta[p] * delta[q]
                scatter[p][q] = (scatter[p][q] * kept / count if count else 0.0) + within + between
        mean = [mean[p] + delta[p] * n / (anchor + n) for p in range(k)]
        count = kept + n
    return count, mean, scatter


def derivative(f: Callable[[list[list[float]]], float], at: Matrix, step: float = 1e-5) -> list[list[float]]:
    """∂f/∂(entry) by central differences."""
    rows = [list(row) for row in at]
    result = [[0.0] * len(row) for row in rows]
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            row[j] = value + step
            above = f(rows)
            row[j] = value - step
            below = f(rows)
            row[j] = value
            result[i][j] = (above - below) / (2 * step)
    return result
