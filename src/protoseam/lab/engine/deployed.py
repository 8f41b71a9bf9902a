"""A trained network in use: class names, the transform of training, probabilities and a score of unusual images.

Legend: B images, C classes, K width of the last layer's input.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protoseam.errors import DataError, ModelError
from protoseam.lab import models
from protoseam.lab.data.images import Problem, upright
from protoseam.lab.data.links import refuse_link
from protoseam.lab.data.samples import NOT_FINITE, find_samples, fit_image, read_image
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.embeddings import through_last_layer
from protoseam.lab.engine.evaluate import load_network
from protoseam.lab.engine.export import AS_IN_TRAINING
from protoseam.lab.engine.files import StorageError, read_json
from protoseam.lab.engine.rundata import data_of
from protoseam.lab.engine.schemas import ABOUT, ABOUT_WEIGHTS, check, check_normalised
from protoseam.lab.engine.seamfile import Seam, how_unusual, read_seam
from protoseam.lab.engine.settings import from_dict


@dataclass(frozen=True)
class Prediction:
    """One answer."""

    name: str
    label: str
    probability: float
    second: str
    second_probability: float
    unusual: float  # the score of `how_unusual`
    rank: float | None  # share of the run's test images with a smaller score; None where it is not known


class Deployed(nn.Module):
    """The plain network of a finished run, with its class names and the transform of its training.

    Args:
        network: takes normalised inputs, gives logits.
        classes: their names, in the order of the logits.
        shape: of a sample, (C, H, W) or (F,).
        mean: per channel or feature, of images from 0 to 1.
        std: the deviations beside them.
        seam: the Gaussians by which unusual images are told; None takes the logits.
        quantiles: of the test images' scores.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        shape: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        seam: Seam | None = None,
        quantiles: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.network, self.classes, self.shape = network, tuple(classes), tuple(shape)
        self.seam, self.quantiles = seam, quantiles
        form = (-1, *[1] * (len(self.shape) - 1))
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(form))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(form))
        self.eval()

    def transform(self, image: Any) -> Tensor:
        """One input of the network, ``(C, H, W)``, from an image of any size.

        Args:
            image: a path, the bytes of an image file, a Pillow image, or uint8 pixels (H, W) or (H, W, C). For a
                network on features: F numbers.

        Raises:
            DataError: if the image cannot be used.
        """
        if len(self.shape) == 1:
            row = np.asarray(image, dtype=np.float32)
            if not np.isfinite(row).all():
                raise DataError(f"this row {NOT_FINITE}")
            return self.normalised(row)
        try:
            if isinstance(image, str | Path):
                pixels = read_image(Path(image).expanduser().read_bytes(), self.shape)
            elif isinstance(image, bytes):
                pixels = read_image(image, self.shape)
            elif hasattr(image, "save"):  # of Pillow, in any mode
                upright(image).save(buffer := io.BytesIO(), "PNG")  # which would lose the tag
                pixels = read_image(buffer.getvalue(), self.shape)
            else:
                array = np.asarray(image)
                pixels = fit_image(array[..., None] if array.ndim == 2 else array, self.shape)
        except Problem as problem:
            raise DataError(f"this image {problem}") from problem
        return self.normalised(pixels)

    def normalised(self, sample: Any) -> Tensor:
        """Pixels (H, W, C) or features as the network takes them."""
        x = torch.from_numpy(np.array(sample))
        if len(self.shape) == 3:
            x = x.permute(2, 0, 1).float() / 255
        return (x - self.mean.cpu()) / self.std.cpu()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of normalised inputs, as `transform` gives them."""
        logits: Tensor = self.network(x)
        return logits

    def predict(self, images: Iterable[Any], *, batch_size: int = 64) -> list[Prediction]:
        """Answers for images of any kind that `transform` takes, or for paths as ``protoseam predict`` takes them.

        Raises:
            DataError: names the first image that cannot be used.
        """
        given = list(images)
        if all(isinstance(image, str | Path) for image in given):
            samples = list(find_samples(map(str, given), self.shape))
            if wrong := next(((n, s) for n, s in samples if isinstance(s, Problem)), None):
                raise DataError(f"{wrong[0]} {wrong[1]}")
            named = [(name, self.normalised(sample)) for name, sample in samples]
        else:
            named = [(str(i), self.transform(image)) for i, image in enumerate(given)]
        return list(self.answers(named, batch_size))

    def answers(self, named: Iterable[tuple[str, Tensor]], batch_size: int = 64) -> Iterator[Prediction]:
        """Answers for names and normalised inputs, as they come."""
        rest = iter(named)
        while batch := list(itertools.islice(rest, batch_size)):
            yield from self._answer(*zip(*batch, strict=True))

    @torch.no_grad()
    def _answer(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Prediction]:
        x = torch.stack(list(inputs)).to(self.mean.device)
        z_BK, logits_BC, _ = through_last_layer(self.network, len(self.classes), [(x, x)])
        top = logits_BC.double().softmax(1).topk(2, dim=1)
        score_B = how_unusual(z_BK, logits_BC, self.seam)
        rank_B: list[float | None] = [None] * len(x)
        if self.quantiles is not None and len(self.quantiles) > 1:
            below_B = torch.searchsorted(self.quantiles, score_B.cpu())
            rank_B = [n / len(self.quantiles) for n in below_B.tolist()]
        found = zip(names, top.indices.tolist(), top.values.tolist(), score_B.tolist(), rank_B, strict=True)
        return [
            Prediction(name, self.classes[first], p, self.classes[second], q, score, rank)
            for name, (first, second), (p, q), score, rank in found
        ]


def load(path: Path, *, device: str | torch.device = "cpu", trust: bool = False) -> Deployed:
    """The deployed network of the finished run in ``path``; its data need not be there any more.

    Args:
        path: the run's directory; or an export of it, a ``.onnx``, ``.pt2`` or ``.safetensors`` file or a hub folder.
        device: where the network goes; that of a ``.onnx`` or ``.pt2`` file stays on the CPU.
        trust: load a ``.pt2`` file, whose loader can run code: only one of your own.

    Raises:
        ConfigError: if there is no finished run, or the export cannot be used.
        StorageError: if a file is damaged.
        LinkError: if a file in a hub folder is a link.
    """
    if not path.is_dir() and path.suffix in (".pt2", ".onnx", ".safetensors"):
        return _from_file(path, trust).to(device)
    if os.path.lexists(path / "config.json") and not os.path.lexists(path / "config.yaml"):
        return _from_hub(path).to(device)
    data = data_of(path)
    network = load_network(path, data)
    seam, quantiles = read_seam(path, len(data.classes))
    mean, std = (torch.as_tensor(v).flatten().tolist() for v in (data.mean, data.std))
    return Deployed(network, data.classes, data.sample_shape, mean, std, seam, quantiles).to(device)


# ---------------------------------------------------------------------- exports
# A .pt2 or .onnx file is a program and normalises its inputs itself. A .safetensors file or a hub folder holds weights,
# so the network is built by its name, with the same limits as that of a run. Of a hub folder the weights are read,
# never the .pt2 file in it.


def _from_file(path: Path, trust: bool) -> Deployed:
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
    return Deployed(network, known["classes"], known["shape"], [0.0] * channels, [1.0] * channels)


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


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file ({str(error).splitlines()[0]})") from error


def _from_hub(folder: Path) -> Deployed:
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
        "model_options": _own_options(values.get("model_args", {})),
    }
    return _built(config, json.dumps(about), weights)


def _own_options(arguments: Any) -> Any:
    """The arguments of a network without those that its classes and inputs say; timm repeats them from 1.0.31 on."""
    if not isinstance(arguments, dict):
        return arguments
    return {name: value for name, value in arguments.items() if name not in ("num_classes", "in_chans")}


def _in_order(names: Any) -> list[Any] | None:
    """The class names of a table by their number, as text; None if a number is missing."""
    if not isinstance(names, dict) or set(names) != {str(i) for i in range(len(names))}:
        return None
    return [names[str(i)] for i in range(len(names))]


def _built(told: Path, about: str, weights: Path) -> Deployed:
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
    return Deployed(network, known["classes"], known["shape"], known["mean"], known["std"])


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
