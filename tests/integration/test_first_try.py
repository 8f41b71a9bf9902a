"""The first-try panel and the cells beside it: documents say what raw files hold, and cheap cells still run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
    summary = table.partition("\n\n")[2]
    assert summary in (ROOT / "README.md").read_text(encoding="utf-8")
    runs = panel.read(panel.OUT)
    assert {(cell, side, seed) for cell in panel.CELLS for side in panel.SIDES for seed in range(3)} == set(
        runs
    )


def test_a_cell_runs(panel: ModuleType) -> None:
    cell = ("wine", "mlp", "sgd", 0.05, 20, 32)
    found = {side: panel.run((cell, side, 0))["accuracy"] for side in panel.SIDES}
    assert min(found.values()) > 85


def test_the_documents_say_what_was_measured_elsewhere(strangers: ModuleType) -> None:
    text = (ROOT / "docs" / "first-try.md").read_text(encoding="utf-8")
    for cells, seeds, out in strangers.LISTS.values():
        runs = strangers.read(out)
        assert set(runs) == {(cell, seed) for cell in cells for seed in seeds}
        assert strangers.table(runs, cells) in text
    total = [0, 0, 0, 0, 0]
    for cells, _, out in strangers.LISTS.values():  # the short table above the long ones
        after = out.with_name(f"{out.stem}-after.jsonl")
        counted = [len(cells), *counts(strangers, cells, out), *counts(strangers, cells, after)]
        total = [a + b for a, b in zip(total, counted, strict=True)]
        said = "| {} | {} | {} | [raw]({}) | {}, {} ([raw]({})) |"
        places = [f"../results/first_try/{file.name}" for file in (out, after)]
        assert said.format(*counted[:3], places[0], *counted[3:], places[1]) in text
    assert "| all | | {} | {} | {} | | {}, {} |".format(*total) in text
    assert f"{total[1]} of {total[0]} cells are within 1.5 points, and {total[2]} are above" in text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, said in {
        "later": "{} were within 1.5 points and {} above",
        "parts": "with SGD, {} and {}.",
    }.items():
        cells, _, out = strangers.LISTS[name]
        assert said.format(*counts(strangers, cells, out)) in readme


def test_the_documents_say_what_was_drawn_by_chance(
    panel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = loaded("first_try_drawn", monkeypatch)
    runs = drawn.read(drawn.OUT)
    assert set(runs) == {
        (key, side, seed) for key in drawn.drawn() for side in drawn.SIDES for seed in (5, 6)
    }
    table = drawn.table(runs)
    assert table in (ROOT / "docs" / "first-try.md").read_text(encoding="utf-8")
    within, above = re.findall(r"(\d+) (?:within 1\.5|above it)", table)
    said = f"{within} are within 1.5 points and {above} above"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_drawn_cell_runs(panel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = loaded("first_try_drawn", monkeypatch)
    cell = ("wine", "mlp", "sgd", 0.05, 10, 32), False, 1.0
    found = {side: drawn.run((cell, side, 5))["accuracy"] for side in drawn.SIDES}
    assert min(found.values()) > 85


def test_the_page_on_scikit_learn_says_what_was_measured_on_tables(
    panel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = loaded("tables", monkeypatch)
    rows = tables.read()
    jobs = [job for names, seeds in tables.LISTS.values() for job in tables.jobs(names, seeds)]
    assert sorted(map(str, jobs)) == sorted(
        str({k: v for k, v in row.items() if k != "accuracy"}) for row in rows
    )
    page = (ROOT / "docs" / "hosts" / "sklearn.md").read_text(encoding="utf-8")
    assert tables.table(rows, tables.OTHERS, tables.DEFAULTS) in page
    chosen = tables.table(rows, tables.CHOSEN_ON, tables.DEFAULTS).rpartition("mean**")[2]
    mlp, *means = re.findall(r"[\d.]+", chosen)
    said = "from {} to {} % after 20 epochs, and from {} to {} % after 60 (`MLPClassifier` " + f"{mlp} %)"
    assert said.format(*means) in page


def counts(strangers: ModuleType, cells: list[Any], out: Path) -> tuple[int, int]:
    """How many cells are within 1.5 points of cross-entropy or above, and how many above it."""
    summary = strangers.table(strangers.read(out), cells).rpartition("\n")[2]
    within, above = re.findall(r"(\d+) (?:within 1\.5|above it)", summary)
    return int(within), int(above)


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


def test_the_method_card_has_the_tables_of_the_last_step(
    panel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = (ROOT / "docs" / "method-card.md").read_text(encoding="utf-8")
    last_step = loaded("last_step", monkeypatch)
    assert last_step.panel_table(last_step.read("panel")) in card
    assert last_step.photos_table(last_step.read("photos")) in card
    assert len(last_step.read("panel")) == 3 * len(panel.CELLS)


def test_the_defaults_on_cifar100_are_those_of_the_raw_runs() -> None:
    card = (ROOT / "docs" / "method-card.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for network in ("resnet8", "vit_s_conv", "vit_s"):
        runs = [ROOT / "results" / "first_try" / "cifar100" / f"{network}-{seed}" for seed in (42, 43, 44)]
        found = [100 * default_accuracy(run) for run in runs]
        mean = sum(found) / len(found)
        assert f"{mean:.2f}" in card
        assert f"({', '.join(f'{value:.2f}' for value in found)})" in card
        assert f"{mean:.1f} %" in readme or network == "vit_s"


def default_accuracy(run: Path) -> float:
    """Of the classifier as it was trained; two runs ended with the fitted one in any case, and know both."""
    known = run / "last_step.json"
    if known.exists():
        return json.loads(known.read_text())["as_trained"]
    return json.loads((run / "summary.json").read_text())["test_accuracy"]


def test_the_modern_recipe_is_as_the_documents_say() -> None:
    text = (ROOT / "docs" / "study-tables.md").read_text(encoding="utf-8")
    modern = ROOT / "results" / "first_try" / "modern"

    def read(name: str) -> tuple[float, float | None]:
        summary = json.loads((modern / name / "summary.json").read_text())
        return 100 * summary["validation_accuracy"], summary["test_accuracy"]

    for lr, decay in ((0.0005, 0.05), (0.001, 0.05), (0.002, 0.05), (0.001, 0.5)):
        row = [read(f"search-vit_s_conv-{variant}-{lr:g}-{decay:g}") for variant in ("baseline", "protoseam")]
        assert [test for _, test in row] == [None, None]
        shown = text.replace("*", "")
        assert f"| {lr:g}, {decay:g} | {row[0][0]:.2f} | {row[1][0]:.2f} |" in shown
    (first, one), (second, two) = (read(f"vit_s_conv-{variant}-42") for variant in ("baseline", "protoseam"))
    assert one is not None
    assert two is not None
    assert f"| Baseline, 200 epochs | {first:.2f} | {100 * one:.2f} | |" in shown
    assert f"| ProtoSeam, 200 epochs | {second:.2f} | {100 * two:.2f} | {100 * (two - one):+.2f} |" in shown
