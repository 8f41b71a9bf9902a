"""Runs on the digits: learning, resuming bit for bit, the eager step against torch.optim."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from protoseam.lab import models
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine import epoch, session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig, to_dict
from protoseam.lab.engine.distributed import Processes
from protoseam.lab.engine.epoch import begin_epoch, end_epoch, train_epoch
from protoseam.lab.engine.evaluate import evaluate, load_deployed
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import RunDirectory, RunLockedError
from protoseam.lab.engine.session import ResumeWarning
from protoseam.lab.engine.settings import from_dict
from protoseam.lab.engine.step import learning_rates
from protoseam.lab.pipeline.augment import Augmentation

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, weight_decay=1e-3, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
    checkpoint_every=1,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {"variant": "baseline"},
    "unlifted": {"variant": "unlifted"},
    "exact": {"variant": "protoseam"},
    "running": {"lift": dataclasses.replace(SMALL.lift, covariance="running")},
    "running auto": {"lift": dataclasses.replace(SMALL.lift, covariance="running", floor="auto")},
    "isotropic": {"lift": dataclasses.replace(SMALL.lift, covariance="isotropic")},
    "switch": {"lift": dataclasses.replace(SMALL.lift, covariance="switch", structure="diagonal")},
    "augmented": {"augment": "paper"},
    "adamw": {"optim": OptimConfig(name="adamw", warmup_epochs=1)},
    "adamw baseline": {"variant": "baseline", "optim": OptimConfig(name="adamw", warmup_epochs=1, clip=0.5)},
    "clipped": {"optim": dataclasses.replace(SMALL.optim, clip=0.5)},
    "averaged": {"average": 0.9},
    "averaged convnet": {"variant": "baseline", "model": "resnet8", "model_options": {}, "average": 0.9},
    "mixed": {"variant": "baseline", "mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1},
}


def config(**changes: Any) -> RunConfig:
    return dataclasses.replace(SMALL, **changes)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def without_seconds(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k != "seconds"}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_is_the_run(name: str, tmp_path: Path) -> None:
    """train(4) == resume(train(2), 2), bit for bit, in weights, momenta, seam and metrics."""
    cfg = config(**VARIANTS[name])
    data = load("digits")
    whole = Run(cfg, data)
    rows = [train_epoch(whole) for _ in range(4)]
    first = Run(cfg, data)
    for _ in range(2):
        train_epoch(first)
    path = tmp_path / "state.pt"
    torch.save(first.state(), path)
    second = Run(cfg, data)
    second.load_state(torch.load(path, weights_only=True))
    again = [train_epoch(second) for _ in range(2)]
    assert same(without_seconds(whole.state()), without_seconds(second.state()))
    for row, other in zip(rows[2:], again, strict=True):
        assert row["loss"] == other["loss"]
        assert row["validation_accuracy"] == other["validation_accuracy"]


def test_the_step_is_ordinary_sgd() -> None:
    """Against a hand-written loop with torch.optim.SGD, the same batches and the same rates."""
    run = Run(config(variant="baseline"), load("digits"))
    torch.manual_seed(SMALL.seed)
    model = models.build("mlp", 10, run.data.sample_shape, hidden=[32])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3)
    total = 0.0
    begin_epoch(run)
    batch = run.data.batch_size
    for i in range(run.data.steps):
        x, y = run.data.x[i * batch : (i + 1) * batch], run.data.y[i * batch : (i + 1) * batch]
        optimizer.param_groups[0]["lr"] = float(run.rates[i])
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        run.step.run()
    row = end_epoch(run, time.perf_counter())
    assert row["loss"]["total"] == pytest.approx(total / run.data.steps, rel=1e-6)
    for expected, found in zip(model.parameters(), run.objective.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_learning_rates_warm_up_then_follow_a_cosine() -> None:
    rates = learning_rates(0.1, epochs=10, steps=20, warmup_epochs=2).tolist()
    assert len(rates) == 200
    assert rates[:40] == pytest.approx([0.1 * (t + 1) / 40 for t in range(40)])
    assert rates[40] == pytest.approx(0.1)
    assert rates[120] == pytest.approx(0.05)
    assert rates[-1] == pytest.approx(0.05 * (1 + math.cos(math.pi * 159 / 160)))
    assert learning_rates(0.1, 1, 3, 5.0).tolist()[0] == pytest.approx(0.1)  # half the run at most


def test_a_run_directory_from_start_to_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = session.train(config(epochs=30, optim=OptimConfig(lr=0.02, warmup_epochs=2)), out, quiet=True)
    assert summary["test_accuracy"] > 0.93
    assert json.loads((out / "summary.json").read_text()) == summary
    rows = RunDirectory(out).read_metrics()
    assert [row["epoch"] for row in rows] == list(range(1, 31))
    assert set(rows[0]["loss"]) == {"total", "consensus", "classification", "repulsion"}
    assert rows[0]["rho"] == 1.0
    assert rows[-1]["rho"] == 4.0
    assert rows[-1]["seam"]["prototype_gap_min"] > 0
    assert evaluate(out, device="cpu")["accuracy"] == summary["test_accuracy"]
    plain, _ = load_deployed(out)
    assert all(type(m).__module__.partition(".")[0] in ("torch", "protoseam") for m in plain.modules())
    assert not any("seam" in type(m).__module__.split(".")[1:] for m in plain.modules())
    with pytest.raises(ConfigError, match="already holds a run"):
        session.train(config(), out, quiet=True)
    assert session.resume(out, quiet=True) == summary  # a finished run is only read


def test_a_budget_stops_cleanly_and_resume_ends_as_if_nothing_happened(tmp_path: Path) -> None:
    cfg = config(checkpoint_every=3)
    expected = session.train(cfg, tmp_path / "whole", quiet=True)
    with pytest.raises(session.Interrupted, match=r"--resume .*cut.*from the beginning"):
        session.train(cfg, tmp_path / "cut", quiet=True, budget_seconds=0.0)
    found = session.resume(tmp_path / "cut", quiet=True)
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    name = "model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = session.train_epoch, []

    def interrupted(run: Run) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(run)

    monkeypatch.setattr(session, "train_epoch", interrupted)
    with pytest.raises(session.Interrupted, match=r"--resume .*saved after epoch 2"):
        session.train(config(checkpoint_every=100), tmp_path / "run", quiet=True)
    monkeypatch.undo()
    assert session.resume(tmp_path / "run", quiet=True)["epochs"] == 4
    assert len(RunDirectory(tmp_path / "run").read_metrics()) == 4


def test_an_interrupt_between_two_epochs_saves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_it_is_shown(_: Any, row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(session.Progress, "epoch", while_it_is_shown)
    with pytest.raises(session.Interrupted, match=r"--resume .*saved after epoch 2"):
        session.train(config(checkpoint_every=100), tmp_path / "run", quiet=True)


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, SMALL), pytest.raises(RunLockedError, match="is training in"):
        RunDirectory.claim(tmp_path)
    RunDirectory.claim(tmp_path).close()  # released with its holder


def test_another_environment_is_named_on_resume(tmp_path: Path) -> None:
    with pytest.raises(session.Interrupted):
        session.train(SMALL, tmp_path / "run", quiet=True, budget_seconds=0.0)
    path = tmp_path / "run" / "env.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "1.0.0"}))
    with pytest.warns(ResumeWarning, match=r"torch: was 1\.0\.0, is "):
        session.resume(tmp_path / "run", quiet=True)
    kept = json.loads(path.read_text())
    assert kept["torch"] == "1.0.0"
    assert [where["torch"] for where in kept["resumed"]] == [torch.__version__]


def test_another_number_of_threads_is_named_on_resume(tmp_path: Path) -> None:
    with pytest.raises(session.Interrupted):
        session.train(SMALL, tmp_path / "run", quiet=True, budget_seconds=0.0)
    torch.set_num_threads(2)
    try:
        with pytest.warns(ResumeWarning, match=r"bit-identically: threads: was 1, is 2$"):
            session.resume(tmp_path / "run", quiet=True)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("part", ["cpu", "processes"])
def test_another_processor_is_named_on_resume(part: str, tmp_path: Path) -> None:
    with pytest.raises(session.Interrupted):
        session.train(SMALL, tmp_path / "run", quiet=True, budget_seconds=0.0)
    path = tmp_path / "run" / "env.json"
    there = json.loads(path.read_text())
    here = there.pop(part)
    path.write_text(json.dumps(there))  # as one of an earlier version has it
    with pytest.warns(ResumeWarning, match=re.escape(f"{part}: was not recorded, is {here}")):
        session.resume(tmp_path / "run", quiet=True)


def test_metrics_that_cannot_be_read_are_named_on_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    session.train(SMALL, out, quiet=True)
    (out / "summary.json").unlink()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join([lines[0], "", *lines[2:]]) + "\n")
    with pytest.warns(ResumeWarning, match="the lines of 1 epochs, between 2 and 2, cannot be read"):
        session.resume(out, quiet=True)


def test_samples_and_dropout_have_streams_of_their_own() -> None:
    """And each process its own."""
    run = Run(SMALL, load("digits"))
    run.epoch = 3
    epoch._seed(run)
    alone = run.generator.initial_seed(), torch.initial_seed()
    run.processes = Processes(rank=1, world=2)
    epoch._seed(run)
    assert len({*alone, run.generator.initial_seed(), torch.initial_seed()}) == 4


def test_a_run_on_the_cpu_does_not_name_the_gpu_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # a CUDA build asks the device
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU of {device}")
    for device, named in (("cpu", False), ("auto", "GPU of None"), ("cuda:1", "GPU of cuda:1")):
        RunDirectory.create(tmp_path / device, config(device=device)).close()
        there = json.loads((tmp_path / device / "env.json").read_text())["device"]
        assert there == named if named else "GPU" not in there


def test_config_round_trip_and_unknown_keys() -> None:
    assert from_dict(to_dict(SMALL)) == SMALL
    with pytest.raises(ConfigError, match=r"unknown setting optim\.lrr; did you mean optim\.lr\?"):
        from_dict({"optim": {"lrr": 1}})
    with pytest.raises(ConfigError, match=r"unknown setting epoch; did you mean epochs\?"):
        from_dict({"epoch": 3})
    with pytest.raises(ConfigError, match="epochs must be at least 1"):
        config(epochs=0)


def test_evaluation_sees_the_deployed_network_only() -> None:
    """Prototypes and covariance cannot change the accuracy that is reported."""
    run = Run(config(), load("digits"))
    train_epoch(run)
    before = run.accuracy("test")
    with torch.no_grad():
        run.objective.net.prototypes.fill_(7.0)
        run.objective.net.covariance.factors.fill_(7.0)
    assert run.accuracy("test") == before


def test_digits_are_not_flipped_unless_asked() -> None:
    digits = load("digits")
    assert Run(config(augment="auto"), digits).data.policy == Augmentation.none()
    assert Run(config(augment="paper"), digits).data.policy == Augmentation()
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(40) % 2
    colour = ArrayDataset("colour", images, labels, images, labels, ("a", "b"))
    assert Run(config(augment="auto", variant="baseline"), colour).data.policy == Augmentation()
