"""N2 set by formulas instead of steps: the linear discriminant, and one temperature."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from protoseam.core.calibration import MOST_SHARPENING, fit_temperature
from protoseam.core.covariance import class_moments
from protoseam.core.discriminant import linear_discriminant, pooled_covariance
from protoseam.errors import SeamError, SeamWarning
from protoseam.seam.covariance import DEFAULT_FLOOR
from protoseam.seam.processes import all_reduce, broadcast

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["can_refit", "refit", "refit_if_better", "refit_linear", "scale_logits", "temperature_of"]

_ROWS = 8192  # logits of so many samples at a time
# benchmarks/calibration.py: without a prior, 100 held-out samples made the likelihood of others worse in 24 of 36
# networks. With half a sample, 50 made it better in 24 of 40.
_PRIOR = 0.5
FEW_HELD_OUT = 50


@torch.no_grad()
def refit(net: LiftedNetwork, embeddings: tuple[Tensor, Tensor] | None) -> None:
    """Set N2 to the discriminant of the prototypes and Σ̃, or of the moments of these embeddings; see ``refit_head``."""
    if embeddings is None:
        covariance_KK = pooled_covariance(net.covariance.factors, net.dim)
        refit_linear(net.n2, net.prototypes, covariance_KK, net._weights(), what="refit_head")
        return
    z_NK, y_N = embeddings
    count_C, mean_CK, (covariance_KK,) = class_moments(
        z_NK, y_N, net.num_classes, structure="shared", reduce=all_reduce()
    )
    floored_KK = covariance_KK + DEFAULT_FLOOR**2 * torch.eye(net.dim).to(covariance_KK)
    prior_C = count_C if net.class_weights == "frequency" else None
    refit_linear(net.n2, mean_CK, floored_KK, prior_C, what="refit_head")


def can_refit(net: LiftedNetwork) -> bool:
    """Whether N2 has a closed form, as one Linear with a bias on the seam's vector, and may change."""
    head = net.n2
    return (
        isinstance(head, nn.Linear)
        and head.bias is not None
        and head.weight.shape == (net.num_classes, net.dim)
        and head.weight.requires_grad
    )


@torch.no_grad()
def refit_if_better(net: LiftedNetwork, z_NK: Tensor, y_N: Tensor) -> bool:
    """Replace N2 by the discriminant of these embeddings if that classifies more of them rightly; was it replaced?

    A class without a sample has no mean, and N2 stays. The discriminant of training embeddings, which lie closer
    together than unseen ones, is far too sure; so its logits are scaled down to the mean gap between N2's two largest.
    """
    kept = {name: value.clone() for name, value in net.n2.state_dict().items()}
    before = _judged(net.n2, z_NK, y_N)
    refit(net, (z_NK, y_N))
    found = torch.cat(
        [before, _judged(net.n2, z_NK, y_N), torch.bincount(y_N, minlength=net.num_classes).cpu()]
    )
    reduce = all_reduce()
    if reduce is not None:
        reduce(found)
    right, gap, right_now, gap_now, *count = found.tolist()
    better = right_now > right and all(count)
    if better:
        if 0 < gap < gap_now:  # a head that answers everything alike has no gap to keep
            scale_logits(net.n2, gap / gap_now)
        for p in net.n2.parameters():
            broadcast(p.data)  # the same to the last bit in every process
    else:
        net.n2.load_state_dict(kept)
    return better


def _judged(head: nn.Module, z_NK: Tensor, y_N: Tensor) -> Tensor:
    """How many of these a head classifies rightly, and the sum of the gaps between its two largest logits."""
    weight = next(head.parameters())
    found = torch.zeros(2, dtype=torch.float64)
    for z, y in zip(z_NK.split(_ROWS), y_N.split(_ROWS), strict=True):
        logits = head(z.to(weight))
        right = (logits.argmax(1).to(y.device) == y).sum()
        largest = logits.double().topk(2, dim=1).values
        found += torch.stack([right.double().cpu(), (largest[:, 0] - largest[:, 1]).sum().cpu()])
    return found


@torch.no_grad()
def refit_linear(
    head: nn.Module, means_CK: Tensor, covariance_KK: Tensor, prior_C: Tensor | None, *, what: str
) -> None:
    """Set a Linear with bias to the linear discriminant of these classes."""
    if not isinstance(head, nn.Linear) or head.bias is None:
        found = "a Linear without bias" if isinstance(head, nn.Linear) else type(head).__name__
        raise SeamError(
            f"{what} sets N2 in closed form, which needs N2 to be one Linear with a bias, but it is {found}: "
            "leave it out and let N2 learn"
        )
    weight_CK, bias_C = linear_discriminant(means_CK, covariance_KK, prior_C)
    head.weight.copy_(weight_CK)
    head.bias.copy_(bias_C)


def temperature_of(logits_NC: Tensor, y_N: Tensor) -> float:
    """The temperature that held-out logits ask for; says so where they are too few, or name none."""
    temperature = fit_temperature(logits_NC, y_N, prior=_PRIOR)
    found = ""
    if temperature > 0.99 * MOST_SHARPENING:
        right = float((logits_NC.argmax(1) == y_N).double().mean())
        found = (
            f"found no best temperature below {MOST_SHARPENING:g}: {100 * right:.1f} % of these {len(y_N)} samples are "
            "classified rightly, which is no better than chance. Train on"
        )
    elif len(y_N) < FEW_HELD_OUT:
        found = (
            f"has {len(y_N)} samples to go by, and its temperature of {temperature:.3g} may be worse than none: hold "
            f"out {FEW_HELD_OUT} or more"
        )
    if found:
        warnings.warn(f"calibrate {found}", SeamWarning, stacklevel=3)
    return temperature


@torch.no_grad()
def scale_logits(head: nn.Module, factor: float) -> None:
    """Multiply what N2 returns, inside its last Linear."""
    last = head[-1] if isinstance(head, nn.Sequential) and len(head) else head
    if not isinstance(last, nn.Linear):
        raise SeamError(
            f"calibrate folds the temperature into the Linear that N2 ends with, but N2 ends with "
            f"{type(last).__name__}. Divide the logits yourself: ps.core.fit_temperature(logits, labels)"
        )
    last.weight.mul_(factor)
    if last.bias is not None:
        last.bias.mul_(factor)
