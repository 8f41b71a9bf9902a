"""N2 in closed form after the last epoch: where it is better, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from toys import CLASSES, batches, lifted

import protoseam as ps
from protoseam.seam.heads import refit_if_better

DATA = batches()


def right(net: ps.Lifted) -> int:
    net.eval()
    return sum(int((net(x).argmax(1) == y).sum()) for x, y in DATA)


def spoiled(net: ps.Lifted, epoch: int) -> Tensor:
    """A head that answers the last class, and an epoch's end."""
    with torch.no_grad():
        net.n2.weight.zero_()
        net.n2.bias.copy_(torch.arange(CLASSES))
    before = net.n2.weight.clone()
    net.set_progress(epoch, 3)
    net.refresh(DATA)
    return before


def test_the_last_epoch_replaces_a_head_by_a_better_discriminant() -> None:
    net = lifted(init="fsinit")
    net.initialize(DATA)
    assert torch.equal(spoiled(net, 1), net.n2.weight)  # not the last epoch
    before = right(net)
    spoiled(net, 2)
    assert right(net) > before
    found = net.n2.weight.clone()
    net.refit_head(DATA)
    assert torch.allclose(net.n2.weight / net.n2.weight.norm(), found / found.norm())


def test_a_head_weighted_by_counts_needs_them() -> None:
    net = lifted(class_weights="frequency")
    with pytest.raises(ps.SeamError, match="needs the class counts"):
        net.refit_head()
    net.initialize(DATA)
    net.refit_head()
    assert net.n2.weight.isfinite().all()


def gap(net: ps.Lifted) -> float:
    """The mean gap between the two largest logits of the training data."""
    with torch.no_grad():
        largest = torch.cat([net.eval()(x).topk(2, dim=1).values for x, _ in DATA])
    return float((largest[:, 0] - largest[:, 1]).mean())


@pytest.mark.parametrize(("sharpness", "expected"), [(0.5, 0.5), (1e6, None)])
def test_the_discriminant_is_no_surer_than_the_head_it_replaces(
    sharpness: float, expected: float | None
) -> None:
    net = lifted(init="fsinit")
    net.initialize(DATA)
    net.refit_head(DATA)
    own = gap(net)
    with torch.no_grad():
        net.n2.weight.zero_()
        net.n2.bias.copy_(sharpness * torch.arange(CLASSES))  # this gap, and the same answer to everything
    net.set_progress(2, 3)
    net.refresh(DATA)
    assert gap(net) == pytest.approx(own if expected is None else expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore:all embeddings are equal")
@pytest.mark.parametrize("collapsed", [False, True])
def test_a_head_without_a_gap_is_replaced_as_it_is(collapsed: bool) -> None:
    net = lifted(init="random")
    net.initialize(DATA)
    x, y = torch.cat([x for x, _ in DATA]), torch.cat([y for _, y in DATA])
    with torch.no_grad():
        if collapsed:
            net.n1[-1].weight.zero_()
        net.n2.weight.zero_()
        net.n2.bias.zero_()
        z = net.eval().embed(x)
        before = right(net)
        better = refit_if_better(net, z, y)
        assert right(net) > before if better else right(net) == before
    assert better or collapsed
    assert net.n2.weight.isfinite().all()


def test_a_head_that_is_no_worse_than_the_discriminant_stays() -> None:
    net = lifted(init="fsinit")
    net.initialize(DATA)
    net.refit_head(DATA)
    with torch.no_grad():
        net.n2.weight.mul_(3)  # the same answers
        net.n2.bias.mul_(3)
    before = net.n2.weight.clone()
    net.set_progress(2, 3)
    net.refresh(DATA)
    assert torch.equal(net.n2.weight, before)


@pytest.mark.filterwarnings("ignore:class 0 has no sample")
def test_no_head_is_replaced_where_that_makes_no_sense() -> None:
    without = lifted(init="fsinit", refit=False)
    frozen = lifted(init="fsinit")
    frozen.n2.requires_grad_(False)
    absent = lifted(init="random")
    for net in (without, frozen):
        net.initialize(DATA)
        assert torch.equal(spoiled(net, 2), net.n2.weight)
    few = [(x[y > 0], y[y > 0]) for x, y in DATA]
    absent.initialize(few)
    with torch.no_grad():
        absent.n2.weight.zero_()
    absent.set_progress(2, 3)
    absent.refresh(few)
    assert not absent.n2.weight.any()


def test_mixed_targets_leave_the_head_as_it_was_trained() -> None:
    net = lifted(init="fsinit", covariance=ps.RunningCovariance())
    net.initialize(DATA)
    net.objective(*DATA[0])
    net.set_progress(2, 3)
    before = net.n2.weight.clone()
    mixed = [(x, torch.full((len(x), CLASSES), 1 / CLASSES)) for x, _ in DATA]
    with pytest.warns(
        ps.SeamWarning, match="N2 stays as it was trained: refresh needs the class of each sample"
    ):
        net.refresh(mixed)
    assert torch.equal(net.n2.weight, before)


def test_data_without_an_end_is_not_swept() -> None:
    class Endless:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield from DATA

    net = lifted(init="random", covariance=ps.RunningCovariance())
    before = net.n2.weight.clone()
    net.set_progress(0, 1)
    net.objective(*DATA[0])
    net.refresh(Endless())
    net.refresh()
    assert torch.equal(net.n2.weight, before)
