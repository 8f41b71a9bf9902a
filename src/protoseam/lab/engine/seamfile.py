"""The Gaussians of a finished run, by which ``predict`` tells unusual images; ``seam.safetensors`` holds them.

The deployed network has no prototypes, and checkpoints are large and may be gone.

Legend: A images, C classes, K width of the last layer's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protoseam.core import mahalanobis
from protoseam.lab.audit.head import full_factors
from protoseam.lab.engine.files import StorageError, explain_os_error, write_atomically
from protoseam.lab.engine.schemas import SEAM, read_tensors
from protoseam.seam.lifted import Lifted

_FILE = "seam.safetensors"
_MOST_BYTES = 2**31
_BLOCK = 4096  # images whose distances to all classes are held at once


@dataclass(frozen=True)
class Seam:
    """Prototypes ``(C, K)`` and covariance factors in any of the shapes of :mod:`protoseam.core.sampling`."""

    prototypes: Tensor
    factors: Tensor

    @classmethod
    def of(cls, net: Lifted | None) -> Seam | None:
        """The prototypes and Σ̃ of a lifted network; None of another."""
        if net is None:
            return None
        return cls(net.prototypes.detach().cpu(), net.covariance.factors.detach().cpu())

    def roots(self) -> Tensor:
        """One factor per class, ``(C, K, K)`` in float64."""
        return full_factors(self.factors.cpu(), *self.prototypes.shape)


def how_unusual(z_AK: Tensor | None, logits_AC: Tensor, seam: Seam | None) -> Tensor:
    """A score per image that is larger the less the image looks like the training data.

    With a seam: the Mahalanobis distance of N1(x) to the nearest prototype, min_c ‖Σ̃_c^(−1/2) (z − s_c)‖. Without one:
    the free energy −log Σ_c exp(logit_c) (Liu et al., Energy-based Out-of-distribution Detection, 2020).
    """
    if seam is None or z_AK is None:
        return (-logits_AC.float().logsumexp(1)).nan_to_num()
    nearest = [
        mahalanobis(z_BK, seam.prototypes.cpu(), seam.factors.cpu()).amin(1).sqrt()
        for z_BK in z_AK.cpu().split(_BLOCK)
    ]
    return torch.cat(nearest).float().nan_to_num() if nearest else torch.zeros(0)


def quantiles(score_A: Tensor) -> Tensor:
    """The 0 %, 1 %, …, 100 % quantiles of the scores: what a new score is compared with."""
    finite = score_A[score_A.isfinite()].double().sort().values
    if not len(finite):
        return torch.zeros(0)
    return finite[torch.linspace(0, len(finite) - 1, 101, dtype=torch.float64).round().long()].float()


def write_seam(run: Path, seam: Seam | None, quantiles: Tensor) -> None:
    """Keep the seam (if there is one) and the quantiles of the test images' scores."""
    from safetensors.torch import save

    tensors = {"quantiles": quantiles, **({} if seam is None else vars(seam))}
    with explain_os_error("the seam", run):
        write_atomically(run / _FILE, save({name: t.float().contiguous() for name, t in tensors.items()}))


def read_seam(run: Path, num_classes: int) -> tuple[Seam | None, Tensor]:
    """The seam and the quantiles; None and no quantiles of a run that has not written any.

    Raises:
        StorageError: if the file is damaged, or does not fit the run.
    """
    tensors, _ = read_tensors(run / _FILE, SEAM, _MOST_BYTES) or ({}, {})
    scores = tensors.get("quantiles", torch.zeros(0))
    if not {"prototypes", "factors"} <= set(tensors):
        return None, scores
    seam = Seam(tensors["prototypes"], tensors["factors"])
    try:
        fits = len(seam.roots()) == num_classes
    except ValueError:
        fits = False
    if not fits:
        raise StorageError(
            f"{run / _FILE} holds factors of shape {tuple(seam.factors.shape)} for prototypes of shape "
            f"{tuple(seam.prototypes.shape)}, and the run has {num_classes} classes: remove it, or restore it"
        )
    return seam, scores
