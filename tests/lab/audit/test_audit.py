"""The audit's terms against loops, quadrature and the primitives; and that its bounds are bounds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_seams import SMALL, Seam, linear_head, seam
from theory_oracles import PROPERTY, bures_trace, gauss_expectation, hessian_loops, losses, rng
from torch import Tensor, nn

from protoseam import theory
from protoseam.core.covariance import class_moments
from protoseam.lab.audit import FULL, QUICK

seeds = st.integers(0, 10**6)


def test_every_term_against_loops() -> None:
    s = seam(1)
    audit = s.audit(dataclasses.replace(FULL, pairs=4096))
    c = audit.classes
    for i in range(3):
        z_nK, loss = s.of_class(i), losses(s.weight_CK, s.bias_C, i)
        mean_K, covariance_KK = z_nK.mean(0), torch.cov(z_nK.T, correction=0)
        assert int(c.count_P[i]) == len(z_nK)
        assert float(c.risk_P[i]) == pytest.approx(float(loss(z_nK).mean()), rel=1e-12)
        right = [int((s.weight_CK @ z + s.bias_C).argmax()) == i for z in z_nK]
        assert float(c.accuracy_P[i]) == pytest.approx(sum(right) / len(right))
        steep = max(float((s.weight_CK[j] - s.weight_CK[i]).norm()) for j in range(3))
        assert float(c.lipschitz_P[i]) == pytest.approx(steep)
        slopes = []
        for z in z_nK:
            p = (s.weight_CK @ z + s.bias_C).softmax(0)
            slopes.append(float((s.weight_CK.T @ (p - torch.eye(3, dtype=torch.float64)[i])).norm()))
        assert float(c.slope_P[i]) == pytest.approx(sum(slopes) / len(slopes))
        assert float(c.mean_mismatch_P[i]) == pytest.approx(float((mean_K - s.prototype_CK[i]).norm()))
        expected = bures_trace(covariance_KK.numpy(), s.sampling_CKK[i].numpy())
        assert float(c.covariance_mismatch_P[i]) == pytest.approx(expected, rel=1e-6)
        shifted = covariance_KK + s.floor**2 * torch.eye(2)
        assert float(c.floor_bias_P[i]) == pytest.approx(bures_trace(covariance_KK.numpy(), shifted.numpy()))
        square = sum(float((z - s.prototype_CK[i]).square().sum()) for z in z_nK) / len(z_nK)
        assert float(c.mean_square_P[i]) == pytest.approx(square)
        assert float(c.sampling_trace_P[i]) == pytest.approx(float(s.sampling_CKK[i].trace()))
        estimate_KK = s.sampling_CKK[i] - s.floor**2 * torch.eye(2)
        assert float(c.estimation_error_P[i]) == pytest.approx(float((estimate_KK - covariance_KK).norm()))
        top = float(torch.linalg.eigvalsh(s.sampling_CKK[i])[-1])
        assert float(c.sampled_lipschitz_P[i]) == pytest.approx(steep * math.sqrt(top / 4096))
        assert float(c.point_loss_P[i]) == pytest.approx(float(loss(s.prototype_CK[i])))
        hessian_KK = hessian_loops(s.weight_CK, s.bias_C, s.prototype_CK[i])
        assert float(c.curvature_P[i]) == pytest.approx(float((s.sampling_CKK[i] * hessian_KK).sum()) / 2)
        assert float(c.floor_curvature_P[i]) == pytest.approx(s.floor**2 * float(hessian_KK.trace()) / 2)
        exact = gauss_expectation(loss, s.prototype_CK[i], s.sampling_CKK[i])
        assert abs(float(c.sampled_loss_P[i]) - exact) < 4 * float(c.sampled_error_P[i])
        assert float(c.sampled_error_P[i]) < 0.03


def test_the_standard_error_is_the_deviation_from_audit_to_audit() -> None:
    s = seam(1)
    found = [s.audit(QUICK, generator=rng(i)).classes for i in range(200)]
    value_AP, error_AP = (
        torch.stack([getattr(c, name) for c in found]) for name in ("sampled_loss_P", "sampled_error_P")
    )
    ratio_P = error_AP.square().mean(0).sqrt() / value_AP.std(0)
    assert ((ratio_P > 0.8) & (ratio_P < 1.25)).all()


def test_a_standard_error_is_no_slack() -> None:
    """A loss that is rarely large hides from 16 pairs: the mean is far off, its standard error does not say so."""
    s = seam(7, dim=5, samples=90)
    found, truth = s.audit(QUICK).classes, s.audit(dataclasses.replace(FULL, pairs=20_000)).classes
    off_P = (found.sampled_loss_P - truth.sampled_loss_P).abs()
    assert float((off_P / found.sampled_error_P).max()) > 10
    assert (off_P < 4 * found.sampled_lipschitz_P).all()


def test_totals_are_sums_over_classes_under_both_weightings() -> None:
    s = seam(2)
    audit = s.audit()
    c = audit.classes
    n = [int(count) for count in c.count_P]
    for total, weights in (
        (audit.balanced, [1 / 3] * 3),
        (audit.as_sampled, [m / sum(n) for m in n]),
    ):

        def mean(x_P: Tensor, weights: list[float] = weights) -> float:
            return sum(w * float(x) for w, x in zip(weights, x_P, strict=True))

        assert total.risk == pytest.approx(mean(c.risk_P))
        assert total.accuracy == pytest.approx(mean(c.accuracy_P))
        assert total.sampled_loss == pytest.approx(mean(c.sampled_loss_P))
        error = math.sqrt(sum((w * float(e)) ** 2 for w, e in zip(weights, c.sampled_error_P, strict=True)))
        assert total.sampled_error == pytest.approx(error)
        assert total.rms == pytest.approx(math.sqrt(mean(c.mean_square_P)))
        found = {b.name: b for b in total.bounds}
        joint_P = (c.mean_mismatch_P.square() + c.covariance_mismatch_P.square()).sqrt()
        assert found["decomposition"].gap == pytest.approx(
            mean(c.lipschitz_P * (c.non_gaussianity_P + joint_P))
        )
        assert found["transport"].gap == pytest.approx(mean(c.lipschitz_P * c.transport_P))
        spread_P = (c.mean_square_P + c.sampling_trace_P).sqrt()
        assert found["coupling"].gap == pytest.approx(mean(c.lipschitz_P * spread_P))
        arguments = total.rms, s.floor, c.estimation_error_P, 2
        w_P = torch.tensor(weights, dtype=torch.float64)
        G, largest = audit.lipschitz, float(c.lipschitz_P.max())
        assert pytest.approx(theory.head_lipschitz(_linear(s))) == G
        for name, constant, sharp in (("sharp", largest, True), ("paper", G, False)):
            full = theory.controlled_bound_full(constant, *arguments, sharp=sharp, class_weights=w_P)
            assert found[f"controlled-full, {name}"].gap == pytest.approx(full.gap)
            part = theory.controlled_bound(
                constant, c.non_gaussianity_P, *arguments, sharp=sharp, class_weights=w_P
            )
            assert found[f"controlled, {name}"].gap == pytest.approx(part.gap)
        for b in total.bounds:
            assert b.gap == pytest.approx(sum(b.terms.values()))
            assert b.value == b.sampled_loss + b.gap
            assert b.slack == pytest.approx(
                math.sqrt(2 * math.log(2 / 0.001)) * float((w_P * c.sampled_lipschitz_P).norm())
            )
            assert b.tightness == pytest.approx(abs(b.risk - b.sampled_loss) / b.gap)
    moments = class_moments(s.z_NK, s.y_N, 3)
    prediction_N = (s.z_NK @ s.weight_CK.T + s.bias_C).argmax(1)
    assert audit.collapse == theory.collapse_measures(*moments, s.weight_CK, s.z_NK, prediction_N)
    assert audit.consensus == pytest.approx(2.0 * audit.balanced.rms**2)  # ρ/2 · E‖z − s‖² at ρ = 4


def _linear(s: Seam) -> nn.Linear:
    head = nn.Linear(s.weight_CK.shape[1], 3).double()
    with torch.no_grad():
        head.weight.copy_(s.weight_CK)
        head.bias.copy_(s.bias_C)
    return head


@PROPERTY
@given(seeds, st.floats(0.05, 1.0), st.integers(1, 2), st.floats(0.2, 6.0))
def test_every_bound_holds(seed: int, floor: float, dim: int, steep: float) -> None:
    """Random heads and heavy-tailed classes, with L_sample by quadrature: no Monte-Carlo error to hide behind."""
    s = seam(seed, dim=dim, floor=floor, steep=steep)
    exact_C = torch.tensor(
        [
            gauss_expectation(
                losses(s.weight_CK, s.bias_C, i), s.prototype_CK[i], s.sampling_CKK[i], nodes=60
            )
            for i in range(3)
        ]
    )
    for settings in (SMALL, QUICK):
        audit = s.audit(settings)
        c = audit.classes
        slack_P = c.sampled_lipschitz_P * math.sqrt(2 * math.log(2 * 3 / 0.001))
        assert ((c.sampled_loss_P - exact_C).abs() <= slack_P + 1e-6).all()
        gap_P = c.transfer(torch.ones(3, dtype=torch.float64)).gap_C
        assert ((c.risk_P - exact_C).abs() <= gap_P + 1e-6).all()
        assert ((c.risk_P - exact_C).abs() <= c.lipschitz_P * c.transport_P + 1e-6).all()
        for total in (audit.balanced, audit.as_sampled):
            weight_P = c.count_P / c.count_P.sum() if total.weighting == "as sampled" else torch.ones(3) / 3
            gap = abs(total.risk - float((weight_P * exact_C).sum()))
            assert all(gap <= b.gap + 1e-6 for b in total.bounds), total.weighting
        assert audit.balanced.all_hold
        assert bool(c.holds_P().all())
        # Σ_i G_i W1 by any route is at most the coupling's, and the paper's G is never below the G_i
        assert (c.transport_P <= c.coupling_P + 1e-12).all()
        assert audit.lipschitz >= float(c.lipschitz_P.max()) - 1e-12


@PROPERTY
@given(seeds, st.floats(0.05, 1.0))
def test_sampling_is_smoothing(seed: int, floor: float) -> None:
    audit = seam(seed, floor=floor).audit()
    assert (audit.classes.jensen_gap_P >= -1e-12).all()  # pair by pair, for a convex head
    assert audit.smoothing.holds
    assert audit.smoothing.gap == pytest.approx(float(audit.classes.jensen_gap_P.mean()))


def test_a_false_bound_is_called_false() -> None:
    """Shrink the Lipschitz constants by 10⁴ and the inequality fails: the verdict is not a constant."""
    s = seam(4)
    honest = linear_head(s.weight_CK, s.bias_C)
    liar = dataclasses.replace(
        honest, lipschitz=honest.lipschitz * 1e-4, lipschitz_C=honest.lipschitz_C * 1e-4
    )
    audit = s.audit(head=liar)
    assert not audit.balanced.all_hold
    assert not audit.balanced.bound("decomposition").holds
    assert not bool(audit.classes.holds_P().all())
