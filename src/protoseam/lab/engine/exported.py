"""The network in what ``protoseam export`` writes: a ``.pt2``, ``.onnx`` or ``.safetensors`` file, or a hub folder.

The first two are programs and normalise their inputs themselves. The last two hold weights, so the network is built by
its name, with the same limits as that of a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.errors import ModelError
from protoseam.lab import models
from protoseam.lab.data.links import refuse_link
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.export import AS_IN_TRAINING
from protoseam.lab.engine.files import StorageError, read_json
from protoseam.lab.engine.schemas import ABOUT, ABOUT_WEIGHTS, check, check_normalised
from protoseam.lab.engine.settings import from_dict

# A network, its classes, the shape of a sample, and the mean and deviation of inputs per channel or feature.
Exported = tuple[nn.Module, list[str], list[int], list[float], list[float]]


def is_exported(path: Path) -> bool:
    """Whether the path names an exported file or a hub folder, rather than a run's directory."""
    if path.is_dir():
        return os.path.lexists(path / "config.json") and not os.path.lexists(path / "config.yaml")
    return path.suffix in (".pt2", ".onnx", ".safetensors")


def read_exported(path: Path, *, trust: bool = False) -> Exported:
    """Read an exported file or a hub folder.

    Args:
        path: one for which `is_exported` holds.
        trust: load a ``.pt2`` file, whose loader can run code. Of a hub folder the weights are read, never the
            ``.pt2`` file in it.

    Raises:
        ConfigError: if it cannot be used, or a package is missing.
        LinkError: if a file in a hub folder is a link.
    """
    if path.is_dir():
        return _from_hub(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        with _opened(path) as file:
            about = (file.metadata() or {}).get("about", "{}")
        return _built(path, about, path)
    if path.suffix == ".onnx":
        network, about = _from_onnx(path)
    elif trust:
        network, about = _from_pt2(path)
    else:
        raise ConfigError(
            f"{path}: PyTorch's loader of .pt2 files can run code that a file holds. If the file is your own, say "
            "--trust (in Python trust=True); or name the run's directory, or an .onnx or .safetensors file"
        )
    try:
        known = check(path, json.loads(about), ABOUT)
    except (ValueError, RecursionError, StorageError) as error:
        raise ConfigError(
            f"{path} does not say what it takes and gives: export the run again ({error})"
        ) from error
    channels = known["shape"][0]
    return network, known["classes"], known["shape"], [0.0] * channels, [1.0] * channels


# ---------------------------------------------------------------------- programs


class _Foreign(nn.Module):
    """A network of another maker's; not a child, because a program of torch.export refuses train() and eval()."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = (call,)

    def forward(self, x: Tensor) -> Tensor:
        return self.call[0](x.cpu())


def _from_pt2(path: Path) -> tuple[nn.Module, str]:
    extra = {"about.json": ""}
    try:
        module = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # whatever a damaged archive makes torch raise
        raise ConfigError(f"{path} is no program of torch.export ({str(error).splitlines()[0]})") from error
    return _Foreign(module), extra["about.json"]


def _from_onnx(path: Path) -> tuple[nn.Module, str]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError("ONNX needs onnxruntime: pip install 'protoseam[onnx]'") from error
    content = path.read_bytes()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has errors of its own
        raise ConfigError(f"{path} is no ONNX model ({str(error).splitlines()[0]})") from error

    def call(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"inputs": x.numpy()})[0])

    return _Foreign(call), session.get_modelmeta().custom_metadata_map.get("about", "{}")


# ---------------------------------------------------------------------- weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file ({str(error).splitlines()[0]})") from error


def _from_hub(folder: Path) -> Exported:
    config, weights = folder / "config.json", folder / "model.safetensors"
    for file in (config, weights):
        refuse_link(file)
    values = read_json(config)
    if not weights.is_file():
        raise ConfigError(f"{folder} has no model.safetensors: give the run's directory, or export it again")
    # timm's own config has the normalisation in a table of its own, the plain one beside the rest
    by_timm = values.get("pretrained_cfg")
    inputs = by_timm if isinstance(by_timm, dict) else values
    for name, needed in AS_IN_TRAINING.items():
        if inputs is by_timm and inputs.get(name) != needed:
            raise ConfigError(
                f"{config}: {name} is {inputs.get(name)!r:.80}, and ProtoSeam brings images to size with {needed!r}: "
                "load this folder with timm"
            )
    about = {
        "classes": values.get("label_names") if inputs is by_timm else _in_order(values.get("id2label")),
        "shape": inputs.get("input_size"),
        "mean": inputs.get("mean"),
        "std": inputs.get("std"),
        "model": values.get("architecture"),
        "model_options": values.get("model_args", {}),
    }
    return _built(config, json.dumps(about), weights)


def _in_order(names: Any) -> list[Any] | None:
    """The class names of a table by their number, as text; None if a number is missing."""
    if not isinstance(names, dict) or set(names) != {str(i) for i in range(len(names))}:
        return None
    return [names[str(i)] for i in range(len(names))]


def _built(told: Path, about: str, weights: Path) -> Exported:
    """The network that the file ``told`` describes in JSON, with the weights of another file or the same."""
    try:
        known = check_normalised(told, json.loads(about), ABOUT_WEIGHTS)
    except (ValueError, RecursionError, StorageError) as error:
        raise ConfigError(
            f"{told} does not say which network it holds, or what it takes and gives: give the run's directory, or "
            f"export it again ({error})"
        ) from error
    try:
        # gated as a run's own settings are; pretrained weights would be fetched and then replaced
        config = from_dict({"model": known["model"], "model_options": known["model_options"]})
        options = {name: value for name, value in config.model_options.items() if name != "pretrained"}
        network = models.build(config.model, len(known["classes"]), tuple(known["shape"]), **options)
    except (ConfigError, ModelError) as error:
        raise ConfigError(
            f"{told}: its network cannot be built ({error}). Give an export of the run to .onnx instead"
        ) from error
    _load_weights(network, weights)
    return network, known["classes"], known["shape"], known["mean"], known["std"]


def _load_weights(network: nn.Module, path: Path) -> None:
    """Load the file if its tensors are the network's by name and shape; otherwise none of them is read."""
    needed = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    with _opened(path) as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name in sorted(needed.keys() | held.keys()):
            if needed.get(name) != held.get(name):
                raise ConfigError(
                    f"{path} does not fit its network: {name!r:.80} has shape {held.get(name, 'none')}, and "
                    f"{needed.get(name, 'no such tensor')} is needed: export the run again"
                )
        network.load_state_dict({name: file.get_tensor(name) for name in needed})
