"""Class moments, their merging, and positive definite factors, in float64 throughout.

Legend: N samples, B batch, C classes, c classes of a block, K seam width.

Float32 is not enough here: one-pass E[zzᵀ] − μμᵀ loses everything when the mean is large, and rounding a
covariance to float32 alone makes it indefinite by more than a floor of .1 once embeddings reach the hundreds.

A *scatter* is an unnormalised covariance Σ (z − μ)(z − μ)ᵀ. Its shape says the structure:
full ``(C, K, K)``, diagonal ``(C, K)``, shared (pooled within-class) ``(1, K, K)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from protoseam.errors import ArgumentError

__all__ = [
    "ClassFactors",
    "Moments",
    "Reduce",
    "Structure",
    "automatic_floor",
    "class_factors",
    "class_moments",
    "empty_moments",
    "factorize",
    "normalise_scatter",
    "split_half_error",
]

Structure = Literal["full", "diagonal", "shared"]
# Sums a tensor in place over all processes; None when there is only one.
Reduce = Callable[[Tensor], None]

# Doubles in one block of K×K matrices: 2 Mi are 16 MiB, and a handful of them is alive at once.
BLOCK_ELEMENTS = 2**21
# σ0* of the bound is 0 under full collapse, where every estimate is exact; Σ̃ must stay positive definite.
MIN_AUTO_FLOOR = 1e-3


class Moments(NamedTuple):
    """Counts, means and scatters of every class, float64.

    Attributes:
        count_C: samples per class.
        mean_CK: class means μ_i.
        scatter: Σ (z − μ)(z − μ)ᵀ, full, diagonal or shared.
    """

    count_C: Tensor
    mean_CK: Tensor
    scatter: Tensor


class ClassFactors(NamedTuple):
    """What one exact pass yields: factors, what they were made from, and which floor each class needed.

    Attributes:
        factors: factors of Σ̃.
        count_C: samples per class.
        mean_CK: class means μ_i.
        floor: σ0: the given number, or σ0* of the bound.
        floor_used: the floor of each class, above ``floor`` where a factorisation needed more.
    """

    factors: Tensor
    count_C: Tensor
    mean_CK: Tensor
    floor: Tensor
    floor_used: Tensor


def check_structure(structure: Structure) -> Structure:
    """Return the structure, or refuse an unknown one."""
    if structure not in get_args(Structure):
        raise ArgumentError(f"structure must be full, diagonal or shared, got {structure!r}")
    return structure


def scatter_shape(num_classes: int, dim: int, structure: Structure) -> tuple[int, ...]:
    """Return the shape of a scatter of this structure."""
    shapes = {"full": (num_classes, dim, dim), "diagonal": (num_classes, dim), "shared": (1, dim, dim)}
    return shapes[check_structure(structure)]


def empty_moments(
    num_classes: int, dim: int, structure: Structure = "full", device: torch.device | str | None = None
) -> Moments:
    """Return moments of no sample: zeros, float64.

    Args:
        num_classes: number of classes.
        dim: the seam's width k.
        structure: ``"full"`` (default), ``"diagonal"`` or ``"shared"``.
        device: where to allocate; None: torch's default.

    Returns:
        ``Moments`` of zeros.

    Raises:
        ArgumentError: the structure is unknown.
    """
    shapes = (num_classes,), (num_classes, dim), scatter_shape(num_classes, dim, structure)
    return Moments(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))


def check_one_label_each(z_BK: Tensor, y_B: Tensor) -> None:
    """Broadcasting would make something of other lengths, and nothing sensible."""
    if len(z_BK) != len(y_B):
        raise ArgumentError(f"{len(z_BK)} samples but {len(y_B)} labels: give one label each")
    if y_B.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"labels must be int64 or int32, got {y_B.dtype}: pass y.long()")


def check_one_target_each(z_BK: Tensor, y: Tensor) -> None:
    """One label or one row of class probabilities per sample."""
    if not y.is_floating_point():
        check_one_label_each(z_BK, y)
    elif len(z_BK) != len(y):
        raise ArgumentError(f"{len(z_BK)} samples but {len(y)} rows of soft targets: give one row each")


def class_moments(
    z_NK: Tensor,
    y_N: Tensor,
    num_classes: int,
    *,
    structure: Structure = "full",
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(count_C, mean_CK, covariance)`` of each class, in float64 (eq:covariance).

    Centred on μ̂_i, not on s_i (centring on s_i would fold the consensus residual in), and divided by |D_i|.
    Two passes: means first, then the centred products. With ``reduce`` each process gives its own samples
    and all get the moments of the union. A class without samples has mean and covariance 0.

    Args:
        z_NK: embeddings.
        y_N: their labels.
        num_classes: number of classes.
        structure: ``"full"`` (default), ``"diagonal"`` or ``"shared"``.
        reduce: sums a tensor in place over all processes; None for one process.

    Returns:
        ``(count_C, mean_CK, covariance)``; the covariance has the shape of its structure.

    Raises:
        ArgumentError: labels and embeddings differ in number, or a label is out of range.
    """
    check_one_label_each(z_NK, y_N)
    order_N = y_N.argsort(stable=True)
    z_NK, y_N = z_NK.detach()[order_N].double(), y_N[order_N]
    local_C, bounds = _sizes(y_N, num_classes)
    count_C, sum_CK = local_C.clone(), _segment_sum(z_NK, local_C)
    if reduce is not None:
        reduce(count_C)
        reduce(sum_CK)
    n_C = count_C.double()
    mean_CK = sum_CK / or_one(n_C)[:, None]
    r_NK = z_NK - mean_CK.index_select(0, y_N)
    if structure == "diagonal":
        scatter = _segment_sum(r_NK.square(), local_C)
    elif structure == "shared":
        scatter = (r_NK.T @ r_NK)[None]
    else:
        scatter = z_NK.new_empty(scatter_shape(num_classes, z_NK.shape[1], structure))
        for c in range(num_classes):  # rows are sorted: one product per class, no B×K×K tensor
            r_cK = r_NK[bounds[c] : bounds[c + 1]]
            torch.mm(r_cK.T, r_cK, out=scatter[c])
    if reduce is not None:
        reduce(scatter)
    return count_C, mean_CK, normalise_scatter(n_C, scatter)


def _sizes(y_N: Tensor, num_classes: int) -> tuple[Tensor, list[int]]:
    """Samples of each class, and where each class begins among samples sorted by class."""
    count_C = torch.bincount(y_N, minlength=num_classes)
    if len(count_C) != num_classes:
        raise ArgumentError(
            f"labels must lie in 0…{num_classes - 1}, but the largest is {len(count_C) - 1}: "
            "check num_classes, or subtract 1 if they start from 1"
        )
    return count_C, [0, *count_C.cumsum(0).tolist()]


def or_one(n_C: Tensor) -> Tensor:
    """Counts to divide by: 1 where there is no sample. A process's share may be less than one sample."""
    return torch.where(n_C > 0, n_C, 1.0)


def _segment_sum(z_NK: Tensor, count_C: Tensor) -> Tensor:
    """Sums of consecutive rows, count_C[c] of them for class c; in a fixed order, so deterministic."""
    if not len(z_NK):
        return z_NK.new_zeros(len(count_C), z_NK.shape[1])
    return torch.segment_reduce(z_NK, "sum", lengths=count_C, unsafe=True)


def normalise_scatter(n_C: Tensor, scatter: Tensor) -> Tensor:
    """Scatter → covariance: divided by |D_i|, or by m for the shared one."""
    if is_shared(scatter, len(n_C)):
        return scatter / or_one(n_C.sum())
    return scatter / or_one(n_C).reshape(-1, *[1] * (scatter.ndim - 1))


def factorize(covariance: Tensor, floor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Factors of Σ̃ = Σ̂ + σ0² I (eq:shrinkage), and the floor each needed, without a host sync.

    Cholesky in float64 succeeds when the smallest eigenvalue exceeds its backward error, about k·ε·tr Σ̂, and
    the rounding of Σ̂ itself, at most about 60·ε·tr Σ̂ for up to 10⁶ samples (measured). So instead of trying
    again after a failure (which would have to look at the result), each matrix gets
    max(σ0², 4(k+64)·ε·tr Σ̂) in the first place: that is σ0² unless embeddings are huge or σ0 is tiny.
    A non-finite covariance gives the factor of the floor alone, and a floor of NaN to tell.

    Args:
        covariance: Σ̂, full, diagonal or shared.
        floor: σ0, at least.

    Returns:
        The factors, float64, and the floor that each needed, ``(C,)`` or ``(1,)``.
    """
    covariance = covariance.double()
    diagonal = covariance.ndim == 2
    K = covariance.shape[1]
    variances = covariance if diagonal else covariance.diagonal(dim1=-2, dim2=-1)
    finite = covariance.flatten(1).isfinite().all(1)
    floor = torch.as_tensor(floor, dtype=torch.float64, device=covariance.device)
    if diagonal:  # no elimination, no backward error
        used = floor.expand(len(covariance))
        factors = (torch.where(finite[:, None], variances, 0.0) + floor.square()).sqrt()
    else:
        eps = torch.finfo(torch.float64).eps
        needed = (4 * (K + 64) * eps) * torch.where(finite, variances.sum(1), 0.0)
        used = torch.maximum(floor.square(), needed).sqrt()
        shifted = torch.where(finite[:, None, None], covariance, 0.0)
        shifted.diagonal(dim1=-2, dim2=-1).add_(used.square()[:, None])
        factors, _ = torch.linalg.cholesky_ex(shifted)
    return factors, torch.where(finite, used, torch.nan)


def class_factors(
    z_NK: Tensor,
    y_N: Tensor,
    num_classes: int,
    floor: float | Literal["auto"],
    *,
    structure: Structure = "full",
    reduce: Reduce | None = None,
    out: Tensor | None = None,
) -> ClassFactors:
    """From embeddings to factors, a block of classes at a time.

    Never holds all covariances: beside the result (``out``, float32 by default) there are a few blocks of
    16 MiB. The embeddings may lie on another device than ``out`` (on the host, if there are many): they are
    moved a block at a time. ``floor="auto"`` takes σ0* of the bound, with ε̄ from split halves (one more sweep).

    Args:
        z_NK: embeddings.
        y_N: their labels.
        num_classes: number of classes.
        floor: σ0, or ``"auto"`` for σ0* of the bound.
        structure: ``"full"`` (default), ``"diagonal"`` or ``"shared"``.
        reduce: sums a tensor in place over all processes; None for one process.
        out: where to write the factors; None: a new float32 tensor.

    Returns:
        ``ClassFactors``.

    Raises:
        ArgumentError: labels and embeddings differ in number, or a label is out of range.
    """
    K = z_NK.shape[1]
    out = (
        z_NK.new_empty(scatter_shape(num_classes, K, structure), dtype=torch.float32) if out is None else out
    )
    blocks = list(_blocks(y_N, num_classes, K, structure))

    def moved(rows: Tensor, lo: int) -> tuple[Tensor, Tensor]:
        return z_NK[rows].to(out.device), (y_N[rows] - lo).to(out.device)

    if floor == "auto":
        error = torch.zeros((), dtype=torch.float64, device=out.device)
        for lo, hi, rows in blocks:
            covariances = [
                class_moments(*moved(half, lo), hi - lo, structure=structure, reduce=reduce)[2]
                for half in (rows[::2], rows[1::2])
            ]
            error += split_half_error(*covariances) * (hi - lo) / num_classes
        sigma0 = automatic_floor(error, K)
    else:
        sigma0 = torch.tensor(floor, dtype=torch.float64, device=out.device)
    counts, means, used = [], [], []
    for lo, hi, rows in blocks:
        count_c, mean_cK, covariance = class_moments(
            *moved(rows, lo), hi - lo, structure=structure, reduce=reduce
        )
        factors, used_c = factorize(covariance, sigma0)
        out[lo:hi] = factors
        counts.append(count_c)
        means.append(mean_cK)
        used.append(used_c)
    return ClassFactors(out, torch.cat(counts), torch.cat(means), sigma0, torch.cat(used))


def _blocks(y_N: Tensor, num_classes: int, K: int, structure: Structure) -> Iterator[tuple[int, int, Tensor]]:
    """(first class, end, indices of their samples sorted by class), blocks small enough to factor at once."""
    order_N = y_N.argsort(stable=True)
    if structure != "full":
        yield 0, num_classes, order_N
        return
    _, ends = _sizes(y_N, num_classes)
    step = max(1, BLOCK_ELEMENTS // (K * K))
    for lo in range(0, num_classes, step):
        hi = min(lo + step, num_classes)
        yield lo, hi, order_N[ends[lo] : ends[hi]]


def split_half_error(covariance_a: Tensor, covariance_b: Tensor) -> Tensor:
    """ε̄ = mean_i ‖Σ̂_i − Σ_i‖_F, estimated from the covariances of two disjoint halves of each class.

    An estimate from m samples has squared error v/m; from half of them 2v/m, and the difference of two
    independent halves 4v/m. So ‖Σ̂_a − Σ̂_b‖_F is twice the error of the whole.

    Args:
        covariance_a: covariances from one half of the samples.
        covariance_b: covariances from the other half.

    Returns:
        ε̄, a scalar.
    """
    return 0.5 * (covariance_a - covariance_b).flatten(1).norm(dim=1).mean()


def automatic_floor(epsilon: Tensor, dim: int) -> Tensor:
    """σ0* = (ε̄/(2√k))^{1/2}, the minimiser of √k σ0 + ε̄/(2σ0) (after eq:controlled-bound-full).

    Args:
        epsilon: ε̄, the error of the estimated covariances.
        dim: the seam's width k.

    Returns:
        σ0*, at least 0.001, so that Σ̃ stays positive definite under full collapse.
    """
    return (epsilon / (2 * dim**0.5)).sqrt().clamp_min(MIN_AUTO_FLOOR)


def is_shared(scatter: Tensor, num_classes: int) -> bool:
    """One matrix for several classes (with a single class, full and shared are the same)."""
    return scatter.ndim == 3 and scatter.shape[0] == 1 and num_classes != 1
