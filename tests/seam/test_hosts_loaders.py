"""Sweeps over the loaders of real hosts: each sample once on two processes, and the next epoch's order as it was."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from toys import CLASSES, FEATURES, lifted

import protoseam as ps
from processes import leave_together

N = 43  # neither a multiple of the processes nor of the batch


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, FEATURES, generator=g), torch.arange(N) % CLASSES)


def loaders() -> dict[str, Any]:
    """A process's training loader in each host."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from lightning.fabric import Fabric
    from transformers.trainer_pt_utils import LengthGroupedSampler

    torch.manual_seed(2)  # accelerate seeds a sampler with what it draws here
    accelerator = Accelerator(cpu=True)
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    fabric = Fabric(accelerator="cpu", devices=1)
    share = DistributedSampler(data(), shuffle=True)
    by_length = LengthGroupedSampler(4, lengths=[i % 5 for i in range(N)])
    return {
        "torch": DataLoader(data(), 4, sampler=share, drop_last=True),
        "accelerate": accelerator.prepare(DataLoader(data(), 4, shuffle=True)),
        "accelerate in order": accelerator.prepare(DataLoader(data(), 4)),
        "accelerate by length": accelerator.prepare(DataLoader(data(), 4, sampler=by_length)),
        "accelerate dispatching": dispatching.prepare(DataLoader(data(), 4)),
        "fabric": fabric.setup_dataloaders(DataLoader(data(), 4, sampler=DistributedSampler(data()))),
    }


def order(loader: Any) -> list[int]:
    return [int(1000 * v) for x, _ in loader for v in x[:, 0]]


def process(rank: int, world: int, folder: str) -> None:
    import conftest  # noqa: F401  (a process of its own imports torchvision as the tests do)

    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (Path(folder) / "port").read_text()}
    os.environ |= address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    for name, loader in loaders().items():
        torch.manual_seed(1)
        net = lifted(init="fsinit")
        net.initialize(loader)
        net.refresh(loader)
        result[name] = {"count": net.class_count, "s": net.prototypes.detach(), "next": order(loader)}
    for name, loader in loaders().items():
        torch.manual_seed(1)
        lifted(init="fsinit")  # the same draws, but no sweep
        result[name]["untouched"] = order(loader)
    torch.save(result, f"{folder}/{rank}.pt")
    leave_together()


def test_two_processes_see_each_sample_once(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(s.getsockname()[1]))
    mp.spawn(process, args=(2, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    expected = torch.bincount(torch.arange(N) % CLASSES, minlength=CLASSES).tolist()
    for name in ranks[0]:
        for rank in ranks:
            assert rank[name]["count"].tolist() == expected, name
            assert rank[name]["next"] == rank[name]["untouched"], name
        assert torch.equal(ranks[0][name]["s"], ranks[1][name]["s"]), name


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class OfTwo(Sampler[int]):
    """A user's sampler for several processes, which does not hold the data set."""

    num_replicas, rank = 2, 0

    def __iter__(self) -> Any:
        return iter(range(22))

    def __len__(self) -> int:
        return 22


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"shuffle": True}, N),
        ({"shuffle": True, "generator": generator()}, N),
        ({"shuffle": True, "drop_last": True}, N),
        ({"sampler": SubsetRandomSampler(range(20), generator=generator())}, 20),
        ({"sampler": WeightedRandomSampler(torch.ones(N), 30, generator=generator())}, 30),
        ({"sampler": OfTwo()}, 22),
    ],
    ids=["shuffled", "by a generator", "whole batches", "a subset", "weighted", "a share of one's own"],
)
def test_a_sweep_leaves_the_order_as_it_was(options: dict[str, Any], samples: int) -> None:
    loader = DataLoader(data(), batch_size=8, **options)
    torch.manual_seed(3)
    generators = [g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None]
    for g in generators:
        g.manual_seed(5)
    net = lifted(init="fsinit")
    state = torch.get_rng_state()
    net.initialize(loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert int(net.class_count.sum()) == samples
    swept = order(loader)
    torch.set_rng_state(state)
    for g in generators:
        g.manual_seed(5)
    assert order(loader) == swept


def test_fabrics_loader_keeps_its_epoch() -> None:
    from lightning.fabric import Fabric

    loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(data(), 4, shuffle=True))
    lifted(init="fsinit").initialize(loader)
    assert loader._num_iter_calls == 0


def test_a_loader_that_changes_its_batches_is_iterated_itself() -> None:
    class Doubled(DataLoader):
        def __iter__(self) -> Any:
            return ((2 * x, y) for x, y in super().__iter__())

    net = lifted(init="fsinit")
    net.initialize(Doubled(data(), 4))
    x, y = data().tensors
    with torch.no_grad():
        z = net.embed(2 * x)
    assert torch.allclose(net.prototypes[1], z[y == 1].mean(0), atol=1e-5)


def test_timms_prefetcher_normalises_what_a_sweep_sees() -> None:
    from timm.data.loader import PrefetchLoader

    images = torch.randint(0, 256, (N, 3, 4, 4), dtype=torch.uint8)
    inner = DataLoader(TensorDataset(images, torch.arange(N) % CLASSES), 8, shuffle=True, drop_last=True)
    loader = PrefetchLoader(inner, device=torch.device("cpu"))
    net = ps.lift(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, CLASSES)), dim=2)
    net.initialize(loader)
    assert int(net.class_count.sum()) == N
    assert inner is loader.loader
    normalised = (images.float() - loader.mean) / loader.std
    with torch.no_grad():
        z = net.embed(normalised)
    assert torch.allclose(net.prototypes[0], z[::CLASSES].mean(0), atol=1e-5)
