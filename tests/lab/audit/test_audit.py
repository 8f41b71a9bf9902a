"""The audit against loops, quadrature and the primitives; and that its bounds are bounds, on laws known exactly."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_oracles import (
    PROPERTY,
    bures_trace,
    gauss_expectation,
    hessian_loops,
    losses,
    normal,
    random_psd,
    rng,
)
from torch import Tensor, nn

from protoseam import theory
from protoseam.core.covariance import class_moments
from protoseam.lab import audit as audits
from protoseam.lab.audit import FULL, QUICK, Audit, AuditSettings, ClassMoments, audit_seam, linear_head

seeds = st.integers(0, 10**6)
# small assignments and few directions: the inequalities must hold whatever is spent on them
SMALL = dataclasses.replace(FULL, points=24, directions=8, pairs=32)


@dataclasses.dataclass
class Seam:
    """Three classes of skewed embeddings, a linear head, prototypes off the means, Σ̃ = Σ̂ + σ0²I."""

    z_NK: Tensor
    y_N: Tensor
    prototype_CK: Tensor
    factors: Tensor
    weight_CK: Tensor
    bias_C: Tensor
    floor: float

    def audit(self, settings: AuditSettings = SMALL, **changes: object) -> Audit:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes
        weight_CK, bias_C = values.pop("weight_CK"), values.pop("bias_C")
        head = values.pop("head", None) or linear_head(weight_CK, bias_C)
        more = {"rho": 4.0, "generator": rng(5), "training": None}
        return audit_seam(**{"head": head, "settings": settings, **more, **values})

    @property
    def sampling_CKK(self) -> Tensor:
        return audits.sampling_covariance(self.factors, *self.prototype_CK.shape)

    def of_class(self, c: int) -> Tensor:
        return self.z_NK[self.y_N == c]


def seam(seed: int, dim: int = 2, floor: float = 0.2, samples: int = 30, steep: float = 2.0) -> Seam:
    g = rng(seed)
    mean_CK = 1.5 * normal(g, 3, dim)
    y_N = torch.cat([torch.arange(3).repeat(2), torch.randint(0, 3, (samples,), generator=g)])
    z_NK = mean_CK[y_N] + 0.4 * normal(g, len(y_N), dim) ** 3
    estimate_CKK = random_psd(g, 3, dim, scale=0.3)
    factors = torch.linalg.cholesky(estimate_CKK + floor**2 * torch.eye(dim, dtype=torch.float64))
    prototype_CK = mean_CK + 0.3 * normal(g, 3, dim)
    return Seam(z_NK, y_N, prototype_CK, factors, steep * normal(g, 3, dim), normal(g, 3), floor)


# ------------------------------------------------------------------------------------- W1 from above


@PROPERTY
@given(seeds, st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_w1_upper_is_above_the_exact_distance_on_a_line(
    seed: int, samples: int, points: int, own: bool
) -> None:
    """Few points make blocks, many make copies; both must stay above, for Δ_i and for any other Gaussian."""
    g = rng(seed)
    z_CN = normal(g, 3, samples) ** 3
    mean_C = z_CN.mean(1) if own else normal(g, 3)
    variance_C = z_CN.var(1, correction=0) if own else normal(g, 3).square()
    exact_C = theory.w1_to_gaussian(z_CN, mean_C, variance_C.sqrt())
    y_N = torch.arange(3).repeat_interleave(samples)
    found = theory.w1_upper(
        z_CN.reshape(-1, 1), y_N, mean_C[:, None], variance_C[:, None, None], generator=g, points=points
    )
    assert (exact_C <= found.upper_C + 1e-9).all()
    cap_C = ((z_CN - mean_C[:, None]).square().mean(1) + variance_C).sqrt()
    torch.testing.assert_close(found.cap_C, cap_C)
    assert (found.upper_C <= cap_C + 1e-12).all()
    draws = max(1, points // samples) * samples * 2  # copies, and two repeats
    margin_C = (2 * variance_C * math.log(3 / 0.001) / draws).sqrt()
    torch.testing.assert_close(found.margin_C, margin_C)


def test_w1_upper_in_expectation_and_what_copies_gain() -> None:
    """The mean of the estimate is above W1; more draws for the same samples bring it down towards W1."""
    g = rng(0)
    z_N = normal(g, 6) ** 3
    exact = float(theory.w1_to_gaussian(z_N[None], z_N.mean()[None], z_N.std(correction=0)[None]))
    moments = z_N.mean().reshape(1, 1), z_N.var(correction=0).reshape(1, 1, 1)
    y_N = torch.zeros(6, dtype=torch.int64)
    values = {
        points: float(
            theory.w1_upper(z_N[:, None], y_N, *moments, generator=rng(1), points=points, repeats=400).value_C
        )
        for points in (2, 6, 120)
    }
    assert values[2] > values[6] > values[120] > exact
    assert values[120] < 1.05 * exact


def test_w1_upper_concentrates_as_its_margin_says() -> None:
    """Of 300 single estimates none is further below their mean than the margin at 99 %, and some are not far."""
    g = rng(3)
    z_NK, y_N = normal(g, 12, 3), torch.zeros(12, dtype=torch.int64)
    mean_CK, covariance_CKK = z_NK.mean(0, keepdim=True), torch.cov(z_NK.T, correction=0)[None]
    found = [
        theory.w1_upper(
            z_NK, y_N, mean_CK, covariance_CKK, generator=g, points=12, repeats=1, confidence=0.99
        )
        for _ in range(300)
    ]
    value = torch.stack([f.value_C[0] for f in found])
    below = (value.mean() - value.min()) / found[0].margin_C[0]
    assert 0.2 < float(below) < 1.0


# ------------------------------------------------------------------------------------- the terms


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


# ------------------------------------------------------------------------------------- modes, shapes, heads


@pytest.mark.parametrize("dim", [2, 5])
def test_the_quick_mode_agrees_with_the_full_one(dim: int) -> None:
    s = seam(7, dim=dim, samples=90)
    full, quick = s.audit(FULL), s.audit(QUICK)
    a, b = full.classes, quick.classes
    for name in (
        "risk_P",
        "mean_mismatch_P",
        "mean_square_P",
        "lipschitz_P",
        "sampling_trace_P",
        "curvature_P",
    ):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), msg=name)
    torch.testing.assert_close(a.covariance_mismatch_P, b.covariance_mismatch_P, rtol=1e-5, atol=1e-4)
    assert (b.non_gaussianity_P >= a.non_gaussianity_P - 1e-12).all()
    assert (a.non_gaussianity_P >= a.non_gaussianity_lower_P).all()
    torch.testing.assert_close(
        b.non_gaussianity_P, theory.non_gaussianity_cap(class_moments(s.z_NK, s.y_N, 3)[2])
    )
    slack_P = (
        a.sampled_lipschitz_P + b.sampled_lipschitz_P
    )  # standard errors are no measure of 16 rare losses
    assert ((a.sampled_loss_P - b.sampled_loss_P).abs() < 4 * slack_P).all()
    assert full.balanced.bound("coupling").gap == pytest.approx(quick.balanced.bound("coupling").gap)
    torch.testing.assert_close(b.transport_P, b.coupling_P)  # all that is known without an assignment
    assert quick.balanced.bound("decomposition").gap >= full.balanced.bound("decomposition").gap
    flat = quick.flat()
    assert all(isinstance(value, float) and math.isfinite(value) for value in flat.values())
    terms = [flat[name] for name in ("non_gaussianity", "mean_mismatch", "covariance_mismatch")]
    assert flat["bound"] == pytest.approx(flat["sampled_loss"] + sum(terms))
    assert {"risk", "nc1", "nc4", "coupling_bound", "curvature"} <= flat.keys()


def test_every_factor_shape_is_its_full_form() -> None:
    s, g = seam(8, dim=4), rng(9)
    sigma_CK = 0.3 + torch.rand(3, 4, generator=g, dtype=torch.float64)
    one_KK = torch.linalg.cholesky(random_psd(g, 1, 4) + 0.1 * torch.eye(4, dtype=torch.float64))
    shapes = {
        (3, 4): torch.diag_embed(sigma_CK),
        (1, 1): 0.7 * torch.eye(4, dtype=torch.float64).expand(3, 4, 4),
        (1, 4, 4): one_KK.expand(3, 4, 4),
    }
    for factors, full in zip(
        (sigma_CK, torch.full((1, 1), 0.7).double(), one_KK), shapes.values(), strict=True
    ):
        torch.testing.assert_close(audits.sampling_covariance(factors, 3, 4), full @ full.mT)
        a, b = s.audit(factors=factors, floor=None), s.audit(factors=full, floor=None)
        for name in ("sampled_loss_P", "covariance_mismatch_P", "transport_P"):
            torch.testing.assert_close(getattr(a.classes, name), getattr(b.classes, name))
        assert a.balanced.all_hold
    with pytest.raises(
        ValueError, match=r"factors of shape \(2, 4\) fit no covariance structure of 3 classes"
    ):
        s.audit(factors=sigma_CK[:2])


def test_float32_inputs_give_the_same_numbers() -> None:
    s = seam(3)
    single = {
        name: getattr(s, name).float() for name in ("z_NK", "prototype_CK", "factors", "weight_CK", "bias_C")
    }
    a, b = s.audit(QUICK), s.audit(QUICK, **single)
    for name, value in a.flat().items():
        assert b.flat()[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_the_floor_is_found_or_checked() -> None:
    s = seam(5, dim=3, floor=0.3)
    g = rng(1)
    estimate_CKK = random_psd(g, 3, 3, rank=1)  # singular, so that λ_min(Σ̃) is σ0² itself
    factors = torch.linalg.cholesky(estimate_CKK + 0.09 * torch.eye(3, dtype=torch.float64))
    assert s.audit(factors=factors, floor=None).floor == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"floor σ0 = 0\.5 does not belong to these factors"):
        s.audit(factors=factors, floor=0.5)


def test_a_class_without_held_out_samples_is_left_out() -> None:
    s = seam(6, samples=60)
    kept = s.y_N != 1
    whole, part = s.audit(), s.audit(z_NK=s.z_NK[kept], y_N=s.y_N[kept])
    assert part.classes.index_P.tolist() == [0, 2]
    for name in ("risk_P", "sampled_loss_P", "mean_mismatch_P", "covariance_mismatch_P", "lipschitz_P"):
        torch.testing.assert_close(
            getattr(part.classes, name), getattr(whole.classes, name)[[0, 2]], msg=name
        )
    assert part.balanced.all_hold
    prediction_N = (s.z_NK[kept] @ s.weight_CK.T + s.bias_C).argmax(1)
    means = [s.of_class(0).mean(0), s.of_class(2).mean(0)]
    disagree = 0
    for z, predicted in zip(s.z_NK[kept], prediction_N, strict=True):
        nearest = 0 if float((z - means[0]).norm()) < float((z - means[1]).norm()) else 2
        disagree += nearest != int(predicted)
    assert part.collapse.nc4 == pytest.approx(disagree / int(kept.sum()))


def test_a_dead_network_has_bounds_but_no_collapse_measures() -> None:
    s = seam(6)
    audit = s.audit(z_NK=torch.ones_like(s.z_NK), settings=QUICK)
    assert audit.balanced.all_hold
    assert math.isnan(audit.collapse.nc1)
    assert audit.flat().keys() & {"nc1", "nc4"} == set()


def test_a_deeper_head() -> None:
    s = seam(10)
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    audit = s.audit(head=audits.audited_head(head))
    double = audits.audited_head(head.double())
    hessian_CKK = theory.loss_hessian(double.logits, s.prototype_CK)
    torch.testing.assert_close(audit.classes.curvature_P, (s.sampling_CKK * hessian_CKK).sum((1, 2)) / 2)
    assert audit.smoothing.holds is None
    assert math.isnan(audit.collapse.nc3)
    assert audit.balanced.all_hold
    assert "nc3" not in s.audit(QUICK, head=double).flat()
    constant = theory.class_lipschitz(head)
    function = audits.audited_head(lambda z: head(z), lipschitz=constant)
    again = s.audit(head=function)
    torch.testing.assert_close(again.classes.risk_P, audit.classes.risk_P)
    torch.testing.assert_close(again.classes.lipschitz_P, constant)
    with pytest.raises(ValueError, match="a plain function has no known Lipschitz constant"):
        audits.audited_head(lambda z: z)


def test_training_moments_say_what_is_generalisation() -> None:
    s, g = seam(11, samples=60), rng(12)
    training = ClassMoments(*class_moments(s.z_NK + 0.1 * normal(g, *s.z_NK.shape), s.y_N, 3))
    held_out = class_moments(s.z_NK, s.y_N, 3)
    side = s.audit(training=training).training
    assert side is not None
    eye_KK = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(side.mean_mismatch_P, (training.mean_CK - s.prototype_CK).norm(dim=1))
    torch.testing.assert_close(side.mean_shift_P, (training.mean_CK - held_out[1]).norm(dim=1))
    torch.testing.assert_close(side.covariance_shift_P, theory.bures(held_out[2], training.covariance_CKK))
    floored_CKK = training.covariance_CKK + s.floor**2 * eye_KK
    torch.testing.assert_close(side.sampling_shift_P, theory.bures(floored_CKK, s.sampling_CKK))
    assert s.audit(training=training).spectra.keys() == {"held-out", "sampled from", "training"}


def test_spectrum() -> None:
    values_CK = torch.tensor([[4.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    turn_KK = torch.linalg.qr(normal(rng(0), 4, 4))[0]
    found = audits.covariance_spectrum(turn_KK @ torch.diag_embed(values_CK) @ turn_KK.T)
    torch.testing.assert_close(found.eigenvalue_K, torch.tensor([2.5, 1.5, 1.0, 1.0], dtype=torch.float64))
    assert found.trace == pytest.approx(6.0)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.125, 0.125, 0.25))
    assert found.effective_rank == pytest.approx((math.exp(entropy) + 4) / 2)
    assert (found.condition_median, found.condition_max) == pytest.approx((1.0, 4.0))
    singular = audits.covariance_spectrum(torch.diag_embed(values_CK * torch.tensor([1.0, 1.0, 0.0, 1.0])))
    assert math.isinf(singular.condition_median)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"z_NK": torch.zeros(4, 5)}, r"embeddings \(4, 5\) and labels"),
        ({"z_NK": torch.zeros(0, 2), "y_N": torch.zeros(0, dtype=torch.int64)}, "no held-out sample"),
        ({"z_NK": torch.zeros(2, 2), "y_N": torch.tensor([0, 3])}, "labels run from 0 to 3"),
        ({"z_NK": torch.zeros(2, 2), "y_N": torch.tensor([1, 1])}, "1 of 3 has held-out samples"),
        ({"z_NK": torch.full((2, 2), math.nan), "y_N": torch.tensor([0, 1])}, "NaN or infinity"),
        ({"bias_C": torch.full((3,), math.inf)}, "loss is NaN or infinite"),
        ({"settings": dataclasses.replace(QUICK, pairs=1)}, "at least 2 antithetic pairs"),
    ],
)
def test_mistakes_are_answered_in_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        seam(0).audit(**changes)
