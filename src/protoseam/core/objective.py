"""The three terms of the lifted objective, eq:combinedLoss, as pure functions.

Legend: B batch, C classes, K seam width, M draws per class, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protoseam.core.covariance import check_one_target_each
from protoseam.core.devices import cuda_kernels
from protoseam.core.precision import at_least_float32, no_autocast
from protoseam.core.sampling import sample
from protoseam.errors import ArgumentError

__all__ = [
    "consensus",
    "consensus_slope",
    "prototype_gradient",
    "pull_points",
    "repulsion",
    "sampled_classification",
    "squared_residuals",
]

Loss = Callable[[Tensor, Tensor], Tensor]


def pull_points(y: Tensor, prototypes_CK: Tensor) -> Tensor:
    """The point each sample is pulled to, ``(B, K)``: s_y for labels ``(B,)``, Σ_c q_c s_c for soft targets ``(B, C)``.

    Σ_c q_c‖z − s_c‖² = ‖z − Σ_c q_c s_c‖² + Σ_c q_c‖s_c − Σ_c q_c s_c‖². The second term would only pull the
    prototypes of mixed classes together, against repulsion, so soft targets take the first alone: the point form.

    Args:
        y: labels ``(B,)`` or soft targets ``(B, C)``.
        prototypes_CK: S, one prototype per class.

    Returns:
        ``(B, K)``.

    Raises:
        ArgumentError: soft targets are not ``(B, C)``.
    """
    s_CK = at_least_float32(prototypes_CK)
    if not y.is_floating_point():
        # index_select, not [y]: its backward is one index_add instead of a sort
        return s_CK.index_select(0, y)
    if y.ndim != 2 or y.shape[1] != len(s_CK):
        raise ArgumentError(
            f"soft targets must be (batch, {len(s_CK)}), one probability per class; got shape {tuple(y.shape)}"
        )
    with no_autocast(s_CK.device):
        return y.to(s_CK.dtype) @ s_CK


def squared_residuals(z_BK: Tensor, y: Tensor, prototypes_CK: Tensor) -> Tensor:
    """‖N1(x) − s_y‖² of each sample, ``(B,)``; ``y`` holds labels ``(B,)`` or soft targets ``(B, C)``.

    Args:
        z_BK: embeddings N1(x).
        y: labels ``(B,)`` or soft targets ``(B, C)``.
        prototypes_CK: S, one prototype per class.

    Returns:
        ``(B,)``.

    Raises:
        ArgumentError: targets and embeddings differ in number.
    """
    check_one_target_each(z_BK, y)
    return (at_least_float32(z_BK) - pull_points(y, prototypes_CK)).square().sum(1)


def consensus(z_BK: Tensor, y: Tensor, prototypes_CK: Tensor, rho: float | Tensor) -> Tensor:
    """ρ/(2|B|) Σ ‖N1(x) − s_y‖² (first term of eq:combinedLoss; trains θ1 and S).

    The sum of squares is divided by the batch size only, not by K: the paper's norm, not a mean.

    Args:
        z_BK: embeddings N1(x).
        y: labels ``(B,)``, or soft targets ``(B, C)`` as mixup yields them: s_y is then Σ_c q_c s_c.
        prototypes_CK: S.
        rho: the penalty ρ.

    Returns:
        A scalar.

    Raises:
        ArgumentError: targets and embeddings differ in number.
    """
    return 0.5 * rho * squared_residuals(z_BK, y, prototypes_CK).mean()


def consensus_slope(z_BK: Tensor, y: Tensor, prototypes_CK: Tensor, rho: float | Tensor) -> Tensor:
    """∂/∂N1(x) of :func:`consensus`: ρ/|B| (N1(x) − s_y). Minus its sums over the classes (−qᵀ·) are ∂/∂S.

    Args:
        z_BK: embeddings N1(x).
        y: labels ``(B,)`` or soft targets ``(B, C)``.
        prototypes_CK: S, one prototype per class.
        rho: the penalty ρ.

    Returns:
        ``(B, K)``.
    """
    return (at_least_float32(z_BK) - pull_points(y, prototypes_CK)) * (rho / len(y))


def prototype_gradient(apart_CK: Tensor, y: Tensor, slope_BK: Tensor) -> Tensor:
    """Return ∂/∂S of the whole objective.

    Args:
        apart_CK: ∂/∂S of the terms that no image enters; overwritten.
        y: labels ``(B,)`` or soft targets ``(B, C)``.
        slope_BK: what :func:`consensus_slope` returns for the batch.

    Returns:
        ``apart_CK`` minus the sums of the slopes over the classes (for soft targets qᵀ·slope), ``(C, K)``.
    """
    if y.is_floating_point():
        return apart_CK.sub_(y.to(slope_BK.dtype).T @ slope_BK)
    # float64 embeddings have slopes that are wider than float32 prototypes
    return apart_CK.index_add_(0, y, slope_BK.to(apart_CK.dtype), alpha=-1)


def repulsion(prototypes_CK: Tensor, alpha: float = 2.0) -> Tensor:  # α = 2: paper, eq:penalty
    """P(S) = Σ_{i<j} exp(−α‖s_i − s_j‖₂) (eq:penalty), without its weight ρ.

    Never builds a C×C×K tensor, and not even a whole C×C one: value and gradient are accumulated over blocks
    of rows. Coincident prototypes, where the norm has no derivative, get the subgradient 0.

    Args:
        prototypes_CK: S, one prototype per class.
        alpha: rate at which repulsion fades with distance; 2 in the paper.

    Returns:
        A scalar.
    """
    return _Repulsion.apply(prototypes_CK, alpha)


# Elements of one block of the distance matrix: 2 Mi doubles are 16 MiB, and a handful of them is alive at once.
_BLOCK_ELEMENTS = 2**21
# Pairs × coordinates up to which one CUDA kernel, one program per prototype, beats the blocks' matrix products.
_ONE_KERNEL = 2**28
# Squared distances below this share of the squared norms are rounding noise of float32 prototypes.
_COINCIDENT = 1e-13


class _Repulsion(torch.autograd.Function):
    """Value and gradient in one sweep over row blocks; only the C×K gradient is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, prototypes_CK: Tensor, alpha: float) -> Tensor:
        dtype = at_least_float32(prototypes_CK).dtype
        kernels = cuda_kernels(prototypes_CK)
        if kernels is not None and len(prototypes_CK) * prototypes_CK.numel() <= _ONE_KERNEL:
            total, gradient_CK = kernels.repulsion(prototypes_CK, alpha)
            ctx.save_for_backward(gradient_CK)
            return total.to(dtype)
        # ‖a−b‖² = ‖a‖² + ‖b‖² − 2ab cancels for close pairs. In float64, and centred so that a common offset
        # costs nothing, what is lost lies below the resolution of float32 prototypes.
        s_CK = prototypes_CK.double()
        s_CK = s_CK - s_CK.mean(0)
        C = len(s_CK)
        norm_C = s_CK.square().sum(1)
        index_C = torch.arange(C, device=s_CK.device)
        value = s_CK.new_zeros(())
        gradients = []
        rows = max(1, _BLOCK_ELEMENTS // C)
        for start in range(0, C, rows):
            s_RK, norm_R1 = s_CK[start : start + rows], norm_C[start : start + rows, None]
            squared_RC = torch.addmm(norm_R1 + norm_C, s_RK, s_CK.T, alpha=-2.0)
            together_RC = squared_RC <= _COINCIDENT * (norm_R1 + norm_C)  # NaN is not: it must show
            distance_RC = torch.where(together_RC, 0.0, squared_RC).sqrt()
            # i < j: each pair is seen from both sides, so half the sum; a prototype does not repel itself
            other_RC = index_C[start : start + rows, None] != index_C
            energy_RC = torch.where(other_RC, (-alpha * distance_RC).exp(), 0.0)
            value = value + 0.5 * energy_RC.sum()
            # ∂P/∂s_i = −α Σ_j e^{−αd}/d (s_i − s_j), one matrix product with w = e^{−αd}/d
            w_RC = torch.where(together_RC, 0.0, energy_RC / distance_RC)
            gradients.append(-alpha * (w_RC.sum(1, keepdim=True) * s_RK - w_RC @ s_CK))
        ctx.save_for_backward(torch.cat(gradients).to(prototypes_CK.dtype))
        return value.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient_CK,) = ctx.saved_tensors
        return (grad_outputs[0] * gradient_CK).to(gradient_CK.dtype), None


def sampled_classification(
    head: Callable[[Tensor], Tensor],
    prototypes_CK: Tensor,
    factors: Tensor,
    *,
    draws: int = 1,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
    loss_fn: Loss | None = None,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """1/n Σ_i E_ξ Lcls(N2(z_i), i) (second term of eq:combinedLoss; trains θ2 and S, does not depend on x).

    ``loss_fn(logits, labels)`` is any Lcls; it may return one loss per row or their mean (default: cross-entropy).
    ``class_weights`` (C,) replace the uniform 1/n, e.g. |D_i|/m for imbalanced data (remark (ii)); they are
    used as they are, so they should sum to one, and they need one loss per row. ``label_smoothing`` is cross-entropy's,
    for N2 alone: smoothed targets for N1 would only shrink the prototypes' distances.

    Args:
        head: N2, a map from ``(B, K)`` to ``(B, C)`` logits.
        prototypes_CK: S, one prototype per class.
        factors: factors of Σ̃, of a shape of :mod:`protoseam.core.sampling`.
        draws: samples per class; 1 (alg:lifted, line 5).
        antithetic: pair every ξ with −ξ; needs an even number of draws.
        generator: of every draw.
        loss_fn: N2's loss ``(logits, labels)``, one value per row or their mean; None: cross-entropy.
        class_weights: weights ``(C,)`` in the place of 1/n; they should sum to one.
        label_smoothing: of the cross-entropy, in [0, 1).

    Returns:
        A scalar.

    Raises:
        ArgumentError: the loss is not one per sample where it must be, or the number of draws does not fit.
    """
    z_MCK = sample(prototypes_CK, factors, draws=draws, antithetic=antithetic, generator=generator)
    C = z_MCK.shape[1]
    logits = at_least_float32(head(z_MCK.flatten(0, 1)))
    labels = torch.arange(C, device=logits.device)
    if draws > 1:
        labels = labels.repeat(draws)
    if loss_fn is None:
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    else:
        losses = at_least_float32(loss_fn(logits, labels))
    if losses.ndim == 0:
        if class_weights is not None:
            raise ArgumentError(
                "class weights need one loss per sample, but loss_fn returned their mean: "
                "give it reduction='none'"
            )
        return losses
    if losses.numel() != draws * C:
        raise ArgumentError(
            f"loss_fn must return one loss per sample ({draws * C} of them) or a scalar; "
            f"it returned shape {tuple(losses.shape)}"
        )
    return (
        losses.mean() if class_weights is None else (class_weights * losses.reshape(draws, C).mean(0)).sum()
    )
