"""What a terminal and a log file show of an epoch."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from protoseam.lab.engine.log import Progress

ROW = {
    "epoch": 3,
    "loss": {"total": 4.5, "consensus": 1.25, "classification": 0.75, "repulsion": 2.5},
    "validation_accuracy": 0.915,
    "images_per_second": 1234.4,
    "seam": {"prototype_gap_min": 2.345},
}


def test_a_log_has_a_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("run", 2, 4) as progress:
        progress.epoch(ROW)
    line = capsys.readouterr().out
    for part in (
        "run  epoch 3/4  val 91.50 %  loss 4.5000",
        "consensus 1.25  classification 0.75  repulsion 2.5",
        "nearest prototypes 2.35",
        "1,234 img/s  0 s left",
    ):
        assert part in line
    plain = {**ROW, "loss": {"total": 1.0}, "seam": {}, "validation_accuracy": None}
    with Progress("run", 2, 4) as progress:
        progress.epoch(plain)
    assert "epoch 3/4  loss 1.0000  1,234 img/s" in capsys.readouterr().out


def test_a_terminal_shows_the_last_epochs_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(file=shown, force_terminal=True, width=160, no_color=True)
    )
    with Progress("run", 0, 10) as progress:
        for epoch in range(1, 10):
            progress.epoch({**ROW, "epoch": epoch})
        progress.note("validation is at chance")
    last = shown.getvalue().rpartition("nearest prototypes")[2]
    assert "validation is at chance" in shown.getvalue()
    assert last.count("91.50 %") == 6
    assert "9/10" in last
    assert "left" in last
