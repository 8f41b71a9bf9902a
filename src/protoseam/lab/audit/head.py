"""The head of an audited seam: its losses on embeddings and on samples, its curvature, its steepness.

Legend: N held-out samples, B rows of a block, M antithetic pairs, C classes of the head, P classes that have
held-out samples, K seam width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protoseam.core.sampling import sample
from protoseam.errors import ArgumentError
from protoseam.theory.bures import trace
from protoseam.theory.lipschitz import class_lipschitz, head_lipschitz
from protoseam.theory.smoothing import (
    floor_regularization,
    loss_hessian,
    remainder_bound,
    remainder_bound_fourth_order,
    second_order_penalty,
)

_BLOCK_ROWS = 2**16  # embeddings pushed through the head at once


@dataclass(frozen=True)
class AuditedHead:
    """A head on float64 embeddings and its Lipschitz constants; :func:`audited_head` makes it."""

    logits: Callable[[Tensor], Tensor]
    lipschitz: float  # one G for all classes: √2‖W2‖₂ for a Linear head
    lipschitz_C: Tensor  # the smallest G_i known
    weight_CK: Tensor | None = None  # of a Linear head
    bias_C: Tensor | None = None

    def deployed(self, z_NK: Tensor, y_N: Tensor, *, slopes: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss, prediction and ‖∇ℓ_y(z)‖ of each embedding; no slopes if not asked for or not known."""
        losses, predictions, steepness = [], [], []
        for z_BK, y_B in zip(z_NK.split(_BLOCK_ROWS), y_N.split(_BLOCK_ROWS), strict=True):
            logits_BC = self.logits(z_BK.detach().double())
            losses.append(self._losses(logits_BC, y_B))
            predictions.append(logits_BC.argmax(1))
            if slopes and self.weight_CK is not None:
                p_BC = logits_BC.softmax(1)
                p_BC[torch.arange(len(y_B), device=p_BC.device), y_B] -= 1
                steepness.append((p_BC @ self.weight_CK.to(p_BC)).norm(dim=1))  # ∇ℓ_y = W2ᵀ(p − e_y)
        return torch.cat(losses), torch.cat(predictions), torch.cat(steepness) if steepness else None

    def sampled(
        self, prototype_CK: Tensor, factors: Tensor, generator: torch.Generator, pairs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """E_{Q_i} ℓ_i, its standard error, and ℓ_i(s_i). Drawn as training draws, in pairs s ± ζ."""
        if pairs < 2:
            raise ArgumentError(f"a Monte-Carlo error needs at least 2 antithetic pairs, got pairs={pairs}")
        C = len(prototype_CK)
        block, chunks, point_C = max(1, _BLOCK_ROWS // (2 * C)), [], prototype_CK[:, 0]
        for start in range(0, pairs, block):
            M = min(block, pairs - start)
            z_MCK = sample(prototype_CK, factors, draws=2 * M, antithetic=True, generator=generator)
            z_MCK = torch.cat([prototype_CK[None], z_MCK])
            label = torch.arange(C).repeat(len(z_MCK))
            loss_MC = self._losses(self.logits(z_MCK.flatten(0, 1)), label).view(-1, C)
            point_C = loss_MC[0]
            chunks.append((loss_MC[1 : M + 1] + loss_MC[M + 1 :]) / 2)
        loss_MC = torch.cat(chunks)
        return loss_MC.mean(0), loss_MC.std(0, correction=1) / math.sqrt(pairs), point_C

    def second_order(
        self, prototype_CK: Tensor, covariance_PKK: Tensor, index_P: Tensor, floor: float, *, details: bool
    ) -> dict[str, Tensor]:
        """½ tr(Σ̃_i ∇²ℓ_i(s_i)), the floor's part of it, and how far the measured gap may be away, as far as known."""
        if self.weight_CK is not None:
            linear = self.weight_CK, self.bias_C, prototype_CK[index_P]
            found = {"curvature_P": second_order_penalty(*linear, covariance_PKK)}
            if details:
                found["floor_curvature_P"] = floor_regularization(*linear, floor)
                found["remainder_P"] = torch.minimum(
                    remainder_bound(self.weight_CK, covariance_PKK, sharp=True),
                    remainder_bound_fourth_order(self.weight_CK, covariance_PKK),
                )
            return found
        if not details:
            return {}
        hessian_PKK = loss_hessian(self.logits, prototype_CK)[index_P]
        return {
            "curvature_P": (covariance_PKK * hessian_PKK).sum((-2, -1)) / 2,
            "floor_curvature_P": floor**2 / 2 * trace(hessian_PKK),
        }

    @staticmethod
    def _losses(logits: Tensor, label: Tensor) -> Tensor:
        loss = cross_entropy(logits.double(), label, reduction="none")
        if not bool(loss.isfinite().all()):
            raise ArgumentError(
                f"the head's loss is NaN or infinite for {int((~loss.isfinite()).sum())} of {len(loss)} embeddings: "
                "training has diverged; audit an earlier checkpoint"
            )
        return loss


def audited_head(head: nn.Module) -> AuditedHead:
    """A copy of a head that has a Lipschitz constant, in float64 and eval mode."""
    module = copy.deepcopy(head).double().eval().requires_grad_(False)
    constants = head_lipschitz(module), class_lipschitz(module).cpu()
    if isinstance(module, nn.Linear):
        weight_CK = module.weight.cpu()
        bias_C = weight_CK.new_zeros(len(weight_CK)) if module.bias is None else module.bias.cpu()
        return AuditedHead(
            lambda z: torch.addmm(bias_C.to(z), z, weight_CK.to(z).T), *constants, weight_CK, bias_C
        )
    home = next((p.device for p in module.parameters()), torch.device("cpu"))
    return AuditedHead(lambda z: module(z.to(home)).to(z.device), *constants)


def full_factors(factors: Tensor, num_classes: int, dim: int) -> Tensor:
    """Factors of any shape as ``(C, K, K)``, float64."""
    factors, shape = factors.detach().double(), tuple(factors.shape)
    if factors.ndim == 2 and shape[0] in (1, num_classes) and shape[1] in (1, dim):
        return torch.diag_embed(factors.expand(num_classes, dim))
    if factors.ndim == 3 and shape[0] in (1, num_classes) and shape[1:] == (dim, dim):
        return factors.expand(num_classes, dim, dim)
    raise ArgumentError(
        f"factors of shape {shape} fit no covariance structure of {num_classes} classes and width {dim}: "
        f"expected {(num_classes, dim, dim)}, {(1, dim, dim)}, {(num_classes, dim)} or (1, 1)"
    )
