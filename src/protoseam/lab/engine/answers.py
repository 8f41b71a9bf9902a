"""A network's answers on its test data, and how its classes lie: numbers for the page and for ``predict``.

Legend: A images, C classes, K width of the last layer's input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protoseam.core import mahalanobis
from protoseam.core.covariance import class_moments

if TYPE_CHECKING:
    from protoseam.lab.engine.latents import Seam

_BLOCK = 4096  # images whose distances to all classes are held at once


def how_unusual(z_AK: Tensor | None, logits_AC: Tensor, seam: Seam | None) -> Tensor:
    """A score per image that is larger the less the image looks like the training data.

    With a seam: the Mahalanobis distance of N1(x) to the nearest prototype, min_c ‖Σ̃_c^(−1/2) (z − s_c)‖. Without one:
    the free energy −log Σ_c exp(logit_c) (Liu et al., Energy-based Out-of-distribution Detection, 2020).
    """
    if seam is None or z_AK is None:
        return (-logits_AC.float().logsumexp(1)).nan_to_num()
    nearest = [
        mahalanobis(z_BK, seam.prototypes.cpu(), seam.factors.cpu()).amin(1).sqrt()
        for z_BK in z_AK.cpu().split(_BLOCK)
    ]
    return torch.cat(nearest).float().nan_to_num() if nearest else torch.zeros(0)


def quantiles(score_A: Tensor) -> Tensor:
    """The 0 %, 1 %, …, 100 % quantiles of the scores: what a new score is compared with."""
    finite = score_A[score_A.isfinite()].double().sort().values
    if not len(finite):
        return torch.zeros(0)
    return finite[torch.linspace(0, len(finite) - 1, 101, dtype=torch.float64).round().long()].float()


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
