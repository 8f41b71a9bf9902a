"""What the last layer of a finished run sees, small enough to be kept in the run's summary.

Data in: a trained run; data out: plain numbers and text. Nothing is trained, drawn or changed.

Legend: N points, K width of the last layer's input, C classes, 2 the dimensions that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from protoseam.seam.classifier import find_classifier, get_layer

if TYPE_CHECKING:
    from protoseam.lab.engine.run import Run


@torch.no_grad()
def embeddings(run: Run, most: int) -> dict[str, Any] | None:
    """At most ``most`` test images at the input of the last Linear; with a seam, its prototypes and Σ̃ too.

    A wider input than two is shown along the two directions in which the images vary most; ``shown`` is the share of
    their variance there. Coordinates are kept as text, four digits each: a tenth of the lines of a JSON list. None for
    a network that does not end in a Linear.
    """
    batches = run.data.batches("test")
    z_NK, _, _ = through_last_layer(run.deployed(), run.data.num_classes, batches)
    if z_NK is None:
        return None
    z_NK, y_N = z_NK.double(), run.data.test[1].cpu()
    # evenly spaced, whatever the order of the classes
    chosen_N = torch.linspace(0, len(z_NK) - 1, min(most, len(z_NK))).round().long()
    centre_K, axes_K2, shown = _plane(z_NK)
    z_N2 = (z_NK[chosen_N] - centre_K) @ axes_K2
    kept: dict[str, Any] = {
        "width": z_NK.shape[1],
        "shown": round(shown, 4),
        "x": _text(z_N2[:, 0]),
        "y": _text(z_N2[:, 1]),
        "labels": " ".join(map(str, y_N[chosen_N].tolist())),
    }
    net = run.objective.seam
    if net is not None and z_NK.shape[1] > 1:  # a picture of a line has no ellipses
        s_CK, factors = net.prototypes.double().cpu(), net.covariance.factors.double().cpu()
        wide = factors if factors.ndim == 3 else torch.diag_embed(factors.expand_as(s_CK))
        kept["prototypes"] = ((s_CK - centre_K) @ axes_K2).tolist()
        covariance_C22 = axes_K2.T @ (wide @ wide.mT) @ axes_K2
        kept["covariances"] = covariance_C22.expand(len(s_CK), 2, 2).tolist()  # one may be shared by all
    return kept


def through_last_layer(
    plain: nn.Module, num_classes: int, batches: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor | None, Tensor, nn.Linear | None]:
    """What the last Linear of a plain network sees, what the network answers, and that layer; on the CPU.

    For a network with a seam the first is N1(x), without one its features. Both Linear and features are None for a
    network that does not end in a Linear with ``num_classes`` outputs.
    """
    try:
        last = get_layer(plain, find_classifier(plain, num_classes))
    except ValueError:
        last = None
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].float().cpu())

    with nullcontext() if last is None else last.register_forward_pre_hook(see):
        logits = [plain(x.float()).float().cpu() for x, _ in batches]
    assert last is None or isinstance(last, nn.Linear)
    whole = seen and all(z.ndim == 2 for z in seen)
    return torch.cat(seen) if whole else None, torch.cat(logits), last


def _plane(z_NK: Tensor) -> tuple[Tensor, Tensor, float]:
    """Origin and two orthonormal directions of what is kept, and the share of the variance along them."""
    K = z_NK.shape[1]
    if K <= 2:
        return torch.zeros(K, dtype=z_NK.dtype), torch.eye(K, 2, dtype=z_NK.dtype), 1.0
    centre_K = z_NK.mean(0)
    values, vectors = spectrum(z_NK)
    total = float(values.sum())  # 0 for a network that has collapsed
    shown = min(1.0, float(values[-2:].sum()) / total) if total > 0 else 1.0
    return centre_K, vectors[:, -2:].flip(1), shown


def spectrum(z_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the points' covariance, the largest last; a single point has none."""
    K = z_NK.shape[1]
    covariance_KK = torch.cov(z_NK.T).reshape(K, K) if len(z_NK) > 1 else z_NK.new_zeros(K, K)
    values_K, vectors_KK = torch.linalg.eigh(covariance_KK)
    return values_K, vectors_KK


def _text(values_N: Tensor) -> str:
    return " ".join(f"{value:.4g}" for value in values_N.tolist())
