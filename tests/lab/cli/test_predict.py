"""``protoseam predict`` and ``ps.load``: the same answers as evaluation, images of any kind, damage that is named."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import protoseam as ps
from protoseam.errors import DataError
from protoseam.lab.cli.main import main
from protoseam.lab.data.loading import load as load_data
from protoseam.lab.engine import session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.evaluate import evaluate

GREY = RunConfig(
    model="mlp",
    model_options={"hidden": [32]},
    epochs=6,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=2.0),
    device="cpu",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    session.train(GREY, out, quiet=True)
    return out


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return load_data("digits").test_images


def answers(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict], str]:
    status = main(["predict", *words, "--json"])
    told = capsys.readouterr()
    return status, [json.loads(line) for line in told.out.splitlines()], told.err


def test_arrays_get_the_answers_of_evaluation(
    run: Path, digits: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", x=digits)
    status, found, _ = answers([str(run), str(tmp_path / "new.npz")], capsys)
    labels = load_data("digits").test_labels
    right = sum(one["label"] == str(y) for one, y in zip(found, labels, strict=True))
    assert status == 0
    assert right == evaluate(run)["correct"]
    ranks = [one["rank"] for one in found]
    assert min(ranks) < 0.02
    assert 0.45 < np.mean(ranks) < 0.55
    assert all(one["probability"] >= one["second_probability"] for one in found)


def test_sizes_and_modes_are_brought_to_the_training_shape(
    run: Path, digits: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = Image.fromarray(digits[0, ..., 0])
    exact.save(tmp_path / "a-grey.png")
    exact.convert("RGB").save(tmp_path / "b-rgb.png")
    exact.convert("RGBA").save(tmp_path / "c-rgba.png")
    exact.resize((64, 64), Image.Resampling.NEAREST).convert("P").save(tmp_path / "d-large.png")
    (tmp_path / "e-broken.png").write_bytes(b"\x89PNG nonsense")
    (tmp_path / "notes.txt").write_text("no image")
    status, found, told = answers([str(run), str(tmp_path), str(tmp_path / "gone.png")], capsys)
    assert status == 1
    assert "e-broken.png is not one of PNG" in told
    assert "gone.png cannot be read" in told
    assert [Path(one["name"]).name[0] for one in found] == ["a", "b", "c", "d"]
    assert len({one["label"] for one in found}) == 1
    assert found[0]["probability"] == pytest.approx(found[1]["probability"], abs=1e-6)


def test_a_list_and_a_table(
    run: Path,
    digits: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Image.fromarray(digits[0, ..., 0]).save(tmp_path / "one\x1b[2J.png")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{tmp_path / 'one'}\x1b[2J.png\n\n"))
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["predict", str(run), "-"]) == 0
    shown = capsys.readouterr().out
    assert "one\\x1b[2J.png" in shown
    assert "\x1b[2J" not in shown
    assert (
        "the distance to the nearest prototype, in deviations; larger is less like the training data" in shown
    )
    assert main(["predict", str(run), str(tmp_path), "--csv"]) == 0
    assert capsys.readouterr().out.startswith(
        "name,label,probability,second,second_probability,unusual,rank\n"
    )


def test_places_that_do_not_exist_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), str(tmp_path)]) == 1
    assert "holds no image" in capsys.readouterr().err
    assert main(["predict", str(run), str(tmp_path / "nowhere")]) == 1
    assert "there is no" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), "x.png"]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_noise_is_more_unusual_than_digits(run: Path, digits: np.ndarray) -> None:
    net = ps.load(run)
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    known, strange = (np.mean([one.unusual for one in net.predict(x)]) for x in (digits[:40], noise))
    assert strange > known


def test_load_gives_names_and_the_transform(run: Path, digits: np.ndarray, tmp_path: Path) -> None:
    net = ps.load(run)
    assert net.classes == tuple(map(str, range(10)))
    picture = Image.fromarray(digits[3, ..., 0]).resize((20, 30))
    picture.save(tmp_path / "x.png")
    from_file, from_picture = net.transform(tmp_path / "x.png"), net.transform(picture)
    assert from_file.shape == (1, 8, 8)
    assert torch.equal(from_file, from_picture)
    assert torch.equal(net.transform(picture.convert("P")), from_file)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)  # as a phone saves it
    assert torch.equal(net.transform(tmp_path / "turned.png"), from_file)
    assert torch.equal(net.transform(Image.open(tmp_path / "turned.png")), from_file)
    assert net(from_file[None]).shape == (1, 10)
    with pytest.raises(DataError, match="has 2 channels, and the network takes 1"):
        net.transform(np.zeros((8, 8, 2), dtype=np.uint8))


@pytest.mark.filterwarnings("ignore")  # of torch.export and onnxruntime
def test_an_exported_file_answers_alike(
    run: Path, digits: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", x=digits[:70])
    _, expected, _ = answers([str(run), str(tmp_path / "new.npz")], capsys)
    for file, more in (("net.onnx", []), ("net.pt2", ["--trust"])):
        assert main(["export", str(run), str(tmp_path / file)]) == 0
        capsys.readouterr()
        status, found, _ = answers([str(tmp_path / file), str(tmp_path / "new.npz"), *more], capsys)
        assert status == 0
        assert [one["label"] for one in found] == [one["label"] for one in expected]
        assert found[0]["rank"] is None
    assert main(["predict", str(tmp_path / "net.pt2"), "x.png"]) == 1
    assert "--trust" in capsys.readouterr().err
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    assert main(["predict", str(tmp_path / "bad.onnx"), "x.png"]) == 1
    assert "is no ONNX model" in capsys.readouterr().err


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    y = np.arange(80) % 2
    x = np.random.default_rng(0).normal(y[:, None], 1, (80, 3)).astype(np.float32)
    np.savez(folder / "t.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    session.train(dataclasses.replace(GREY, data=str(folder / "t.npz"), epochs=2), folder / "run", quiet=True)
    return folder / "run"


def test_rows_without_numbers_are_named_and_the_others_go_on(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.zeros((5, 3))
    rows[1, 0], rows[2, 1], rows[3] = np.nan, 1e300, 3e38  # not in float32; and too large for the network
    np.savez(tmp_path / "new.npz", x=rows)
    status, found, told = answers([str(table), str(tmp_path / "new.npz")], capsys)
    assert status == 1
    assert [one["name"][-3:] for one in found] == ["[0]", "[4]"]
    assert [line.partition("npz")[2] for line in told.splitlines()] == [
        "[1] holds NaN or infinity: drop or fill such values",
        "[2] holds NaN or infinity: drop or fill such values",
        "[3] has values so large that the network's answer is no number: correct them",
    ]
    with pytest.raises(DataError, match=r"\[1\] holds NaN or infinity"):
        ps.load(table).predict([tmp_path / "new.npz"])
    with pytest.raises(DataError, match="this row holds NaN"):
        ps.load(table).transform([0, np.inf, 0])


def test_what_is_no_sample_is_named_as_what_it_is(
    table: Path,
    run: Path,
    digits: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "iris.csv").write_text("1,2,3")
    status, _, told = answers([str(table), str(tmp_path / "iris.csv")], capsys)
    assert status == 1
    assert "iris.csv is no .npz file, and the network takes rows of 3 features: np.savez(" in told
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    status, _, told = answers([str(run), "-"], capsys)
    assert status == 1
    assert "standard input names no image" in told
    for name in (".cache/a.png", "b/c.png", "b/.d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(digits[0, ..., 0]).save(tmp_path / name)
    _, found, _ = answers([str(run), str(tmp_path)], capsys)
    assert [one["name"] for one in found] == [str(tmp_path / "b" / "c.png")]  # as in training


def test_options_may_stand_between_places(
    run: Path,
    digits: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in "ab":
        Image.fromarray(digits[0, ..., 0]).save(tmp_path / f"{name}.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["predict", str(run), "~/a.png", "--json", str(tmp_path / "b.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["export", str(run), "--to", "safetensors", str(tmp_path / "net.safetensors")]) == 0
    assert (tmp_path / "net.safetensors").is_file()
    assert main(["report", str(run), "--out=~/two.html", str(run)]) == 0
    assert (tmp_path / "two.html").is_file()
