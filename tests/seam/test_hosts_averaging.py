"""Averages of weights, by each host's own class: the seam's state is never averaged, and deploy() gives the average."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from toys import CLASSES, Noisy, batches, lifted, same, sgd, step

import protoseam as ps

DATA = batches()
AVERAGES: dict[str, Callable[[ps.Lifted], Any]] = {
    "torch": AveragedModel,
    "torch with buffers": lambda net: AveragedModel(net, use_buffers=True),
    "torch EMA": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
    "timm": lambda net: ModelEmaV3(net, decay=0.5),
    "timm one by one": lambda net: ModelEmaV3(net, decay=0.5, foreach=False),
    "timm without buffers": lambda net: ModelEmaV3(net, decay=0.5, exclude_buffers=True),
}
ESTIMATORS = {
    "exact": ps.ExactCovariance(),
    "running": ps.RunningCovariance(floor="auto"),
    "switch": ps.SwitchCovariance(),
}


def kept(net: ps.Lifted) -> dict[str, Any]:
    """What must not be averaged."""
    own = {"rho": net.rho, "progress": net.progress, "count": net.class_count, "ready": net.ready}
    moments = {k: v for k, v in net.covariance.state_dict().items() if "factors" not in k}
    return {name: value.clone() for name, value in (own | moments).items()}


def is_state(value: Tensor, states: list[Tensor]) -> bool:
    return any(torch.equal(value, state) for state in states)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("host", AVERAGES)
def test_an_average_of_weights_leaves_the_seams_state_alone(host: str, estimator: str) -> None:
    net = lifted(Noisy(), covariance=ESTIMATORS[estimator], init="fsinit", schedule=ps.SineAnneal(1, 16))
    net.initialize(DATA)
    optimizer, average = sgd(net), AVERAGES[host](net)
    update = getattr(average, "update_parameters", None) or average.update
    states, deployed = [kept(net)], []
    for epoch in range(3):
        net.set_progress(epoch, 3, lr=0.05)
        for x, y in DATA:
            step(net, optimizer, x, y)
        net.refresh(DATA)
        update(net)
        states.append(kept(net))
        deployed.append(net.deploy().state_dict())
    for name, value in kept(average.module).items():
        assert is_state(value, [state[name] for state in states]), name
    assert int(average.module.class_count.sum()) == 64
    plain = average.module.deploy().state_dict()
    for name in ("fc.0.weight", "fc.1.weight", "body.0.weight"):
        seen = torch.stack([d[name] for d in deployed])
        if host in ("torch", "torch with buffers"):
            assert torch.allclose(plain[name], seen.mean(0), atol=1e-6)
        assert (plain[name] >= seen.min(0).values - 1e-2).all()
        assert not torch.equal(plain[name], seen[-1])
    assert average.module(DATA[0][0]).shape == (16, CLASSES)


def test_an_average_begun_before_training_is_ready_after_it() -> None:
    net = lifted(init="fsinit")
    average, x = AveragedModel(net), DATA[0][0]
    for use in (lambda: average.module.score_ood(x), lambda: average.module.refit_head(DATA)):
        with pytest.raises(ps.SeamError, match="no values yet"):
            use()
    optimizer = sgd(net)
    for _ in net.epochs(DATA, 3):
        for batch in DATA:
            step(net, optimizer, *batch)
        average.update_parameters(net)
    other = lifted(init="fsinit")
    other.load_state_dict(average.module.state_dict())
    for averaged in (average.module, other):
        assert averaged.score_ood(x).isfinite().all()
        averaged.refit_head(DATA)
        assert float((averaged.eval()(x).argmax(1) == DATA[0][1]).float().mean()) > 0.9
    assert torch.equal(other.prototypes, average.module.prototypes)


def test_prototypes_drawn_with_all_parameters_are_not_ready() -> None:
    net = lifted(init="fsinit")
    for p in net.parameters():
        torch.nn.init.normal_(p)
    with pytest.raises(ps.SeamError, match="no values yet"):
        net.objective(*DATA[0])
    net.initialize(DATA)  # as the first look at the data, without a warning


class Module(L.LightningModule):
    """A user's module around a lifted network, with the calls of an epoch in its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = lifted(Noisy(), covariance=ps.RunningCovariance(), schedule=ps.SineAnneal(1, 16))
        self.deployed: list[dict[str, Tensor]] = []

    def on_train_epoch_start(self) -> None:
        self.net.set_progress(self.current_epoch, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(*batch).total

    def on_train_batch_end(self, *_: Any) -> None:
        self.deployed.append(self.net.deploy().state_dict())

    def on_train_epoch_end(self) -> None:
        self.net.refresh()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


@pytest.mark.filterwarnings("ignore")  # of Lightning's own
@pytest.mark.parametrize("callback", [WeightAveraging, EMAWeightAveraging])
def test_lightnings_callbacks(callback: type[WeightAveraging], tmp_path: Any) -> None:
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[callback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    trainer.fit(module, DataLoader(TensorDataset(x, y), 16))
    assert float(module.net.rho) == pytest.approx(16.0)
    assert module.net.progress.tolist() == [2, 3]
    if callback is WeightAveraging:
        seen = torch.stack([d["fc.1.weight"] for d in module.deployed])
        assert torch.allclose(module.net.deploy().state_dict()["fc.1.weight"], seen.mean(0), atol=1e-5)


def test_checkpoints_hold_tensors_alone_and_old_ones_load() -> None:
    net = lifted(Noisy(), covariance=ps.SwitchCovariance(), init="fsinit")
    net.initialize(DATA)
    net.set_progress(1, 4, lr=0.1)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {
        "rho",
        "progress",
        "class_count",
        "ready",
        "covariance.switched",
    } <= state.keys()  # as when buffers
    assert all(isinstance(value, Tensor) for value in state.values())
    other = lifted(Noisy(), covariance=ps.SwitchCovariance(), init="fsinit")
    other.load_state_dict(state)
    assert other.is_initialized
    assert same(other.state_dict(), net.state_dict())
    missing = {name: value for name, value in state.items() if name != "rho"}
    with pytest.raises(RuntimeError, match="rho"):
        other.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"class_count.*\(5,\).*\(4,\)"):
        other.load_state_dict(state | {"class_count": torch.zeros(5)})


def test_the_state_is_moved_with_the_network() -> None:
    net = lifted(covariance=ps.RunningCovariance())
    net.to("meta")
    assert net.rho.is_meta
    assert net.covariance.count_C_0.is_meta
