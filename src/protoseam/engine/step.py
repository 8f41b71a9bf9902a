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
    ) -> None:
        self.objective, self.optimizer, self.data = objective, optimizer, data
        device = data.device
        self.rates = rates.to(device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.offsets = torch.arange(data.local_batch, device=device)
        self.sums = torch.zeros(terms, dtype=torch.float32, device=device)
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
        self.sums.zero_()

    def _body(self) -> None:
        # the batch's rows within the epoch's buffers
        rows = (self.counter % self.data.steps) * self.data.local_batch + self.offsets
        x, y = self.data.x.index_select(0, rows), self.data.y.index_select(0, rows)
        lr = self.rates.index_select(0, self.counter)
        kind = self.data.device.type
        with torch.autocast(kind, self.autocast) if self.autocast else nullcontext():
            losses = self.objective(x, y, self.generator)
        losses[0].backward()
        self.optimizer.step(lr)
        self.sums += losses.detach()
        self.counter += 1
