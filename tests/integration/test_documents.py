"""Every code block of the README and of docs/: Python is executed, commands and settings are read by their parsers."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps
from protoseam.lab.cli.main import VERBS
from protoseam.lab.cli.parser import read_command, spelled
from protoseam.lab.engine.settings import from_dict, parse_yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


def prepared() -> dict[str, Any]:
    """What a page may take for given: a network and data of the reader's own."""
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(y))
    first, rest = order[:1200], order[1200:]
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x[first], y[first]), batch_size=64, shuffle=True)
    net = ps.lift(model, num_classes=10)
    net.initialize(loader)
    return {
        "torch": torch,
        "ps": ps,
        "net": net,
        "model": model,
        "loader": loader,
        "held_out": DataLoader(TensorDataset(x[rest], y[rest]), batch_size=256),
        "x": x[first[:64]],
        "y": y[first[:64]],
        "epochs": 2,
    }


def check_commands(text: str) -> int:
    """Parse each ``protoseam …`` line of a shell block; return how many there are."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    found = 0
    for words in lines:
        while words and re.fullmatch(r"\w+=\S*", words[0]):  # variables of the environment
            words.pop(0)
        if words[:1] == ["protoseam"]:
            parse(words[1], words[2:])
            found += 1
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), f"there is no {words[1]}"
        elif words[:1] == ["make"]:
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), f"make has no {words[1]}"
    return found


def parse(verb: str, words: list[str]) -> None:
    """Read a command with its own parser, which raises or exits if something in it is unknown."""
    assert verb in VERBS, f"there is no verb {verb}"
    if words == ["--help"]:
        return
    module = importlib.import_module(f"protoseam.lab.cli.{verb}")
    if hasattr(module, "build_parser"):
        read_command(module.build_parser(), words)
    else:
        parser = argparse.ArgumentParser(prog=f"protoseam {verb}")
        module.add_arguments(parser)
        parser.parse_args(spelled(words, parser))


def evaluate_shell(example: Example) -> None:
    check_commands(example.parsed)


def evaluate_config(example: Example) -> None:
    from_dict(parse_yaml(example.parsed.encode()))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the one file that a command of the documents reads when it is parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # a page may be a script
    monkeypatch.setattr(os, "environ", os.environ.copy())  # hosts leave their variables there
    config = tmp_path / "sweeps" / "digits-mlp" / "baseline" / "best.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("epochs: 1\n")
    return tmp_path


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")  # Lightning's use of torch
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's advice
@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_page_runs(name: str) -> None:
    document = Document.parse(
        str(ROOT / name),
        PythonCodeBlockParser(),
        CodeBlockParser(language="sh", evaluator=evaluate_shell),
        CodeBlockParser(language="yaml", evaluator=evaluate_config),
    )
    given = prepared() | ({"epochs": 15} if name == "README.md" else {})
    document.namespace.update(given)
    for example in document.examples():
        example.evaluate()
    if name == "README.md":  # the loop does what it promises, on a network and data it was not written for
        plain = document.namespace["plain"]
        assert [type(m) for m in plain] == [type(m) for m in given["model"]]
        with torch.no_grad():
            right = torch.cat([plain(x).argmax(1) == y for x, y in given["held_out"]])
        assert float(right.double().mean()) > 0.97


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", NAMES)
def test_commands_in_the_text_parse(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for language, block in fence.findall(text):
        if language not in ("python", "sh"):  # those are evaluated above
            check_commands("\n".join(line for line in block.splitlines() if line.startswith("protoseam ")))
    for span in re.findall(r"`(protoseam [a-z][^`…|]*)`", fence.sub("", text)):
        verb, *words = shlex.split(span)[1:]
        if words and not re.search(
            r"--\S+ [A-Z]+\b", span
        ):  # a verb alone is its name, N stands for a number
            parse(verb, words)


def test_a_command_that_does_not_parse_is_noticed() -> None:
    assert (
        check_commands("OMP_NUM_THREADS=1 protoseam train --data digits \\\n  --epochs 3  # seconds\nls") == 1
    )
    with pytest.raises(Exception, match="epochen"):
        check_commands("protoseam train --data digits --epochen 3")
    with pytest.raises(SystemExit):
        check_commands("protoseam eval")


def test_the_demos_table_in_the_readme_is_that_of_its_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-").replace("*", "")
    summary = json.loads((ROOT / "results" / "demo" / "results.json").read_text())["summary"]
    for variant, row in summary.items():
        gain = f"{row['difference']:+.2f}" if row["difference"] else ""
        figures = f"| {row['mean']:.2f} | {row['spread']:.2f} | {gain}".strip()
        assert re.search(rf"^\| {variant}[^|]*{re.escape(figures)}", text, re.MULTILINE), variant


def spoken() -> Iterator[str]:
    """Every text in the sources, with … for what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_bound_holds_at_as_many_audits_as_the_page_of_theory_says() -> None:
    held = {}
    for file in (ROOT / "results").glob("*/cifar*-protoseam-*.json"):
        rows = json.loads(file.read_text()).get("metrics", [])
        if found := [row["audit"] for row in rows if "audit" in row]:
            held[file.stem] = [audit["risk"] <= audit["bound"] for audit in found]
    assert all(map(all, held.values()))
    of_the_page = [
        "cifar100-resnet8-protoseam-43",
        "cifar100-vit_s-protoseam-42",
        *(f"cifar100-vit_s_conv-protoseam-{seed}" for seed in (42, 43, 44)),
        "cifar100-vit_s-protoseam-42_dim-384_depth-12_heads-6_mlp-1536",
    ]
    assert [len(held[name]) for name in of_the_page] == [10] * 6
    page = (ROOT / "docs" / "theory.md").read_text()
    assert "Six ProtoSeam runs of 200 epochs were audited every 20 epochs" in page
    assert "**It holds at all sixty audits**, ten per run" in page


def test_the_messages_that_troubleshooting_quotes_exist() -> None:
    page, texts = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), "\n".join(spoken())
    symptoms = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [
        part.strip(" ,")
        for row in symptoms
        for quote in re.findall(r'"(.+?)"', row)
        for part in quote.split("…")
    ]
    assert len(quoted) > 40
    assert not [part for part in quoted if part not in texts]
