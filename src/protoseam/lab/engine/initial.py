"""Start from a trained network: that of a finished run, or a safetensors file of a model's state.

Everything is loaded except a classifier of another shape, so that a trained network can learn other classes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from protoseam.lab.engine.config import ConfigError


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

    def free(name: str) -> bool:
        return prefix is not None and name.startswith(prefix)

    for name, t in ours.items():
        if free(name):
            continue
        if name not in theirs:
            raise _differs(source, f"it has no tensor {name}, of shape {tuple(t.shape)} here")
        if theirs[name].shape != t.shape:
            raise _differs(
                source, f"{name} has shape {tuple(theirs[name].shape)} there and {tuple(t.shape)} here"
            )
    for name, t in theirs.items():
        if name not in ours and not free(name):
            raise _differs(
                source, f"it has a tensor {name}, of shape {tuple(t.shape)}, and this network has none"
            )
    left = []
    for name, t in ours.items():
        if name in theirs and theirs[name].shape == t.shape:
            t.copy_(theirs[name])
        else:
            left.append(f"{name} {tuple(t.shape)}")
    loaded = f"{len(ours) - len(left)} of {len(ours)} tensors are loaded from {source}"
    if not left:
        return f"{loaded}."
    return (
        f"{loaded}; its classifier has another shape, so these start from random values: {', '.join(left)}."
    )


def _differs(source: Path, how: str) -> ConfigError:
    return ConfigError(
        f"init_from={source} holds another network: {how}. Choose the model and model_options it was trained with"
    )
