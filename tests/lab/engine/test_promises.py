"""Small promises of the engine that no other test would miss."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import protoseam as ps
from protoseam.errors import DataError
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine import checkpoint, evaluate, session
from protoseam.lab.engine.config import BESIDE, ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.engine.latents import Latents
from protoseam.lab.engine.objectives import Lifting
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.pipeline import resident
from protoseam.lab.pipeline.resident import Resident

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [8]},
    epochs=6,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)


def test_the_worst_classes_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of seven classes, class c is recognised in 6 − c of six samples, the last in none; an eighth has no sample."""
    y = torch.arange(7).repeat_interleave(6)
    right = torch.arange(6).repeat(7) < 6 - y
    x = nn.functional.one_hot(torch.where(right, y, (y + 1) % 7), 8).float()
    data = SimpleNamespace(num_classes=8, classes="abcdefgh", batches=lambda split: [(x, y)])
    monkeypatch.setattr(evaluate, "load_deployed", lambda path, place: (nn.Identity(), data))
    with RunDirectory.create(tmp_path, SMALL):
        found = evaluate.evaluate(tmp_path, device="cpu")
    assert found["worst_classes"] == [(name, pytest.approx(c / 6)) for c, name in enumerate("gfedc")]
    assert found["correct"] == 21


OTHER: dict[str, Any] = {
    "data": "mnist", "model": "convnet", "model_options": {"hidden": [9]}, "variant": "baseline", "seed": 43,
    "epochs": 7, "batch_size": 64, "validation": 0.2, "augment": "paper", "optim": OptimConfig(lr=0.5),
    "lift": LiftConfig(dim=5), "precision": "bf16", "compile": False, "graph": False, "deterministic": True,
    "on_nonfinite": "skip", "eval_every": 2, "keep_embeddings": 3, "image_size": 16, "mixup": 0.2, "cutmix": 1.0,
    "label_smoothing": 0.1, "average": 0.9, "calibrate": True, "init_from": "run",
}  # fmt: skip


def test_every_setting_but_those_beside_decides_whether_a_run_goes_on(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert names == OTHER.keys() | set(BESIDE)
    with RunDirectory.create(tmp_path, SMALL) as run:
        for name, value in OTHER.items():
            with pytest.raises(ConfigError, match=rf"other settings \({name}[.:]"):
                run.check_config(dataclasses.replace(SMALL, **{name: value}))
        run.check_config(dataclasses.replace(SMALL, device="auto", data_root="x", checkpoint_every=3))


def test_a_budget_leaves_room_for_the_epoch_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch takes a second here: with 4.5 s the fourth would begin at 3 s, too late for twice its time."""
    clock = [0.0]
    honest = session.train_epoch

    def slow(run: Any) -> Any:
        clock[0] += 1.0
        return honest(run)

    monkeypatch.setattr(session, "train_epoch", slow)
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    with pytest.raises(session.Interrupted, match="saved after epoch 3"):
        session.train(SMALL, tmp_path / "run", quiet=True, budget_seconds=4.5)


@pytest.mark.parametrize(
    ("estimator", "factors"),
    [
        (ps.ExactCovariance(structure="diagonal"), [[3.0, 4.0], [0.0, 5.0], [5.0, 0.0]]),
        (ps.IsotropicCovariance(), [[5.0 / 2**0.5]]),
        (ps.ExactCovariance(), [[[3.0, 0.0], [4.0, 0.0]]] * 3),
        (ps.ExactCovariance(structure="shared"), [[[3.0, 0.0], [0.0, 4.0]]]),
    ],
    ids=["diagonal", "isotropic", "full", "shared"],
)
def test_the_spread_of_the_samples_is_that_of_one_class(estimator: Any, factors: list[Any]) -> None:
    """√E‖ζ‖², which is 5 for each of the three classes."""
    net = ps.lift(nn.Sequential(nn.Linear(4, 3)), dim=2, covariance=estimator)
    lifting = Lifting(net)
    assert net.covariance.factors.shape == torch.tensor(factors).shape
    net.covariance.factors.copy_(torch.tensor(factors))
    assert lifting.geometry()["sample_spread"] == pytest.approx(5.0)


def test_what_is_written_is_for_colleagues_too(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    write_atomically(tmp_path / "file", b"")
    assert mode(tmp_path / "file") == 0o644
    folder = checkpoint.save(tmp_path / "checkpoints", 1, {})
    assert mode(folder) == 0o755
    assert mode(folder / "state.pt") & 0o444 == 0o444


def test_features_of_a_small_scale_are_normalised_and_constant_ones_left() -> None:
    rng = np.random.default_rng(0)
    features = np.stack([1e-5 * rng.standard_normal(100), np.ones(100)], axis=1).astype(np.float32)
    labels = np.arange(100) % 2
    dataset = ArrayDataset("small", features, labels, features, labels, ("a", "b"))
    data = Resident(dataset, seed=0, batch_size=10, validation=0.0, device="cpu")
    assert data.std[0] == pytest.approx(1e-5, rel=0.3)
    assert data.std[1] == 1.0


def test_validation_comes_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    summary = session.train(dataclasses.replace(SMALL, epochs=5, eval_every=2), tmp_path / "run", quiet=True)
    rows = RunDirectory(tmp_path / "run").read_metrics()
    assert summary["validation_accuracy"] == rows[-1]["validation_accuracy"] != rows[3]["validation_accuracy"]
    assert [row["epoch"] for row in rows if row["validation_accuracy"] is not None] == [2, 4, 5]


@pytest.mark.parametrize(("rewinds", "epoch"), [(1, 4), (2, 3), (3, 2), (4, 1), (5, 0), (9, 0)])
def test_each_rewind_goes_further_back(rewinds: int, epoch: int) -> None:
    run = SimpleNamespace(epoch=0, rate_scale=1.0, slow_down=lambda factor: None)
    run.load_state = lambda state: setattr(run, "epoch", state["epoch"])
    one = object.__new__(session.Session)
    one.run, one.rewinds, one.writes = run, rewinds, False  # type: ignore[assignment]
    one.history = [{"epoch": i} for i in range(1, 6)]
    one.states, one.latents = [{"epoch": i} for i in range(5)], Latents(5)
    one.rewind()
    assert (one.saved, one.history) == (epoch, [{"epoch": i} for i in range(1, epoch + 1)])


def test_a_batch_is_shared_evenly_or_not_at_all() -> None:
    features, labels = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32), np.arange(12) % 2
    dataset = ArrayDataset("small", features, labels, features, labels, ("a", "b"))
    with pytest.raises(DataError, match="batch_size=8 does not divide among 3 processes"):
        Resident(dataset, seed=0, batch_size=8, validation=0.0, device="cpu", world=3)
    with pytest.raises(DataError, match="12 training samples cannot be shared by 13 processes: start fewer"):
        Resident(dataset, seed=0, batch_size=None, validation=0.0, device="cpu", world=13)


def test_images_in_several_chunks_are_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (
        Resident(load("digits"), seed=0, batch_size=128, validation=0.1, device="cpu") for _ in "ab"
    )
    whole.load_epoch(0)
    monkeypatch.setattr(resident, "_CHUNK", 100)
    parts.load_epoch(0)
    assert torch.equal(whole.x, parts.x)
    assert torch.equal(whole.y, parts.y)


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    """Withdrawn before its data was known, and after a process was killed while it wrote."""
    for name in (
        "config.yaml",
        "data.json",
        "env.json",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
    ):
        (tmp_path / f".{name}.abcd1234").touch()
    (tmp_path / ".mine.abcd1234").touch()
    with RunDirectory.create(tmp_path, SMALL) as run:
        run.withdraw()
    assert {path.name for path in tmp_path.iterdir()} == {"lock", ".mine.abcd1234"}
