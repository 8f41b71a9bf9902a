"""A linear classifier by penalised logistic regression, as a convex problem solved to its end.

Legend: N samples, B samples of a block, C classes, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from protoseam.core.covariance import Reduce, check_one_label_each

__all__ = ["effective_dimension", "logistic_regression"]

_STEPS = 100
_HISTORY_ELEMENTS = 2**24  # L-BFGS keeps as many steps as fit into twice 128 MiB, from 10 to all of them
_BLOCK_ELEMENTS = 2**22  # logits of so many numbers at a time, 32 MiB
_CONSTANT = 1e-6  # a feature that varies by less than this share of the most varying one carries nothing


def effective_dimension(covariance_DD: Tensor) -> Tensor:
    """(tr R)²/‖R‖²_F: in how many directions features vary, where copies of a feature count once.

    For eigenvalues that are equal in d directions and 0 in the others it is d, and never more than their number.

    Args:
        covariance_DD: R, of the features.

    Returns:
        A scalar; 0 where nothing varies.
    """
    square = covariance_DD.square().sum()
    return covariance_DD.trace().square() / torch.where(square > 0, square, 1.0)


class _Problem(NamedTuple):
    x_ND: Tensor  # standardised
    y_N: Tensor
    weight_N: Tensor  # of all processes' samples together: 1
    penalty: float
    reduce: Reduce | None


def logistic_regression(
    h_ND: Tensor,
    y_N: Tensor,
    num_classes: int,
    *,
    penalty: float | None = None,
    class_weights: Tensor | None = None,
    rank: int | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Minimise Σ_i w_{y_i} CE(W x_i + b, y_i) / Σ_i w_{y_i} + λ‖W‖² over features x standardised to mean 0, variance 1.

    The problem is convex and is solved by L-BFGS in float64. The bias bears no penalty. With a ``rank`` below C − 1 the
    logits of the solution are reduced to the directions in which they vary most, and the problem is solved once more
    within these.

    Args:
        h_ND: features, as they are.
        y_N: their labels.
        num_classes: C.
        penalty: λ; None: D'/2N, the prior N(0, 1/D') on each weight, with D' of :func:`effective_dimension`. Chosen on
            the first-try panel (docs/method-card.md).
        class_weights: w_c of each class, ``(C,)``; None: all samples count alike.
        rank: the highest rank of W; None: no limit.
        reduce: sums a tensor in place over all processes, each of which has its own samples; None for one process.

    Returns:
        ``(weight_CD, bias_C)`` for the features as they are, float64, centred over the classes.

    Raises:
        ArgumentError: labels and features differ in number.
    """
    check_one_label_each(h_ND, y_N)
    add = reduce or (lambda t: None)
    x_ND = h_ND.detach().double()
    count = torch.tensor(float(len(x_ND)), dtype=torch.float64, device=x_ND.device)
    add(count)
    mean_D = x_ND.sum(0)
    add(mean_D)
    mean_D /= count
    x_ND = x_ND - mean_D
    variance_D = x_ND.square().sum(0)
    add(variance_D)
    scale_D = (variance_D / count).sqrt()
    varies_D = scale_D > _CONSTANT * scale_D.max()
    scale_D = torch.where(varies_D, scale_D, 1.0)
    x_ND = x_ND.div_(scale_D).mul_(varies_D)
    wide = reduce is None and x_ND.shape[0] < x_ND.shape[1]
    if wide or penalty is None:
        product = x_ND @ x_ND.T if wide else x_ND.T @ x_ND  # of one trace and norm
        add(product)
    if penalty is None:
        penalty = float(effective_dimension(product) / (2 * count))
    back = None
    if wide:  # no weight leaves the span of the samples, in which as many coordinates do
        x_ND, back = _in_their_span(x_ND, product)
    weight_C = torch.ones(num_classes) if class_weights is None else class_weights
    weight_N = weight_C.to(x_ND)[y_N]
    total = weight_N.sum()
    add(total)
    problem = _Problem(x_ND, y_N, weight_N / total, penalty, reduce)
    weight_CD, bias_C = _minimise(problem, num_classes)
    if rank is not None and rank < min(num_classes - 1, x_ND.shape[1]):
        weight_CD, bias_C = _minimise(problem, num_classes, _main_directions(problem, weight_CD, rank))
    weight_CD = (weight_CD if back is None else weight_CD @ back) / scale_D
    return weight_CD, bias_C - weight_CD @ mean_D


def _in_their_span(x_ND: Tensor, gram_NN: Tensor) -> tuple[Tensor, Tensor]:
    """Samples in orthonormal coordinates of their span, ``(N, R)``, and the axes of these, ``(R, D)``."""
    size_N, vectors_NN = torch.linalg.eigh(gram_NN)
    kept = size_N > _CONSTANT**2 * size_N[-1]
    length_R, vectors_NR = size_N[kept].sqrt(), vectors_NN[:, kept]
    return vectors_NR * length_R, (vectors_NR / length_R).T @ x_ND


def _main_directions(problem: _Problem, weight_CD: Tensor, rank: int) -> Tensor:
    """The directions in which the logits W x vary most, as orthonormal columns ``(C, R)``."""
    C, D = weight_CD.shape
    # Σ (W x)(W x)ᵀ = (W L)(W L)ᵀ with L Lᵀ = Σ x xᵀ: the smaller of the two products
    rows = problem.x_ND @ weight_CD.T if C <= D else problem.x_ND
    spread = rows.T @ rows
    if problem.reduce is not None:
        problem.reduce(spread)
    size, vectors = torch.linalg.eigh(spread)
    if C <= D:
        return vectors[:, -rank:]
    return torch.linalg.svd(weight_CD @ (vectors * size.clamp(min=0).sqrt()), full_matrices=False).U[:, :rank]


def _minimise(
    problem: _Problem, num_classes: int, directions_CR: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best ``(weight_CD, bias_C)``, or the best whose logits vary in these directions; centred over the classes."""
    D = problem.x_ND.shape[1]
    q_RD = problem.x_ND.new_zeros(num_classes if directions_CR is None else directions_CR.shape[1], D)
    bias_C = problem.x_ND.new_zeros(num_classes)
    history = min(_STEPS, max(10, _HISTORY_ELEMENTS // max(1, q_RD.numel())))
    solver = torch.optim.LBFGS(
        [q_RD, bias_C], max_iter=_STEPS, history_size=history, line_search_fn="strong_wolfe"
    )

    def weight() -> Tensor:
        return q_RD if directions_CR is None else directions_CR @ q_RD

    @torch.no_grad()
    def value() -> Tensor:
        loss, slope_CD, slope_C = _likelihood(problem, weight(), bias_C)
        slope_RD = slope_CD if directions_CR is None else directions_CR.T @ slope_CD
        q_RD.grad = slope_RD + 2 * problem.penalty * q_RD
        bias_C.grad = slope_C
        return loss + problem.penalty * q_RD.square().sum()

    solver.step(value)
    weight_CD = weight()
    return weight_CD - weight_CD.mean(0), bias_C - bias_C.mean()


def _likelihood(problem: _Problem, weight_CD: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted cross-entropy of all processes' samples, and its gradients in the weights and biases."""
    C, D = weight_CD.shape
    found = weight_CD.new_zeros(C * D + C + 1)
    slope_CD, slope_C, loss = found[: C * D].view(C, D), found[C * D : -1], found[-1]
    rows = max(1, _BLOCK_ELEMENTS // C)
    parts = (t.split(rows) for t in (problem.x_ND, problem.y_N, problem.weight_N))
    for x_BD, y_B, weight_B in zip(*parts, strict=True):
        log_BC = torch.addmm(bias_C, x_BD, weight_CD.T).log_softmax(1)
        row_B = torch.arange(len(y_B), device=y_B.device)
        loss -= weight_B @ log_BC[row_B, y_B]
        residual_BC = log_BC.exp_()
        residual_BC[row_B, y_B] -= 1
        residual_BC *= weight_B[:, None]
        slope_CD.addmm_(residual_BC.T, x_BD)
        slope_C += residual_BC.sum(0)
    if problem.reduce is not None:
        problem.reduce(found)
    return loss, slope_CD, slope_C
