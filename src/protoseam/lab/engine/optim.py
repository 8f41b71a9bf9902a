"""Optimizers over flat buffers: one update for all parameters, the rate read from the device.

Parameters become views of flat buffers, so an update is a handful of operations however many tensors there are.
With ``low`` set, the network computes with low-precision copies while float32 masters take the updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.lab import kernels
from protoseam.lab.engine.config import ConfigError

_ALIGN = 128  # elements; keeps every parameter's view aligned for vectorised kernels


class _Segment:
    """Parameters of one precision, weight decay and rate scale: master, momentum, gradient and working copy."""

    def __init__(
        self, params: list[nn.Parameter], low: torch.dtype | None, weight_decay: float, scale: float
    ):
        self.params, self.weight_decay, self.scale = params, weight_decay, scale
        offsets: list[int] = []
        size = 0
        for p in params:
            offsets.append(size)
            size += -(-p.numel() // _ALIGN) * _ALIGN
        device = params[0].device
        self.master = torch.zeros(size, device=device)
        self.momentum = torch.zeros(size, device=device)
        self.grad = torch.zeros(size, dtype=low or torch.float32, device=device)
        self.work = self.master if low is None else torch.zeros(size, dtype=low, device=device)
        self.offsets = offsets
        self.master_views = self.views(self.master)
        self.grad_views = self.views(self.grad)
        self.work_views = self.views(self.work)
        torch._foreach_copy_(self.master_views, [p.data for p in params])
        self.synchronise()
        self.use(self.work_views)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters' views of a buffer like the master's."""
        return [_view(flat, o, p) for p, o in zip(self.params, self.offsets, strict=True)]

    def use(self, views: list[Tensor]) -> None:
        for p, view in zip(self.params, views, strict=True):
            p.data = view

    def synchronise(self) -> None:
        if self.work is not self.master:
            self.work.copy_(self.master)

    def gradients(self) -> list[Tensor]:
        """Take the gradients out of ``p.grad`` and return them, each dense in its parameter's order; zeros for none."""
        out = []
        for p, view in zip(self.params, self.grad_views, strict=True):
            g, p.grad = p.grad, None
            if g is None:
                out.append(view.zero_())
            elif g.stride() == view.stride() and g.dtype == view.dtype and g.data_ptr() % 16 == 0:
                out.append(g)
            else:
                out.append(view.copy_(g))
        return out


def _view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view with the parameter's shape and memory order (channels_last weights stay channels_last)."""
    return torch.as_strided(flat, like.shape, like.stride(), offset)


class FlatOptimizer(ABC):
    """``groups`` as for torch.optim; each group's learning rate is relative to the first's.

    ``momentum``: Nesterov's, or Adam's first beta. ``low``: dtype of the working copies (None: the masters are used
    directly). ``keep``: parameters that stay float32 all the same. ``clip``: largest global norm of the gradients.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.9,
        low: torch.dtype | None = None,
        keep: set[nn.Parameter] | None = None,
        clip: float | None = None,
    ) -> None:
        groups = list(groups)
        self.momentum, self.clip = momentum, clip
        base = groups[0]["lr"]
        buckets: dict[tuple[torch.dtype | None, float, float], list[nn.Parameter]] = {}
        for group in groups:
            for p in group["params"]:
                if not p.is_contiguous() and not p.is_contiguous(memory_format=torch.channels_last):
                    p.data = p.data.contiguous()
                kind = None if keep and p in keep else low
                key = kind, group.get("weight_decay", 0.0), group["lr"] / base
                buckets.setdefault(key, []).append(p)
        self.segments = [_Segment(params, *key) for key, params in buckets.items()]

    def step(self, lr: Tensor) -> None:
        """Update with the gradients in ``p.grad``, which are then released."""
        self.gather()
        self.apply(lr)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Move the gradients out of ``p.grad``, clipped; returns the largest, which is not finite if one is not.

        A parameter without a gradient counts as having a zero one: its weight decay goes on.
        """
        largest = []
        for s in self.segments:
            grads = []
            for p, view in zip(s.params, s.grad_views, strict=True):
                grads.append(view.zero_() if p.grad is None else p.grad)
                p.grad = None
            torch._foreach_copy_(s.grad_views, grads)
            largest.append(torch.linalg.vector_norm(s.grad, ord=torch.inf, dtype=torch.float32))
        if self.clip is not None:
            self._clip(self.clip)
        return torch.stack(largest).max()

    def _clip(self, most: float) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, with the factor on the device."""
        norms = [torch.linalg.vector_norm(s.grad, dtype=torch.float32) for s in self.segments]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        # a step that is not finite is not applied, but its factor would stay in the gaps between parameters
        factor = torch.where(norm.isfinite(), most / (norm + 1e-6), 1.0).clamp(max=1.0)
        for s in self.segments:
            s.grad.mul_(factor)

    @abstractmethod
    def apply(self, lr: Tensor, ok: Tensor | None = None) -> None:
        """Update with the gathered gradients, unless the device scalar ``ok`` is false."""

    def in_place(self) -> InPlace | Gathered:
        """Return the update for a captured step."""
        return Gathered(self)

    @torch.no_grad()
    def size(self) -> float:
        """Return the norm of all parameters together."""
        return float(torch.stack([s.master.norm() for s in self.segments]).norm())

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Make every parameter its float32 master inside the context, to save, load and deploy."""
        for s in self.segments:
            s.use(s.master_views)
        try:
            yield
        finally:
            for s in self.segments:
                s.use(s.work_views)

    def synchronise(self) -> None:
        """Copy the masters, which were written from outside, to the working copies."""
        for s in self.segments:
            s.synchronise()

    def state_dict(self) -> dict[str, Any]:
        """Return the momenta; the masters are the network's own state under :meth:`full_precision`."""
        return {"momentum": [s.momentum.clone() for s in self.segments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load("momentum", [s.momentum for s in self.segments], state)

    def _load(self, name: str, buffers: list[Tensor], state: dict[str, Any]) -> None:
        if len(state[name]) != len(buffers):
            raise ConfigError("the optimizer state belongs to another network or precision")
        for buffer, value in zip(buffers, state[name], strict=True):
            buffer.copy_(value)


def sgd_update(
    master: Tensor,
    velocity: Tensor,
    grad: Tensor,
    work: Tensor,
    lr: Tensor,
    ok: Tensor | None,
    scale: float,
    momentum: float,
    decay: float,
) -> None:
    """Update in place as torch.optim.SGD(nesterov=True); nothing if ``ok`` is 0, for which the host waits.

    g ← ∇ + λp;  v ← μv + g;  p ← p − η(g + μv), with η = ``lr`` · ``scale``; ``work`` becomes a copy of ``master``.
    """
    if ok is not None and not ok:
        return
    g = grad.float().add(master, alpha=decay)
    velocity.mul_(momentum).add_(g)
    g.add_(velocity, alpha=momentum)
    master.addcmul_(g, lr.expand_as(g), value=-scale)
    if work is not master:
        work.copy_(master)


class FlatSGD(FlatOptimizer):
    """SGD with Nesterov momentum."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = list(groups)
        for group in groups:
            group.setdefault("dampening", 0.0)  # as torch.optim.SGD does: the seam's bounds know SGD by it
            group.setdefault("momentum", options.get("momentum", 0.9))
        super().__init__(groups, **options)
        fused = kernels.find("step", self.segments[0].master.device)
        self.update = sgd_update if fused is None else fused.sgd_update

    @torch.no_grad()
    def apply(self, lr: Tensor, ok: Tensor | None = None) -> None:
        for s in self.segments:
            self.update(s.master, s.momentum, s.grad, s.work, lr, ok, s.scale, self.momentum, s.weight_decay)

    def in_place(self) -> InPlace | Gathered:
        # the norm of all gradients must be known before the first is used, so a clipped step gathers them
        return InPlace(self) if self.clip is None else Gathered(self)


class Gathered:
    """:meth:`FlatOptimizer.gather` and :meth:`~FlatOptimizer.apply` for a step in a CUDA graph."""

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self.optimizer = optimizer

    @torch.no_grad()
    def check(self, flag: Tensor) -> None:
        """Take the gradients; set ``flag`` if one is not finite."""
        bad = ~torch.isfinite(self.optimizer.gather())
        torch.maximum(flag, bad.to(flag.dtype).reshape(1), out=flag)

    def apply(self, lr: Tensor, ok: Tensor) -> None:
        """Update unless ``ok`` is zero."""
        self.optimizer.apply(lr, ok)

    def settle(self) -> None:
        """Do nothing: a captured copy knows the addresses of its gradients."""


class InPlace:
    """:class:`Gathered` for SGD without the copy: a kernel reads the gradients where the backward leaves them."""

    def __init__(self, optimizer: FlatSGD) -> None:
        self.optimizer = optimizer
        fused: Any = kernels.find("step", optimizer.segments[0].master.device)
        self.tables = [
            fused.Scattered([p.numel() for p in s.params], s.offsets, s.grad.dtype, s.grad.device)
            for s in optimizer.segments
        ]
        self.captured: list[list[int]] = []

    @torch.no_grad()
    def check(self, flag: Tensor) -> None:
        """Take the gradients; set ``flag`` if one is not finite."""
        self.held = [s.gradients() for s in self.optimizer.segments]
        self.captured = [[g.data_ptr() for g in gradients] for gradients in self.held]
        if not torch.cuda.is_current_stream_capturing():
            self.settle()
        for table in self.tables:
            table.check(flag)

    @torch.no_grad()
    def apply(self, lr: Tensor, ok: Tensor) -> None:
        """Update unless ``ok`` is zero."""
        for s, table in zip(self.optimizer.segments, self.tables, strict=True):
            table.update(
                s.master, s.momentum, s.work, lr, ok, s.scale, self.optimizer.momentum, s.weight_decay
            )
        self.held = []

    def settle(self) -> None:
        """Write the gradients' addresses to the device: after a capture, and before each step that is not captured."""
        for table, addresses in zip(self.tables, self.captured, strict=True):
            table.addresses.copy_(torch.tensor(addresses))
