"""A step's gradients without a graph over the whole network: what training on CUDA runs.

Data in: a lifted network and a batch; data out: the loss terms, and gradients in ``p.grad``.

Legend: B batch, C classes, K seam width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from protoseam.core.objective import consensus, consensus_slope, prototype_gradient
from protoseam.errors import SeamError
from protoseam.seam.bounding import Rates
from protoseam.seam.covariance import (
    ExactCovariance,
    IsotropicCovariance,
    RunningCovariance,
    SwitchCovariance,
)
from protoseam.seam.groups import trainable
from protoseam.seam.processes import world_size
from protoseam.seam.state import KeepsState
from protoseam.seam.terms import Terms, without_images

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["backward"]


def backward(
    net: LiftedNetwork,
    x: Any,
    y: Tensor,
    *,
    generator: torch.Generator | None = None,
    side: torch.cuda.Stream | None = None,
    casting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    capture: bool = True,
) -> Terms:
    """See :meth:`LiftedNetwork.backward`.

    Two branches meet at the end: N1 with the consensus term, and all the seam's own work. The branches share the
    prototypes only, so the prototypes' gradients are added at the end. The seam's work is a hundred tiny kernels. In a
    graph of their own they take one launch; on a stream of their own they fit into what N1 leaves free.
    """
    if net.prototypes.grad is not None:
        raise SeamError(
            "net.backward sets gradients and does not add to them: call optimizer.zero_grad(set_to_none=True) before"
        )
    if world_size() > 1:
        raise SeamError(
            "net.backward leaves each process the gradients of its own batch, which nothing averages: with several "
            "processes wrap the network in DistributedDataParallel and call wrapped(x, y).total.backward()"
        )
    checks = net._checks
    replays = capture and side is None and _can_replay(net)
    main = None if side is None else torch.cuda.current_stream()

    def beside() -> AbstractContextManager[Any]:
        return nullcontext() if side is None else torch.cuda.stream(side)

    if side is not None and main is not None:
        side.wait_stream(main)
    if not replays:
        with beside():
            apart = _apart(net, generator, casting)
    with casting():
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        z_BK = net.embed(x)
    if checks.own:
        y = checks.before_step(net, z_BK, y)
    slope_BK = consensus_slope(z_BK.detach(), y, net.prototypes.detach(), net.rho)
    embedded = None if main is None else main.record_event()
    if z_BK.requires_grad:  # N1 may be frozen
        z_BK.backward(slope_BK.to(z_BK.dtype))
    z_BK = z_BK.detach()
    if replays:
        terms = _replayed(net, z_BK, y, generator, casting, cast)
    else:
        with beside():
            if side is not None and embedded is not None:
                side.wait_event(embedded)
            terms, gradient_CK = _together(net, z_BK, y, slope_BK, apart)
        if side is not None and main is not None:
            main.wait_stream(side)
        _settle(net, terms, gradient_CK, apart.gradients, len(z_BK))
    if checks.own:
        checks.after_step(net, terms, z_BK, y)
    return terms


class _Apart(NamedTuple):
    """The terms that no image enters, and their gradients: the prototypes', and those of N2's parameters."""

    classification: Tensor
    repulsion: Tensor
    gradient_CK: Tensor
    gradients: Sequence[Tensor | None]  # None: N2 does not use the parameter


def _apart(
    net: LiftedNetwork,
    generator: torch.Generator | None,
    casting: Callable[[], AbstractContextManager[Any]],
) -> _Apart:
    s_CK = net.prototypes.detach().requires_grad_()
    with casting():
        classify, push = without_images(net, s_CK, generator)
    apart_CK, *gradients = torch.autograd.grad(classify + push, [s_CK, *trainable(net.n2)], allow_unused=True)
    return _Apart(classify.detach(), push.detach(), apart_CK, gradients)


@torch.no_grad()
def _together(
    net: LiftedNetwork, z_BK: Tensor, y: Tensor, slope_BK: Tensor, apart: _Apart
) -> tuple[Terms, Tensor]:
    """All terms, and the prototypes' gradient; the estimator sees the batch."""
    pull = consensus(z_BK, y, net.prototypes, net.rho)
    gradient_CK = prototype_gradient(apart.gradient_CK, y, slope_BK)
    if net.training and not y.is_floating_point():  # a mixed image is in no class's covariance
        net.covariance.observe(z_BK, y)
    total = pull + apart.classification + apart.repulsion
    return Terms(total, pull, apart.classification, apart.repulsion), gradient_CK


def _settle(
    net: LiftedNetwork,
    terms: Terms,
    gradient_CK: Tensor,
    gradients: Sequence[Tensor | None],
    batch: int,
    rates: Rates | None = None,
) -> None:
    """Give the prototypes and N2 their gradients, and bring all of them within their limits."""
    if net.prototypes.requires_grad:
        net.prototypes.grad = gradient_CK
    for p, gradient in zip(trainable(net.n2), gradients, strict=True):
        p.grad = gradient
    if net._bounds is not None:
        net._bounds.apply(net, terms.consensus, batch, rates)


# ---------------------------------------------------------------------- the seam's work in one launch


_KNOWN = (ExactCovariance, RunningCovariance, IsotropicCovariance, SwitchCovariance)


def _can_replay(net: LiftedNetwork) -> bool:
    """Whether the seam's work is known to fit into a CUDA graph: everything it calls is this library's or torch's."""
    n2 = net.n2
    return (
        net.prototypes.is_cuda
        and type(n2) is nn.Linear
        and not (n2._forward_hooks or n2._forward_pre_hooks or n2._backward_hooks or n2._backward_pre_hooks)
        and net.loss_fn is None
        and type(net.covariance) in _KNOWN
        and (net._bounds is None or net._bounds.can_copy(net))
        and not torch.cuda.is_current_stream_capturing()
    )


def _replayed(
    net: LiftedNetwork,
    z_BK: Tensor,
    y: Tensor,
    generator: torch.Generator | None,
    casting: Callable[[], AbstractContextManager[Any]],
    cast: Hashable,
) -> Terms:
    """All that is left to do after N1's backward, from a graph.

    N1's gradients are copied to where the graph scales them, and stay there: a copy is one operation, and their norms
    and limits are a hundred.
    """
    bounds = net._bounds
    rates = None if bounds is None else bounds.rates(len(z_BK))
    limited = [] if bounds is None or rates is None else bounds.limited(net, rates)

    def work(
        z_BK: Tensor, y: Tensor, gradients: list[Tensor] | None, *numbers: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None], Any]:
        for p, gradient in zip(limited, gradients or (), strict=True):
            p.grad = gradient
        apart = _apart(net, generator, casting)
        slope_BK = consensus_slope(z_BK, y, net.prototypes.detach(), net.rho)
        terms, gradient_CK = _together(net, z_BK, y, slope_BK, apart)
        now = Rates(*(0.0 if n is None else n for n in numbers)) if numbers else None
        _settle(net, terms, gradient_CK, apart.gradients, len(z_BK), now)
        past = None if net._bounds is None else net._bounds.past
        return torch.stack(terms), [p.grad for p in given], past

    given = [*limited, *trainable(net.n2), net.prototypes]
    options = (
        net.draws,
        net.antithetic,
        net.label_smoothing,
        net.class_weights,
        net.alpha,
        net.repulsion_scale,
    )
    decays = (
        () if bounds is None else tuple((g.get("weight_decay"), "dampening" in g) for g in bounds.groups.now)
    )
    trained = tuple(p.requires_grad for p in (*net.n2.parameters(), net.prototypes))
    kind = cast, options, decays, trained, net.training, torch.are_deterministic_algorithms_enabled()
    state = [t for m in (net, *net.covariance.modules()) if isinstance(m, KeepsState) for t in m.kept()]
    values, gradients, past = net._graphs.run(
        work,
        [
            z_BK,
            y,
            [p.grad for p in limited if p.grad is not None] or None,
            *(r if isinstance(r, Tensor) else float(r) if r > 0 else None for r in rates or ()),
        ],
        reads=[net.prototypes, *net.n2.parameters(), net.covariance.factors, *state, *limited],
        kind=kind,
        generator=generator,
    )
    for p, gradient in zip(given, gradients, strict=True):
        p.grad = gradient
    if bounds is not None:
        bounds.past = past
    return Terms(*values.clone().unbind())
