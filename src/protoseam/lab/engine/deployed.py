"""A trained network in use: class names, the transform of training, probabilities and a score of unusual images.

Legend: B images, C classes, K width of the last layer's input.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protoseam.errors import DataError
from protoseam.lab.data.images import Problem
from protoseam.lab.data.samples import find_samples, fit_image, read_image
from protoseam.lab.engine.embeddings import through_last_layer
from protoseam.lab.engine.evaluate import load_network
from protoseam.lab.engine.exported import is_exported, read_exported
from protoseam.lab.engine.rundata import data_of
from protoseam.lab.engine.seamfile import Seam, how_unusual, read_seam


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
            return self.normalised(np.asarray(image, dtype=np.float32))
        try:
            if isinstance(image, str | Path):
                pixels = read_image(Path(image).expanduser().read_bytes(), self.shape)
            elif isinstance(image, bytes):
                pixels = read_image(image, self.shape)
            elif hasattr(image, "save"):  # of Pillow, in any mode
                image.save(buffer := io.BytesIO(), "PNG")
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

    @torch.no_grad()
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
        parts = [named[lo : lo + batch_size] for lo in range(0, len(named), batch_size)]
        return [found for part in parts for found in self.answer(*zip(*part, strict=True))]

    @torch.no_grad()
    def answer(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[Prediction]:
        """Answers for one batch of normalised inputs."""
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
    if is_exported(path):
        return Deployed(*read_exported(path, trust=trust)).to(device)
    data = data_of(path)
    network = load_network(path, data)
    seam, quantiles = read_seam(path, len(data.classes))
    mean, std = (torch.as_tensor(v).flatten().tolist() for v in (data.mean, data.std))
    return Deployed(network, data.classes, data.sample_shape, mean, std, seam, quantiles).to(device)
