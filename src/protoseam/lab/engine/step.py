"""One training step: slice, forward, loss, backward, update. Eager, or captured whole in one CUDA graph.

The step reads everything that changes from device memory: its number, the learning rate (a table over all
steps), ρ (a buffer of the seam), the epoch's images. So replaying the captured graph *is* the next step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from protoseam.core.devices import cuda_kernels
from protoseam.lab.engine.average import Average
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.mixing import Mixing
from protoseam.lab.engine.optim import FlatOptimizer
from protoseam.lab.pipeline.resident import Resident

__all__ = ["TrainStep", "learning_rates"]

_WARMUP_STEPS = 3  # before capture: lets libraries allocate and choose their kernels


def learning_rates(lr: float, epochs: int, steps: int, warmup_epochs: float) -> Tensor:
    """The rate of every step: linear from 0 to ``lr`` over the warm-up, then half a cosine down to 0."""
    total = epochs * steps
    warmup = min(round(warmup_epochs * steps), total // 2)
    rest = total - warmup
    rates = array("f", (lr * (t + 1) / warmup for t in range(warmup)))
    rates.extend(0.5 * lr * (1 + math.cos(math.pi * t / rest)) for t in range(rest))
    return torch.frombuffer(rates, dtype=torch.float32).clone()


class TrainStep:
    """Owns the step counter, the running sums of the loss terms and, on CUDA, the graph."""

    def __init__(
        self,
        objective: Any,
        terms: int,
        optimizer: FlatOptimizer,
        data: Resident,
        rates: Tensor,
        *,
        autocast: torch.dtype | None,
        generator: torch.Generator,
        graph: bool,
        keep_going: bool = False,
        average: Average | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        """``keep_going``: a bad step is left out and the next one taken; else all updates stop at the first."""
        self.objective, self.optimizer, self.data = objective, optimizer, data
        self.average, self.mixing = average, mixing
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
        # without Triton the host decides whether a step counts, which no capture allows
        self.use_graph = graph and device.type == "cuda" and cuda_kernels(self.rates) is not None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.fused = _Fused(self) if self.use_graph else None
        if self.stream is not None:  # what was made so far was made on the current one
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def run(self) -> None:
        """Take the next step."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()

    def capture(self, saved: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Record the step. Warm-up steps really train, so the caller's state is put back afterwards."""
        if self.fused is None or self._graph is not None:
            return
        from protoseam.lab.kernels.step import compiling

        assert self.stream is not None
        before, counter = saved(), self.counter.clone()
        with compiling():  # numbers are garbage meanwhile
            self.fused.body()
        for _ in range(_WARMUP_STEPS):
            self.counter.copy_(counter)  # there may be no three steps left
            self.fused.body()
        torch.cuda.synchronize(self.data.device)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.fused.body()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"the training step cannot be captured in a CUDA graph ({reason}): something in it waits for the "
                "device, the network most likely. Train it with --graph false"
            ) from error
        self._graph = graph
        self.fused.update.settle()
        restore(before)
        self.counter.copy_(counter)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.sums.zero_()
        self.bad.zero_()
        self.first_bad.fill_(-1)

    def _body(self) -> None:
        x, y = self.batch(self.counter)
        lr = self.rates.index_select(0, self.counter)
        before = [b.clone() for b in self.buffers]
        losses = self.losses(x, y)
        losses[0].backward()
        largest = self.optimizer.gather()
        ok = (torch.isfinite(largest) & torch.isfinite(losses[0].detach())).reshape(1)
        if self.data.world > 1:  # gradients are shared, losses are not: all processes must decide alike
            agreed = ok.to(torch.int32)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
            ok = agreed.bool()
        if not self.keep_going:
            # once bad, nothing moves until the epoch's end: the network stays as the bad step found it
            ok = ok & (self.bad == 0)
        self.optimizer.apply(lr, ok)
        self.undo(before, ok)
        if self.average is not None:
            self.average.update(ok)
        self.sums += torch.where(ok, losses.detach(), 0.0)
        torch.where((self.bad == 0) & ~ok, self.counter, self.first_bad, out=self.first_bad)
        self.bad += ~ok
        self.counter += 1

    def batch(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        """What step ``counter`` trains on: its rows of the epoch's buffers, mixed if images are."""
        rows = (counter % self.data.steps) * self.data.local_batch + self.offsets
        x, y = self.data.x.index_select(0, rows), self.data.y.index_select(0, rows)
        return (x, y) if self.mixing is None else self.mixing(x, y, counter)

    def undo(self, before: list[Tensor], ok: Tensor) -> None:
        """Put the buffers back unless ``ok``: running statistics of a bad batch are as bad as its gradient."""
        if before:
            kept = [torch.where(ok[0] != 0, b, a) for a, b in zip(before, self.buffers, strict=True)]
            torch._foreach_copy_(self.buffers, kept)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        with self.casting():
            losses: Tensor = self.objective(x, y, self.generator)
        return losses

    def casting(self) -> AbstractContextManager[Any]:
        kind = self.data.device.type
        return torch.autocast(kind, self.autocast) if self.autocast else nullcontext()


class _Fused:
    """The body of a captured step, everything beside the network in a few kernels. Owns the batch it works on."""

    def __init__(self, step: TrainStep) -> None:
        device, batch = step.data.device, step.data.local_batch
        self.step = step
        self.x, self.y = torch.zeros_like(step.data.x[:batch]), torch.zeros_like(step.data.y[:batch])
        self.lr = torch.zeros(1, device=device)
        # raised by a gradient that is not finite
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.ok = torch.ones(1, dtype=torch.int32, device=device)
        self.update = step.optimizer.in_place()
        # its short kernels go first wherever there is room
        self.side = torch.cuda.Stream(device, priority=-1)

    def body(self) -> None:
        from protoseam.lab.kernels.step import keep_books, take_batch

        step = self.step
        data = step.data
        take_batch(data.x, data.y, step.rates, step.counter, self.x, self.y, self.lr, data.steps)
        before = [b.clone() for b in step.buffers]
        x, y = self.x, self.y
        if step.mixing is not None:
            x, y = step.mixing(x, y, step.counter)
        losses = step.objective.backward(x, y, step.generator, self.side, step.casting)
        self.update.check(self.flag)
        keep_books(
            losses, self.flag, self.ok, step.sums, step.bad, step.first_bad, step.counter,
            keep_going=step.keep_going,
        )  # fmt: skip
        self.update.apply(self.lr, self.ok)
        step.undo(before, self.ok)
        if step.average is not None:
            step.average.update(self.ok)
