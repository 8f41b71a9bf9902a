"""N2 set by formulas instead of steps: the linear discriminant, and one temperature."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from protoseam.core.calibration import MOST_SHARPENING, fit_temperature
from protoseam.core.discriminant import linear_discriminant, pooled_covariance
from protoseam.errors import SeamError, SeamWarning
from protoseam.seam.classifier import is_plain, last_layer

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["can_refit", "check_head", "refit", "scale_logits", "temperature_of"]

# benchmarks/calibration.py: without a prior, 100 held-out samples made the likelihood of others worse in 27 of 36
# networks. With half a sample they made it better in 25.
_PRIOR = 0.5
FEW_HELD_OUT = 50


@torch.no_grad()
def refit(net: LiftedNetwork) -> None:
    """Set N2 to the linear discriminant of the prototypes and the pooled Σ̃."""
    covariance_KK = pooled_covariance(net.covariance.factors, net.dim)
    weight_CK, bias_C = linear_discriminant(net.prototypes, covariance_KK, net._weights())
    head = check_head(net.n2, "refit_head")
    head.weight.copy_(weight_CK)
    head.bias.copy_(bias_C)


def can_refit(net: LiftedNetwork) -> bool:
    """Whether N2 can be set, as one plain Linear with a bias on the seam's vector, and may change."""
    head = net.n2
    return (
        isinstance(head, nn.Linear)
        and is_plain(head)
        and head.bias is not None
        and head.weight.shape == (net.num_classes, net.dim)
        and head.weight.requires_grad
    )


def check_head(head: nn.Module, what: str) -> nn.Linear:
    """Return N2 where it is one plain Linear with a bias, or refuse it."""
    if not isinstance(head, nn.Linear) or head.bias is None or not is_plain(head):
        found = "a Linear without bias" if type(head) is nn.Linear else type(head).__name__
        raise SeamError(
            f"{what} needs N2 to be one Linear with a bias, but it is {found}: leave it out and let N2 learn"
        )
    return head


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
    last = last_layer(head)
    if not isinstance(last, nn.Linear) or not is_plain(last):
        raise SeamError(
            f"calibrate folds the temperature into the plain Linear that N2 ends with, but N2 ends with "
            f"{type(last).__name__}. Divide the logits yourself: ps.core.fit_temperature(logits, labels)"
        )
    last.weight.mul_(factor)
    if last.bias is not None:
        last.bias.mul_(factor)
