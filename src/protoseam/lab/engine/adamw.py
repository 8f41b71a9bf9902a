"""AdamW over flat buffers (Loshchilov & Hutter, Decoupled Weight Decay Regularization), as torch.optim.AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.engine.optim import FlatOptimizer

_BETA2, _EPSILON = 0.999, 1e-8  # torch.optim.AdamW's defaults


class FlatAdamW(FlatOptimizer):
    """AdamW by operations on whole buffers, without the host, so that a captured step can hold the update."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        groups = list(groups)
        for group in groups:
            group.setdefault("eps", _EPSILON)  # as torch.optim.AdamW does: the seam's bounds know Adam by it
        super().__init__(groups, **options)
        self.second = [torch.zeros_like(s.master) for s in self.segments]
        # updates so far; float64, in which βᵗ needs no care
        self.count = torch.zeros(1, dtype=torch.float64, device=self.segments[0].master.device)

    @torch.no_grad()
    def apply(self, lr: Tensor, ok: Tensor | None = None) -> None:
        if ok is not None and ok.device.type == "cpu":  # on a CPU the host may decide
            if not ok:
                return
            ok = None
        self.count += 1 if ok is None else (ok != 0)
        t = self.count.clamp(min=1)  # 0 only if every step so far was skipped, and then nothing is applied
        correction1 = 1 - torch.exp(t * math.log(self.momentum)) if self.momentum else torch.ones_like(t)
        correction2 = 1 - torch.exp(t * math.log(_BETA2))
        for s, second in zip(self.segments, self.second, strict=True):
            # m ← β₁m + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  p ← (1−ηλ)p − η m̂ / (√v̂ + ε)
            rate = lr.double() * s.scale
            g = s.grad.float()
            m = torch.lerp(s.momentum, g, 1 - self.momentum)
            v = (second * _BETA2).addcmul_(g, g, value=1 - _BETA2)
            denominator = v.sqrt().div_(correction2.sqrt().float()).add_(_EPSILON)
            p = s.master * (1 - rate * s.weight_decay).float()
            p -= m / denominator * (rate / correction1).float()
            for old, new in ((s.momentum, m), (second, v), (s.master, p)):
                old.copy_(new if ok is None else torch.where(ok != 0, new, old))
            s.synchronise()

    def state_dict(self) -> dict[str, Any]:
        """Return both moments and the number of updates."""
        second = [v.clone() for v in self.second]
        return {**super().state_dict(), "second": second, "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._load("second", self.second, state)
        self.count.copy_(state["count"])
