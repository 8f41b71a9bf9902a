"""The theory's functions on CUDA tensors give what they give on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from made_up_seams import linear_head
from torch import Tensor

from protoseam import theory
from protoseam.core.covariance import class_factors
from protoseam.lab import audit as audits

pytestmark = pytest.mark.cuda


def psd(count: int, dim: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(count, dim, rank, generator=generator, dtype=torch.float64)
    return a @ a.mT / rank


def test_bures_over_a_hundred_classes_singular_and_nearly_equal_ones_too() -> None:
    a, b = psd(100, 32, 40, 0), psd(100, 32, 40, 1)
    a[:10] = psd(10, 32, 3, 2)  # singular
    b[10:20] = a[10:20] * (1 + 1e-9)  # nearly equal
    there = theory.bures(a.cuda(), b.cuda())
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), theory.bures(a, b), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("settings", [audits.QUICK, audits.FULL], ids=["quick", "full"])
def test_an_audit_on_the_device_is_the_audit(settings: audits.AuditSettings) -> None:
    generator = torch.Generator().manual_seed(4)
    classes, dim, each = 10, 8, 60
    y = torch.arange(classes * each) % classes
    centres = 3 * torch.randn(classes, dim, generator=generator)
    z = centres[y] + torch.randn(len(y), dim, generator=generator)
    prototypes = centres + 0.1 * torch.randn(classes, dim, generator=generator)
    factors = class_factors(z, y, classes, 0.2)[0]
    weight, bias = centres / 3, -centres.square().sum(1) / 6
    settings = dataclasses.replace(settings, points=24, directions=8)

    def audit(device: str) -> dict[str, float]:
        head = linear_head(weight.to(device), bias.to(device))
        moved = (t.to(device) for t in (z, y, prototypes, factors))
        drawn = torch.Generator().manual_seed(5)
        return audits.audit_seam(*moved, head, rho=4.0, floor=0.2, generator=drawn, settings=settings).flat()

    here, there = audit("cpu"), audit("cuda")
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert there[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name
