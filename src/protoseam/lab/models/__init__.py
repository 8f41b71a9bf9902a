"""Networks of the paper's experiments: plain modules whose last Linear is the classifier and the output."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from protoseam.errors import ModelError
from protoseam.lab.models.resnet import ResNet, resnet8, resnet18
from protoseam.lab.models.size import refuse_too_large
from protoseam.lab.models.small import MLP, ConvNet, convnet, mlp
from protoseam.lab.models.vit import VisionTransformer, vit_s

__all__ = [
    "MLP",
    "NAMES",
    "ConvNet",
    "ResNet",
    "VisionTransformer",
    "build",
    "convnet",
    "mlp",
    "refuse_unfit",
    "resnet8",
    "resnet18",
    "vit_s",
]

Shape = tuple[int, ...]


def _refuse_table(name: str, shape: Shape) -> None:
    if len(shape) == 1 and name != "mlp":
        raise ModelError(
            f"{name} takes images, and the data is a table of {shape[0]} features: take --model mlp"
        )


def _side(name: str, shape: Shape) -> int:
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ModelError(
            f"{name} takes square images (channels, side, side), got image_shape={shape}; --image_size N crops them"
        )
    return shape[1]


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": lambda num_classes, shape, **options: resnet8(num_classes, shape[0], **options),
    "resnet18": lambda num_classes, shape, **options: resnet18(num_classes, shape[0], **options),
    "vit_s": lambda num_classes, shape, **options: vit_s(
        num_classes, _side("vit_s", shape), in_channels=shape[0], **options
    ),
    "convnet": lambda num_classes, shape, **options: convnet(
        num_classes, shape[0], _side("convnet", shape), **options
    ),
    "mlp": lambda num_classes, shape, **options: mlp(math.prod(shape), num_classes, **options),
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)
# Options of timm that read a file or foreign settings: a config must not be able to ask for that.
_LOADING = frozenset({"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"})

_FROM_DATA = frozenset({"num_classes", "in_chans"})


def _built(name: str, make: Callable[..., nn.Module], /, *args: Any, **options: Any) -> nn.Module:
    try:
        refuse_too_large(name, make, *args, **options)
        return make(*args, **options)
    except ModelError:
        raise
    # no such option, or it does not fit
    except (
        TypeError,
        ValueError,
        AssertionError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
        OSError,
    ) as error:
        if options.get("pretrained"):  # whatever a download raises
            raise ModelError(
                f"the pretrained weights of {name} cannot be loaded ({str(error).splitlines()[0]:.300}): check the "
                "connection, or leave pretrained out of model_options"
            ) from error
        raise ModelError(f"{name} cannot be built ({error}): correct model_options or the data") from error


def _refuse_other_size(name: str, network: nn.Module, shape: Shape) -> None:
    """Raise if a network of timm splits images of one size into patches, and the data has another."""
    patches = getattr(network, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size and getattr(patches, "strict_img_size", True) and len(shape) == 3 and tuple(size) != shape[1:]:
        taken, given = ("×".join(map(str, sides)) for sides in (size, shape[1:]))
        option = shape[1] if shape[1] == shape[2] else list(shape[1:])
        raise ModelError(
            f"{name} takes images of {taken} pixels, and the data has {given}: give --image_size {size[0]}, or "
            f"--model_options '{{\"img_size\": {option}}}'"
        )


def refuse_unfit(name: str, network: nn.Module, shape: Shape) -> None:
    """Raise if a network cannot answer an image of this shape, as one that halves it more often than it can.

    To be called for a network that is to be trained: a file from elsewhere can name a shape that fills the memory.
    """
    network.eval()
    try:
        with torch.no_grad():
            network(torch.zeros(1, *shape))
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        raise ModelError(
            f"{name} cannot take images of {shape[1]}×{shape[2]} pixels ({str(error).splitlines()[0]}): give a larger "
            "--image_size, or another network"
        ) from error
    network.train()


def build(name: str, num_classes: int, image_shape: Sequence[int], /, **options: Any) -> nn.Module:
    """Return the network called `name` for images of `image_shape` = (channels, height, width).

    `name` is one of `NAMES`, or any name timm knows where timm is installed; `options` go to that
    network's own function. `mlp` takes any shape and flattens it.
    """
    shape = tuple(image_shape)
    if refused := _LOADING.intersection(options):
        raise ModelError(
            f"{name}: the option {min(refused)} would load files or settings from elsewhere; leave it out, or load "
            "weights in your own code and give ps.lift the network"
        )
    if given := _FROM_DATA.intersection(options):
        raise ModelError(
            f"{name}: the option {min(given)} follows from the data ({num_classes} classes, {shape[0]} channels or "
            "features): leave it out of model_options"
        )
    if name in _BUILDERS:
        _refuse_table(name, shape)
        return _built(name, _BUILDERS[name], num_classes, shape, **options)
    known, where = list(NAMES), ""
    try:
        timm = importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not match torch
        remedy = "torch and torchvision are of different builds, install both from one place"
        if isinstance(error, ImportError):
            remedy = "pip install -e '.[vision]' in the clone"
        where = f"; timm, which would add its own, cannot be imported ({error}): {remedy}"
    else:
        if timm.is_model(name):
            _refuse_table(name, shape)
            network = _built(
                name, timm.create_model, name, num_classes=num_classes, in_chans=shape[0], **options
            )
            _refuse_other_size(name, network, shape)
            return network
        known += timm.list_models()
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"choose one of {', '.join(NAMES)}"
    raise ModelError(f"no network is called {name!r}: {hint}{where}")
