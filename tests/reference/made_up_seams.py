"""Seams with skewed classes, for audits: the laws are known, nothing was trained."""

from __future__ import annotations

import dataclasses

import torch
from theory_oracles import normal, random_psd, rng
from torch import Tensor, nn

from protoseam.lab.audit import FULL, Audit, AuditedHead, AuditSettings, audit_seam, audited_head

# small assignments and few directions: the inequalities must hold whatever is spent on them
SMALL = dataclasses.replace(FULL, points=24, directions=8, pairs=32)


def linear_head(weight_CK: Tensor, bias_C: Tensor) -> AuditedHead:
    """The head z ↦ W2 z + b."""
    linear = nn.Linear(*weight_CK.T.shape)
    linear.weight, linear.bias = nn.Parameter(weight_CK), nn.Parameter(bias_C)
    return audited_head(linear)


@dataclasses.dataclass
class Seam:
    """Three classes of skewed embeddings, a linear head, prototypes off the means, Σ̃ = Σ̂ + σ0²I."""

    z_NK: Tensor
    y_N: Tensor
    prototype_CK: Tensor
    factors: Tensor
    weight_CK: Tensor
    bias_C: Tensor
    floor: float

    def audit(self, settings: AuditSettings = SMALL, **changes: object) -> Audit:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes
        weight_CK, bias_C = values.pop("weight_CK"), values.pop("bias_C")
        head = values.pop("head", None) or linear_head(weight_CK, bias_C)
        more = {"rho": 4.0, "generator": rng(5), "training": None}
        return audit_seam(**{"head": head, "settings": settings, **more, **values})

    @property
    def sampling_CKK(self) -> Tensor:
        return self.factors @ self.factors.mT

    def of_class(self, c: int) -> Tensor:
        return self.z_NK[self.y_N == c]


def seam(seed: int, dim: int = 2, floor: float = 0.2, samples: int = 30, steep: float = 2.0) -> Seam:
    g = rng(seed)
    mean_CK = 1.5 * normal(g, 3, dim)
    y_N = torch.cat([torch.arange(3).repeat(2), torch.randint(0, 3, (samples,), generator=g)])
    z_NK = mean_CK[y_N] + 0.4 * normal(g, len(y_N), dim) ** 3
    estimate_CKK = random_psd(g, 3, dim, scale=0.3)
    factors = torch.linalg.cholesky(estimate_CKK + floor**2 * torch.eye(dim, dtype=torch.float64))
    prototype_CK = mean_CK + 0.3 * normal(g, 3, dim)
    return Seam(z_NK, y_N, prototype_CK, factors, steep * normal(g, 3, dim), normal(g, 3), floor)
