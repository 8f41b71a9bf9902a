"""One training step: slice, forward, loss, backward, update. Eager, or captured whole in one CUDA graph.

The step reads everything that changes from device memory: its number, the learning rate (a table over all
steps), ρ (a buffer of the seam), the epoch's images. So replaying the captured graph *is* the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.data.resident import Resident
from protoseam.engine.optim import FlatSGD

__all__ = ["TrainStep", "learning_rates"]

_WARMUP_STEPS = 3  # before capture: lets libraries allocate and choose their kernels


def learning_rates(lr: float, epochs: int, steps: int, warmup_epochs: float) -> Tensor:
    """The rate of every step: linear from 0 to ``lr`` over the warm-up, then half a cosine down to 0."""
    total = epochs * steps
    warmup = min(round(warmup_epochs * steps), total // 2)
    rates = [lr * (t + 1) / warmup for t in range(warmup)]
    rest = total - warmup
    rates += [0.5 * lr * (1 + math.cos(math.pi * t / rest)) for t in range(rest)]
    return torch.tensor(rates, dtype=torch.float32)


class TrainStep:
    """Owns the step counter, the running sums of the loss terms and, on CUDA, the graph."""

    def __init__(
        self,
        objective: nn.Module,
        terms: int,
        optimizer: FlatSGD,
        data: Resident,
        rates: Tensor,
        *,
        autocast: torch.dtype | None,
        generator: torch.Generator,
        graph: bool,
        keep_going: bool = False,
    ) -> None:
        """``keep_going``: a bad step is left out and the next one taken; else all updates stop at the first."""
        self.objective, self.optimizer, self.data = objective, optimizer, data
        device = data.device
        self.rates = rates.to(device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.offsets = torch.arange(data.local_batch, device=device)
        self.sums = torch.zeros(terms, dtype=torch.float32, device=device)
        # steps whose loss or gradient was not finite, and the first of them (-1: none)
        self.bad = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_bad = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.keep_going = keep_going
        self.buffers = [b for b in objective.buffers() if b.is_floating_point()] if keep_going else []
        self.autocast, self.generator = autocast, generator
        self.use_graph = graph and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Take the next step."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()

    def capture(self, saved: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Record the step. Warm-up steps really train, so the caller's state is put back afterwards."""
        if not self.use_graph or self._graph is not None:
            return
        assert self.stream is not None
        before, counter = saved(), self.counter.clone()
        for _ in range(_WARMUP_STEPS):
            self._body()
        torch.cuda.synchronize(self.data.device)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=self.stream):
            self._body()
        self._graph = graph
        restore(before)
        self.counter.copy_(counter)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.sums.zero_()
        self.bad.zero_()
        self.first_bad.fill_(-1)

    def _body(self) -> None:
        # the batch's rows within the epoch's buffers
        rows = (self.counter % self.data.steps) * self.data.local_batch + self.offsets
        x, y = self.data.x.index_select(0, rows), self.data.y.index_select(0, rows)
        lr = self.rates.index_select(0, self.counter)
        before = [b.clone() for b in self.buffers]
        losses = self.losses(x, y)
        losses[0].backward()
        norm = self.optimizer.gather()
        ok = torch.isfinite(norm + losses[0].detach()).reshape(1)
        if not self.keep_going:
            # once bad, nothing moves until the epoch's end: the network stays as the bad step found it
            ok = ok & (self.bad == 0)
        self.optimizer.apply(lr, ok)
        if before:  # running statistics of a bad batch are as bad as its gradient
            kept = [torch.where(ok[0], b, a) for a, b in zip(before, self.buffers, strict=True)]
            torch._foreach_copy_(self.buffers, kept)
        self.sums += torch.where(ok, losses.detach(), 0.0)
        torch.where((self.bad == 0) & ~ok, self.counter, self.first_bad, out=self.first_bad)
        self.bad += ~ok
        self.counter += 1

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        kind = self.data.device.type
        with torch.autocast(kind, self.autocast) if self.autocast else nullcontext():
            losses: Tensor = self.objective(x, y, self.generator)
        return losses
