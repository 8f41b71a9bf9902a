"""``seam.safetensors``: the Gaussians of a finished run, by which ``predict`` tells unusual images.

The deployed network has no prototypes, and checkpoints are large and may be gone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from protoseam.lab.data.links import refuse_link
from protoseam.lab.engine.files import StorageError, explain_os_error, read_bounded, write_atomically
from protoseam.lab.engine.latents import Seam
from protoseam.lab.engine.schemas import SEAM, check_tensors

_FILE = "seam.safetensors"
_MOST_BYTES = 2**31


def write_seam(run: Path, seam: Seam | None, quantiles: Tensor) -> None:
    """Keep the seam (if there is one) and the quantiles of the test images' scores."""
    from safetensors.torch import save

    tensors = {"quantiles": quantiles.float().contiguous()}
    if seam is not None:
        tensors |= {
            "prototypes": seam.prototypes.float().contiguous(),
            "factors": seam.factors.float().contiguous(),
        }
    with explain_os_error("the seam", run):
        write_atomically(run / _FILE, save(tensors))


def read_seam(run: Path, num_classes: int) -> tuple[Seam | None, Tensor]:
    """The seam and the quantiles; None and no quantiles of a run that has not written any.

    Raises:
        StorageError: if the file is damaged, or does not fit the run.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = run / _FILE
    refuse_link(path)
    if not path.exists():
        return None, torch.zeros(0)
    try:
        tensors = load(read_bounded(path, _MOST_BYTES))
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): remove it, or restore it"
        ) from error
    check_tensors(path, tensors, SEAM)
    seam = (
        Seam(tensors["prototypes"], tensors["factors"]) if {"prototypes", "factors"} <= set(tensors) else None
    )
    if seam is not None:
        try:
            fits = len(seam.roots()) == num_classes
        except ValueError:
            fits = False
        if not fits:
            raise StorageError(
                f"{path} holds factors of shape {tuple(seam.factors.shape)} for prototypes of shape "
                f"{tuple(seam.prototypes.shape)}, and the run has {num_classes} classes: remove it, or restore it"
            )
    return seam, tensors.get("quantiles", torch.zeros(0))
