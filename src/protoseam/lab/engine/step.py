"""One training step: slice, forward, loss, backward, update. Eager, or captured whole in one CUDA graph.

The step reads everything that changes from device memory: its number, the learning rate (a table over all
steps), ρ (a buffer of the seam), the epoch's images. So replaying the captured graph *is* the next step.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.lab import kernels
from protoseam.lab.engine.average import Average
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.mixing import Mixing
from protoseam.lab.engine.objectives import Casting
from protoseam.lab.engine.optim import FlatOptimizer, Gathered
from protoseam.lab.pipeline.resident import Resident
from protoseam.seam.state import KeepsState

_WARMUP_STEPS = 3  # before capture: lets libraries allocate and choose their kernels


def learning_rates(lr: float, epochs: int, steps: int, warmup_epochs: float) -> Tensor:
    """Return the rate of every step: linear from 0 to ``lr`` over the warm-up, then half a cosine down to 0."""
    total = epochs * steps
    warmup = min(round(warmup_epochs * steps), total // 2)
    rest = total - warmup
    rates = array("f", (lr * (t + 1) / warmup for t in range(warmup)))
    rates.extend(0.5 * lr * (1 + math.cos(math.pi * t / rest)) for t in range(rest))
    return torch.frombuffer(rates, dtype=torch.float32).clone()


def take_batch(
    images: Tensor, labels: Tensor, rates: Tensor, counter: Tensor, batch: int, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch ``counter % steps`` of an epoch's images and labels, and the learning rate of that step."""
    rows = (counter % steps) * batch + torch.arange(batch, device=counter.device)
    return images.index_select(0, rows), labels.index_select(0, rows), rates.index_select(0, counter)


def keep_books(
    losses: Tensor,
    flag: Tensor,
    ok: Tensor,
    sums: Tensor,
    bad: Tensor,
    first_bad: Tensor,
    counter: Tensor,
    *,
    keep_going: bool,
) -> None:
    """Decide on the device whether a step counts, and count it; every argument but ``losses`` is updated in place.

    Args:
        losses: the terms of the loss, the total first.
        flag: not zero if a gradient is not finite; set to zero.
        ok: becomes 1 if the step is to be applied, else 0.
        sums: the sums of the terms over the steps that were applied.
        bad: how many steps of the epoch were not.
        first_bad: number of the first of them; -1 for none.
        counter: number of this step; becomes that of the next.
        keep_going: apply steps after a bad one. Otherwise nothing moves until the epoch's end: the network stays as
            the bad step found it.
    """
    good = (flag == 0) & torch.isfinite(losses[0])
    if not keep_going:
        good = good & (bad == 0)
    ok.copy_(good)
    sums += torch.where(good, losses, 0.0)
    torch.where((bad == 0) & ~good, counter, first_bad, out=first_bad)
    bad += ~good
    counter += 1
    flag.zero_()


def _state_of(objective: nn.Module) -> list[Tensor]:
    """Return the floating-point tensors besides parameters that a batch may change."""
    kept = [t for m in objective.modules() if isinstance(m, KeepsState) for t in m.kept()]
    return [t for t in (*objective.buffers(), *kept) if t.is_floating_point()]


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
        casting: Casting,
        generator: torch.Generator,
        graph: bool,
        keep_going: bool = False,
        average: Average | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        """Args that are not what their names say: ``objective`` may be wrapped in DDP; ``keep_going`` is
        :func:`keep_books`'s; ``graph`` asks for a CUDA graph, which needs Triton: without it the host decides whether a
        step counts, and no capture allows that.
        """
        self.objective, self.data = objective, data
        self.casting, self.generator, self.keep_going = casting, generator, keep_going
        self.average, self.mixing = average, mixing
        device = data.device
        self.rates = rates.to(device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(terms, dtype=torch.float32, device=device)
        self.bad = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_bad = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.ok = torch.ones(1, dtype=torch.int32, device=device)
        self.buffers = _state_of(objective) if keep_going else []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kernels = kernels.find("step", device) if graph else None
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._kernels is None:
            self.update: Any = Gathered(optimizer)
        else:
            batch = data.local_batch
            self.update = optimizer.in_place()
            self._x, self._y = torch.zeros_like(data.x[:batch]), torch.zeros_like(data.y[:batch])
            self._lr = torch.zeros(1, device=device)
            # its short kernels go first wherever there is room
            self._side = torch.cuda.Stream(device, priority=-1)
        if self.stream is not None:  # what was made so far was made on the current one
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def run(self) -> None:
        """Take the next step."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()

    def begin_epoch(self) -> None:
        """Forget the sums and the bad steps of the epoch before."""
        self.sums.zero_()
        self.bad.zero_()
        self.first_bad.fill_(-1)

    def _body(self) -> None:
        """One step. With kernels everything beside the network is a few launches, and one captured graph."""
        fused = self._kernels
        if fused is None:
            x, y, lr = self._take()
        else:
            x, y, lr = self._x, self._y, self._lr
            fused.take_batch(self.data.x, self.data.y, self.rates, self.counter, x, y, lr, self.data.steps)
        before = [b.clone() for b in self.buffers]
        if self.mixing is not None:
            x, y = self.mixing(x, y, self.counter)
        if fused is None:
            losses = self.losses(x, y)
            losses[0].backward()
            losses = losses.detach()
        else:
            losses = self.objective.backward(x, y, self.generator, self._side, self.casting)
        self.update.check(self.flag)
        if self.data.world > 1:  # gradients are shared, losses are not: all processes must decide alike
            self.flag += ~torch.isfinite(losses[0])
            torch.distributed.all_reduce(self.flag, torch.distributed.ReduceOp.MAX)
        (keep_books if fused is None else fused.keep_books)(
            losses, self.flag, self.ok, self.sums, self.bad, self.first_bad, self.counter,
            keep_going=self.keep_going,
        )  # fmt: skip
        self.update.apply(lr, self.ok)
        if before:  # running statistics of a bad batch are as bad as its gradient
            kept = [torch.where(self.ok[0] != 0, b, a) for a, b in zip(before, self.buffers, strict=True)]
            torch._foreach_copy_(self.buffers, kept)
        if self.average is not None:
            self.average.update(self.ok)

    def _take(self, counter: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        at, data = self.counter if counter is None else counter, self.data
        return take_batch(data.x, data.y, self.rates, at, data.local_batch, data.steps)

    def batch(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        """Return what step ``counter`` trains on: its rows of the epoch's buffers, mixed if images are."""
        x, y, _ = self._take(counter)
        return (x, y) if self.mixing is None else self.mixing(x, y, counter)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the terms of the loss of a batch, with the graph for their gradients."""
        with self.casting():
            losses: Tensor = self.objective(x, y, self.generator)
        return losses

    @property
    def awaits_capture(self) -> bool:
        """Whether :meth:`capture` is to be called before the first step."""
        return self._kernels is not None and self._graph is None

    def capture(self) -> None:
        """Record the step in a CUDA graph. The warm-up steps really train: the caller restores its state."""
        assert self._kernels is not None
        counter = self.counter.clone()
        with self._kernels.compiling():  # numbers are garbage meanwhile
            self._body()
        for _ in range(_WARMUP_STEPS):
            self.counter.copy_(counter)  # there may be no three steps left
            self._body()
        torch.cuda.synchronize(self.data.device)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._body()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"the training step cannot be captured in a CUDA graph ({reason}): something in it waits for the "
                "device, the network most likely. Train it with --graph false"
            ) from error
        self._graph = graph
        self.update.settle()
        self.counter.copy_(counter)
