"""``protoseam reproduce all --quick``, five epochs long: every table and figure, from raw files only."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from protoseam.lab.cli.main import main
from protoseam.theory import toy

TABLES = {
    "table1", "differences", "hyperparameters", "audits", "sweep-rho", "sweep-k", "curves", "covariance",
    "unlifted-grid", "toy",
}  # fmt: skip
FIGURES = {"sweep-rho", "sweep-k", "curves", "clusters", "toy-selection", "toy-perturbation"}
SHORT = ["--quick", "--seeds", "42", "43", "--epochs", "8"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quick")
    assert main(["reproduce", "all", *SHORT, "--out", str(out)]) == 0
    return out


def test_every_table_and_figure_is_made_and_says_that_it_is_quick(study: Path) -> None:
    expected = {f"{name}.{form}" for name in TABLES for form in ("csv", "md", "tex")}
    expected |= {f"{name}.{form}" for name in FIGURES for form in ("png", "svg")} | {
        "index.md",
        "report.html",
    }
    assert {path.name for path in (study / "report").iterdir()} == expected
    for path in (study / "report").iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        elif path.suffix not in (
            ".svg",
            ".html",
        ):  # an SVG has its letters as outlines, the page its own tests
            assert "not the paper's numbers" in path.read_text(encoding="utf-8"), path.name
    assert "missing" not in (study / "report" / "index.md").read_text()


def test_the_tables_say_what_the_files_say(study: Path) -> None:
    assert len(list(study.glob("*.json"))) == 12 + 4 + 4 + 3 + 4 + 1 + 1
    run = json.loads((study / "digits-mlp-unlifted-43.json").read_text())
    with (study / "report" / "table1.csv").open() as file:
        rows = {(r["network"], r["variant"]): r for r in csv.DictReader(file)}
    assert rows["small MLP", "Unlifted"]["seed 43"] == f"{100 * run['test_accuracy']:.2f}"
    assert run["epochs"] == len(run["metrics"]) == 8
    picture = json.loads((study / "clusters-digits-convnet-protoseam-42.json").read_text())
    assert picture["config"]["lift"]["dim"] == picture["embeddings"]["width"] == 2
    assert len(picture["embeddings"]["x"].split()) == 359
    searched = json.loads((study / "grid-digits-mlp-unlifted-0.05-0.0005-42.json").read_text())
    assert searched["test_accuracy"] is None  # a search never sees the test images
    assert searched["validation_accuracy"] > 0


def test_the_report_comes_out_the_same_again_from_copied_files(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in study.glob("*.json"):
        shutil.copy(path, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert (
        main(["reproduce", "all", *SHORT, "--out", str(tmp_path), "--report", str(tmp_path / "again")]) == 0
    )
    assert "runs to train" not in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    for path in (study / "report").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_one_missing_run_is_missing_everywhere(study: Path, tmp_path: Path) -> None:
    for path in study.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "digits-mlp-protoseam-42.json").unlink()
    for path in tmp_path.glob("clusters-*.json"):
        path.unlink()
    assert main(["reproduce", "all", *SHORT, "--out", str(tmp_path), "--table-only"]) == 0
    report = tmp_path / "report"
    assert "- digits-mlp-protoseam-42" in (report / "index.md").read_text()
    assert "| Digits | small MLP | ProtoSeam | missing |" in (report / "table1.md").read_text()
    assert "| 16 | missing |" in (report / "sweep-rho.md").read_text()
    assert "| 32 | missing |" in (report / "sweep-k.md").read_text()
    assert not (report / "clusters.png").exists()


def test_a_part_that_cannot_be_run_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data set of the paper is there: each says where it was looked for, and the toy is simulated all the same."""
    simulate = toy.simulate
    monkeypatch.setattr(toy, "simulate", lambda **_: simulate(samples=100, seeds=2))
    command = ["reproduce", "all", "--out", str(tmp_path / "study"), "--data-root", str(tmp_path / "nothing")]
    assert main([*command, "--seeds", "42"]) == 1
    said = capsys.readouterr()
    for data in ("cifar10", "cifar100", "tinyimagenet", "mnist"):
        assert f"{data} is not under {tmp_path / 'nothing'}" in said.err
    assert (tmp_path / "study" / "report" / "toy-selection.svg").exists()
    assert "table1: 0 of 18 runs" in said.out
