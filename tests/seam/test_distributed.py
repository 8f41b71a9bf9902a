"""Two processes with half the data each: the factors, FSInit and prototypes of one process with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toys import CLASSES, DIM, FEATURES, Batch, batches, lifted, sgd, step

import protoseam as ps
from processes import leave_together

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")

STRUCTURES = ("full", "diagonal", "shared")
FORGETTING_NOTHING = {"window": 10**6, "mean_window": 10**6}
ESTIMATORS: dict[str, ps.AbstractCovariance] = {
    **{f"exact {s}": ps.ExactCovariance(0.2, s) for s in STRUCTURES},
    **{f"exact {s} auto": ps.ExactCovariance("auto", s) for s in STRUCTURES},
    **{f"running {s}": ps.RunningCovariance(0.2, s, **FORGETTING_NOTHING) for s in STRUCTURES},
    **{f"running {s} auto": ps.RunningCovariance("auto", s, **FORGETTING_NOTHING) for s in STRUCTURES},
    "switch": ps.SwitchCovariance(0.2, **FORGETTING_NOTHING),
}


def data() -> list[Batch]:
    """Every half of every batch holds two samples of each class, so that halves of classes agree as well."""
    g = torch.Generator().manual_seed(5)
    y = torch.arange(CLASSES).repeat(4)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=g)
    return [(centres[y] + torch.randn(len(y), FEATURES, generator=g), y) for _ in range(5)]


def share(rank: int, world: int) -> list[Batch]:
    """Consecutive parts of each batch."""
    return [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in data()]


def seen(rank: int, world: int) -> dict[str, Any]:
    """What a process of `world` finds out, with its share of the data."""
    found: dict[str, Any] = {}
    for name, covariance in ESTIMATORS.items():
        torch.manual_seed(0)
        net = lifted(covariance=covariance, init="fsinit")
        net.initialize(share(rank, world))
        for epoch, lr in enumerate((0.1, 0.1, 0.001)):  # the switch happens at the last
            net.set_progress(epoch, 3, lr=lr)
            for x, y in share(rank, world):
                net(x, y)
            net.refresh(share(rank, world))
            if epoch == 0:
                early = {key: b.clone() for key, b in net.covariance.state_dict().items()}
        found[name] = {
            "early": early,
            "prototypes": net.prototypes.detach(),
            "counts": net.class_count,
            "factors": net.covariance.factors,
            "needs_pass": net.covariance.needs_pass,
            "moments": {key: b for key, b in net.covariance.state_dict().items() if key != "factors"},
        }
    return found


def trained(rank: int, world: int) -> dict[str, Any]:
    """Steps under DistributedDataParallel, from different random states and first prototypes."""
    found: dict[str, Any] = {}
    for name, covariance in {"exact": ps.ExactCovariance(), "running": ps.RunningCovariance()}.items():
        torch.manual_seed(rank)
        net = lifted(covariance=covariance, init="random")
        net.initialize(share(rank, world))
        found[f"{name} first"] = net.prototypes.detach().clone()
        wrapped = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = sgd(net)
        for epoch in range(2):
            net.set_progress(epoch, 2)
            for x, y in share(rank, world):
                terms = wrapped(x, y)
                optimizer.zero_grad()
                terms.total.backward()
                optimizer.step()
            if name == "running":
                found[f"own samples {epoch}"] = net.covariance.count_C_0.clone()
            net.refresh(share(rank, world))
        found[name] = net.state_dict()
    return found


def remembered(rank: int, world: int) -> torch.Tensor:
    """Samples a class after more of them than the window holds."""
    net = lifted(covariance=ps.RunningCovariance(window=8, mean_window=8))
    for x, y in share(rank, world):
        net(x, y)
    net.refresh()
    return net.covariance.count_C_0


def fitted(rank: int, world: int) -> dict[str, torch.Tensor]:
    """After the last step of a head that knows nothing, whose classifier the seam's width limits to two directions."""
    torch.manual_seed(0)
    net = lifted(dim=2, covariance=ps.RunningCovariance(structure="shared"), init="fsinit")
    net.initialize(share(rank, world))
    with torch.no_grad():
        net.n2.weight.zero_()
    net.refit_head(share(rank, world))
    return net.state_dict()


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    result = {
        "seen": seen(rank, world),
        "trained": trained(rank, world),
        "remembered": remembered(rank, world),
        "fitted": fitted(rank, world),
    }
    torch.save(result, f"{folder}/{rank}.pt")
    leave_together()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(process, args=(2, str(folder)), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return seen(0, 1)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_processes_find_what_one_finds(
    name: str, ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for rank in ranks:
        found, expected = rank["seen"][name], alone[name]
        assert torch.allclose(found["prototypes"], expected["prototypes"], atol=1e-6)
        assert found["counts"].tolist() == expected["counts"].tolist() == [20] * CLASSES
        assert torch.allclose(found["factors"], expected["factors"], atol=1e-6)
        assert found["needs_pass"] == expected["needs_pass"]
    assert torch.equal(ranks[0]["seen"][name]["factors"], ranks[1]["seen"][name]["factors"])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name.startswith("running")])
def test_after_a_refresh_every_process_holds_the_same_moments(name: str, ranks: list[dict[str, Any]]) -> None:
    """So any one of them can be the checkpoint."""
    first, second = (rank["seen"][name]["moments"] for rank in ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert sum(b.sum() for key, b in first.items() if key.startswith("count")) == 3 * 20 * CLASSES / 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_so_it_is_before_a_switch(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["seen"][name]["early"] for rank in ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["exact", "running"])
def test_trained_processes_stay_together(name: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["trained"] for rank in ranks)
    assert torch.equal(first[f"{name} first"], second[f"{name} first"])  # from different random states
    assert first[name].keys() == second[name].keys()
    for key in first[name]:
        assert torch.equal(first[name][key], second[name][key]), key
    assert not torch.equal(first[name]["prototypes"], first[f"{name} first"])


def test_running_samples_are_counted_once(ranks: list[dict[str, Any]]) -> None:
    """DDP copies the first process's buffers to the others, but not these."""
    for rank in ranks:
        assert rank["trained"]["own samples 0"].tolist() == [10.0] * CLASSES
        assert rank["trained"]["own samples 1"].tolist() == [20.0] * CLASSES


def test_processes_share_a_window(ranks: list[dict[str, Any]]) -> None:
    assert remembered(0, 1).tolist() == [8.0] * CLASSES
    assert sum(rank["remembered"] for rank in ranks).tolist() == [8.0] * CLASSES


def test_processes_fit_one_classifier(ranks: list[dict[str, Any]]) -> None:
    expected, (first, second) = fitted(0, 1), (rank["fitted"] for rank in ranks)
    for key, value in expected.items():
        if value.is_floating_point() and not key.startswith("covariance."):
            assert torch.allclose(first[key], value, atol=1e-4), key
    assert all(torch.equal(first[key], second[key]) for key in expected)


def test_one_process_needs_no_group() -> None:
    from protoseam.seam.processes import all_reduce, world_size

    assert not dist.is_initialized()
    assert world_size() == 1
    assert all_reduce() is None
    net = lifted()
    assert step(net, sgd(net), *batches()[0]).total.shape == ()
    assert net.prototypes.shape == (CLASSES, DIM)
