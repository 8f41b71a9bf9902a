"""Settings that are valid YAML and make no sense, and names that are too long: refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from protoseam.errors import DataError
from protoseam.lab.cli.main import main
from protoseam.lab.data.images import _number
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import ConfigError, RunConfig
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.settings import from_dict, parse_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("epochs: 1:30", "epochs must be a whole number, got '1:30'"),
        ("optim: {lr: 1:30.5}", r"optim\.lr must be a number or null, got '1:30\.5'"),
        ("seed: 010", "seed must be a whole number, got '010'"),
        ("optim: {warmup_epochs: .inf}", r"optim\.warmup_epochs must be a number, got inf"),
        ("lift: {rho_max: .inf}", r"lift\.rho_max must be a number, got inf"),
        ("lift: {alpha: .nan}", r"lift\.alpha must be a number, got nan"),
        (f"optim: {{lr: 1{'0' * 400}}}", r"optim\.lr must be a number or null, got 1000"),
    ],
)
def test_numbers_that_are_none(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_dict(parse_yaml(text.encode()))


def test_a_config_made_in_code_warms_up_for_a_finite_time() -> None:
    with pytest.raises(ConfigError, match="warmup_epochs must be a number"):
        RunConfig(optim=type(RunConfig().optim)(warmup_epochs=float("inf")))


def test_words_that_look_like_numbers_come_back_as_words() -> None:
    config = RunConfig(data="1:30", model_options={"a": "010", "b": "1e-3", "c": "0x10", "d": 1e-5})
    assert from_dict(parse_yaml(to_yaml(config).encode())) == config
    assert "data: '1:30'" in to_yaml(config)


@pytest.mark.parametrize("words", [["--epochs=1:30"], ["--epochs", "1:30"], ["--optim.lr=1:30"]])
@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_a_clock_time_is_no_number_on_the_command_line(
    verb: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *words]) == 1
    said = capsys.readouterr().err
    assert "number" in said
    assert "got '1:30'" in said


def test_a_dotted_name_in_a_file_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("optim.lr: 1:30\n")
    assert main(["train", f"--config={tmp_path / 'c.yaml'}"]) == 1
    assert "optim.lr must be a number or null, got '1:30'" in capsys.readouterr().err


def test_names_that_are_too_long() -> None:
    with pytest.raises(DataError, match="111 cannot be read: File name too long"):
        load("1" * 5000)
    with pytest.raises(ConfigError, match="111 cannot be read: File name too long"):
        RunDirectory(Path("1" * 5000)).read_config()
    assert _number("val_" + "7" * 5000 + ".jpeg") == int("7" * 18)
