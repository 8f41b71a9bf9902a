"""Sampling as a curvature penalty: prop:smoothing and the floor inequalities.

Legend: C classes (one prototype, one logit and one row ω_j of W2 each), K seam width, M antithetic pairs.

Functions that take ``weight_CK, bias_C`` are for the linear head with cross-entropy, ``z ↦ W2 z + b``; those that
take ``head`` serve any callable from (B, K) to (B, C) logits. Class i has prototype i and label i.

The expectations over Q_i are Monte-Carlo averages over pairs s ± ζ. For a convex head each pair alone already
satisfies Jensen's inequality, so the estimated gaps obey the signs of the theory for any number of draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from protoseam.errors import ArgumentError
from protoseam.theory.bures import psd_sqrt, trace

Head = Callable[[Tensor], Tensor]
_BLOCK_ROWS = 2**16  # embeddings pushed through the head at once
_BLOCK_ELEMENTS = 2**23  # doubles in one block of centred rows: 64 MiB


@dataclass(frozen=True)
class MeanWithError:
    """A Monte-Carlo mean for each class and its standard error, float64 ``(C,)``.

    Attributes:
        mean_C: the mean.
        error_C: its standard error.
    """

    mean_C: Tensor
    error_C: Tensor


# -- the exact expansion, linear head -------------------------------------------------------------------------


def curvature_spread(weight_CK: Tensor, bias_C: Tensor | None, point_CK: Tensor) -> Tensor:
    """tr ∇²ℓ = Σ_j p_j ‖ω_j − ω̄‖² at each point (eq:curvature-spread).

    Args:
        weight_CK: the head's weight, one row per class.
        bias_C: the head's bias, or None.
        point_CK: where to evaluate.
    """
    return _weighted_variance(weight_CK, bias_C, point_CK, None)


def second_order_penalty(
    weight_CK: Tensor, bias_C: Tensor | None, prototype_CK: Tensor, covariance_CKK: Tensor
) -> Tensor:
    """½ tr(Σ̃_i W2ᵀH(s_i)W2) ≥ 0, the curvature penalty of eq:sensitivity-penalty.

    Args:
        weight_CK: the head's weight, one row per class.
        bias_C: the head's bias, or None.
        prototype_CK: S, one prototype per class.
        covariance_CKK: Σ̃_i.
    """
    return _weighted_variance(weight_CK, bias_C, prototype_CK, covariance_CKK) / 2


def floor_regularization(
    weight_CK: Tensor, bias_C: Tensor | None, prototype_CK: Tensor, floor: float
) -> Tensor:
    """σ0²/2 · tr(W2ᵀH(s_i)W2), the right side of eq:floor-regularization.

    Args:
        weight_CK: the head's weight, one row per class.
        bias_C: the head's bias, or None.
        prototype_CK: S, one prototype per class.
        floor: σ0.
    """
    return floor**2 / 2 * curvature_spread(weight_CK, bias_C, prototype_CK)


def third_derivative_constant(weight_CK: Tensor, *, sharp: bool = False) -> float:
    """M with |∇³ℓ[u,u,u]| ≤ M‖u‖³.

    The third derivative is the third central moment of a variable of range r ≤ √2‖W2‖‖u‖. The paper bounds it by
    r³/4, so M = ‖W2‖³/√2. The largest possible value is r³/(6√3), at a Bernoulli variable with
    p = (3 ± √3)/6; it gives M = √2‖W2‖³/(3√3) (``sharp``), attained by W2 = I with two classes.

    Args:
        weight_CK: the head's weight, one row per class.
        sharp: use the better constant of docs/theory.md instead of the paper's.
    """
    norm = torch.linalg.matrix_norm(weight_CK.detach().double(), 2).item()
    return norm**3 * (math.sqrt(2) / (3 * math.sqrt(3)) if sharp else 1 / math.sqrt(2))


def remainder_bound(weight_CK: Tensor, covariance_CKK: Tensor, *, sharp: bool = False) -> Tensor:
    """|r_i| ≤ (M/6) 3^{3/4} (tr Σ̃_i)^{3/2} (eq:sensitivity-penalty); ``sharp`` uses the sharp M.

    Args:
        weight_CK: the head's weight, one row per class.
        covariance_CKK: Σ̃_i.
        sharp: use the better constant of docs/theory.md instead of the paper's.
    """
    return third_derivative_constant(weight_CK, sharp=sharp) / 6 * 3**0.75 * trace(covariance_CKK) ** 1.5


def remainder_bound_fourth_order(weight_CK: Tensor, covariance_CKK: Tensor) -> Tensor:
    """|r_i| ≤ [(tr S)² + 2 tr S²]/48 with S = W2 Σ̃_i W2ᵀ centred over the classes: the true order, (tr Σ̃)².

    Not in the paper. A Gaussian has no odd moments, so the cubic Taylor term drops out of the expectation and the
    quartic one remains. The fourth derivative along u is the fourth cumulant of a variable of range r, which lies
    in [−r⁴/8, r⁴/12]; with r ≤ √2‖w‖ and E‖w‖⁴ = (tr S)² + 2 tr S² the constant is 4/(8·24) = 1/48.

    Args:
        weight_CK: the head's weight, one row per class.
        covariance_CKK: Σ̃_i.
    """
    row_CK = weight_CK.detach().double()
    row_CK = row_CK - row_CK.mean(0)  # softmax does not see a common shift
    # the nonzero spectrum of W Σ Wᵀ is that of Σ^{1/2} WᵀW Σ^{1/2}
    gram_CKK = covariance_CKK.double() @ (row_CK.T @ row_CK)
    trace_of_square_C = (gram_CKK * gram_CKK.mT).sum((-2, -1))
    return (trace(gram_CKK).square() + 2 * trace_of_square_C) / 48


def _weighted_variance(
    weight_CK: Tensor, bias_C: Tensor | None, point_CK: Tensor, covariance_CKK: Tensor | None
) -> Tensor:
    """Σ_j p_j (ω_j − ω̄)ᵀΣ_i(ω_j − ω̄) at each point i, with its own p and ω̄ = Σ_j p_j ω_j; None: Σ_i = I.

    A sum of squares, so it is not negative when the head saturates.
    """
    if weight_CK.ndim != 2 or point_CK.ndim != 2 or point_CK.shape[1] != weight_CK.shape[1]:
        raise ArgumentError(
            f"weight must be (C, K) and points (C, K), got {tuple(weight_CK.shape)} and "
            f"{tuple(point_CK.shape)}: pass head.weight as it is, one row per class"
        )
    weight_CK = weight_CK.detach().double()
    block, found = max(1, _BLOCK_ELEMENTS // weight_CK.numel()), []
    for start in range(0, len(point_CK), block):
        logits_cC = point_CK[start : start + block].detach().double() @ weight_CK.T
        p_cC = (logits_cC if bias_C is None else logits_cC + bias_C.detach().double()).softmax(-1)
        row_cCK = weight_CK - (p_cC @ weight_CK).unsqueeze(1)
        turned_cCK = row_cCK
        if covariance_CKK is not None:
            turned_cCK = row_cCK @ covariance_CKK[start : start + block].double()
        found.append((p_cC * (turned_cCK * row_cCK).sum(-1)).sum(-1))
    return torch.cat(found)


# -- any head -------------------------------------------------------------------------------------------------


@torch.no_grad()
def point_loss(head: Head, prototype_CK: Tensor) -> Tensor:
    """ℓ_i(s_i), float64.

    Args:
        head: maps ``(B, K)`` embeddings to ``(B, C)`` logits.
        prototype_CK: S, one prototype per class.
    """
    return _class_losses(head, prototype_CK.unsqueeze(0))[0]


def loss_hessian(head: Head, prototype_CK: Tensor) -> Tensor:
    """∇²ℓ_i(s_i) of any twice differentiable head by automatic differentiation, ``(C, K, K)``.

    ½ tr(Σ̃_i ∇²ℓ_i) is the penalty of eq:smoothing-expansion; for a head that is not convex it may be negative.

    Args:
        head: maps ``(B, K)`` embeddings to ``(B, C)`` logits.
        prototype_CK: S, one prototype per class.
    """
    label_C = torch.arange(len(prototype_CK), device=prototype_CK.device)

    def loss(z_K: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(head(z_K.unsqueeze(0)), label.unsqueeze(0))

    # reverse over reverse: forward mode would need jvp rules from every layer of the head
    hessian = torch.func.jacrev(torch.func.grad(loss))
    return torch.func.vmap(hessian)(prototype_CK.detach(), label_C).detach().double()


def sampled_loss(
    head: Head, prototype_CK: Tensor, covariance_CKK: Tensor, *, generator: torch.Generator, pairs: int = 512
) -> MeanWithError:
    """E_{Q_i} ℓ_i with Q_i = N(s_i, Σ̃_i), from M antithetic pairs (eq:sampled-risk).

    Args:
        head: maps ``(B, K)`` embeddings to ``(B, C)`` logits.
        prototype_CK: S, one prototype per class.
        covariance_CKK: Σ̃_i.
        generator: of every draw.
        pairs: number of antithetic pairs.
    """
    return _pair_average(head, prototype_CK, covariance_CKK, 0.0, generator, pairs)


def jensen_gap(
    head: Head, prototype_CK: Tensor, covariance_CKK: Tensor, *, generator: torch.Generator, pairs: int = 512
) -> MeanWithError:
    """E_{Q_i} ℓ_i − ℓ_i(s_i), which eq:jensen-prototype says is ≥ 0 for a convex head.

    The error is that of the difference. It is a small number beside ℓ_i: give a float64 head to see it well.

    Args:
        head: maps ``(B, K)`` embeddings to ``(B, C)`` logits.
        prototype_CK: S, one prototype per class.
        covariance_CKK: Σ̃_i.
        generator: of every draw.
        pairs: number of antithetic pairs.
    """
    return floor_excess(head, prototype_CK, covariance_CKK, 0.0, generator=generator, pairs=pairs)


def floor_excess(
    head: Head,
    prototype_CK: Tensor,
    covariance_CKK: Tensor,
    floor: float,
    *,
    generator: torch.Generator,
    pairs: int = 512,
) -> MeanWithError:
    """E_{N(s_i, Σ̂_i + σ0²I)} ℓ_i − E_{N(s_i, σ0²I)} ℓ_i ≥ 0 (eq:floor-smoothing); ``covariance_CKK`` is Σ̂_i.

    Both sides share the floor's noise ξ, and ζ ∼ N(0, Σ̂_i) comes in pairs: ½[ℓ(s+ξ+ζ) + ℓ(s+ξ−ζ)] ≥ ℓ(s+ξ).

    Args:
        head: maps ``(B, K)`` embeddings to ``(B, C)`` logits.
        prototype_CK: S, one prototype per class.
        covariance_CKK: Σ̂_i, without the floor.
        floor: σ0.
        generator: of every draw.
        pairs: number of antithetic pairs.
    """
    return _pair_average(head, prototype_CK, covariance_CKK, floor, generator, pairs, excess=True)


@torch.no_grad()
def _pair_average(
    head: Head,
    prototype_CK: Tensor,
    covariance_CKK: Tensor,
    floor: float,
    generator: torch.Generator,
    pairs: int,
    excess: bool = False,
) -> MeanWithError:
    """The mean of ½[ℓ(c + ζ) + ℓ(c − ζ)], or of its excess over ℓ(c), where c = s + floor·ξ."""
    if pairs < 2:
        raise ArgumentError(f"a Monte-Carlo error needs at least 2 antithetic pairs, got pairs={pairs}")
    root_CKK = psd_sqrt(covariance_CKK)
    C, K = prototype_CK.shape

    def normals(count: int) -> Tensor:  # drawn where the generator lives
        shape = (count, C, K)
        xi_MCK = torch.randn(shape, dtype=torch.float64, device=generator.device, generator=generator)
        return xi_MCK.to(root_CKK)

    def losses(z_MCK: Tensor) -> Tensor:
        # in the prototypes' dtype: a float32 head must see float32 inputs, as it does when deployed
        return _class_losses(head, z_MCK.to(prototype_CK.dtype))

    block, chunks = max(1, _BLOCK_ROWS // (3 * C)), []
    for start in range(0, pairs, block):
        M = min(block, pairs - start)
        zeta_MCK = torch.einsum("cij,mcj->mci", root_CKK, normals(M))
        centre_MCK = prototype_CK.detach().double().unsqueeze(0)
        if floor > 0:
            centre_MCK = centre_MCK + floor * normals(M)
        value_MC = (losses(centre_MCK + zeta_MCK) + losses(centre_MCK - zeta_MCK)) / 2
        chunks.append(value_MC - losses(centre_MCK) if excess else value_MC)
    value_MC = torch.cat(chunks)
    return MeanWithError(value_MC.mean(0), value_MC.std(0, correction=1) / math.sqrt(pairs))


def _class_losses(head: Head, z_MCK: Tensor) -> Tensor:
    """Cross-entropy of embedding (m, i) against label i, float64 ``(M, C)``."""
    M, C, K = z_MCK.shape
    logits = head(z_MCK.reshape(M * C, K))
    if logits.shape != (M * C, C):
        raise ArgumentError(
            f"head maps {M * C} embeddings to {tuple(logits.shape)}, but there are {C} prototypes: "
            f"it must return ({M * C}, {C}) logits, one per class"
        )
    label = torch.arange(C, device=logits.device).repeat(M)
    return cross_entropy(logits.double(), label, reduction="none").reshape(M, C)
