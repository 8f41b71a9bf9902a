"""Lipschitz constants of head losses: ass:lipschitz, rem:lipschitz-ours.

Legend: C classes (outputs of the head), K seam width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from protoseam.errors import ArgumentError, ArgumentTypeError

# max |σ'|. GELU: at x = √2, Φ(√2) + √2 φ(√2); SiLU and Mish: maximum of σ' found numerically, rounded up.
_ACTIVATIONS: dict[type[nn.Module], float] = {
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid), 1.0),
    nn.Sigmoid: 0.25,
    nn.Hardsigmoid: 0.166667,
    nn.GELU: 1.13,
    nn.SiLU: 1.1,
    nn.Mish: 1.089,
    nn.Hardswish: 1.5,
    nn.SELU: 1.7581,
}
# Dropout is the identity in the deployed network, which is the one the bound speaks about.
_IDENTITIES = (nn.Identity, nn.Dropout, nn.AlphaDropout, nn.Flatten)


def head_lipschitz(head: nn.Module) -> float:
    """G with |ℓ_i(z) − ℓ_i(z')| ≤ G‖z − z'‖ for every class.

    A Linear head gives the paper's G = √2‖W2‖₂. A Sequential of Linear layers and activations gives the
    product of spectral norms and of max |σ'|, which is valid but may be loose.

    Args:
        head: a Linear, or a Sequential of Linears and activations.
    """
    matrix_CK, body = _last_linear(head)
    # ‖p − q‖₂ ≤ √2 for probability vectors: cross-entropy against hard or smoothed labels, rem:lipschitz-ours
    return math.sqrt(2.0) * body * _spectral(matrix_CK)


def class_lipschitz(head: nn.Module) -> Tensor:
    """The smallest admissible G_i for cross-entropy, class by class, float64 ``(C,)``.

    ∇ℓ_i = W2ᵀ(p − e_i) is convex in p, so its norm is largest at a vertex of the simplex:
    G_i = max_j ‖ω_j − ω_i‖₂ ≤ √2‖W2‖₂. For a Linear head the supremum is approached, because the row
    farthest from ω_i is an exposed point of the rows' hull: far out in that direction p → e_j.

    Args:
        head: a Linear, or a Sequential of Linears and activations.
    """
    matrix_CK, body = _last_linear(head)
    return body * torch.cdist(matrix_CK, matrix_CK, compute_mode="donot_use_mm_for_euclid_dist").amax(1)


def _last_linear(head: nn.Module) -> tuple[Tensor, float]:
    """The matrix of the last affine stretch, and a bound for everything before it."""
    body, matrix = 1.0, None
    for layer in _flatten(head):
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach().double()
            matrix = weight if matrix is None else weight @ matrix  # ‖W''W'‖ ≤ ‖W''‖‖W'‖: fold first
        elif isinstance(layer, _IDENTITIES):
            continue
        else:
            if matrix is not None:
                body *= _spectral(matrix)
            body, matrix = body * _slope(layer), None
    if matrix is None:
        raise ArgumentError(
            f"head_lipschitz: {type(head).__name__} does not end in nn.Linear; it has no logits"
        )
    return matrix, body


def _flatten(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _flatten(child)
    else:
        yield module


def _slope(layer: nn.Module) -> float:
    if isinstance(layer, nn.LeakyReLU):
        return max(1.0, abs(layer.negative_slope))
    if isinstance(layer, nn.PReLU):
        return max(1.0, layer.weight.detach().abs().max().item())
    if isinstance(layer, nn.ELU):
        return max(1.0, abs(layer.alpha))
    if type(layer) in _ACTIVATIONS:
        return _ACTIVATIONS[type(layer)]
    known = ", ".join(sorted([t.__name__ for t in _ACTIVATIONS] + ["ELU", "LeakyReLU", "PReLU"]))
    raise ArgumentTypeError(
        f"head_lipschitz knows no constant for {type(layer).__name__}; it handles Linear, Sequential, Identity, "
        f"Dropout, Flatten and {known}. Fold an affine layer into its neighbour, or pass your own G to the bounds"
    )


def _spectral(matrix: Tensor) -> float:
    return torch.linalg.matrix_norm(matrix, 2).item()
