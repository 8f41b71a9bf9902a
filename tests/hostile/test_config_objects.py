"""A config is plain data: on the command line, in a --config file and in a run's own config.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from protoseam.lab.cli.main import main
from protoseam.lab.engine.config import ConfigError, RunConfig, to_dict
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.settings import from_dict, parse_yaml

OBJECTS = {
    "apply tag": "model: !!python/object/apply:os.mkdir [owned]",
    "new tag": "model: !!python/object/new:os.mkdir [owned]",
    "object tag": "optim: !!python/object:protoseam.lab.engine.config.OptimConfig {lr: 1.0}",
    "name tag": "model_options: {hidden: !!python/name:os.system }",
    "module tag": "model_options: {hidden: !!python/module:os }",
    "own tag": "model: !Exploit {command: mkdir owned}",
    "class path": "optim: {class_path: os.mkdir, init_args: {path: owned}}",
    "class path of ours": "optim: {class_path: protoseam.lab.engine.config.OptimConfig, init_args: {lr: 1.0}}",
    "class path in options": "model_options: {class_path: os.mkdir, init_args: {path: owned}}",
    "bare class path": "class_path: os.mkdir",
}
NOT_SETTINGS = {
    "aliases": "model_options: {a: &a [1, 1], b: [*a, *a]}",
    "deep": "model_options: " + "[" * 5000,
    "not text": b"model: \xff\xfe\xfa",
    "a list": "- epochs",
    "a date": "epochs: 2001-99-99",
    "too long": "# " + "x" * 2**20,
}


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command) == 1
    assert not Path("owned").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize("text", [*OBJECTS.values(), *NOT_SETTINGS.values()], ids=[*OBJECTS, *NOT_SETTINGS])
def test_files(
    text: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = text if isinstance(text, bytes) else text.encode()
    Path("evil.yaml").write_bytes(data)
    said = refused(["train", "--config", "evil.yaml", "--epochs=1", "--device=cpu", "--out=new"], capsys)
    assert said.startswith("protoseam train: ")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes(data)
    for command in (["train", "--resume", "run"], ["eval", "run"], ["audit", "run"]):
        refused(command, capsys)


@pytest.mark.parametrize(
    "option",
    [
        '--optim={"class_path": "os.mkdir", "init_args": {"path": "owned"}}',
        "--optim=os.mkdir",
        "--optim.class_path=os.mkdir",
        "--optim.init_args.path=owned",
        "--model=os.mkdir",
        "--model=!!python/object/apply:os.mkdir [owned]",
        "--model_options=!!python/object/apply:os.mkdir [owned]",
        '--model_options={"class_path": "os.mkdir", "init_args": {"path": "owned"}}',
        "--lift.covariance=protoseam.seam.covariance.ExactCovariance",
        "--config=model: !!python/object/apply:os.mkdir [owned]",
    ],
)
def test_flags(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(["train", option, "--epochs=1", "--device=cpu", "--out=new"], capsys)


def test_a_billion_laughs_take_no_memory() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(ConfigError, match="alias: write the value out"):
        parse_yaml("\n".join(lines).encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: many", "epochs must be a whole number, got 'many'"),
        ("epochs: true", "epochs must be a whole number, got True"),
        ("validation: [1]", "validation must be a number"),
        ("variant: lifted", "variant must be baseline or unlifted or protoseam, got 'lifted'"),
        ("lift: {floor: none}", "lift.floor must be a number or auto, got 'none'"),
        ("optim: 3", "optim must be a table of settings, got 3"),
        ("data_root: 3", "data_root must be printable text or null, got 3"),
        ("model_options: {1: 2}", "model_options must be a table of settings"),
        ("1: 2", "unknown setting 1"),
    ],
)
def test_kinds_of_values(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        RunDirectory(tmp_path).read_config()
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.yaml"))


def test_plain_data_makes_the_round_trip() -> None:
    config = RunConfig(epochs=3, data_root=None, model_options={"hidden": [8, 8]})
    assert from_dict(to_dict(config)) == config
    assert from_dict({"validation": 0, "lift": {"floor": "auto"}}).lift.floor == "auto"
