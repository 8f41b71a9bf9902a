"""train(4) == resume(train(2), 2), bit for bit, for every estimator."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from toys import Noisy, batches, lifted, sgd, train

import protoseam as ps

ESTIMATORS = {
    **{
        f"{kind.__name__} {structure} {floor}": kind(floor=floor, structure=structure)
        for kind in (ps.ExactCovariance, ps.RunningCovariance, ps.SwitchCovariance)
        for structure in ("full", "diagonal", "shared")
        for floor in (0.1, "auto")
    },
    "RunningCovariance forgetting": ps.RunningCovariance(window=20, mean_window=5),
    "IsotropicCovariance 1/ρ": ps.IsotropicCovariance(),
    "IsotropicCovariance given": ps.IsotropicCovariance(variance=0.3),
}
EPOCHS = 4


def fresh(covariance: ps.AbstractCovariance) -> tuple[ps.Lifted, torch.optim.Optimizer]:
    net = lifted(Noisy(), covariance=covariance, init="fsinit", class_weights="frequency", draws=2)
    return net, sgd(net)


def saved(net: ps.Lifted, optimizer: torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, file)
    file.seek(0)
    return file


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(p, q) for p, q in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("covariance", ESTIMATORS.values(), ids=ESTIMATORS.keys())
@pytest.mark.parametrize("stop", [2, 3])
def test_resuming_is_going_on(covariance: ps.AbstractCovariance, stop: int) -> None:
    """Stopped before or after SwitchCovariance has switched (the rate decays before epoch 2)."""
    net, optimizer = fresh(covariance)
    net.initialize(batches())
    train(net, optimizer, batches(), range(stop), EPOCHS)
    checkpoint = saved(net, optimizer)
    train(net, optimizer, batches(), range(stop, EPOCHS), EPOCHS)
    through = saved(net, optimizer)

    torch.manual_seed(999)  # another process, another random state, another initialisation
    other, other_optimizer = fresh(covariance)
    state = torch.load(checkpoint, weights_only=True)
    other.load_state_dict(state["net"])
    other_optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    train(other, other_optimizer, batches(), range(stop, EPOCHS), EPOCHS)
    resumed = saved(other, other_optimizer)
    assert equal(torch.load(through, weights_only=True), torch.load(resumed, weights_only=True))


def test_the_training_above_is_not_trivial() -> None:
    """Another random state gives another result, and the switch happens where it is said to."""
    net, optimizer = fresh(ps.SwitchCovariance())
    net.initialize(batches())
    before = net.state_dict()["prototypes"].clone()
    train(net, optimizer, batches(), range(2), EPOCHS)
    assert net.covariance.needs_pass
    checkpoint = torch.load(saved(net, optimizer), weights_only=True)
    train(net, optimizer, batches(), range(2, 3), EPOCHS)
    assert not net.covariance.needs_pass
    assert not torch.equal(net.prototypes, before)
    other, other_optimizer = fresh(ps.SwitchCovariance())
    other.load_state_dict(checkpoint["net"])
    other_optimizer.load_state_dict(checkpoint["optimizer"])
    torch.manual_seed(999)
    train(other, other_optimizer, batches(), range(2, 3), EPOCHS)
    assert not torch.equal(net.prototypes, other.prototypes)
