"""`protoseam` on a folder of one's own images, as a newcomer would use it."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from miniature_files import write_folder
from PIL import Image

from protoseam.lab.cli.main import main
from protoseam.lab.engine.evaluate import load_deployed

COLOURS = {"amber": (230, 160, 20), "blue": (30, 60, 220), "green": (20, 200, 60)}
QUICK = ["--model=mlp", "--variant=baseline", "--augment=none", "--optim.warmup_epochs=1", "--device=cpu"]


def folder(path: Path, *, learnable: bool = True, count: int = 20, seed: int = 0) -> Path:
    """Noisy pictures of differing sizes whose colour tells their class, or does not."""
    rng = np.random.default_rng(seed)
    files = {}
    for label, colour in COLOURS.items():
        for i in range(count):
            height, width = rng.integers(12, 30, 2)
            noise = rng.integers(0, 256, (height, width, 3))
            pixels = 0.5 * np.array(colour) + 0.5 * noise if learnable else noise
            out = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
            files[f"{label}/{i}.png"] = out.getvalue()
    return write_folder(path, files)


@pytest.fixture(autouse=True)
def _own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOSEAM_DATA", str(tmp_path / "root"))


def by_loops(run: Path) -> tuple[float, float]:
    """NLL, and ECE over 15 bins, of a run's test data, in Python's own floats."""
    plain, data = load_deployed(run)
    rows = [
        (p, int(y))
        for x, ys in data.batches("test")
        for p, y in zip(plain(x).double().softmax(1).tolist(), ys, strict=True)
    ]
    nll = -sum(math.log(p[y]) for p, y in rows) / len(rows)
    ece = 0.0
    for b in range(15):
        inside = [(max(p), p.index(max(p)) == y) for p, y in rows if b / 15 < max(p) <= (b + 1) / 15]
        ece += abs(sum(confidence - right for confidence, right in inside)) / len(rows)
    return nll, ece


def test_a_folder_of_any_sizes_from_training_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = folder(tmp_path / "mine"), tmp_path / "run"
    train = ["train", f"--data={data}", *QUICK, "--epochs=8", "--out", str(out)]
    assert main(train) == 1
    assert "resized and cropped to one size: --image_size" in capsys.readouterr().err
    assert main([*train, "--image_size", "16"]) == 0
    told = capsys.readouterr()
    took = "run: 3 classes: amber, blue, green; 48 training, 6 of them for validation, and 12 test images"
    assert f"{took} (a fifth, chosen by file name)." in " ".join(told.err.split())
    assert (
        "run: 42 training samples in batches of 8: 5 steps per epoch; 2 samples, others in each epoch, are left to "
        "later epochs." in told.err
    )
    assert (
        "run: an epoch has only 5 steps (42 samples in batches of 8), so 8 epochs are 40 updates" in told.err
    )
    assert f"{out}: test accuracy " in told.out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
    assert "at_chance" not in summary
    assert json.loads((out / "data.json").read_text())["image_size"] == 16
    assert main(["eval", str(out), "--device=cpu"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "test accuracy" in line
    assert ", NLL 0." in line
    assert "% (15 equal-width bins)" in line
    assert main(["eval", str(out), "--json", "--device=cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"] == summary["test_accuracy"]
    nll, ece = by_loops(out)
    assert result["nll"] == pytest.approx(nll, rel=1e-6)
    assert result["ece"] == pytest.approx(ece, rel=1e-6)
    assert main(["export", str(out), str(tmp_path / "net.pt2")]) == 0
    assert "(shorter side to 16 pixels, centre cropped)" in capsys.readouterr().out


def test_training_that_ends_at_chance_says_so_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = folder(tmp_path / "noise", learnable=False), tmp_path / "run"
    words = [f"--data={data}", *QUICK, "--image_size=8", "--epochs=5", "--optim.lr=1e-9"]
    assert main(["train", *words, "--seeds", "1", "2", "--out", str(out)]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    found = [
        100 * json.loads((out / f"baseline-{i}/summary.json").read_text())["test_accuracy"] for i in (1, 2)
    ]
    means = f"{sum(found) / 2:.2f} % of 2 runs, {min(found):.2f} to {max(found):.2f}"
    assert f"baseline: mean test accuracy {means}" in lines
    ends = [f"{out / name}: test accuracy " for name in ("baseline-1", "baseline-2")]
    for line, end in zip(lines[-2:], ends, strict=True):
        assert line.startswith(end)
        assert "is near chance: with 3 classes, always answering 'amber' gives 33.33 %" in line
        assert "Try one of --epochs 10, --optim.name adamw --optim.lr 0.001." in line
    assert "baseline-1: after 3 epochs validation accuracy" in told.err
    assert told.err.count("baseline-1: after ") == 1  # and not again after 4
    assert main(["train", "--resume", str(out / "baseline-1")]) == 0
    assert "is near chance" in capsys.readouterr().out.splitlines()[-1]
    assert main(["eval", str(out / "baseline-1"), "--device=cpu"]) == 0
    assert "is near chance" in capsys.readouterr().out.splitlines()[-1]


def test_settings_for_ones_own_data_from_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, first, second = folder(tmp_path / "mine"), tmp_path / "first", tmp_path / "second"
    words = [
        f"--data={data}",
        *QUICK,
        "--image_size=12",
        "--epochs=6",
        "--optim.name=adamw",
        "--optim.clip=1",
    ]
    words += ["--average=0.9", "--mixup=0.2", "--cutmix=1", "--label_smoothing=0.1"]
    assert main(["train", *words, "--out", str(first)]) == 0
    written = yaml.safe_load((first / "config.yaml").read_text())
    assert (written["optim"]["lr"], written["optim"]["weight_decay"]) == (0.001, 0.01)
    assert main(["train", *words, "--init_from", str(first), "--out", str(second)]) == 0
    assert "second: 6 of 6 tensors are loaded from" in capsys.readouterr().err
    assert main(["eval", str(second), "--device=cpu"]) == 0


def test_a_sweep_knows_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    data, out = folder(tmp_path / "mine"), tmp_path / "sweep"
    words = [f"--data={data}", *QUICK, "--image_size=12", "--epochs=2", "--quiet=true", "--out", str(out)]
    space = ["optim.name=choice:sgd,adamw", "average=choice:null,0.9", "mixup=uniform:0:0.4"]
    space += ["optim.clip=choice:null,1", "batch_size=choice:null,16", "label_smoothing=choice:0,0.1"]
    space += ["cutmix=choice:0,1", "image_size=choice:8,12"]
    assert main(["sweep", *words, "--trials=3", "--space", *space]) == 0
    assert "trial 2 (3 in all)" in capsys.readouterr().out
    best = yaml.safe_load((out / "baseline" / "best.yaml").read_text())
    assert best["optim"]["name"] in ("sgd", "adamw")


def test_the_grid_of_a_sweep_follows_the_optimizer() -> None:
    from protoseam.lab.cli.sweep import _space
    from protoseam.lab.engine.config import OptimConfig, RunConfig
    from protoseam.lab.experiments.paper import GRID

    rates = {
        name: _space(None, RunConfig(optim=OptimConfig(name=name)))["optim.lr"].values
        for name in ("sgd", "adamw")
    }
    assert rates["sgd"] == GRID["optim.lr"]
    assert 0.001 in rates["adamw"]
    assert max(rates["adamw"]) < min(rates["sgd"])
    assert _space(None, RunConfig(data="./mine"))["optim.lr"].values == rates["adamw"]  # what training takes
    assert _space(None, RunConfig(data="digits"))["optim.lr"].values == rates["sgd"]


def test_a_start_that_fails_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, labels = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    np.savez(tmp_path / "table.npz", x_train=rows, y_train=labels, x_test=rows, y_test=labels)
    for words, answer in (
        ([f"--data={tmp_path / 'nothing'}"], "neither a data set's name nor an existing path"),
        ([f"--data={tmp_path / 'table.npz'}", "--model=convnet"], "table of 5 features: take --model mlp"),
    ):
        assert main(["train", *words, "--device=cpu", "--out", str(tmp_path / "run")]) == 1
        assert answer in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    assert main(["train", *words, "--device=cpu", "--out", str(tmp_path / "mine")]) == 1
    assert (tmp_path / "mine").exists()  # the user has made it


def test_the_optimizer_is_named_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = folder(tmp_path / "some"), tmp_path / "run"
    words = [f"--data={data}", *QUICK, "--image_size=8", "--epochs=1"]
    assert main(["train", *words, "--optim.lr=3e-4", "--out", str(out)]) == 0
    told = "".join(capsys.readouterr())
    assert "run: AdamW with learning rate 0.0003 and weight decay 0.01, gradients clipped at 1." in told
    assert "high for AdamW" not in told
    assert main(["train", *words, "--optim.lr=0.05", "--out", str(tmp_path / "fast")]) == 0
    assert "This rate is high for AdamW: --optim.name sgd takes such rates." in "".join(capsys.readouterr())


def test_a_run_does_not_lie_among_the_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = folder(tmp_path / "photos")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(data)
    places = (["--data=."], ["--data=~/photos", "--out=~/photos"], [f"--data={data}", "--out=green/run"])
    for command, words in [*(("train", words) for words in places), ("sweep", ["--data=."])]:
        assert main([command, *words, *QUICK, "--image_size=8", "--epochs=1"]) == 1
        assert (
            f"lies in the data folder {data}, where it would be taken for a class" in capsys.readouterr().err
        )
    assert sorted(path.name for path in data.iterdir()) == sorted(COLOURS)
    assert main(["train", "--data=.", *QUICK, "--image_size=8", "--epochs=1", "--out=~/run"]) == 0
    assert (tmp_path / "run" / "summary.json").exists()
    rows, labels = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
    for name in ("train", "test"):  # arrays have no class folders, so a run may lie beside them
        np.save(tmp_path / f"{name}_images.npy", rows)
        np.save(tmp_path / f"{name}_labels.npy", labels)
    assert main(["train", "--data=~/", *QUICK, "--epochs=1", "--out=~/other"]) == 0


def test_a_table_is_told_where_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iris.csv").write_text("1,2,a")
    assert main(["train", f"--data={tmp_path / 'iris.csv'}", *QUICK, "--out", str(tmp_path / "run")]) == 1
    assert "Tables go into an .npz: np.savez('table.npz', x_train=…" in capsys.readouterr().err
    for i in range(9):
        (tmp_path / "runs" / str(i)).mkdir(parents=True)
        (tmp_path / "runs" / str(i) / "config.yaml").touch()
    assert main(["eval", str(tmp_path / "runs")]) == 1
    assert "the runs in it are 0, 1, 2, 3, 4, 5, 6, 7 and 1 more" in capsys.readouterr().err
