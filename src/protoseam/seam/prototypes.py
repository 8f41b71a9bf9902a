"""The first values of the prototypes."""

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.core.initializers import random_prototypes, unit_vectors
from protoseam.errors import ArgumentError
from protoseam.seam.options import Init

__all__ = ["first_prototypes"]


def first_prototypes(init: Init | Tensor, num_classes: int, dim: int) -> Tensor:
    """``(C, K)``; zeros until the data has been seen for FSInit."""
    if isinstance(init, Tensor):
        if init.shape != (num_classes, dim):
            raise ArgumentError(
                f"init must be one prototype per class, shape ({num_classes}, {dim}); got {tuple(init.shape)}"
            )
        return init.detach().clone().float()
    if init == "fsinit":
        return torch.zeros(num_classes, dim)
    if init == "random":
        return random_prototypes(num_classes, dim)
    return unit_vectors(num_classes, dim)
