"""The lifted objective of a batch: its terms.

Legend: C classes, K seam width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from protoseam.core.objective import repulsion, sampled_classification
from protoseam.errors import SeamError

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["Terms", "without_images"]


class Terms(NamedTuple):
    """The lifted objective (eq:combinedLoss), each term with its weight.

    Attributes:
        total: the sum of the other three, which training minimises.
        consensus: ρ/(2|B|) Σ ‖N1(x) − s_y‖²; trains N1 and the prototypes.
        classification: N2's loss on samples around the prototypes; trains N2 and the prototypes.
        repulsion: Σ_{i<j} exp(−α‖s_i − s_j‖) times its weight; trains the prototypes.
    """

    total: Tensor
    consensus: Tensor
    classification: Tensor
    repulsion: Tensor

    def backward(self) -> NoReturn:
        """Say that it is ``total`` whose backward trains."""
        raise SeamError(
            "the objective has several terms; train by its total: net.objective(x, y).total.backward()"
        )


def without_images(
    net: LiftedNetwork, prototypes_CK: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Sampled classification and repulsion: no image enters them, so they can be computed beside N1."""
    classify = sampled_classification(
        net.head,
        prototypes_CK,
        net.covariance.factors,
        draws=net.draws,
        antithetic=net.antithetic,
        generator=generator,
        loss_fn=net.loss_fn,
        class_weights=net._weights(),
        label_smoothing=net.label_smoothing,
    )
    weight = net.rho if net.repulsion_scale is None else net.repulsion_scale
    return classify, weight * repulsion(prototypes_CK, net.alpha)
