"""SeamCallback under the real Lightning: hooks at their time, bitwise resume, two processes, precisions, averages."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import CLASSES, Noisy, batches, network

from processes import leave_together

if multiprocessing.current_process().name != "MainProcess":
    import conftest  # noqa: F401  (a spawned process imports torchvision as the tests do)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner

import protoseam as ps
from protoseam.adapters.lightning import SeamCallback

EPOCHS = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),  # advice
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Module(pl.LightningModule):
    """What a user writes; dropout, BatchNorm and a rate that decays make the state matter."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        model = Noisy() if model is None else model
        self.net = ps.lift(
            model, num_classes=CLASSES, **{"dim": 3, "schedule": ps.SineAnneal(4, 8), **options}
        )
        self.seen: list[tuple[float, bool]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        self.seen.append((float(self.net.rho), self.net.is_initialized))
        return self.net.objective(*batch).total

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("loss", self.net.objective(*batch).total)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.param_groups(lr=0.01))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader(samples: int = 64, shuffle: bool = True) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(samples), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=12, shuffle=shuffle)


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    usual: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "default_root_dir": folder,
    }
    found = (
        [*callbacks] if any(isinstance(c, SeamCallback) for c in callbacks) else [SeamCallback(), *callbacks]
    )
    return pl.Trainer(**{**usual, **options}, callbacks=found)


def accuracy(net: nn.Module) -> float:
    net.eval()
    with torch.no_grad():
        return float(torch.cat([(net(x).argmax(1) == y).double() for x, y in batches(64)]).mean())


def rhos(epochs: int, steps: int = 6) -> list[float]:
    return [ps.SineAnneal(4, 8)(epoch, epochs) for epoch in range(epochs) for _ in range(steps)]


def test_each_call_at_its_time(tmp_path: Path) -> None:
    module = Module()
    trainer(tmp_path).fit(
        module, loader(), loader(shuffle=False)
    )  # with the sanity validation, on the objective
    assert [rho for rho, _ in module.seen] == pytest.approx(rhos(EPOCHS))
    assert all(ready for _, ready in module.seen)
    assert module.net.class_count.tolist() == [16] * CLASSES
    assert module.net.progress.tolist() == [EPOCHS - 1, EPOCHS]
    assert float(module.net.covariance.factors.diagonal(dim1=1, dim2=2).std()) > 0
    assert accuracy(module.net.deploy(fold=True)) > 0.9


@pytest.mark.parametrize("validates", [True, False], ids=["saved after validation", "saved after the epoch"])
@pytest.mark.parametrize(
    "covariance",
    [ps.RunningCovariance("auto"), ps.ExactCovariance(), ps.SwitchCovariance(lr_below=0.85)],
    ids=["running", "exact", "switch"],
)
def test_resuming_is_going_on(covariance: ps.AbstractCovariance, validates: bool, tmp_path: Path) -> None:
    def fit(checkpoint: Path | None = None) -> dict[str, Tensor]:
        keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not validates)
        module = Module(covariance=covariance)
        data = (loader(), loader(shuffle=False)) if validates else (loader(),)
        trainer(tmp_path, keeper).fit(module, *data, ckpt_path=checkpoint)
        return {**module.state_dict(), "random": torch.get_rng_state()}

    through = fit()
    torch.manual_seed(999)
    resumed = fit(tmp_path / "epoch=1.ckpt")
    assert through.keys() == resumed.keys()
    assert [name for name in through if not torch.equal(through[name], resumed[name])] == []


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_is_the_plain_loop(accumulated: int, tmp_path: Path) -> None:
    module = Module()
    net = ps.lift(Noisy(), num_classes=CLASSES, dim=3, schedule=ps.SineAnneal(4, 8))
    net.load_state_dict(module.net.state_dict())
    torch.manual_seed(5)
    trainer(tmp_path, accumulate_grad_batches=accumulated).fit(module, loader())

    torch.manual_seed(5)
    data = loader()
    optimizer = torch.optim.AdamW(net.param_groups(lr=0.01))
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in net.epochs(data, EPOCHS):
        for i, batch in enumerate(data):
            (net.objective(*batch).total / accumulated).backward()
            if (i + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        decay.step()
    ours, theirs = net.state_dict(), module.net.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("limits", "callback", "expected"),
    [
        ({"max_epochs": -1, "max_steps": 12}, SeamCallback(), rhos(2)),
        ({"max_epochs": 100, "max_steps": 9}, SeamCallback(), rhos(2)[:9]),
        ({"max_epochs": -1, "max_steps": 6, "accumulate_grad_batches": 2}, SeamCallback(), rhos(2)),
        ({"max_epochs": 2}, SeamCallback(epochs=8), rhos(8)[:12]),
    ],
    ids=["steps", "steps that end within an epoch", "accumulated steps", "told"],
)
def test_rho_rises_over_what_the_trainer_will_do(
    limits: dict[str, int],
    callback: SeamCallback,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, refreshed_at = Module(), []
    refresh = module.net.refresh
    monkeypatch.setattr(
        module.net, "refresh", lambda data: (refresh(data), refreshed_at.append(len(module.seen)))
    )
    trainer(tmp_path, callback, **limits).fit(module, loader())
    assert [rho for rho, _ in module.seen] == pytest.approx(expected)
    assert refreshed_at == [6, len(expected)]  # also where max_steps ends an epoch early


def test_endless_training_must_say_how_long(tmp_path: Path) -> None:
    with pytest.raises(ps.SeamError, match=r"SeamCallback\(epochs=…\)"):
        trainer(tmp_path, max_epochs=-1).fit(Module(), loader())


def test_one_lifted_network(tmp_path: Path) -> None:
    module = Module()
    module.another = Module().net
    with pytest.raises(ps.SeamError, match=r"Module has 2: .*self\.net = ps\.lift"):
        trainer(tmp_path).fit(module, loader())
    with pytest.raises(ps.SeamError, match="at least one epoch"):
        SeamCallback(epochs=0)


class Scaled(Module):
    """Prepares its batches on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 10 * batch[0], batch[1]


def test_sweeps_see_what_the_training_step_sees(tmp_path: Path) -> None:
    module = Scaled(network())
    expected = ps.lift(network(), num_classes=CLASSES, dim=3)
    expected.load_state_dict(module.net.state_dict())
    expected.initialize([(10 * x, y) for x, y in batches()])
    first: list[Tensor] = []

    class Look(pl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            first.append(module.net.prototypes.detach().clone())

    trainer(tmp_path, Look(), max_epochs=1).fit(module, loader())
    assert torch.allclose(first[0], expected.prototypes, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: Any, tmp_path: Path) -> None:
    module = Module(network())
    trainer(tmp_path, precision=precision).fit(module, loader(), loader(shuffle=False))
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert module.net.n2.weight.dtype == expected.get(precision, torch.float32)
    assert module.net.prototypes.dtype == (torch.float64 if precision == "64-true" else torch.float32)
    assert accuracy(module.net.to(torch.float32)) > 0.9


@pytest.mark.parametrize("averaging", [WeightAveraging, EMAWeightAveraging])
def test_averages(averaging: type[WeightAveraging], tmp_path: Path) -> None:
    module, weights = Module(), []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            weights.append(module.net.n2.weight.detach().clone())

    callback = averaging() if averaging is WeightAveraging else EMAWeightAveraging(decay=0.5)
    trainer(tmp_path, Look(), callback).fit(module, loader(), loader(shuffle=False))
    expected = weights[0]
    for n, weight in enumerate(weights[1:], 2):
        expected = expected.lerp(weight, 1 / n if averaging is WeightAveraging else 0.5)
    plain = module.net.deploy()
    assert torch.allclose(module.net.n2.weight, expected, atol=1e-6)
    assert float(module.net.rho) == 8
    assert module.net.progress.tolist() == [EPOCHS - 1, EPOCHS]
    assert module.net.class_count.tolist() == [16] * CLASSES
    assert accuracy(plain) > 0.7


class Counting(TensorDataset):
    """Counts the samples that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"fast_dev_run": True}, 36),  # 12 trained, and looked at before and after
        ({"overfit_batches": 2}, 24 * (1 + EPOCHS + 1)),
        ({"max_steps": 2}, 24 * 3),
        ({"limit_train_batches": 2}, 24 * EPOCHS + 2 * 12 * 2 * EPOCHS),  # other batches in each epoch
        ({"limit_train_batches": 2, "max_epochs": 50}, 24 * 50 + 2 * 500),  # no more than there are
    ],
    ids=["development run", "overfitting", "few steps", "short epochs", "short epochs, but many"],
)
@pytest.mark.filterwarnings(
    "ignore:this epoch had . steps", "ignore:class . has . samples", "ignore:You requested to overfit"
)
def test_looks_at_the_data_read_no_more_than_training_does(
    limits: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    x, y = (torch.cat(parts) for parts in zip(*batches(500), strict=True))
    data = Counting(x, y)
    trainer(tmp_path, **limits).fit(Module(network()), DataLoader(data, batch_size=12, shuffle=True))
    assert data.read == expected


def test_a_look_goes_on_until_it_has_seen_each_class(tmp_path: Path) -> None:
    x, y = (torch.cat(parts) for parts in zip(*batches(64), strict=True))
    order = y.argsort()
    module = Module(network())
    data = DataLoader(TensorDataset(x[order], y[order]), batch_size=8)
    with pytest.warns(ps.SeamWarning, match="this epoch had 1 steps"):
        trainer(tmp_path, fast_dev_run=True).fit(module, data)
    assert module.net.class_count.tolist() == [16, 16, 16, 8]


@pytest.mark.parametrize("kind", ["lr", "batch size", "callback"])
@pytest.mark.filterwarnings(
    "ignore:net.objective has seen .* without a call"
)  # as the tuner runs no callback
def test_tuners_find_a_network_with_prototypes(kind: str, tmp_path: Path) -> None:
    class Tuned(Module):
        batch_size, lr = 8, 0.01

        def train_dataloader(self) -> Any:
            return DataLoader(loader().dataset, batch_size=self.batch_size, shuffle=True)

        def val_dataloader(self) -> Any:
            return loader(shuffle=False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.param_groups(lr=self.lr))

    module = Tuned(network())
    if kind == "callback":
        found = LearningRateFinder(num_training_steps=40, max_lr=0.1)
        with pytest.warns(ps.SeamWarning, match="now learn at the same rate"):
            trainer(tmp_path, found, SeamCallback()).fit(module)
    else:
        tuner = Tuner(doing := trainer(tmp_path))
        if kind == "lr":
            tuner.lr_find(module, num_training=40, max_lr=0.1)
            assert module.lr != 0.01
        else:
            tuner.scale_batch_size(module, max_trials=2)
            assert module.batch_size != 8
        doing.fit(module)
    assert accuracy(module.net) > 0.9


@pytest.mark.parametrize("refit", [True, False])
def test_a_fit_that_stops_early_gets_its_last_step(refit: bool, tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not trainer.sanity_checking:
                with torch.no_grad():
                    pl_module.net.n2.weight.mul_(-1)  # which the last step mends
                trainer.should_stop = True

    module = Module(refit=refit)
    trainer(tmp_path, Stop(), max_epochs=20).fit(module, loader(), loader(shuffle=False))
    assert len(module.seen) == 6
    assert (accuracy(module.net) > 0.8) == refit
    x, y = (torch.cat(parts) for parts in zip(*batches(64), strict=True))
    expected = ps.core.class_factors(module.net.embed(x).detach(), y, CLASSES, 0.1).factors
    assert torch.allclose(module.net.covariance.factors, expected, atol=1e-4) == refit


def process(rank: int, folder: str, port: int) -> None:
    """A process of two: train with checkpoints, then again from the second one."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}

    def fit(checkpoint: str | None) -> dict[str, Any]:
        torch.manual_seed(rank)  # each process draws its own dropout and samples
        keeper = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        module = Module()
        doing = trainer(Path(folder), keeper, strategy="ddp", devices=2)
        doing.fit(module, loader(samples=43), ckpt_path=checkpoint)
        return {**module.state_dict(), "random": torch.get_rng_state()}

    found = {"through": fit(None), "resumed": fit(f"{folder}/epoch=1.ckpt")}
    torch.save(found, f"{folder}/{rank}.pt")
    leave_together()


def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(process, args=(str(tmp_path), port), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in first["through"].items():
        assert torch.equal(value, first["resumed"][name]), name
        assert torch.equal(second["through"][name], second["resumed"][name]), name
        own = name == "random" or "running_" in name  # BatchNorm's statistics are each process's own
        assert own or torch.equal(value, second["through"][name]), name
    assert first["through"]["net.class_count"].tolist() == [11, 11, 11, 10]  # 43 samples, each once
