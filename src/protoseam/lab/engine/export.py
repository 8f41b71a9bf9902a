"""A finished run's network as one file that needs this library no more: normalisation, N1 and N2 by torch.export."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.evaluate import load_network
from protoseam.lab.engine.files import explain_os_error, write_atomically
from protoseam.lab.engine.rundata import RunData, load_again
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.pipeline.resident import Resident

__all__ = ["export"]

SUFFIX = ".pt2"


class _FromInputs(nn.Module):
    """The network on inputs as a user has them: images from 0 to 1, or features as they are."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, about: RunData | Resident) -> None:
        super().__init__()
        self.network = network
        shape = (-1, *[1] * (len(about.sample_shape) - 1))  # a channel each, or a feature
        self.register_buffer("mean", torch.as_tensor(about.mean).view(shape))
        self.register_buffer("std", torch.as_tensor(about.std).view(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.network((inputs - self.mean) / self.std)
        return logits


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write the deployed network of ``run`` into ``out``; returns what it takes and gives, as the file does."""
    if out.suffix != SUFFIX:
        raise ConfigError(
            f"{out} must end in {SUFFIX}, a program of torch.export. For ONNX go on from there: "
            "torch.onnx.export(torch.export.load(FILE), f='net.onnx')"
        )
    about = RunData.read(run) or load_again(
        run, RunDirectory(run).read_config()
    )  # the data itself may be gone
    network = load_network(run, about)
    example = torch.rand(2, *about.sample_shape)
    program = torch.export.export(
        _FromInputs(network, about).eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    told = {
        "input": "features" if len(about.sample_shape) == 1 else "images from 0 to 1",
        "shape": list(about.sample_shape),
        "classes": list(about.classes),
    }
    if isinstance(about, RunData) and about.image_size is not None:
        told["resized"] = f"shorter side to {about.image_size} pixels, centre cropped"
    with explain_os_error("the network", out.parent, going_on=""):
        out.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={"about.json": json.dumps(told)})
        write_atomically(out, buffer.getvalue())
    return told
