"""The lifted objective of a batch: its terms, and their gradients without a graph over the whole network.

Legend: B batch, C classes, K seam width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from protoseam.core.objective import (
    consensus,
    consensus_slope,
    prototype_gradient,
    repulsion,
    sampled_classification,
)
from protoseam.errors import SeamError
from protoseam.seam.bounding import inputs_of, last_curvature
from protoseam.seam.classifier import last_linear

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["Terms", "backward", "without_images"]


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


def backward(
    net: LiftedNetwork,
    x: Any,
    y: Tensor,
    *,
    generator: torch.Generator | None = None,
    side: torch.cuda.Stream | None = None,
    casting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Terms:
    """See :meth:`LiftedNetwork.backward`.

    Two branches meet at the end: N1 with the consensus term, and all the seam's own work. The branches share the
    prototypes only, so the prototypes' gradients are added at the end. The seam's work is a hundred tiny kernels, which
    in line would cost a tenth of a step; on a stream of their own they fit into what N1 leaves free.
    """
    if net.prototypes.grad is not None:
        raise SeamError(
            "net.backward sets gradients and does not add to them: call optimizer.zero_grad() before"
        )
    main = None if side is None else torch.cuda.current_stream()

    def beside() -> AbstractContextManager[Any]:
        return nullcontext() if side is None else torch.cuda.stream(side)

    s_CK = net.prototypes.detach().requires_grad_()
    head = [p for p in net.n2.parameters() if p.requires_grad]
    if side is not None and main is not None:
        side.wait_stream(main)
    with beside():
        with casting():
            classify, push = without_images(net, s_CK, generator)
        apart_CK, *gradients = torch.autograd.grad(classify + push, [s_CK, *head])
    last = None if net._bounds is None or net._bounds.leaves_n1 else last_linear(net.n1, net.seam_layer)
    with casting(), inputs_of(last) as features:
        z_BK = net.embed(x)
    curvature = last_curvature(features)
    slope_BK = consensus_slope(z_BK.detach(), y, net.prototypes.detach(), net.rho)
    embedded = None if main is None else main.record_event()
    z_BK.backward(slope_BK.to(z_BK.dtype))
    with beside(), torch.no_grad():
        if side is not None and embedded is not None:
            side.wait_event(embedded)
        pull = consensus(z_BK, y, net.prototypes, net.rho)
        net.prototypes.grad = prototype_gradient(apart_CK, y, slope_BK)
        if net.training and not y.is_floating_point():  # a mixed image is in no class's covariance
            net.covariance.observe(z_BK, y)
        terms = Terms(*(t.detach() for t in (pull + classify + push, pull, classify, push)))
    if side is not None and main is not None:
        main.wait_stream(side)
    for p, gradient in zip(head, gradients, strict=True):
        p.grad = gradient
    if net._bounds is not None:
        net._bounds.apply(net, terms.consensus, curvature, len(z_BK))
    return terms
