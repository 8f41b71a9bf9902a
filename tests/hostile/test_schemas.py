"""Damaged or edited files of a run or a study: named with field and value, and nothing trained is lost."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_runs import three_seeds, written

from protoseam.lab.cli.main import main
from protoseam.lab.data import cache
from protoseam.lab.engine import checkpoint, session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig, resolved
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.session import ResumeWarning
from protoseam.lab.experiments.study import read_study, write_row

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [8]},
    epochs=3,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)
NAN, HUGE = float("nan"), 10**400


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    session.train(SMALL, run, quiet=True)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def stopped(run: Path) -> Path:
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    return run


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_empty_summary_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text("{}")
    assert main(["train", f"--resume={run}"]) == 1
    assert (
        "summary.json: test_accuracy is missing, and must be a number from 0 to 1" in capsys.readouterr().err
    )
    (run / "summary.json").unlink()  # as the message says
    assert session.resume(run, quiet=True)["epochs"] == 3


FLAT = {"width": 2, "shown": 1, "x": "1 2", "y": "1 2", "labels": "0 1", "prototypes": [[0, 0], [1, 1]]}


def test_embeddings_of_two_classes_are_believed(run: Path) -> None:
    edit(run / "summary.json", embeddings=FLAT | {"covariances": [[[1, 0], [0, 1]]] * 2})
    session.resume(run, quiet=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("test_accuracy", 5.0),
        ("test_accuracy", NAN),
        ("test_accuracy", True),
        ("epochs", 2.5),
        ("seconds", -1),
        ("seconds", HUGE),
        ("classes", ["\x1b[2J", "b"]),
        ("config", []),
        ("embeddings", {"x": "1 2"}),
        (
            "embeddings",
            {"width": 2, "shown": 1, "x": "1 2", "y": "1 2", "labels": "0 1", "prototypes": [[0, 0]]},
        ),
        (
            "embeddings",
            FLAT | {"covariances": [[[1, 0], [0, 1]], [[1, 2], [2, 1]]]},
        ),  # no covariance: 1·1 < 2·2
    ],
)
def test_a_summary_is_believed_only_within_its_ranges(field: str, value: Any, run: Path) -> None:
    edit(run / "summary.json", **{field: value})
    with pytest.raises(StorageError, match=rf"summary\.json: {field} is .*, and must be"):
        session.resume(run, quiet=True)


@pytest.mark.parametrize(
    "line",
    [
        '{"epoch": 2}',
        '{"epoch": 2, "loss": {}, "validation_accuracy": null}',
        '{"epoch": 2, "loss": {"total": 1}, "validation_accuracy": 5.0}',
        '{"epoch": true, "loss": {"total": 1}, "validation_accuracy": 0.5}',
        "[2]",
        "{",
    ],
)
def test_a_bad_line_of_metrics_costs_that_line_alone(line: str, stopped: Path) -> None:
    file = stopped / "metrics.jsonl"
    first, _, last = file.read_text().splitlines()
    file.write_text(f"{first}\n{line}\n{last}\n")
    with pytest.warns(ResumeWarning, match="the lines of 1 epochs, between 2 and 2, cannot be read"):
        summary = session.resume(stopped, quiet=True)
    assert summary["validation_accuracy"] == json.loads(last)["validation_accuracy"]
    assert [row["epoch"] for row in RunDirectory(stopped).read_metrics()] == [1, 3]


@pytest.mark.parametrize("resumed", [5, [5], [{"torch": ["\x1b"]}], None])
def test_a_bad_environment_is_named(resumed: Any, stopped: Path) -> None:
    edit(stopped / "env.json", resumed=resumed, torch="1.0")
    with pytest.raises(StorageError, match=r"env\.json: resumed is"):
        session.resume(stopped, quiet=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"mean": []},
        {"mean": [0.5, 0.5]},
        {"std": [0.0]},
        {"std": [NAN]},
        {"classes": ["a", "b\nc"]},
        {"sample_shape": [HUGE]},
        {"train": [-1, "x"]},
        {"path": 5},
    ],
)
def test_a_bad_record_of_the_data_is_named(damage: dict[str, Any], run: Path) -> None:
    edit(run / "data.json", **damage)
    with pytest.raises(StorageError, match=rf"data\.json: {next(iter(damage))} is"):
        evaluate(run)


def put_state(run: Path, epoch: int, changes: dict[str, Any]) -> None:
    """An edited state, with a manifest that fits."""
    folder = run / "checkpoints" / f"epoch-{epoch:06d}"
    if not folder.exists():
        shutil.copytree(run / "checkpoints" / "epoch-000003", folder)
    state = torch.load(folder / "state.pt", weights_only=True) | changes
    out = io.BytesIO()
    torch.save({k: v for k, v in state.items() if v is not None}, out)
    data = out.getvalue()
    manifest = {"format": 1, "epoch": epoch, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "state.pt").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("epoch", "changes", "why"),
    [
        (99, {"epoch": 99}, "epoch is 99 in a checkpoint of epoch 99, in a run of 3"),
        (3, {"epoch": 2}, "epoch is 2 in a checkpoint of epoch 3"),
        (3, {"epoch": "3"}, "epoch is '3', and must be a whole number"),
        (3, {"counter": -1}, "counter is -1, and must be"),
        (3, {"rate_scale": 0.0}, "rate_scale is 0.0, and must be"),
        (3, {"rate_scale": NAN}, "rate_scale is nan, and must be"),
        (3, {"seconds": None}, "seconds is missing"),
        (3, {"rewinds": -3}, "rewinds is -3, and must be"),
        (3, {"optimizer": {"momentum": [HUGE]}}, "int too big to convert"),
        (3, {"objective": {"a": 1}}, "objective is .*, and must be a table, each value a tensor"),
    ],
)
def test_an_edited_checkpoint_is_named(epoch: int, changes: dict[str, Any], why: str, stopped: Path) -> None:
    put_state(stopped, epoch, changes)
    with pytest.raises(checkpoint.CheckpointError, match=f"checkpoint of epoch {epoch} in .*[:(] ?{why}"):
        session.resume(stopped, quiet=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("test_accuracy", 5.0),
        ("test_accuracy", None),
        ("validation_accuracy", 5.0),
        ("epochs", "200"),
        ("config", 3),
        ("metrics", [{}]),
        ("metrics", [5]),
        ("metrics", [{"epoch": 1, "loss": 3, "validation_accuracy": None}]),
        ("metrics", [{"epoch": HUGE, "loss": {"total": 1}, "validation_accuracy": None}]),
        ("rate_scale", "half"),
    ],
)
def test_a_bad_study_file_is_named(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "study", three_seeds())
    file = next(folder.glob("*.json"))
    edit(file, **{field: value})
    with pytest.raises(StorageError, match=rf"{file.name} is no finished run, {field} is .*, and must be"):
        read_study(folder)
    assert main(["reproduce", "table1", "--table-only", f"--out={folder}"]) == 1
    assert file.name in capsys.readouterr().err


def test_a_toy_file_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "toy.json").write_text('{"samples": 5, "seeds": 5, "rows": [{"sigma": 1}]}')
    with pytest.raises(StorageError, match=r"toy\.json is no finished run, rows is"):
        read_study(tmp_path)
    (tmp_path / "toy.json").rename(tmp_path / "other.json")
    with pytest.raises(StorageError, match="test_accuracy is missing"):
        read_study(tmp_path)


def test_a_lost_environment_does_not_cost_the_results(run: Path, tmp_path: Path) -> None:
    (run / "env.json").unlink()
    assert write_row(tmp_path, "a", RunDirectory(run))["environment"] == {}


def test_a_resumed_run_without_test_data_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / "summary.json", test_accuracy=None)
    assert main(["train", f"--resume={run}"]) == 0
    assert "no test data, after 3 epochs" in capsys.readouterr().out


def test_json_is_read_within_limits(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "summary.json").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="not a plain file"):
        run.read_summary()
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(StorageError, match="more than 16,777,216 bytes"):
        run.read_summary()
    (tmp_path / "config.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a plain file"):
        run.read_config()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(StorageError, match="not a plain file"):
        run.read_metrics()


@pytest.mark.parametrize("size", ["Infinity", "[1]", "1e400"])
def test_a_manifest_of_impossible_sizes_is_damage(size: str, tmp_path: Path) -> None:
    files = ", ".join(f'"{name}": {{"bytes": {size}, "sha256": ""}}' for name in cache._FILES)
    (tmp_path / "manifest.json").write_text(f'{{"reader": {cache.READER_VERSION}, "files": {{{files}}}}}')
    assert "cannot be read" in str(cache.damage(tmp_path))
    checkpoint.save(tmp_path, 1, {})
    (tmp_path / "epoch-000001" / "manifest.json").write_text(
        f'{{"epoch": 1, "size": {size}, "sha256": "", "format": 1}}'
    )
    with pytest.warns(checkpoint.CheckpointWarning), pytest.raises(checkpoint.CheckpointError):
        checkpoint.latest(tmp_path)


def test_settings_in_the_summary_are_the_runs(run: Path) -> None:
    assert session.resume(run, quiet=True)["config"] == dataclasses.asdict(resolved(SMALL))
