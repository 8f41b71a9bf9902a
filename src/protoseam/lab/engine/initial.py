"""Start from a trained network: that of a finished run, or a safetensors file of a model's state.

Everything is loaded except a classifier of another shape, so that a trained network can learn other classes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.schemas import ABOUT_WEIGHTS, check_normalised


def read_tensors(source: Path) -> dict[str, Tensor]:
    """Return the tensors of a run's deployed network, or of a .safetensors file, by name."""
    file = source / "model.safetensors" if source.is_dir() else source
    if source.is_dir() and not file.exists():
        raise ConfigError(
            f"init_from={source}: there is no model.safetensors in it. Give the directory of a finished run, or a "
            ".safetensors file"
        )
    if not file.exists():
        raise ConfigError(f"init_from={source}: there is no such file or directory")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"init_from={source} cannot be read as a .safetensors file: {error}") from error
    return tensors


def normalisation_of(source: Path) -> tuple[list[float], list[float]] | None:
    """Return mean and deviation of the inputs that a run or an export was trained on; None if nothing tells."""
    if source.is_dir() and (theirs := RunData.read(source)) is not None:
        return theirs.mean, theirs.std
    file = source / "model.safetensors" if source.is_dir() else source
    with safe_open(file, "pt") as opened:
        about = (opened.metadata() or {}).get("about")
    if about is None:  # a file of somebody else's
        return None
    try:
        known = check_normalised(file, json.loads(about), ABOUT_WEIGHTS)
    except (ValueError, RecursionError, StorageError) as error:
        raise ConfigError(f"init_from={source} does not say what its network takes: {error}") from error
    return known["mean"], known["std"]


@torch.no_grad()
def take_over(
    theirs: dict[str, Tensor], ours: dict[str, Tensor], classifier: str | None, source: Path
) -> str:
    """Write ``theirs`` into ``ours`` by name and return a sentence that says what was loaded and what was not.

    Args:
        theirs: tensors of the source.
        ours: the network's own, which are overwritten.
        classifier: name of the layer that may differ; None if no layer may.
        source: for the messages.

    Raises:
        ConfigError: a tensor outside the classifier is missing, superfluous or of another shape; it names the first.
    """
    prefix = None if classifier is None else f"{classifier}." if classifier else ""

    left = []
    for name in dict.fromkeys([*ours, *theirs]):
        here, there = (tuple(t[name].shape) if name in t else None for t in (ours, theirs))
        if here == there:
            continue
        if prefix is not None and name.startswith(prefix):
            left += [f"{name} {here}"] if here is not None else []
            continue
        if there is None:
            how = f"it has no tensor {name}, of shape {here} here"
        elif here is None:
            how = f"it has a tensor {name}, of shape {there}, and this network has none"
        else:
            how = f"{name} has shape {there} there and {here} here"
        raise ConfigError(
            f"init_from={source} holds another network: {how}. Choose the model and model_options it was trained with"
        )
    for name in ours.keys() & theirs.keys():
        if ours[name].shape == theirs[name].shape:
            ours[name].copy_(theirs[name])
    loaded = f"{len(ours) - len(left)} of {len(ours)} tensors are loaded from {source}"
    rest = f"; its classifier has another shape, so these start from random values: {', '.join(left)}."
    return loaded + (rest if left else ".")
