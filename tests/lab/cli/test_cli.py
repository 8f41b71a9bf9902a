"""The command line, as a person meets it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from protoseam.errors import DataWarning, SeamError
from protoseam.lab.cli.main import VERBS, main
from protoseam.lab.cli.parser import usual_name
from protoseam.lab.engine import epoch, session
from protoseam.lab.engine.config import RunConfig
from protoseam.lab.engine.run import DivergedError, Run
from protoseam.lab.engine.settings import from_dict, parse_yaml, to_yaml

SMALL = ["--data=digits", "--model=mlp", "--epochs=2", "--augment=none", "--optim.lr=0.02", "--lift.dim=4"]
SMALL += ["--lift.rho_max=2", "--device=cpu", "--quiet=true"]


def test_train_resume_and_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", *SMALL, "--out", out]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["lift"]["dim"] == 4
    assert main(["train", "--resume", out]) == 0
    assert main(["eval", out, "--json", "--device=cpu"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["accuracy"] == summary["test_accuracy"]
    assert main(["train", *SMALL, "--out", out]) == 1
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "several",
    [
        ["--seeds=[1,2]", "--variants=[baseline,protoseam]"],
        ["--seeds", "1", "2", "--variants", "baseline", "protoseam"],
        ["--seeds", "1,2", "--variants=baseline,protoseam"],
    ],
    ids=["lists", "words", "commas"],
)
def test_seeds_and_variants(tmp_path: Path, several: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *several, *SMALL, "--out", str(tmp_path)]) == 0
    names = ["baseline-1", "baseline-2", "protoseam-1", "protoseam-2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "report.html"]
    assert all((tmp_path / name / "summary.json").exists() for name in names)
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert f"the runs in it are {', '.join(names)}" in capsys.readouterr().err


def test_the_digits_take_one_thread_also_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    out = str(tmp_path / "run")
    before = torch.get_num_threads()
    try:
        for command in (["train", *SMALL, "--out", out], ["train", "--resume", out]):
            torch.set_num_threads(2)
            assert main(command) == 0
            assert torch.get_num_threads() == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch.set_num_threads(2)
        assert main(["train", "--resume", out]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    code = "import sys; from protoseam.lab.cli.main import main; sys.exit(main(['reproduce', 'recipes']))"
    command = f'"{sys.executable}" -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 141


def test_numbers_in_a_config_file_may_have_an_exponent(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-2 for a word. A word that looks like a number stays one when it is written and read again."""
    assert parse_yaml(b"{a: 1e-2, b: 9E-1, c: 1.6e1, d: .5e1}") == {"a": 0.01, "b": 0.9, "c": 16.0, "d": 5.0}
    config = RunConfig(data="1e5")
    assert from_dict(parse_yaml(to_yaml(config).encode())) == config
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  weight_decay: 1e-3\n")
    assert main(["train", "--config", str(file), *SMALL, "--out", str(tmp_path / "run")]) == 0
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["optim"]["weight_decay"] == 0.001


def test_a_command_that_is_suggested_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mein lauf"
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    assert main(["train", *SMALL, "--out", str(out)]) == 1
    suggested = capsys.readouterr().err.partition("Go on with it: ")[2].partition(";")[0]
    assert main(shlex.split(suggested)[1:]) == 0


def test_a_config_file_is_read_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        yaml.safe_dump({"data": "digits", "epochs": 9, "optim": {"lr": 0.01}, "lift": {"dim": 3}})
    )
    out = tmp_path / "run"
    assert main(["train", "--config", str(file), *SMALL, "--out", str(out), "--seed=7"]) == 0
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["epochs"], written["seed"], written["optim"]["lr"], written["lift"]["dim"]) == (
        2,
        7,
        0.02,
        4,
    )


def test_a_config_file_may_hold_the_commands_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("recipe: cifar100-resnet8-protoseam\nprint_config: true\nquiet: true\nseed: 7\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(file)])
    assert "data: cifar100\n" in (told := capsys.readouterr().out)
    assert "seed: 7\n" in told
    file.write_text(f"seeds: 3\nout: {tmp_path}\nno_page: true\n")
    assert main(["train", "--config", str(file), *SMALL]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "protoseam-3"]
    for line in ("budget_minutes: soon", "trials: few", "heartbeat: often", "config: d.yaml"):
        file.write_text(f"{line}\n")
        assert main(["sweep", "--config", str(file), *SMALL]) == 1
        assert f"protoseam sweep: --config {file}: " in capsys.readouterr().err, line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "--optim.lrr=1"], "did you mean --optim.lr?"),
        (["train", "--lrr=1"], "did you mean --optim.lr?"),
        (["train", "/usr", "--epochs=1"], "unrecognized arguments: /usr; did you mean --data /usr?"),
        (["train", "--optim=adam"], "did you mean --optim.name?"),
        (["train", "--epochs=many"], "epochs must be a whole number, got 'many'"),
        (["train", "--lift.floor=autoo"], "lift.floor must be a number or auto, got 'autoo'"),
        (["train", "--recipe=cifar100-resnet9-protoseam"], "did you mean cifar100-resnet8-protoseam?"),
        (["train", "--variant=lifted"], "variant must be baseline or unlifted or protoseam, got 'lifted'"),
        (["train", "--resume=/nowhere/at/all"], "there is no directory"),
        (["train", "--model=resnet7", "--device=cpu"], "resnet8"),
        (["eval", "/nowhere/at/all"], "there is no directory"),
        (["train", "--lift.draws=0"], "lift.draws must be at least 1, got 0"),
        (["train", "--lift.antithetic=true", "--lift.draws=1"], "lift.draws must be even, got 1"),
        (["train", "--lift.rho_min=20"], "rho_min=20.0 and rho_max=16.0"),
        (["train", "--lift.alpha=-2"], "got -2"),
        (["train", "--lift.floor=0"], "lift.floor must be positive, or auto, got 0"),
        (["train", "--lift.covariance=isotropic", "--lift.floor=auto"], "train: lift.floor=auto needs"),
        (["train", "--optim.momentum=1.5"], "momentum must lie in [0, 1), got 1.5"),
        (["train", "--budget-minutes=0"], "--budget-minutes must be above 0, got 0"),
        (["sweep", "--budget-minutes=-1"], "--budget-minutes must be above 0, got -1"),
        (["reproduce", "toy", "--budget_minutes=0"], "--budget-minutes must be above 0, got 0"),
        (["train", "--seeds=1,x"], "--seeds must be whole numbers, as in --seeds 42 43, got x"),
        (["sweep", "--seeds=1,x"], "--seeds must be whole numbers, as in --seeds 42 43, got x"),
        (["train", "--seeds", "1", "01"], "--seeds names one twice: 1 1"),
        (["sweep", "--variants=baseline,lifted"], "there is no variant 'lifted'"),
        (["trian"], "did you mean 'train'?"),
    ],
)
def test_mistakes_are_answered_in_words(
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_config_cannot_name_a_python_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "evil.yaml"
    for text in (
        "model: !!python/object/apply:os.mkdir [owned]\n",
        "optim: {class_path: os.system, init_args: {command: 'mkdir owned'}}\n",
    ):
        file.write_text(text)
        assert main(["train", "--config", str(file)]) == 1
    assert not Path("owned").exists()


def test_print_config_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--recipe=cifar100-resnet8-protoseam", "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["data"], printed["optim"]["lr"], printed["optim"]["weight_decay"]) == (
        "cifar100",
        0.02,
        0.002,
    )
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from protoseam.lab.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["train", "--config", "nope.yaml"], "--config nope.yaml: there is no such file"),
        (["train", "--seeds", "[1,1]"], "--seeds names one twice: 1 1"),
        (["train", "--seeds", "a", "b"], "--seeds must be whole numbers, as in --seeds 42 43, got a"),
        (["train", "--data", ""], "data is empty: name a data set, or a path"),
        (["train", "--variants", "[baseline,foo]"], "there is no variant 'foo'"),
        (["train", "--optim.warmup_epochs", "-1"], "optim.warmup_epochs must be a number from 0 on, got -1"),
        (["train", "--resume", "run", "--epochs", "9"], "leave out --epochs"),
        (["sweep", "--report-only", "--out", "nothing"], "there is no sweep in nothing"),
        (["reproduce", "table1", "--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["reproduce", "toy", "--out", "file"], "file: File exists"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith(f"protoseam {words[0]}: ")
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing was begun


def test_a_mistyped_setting_in_a_file_is_named_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 3\nbatchsize: 9\n")
    for verb in ("train", "sweep"):
        assert main([verb, "--config", str(file)]) == 1
        told = capsys.readouterr().err
        assert "mine.yaml: unknown setting batchsize" in told
        assert "batch_size" in told


def test_warnings_come_as_sentences(tmp_path: Path) -> None:
    words = [*SMALL[:-1], "--epochs=3", "--lift.rho_max=64", "--quiet=true", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "protoseam", "train", *words, "--optim.lr=0.0001"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "protoseam train: warning: ρ jumps from" in done.stderr
    assert ".py:" not in done.stderr


def test_help_describes_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "samples per step; the paper does not state it" in told
    assert "<class" not in told


@pytest.mark.parametrize("word", ["--on-nonfinite", "--on_nonfinite"])
def test_dashes_and_underscores_are_the_same(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", word, "rewind", "--optim.weight-decay=0.25", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["on_nonfinite"] == "rewind"
    assert config["optim"]["weight_decay"] == 0.25


def test_what_failed_before_it_began_may_be_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad data is repaired and the same command given again: there is no run in the way."""
    out, notes = tmp_path / "run", tmp_path / "run" / "notes.txt"
    out.mkdir()
    notes.write_text("mine")
    for wrong in ("--data=nothere.npz", "--model_options={nonsense: 1}"):
        assert main(["train", *SMALL, wrong, "--out", str(out)]) == 1
        assert "already holds a run" not in capsys.readouterr().err
    assert main(["train", *SMALL, "--out", str(out)]) == 0
    assert notes.read_text() == "mine"


def test_the_present_folder_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run := tmp_path / "mine").mkdir()
    monkeypatch.chdir(run)
    assert main(["train", *SMALL[:-1], "--out=."]) == 0
    said = capsys.readouterr()
    assert "mine  epoch 1/2" in said.out
    assert "mine: 10 classes" in said.err
    assert usual_name(RunConfig(data=".")) == "mine-convnet"


@pytest.mark.parametrize(
    "argv",
    [
        ["train", *SMALL],
        ["train", *SMALL, "--seeds", "1", "2"],
        ["sweep", *SMALL, "--space", "optim.lr=choice:0.01,0.02"],
        ["reproduce", "table1", "--quick"],
    ],
    ids=["train", "seeds", "sweep", "reproduce"],
)
def test_an_interrupt_ends_with_130_and_everything_saved(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = session.train_epoch

    def second_is_too_much(run: Run) -> Any:
        if run.epoch == 1:
            raise KeyboardInterrupt
        return honest(run)

    monkeypatch.setattr(session, "train_epoch", second_is_too_much)
    assert main([*argv, "--out", str(tmp_path / "out")]) == 130
    said = capsys.readouterr()
    assert "interrupted" in said.err
    assert ("go on with" if argv == ["train", *SMALL] else "the same command goes on") in said.err
    assert "missing" not in said.out  # nothing is reported that nobody waited for
    assert list((tmp_path / "out").rglob("checkpoints/epoch-*1"))


def test_a_run_without_validation_data_has_no_validation_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for share in ("0", "0.001"):  # the second rounds to no sample of any class
        out = str(tmp_path / share)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            assert main(["train", *SMALL, f"--validation={share}", "--out", out]) == 0
            assert main(["eval", out, "--split=validation", "--device=cpu"]) == 1
        assert f"no validation data: it was trained with validation={share}, so" in capsys.readouterr().err


def test_audit_and_eval_mean_the_same_by_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    parts = {}
    for split, (many, few) in {"train": (300, 40), "test": (190, 10)}.items():
        labels = np.repeat([0, 1], [many, few])
        parts[f"x_{split}"] = rng.normal(0.5 * labels[:, None], 1.0, (len(labels), 6)).astype(np.float32)
        parts[f"y_{split}"] = labels
    np.savez(tmp_path / "uneven.npz", **parts)
    out = str(tmp_path / "run")
    argv = [word for word in SMALL if not word.startswith("--data")]
    assert main(["train", f"--data={tmp_path / 'uneven.npz'}", *argv, "--validation=0", "--out", out]) == 0
    capsys.readouterr()
    assert main(["eval", out, "--json", "--device=cpu"]) == 0
    accuracy = 100 * json.loads(capsys.readouterr().out)["accuracy"]
    assert main(["audit", out, "--split=test", "--device=cpu"]) == 0
    assert re.search(
        rf"accuracy {accuracy:.2f} % \(\d+\.\d\d % as a mean over classes\)", capsys.readouterr().out
    )


@pytest.mark.parametrize("failure", [DivergedError, SeamError])
def test_of_several_runs_one_that_diverges_stops_no_other(
    failure: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = epoch.end_epoch

    def end(run: Run, started: float) -> dict[str, Any]:
        if run.config.seed == 2 and run.epoch == 1:
            raise failure("inf")
        return original(run, started)

    monkeypatch.setattr(epoch, "end_epoch", end)
    words = [*SMALL, "--seeds", "1", "2", "3", "--variants=protoseam"]
    assert main(["train", *words, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert f"{tmp_path / 'protoseam-2'}: inf" in told.err
    assert all(f"{tmp_path / name}: test accuracy" in told.out for name in ("protoseam-1", "protoseam-3"))
