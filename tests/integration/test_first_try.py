"""The first-try panel and the cells beside it: documents say what raw files hold, and cheap cells still run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("first_try", monkeypatch)


@pytest.fixture
def strangers(panel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("strangers", monkeypatch)


def test_the_documents_say_what_was_measured(panel: ModuleType) -> None:
    table = panel.table(panel.read(panel.OUT))
    assert table in (ROOT / "docs" / "first-try.md").read_text(encoding="utf-8")
    summary = table.rpartition("\n")[2]
    assert summary in (ROOT / "README.md").read_text(encoding="utf-8")
    runs = panel.read(panel.OUT)
    assert {
        (cell, side, seed)
        for cell in panel.CELLS
        for side in ("cross-entropy", "lifted")
        for seed in range(3)
    } == set(runs)


def test_a_cell_runs(panel: ModuleType) -> None:
    cell = ("wine", "mlp", "sgd", 0.05, 20, 32)
    found = {side: panel.run((cell, side, 0))["accuracy"] for side in ("cross-entropy", "lifted")}
    assert min(found.values()) > 85


def test_the_documents_say_what_was_measured_elsewhere(strangers: ModuleType) -> None:
    runs = strangers.read(strangers.OUT)
    assert set(runs) == {(cell, seed) for cell in strangers.CELLS for seed in strangers.SEEDS}
    assert strangers.table(runs) in (ROOT / "docs" / "first-try.md").read_text(encoding="utf-8")


def test_a_cell_elsewhere_runs(strangers: ModuleType) -> None:
    (cell,) = (c for c in strangers.CELLS if c.task == "iris")
    row = strangers.run(cell._replace(epochs=20), 7)
    assert min(row["lifted"], row["cross_entropy"]) > 85
    assert (cell.network, cell.optimizer, 7) == (row["network"], row["optimizer"], row["seed"])


@pytest.mark.parametrize("name", ["calibration", "small_batches"])
def test_the_method_card_has_the_tables_of_the_raw_files(
    name: str, panel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = ROOT / "results" / "first_try" / f"{name.replace('_', '-')}.jsonl"
    rows = [json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()]
    table = loaded(name, monkeypatch).table(rows)
    assert table in (ROOT / "docs" / "method-card.md").read_text(encoding="utf-8")


def test_the_defaults_on_cifar100_are_those_of_the_raw_runs() -> None:
    card = (ROOT / "docs" / "method-card.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for network in ("resnet8", "vit_s_conv"):
        runs = [ROOT / "results" / "first_try" / "cifar100" / f"{network}-{seed}" for seed in (42, 43, 44)]
        found = [100 * json.loads((run / "summary.json").read_text())["test_accuracy"] for run in runs]
        mean = sum(found) / len(found)
        assert f"{mean:.2f}" in card
        assert f"({', '.join(f'{value:.2f}' for value in found)})" in card
        assert f"{mean:.1f} %" in readme
