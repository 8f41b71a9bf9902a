"""What a run keeps for its page: the latent space at some epochs, the answers on the test data, and thumbnails.

``latents.safetensors`` holds it. During training the file grows to at most 8 MiB, written with the checkpoints. At the
end it is reduced to six directions, which are fitted once, on the last epoch, and answers and thumbnails are added.
Looking changes nothing of the run: no random number is drawn and no weight is touched. Test images are embedded without
their labels until training has ended.

Legend: E kept epochs, N points of the picture, A test images with an answer, C classes, K width of the last layer's
input, D directions kept.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from protoseam.core.covariance import class_moments
from protoseam.lab.engine.embeddings import spectrum, through_last_layer
from protoseam.lab.engine.epoch import audit
from protoseam.lab.engine.files import StorageError, explain_os_error, write_atomically
from protoseam.lab.engine.schemas import BOUND, LATENTS, check, read_tensors
from protoseam.lab.engine.seamfile import Seam, how_unusual
from protoseam.lab.engine.thumbnails import chosen_rows, contact_sheet

if TYPE_CHECKING:
    from protoseam.lab.engine.run import Run

FILE = "latents.safetensors"
MOST_BYTES = 8 * 2**20  # of the frames, before they are reduced
MOST_FRAMES, POINTS, MOST_ANSWERS, DIRECTIONS = 24, 800, 100_000, 6
_WIDEST = 64  # features beyond it are kept along so many random orthogonal directions
_MOST_FILE = 64 * 2**20
_LARGEST = 60_000.0  # what float16 holds


# The latent space after one epoch, by these names: points (N, D) float16; with a seam its prototypes (C, D) float32 and
# the roots of Σ̃ (C, D, D) float16, and where it is a plane the weight and bias of N2 (C, 3).
Frame = dict[str, Tensor]
_FRAME = ("z", "prototypes", "roots", "head")


class Latents:
    """The frames of a run so far; ``epochs`` is the length of the run."""

    def __init__(self, epochs: int) -> None:
        # closer together at the beginning, where most happens
        share = torch.linspace(0, 1, min(MOST_FRAMES, epochs), dtype=torch.float64) ** 1.5
        self.wanted = {1 + round(float(s) * (epochs - 1)) for s in share} | {epochs}
        self.frames: dict[int, Frame] = {}
        self.rest: dict[str, Tensor] = {}  # what the end adds
        self.about: dict[str, Any] = {}
        self.complete = False  # the file has all there is

    def add(self, epoch: int, z_NK: Tensor, head: nn.Linear | None, seam: Seam | None) -> None:
        """Keep the embeddings of the picture's points after ``epoch``, and thin out where the frames grow too large."""
        K = z_NK.shape[1]
        axes_KD = _narrowed(K)
        frame = self.frames[epoch] = {"z": _half(z_NK.double() @ axes_KD)}
        if seam is not None:
            frame["prototypes"] = (seam.prototypes.double().cpu() @ axes_KD).float()
            frame["roots"] = _half(_roots_along(seam.roots(), axes_KD))
            if head is not None and K == 2:
                bias = torch.zeros(len(head.weight)) if head.bias is None else head.bias
                parts = [t.detach().float().cpu() for t in (head.weight, bias[:, None])]
                frame["head"] = torch.cat(parts, 1)
        while len(self.frames) > 2 and self._bytes() > MOST_BYTES:
            for between in sorted(self.frames)[1:-1:2]:
                del self.frames[between]

    def _bytes(self) -> int:
        return sum(t.nbytes for frame in self.frames.values() for t in frame.values())

    def forget_after(self, epoch: int) -> None:
        """Drop the frames of epochs that are about to be run again."""
        self.frames = {e: frame for e, frame in self.frames.items() if e <= epoch}

    def reduce(self) -> None:
        """Turn all frames into the directions in which the last one's points vary most; ``share`` says how much."""
        z_ND = self.frames[max(self.frames)]["z"].double()
        values, vectors = spectrum(z_ND)
        keep = min(DIRECTIONS, len(values))
        axes_DP, centre_D = vectors.flip(1)[:, :keep], z_ND.mean(0)
        if len(values) == 2:  # a plane is shown as it is
            axes_DP, centre_D = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
            values = z_ND.var(0, correction=min(1, len(z_ND) - 1)).flip(0)
        total = float(values.sum())
        self.rest["share"] = (values.flip(0)[:keep] / (total if total > 0 else 1.0)).float()
        for frame in self.frames.values():
            frame["z"] = _half((frame["z"].double() - centre_D) @ axes_DP)
            if "prototypes" in frame:
                frame["prototypes"] = ((frame["prototypes"].double() - centre_D) @ axes_DP).float()
            if "roots" in frame:
                frame["roots"] = _half(_roots_along(frame["roots"].double(), axes_DP))

    # ------------------------------------------------------------------ the file

    def tensors(self) -> dict[str, Tensor]:
        """Everything by the names that the file has."""
        found = dict(self.rest)
        if self.frames:
            epochs = sorted(self.frames)
            found["epochs"] = torch.tensor(epochs, dtype=torch.int32)
            for name in _FRAME:
                if all(name in frame for frame in self.frames.values()):
                    found[name] = torch.stack([self.frames[e][name] for e in epochs]).contiguous()
        return found

    def write(self, run: Path) -> None:
        from safetensors.torch import save

        if self.complete or not (self.frames or self.rest):
            return
        with explain_os_error("what the page needs", run):
            write_atomically(run / FILE, save(self.tensors(), {"about": json.dumps(self.about)}))

    @classmethod
    def resumed(cls, run: Path, epochs: int, epoch: int) -> Latents:
        """The frames up to ``epoch`` that are on disk; a damaged file is named and costs the picture, not the run."""
        latents = cls(epochs)
        try:
            found, _ = read_file(run) or ({}, {})
        except StorageError as error:
            warnings.warn(f"{error}. The run goes on; its page starts at epoch {epoch}", stacklevel=3)
            return latents
        latents.complete = "share" in found and epoch == epochs  # cut off between this file and the summary
        latents.rest = found if latents.complete else {}
        for i, kept in enumerate(found["epochs"].tolist() if "epochs" in found else []):
            if kept <= epoch and "share" not in found:
                latents.frames[kept] = {name: found[name][i] for name in _FRAME if name in found}
        return latents


def read_file(run: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and numbers of ``latents.safetensors``; None where there is no such file.

    Raises:
        StorageError: if the file is damaged, or is not what this module writes.
    """
    found = read_tensors(run / FILE, LATENTS, _MOST_FILE)
    return found and (found[0], check(run / FILE, found[1], BOUND))


# ---------------------------------------------------------------------- of a run of the engine


class LatentsWarning(UserWarning):
    """The page of a run lacks something; the run itself is not touched."""


@contextmanager
def _leaving_the_run_alone() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, MemoryError, ImportError) as error:  # a look must not end a run
        warnings.warn(
            f"the page will lack a part: {str(error).splitlines()[0]}", LatentsWarning, stacklevel=4
        )


@torch.no_grad()
def look(run: Run, latents: Latents) -> None:
    """Keep the latent space after the epoch that just ended, if it is one of those to be kept."""
    rows = evenly(len(run.data.test[1]), POINTS).to(run.device)
    if run.epoch not in latents.wanted or not len(rows):
        return
    with _leaving_the_run_alone():
        batches = run.data.batches("test", rows)
        z_NK, _, last = through_last_layer(run.deployed(), run.data.num_classes, batches)
        if z_NK is not None:
            latents.add(run.epoch, z_NK, last, Seam.of(run.objective.seam))


@torch.no_grad()
def finish(run: Run, latents: Latents, history: list[dict[str, Any]]) -> Tensor:
    """After the last epoch: the six directions, answers on the test data, thumbnails and the terms of the bound.

    Returns:
        The scores of the test images, for `quantiles`; none where there is no test image.
    """
    images, labels = run.data.test
    rows = evenly(len(labels), MOST_ANSWERS).to(run.device)
    if latents.complete or not len(rows):
        return latents.rest.get("unusual", torch.zeros(0))
    with _leaving_the_run_alone():
        batches = run.data.batches("test", rows)
        z_AK, logits_AC, _ = through_last_layer(run.deployed(), run.data.num_classes, batches)
        bound = history[-1].get("audit") if history else None
        bound = audit(run) if bound is None else bound
        pictures = None if run.data.flat else images[rows].cpu()
        complete(latents, z_AK, logits_AC, labels[rows].cpu(), Seam.of(run.objective.seam), pictures, bound)
    return latents.rest.get("unusual", torch.zeros(0))


def complete(
    latents: Latents,
    z_AK: Tensor | None,
    logits_AC: Tensor,
    y_A: Tensor,
    seam: Seam | None,
    images: Tensor | None,
    bound: dict[str, float] | None,
) -> None:
    """Add what only the end knows, and reduce the frames. ``images`` are uint8 ``(A, channels, H, W)``."""
    points_N = evenly(len(y_A), POINTS)
    found = answers_on(z_AK, logits_AC, y_A, seam)
    latents.rest = found | {"points": points_N.int()}
    if z_AK is not None:
        latents.rest |= class_table(z_AK, y_A, logits_AC.shape[1], seam)
    if images is not None:
        shown_M = chosen_rows(points_N, found)
        sheet, tile, columns = contact_sheet(images[shown_M])
        latents.rest |= {
            "shown": shown_M.int(),
            "sheet": sheet,
            "layout": torch.tensor([tile, columns], dtype=torch.int32),
        }
    latents.about = {} if bound is None else {"bound": bound}
    if latents.frames:
        latents.reduce()


def answers_on(z_AK: Tensor | None, logits_AC: Tensor, y_A: Tensor, seam: Seam | None) -> dict[str, Tensor]:
    """First and second answer with their probabilities, that of the label, and the score of `how_unusual`."""
    p_AC = logits_AC.double().softmax(1).nan_to_num(0.0)
    top = p_AC.topk(2, dim=1)
    return {
        "label": y_A.int(),
        "first": top.indices[:, 0].int().contiguous(),
        "second": top.indices[:, 1].int().contiguous(),
        "p_first": top.values[:, 0].float().contiguous(),
        "p_second": top.values[:, 1].float().contiguous(),
        "p_label": p_AC.gather(1, y_A.long()[:, None])[:, 0].float(),
        "unusual": how_unusual(z_AK, logits_AC, seam),
    }


def class_table(z_AK: Tensor, y_A: Tensor, num_classes: int, seam: Seam | None) -> dict[str, Tensor]:
    """Spread of each class's test images around their mean, and its nearest rival with the distance to it.

    The distance is between prototypes, or without a seam between the means of the test images.
    """
    count_C, mean_CK, variance_CK = class_moments(z_AK, y_A.long(), num_classes, structure="diagonal")
    centre_CK = mean_CK if seam is None else seam.prototypes.double().cpu()
    distance_CC = torch.cdist(centre_CK, centre_CK).fill_diagonal_(torch.inf)
    if seam is None:  # a class without a test image has no mean
        distance_CC[:, count_C == 0] = torch.inf
    distance_C, rival_C = distance_CC.min(1)
    return {
        "spread": variance_CK.sum(1).clamp_min(0).sqrt().float(),
        "rival": rival_C.int(),
        "distance": distance_C.nan_to_num(0.0, 0.0, 0.0).float(),
    }


def evenly(count: int, most: int) -> Tensor:
    """At most ``most`` of ``count`` rows, evenly spaced, whatever the order of the classes."""
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).round().long()


def _narrowed(K: int) -> Tensor:
    """(K, D): the identity; for wide features fixed random orthogonal directions, which keep distances on average."""
    if K <= _WIDEST:
        return torch.eye(K, dtype=torch.float64)
    random = torch.randn(K, _WIDEST, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(random).Q * (K / _WIDEST) ** 0.5


def _roots_along(root_CKK: Tensor, axes_KD: Tensor) -> Tensor:
    """Symmetric roots of AᵀΣA."""
    part = axes_KD.T @ root_CKK
    values_CD, vectors_CDD = torch.linalg.eigh(part @ part.mT)
    return vectors_CDD * values_CD.clamp_min(0).sqrt()[:, None] @ vectors_CDD.mT


def _half(t: Tensor) -> Tensor:
    return t.cpu().nan_to_num(0.0, _LARGEST, -_LARGEST).clamp(-_LARGEST, _LARGEST).half()
