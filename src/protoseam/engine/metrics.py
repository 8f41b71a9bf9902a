"""How good a network's probabilities are, from its logits: pure functions.

Legend: N samples, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BINS", "calibration_error", "log_losses"]

BINS = 15  # Guo et al., On Calibration of Modern Neural Networks (2017)


def log_losses(logits_NC: Tensor, y_N: Tensor) -> Tensor:
    """−log p(y|x) of each sample in nats, ``(N,)`` float64; their mean is the NLL."""
    return F.cross_entropy(logits_NC.double(), y_N, reduction="none")


def calibration_error(confidence_N: Tensor, correct_N: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: Σ_b |b|/N · |accuracy(b) − mean confidence(b)|.

    Args:
        confidence_N: the largest probability of each sample, in [0, 1].
        correct_N: whether its class is the right one.
        bins: equal-width intervals (0, 1/bins], (1/bins, 2/bins], …

    Returns:
        The error in [0, 1]; 0 without samples.
    """
    if not len(confidence_N):
        return 0.0
    confidence_N = confidence_N.double()
    bin_N = (confidence_N * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gap_N = correct_N.double() - confidence_N
    gap_b = torch.zeros(bins, dtype=torch.float64, device=gap_N.device).index_add_(0, bin_N, gap_N)
    return float(gap_b.abs().sum() / len(confidence_N))
