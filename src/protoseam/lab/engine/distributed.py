"""Several processes: torchrun starts them, DDP averages their gradients, rank 0 writes.

When one is lost, the others end as well, and torchrun (with ``--max-restarts``) starts all of them again.
:func:`restarts` tells a run to resume.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine.config import ConfigError


class LostProcessError(ProtoSeamError, RuntimeError):
    """Another process of this run has ended, or does not answer."""


@dataclass(frozen=True)
class Processes:
    """The rank of this process among ``world``; the default is a single process."""

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

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true in any process, for decisions that all must make alike."""
        return float(self.mean(torch.tensor(float(flag), device=self.device))) > 0

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Copy the first process's buffers to all, as DDP does before a forward; each has averaged its own."""
        if self.world == 1:
            return
        for buffer in module.buffers():
            if buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    def agree(self, number: int, what: str) -> None:
        """Raise LostProcessError if the processes have different numbers, because they see different files."""
        mean = float(self.mean(torch.tensor(float(number), device=self.device)))
        if mean != number:
            raise LostProcessError(
                f"process {self.rank} of {self.world} has {number} for {what}, others have not: all of them must see "
                "the same --out directory, so put it on a file system they share"
            )


def join(device: torch.device) -> Processes:
    """Join the group that torchrun has set up (NCCL on CUDA, gloo on a CPU); without one, return a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # a process may train one group of runs after another
        _initialise("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_let_go)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def refuse_torchrun(what: str) -> None:
    """Refuse torchrun for a command that trains another run in each process, whose gradients DDP would average."""
    world = os.environ.get("WORLD_SIZE", "1")
    if int(world) > 1:
        raise ConfigError(
            f"{what} was started by torchrun as one of {world} processes, which would train one run together, and "
            f"{what} gives each its own. Start the command several times instead: its workers share the work"
        )


def _let_go() -> None:
    """Give gloo's thread time to release the last collective's tensors while the interpreter still runs.

    Otherwise it aborts the process, and torchrun ends the others as if the run had failed (seen with torch 2.13 where
    a process ended right after a collective).
    """
    time.sleep(0.1)


def restarts() -> int:
    """Return how often torchrun has started these processes again after it lost one of them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _initialise(backend: str) -> None:
    """Meet the other processes under a prefix of its own for each start.

    torchrun's store outlives a restart and still holds the dead processes' addresses: gloo would wait for them
    (seen with torch 2.13). Each node counts its own restarts, so this serves one node; several need
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with which the store does not outlive the processes.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    world = int(env["WORLD_SIZE"])
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), world, is_master=False)  # type: ignore[attr-defined]
    place = dist.PrefixStore(f"start-{restarts()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=place, rank=int(env["RANK"]), world_size=world)


@contextmanager
def naming_lost_processes(processes: Processes) -> Iterator[None]:
    """Turn the transport's error about a lost peer into a LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no error type of its own
        if processes.world == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostProcessError(
            f"process {processes.rank} of {processes.world} lost the connection to another one, whose own message "
            "says why it ended. The last checkpoint is intact: go on with --resume, or let torchrun do it "
            "(--max-restarts)"
        ) from error
