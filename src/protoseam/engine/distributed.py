"""Several processes: torchrun starts them, DDP averages their gradients, rank 0 writes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Processes", "join"]


@dataclass(frozen=True)
class Processes:
    """This process's place among them; the default is a process alone."""

    rank: int = 0
    world: int = 1
    device: torch.device | None = None

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.world == 1:
            return module
        ids = [self.device.index] if self.device is not None and self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def mean(self, t: Tensor) -> Tensor:
        if self.world > 1:
            t = t.clone()
            dist.all_reduce(t)
            t /= self.world
        return t

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def join(device: torch.device) -> Processes:
    """Join the group torchrun set up (NCCL on CUDA, gloo on a CPU), or stay alone without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), device)
