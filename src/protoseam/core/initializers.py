"""Where the prototypes start (§init). Each function returns S as ``(C, K)``; FSInit needs class means."""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.errors import ArgumentError

__all__ = ["forward_sweep", "random_prototypes", "unit_vectors"]


def forward_sweep(count_C: Tensor, mean_CK: Tensor) -> Tensor:
    """FSInit: s_i = mean of N1 over D_i. Every class needs a sample.

    Args:
        count_C: samples per class.
        mean_CK: class means μ_i.

    Returns:
        ``(C, K)``.

    Raises:
        ArgumentError: a class has no sample.
    """
    empty = (count_C == 0).nonzero().flatten().tolist()
    if empty:
        raise ArgumentError(
            f"FSInit puts each prototype on its class mean, but {_name(empty)} no sample. "
            "Check num_classes and the labels, or start elsewhere: init='random'"
        )
    return mean_CK


def random_prototypes(
    num_classes: int, dim: int, *, scale: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """s_i ~ N(0, scale²/K · I), so that a prototype has norm ≈ scale at every width.

    Args:
        num_classes: number of classes.
        dim: the seam's width k.
        scale: about the norm of a prototype.
        generator: of every draw.

    Returns:
        ``(C, K)``, float32.
    """
    return torch.randn(num_classes, dim, generator=generator) * (scale / dim**0.5)


def unit_vectors(num_classes: int, dim: int) -> Tensor:
    """s_i = e_i, which needs k = n.

    Args:
        num_classes: number of classes.
        dim: the seam's width k.

    Returns:
        ``(C, K)``, float32.

    Raises:
        ArgumentError: k ≠ n.
    """
    if num_classes != dim:
        raise ArgumentError(
            f"unit-vector prototypes need dim = num_classes; got dim={dim}, num_classes={num_classes}. "
            f"Lift with dim={num_classes}, or use init='fsinit' or 'random'"
        )
    return torch.eye(num_classes)


def _name(classes: list[int]) -> str:
    shown = ", ".join(str(c) for c in classes[:10]) + (", …" if len(classes) > 10 else "")
    return f"class {shown} has" if len(classes) == 1 else f"classes {shown} have"
