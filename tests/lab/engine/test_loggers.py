"""Loggers: what the real TensorBoard, W&B and MLflow have stored, read back, is what the run's own metrics say."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from protoseam.lab.cli.main import main
from protoseam.lab.engine import session
from protoseam.lab.engine.config import ConfigError, OptimConfig, RunConfig
from protoseam.lab.engine.loggers import make_logger

CONFIG = RunConfig(
    data="digits",
    model="mlp",
    variant="baseline",
    epochs=2,
    augment="none",
    optim=OptimConfig(lr=0.01, warmup_epochs=0),
    device="cpu",
)


def trained(out: Path, logger: Any) -> dict[str, dict[int, float]]:
    """Train with a logger; returns what it must have stored: name → step → value."""
    summary = session.train(CONFIG, out, quiet=True, logger=logger)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    return {
        "loss/total": {row["epoch"]: row["loss"]["total"] for row in rows},
        "validation_accuracy": {row["epoch"]: row["validation_accuracy"] for row in rows},
        "lr": {row["epoch"]: row["lr"] for row in rows},
        "test_accuracy": {2: summary["test_accuracy"]},
    }


class Kept:
    """The least that the protocol asks for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.calls.append(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, metrics))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


def test_any_object_of_the_protocol_is_told_everything_in_order(tmp_path: Path) -> None:
    logger = Kept()
    expected = trained(tmp_path / "run", logger)
    params, first, second, last, status = logger.calls
    assert params["optim.lr"] == 0.01
    assert params["model"] == "mlp"
    assert [step for step, _ in (first, second, last)] == [1, 2, 2]
    assert {s: m["loss/total"] for s, m in (first, second)} == expected["loss/total"]
    assert last[1] == {"test_accuracy": expected["test_accuracy"][2]}
    assert status == "success"


def test_a_run_that_stops_is_told_as_failed_and_goes_on(tmp_path: Path) -> None:
    first, second = Kept(), Kept()
    with pytest.raises(session.Interrupted):
        session.train(CONFIG, tmp_path / "run", quiet=True, logger=first, budget_seconds=1e-9)
    assert first.calls[1:] == ["failed"]
    session.resume(tmp_path / "run", quiet=True, logger=second)
    assert [call[0] for call in second.calls[1:-1]] == [1, 2, 2]
    assert second.calls[-1] == "success"


def test_a_logger_of_lightning_fits_unchanged(tmp_path: Path) -> None:
    from lightning.fabric.loggers import CSVLogger

    expected = trained(tmp_path / "run", CSVLogger(str(tmp_path / "logs")))
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    stored = {int(row["step"]): float(row["loss/total"]) for row in rows if row["loss/total"]}
    assert stored == pytest.approx(expected["loss/total"])


def test_csv_has_one_row_per_epoch_also_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["--data=digits", "--model=mlp", "--variant=baseline", "--epochs=2", "--optim.warmup_epochs=0"]
    words += ["--device=cpu", "--quiet=true"]
    assert main(["train", *words, "--out", str(out), "--logger=csv", "--budget-minutes=1e-9"]) == 1
    stale = "step,loss/total\r\n1,777\r\n"  # of an epoch that is about to be run again
    (out / "log.csv").write_text(stale)
    assert main(["train", "--resume", str(out), "--logger", "csv"]) == 0
    rows = list(csv.DictReader((out / "log.csv").read_text().splitlines()))
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [int(row["step"]) for row in rows] == [1, 2]
    assert [float(row["loss/total"]) for row in rows] == [row["loss"]["total"] for row in history]
    assert float(rows[1]["test_accuracy"]) == json.loads((out / "summary.json").read_text())["test_accuracy"]
    capsys.readouterr()
    assert main(["train", *words, "--out", str(tmp_path / "b"), "--logger=cvs"]) == 1
    assert "csv" in capsys.readouterr().err


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = trained(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name, values in expected.items():
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(values)
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected = trained(tmp_path / "run", "wandb")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history: dict[int, dict[str, float]] = {}
    settings: dict[str, Any] = {}
    exits = []
    for record in complete(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            values = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            history.setdefault(record.history.step.num, {}).update(values)
        elif kind == "config":
            settings |= {u.key or u.nested_key[0]: json.loads(u.value_json) for u in record.config.update}
        elif kind == "exit":
            exits.append(record.exit.exit_code)
    for name, steps in expected.items():
        assert {step: row[name] for step, row in history.items() if name in row} == steps
    assert settings["model"] == "mlp"
    assert exits == [0]
    assert (tmp_path / "run" / "wandb-id").read_text() in file.name


def complete(file: Path) -> list[Any]:
    """The records of a run that has ended; W&B's own process may write the last of them a moment later."""
    until = time.monotonic() + 60
    while True:
        records = list(wandb_records(file))
        if time.monotonic() > until or any(r.WhichOneof("record_type") == "exit" for r in records):
            return records
        time.sleep(0.05)


def wandb_records(file: Path) -> Any:
    """The records of W&B's file: LevelDB's log format (blocks of 32 KiB) behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(parts)
            parts = b""


def test_mlflow_in_a_local_store_goes_on_under_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    expected = trained(tmp_path / "run", "mlflow")
    client = MlflowClient()
    run = client.get_run((tmp_path / "run" / "mlflow-id").read_text())
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["optim.lr"] == "0.01"
    for name, steps in expected.items():
        assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} == steps
    again = make_logger("mlflow", tmp_path / "run")
    again.log_hyperparams({"optim.lr": "another"})  # MLflow would refuse
    again.log_metrics({"lr": 1.0}, 3)
    again.finalize("failed")
    run = client.get_run(run.info.run_id)
    assert (run.info.status, run.data.metrics["lr"]) == ("FAILED", 1.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "wandb",
            "No API key configured. Use `wandb login` to log in. Without an account: WANDB_MODE=offline",
        ),
        ("mlflow", "MLFLOW_TRACKING_URI=sqlite:///mlflow.db"),
    ],
)
def test_a_logger_that_cannot_start_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """What is wrong is said in a line, and the same command with a remedy finds nothing in its way."""
    import wandb

    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.\n")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    with pytest.raises(ConfigError, match=f"^--logger {name} cannot start: .*{words}$"):
        session.train(CONFIG, tmp_path / "run", quiet=True, logger=name)
    assert not (tmp_path / "run").exists()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no logger 'comet'; there are csv, tensorboard"):
        make_logger("comet", tmp_path)
