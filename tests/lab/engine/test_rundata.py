"""A run knows its data again: wherever it is asked from, and when it is no longer the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from protoseam.errors import DataWarning
from protoseam.lab.engine import session
from protoseam.lab.engine.config import (
    ConfigError,
    LiftConfig,
    OptimConfig,
    RunConfig,
    as_begun,
    resolved,
)
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.session import Interrupted, ResumeWarning, resume, train
from protoseam.lab.engine.settings import from_dict

CONFIG = RunConfig(
    data="blobs.npz",
    model="mlp",
    model_options={"hidden": [8]},
    epochs=2,
    batch_size=16,
    augment="none",
    variant="baseline",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=2),
    device="cpu",
)


def blobs(
    path: Path, *, seed: int = 0, classes: tuple[str, ...] = ("a", "b"), width: int = 4, n: int = 60
) -> None:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % len(classes)
    x = rng.normal(y[:, None], 1, (n, width)).astype(np.float32)
    half = len(y) // 2
    np.savez(path, x_train=x[:half], y_train=y[:half], x_test=x[half:], y_test=y[half:], classes=classes)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    blobs(tmp_path / "blobs.npz")
    return tmp_path


def test_a_run_finds_its_data_from_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may even be other data of that name."""
    expected = train(CONFIG, here / "run", quiet=True)["test_accuracy"]
    other = here / "elsewhere"
    other.mkdir()
    blobs(other / "blobs.npz", seed=1, n=80)
    monkeypatch.chdir(other)
    found = evaluate(here / "run")
    assert (found["accuracy"], found["samples"]) == (expected, 30)
    shutil.move(here / "blobs.npz", here / "moved.npz")  # gone: what the config says, from here
    assert evaluate(here / "run", place=str(here / "moved.npz"))["accuracy"] == expected
    with pytest.warns(DataWarning, match="its training samples were 30 and are 40"):
        evaluate(here / "run", place=str(other / "blobs.npz"))
    with pytest.warns(
        DataWarning, match="its training samples were 30 and are 40; its testing samples were 30"
    ):
        assert evaluate(here / "run")["samples"] == 40
    (other / "blobs.npz").unlink()
    with pytest.raises(ConfigError, match=f"the data of .*run lay in {here / 'blobs.npz'}"):
        evaluate(here / "run")


def test_data_may_lie_below_a_folder_of_any_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes a no-break space and the joiners of Persian and of emoji for unprintable."""
    folder = here / "my\u00a0photos\u200c\t"
    folder.mkdir()
    shutil.move(here / "blobs.npz", folder)
    monkeypatch.chdir(folder)
    expected = train(CONFIG, here / "run")["test_accuracy"]
    monkeypatch.chdir(here)
    assert evaluate(here / "run")["accuracy"] == expected
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="is not there any more"):
        evaluate(here / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": ("a", "b", "c")}, "it had 2 classes and has 3"),
        ({"classes": ("a", "zz")}, "class 1 was 'b' and is 'zz'"),
        ({"width": 5}, r"samples had shape \(4,\) and have \(5,\)"),
    ],
)
def test_data_the_network_was_not_made_for_is_refused(
    here: Path, change: dict[str, object], words: str
) -> None:
    train(CONFIG, here / "run", quiet=True)
    blobs(here / "blobs.npz", **change)  # type: ignore[arg-type]
    refused = pytest.raises(ConfigError, match=rf"has changed since training \({words}\): restore")
    with refused:
        evaluate(here / "run")
    (here / "run" / "summary.json").unlink()
    with refused:
        resume(here / "run", quiet=True)


def test_samples_that_changed_are_named(here: Path) -> None:
    with pytest.raises(Interrupted):
        train(CONFIG, here / "run", quiet=True, budget_seconds=1e-9)
    blobs(here / "blobs.npz", seed=1)
    with pytest.warns(
        ResumeWarning, match="its training samples are not the same; its testing samples are not"
    ):
        summary = resume(here / "run", quiet=True)
    with pytest.warns(DataWarning):  # normalised as at the start, in training and now
        assert evaluate(here / "run")["accuracy"] == summary["test_accuracy"]


@pytest.mark.parametrize("n", [40, 100])
def test_a_run_goes_on_with_fewer_or_more_samples(
    here: Path, n: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch then has another number of steps, and the picture of the latent space other points."""
    honest = session.train_epoch

    def stopped(run: Run) -> Any:
        if run.epoch == 2:
            raise KeyboardInterrupt
        return honest(run)

    def rates(run: Path) -> list[float]:
        return [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    config = dataclasses.replace(CONFIG, epochs=4, batch_size=8)
    monkeypatch.setattr(session, "train_epoch", stopped)
    with pytest.raises(Interrupted):
        train(config, here / "run", quiet=True)
    monkeypatch.setattr(session, "train_epoch", honest)
    blobs(here / "blobs.npz", n=n)
    with pytest.warns(ResumeWarning, match=f"its training samples were 30 and are {n // 2}"):
        resume(here / "run")
    assert f"2 classes: a, b; {n // 2} training," in capsys.readouterr().err
    train(config, here / "fresh", quiet=True)
    assert rates(here / "run")[2:] == rates(here / "fresh")[2:]
    with pytest.warns(DataWarning):
        assert evaluate(here / "run")["samples"] == n // 2


def test_a_root_that_is_told_anew_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the old one is still there; and a relative one is found again from elsewhere."""
    for name in ("old", "new", "elsewhere"):
        (here / name / "mnist").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", 200), ("test", 20)):
        images = rng.integers(0, 256, (n, 28, 28, 1), dtype=np.uint8)
        np.save(here / "old" / "mnist" / f"{part}_images.npy", images)
        np.save(here / "old" / "mnist" / f"{part}_labels.npy", np.arange(n) % 10)
    config = dataclasses.replace(CONFIG, data="mnist", data_root="old")
    cut_down = pytest.warns(DataWarning, match="the official set has")
    for out in (here / "one", here / "two"):
        with cut_down, pytest.raises(Interrupted):
            train(config, out, quiet=True, budget_seconds=1e-9)
    monkeypatch.chdir(here / "elsewhere")
    with cut_down:
        resume(here / "one", quiet=True)
    for file in (here / "old" / "mnist").iterdir():
        shutil.move(file, here / "new" / "mnist" / file.name)
    moved = dataclasses.replace(config, data_root=str(here / "new"))
    with cut_down:
        train(moved, here / "two", quiet=True, resuming=True)


def test_what_an_earlier_attempt_left_is_not_believed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(CONFIG, here / "other", quiet=True)
    (here / "run").mkdir()
    shutil.copy(here / "other" / "data.json", here / "run" / "data.json")
    blobs(here / "b.npz", seed=3, n=100)
    with monkeypatch.context() as patch:
        patch.setattr(
            "protoseam.lab.engine.rundata.load", lambda *_, **__: sys.exit()
        )  # as if killed while it reads
        with pytest.raises(SystemExit):
            train(dataclasses.replace(CONFIG, data="b.npz"), here / "run", quiet=True)
    resume(here / "run", quiet=True)
    assert json.loads((here / "run" / "data.json").read_text())["path"] == str(here / "b.npz")


def test_an_older_runs_settings_stay_in_force(here: Path) -> None:
    """A run begun before gradients were clipped and batches chosen by the data goes on without either."""
    with pytest.raises(Interrupted):
        train(CONFIG, here / "run", quiet=True, budget_seconds=1e-9)
    file = here / "run" / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    assert stored["optim"]["clip"] == 1.0
    assert [stored["lift"][name] for name in ("bounded", "seam_speed", "refit")] == [True, 30.0, True]
    for name in ("clip", "name"):
        del stored["optim"][name]
    for name in ("bounded", "seam_speed", "refit"):
        del stored["lift"][name]
    for name in ("image_size", "mixup", "cutmix", "label_smoothing", "average", "init_from"):
        del stored[name]
    file.write_text(yaml.safe_dump({**stored, "batch_size": 128}))
    config = RunDirectory(here / "run").read_config()
    assert config.optim.clip == 0.0
    assert (config.lift.bounded, config.lift.seam_speed, config.lift.refit) == (False, 1.0, False)
    assert config.batch_size == 128
    resume(here / "run", quiet=True)
    catalogued = as_begun({"data": "digits", "optim": {"lr": 0.1}})
    assert resolved(from_dict(catalogued)).optim.clip is None


def test_a_run_that_goes_on_and_a_new_one_have_each_their_own_data(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = dataclasses.replace(CONFIG, seed=1), dataclasses.replace(CONFIG, seed=2)
    with pytest.raises(Interrupted):
        train(one, here / "one", quiet=True, budget_seconds=1e-9)
    other = here / "other"
    other.mkdir()
    blobs(other / "blobs.npz", seed=1, n=80)
    monkeypatch.chdir(other)
    for config, name in ((one, "one"), (two, "two")):
        train(config, here / name, quiet=True, resuming=True)
    assert [evaluate(here / name)["samples"] for name in ("one", "two")] == [30, 40]


def test_a_new_run_has_a_seed_of_one_word(here: Path) -> None:
    """Two words could be those of another seed and an epoch; a run that has one is still read."""
    old = dataclasses.replace(CONFIG, seed=2**32)
    with pytest.raises(ConfigError, match=r"the seed of a new run must be below 2\*\*32, got 4294967296"):
        train(old, here / "run", quiet=True)
    accuracy = train(CONFIG, here / "old", quiet=True)["test_accuracy"]
    text = (here / "old" / "config.yaml").read_text()
    (here / "old" / "config.yaml").write_text(text.replace("seed: 42", f"seed: {2**32}"))
    assert evaluate(here / "old")["accuracy"] == accuracy


def test_the_normalisation_is_that_of_training(here: Path) -> None:
    """Also where training samples have changed since; the test samples have not."""
    accuracy = train(CONFIG, here / "run", quiet=True)["test_accuracy"]
    with np.load(here / "blobs.npz") as file:
        arrays = dict(file)
    np.savez(here / "blobs.npz", **{**arrays, "x_train": 100 * arrays["x_train"] + 7})
    with pytest.warns(DataWarning, match="its training samples are not the same$"):
        assert evaluate(here / "run")["accuracy"] == accuracy


def test_a_run_of_an_earlier_version_is_read_as_before(here: Path) -> None:
    accuracy = train(CONFIG, here / "run", quiet=True)["test_accuracy"]
    (here / "run" / "data.json").unlink()
    assert evaluate(here / "run")["accuracy"] == accuracy


def test_a_name_stays_a_name(here: Path) -> None:
    """Also where a folder is called like the data set."""
    (here / "digits").mkdir()
    train(dataclasses.replace(CONFIG, data="digits", epochs=1), here / "run", quiet=True)
    written = json.loads((here / "run" / "data.json").read_text())
    assert (written["path"], written["sample_shape"], written["train"][0]) == (None, [1, 8, 8], 1438)
    assert 0.2 < written["mean"][0] < 0.4


@pytest.mark.parametrize(
    "damage",
    [
        {"path": ["x"]},
        {"path": "a\0b"},
        {"classes": "ab"},
        {"train": None},
        {"mean": ["0"]},
        {"sample_shape": [1.5]},
    ],
)
def test_a_damaged_record_is_named(here: Path, damage: dict[str, object]) -> None:
    train(CONFIG, here / "run", quiet=True)
    file = here / "run" / "data.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(StorageError, match=rf"data\.json: {next(iter(damage))} is .*, and must be"):
        evaluate(here / "run")
