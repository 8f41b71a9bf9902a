"""The first-try panel: its documents say what its raw file holds, and its cheapest cell still runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("first_try", ROOT / "benchmarks" / "first_try.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_try", module)
    spec.loader.exec_module(module)
    return module


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
