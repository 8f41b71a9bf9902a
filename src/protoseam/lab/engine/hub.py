"""A folder for a model hub: config, weights and a model card, loaded without this library.

A timm network gets timm's own ``config.json``: ``timm.create_model("local-dir:FOLDER", pretrained=True)``. Any other
network comes as a program of torch.export beside its weights.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from protoseam.lab.engine.config import RunConfig
from protoseam.lab.engine.export import About, pt2_bytes, safetensors_bytes
from protoseam.lab.engine.rundir import RunDirectory

_TIMM_USE = """\
import timm, torch
from timm.data import create_transform, resolve_model_data_config

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:USER/NAME
transform = create_transform(**resolve_model_data_config(model))
logits = model(transform(image)[None])"""

_TORCH_USE = """\
import torch

model = torch.export.load("FOLDER/model.pt2").module()
logits = model(inputs)  # float32 {input}, shape (N, {shape}); the file normalises them"""


def hub_files(run: Path, network: nn.Module, about: About) -> dict[str, bytes]:
    """The files of the folder by name: ``config.json``, ``model.safetensors``, ``README.md`` and perhaps ``model.pt2``.

    Args:
        run: the finished run's directory, for the card.
        network: its plain network, folded.
        about: what the network takes and gives.
    """
    config = RunDirectory(run).read_config()
    by_timm = hasattr(network, "pretrained_cfg")
    card = _card(run, config, about, "timm" if by_timm else "pytorch").encode()
    if by_timm:
        return {"README.md": card, **_timm_files(network, about)}
    return {
        "README.md": card,
        "config.json": _plain_config(about),
        "model.safetensors": safetensors_bytes(network, about),
        "model.pt2": pt2_bytes(network, about),
    }


def _timm_files(network: Any, about: About) -> dict[str, bytes]:
    """What ``timm.models.save_for_hf`` writes for this network, its classes and its normalisation."""
    from timm.models import save_for_hf

    kept = ("architecture", "classifier", "fixed_input_size", "pool_size", "first_conv")
    network.pretrained_cfg = {
        **{name: network.pretrained_cfg[name] for name in kept if name in network.pretrained_cfg},
        "num_classes": len(about.classes),
        "input_size": tuple(about.shape),
        "mean": tuple(about.mean),
        "std": tuple(about.std),
        "interpolation": "bilinear",  # as the lab resizes images
        "crop_pct": 1.0,
        "crop_mode": "center",
    }
    if about.shape[0] != 3:  # timm would convert the first convolution from three channels once more
        network.pretrained_cfg.pop("first_conv", None)
    with tempfile.TemporaryDirectory() as folder:
        labels = {"num_classes": len(about.classes), "label_names": about.classes}
        save_for_hf(
            network, folder, model_config=labels, model_args=about.model_options, safe_serialization=True
        )
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _plain_config(about: About) -> bytes:
    labels = {str(i): name for i, name in enumerate(about.classes)}
    values = {
        "architecture": about.model,
        "model_args": about.model_options,
        "num_classes": len(about.classes),
        "id2label": labels,
        "label2id": {name: int(i) for i, name in labels.items()},
        "input": about.input,
        "input_size": about.shape,
        "mean": about.mean,
        "std": about.std,
        **({"resized": about.resized} if about.resized else {}),
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def _card(run: Path, config: RunConfig, about: About, library: str) -> str:
    """The model card: what it is, how to load it, and where its numbers come from."""
    directory = RunDirectory(run)
    summary, environment = directory.read_summary() or {}, directory.read_environment()
    images = len(about.shape) == 3
    data = Path(config.data).name
    use = _TIMM_USE if library == "timm" else _TORCH_USE
    use = use.format(input=about.input, shape=", ".join(map(str, about.shape)))
    figures = {
        "Test accuracy": _percent(summary.get("test_accuracy")),
        "Validation accuracy, after the last epoch": _percent(summary.get("validation_accuracy")),
        "Parameters in training": f"{summary['parameters']:,}" if "parameters" in summary else "not recorded",
        "Epochs": summary.get("epochs", "not recorded"),
        "Seed": config.seed,
        "ProtoSeam": environment.get("protoseam", "not recorded"),
        "Commit": environment.get("commit") or "not recorded",
        "PyTorch": environment.get("torch", "not recorded"),
        "Device": environment.get("device", "not recorded"),
    }
    resized = f" Images were resized first: {about.resized}." if about.resized else ""
    lines = [
        "---",
        f"library_name: {library}",
        f"tags: [{'image' if images else 'tabular'}-classification, protoseam]",
        f"pipeline_tag: {'image' if images else 'tabular'}-classification",
        "---",
        "",
        f"# {config.model}, trained on {data}",
        "",
        f"A classifier of {len(about.classes)} classes, the variant `{config.variant}` of ProtoSeam's training. The "
        "network itself is plain PyTorch and does not need ProtoSeam.",
        "",
        "## Use",
        "",
        "```python",
        use,
        "```",
        "",
        f"Inputs are float32 {about.input}, normalised by mean {_listed(about.mean)} and standard deviation "
        f"{_listed(about.std)}.{resized}",
        "",
        "## Training and results",
        "",
        "The test data was used once, after the last epoch.",
        "",
        "| | |",
        "|---|---|",
        *[f"| {name} | {value} |" for name, value in figures.items()],
        "",
        "## Classes",
        "",
        ", ".join(f"{i}: {name}" for i, name in enumerate(about.classes)),
        "",
    ]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


def _listed(values: list[float], most: int = 8) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:most])
    return f"({shown}{', … in config.json' if len(values) > most else ''})"
