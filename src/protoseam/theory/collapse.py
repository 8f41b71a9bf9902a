"""Neural-collapse measures NC1–NC4 (Papyan, Han & Donoho 2020), defined for every seam width.

Legend: N samples, C classes, K seam width.

They take class moments ``(count_C, mean_CK, covariance_CKK)``, covariances divided by |D_i|. All are 0 at perfect
collapse, and all but NC4 are invariant to scale, rotation and translation of the embeddings.

NC2 needs care. Its limit, the simplex equiangular tight frame, has all cosines −1/(C−1) and exists only for K ≥ C − 1,
so each measure is reported beside the least value possible (``*_floor``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError


@dataclass(frozen=True)
class Collapse:
    """All measures at once; see the functions of the same names.

    Attributes:
        nc1: tr(Σ_W Σ_B⁺)/n.
        nc1_ratio: tr Σ_W / tr Σ_B.
        nc2_equinorm: relative spread of the norms of the centred means.
        nc2_angle: root mean square of cos_ij + 1/(n−1).
        nc2_angle_floor: its least possible value.
        nc2_max_cosine: cosine of the closest pair.
        nc2_max_cosine_floor: its least possible value.
        nc2_frame_excess: frame potential over its minimum, minus 1.
        nc3: distance between the head's rows and the means; NaN without a head.
        nc4: share of answers that are not the nearest mean.
    """

    nc1: float
    nc1_ratio: float
    nc2_equinorm: float
    nc2_angle: float
    nc2_angle_floor: float
    nc2_max_cosine: float
    nc2_max_cosine_floor: float
    nc2_frame_excess: float
    nc3: float
    nc4: float


def nc1(count_C: Tensor, mean_CK: Tensor, covariance_CKK: Tensor) -> tuple[float, float]:
    """Within-class variability: ``tr(Σ_W Σ_B⁺)/C`` and the plain ratio ``tr Σ_W / tr Σ_B``.

    Σ_W averages over samples, Σ_B over class means (1/C each). The pseudo-inverse does not see within-class
    variance orthogonal to all mean differences, which exists once K ≥ C; the ratio does.

    Args:
        count_C: samples per class.
        mean_CK: class means μ_i.
        covariance_CKK: covariances Σ_i.
    """
    if bool((count_C == 0).any()):
        raise ArgumentError(
            f"class {int((count_C == 0).nonzero()[0])} has no sample, so it has no mean: "
            "measure collapse on data that hold every class, or leave the class out of all three moments"
        )
    if len(mean_CK) < 2:
        raise ArgumentError(f"neural collapse compares classes, got {len(mean_CK)}")
    weight_C = count_C.double() / count_C.sum()
    within_KK = torch.einsum("c,ckl->kl", weight_C, covariance_CKK.detach().double())
    centred_CK = _centred(mean_CK)
    between_KK = centred_CK.T @ centred_CK / len(centred_CK)
    values_K, vectors_KK = torch.linalg.eigh(between_KK)
    # rank ≤ min(K, C−1); rounding leaves eigenvalues of about K·ε·λ_max in the null space
    keep_K = values_K > len(values_K) * 10 * torch.finfo(torch.float64).eps * values_K.max()
    if not bool(keep_K.any()):
        raise ArgumentError(
            "nc1: all class means coincide, so Σ_B = 0; the embeddings carry no class information"
        )
    along_K = torch.einsum("ki,kl,li->i", vectors_KK, within_KK, vectors_KK)
    inverse_K = torch.where(keep_K, 1 / values_K.where(keep_K, torch.ones_like(values_K)), 0.0)
    return float((along_K * inverse_K).sum()) / len(mean_CK), float(within_KK.trace() / between_KK.trace())


def nc2(mean_CK: Tensor) -> dict[str, float]:
    """Geometry of the centred class means.

    The values of :class:`Collapse`, without ``nc2_`` before their names. ``frame_excess`` is 0 exactly at a tight
    frame. A vector and its negative have the same potential, so it does not see them: hence the other two.

    Args:
        mean_CK: class means μ_i.
    """
    C, K = mean_CK.shape
    if C < 2:
        raise ArgumentError(f"nc2 compares class means, got {C} class")
    centred_CK = _centred(mean_CK)
    norm_C = centred_CK.norm(dim=1)
    if not bool((norm_C > 0).all()):
        raise ArgumentError(
            f"nc2: the mean of class {int(norm_C.argmin())} is the global mean and has no direction"
        )
    unit_CK = centred_CK / norm_C[:, None]
    cosine_CC = unit_CK @ unit_CK.T
    off_diagonal = ~torch.eye(C, dtype=torch.bool, device=mean_CK.device)
    rank = min(K, C - 1)
    return {
        "equinorm": float(norm_C.std(correction=0) / norm_C.mean()),
        "angle": float((cosine_CC[off_diagonal] + 1 / (C - 1)).square().mean().sqrt()),
        "angle_floor": angle_deviation_floor(C, K),
        "max_cosine": float(cosine_CC[off_diagonal].max()),
        "max_cosine_floor": max_cosine_floor(C, K),
        "frame_excess": float(cosine_CC.square().sum()) * rank / C**2 - 1,
    }


def nc3(weight_CK: Tensor, mean_CK: Tensor) -> float:
    """Self-duality: ‖W2/‖W2‖_F − M/‖M‖_F‖_F, both centred over the classes; 0 aligned, 2 opposed.

    Centring W2 is free, since softmax does not see a common shift of the rows.

    Args:
        weight_CK: the head's weight, one row per class.
        mean_CK: class means μ_i.
    """
    if weight_CK.shape != mean_CK.shape:
        raise ArgumentError(
            f"nc3 compares a linear head's rows with class means, got {tuple(weight_CK.shape)} and "
            f"{tuple(mean_CK.shape)}: it is not defined for a deeper head"
        )
    head_CK, centred_CK = _centred(weight_CK), _centred(mean_CK)
    return float((head_CK / head_CK.norm() - centred_CK / centred_CK.norm()).norm())


def nc4(z_NK: Tensor, prediction_N: Tensor, mean_CK: Tensor) -> float:
    """Share of samples on which the network and the nearest class mean disagree.

    Args:
        z_NK: embeddings.
        prediction_N: the network's answers.
        mean_CK: class means μ_i.
    """
    # ‖z − μ‖² − ‖z‖²: the same arg min without an N×C×K tensor, taken about the global mean for accuracy
    origin_K = mean_CK.detach().double().mean(0)
    mean_CK = mean_CK.detach().double() - origin_K
    distance_NC = mean_CK.square().sum(1) - 2 * (z_NK.detach().double() - origin_K) @ mean_CK.T
    return float((distance_NC.argmin(1) != prediction_N).double().mean())


def collapse_measures(
    count_C: Tensor,
    mean_CK: Tensor,
    covariance_CKK: Tensor,
    weight_CK: Tensor | None,
    z_NK: Tensor,
    prediction_N: Tensor,
) -> Collapse:
    """NC1–NC4 in one object; ``weight_CK=None`` (a head that is not one Linear) leaves NC3 as NaN.

    Args:
        count_C: samples per class.
        mean_CK: class means μ_i.
        covariance_CKK: covariances Σ_i.
        weight_CK: the head's weight; None: no NC3.
        z_NK: embeddings.
        prediction_N: the network's answers.
    """
    geometry = {f"nc2_{name}": value for name, value in nc2(mean_CK).items()}
    variability, ratio = nc1(count_C, mean_CK, covariance_CKK)
    duality = math.nan if weight_CK is None else nc3(weight_CK, mean_CK)
    agreement = nc4(z_NK, prediction_N, mean_CK)
    return Collapse(nc1=variability, nc1_ratio=ratio, **geometry, nc3=duality, nc4=agreement)


def angle_deviation_floor(num_classes: int, dim: int) -> float:
    """Least root mean square of cos_ij + 1/(C−1): 0 where a simplex exists, √(C(C−1−K)/K)/(C−1) below.

    From Σ_ij cos = ‖Σ_i u_i‖² ≥ 0 and the frame potential Σ_ij cos² ≥ C²/r, r = min(K, C − 1) (Benedetto & Fickus).
    Attained by centred unit-norm tight frames, which real harmonic frames provide for every even K < C − 1.

    Args:
        num_classes: number of classes.
        dim: the seam's width k.
    """
    C, r = num_classes, min(dim, num_classes - 1)
    return math.sqrt(C * (C - 1 - r) / r) / (C - 1)


def max_cosine_floor(num_classes: int, dim: int) -> float:
    """No C unit vectors of R^K have a smaller largest cosine than this.

    −1/(C−1) for C ≤ K+1 (the simplex) and 0 for C ≤ 2K (the cross-polytope; Rankin), both attained. Beyond,
    Levenshtein's bound C ≤ K(1−s)(2+(K+1)s)/(1−Ks²), valid up to C = K(K+3)/2 and kept constant from there.

    Args:
        num_classes: number of classes.
        dim: the seam's width k.
    """
    C, K = min(num_classes, dim * (dim + 3) // 2), dim
    if num_classes <= K + 1:
        return -1 / (num_classes - 1)
    if C <= 2 * K:
        return 0.0
    # C(1 − Ks²) = K(1−s)(2+(K+1)s)  ⇔  K(C−K−1)s² + K(K−1)s − (C−2K) = 0
    a, b, c = K * (C - K - 1), K * (K - 1), C - 2 * K
    return 2 * c / (b + math.sqrt(b * b + 4 * a * c))


def _centred(matrix_CK: Tensor) -> Tensor:
    matrix_CK = matrix_CK.detach().double()
    return matrix_CK - matrix_CK.mean(0)
