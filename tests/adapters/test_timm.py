"""LiftedTask with timm's own pieces: mixup, EMA, optimizers, checkpoints, and a network that timm loads again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from processes import leave_together

if multiprocessing.current_process().name != "MainProcess":
    import conftest  # noqa: F401  (a spawned process imports torchvision as the tests do)

import timm
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from timm.utils import AverageMeter, NativeScaler, dispatch_clip_grad

import protoseam as ps
from protoseam.adapters.timm import LiftedTask

CLASSES = 4
Batch = tuple[Tensor, Tensor]


def batches(seed: int = 0) -> list[Batch]:
    """Images whose colour names the class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(64) % CLASSES
    x = 0.3 * torch.randn(64, 3, 16, 16, generator=g)
    x += torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]])[y][:, :, None, None]
    order = torch.randperm(64, generator=g)
    return list(zip(x[order].split(16), y[order].split(16), strict=True))


def made() -> tuple[LiftedTask, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = timm.create_model("test_vit2", num_classes=CLASSES, img_size=16, patch_size=8, drop_rate=0.1)
    task = LiftedTask(ps.lift(model, num_classes=CLASSES, dim=4))
    task.setup_ema(decay=0.8)
    groups = task.net.param_groups(lr=2e-3, weight_decay=0.05)
    return task, create_optimizer_v2(groups, opt="adamw", lr=2e-3)


def train(
    task: LiftedTask,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    done: int = 0,
    mixup: Any = None,
    stop: int = -1,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaler: NativeScaler | None = None,
) -> list[dict[str, Tensor]]:
    results = []
    for epoch in task.net.epochs(batches(), epochs, done):
        if epoch == stop:
            break
        task.train()
        for x, y in batches():
            with autocast():
                result = task(*(mixup(x, y) if mixup else (x, y)))
            optimizer.zero_grad()
            if scaler:
                scaler(result["loss"], optimizer, clip_grad=1.0, parameters=task.get_clip_parameters())
            else:
                result["loss"].backward()
                dispatch_clip_grad(task.get_clip_parameters(), 1.0)
                optimizer.step()
            task.update_ema()
            results.append(result)
    return results


def accuracy(model: torch.nn.Module) -> float:
    meter = AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, y in batches(seed=1):
            meter.update(float((model(x).argmax(1) == y).double().mean()), len(y))
    return meter.avg


def test_training_with_mixup_and_an_average(tmp_path: Path) -> None:
    task, optimizer = made()
    torch.manual_seed(1)
    results = train(
        task, optimizer, 10, mixup=Mixup(mixup_alpha=0.2, num_classes=CLASSES, label_smoothing=0.0)
    )
    last = results[-1]
    parts = last["consensus"] + last["classification"] + last["repulsion"]
    torch.testing.assert_close(last["loss"].detach(), parts)
    assert accuracy(task.get_eval_model()) > 0.95
    assert accuracy(task.get_eval_model(ema=True)) > 0.95
    assert float(task.trainable_module_ema.module.rho) == float(task.net.rho)  # state that is not averaged
    for ema in (False, True):
        plain = task.deploy(ema=ema)
        x = batches()[0][0]
        with torch.no_grad():
            torch.testing.assert_close(plain(x), task.get_eval_model(ema=ema).eval()(x), rtol=1e-4, atol=1e-4)
    timm.models.save_for_hf(plain, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=16, patch_size=8).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_mixed_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As timm's train.py: autocast around the task and validation, the backward outside; a scaler for float16."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its bfloat16 fails on some processors
    task, optimizer = made()
    autocast = partial(torch.autocast, device_type="cpu", dtype=dtype)
    scaler = NativeScaler(device="cpu") if dtype == torch.float16 else None
    results = train(task, optimizer, 10, autocast=autocast, scaler=scaler)
    with autocast():
        assert task.net.embed(batches()[0][0]).dtype == dtype  # N1 does run in low precision
        assert accuracy(task.get_eval_model()) > 0.95
        assert accuracy(task.get_eval_model(ema=True)) > 0.95
    net = task.net
    assert {value.dtype for value in results[-1].values()} == {torch.float32}
    assert net.prototypes.dtype == net.covariance.factors.dtype == torch.float32
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert accuracy(task.deploy()) > 0.95


def test_resume_from_timms_checkpoint_is_exact(tmp_path: Path) -> None:
    task, optimizer = made()
    torch.manual_seed(1)
    train(task, optimizer, 4)
    whole = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}

    task, optimizer = made()
    torch.manual_seed(1)
    train(task, optimizer, 4, stop=2)
    state = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}
    torch.save(
        {**state, "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}, tmp_path / "last.pt"
    )

    task, optimizer = made()
    saved = torch.load(tmp_path / "last.pt")
    task.load_checkpoint_state(saved["state_dict"])
    task.load_checkpoint_state(saved["state_dict_ema"], ema=True)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    train(task, optimizer, 4, done=2)
    found = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}
    for key in ("state_dict", "state_dict_ema"):
        assert whole[key].keys() == found[key].keys()
        assert [n for n in whole[key] if not torch.equal(whole[key][n], found[key][n])] == []


def test_compiled_it_has_the_same_objective_and_the_same_names() -> None:
    task, _ = made()
    assert {name for name in dir(ClassificationTask) if not name.startswith("_")} <= set(dir(task))
    task.net.initialize(batches())
    task.eval()
    names = task.get_checkpoint_state()["state_dict"].keys()
    losses = []
    for compiled in (False, True):
        if compiled:
            task.compile(backend="eager")
        losses.append(task(*batches()[0])["consensus"])
    torch.testing.assert_close(losses[1], losses[0])
    assert task.get_checkpoint_state()["state_dict"].keys() == names


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    task, optimizer = made()
    task.prepare_distributed()
    share = [(x[rank::world], y[rank::world]) for x, y in batches()]
    for _ in task.net.epochs(share, 2):
        for x, y in share:
            optimizer.zero_grad()
            task(x, y)["loss"].backward()
            optimizer.step()
            task.update_ema()
    state = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}
    torch.save({**state, "counted": task.net.class_count}, Path(folder) / f"{rank}.pt")
    leave_together()


def test_two_processes_end_with_the_same_network(tmp_path: Path) -> None:
    mp.spawn(process, args=(2, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one["counted"].tolist() == [16] * CLASSES
    for key in ("state_dict", "state_dict_ema"):
        assert [name for name in one[key] if not torch.equal(one[key][name], two[key][name])] == []
