"""`protoseam data`: what it prints, as text and as JSON, and what it returns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from miniature_files import binary_records, cifar_parts, write_folder, write_idx, write_tar

from protoseam.errors import DataError, DataWarning
from protoseam.lab.cli import data

# the small stand-ins are no official sets; `main` shows each warning as a line
pytestmark = pytest.mark.filterwarnings("ignore:.*the official set has:protoseam.errors.DataWarning")


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(argument) for argument in arguments]))


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path / "mnist", compressed=True)
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"")
    assert run("list", "--root", tmp_path) == 0
    text = capsys.readouterr().out
    for part in (
        "digits",
        "built in",
        "cifar-100-python.tar.gz",
        "248 MB",
        "mnist/train-images-idx3-ubyte.gz",
    ):
        assert part in text
    assert max(map(len, text.splitlines()[1:-6])) <= 80
    assert run("list", "--root", tmp_path, "--json") == 0
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["data_sets"]}
    on_disk = {name: row["on_disk"] for name, row in listed.items()}
    assert on_disk == {
        "digits": "built in",
        "mnist": "folder",
        "fashion-mnist": None,
        "cifar10": None,
        "cifar100": None,
        "tinyimagenet": "archive",
    }
    assert listed["cifar10"]["download_bytes"] == 170_052_171


def test_get_what_is_built_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("get", "digits", "--root", tmp_path) == 0
    assert (
        capsys.readouterr().out
        == "digits is ready: 1,438 training and 359 test samples of 8×8×1, 10 classes\n"
    )
    assert run("get", "digits", "--json") == 0
    assert json.loads(capsys.readouterr().out)["train"] == 1438
    with pytest.raises(DataError, match="there is no data set called 'nope'"):
        run("get", "nope", "--root", tmp_path)


def test_get_does_not_download_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path / "mnist", compressed=False)  # no network is touched: the address is not on loopback
    assert run("get", "mnist", "--root", tmp_path) == 0
    assert f"mnist is ready from what was under {tmp_path}: 20 training" in capsys.readouterr().out


def test_get_refuses_one_hash_for_four_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mnist has 4"):
        run("get", "mnist", "--root", tmp_path, "--sha256", "0" * 64)


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "digits", "--root", tmp_path) == 0
    assert capsys.readouterr().out.startswith("ok   digits: loads: 1,438 training")
    parts = cifar_parts(["train", "test"], classes=100)
    files = {f"{name}.bin": binary_records(*parts[name], coarse=True) for name in parts}
    write_folder(tmp_path / "cifar-100-binary", files)
    for _ in range(2):
        with pytest.warns(DataWarning, match="cifar100 has 200 training"):
            assert run("verify", "cifar100", "--root", tmp_path) == 0
    assert "every SHA-256 matches its manifest" in capsys.readouterr().out
    write_tar(tmp_path / "cifar-100-binary.tar.gz", files)  # an archive, but not the official one
    assert run("verify", "cifar100", "--root", tmp_path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [finding["ok"] for finding in report["findings"]] == [False, True]
    assert run("verify", tmp_path / "cifar-100-binary", "--root", tmp_path / "r") == 0


def test_verify_takes_a_path_for_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_idx(tmp_path / "digits", compressed=False)
    for _ in range(2):
        assert run("verify", "./digits", "--root", "r") == 0
    assert "of 28×28×1" in (said := capsys.readouterr().out)
    assert "every SHA-256 matches" in said


def test_arguments_are_declared_without_heavy_imports() -> None:
    code = (
        "import argparse, sys, protoseam; before = set(sys.modules); from protoseam.lab.cli import data; "
        "data.add_arguments(argparse.ArgumentParser()); "
        "sys.exit(not {'numpy', 'torch', 'rich', 'sklearn'}.isdisjoint(set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
