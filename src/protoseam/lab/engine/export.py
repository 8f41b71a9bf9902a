"""A finished run's network in files that need this library no more.

Each format holds the plain network with the two Linears around the seam folded into one. ``pt2`` (torch.export) and
``onnx`` normalise their inputs themselves; ``safetensors`` and a hub folder say how to. A hub folder has config,
weights and a model card: timm's own ``config.json`` for a timm network (``timm.create_model("local-dir:FOLDER",
pretrained=True)``), and for any other a program of torch.export beside its weights.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from protoseam.lab.data.links import refuse_link
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.evaluate import load_network
from protoseam.lab.engine.files import explain_os_error, write_atomically
from protoseam.lab.engine.rundata import RunData, data_of
from protoseam.lab.engine.rundir import WRITTEN, RunDirectory

Format = Literal["pt2", "onnx", "safetensors", "hub"]
_ONNX_TOLERANCE = 1e-3  # of the largest logit: other kernels add up in another order
AS_IN_TRAINING = {
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "crop_mode": "center",
}  # how the lab resizes images

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

_CARD = """\
---
library_name: {library}
tags: [{kind}-classification, protoseam]
pipeline_tag: {kind}-classification
---

# {model}, trained on {data}

A classifier of {count} classes, the variant `{variant}` of ProtoSeam's training. The network itself is plain PyTorch \
and does not need ProtoSeam.

## Use

```python
{use}
```

Inputs are float32 {input}, normalised by mean {mean} and standard deviation {std}.{resized}

## Training and results

The test data was used once, after the last epoch.

| | |
|---|---|
{figures}

## Classes

{classes}
"""


@dataclass(frozen=True)
class About:
    """What an exported network takes and gives; each format carries it as JSON."""

    input: str
    shape: list[int]  # of one sample
    mean: list[float]  # per channel of an image, or per feature
    std: list[float]
    classes: list[str]
    model: str  # the network's name and options in the run's config, by which this library builds it again
    model_options: dict[str, Any]
    resized: str | None = None  # what to do to images first, if the run's data was resized

    def json(self) -> str:
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v is not None})


class _FromInputs(nn.Module):
    """The network on inputs as a user has them: images from 0 to 1, or features as they are."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, about: About) -> None:
        super().__init__()
        self.network = network
        shape = (-1, *[1] * (len(about.shape) - 1))  # one value per channel or per feature
        self.register_buffer("mean", torch.tensor(about.mean).view(shape))
        self.register_buffer("std", torch.tensor(about.std).view(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network((inputs - self.mean) / self.std)
        return logits


def export(run: Path, out: Path | None = None, to: Format | None = None) -> tuple[Path, Format, About]:
    """Write the deployed network of a finished run.

    Args:
        run: the run's directory.
        out: the file, or for ``hub`` the folder; ``net.FORMAT`` or ``hub`` in the run's directory unless given.
        to: ``pt2``, ``onnx``, ``safetensors`` or ``hub``; what the suffix of ``out`` says unless given, else ``pt2``.

    Returns:
        Where it lies, in which format, and what it takes and gives.

    Raises:
        ConfigError: if the run is not finished, the suffix does not fit the format, or a package is missing.
        LinkError: if the hub folder is a link inside the run's directory.
    """
    out, to = _place(run, out, to)
    if to == "hub" and run in out.parents:
        refuse_link(out)  # the run may come from someone else
    network, about = _read(run)
    if to == "hub":
        folder, files = out, hub_files(run, network, about)
    else:
        write = {"pt2": pt2_bytes, "onnx": onnx_bytes, "safetensors": safetensors_bytes}[to]
        folder, files = out.parent, {out.name: write(network, about)}
    _refuse_to_overwrite(folder, files)
    with explain_os_error("the network", folder, going_on=""):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return out, to, about


def _refuse_to_overwrite(folder: Path, files: Collection[str]) -> None:
    """Refuse to replace a run's own files, without which it is lost, or a README.md that no export has written."""
    if (folder / "config.yaml").exists() and (own := WRITTEN.intersection(files)):
        raise ConfigError(
            f"{folder / min(own)} is a file of the run itself: choose another name or folder, or leave OUT out"
        )
    card = folder / "README.md"
    if card.name in files and card.is_file() and b"-classification, protoseam]" not in card.read_bytes():
        raise ConfigError(f"{card} is not of an earlier export: move it away, or choose another folder")


def _place(run: Path, out: Path | None, to: Format | None) -> tuple[Path, Format]:
    """The file or folder and its format, each from the other where only one is given."""
    if out is None:
        to = to or "pt2"
        return run / ("hub" if to == "hub" else f"net.{to}"), to
    named: dict[str, Format] = {".pt2": "pt2", ".onnx": "onnx", ".safetensors": "safetensors"}
    if to is None and out.suffix not in named:
        raise ConfigError(f"{out} must end in .pt2, .onnx or .safetensors; for a folder say --to hub")
    if to not in (None, "hub", named.get(out.suffix)):
        raise ConfigError(f"--to {to} writes a file that ends in .{to}, got {out}: name it {out.stem}.{to}")
    return out, to or named[out.suffix]


def _read(run: Path) -> tuple[nn.Module, About]:
    config = RunDirectory(run).read_config()
    data = data_of(run)
    size = data.image_size if isinstance(data, RunData) else None
    about = About(
        input="features" if len(data.sample_shape) == 1 else "images from 0 to 1",
        shape=list(data.sample_shape),
        mean=torch.as_tensor(data.mean).flatten().tolist(),
        std=torch.as_tensor(data.std).flatten().tolist(),
        classes=list(data.classes),
        model=config.model,
        model_options={name: value for name, value in config.model_options.items() if name != "pretrained"},
        resized=None if size is None else f"shorter side to {size} pixels, centre cropped",
    )
    return load_network(run, data, fold=True), about


def _program(network: nn.Module, about: About) -> torch.export.ExportedProgram:
    example = torch.rand(2, *about.shape)
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        _FromInputs(network, about).eval(), (example,), dynamic_shapes=({0: batch},)
    )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the source files of this machine
    return program


def pt2_bytes(network: nn.Module, about: About) -> bytes:
    """A program of torch.export: ``torch.export.load(FILE).module()(inputs)``."""
    buffer = io.BytesIO()
    torch.export.save(_program(network, about), buffer, extra_files={"about.json": about.json()})
    return buffer.getvalue()


def safetensors_bytes(network: nn.Module, about: About) -> bytes:
    """The weights by the names of the plain architecture; what else is to know is in the metadata."""
    from safetensors.torch import save

    # a copy each: safetensors refuses tensors that share their memory
    weights = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
    return save(weights, metadata={"format": "pt", "about": about.json()})


def onnx_bytes(network: nn.Module, about: About) -> bytes:
    """An ONNX model with a dynamic batch, whose logits onnxruntime computes as PyTorch does.

    Raises:
        ConfigError: if a package is missing, or the two give different logits.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}: pip install 'protoseam[onnx]'") from error
    program = _program(network, about)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13's own, of its own treespec
        exported = torch.onnx.export(
            program, input_names=["inputs"], output_names=["logits"], dynamo=True, verbose=False
        )
    assert exported is not None
    exported.model.metadata_props.update({"about": about.json(), "classes": json.dumps(about.classes)})
    content: bytes = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        inputs = torch.rand(batch, *about.shape, generator=torch.Generator().manual_seed(batch))
        expected = program.module()(inputs).detach()
        found = torch.from_numpy(session.run(["logits"], {"inputs": inputs.numpy()})[0])
        gap = float((found - expected).abs().max())
        if not gap <= _ONNX_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ConfigError(
                f"onnxruntime {onnxruntime.__version__} gives logits that differ by {gap:.2g} from PyTorch's on "
                f"{batch} inputs: export to pt2, or try another version of onnxruntime"
            )
    return content


# ---------------------------------------------------------------------- a folder for a hub


def hub_files(run: Path, network: Any, about: About) -> dict[str, bytes]:
    """The files by name: ``config.json``, ``model.safetensors``, ``README.md`` and perhaps ``model.pt2``."""
    by_timm = hasattr(network, "pretrained_cfg")
    card = {"README.md": _card(run, about, by_timm).encode()}
    if by_timm:
        return card | _timm_files(network, about)
    weights, program = safetensors_bytes(network, about), pt2_bytes(network, about)
    return card | {"config.json": _plain_config(about), "model.safetensors": weights, "model.pt2": program}


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
        **AS_IN_TRAINING,
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


def _card(run: Path, about: About, by_timm: bool) -> str:
    """The model card: what it is, how to load it, and where its numbers come from."""
    directory = RunDirectory(run)
    config, environment = directory.read_config(), directory.read_environment()
    summary = directory.read_summary() or {}
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
    use = _TIMM_USE if by_timm else _TORCH_USE
    return _CARD.format(
        library="timm" if by_timm else "pytorch",
        kind="image" if len(about.shape) == 3 else "tabular",
        model=config.model,
        data=Path(config.data).name,
        count=len(about.classes),
        variant=config.variant,
        use=use.format(input=about.input, shape=", ".join(map(str, about.shape))),
        input=about.input,
        mean=_listed(about.mean),
        std=_listed(about.std),
        resized=f" Images were resized first: {about.resized}." if about.resized else "",
        figures="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        classes=", ".join(f"{i}: {name}" for i, name in enumerate(about.classes)),
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


def _listed(values: list[float], most: int = 8) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:most])
    return f"({shown}{', … in config.json' if len(values) > most else ''})"
