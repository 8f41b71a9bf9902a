"""A rate for all groups, N2 and the prototypes included, is told; rates that are equal by wish are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from toys import batches, lifted, sgd, step

import protoseam as ps
from protoseam.seam.checks import TrainingChecks

DATA = batches()


def cycled(one_rate: bool, epochs: int) -> list[str]:
    net = lifted(init="fsinit")
    optimizer = torch.optim.AdamW(net.param_groups(1e-3))
    highest = 1e-3 if one_rate else [g["lr"] for g in optimizer.param_groups]
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=epochs * len(DATA) + 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in net.epochs(DATA, epochs):
            for x, y in DATA:
                step(net, optimizer, x, y)
                cycle.step()
    return [str(w.message) for w in said if "same rate" in str(w.message)]


def test_a_scheduler_that_gives_all_groups_one_rate_is_told_once() -> None:
    (message,) = cycled(one_rate=True, epochs=3)
    assert "net.param_groups gave them 0.001 and 0.03" in message
    assert "max_lr=[g['lr'] for g in optimizer.param_groups]" in message
    assert not cycled(one_rate=False, epochs=3)


def test_a_swa_rate_for_all_groups_is_told_how_to_be_several() -> None:
    net = lifted()
    optimizer = sgd(net)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)
    net.set_progress(0, 3)
    step(net, optimizer, *DATA[0])
    scheduler.step()
    with pytest.warns(ps.SeamWarning, match=r"same rate.*for OneCycleLR, or a list swa_lr=\[…\] for SWALR"):
        net.set_progress(1, 3)


def test_a_rate_set_by_hand_for_all_groups_is_told() -> None:
    net = lifted()
    optimizer = sgd(net)
    net.set_progress(0, 3)
    step(net, optimizer, *DATA[0])
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    with pytest.warns(ps.SeamWarning, match=r"same rate, 0\.01.*a line or a scheduler that knows one rate"):
        net.set_progress(1, 3)


def test_rates_that_are_equal_by_wish_or_zero_are_no_mistake() -> None:
    for given, now in (([0.1, 0.1, 0.1], [0.1] * 3), ([0.1, 3.0, 3.0], [0.0] * 3)):
        checks = TrainingChecks(ready=True)
        checks.rates(given, [{"lr": rate} for rate in now])
        assert not checks._said
