"""What the seam needs of torch.distributed: a sum over processes, or nothing when there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_reduce", "broadcast", "world_size"]


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce() -> Callable[[Tensor], None] | None:
    """A function that sums a tensor in place over all processes, or None for a single process."""
    if world_size() == 1:
        return None

    def add(t: Tensor) -> None:
        if t.device.type == "cpu" and dist.get_backend() == "nccl":  # which knows device tensors only
            there = t.cuda()
            dist.all_reduce(there)
            t.copy_(there)
        else:
            dist.all_reduce(t)

    return add


def broadcast(t: Tensor) -> None:
    """Everyone takes the first process's values."""
    if world_size() > 1:
        dist.broadcast(t, src=0)
