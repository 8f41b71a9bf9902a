"""How good probabilities are: likelihood, calibration error, and the temperature that improves both.

Legend: N samples, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["calibration_error", "fit_temperature", "negative_log_likelihood"]

# β = 1/T is searched between 1/100 and 100. Without a prior, data without a single mistake drives it to the end.
MOST_SHARPENING = 100.0
_NEWTON_STEPS = 50


def negative_log_likelihood(logits_NC: Tensor, y_N: Tensor) -> Tensor:
    """−1/N Σ log softmax(logits)_y, in float64.

    Args:
        logits_NC: logits of N samples.
        y_N: their labels.

    Returns:
        A scalar.
    """
    return F.cross_entropy(logits_NC.double(), y_N)


def calibration_error(logits_NC: Tensor, y_N: Tensor, bins: int = 15) -> Tensor:
    """ECE: the mean gap between confidence and accuracy over ``bins`` equal-width bins of the confidence.

    Each bin weighs as many samples as it holds (Guo et al. 2017, with their 15 bins).

    Args:
        logits_NC: logits of N samples.
        y_N: their labels.
        bins: number of bins; 15 (Guo et al. 2017).

    Returns:
        A scalar in [0, 1], float64.
    """
    confidence_N, answer_N = logits_NC.double().softmax(1).max(1)
    right_N = (answer_N == y_N).double()
    bin_N = (confidence_N * bins).ceil().long().clamp(1, bins) - 1  # (0, 1/bins], (1/bins, 2/bins], …
    gap = torch.zeros(bins, dtype=torch.float64, device=logits_NC.device)
    gap.index_add_(0, bin_N, confidence_N - right_N)
    return gap.abs().sum() / len(y_N)


def fit_temperature(logits_NC: Tensor, y_N: Tensor, *, prior: float = 0.0) -> float:
    """The temperature T that makes softmax(logits / T) most likely on held-out data (Guo et al. 2017).

    The likelihood is convex in β = 1/T, with slope E[ℓ̄ − ℓ_y] and curvature E[Var ℓ] under the softmax of βℓ, so
    safeguarded Newton steps find its one minimum. β stays within 1/100…100.

    Args:
        logits_NC: of data that N2 and N1 were not trained on.
        y_N: its labels.
        prior: so many samples' worth of labels, drawn evenly from all classes, are added to the N: ½ keeps a few right
            answers from being taken for certainty. 0: none (Guo et al.).

    Returns:
        T > 0; above 1 the network was too confident, below 1 not confident enough.
    """
    l_NC = logits_NC.double()
    l_NC = l_NC - l_NC.mean(1, keepdim=True)  # so ℓ_y of a label drawn evenly has the mean 0
    right = l_NC.gather(1, y_N[:, None]).mean() * len(y_N) / (len(y_N) + prior)
    low, high, beta = 1 / MOST_SHARPENING, MOST_SHARPENING, 1.0
    for _ in range(_NEWTON_STEPS):
        p_NC = (beta * l_NC).softmax(1)
        mean_N = (p_NC * l_NC).sum(1)
        slope = float(mean_N.mean() - right)
        curvature = float((p_NC * (l_NC - mean_N[:, None]).square()).sum(1).mean())
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else low - 1
        # Newton where it stays inside the bracket, else halve it on the scale of ratios
        following = step if low < step < high else (low * high) ** 0.5
        if abs(following - beta) <= 1e-12 * beta:
            break
        beta = following
    return 1 / beta
