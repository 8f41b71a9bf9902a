"""W1 between a class's embeddings and a Gaussian, from above, with a confidence that is proved and not fitted.

Legend: N samples, n samples of one class, M points of one assignment, R repeats, C classes, K seam width.

An optimal assignment between the embeddings and M draws of Γ = N(m, Σ) is in expectation at least W1(P_i, Γ),
because W1 is convex. Two things make the estimate as small as that allows, and one makes it certain:

* a class with few samples repeats each of them r times, so that M = r·n draws represent Γ;
* a class with many is cut into blocks. W1(P_i, Γ) is at most the average over blocks of W1(P_b, Γ), so every
  sample is used, once, and nothing but the draws of Γ is random;
* moving the draws by δ_1…δ_M changes one assignment by at most M⁻¹ Σ‖δ_j‖ ≤ M^{−1/2}‖δ‖. As a function of the
  standard normals behind them the average of R repeats is therefore (λ_max(Σ)/(M·R))^{1/2}-Lipschitz, and
  Gaussian concentration bounds the chance to fall t below its expectation by exp(−t²·M·R/(2 λ_max)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError
from protoseam.theory.bures import psd_sqrt
from protoseam.theory.wasserstein import assignment_w1


@dataclass(frozen=True)
class W1Upper:
    """An upper bound of W1 for each class, float64 ``(C,)``; :attr:`upper_C` is the one to use.

    Attributes:
        value_C: the average assignment cost.
        margin_C: what concentration adds.
        cap_C: the bound of the independent coupling, which is certain.
    """

    value_C: Tensor  # mean over the repeats: at least W1 in expectation
    margin_C: Tensor  # what makes it so with the confidence asked for, in all classes at once
    cap_C: Tensor  # (E‖z − m‖² + tr Σ)^{1/2}, from the independent coupling: certain, and often not far off

    @property
    def upper_C(self) -> Tensor:
        """Return the smaller of the assignment bound and the cap."""
        return torch.minimum(self.value_C + self.margin_C, self.cap_C)


def w1_upper(
    z_NK: Tensor,
    y_N: Tensor,
    mean_CK: Tensor,
    covariance_CKK: Tensor,
    *,
    generator: torch.Generator,
    points: int = 256,
    repeats: int = 2,
    confidence: float = 0.999,
) -> W1Upper:
    """W1 between the empirical law of each class and N(mean_i, covariance_i), from above.

    With the classes' own moments this is Δ_i; with prototype and Σ̃_i it is the W1(P_i, Q_i) of
    eq:risk-transfer itself. ``confidence`` is that of all C statements together. Costs O(points³) a block.

    Args:
        z_NK: embeddings.
        y_N: their labels.
        mean_CK: means μ_i.
        covariance_CKK: covariances Σ_i.
        generator: of every draw.
        points: points per assignment.
        repeats: repetitions, over which the error is measured.
        confidence: probability that every bound holds.
    """
    C, K = mean_CK.shape
    if z_NK.ndim != 2 or z_NK.shape[1] != K or covariance_CKK.shape != (C, K, K):
        raise ArgumentError(
            f"w1_upper: embeddings {tuple(z_NK.shape)}, means {(C, K)} and covariances "
            f"{tuple(covariance_CKK.shape)} must be (N, K), (C, K) and (C, K, K)"
        )
    if points < 1 or repeats < 1 or not 0 < confidence < 1:
        raise ArgumentError(
            f"w1_upper needs points ≥ 1, repeats ≥ 1 and a confidence in (0, 1), got {points}, {repeats} "
            f"and {confidence}"
        )
    count_C = torch.bincount(y_N, minlength=C)
    if len(count_C) != C or bool((count_C == 0).any()):
        raise ArgumentError(
            f"w1_upper: {len(count_C)} classes in the labels and {C} Gaussians, or a class without samples; "
            "leave such classes out and renumber the labels"
        )
    mean_CK, covariance_CKK = mean_CK.detach().double().cpu(), covariance_CKK.detach().double().cpu()
    root_CKK = psd_sqrt(covariance_CKK)
    top_C = torch.linalg.eigvalsh(covariance_CKK)[:, -1].clamp_min(0)  # λ_max
    log_term = 2 * math.log(C / (1 - confidence))
    values, margins, caps = [], [], []
    rows = z_NK.detach()[y_N.argsort(stable=True)].double().cpu().split(count_C.tolist())
    for z_nK, m_K, root_KK, top in zip(rows, mean_CK, root_CKK, top_C, strict=True):
        copies = max(1, points // len(z_nK))
        repeated = [_blockwise_w1(z_nK, m_K, root_KK, points, copies, generator) for _ in range(repeats)]
        values.append(torch.stack(repeated).mean())
        margins.append((log_term * top / (copies * len(z_nK) * repeats)).sqrt())
        caps.append(((z_nK - m_K).square().sum(1).mean() + root_KK.square().sum()).sqrt())
    return W1Upper(torch.stack(values), torch.stack(margins), torch.stack(caps))


def _blockwise_w1(
    z_nK: Tensor, mean_K: Tensor, root_KK: Tensor, points: int, copies: int, generator: torch.Generator
) -> Tensor:
    """One repeat: every sample of the class in exactly one assignment, blocks weighted by their size."""
    n = len(z_nK)
    order_n = torch.randperm(n, generator=generator, device=generator.device).cpu()
    total = z_nK.new_zeros(())
    for block in order_n.tensor_split(-(-n // points)):
        a_MK = z_nK[block].repeat_interleave(copies, 0)
        xi_MK = torch.randn(a_MK.shape, dtype=a_MK.dtype, generator=generator, device=generator.device)
        total = total + assignment_w1(a_MK, mean_K + xi_MK.cpu() @ root_KK) * len(block)
    return total / n
