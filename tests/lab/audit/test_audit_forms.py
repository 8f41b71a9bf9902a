"""The audit's modes, the shapes of its factors, its heads, and what it says of inputs that it cannot use."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from made_up_seams import seam
from theory_oracles import normal, random_psd, rng
from torch import nn

from protoseam import theory
from protoseam.core.covariance import class_moments
from protoseam.lab import audit as audits
from protoseam.lab.audit import FULL, QUICK, ClassMoments


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
        torch.testing.assert_close(audits.full_factors(factors, 3, 4), full)
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
