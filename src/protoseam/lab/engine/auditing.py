"""The theory's quick audit, as training goes: a few numbers about the seam on the validation data."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import protoseam as ps
from protoseam.lab.audit import QUICK, audit_seam, audited_head


class AuditWarning(UserWarning):
    """An audit during training was left out; training itself is not changed."""


def quick_audit(
    net: ps.Lifted, z_NK: Tensor, y_N: Tensor, floor: float | str, seed: int, epoch: int
) -> dict[str, float] | None:
    """Return risk, sampled loss, the bound's terms and NC1–NC4 of a lifted network on these embeddings.

    ``seed`` is that of the audit's own draws. None, with an :class:`AuditWarning` that names ``epoch``, means that the
    audit cannot be made.
    """
    try:
        return audit_seam(
            z_NK,
            y_N,
            net.prototypes,
            net.covariance.factors,
            audited_head(net.n2),
            rho=float(net.rho),
            floor=None if isinstance(floor, str) else floor,
            generator=torch.Generator().manual_seed(seed),
            settings=QUICK,
        ).flat()
    except ValueError as error:  # a failed audit must not end the run
        warnings.warn(f"no audit of epoch {epoch}: {error}", AuditWarning, stacklevel=3)
        return None
