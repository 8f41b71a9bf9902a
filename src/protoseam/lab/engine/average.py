"""An exponential moving average of the weights, which is what a run then evaluates, saves and deploys.

The average costs no extra training and is smoother than the last iterate (Polyak & Juditsky 1992). It starts quickly,
by the decay min(decay, (1+t)/(10+t)) after t updates, so that the random first weights are soon forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.engine.objectives import AbstractObjective
from protoseam.lab.engine.optim import FlatOptimizer


class Average:
    """The average of ``optimizer``'s float32 masters and of the network's floating-point buffers.

    BatchNorm's running statistics are averaged like the weights, as timm does: those of the last iterate belong to
    other weights than the averaged ones. Counters and other whole numbers keep the last value. What the seam knows
    beside the prototypes (ρ, Σ̃) is not averaged: nothing of it is deployed.
    """

    def __init__(self, decay: float, objective: AbstractObjective, optimizer: FlatOptimizer) -> None:
        self.decay, self.optimizer = decay, optimizer
        self.flat = [s.master.clone() for s in optimizer.segments]
        names = {p: name for name, p in objective.named_parameters()}
        self.named = {
            names[p]: view
            for s, flat in zip(optimizer.segments, self.flat, strict=True)
            for p, view in zip(s.params, s.views(flat), strict=True)
        }
        self.buffers = objective.deployed_buffers()
        self.averaged = {name: b.clone() for name, b in self.buffers.items()}
        self.count = torch.zeros(1, dtype=torch.float64, device=self.flat[0].device)
        self._applied = False

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the present weights."""
        self.count.zero_()
        self.adopt()
        for name, b in self.buffers.items():
            self.averaged[name].copy_(b)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the network's present weights for the average."""
        for flat, s in zip(self.flat, self.optimizer.segments, strict=True):
            flat.copy_(s.master)

    @torch.no_grad()
    def update(self, ok: Tensor) -> None:
        """Add the weights after a step to the average, unless the device scalar ``ok`` is false."""
        counts = (ok != 0).to(torch.float64).reshape(1)
        decay = ((1 + self.count) / (10 + self.count)).clamp(max=self.decay)
        weight = ((1 - decay) * counts).float()
        self.count += counts
        for flat, s in zip(self.flat, self.optimizer.segments, strict=True):
            flat.lerp_(s.master, weight)
        if self.buffers:
            averaged, now = list(self.averaged.values()), list(self.buffers.values())
            change = torch._foreach_sub(now, averaged)
            torch._foreach_mul_(change, weight[0])
            torch._foreach_add_(averaged, change)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network the averaged weights inside the context; addresses stay, and with them a captured graph."""
        if self._applied:
            yield
            return
        segments = self.optimizer.segments
        masters, buffers = (
            [s.master.clone() for s in segments],
            {k: b.clone() for k, b in self.buffers.items()},
        )
        self._applied = True
        try:
            self._write(self.flat, self.averaged)
            yield
        finally:
            self._write(masters, buffers)
            self._applied = False

    @torch.no_grad()
    def _write(self, masters: list[Tensor], buffers: dict[str, Tensor]) -> None:
        for s, master in zip(self.optimizer.segments, masters, strict=True):
            s.master.copy_(master)
        self.optimizer.synchronise()
        for name, value in buffers.items():
            self.buffers[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the names of the objective's own state."""
        tensors = {name: t.clone() for name, t in (self.named | self.averaged).items()}
        return {"tensors": tensors, "count": self.count.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, t in (self.named | self.averaged).items():
            t.copy_(state["tensors"][name])
        self.count.copy_(state["count"])
