"""A sweep that takes a second: settings, command, and what a dead worker looks like."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path

from protoseam.lab.cli.main import main
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig

BASE = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    variant="baseline",
    epochs=2,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)
FLAGS = ["--data=digits", "--model=mlp", '--model_options={"hidden": [16]}', "--epochs=2", "--augment=none"]
FLAGS += ["--optim.warmup_epochs=1", "--lift.dim=4", "--lift.rho_max=2", "--device=cpu", "--quiet=true"]
TWO_RATES = ["--space", "optim.lr=choice:0.05,0.01"]


def command(out: Path, *words: str) -> int:
    return main(["sweep", *FLAGS, f"--out={out}", *words])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def silence(path: Path) -> None:
    """Make all heartbeats an hour old."""
    with sqlite3.connect(path) as base:
        base.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
    base.close()
