"""Non-Gaussianity Δ_i = W1(P_i, N(μ_i, Σ_i)) of each class from its embeddings: below, and above.

Legend: N samples, n samples of one class, M points of one assignment, L directions, R repeats, C classes, K seam width.

P_i is the empirical law of the given samples, μ_i and Σ_i its own mean and covariance, so that
thm:risk-transfer holds for it with no sampling argument. Only the Gaussian side, or the directions, is random.

:func:`sliced_w1` estimates from **below**, :func:`discrete_w1` from **above** in expectation, and :func:`w1_upper` from
**above** with a confidence that is proved, for any Gaussian. docs/theory.md compares them.

The first two report the same statistic for a class that *is* Gaussian (``null_C``). A value near its null says that
the samples do not show any non-Gaussianity, not that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError, MissingDependencyError
from protoseam.theory.bures import psd_sqrt


@dataclass(frozen=True)
class W1Estimate:
    """An estimate of W1 for each class, all float64 ``(C,)``.

    Attributes:
        value_C: the estimate.
        error_C: its Monte-Carlo standard error, over directions or subsamples.
        null_C: the same statistic on as many samples of N(μ_i, Σ_i).
        null_error_C: standard deviation of that statistic from one sample to the next.
    """

    value_C: Tensor
    error_C: Tensor
    null_C: Tensor
    null_error_C: Tensor

    @property
    def debiased_C(self) -> Tensor:
        """max(value − null, 0): closer to Δ_i of the population, but a bound of nothing."""
        return (self.value_C - self.null_C).clamp_min(0)


def projection_constant(dim: int) -> float:
    """c_K = E|θ_1| for θ uniform on the unit sphere of R^K: Γ(K/2)/(√π Γ((K+1)/2)), about √(2/(πK)).

    Args:
        dim: the seam's width k.
    """
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


def w1_to_gaussian(x_LN: Tensor, mean_L: Tensor, std_L: Tensor) -> Tensor:
    """Exact W1 between the empirical law of each row and N(mean, std²), in one dimension.

    W1 = ∫₀¹ |F⁻¹(u) − m − σΦ⁻¹(u)| du, in closed form on each step ((j−1)/N, j/N) of F⁻¹ because
    ∫Φ⁻¹ = −φ∘Φ⁻¹: with x' = (x − m)/σ and c = Φ(x') clipped to [a, b],
    ∫ₐᵇ |x' − Φ⁻¹| = x'(2c − a − b) + 2φ(Φ⁻¹(c)) − φ(Φ⁻¹(a)) − φ(Φ⁻¹(b)).

    Args:
        x_LN: L samples of N numbers each.
        mean_L: the Gaussians' means.
        std_L: the Gaussians' standard deviations.
    """
    x_LN, mean_L, std_L = (t.detach().double() for t in (x_LN, mean_L, std_L))
    x_LN = x_LN.sort(-1).values
    N = x_LN.shape[-1]
    edge = torch.arange(N + 1, dtype=torch.float64, device=x_LN.device) / N
    density = _density_at_quantile(edge)
    safe_L1 = torch.where(std_L > 0, std_L, 1.0).unsqueeze(-1)
    t_LN = (x_LN - mean_L.unsqueeze(-1)) / safe_L1
    c_LN = torch.minimum(torch.maximum(torch.special.ndtr(t_LN), edge[:-1]), edge[1:])
    steps_LN = t_LN * (2 * c_LN - edge[:-1] - edge[1:]) + 2 * _density_at_quantile(c_LN)
    steps_LN = steps_LN - density[:-1] - density[1:]
    point_L = (x_LN - mean_L.unsqueeze(-1)).abs().mean(-1)  # σ = 0: distance to a point mass
    return torch.where(std_L > 0, std_L * steps_LN.clamp_min(0).sum(-1), point_L)


def sliced_w1(
    z_NK: Tensor,
    y_N: Tensor,
    num_classes: int,
    *,
    generator: torch.Generator,
    directions: int = 256,
    null_repeats: int = 4,
) -> W1Estimate:
    """Δ_i from below: exact one-dimensional W1 along random directions, averaged and divided by c_K.

    E_θ|θᵀv| = c_K‖v‖, so under the optimal coupling E_θ W1(θᵀP, θᵀQ) ≤ c_K W1(P, Q), with = for a translation. The
    Gaussian side is never sampled. ``error_C`` is the standard error over directions.

    Args:
        z_NK: embeddings.
        y_N: their labels.
        num_classes: number of classes.
        generator: of every draw.
        directions: random directions.
        null_repeats: Gaussian samples that the null is measured on.
    """
    K = z_NK.shape[1]
    theta_KL = _randn((K, directions), z_NK.double(), generator)
    theta_KL = theta_KL / theta_KL.norm(dim=0)
    c = projection_constant(K)
    found = []
    for z_nK in _classes(z_NK, y_N, num_classes):
        along_L = _projected_w1(z_nK, theta_KL)
        gaussians = (_gaussian_like(z_nK, len(z_nK), generator) for _ in range(null_repeats))
        found.append((along_L, [_projected_w1(x_nK, theta_KL).mean() / c for x_nK in gaussians]))
    return _estimate(found, c)


def discrete_w1(
    z_NK: Tensor,
    y_N: Tensor,
    num_classes: int,
    *,
    generator: torch.Generator,
    points: int = 256,
    repeats: int = 4,
) -> W1Estimate:
    """Δ_i from above, in expectation: optimal assignment between M embeddings and M draws of N(μ_i, Σ_i).

    W1 is convex, so the distance of two samples is in expectation at least that of the laws. The excess is of order
    M^{−1/K}. The null is the distance between two Gaussian samples of that size. Costs O(M³) a class and repeat.

    Args:
        z_NK: embeddings.
        y_N: their labels.
        num_classes: number of classes.
        generator: of every draw.
        points: points per assignment.
        repeats: repetitions, over which the error is measured.
    """
    found = []
    for z_nK in _classes(z_NK, y_N, num_classes):
        M, values, nulls = min(points, len(z_nK)), [], []
        for _ in range(repeats):
            pick_M = torch.randperm(len(z_nK), generator=generator, device=generator.device)[:M]
            gauss_MK, other_MK = (_gaussian_like(z_nK, M, generator) for _ in range(2))
            values.append(assignment_w1(z_nK[pick_M.to(z_nK.device)], gauss_MK))
            nulls.append(assignment_w1(other_MK, gauss_MK))  # the same draws: most of the noise is shared
        found.append((torch.stack(values), nulls))
    return _estimate(found)


def _estimate(found: list[tuple[Tensor, list[Tensor]]], shrinks: float = 1.0) -> W1Estimate:
    """From each class's single values, and the statistic of its Gaussian samples."""
    columns = []
    for value_R, nulls in found:
        null_R = torch.stack(nulls) if nulls else value_R.new_full((1,), math.nan)
        error = _deviation(value_R) / math.sqrt(len(value_R))
        columns.append([value_R.mean() / shrinks, error / shrinks, null_R.mean(), _deviation(null_R)])
    return W1Estimate(*(torch.stack(column) for column in zip(*columns, strict=True)))


def _deviation(x: Tensor) -> Tensor:
    return x.std(correction=1) if len(x) > 1 else x.new_tensor(math.nan)


def _projected_w1(z_nK: Tensor, theta_KL: Tensor) -> Tensor:
    x_Ln = ((z_nK - z_nK.mean(0)) @ theta_KL).T
    return w1_to_gaussian(x_Ln, x_Ln.mean(-1), x_Ln.std(-1, correction=0))


def assignment_w1(a_MK: Tensor, b_MK: Tensor) -> Tensor:
    """Return W1 between two sets of M points each: the mean distance under the best assignment."""
    try:
        from scipy.optimize import linear_sum_assignment  # slow to import, needed here only
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "assignments between point sets need scipy: pip install 'protoseam[lab]'", name=error.name
        ) from None

    cost_MM = torch.cdist(a_MK, b_MK, compute_mode="donot_use_mm_for_euclid_dist")
    rows, columns = linear_sum_assignment(cost_MM.cpu().numpy())
    return cost_MM[torch.from_numpy(rows), torch.from_numpy(columns)].mean()


def _gaussian_like(z_nK: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` draws of the Gaussian with the mean and the covariance of these samples."""
    mean_K = z_nK.mean(0)
    r_nK = z_nK - mean_K
    root_KK = psd_sqrt(r_nK.T @ r_nK / len(z_nK))
    return mean_K + _randn((count, len(mean_K)), z_nK, generator) @ root_KK


def _classes(z_NK: Tensor, y_N: Tensor, num_classes: int) -> Iterator[Tensor]:
    """The embeddings of class 0, 1, …, float64."""
    if z_NK.ndim != 2 or y_N.shape != z_NK.shape[:1]:
        raise ArgumentError(
            f"embeddings must be (N, K) and labels (N,), got {tuple(z_NK.shape)}, {tuple(y_N.shape)}"
        )
    count = torch.bincount(y_N, minlength=num_classes)
    if len(count) != num_classes:
        raise ArgumentError(f"label {len(count) - 1} is outside 0…{num_classes - 1}: check num_classes")
    if bool((count == 0).any()):
        raise ArgumentError(
            f"class {int((count == 0).nonzero()[0])} has no sample, so W1 to its Gaussian is undefined: "
            "leave the class out and renumber the labels, or give more samples"
        )
    yield from z_NK.detach()[y_N.argsort(stable=True)].double().split(count.tolist())


def _randn(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn where the generator lives, used where the embeddings live."""
    return torch.randn(shape, dtype=torch.float64, device=generator.device, generator=generator).to(like)


def _density_at_quantile(u: Tensor) -> Tensor:
    """φ(Φ⁻¹(u)), 0 at both ends."""
    return torch.exp(-torch.special.ndtri(u).square() / 2) / math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class W1Upper:
    """An upper bound of W1 for each class, float64 ``(C,)``; :attr:`upper_C` is the one to use.

    Attributes:
        value_C: the average assignment cost, at least W1 in expectation.
        margin_C: what makes it so with the confidence asked for, in all classes at once.
        cap_C: (E‖z − m‖² + tr Σ)^{1/2}, from the independent coupling: certain, and often not far off.
    """

    value_C: Tensor
    margin_C: Tensor
    cap_C: Tensor

    @property
    def upper_C(self) -> Tensor:
        """Return the smaller of the assignment bound and the cap."""
        return torch.minimum(self.value_C + self.margin_C, self.cap_C)


def w1_upper(
    z_NK: Tensor,
    y_N: Tensor,
    mean_CK: Tensor,
    covariance_CKK: Tensor,
    *,
    generator: torch.Generator,
    points: int = 256,
    repeats: int = 2,
    confidence: float = 0.999,
) -> W1Upper:
    """W1 between the empirical law of each class and N(mean_i, covariance_i), from above.

    With the classes' own moments this is Δ_i; with prototype and Σ̃_i it is the W1(P_i, Q_i) of
    eq:risk-transfer itself. ``confidence`` is that of all C statements together. Costs O(points³) a block.

    An optimal assignment between the embeddings and M draws is in expectation at least W1, because W1 is convex.

    * A class with few samples repeats each of them r times, so that M = r·n draws represent the Gaussian.
    * A class with many is cut into blocks. W1 is at most the average of the blocks' W1, so every sample is used, once,
      and nothing but the draws is random.
    * Moving the draws by δ_1…δ_M changes one assignment by at most M⁻¹ Σ‖δ_j‖ ≤ M^{−1/2}‖δ‖. As a function of the
      standard normals behind them the average of R repeats is therefore (λ_max(Σ)/(M·R))^{1/2}-Lipschitz, and
      Gaussian concentration bounds the chance to fall t below its expectation by exp(−t²·M·R/(2 λ_max)).

    Args:
        z_NK: embeddings.
        y_N: their labels.
        mean_CK: means μ_i.
        covariance_CKK: covariances Σ_i.
        generator: of every draw.
        points: points per assignment.
        repeats: repetitions, over which the error is measured.
        confidence: probability that every bound holds.
    """
    C, K = mean_CK.shape
    if z_NK.ndim != 2 or z_NK.shape[1] != K or covariance_CKK.shape != (C, K, K):
        raise ArgumentError(
            f"w1_upper: embeddings {tuple(z_NK.shape)}, means {(C, K)} and covariances "
            f"{tuple(covariance_CKK.shape)} must be (N, K), (C, K) and (C, K, K)"
        )
    if points < 1 or repeats < 1 or not 0 < confidence < 1:
        raise ArgumentError(
            f"w1_upper needs points ≥ 1, repeats ≥ 1 and a confidence in (0, 1), got {points}, {repeats} "
            f"and {confidence}"
        )
    rows = [z_nK.cpu() for z_nK in _classes(z_NK, y_N, C)]
    mean_CK, covariance_CKK = mean_CK.detach().double().cpu(), covariance_CKK.detach().double().cpu()
    root_CKK = psd_sqrt(covariance_CKK)
    top_C = torch.linalg.eigvalsh(covariance_CKK)[:, -1].clamp_min(0)  # λ_max
    log_term = 2 * math.log(C / (1 - confidence))
    columns = []
    for z_nK, m_K, root_KK, top in zip(rows, mean_CK, root_CKK, top_C, strict=True):
        copies = max(1, points // len(z_nK))
        repeated = [_blockwise_w1(z_nK, m_K, root_KK, points, copies, generator) for _ in range(repeats)]
        margin = (log_term * top / (copies * len(z_nK) * repeats)).sqrt()
        cap = ((z_nK - m_K).square().sum(1).mean() + root_KK.square().sum()).sqrt()
        columns.append([torch.stack(repeated).mean(), margin, cap])
    return W1Upper(*(torch.stack(column) for column in zip(*columns, strict=True)))


def _blockwise_w1(
    z_nK: Tensor, mean_K: Tensor, root_KK: Tensor, points: int, copies: int, generator: torch.Generator
) -> Tensor:
    """One repeat: every sample of the class in exactly one assignment, blocks weighted by their size."""
    n = len(z_nK)
    order_n = torch.randperm(n, generator=generator, device=generator.device).cpu()
    total = z_nK.new_zeros(())
    for block in order_n.tensor_split(-(-n // points)):
        a_MK = z_nK[block].repeat_interleave(copies, 0)
        draws_MK = mean_K + _randn(a_MK.shape, a_MK, generator) @ root_KK
        total = total + assignment_w1(a_MK, draws_MK) * len(block)
    return total / n
