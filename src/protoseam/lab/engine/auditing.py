"""The theory's quick audit, as training goes: a few numbers about the seam on the validation data."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from protoseam.lab.engine.objectives import Lifting
from protoseam.lab.pipeline.resident import epoch_seed
from protoseam.seam.passes import as_deployed
from protoseam.theory import QUICK, audit_seam, audited_head

if TYPE_CHECKING:
    from protoseam.lab.engine.trainer import Run

__all__ = ["AuditWarning", "quick_audit"]

_PURPOSE = 2**20  # of epoch_seed: far from the ranks', which count from 1


class AuditWarning(UserWarning):
    """An audit during training was left out; training itself is not touched."""


@torch.no_grad()
def quick_audit(run: Run) -> dict[str, float] | None:
    """Risk, sampled loss, the bound's terms and NC1–NC4 of a lifted run on its validation data.

    None for a run without a seam. Draws from a stream of its own, so the run goes on as if it had not been looked
    at. The prototypes and Σ̃ are those that the next epoch starts from.
    """
    if not isinstance(run.objective, Lifting):
        return None
    net, config = run.objective.net, run.config
    with as_deployed(run.objective):
        pairs = [(run._cast(net.embed, x).float(), y) for x, y in run.data.batches("validation")]
    generator = torch.Generator().manual_seed(epoch_seed(config.seed, run.epoch, _PURPOSE))
    try:
        return audit_seam(
            torch.cat([z for z, _ in pairs]),
            torch.cat([y for _, y in pairs]),
            net.prototypes,
            net.covariance.factors,
            audited_head(net.n2),
            rho=float(net.rho),
            floor=None if config.lift.floor == "auto" else config.lift.floor,
            generator=generator,
            settings=QUICK,
        ).flat()
    except ValueError as error:  # a look at the run must not end it
        warnings.warn(f"no audit of epoch {run.epoch + 1}: {error}", AuditWarning, stacklevel=3)
        return None
