"""What ``protoseam reproduce`` does with its options, with files and with time."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import row, written

from protoseam.lab.cli.main import main
from protoseam.lab.data import loading
from protoseam.lab.experiments import reporting, study


def test_the_table_shows_what_is_there_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "cifar100-resnet8-protoseam-{}".format
    runs = {name(seed): row(name(seed), value) for seed, value in ((42, 0.77), (43, 0.79))}
    short = "cifar100-resnet8-baseline-42"
    out = written(tmp_path / "study", {**runs, short: row(short, 0.99, epochs=30)})
    command = ["reproduce", "table1", "--out", str(out), "--table-only", "--datasets", "cifar100"]
    assert main([*command, "--models", "resnet8", "--report", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    expected = "| CIFAR-100 | ResNet-8 | ProtoSeam | 77.00 | 79.00 | missing | 78.00 | 2.00 | 78.34 | -0.34 |"
    assert expected in shown
    empty = "| CIFAR-100 | ResNet-8 | Baseline | missing | missing | missing | missing |  | 76.76 |  |"
    assert empty in shown
    assert "table1: 2 of 9 runs are in" in shown
    assert "cifar100-resnet8-baseline-42 is of 30 epochs and not counted: move" in shown
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted(
        [
            f"{name}.{form}"
            for name in ("table1", "differences", "hyperparameters", "audits")
            for form in ("csv", "md", "tex")
        ]
        + ["index.md", "report.html"]
    )
    assert expected in (tmp_path / "report" / "table1.md").read_text()
    with (tmp_path / "report" / "table1.csv").open() as file:
        found = list(csv.DictReader(file))
    assert (found[2]["mean"], found[2]["to paper"], found[0]["mean"]) == ("78.00", "-0.34", "missing")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["table1", "--quick", "--models", "resnet8"], "--quick has its own data and networks"),
        (["table1", "--quick", "--readme", "README.md"], "leave out --datasets, --models and --readme"),
        (["curves", "--table-only", "--out", "nowhere"], "nowhere: name one with --out"),
    ],
)
def test_contradictions_are_answered_in_words(
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *argv]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seeds", "42", "42"], "--seeds names one twice: 42 42"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--seeds", "9" * 30], "seed must be at least 0 and below 2**63"),
    ],
)
def test_values_that_cannot_be_are_refused(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "table1", "--quick", "--out", str(tmp_path / "study"), *argv]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_terminal_without_greek_letters_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["reproduce", "sweep-rho", "--table-only", "--out", str(tmp_path)]) == 0
    terminal.flush()
    assert b"| ?max | seed 42 |" in terminal.buffer.getvalue()
    assert "| ρmax | seed 42 |" in (tmp_path / "report" / "sweep-rho.md").read_text(encoding="utf-8")


def test_a_file_that_is_no_run_is_named_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.json").write_text("{}")
    assert main(["reproduce", "table1", "--quick", "--out", str(tmp_path)]) == 1
    assert "notes.json is no finished run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]


def test_all_keeps_to_the_data_and_networks_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(*argv: str) -> list[str]:
        assert main(["reproduce", "all", "--table-only", "--out", str(tmp_path), *argv]) == 0
        return [
            line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "runs are in" in line
        ]

    own = ["covariance", "unlifted-grid", "vit_s"]
    assert parts() == ["table1", "sweep-rho", "sweep-k", "curves", "clusters", *own, "toy"]
    assert parts("--datasets", "cifar10") == ["table1", "curves"]
    swept = ["table1", "sweep-rho", "sweep-k", "curves", "covariance"]
    assert parts("--datasets", "cifar100", "--models", "vit_s") == swept
    missing = (tmp_path / "report" / "index.md").read_text()
    assert "- sweep-cifar100-vit_s-rho_max-8-42\n" in missing  # the sweeps are of the ViT-S asked for
    assert parts("--variants", "baseline") == ["table1", "curves", "clusters", "vit_s", "toy"]


def test_all_goes_on_in_the_order_of_the_study_and_skips_what_is_there_or_has_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Path(__file__).parents[3] / "results"
    out = tmp_path / "results" / "paper"
    shutil.copytree(results / "covariance", out.parent / "covariance")
    done = "tinyimagenet-vit_s_conv-baseline-42"
    written(out, {done: row(done, 0.5)})
    absent = {"cifar10": "cifar10 is not under here"}
    asked: dict[str, Any] = {}
    monkeypatch.setattr(loading, "absence", lambda data, root: absent.get(data, ""))
    monkeypatch.setattr(study, "run_study", lambda plan, out, **more: asked.update(plan=plan, **more))
    assert main(["reproduce", "all", "--out", str(out), "--budget-minutes", "9"]) == 1
    assert "27 runs are skipped: cifar10 is not under here" in capsys.readouterr().err
    names = [name for name, _ in asked["plan"]]
    assert asked["budget_seconds"] == 540
    assert len(names) == len(set(names))
    assert not any(name.startswith("cifar10-") or name == done for name in names)
    stages = [
        "tinyimagenet-resnet8-baseline-42",
        "tinyimagenet-vit_s_conv-unlifted-42",
        "tinyimagenet-resnet8-unlifted-42",
        "tinyimagenet-resnet8-protoseam-44",
        "cifar100-resnet8-baseline-42",
        "sweep-cifar100-vit_s_conv-rho_max-1-42",
        "sweep-cifar100-vit_s_conv-dim-128-42",
        "covariance-cifar100-vit_s_conv-running-43",  # seed 42 is in results/covariance
        "covariance-cifar100-vit_s_conv-isotropic-44",
        "sweep-cifar100-vit_s_conv-rho_max-1-43",
        "grid-cifar100-resnet8-unlifted-0.01-0.0001-42",
        "cifar100-vit_s-baseline-42",
    ]
    places = [names.index(name) for name in stages]
    assert places == sorted(places)
    assert places[0] == 0
    assert "covariance-cifar100-vit_s_conv-running-42" not in names
    assert names[-1] == "tinyimagenet-vit_s-protoseam-44"


def test_every_table_and_figure_of_the_committed_results_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Path(__file__).parents[3] / "results" / "paper"
    assert main(["reproduce", "all", "--table-only", "--out", str(results), "--report", str(tmp_path)]) == 0
    drawn = {"sweep-rho", "sweep-k", "curves", "clusters", "toy-selection", "toy-perturbation"}
    tables = {
        "table1",
        "differences",
        "hyperparameters",
        "audits",
        "covariance",
        "unlifted-grid",
        "vit_s",
        "toy",
    }
    assert {f"{name}.png" for name in drawn} <= {path.name for path in tmp_path.iterdir()}
    assert {f"{name}.tex" for name in tables} <= {path.name for path in tmp_path.iterdir()}
    rho = (tmp_path / "sweep-rho.md").read_text(encoding="utf-8")
    assert "| 70.43 | 69.68 | 71.14 |" in rho  # the paper's at ρmax = 16
    shown = capsys.readouterr().out
    assert "ViT-S, convolutional stem on CIFAR-100 (fig:penalty-sweep)" in shown
    assert shown.count("\nCost: ") == 1


def test_a_toy_that_is_there_is_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(**_: Any) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr("protoseam.theory.toy.simulate", simulate)
    monkeypatch.setattr(reporting, "can_draw", lambda: False)
    (tmp_path / "toy.json").write_text(json.dumps({"rows": [], "samples": 20_000, "seeds": 10}))
    main(["reproduce", "toy", "--quick", "--out", str(tmp_path)])
    assert (tmp_path / "report" / "toy.md").exists()


def test_without_matplotlib_the_tables_are_there_and_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "can_draw", lambda: False)
    name = "sweep-cifar100-vit_s_conv-rho_max-8-42"
    out = written(tmp_path / "study", {name: row(name, 0.69)})
    assert main(["reproduce", "sweep-rho", "--table-only", "--out", str(out)]) == 1
    assert "pip install -e '.[report]'" in capsys.readouterr().err
    assert {path.suffix for path in (out / "report").iterdir()} == {".csv", ".html", ".md", ".tex"}


def test_the_list_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "recipes"]) == 0
    assert capsys.readouterr().out.count("protoseam train --recipe") == 36
