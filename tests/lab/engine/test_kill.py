"""SIGKILL at random moments: the finished run is the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ARGUMENTS = [
    "--data=digits",
    "--model=mlp",
    "--epochs=40",
    "--augment=none",
    "--optim.lr=0.02",
    "--lift.dim=4",
]
ARGUMENTS += [
    "--lift.rho_max=2",
    "--device=cpu",
    "--quiet=true",
    "--checkpoint_every=1",
    "--deterministic=true",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "protoseam", "train", *arguments]


def finish(*arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    """By the command line, in fresh interpreters; torture/kills.py does the same to every kind of run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(*ARGUMENTS, f"--out={whole}")
    moments = random.Random("exact")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kills = 0
    for attempt in range(3):
        first = [*ARGUMENTS, f"--out={killed}"] if attempt == 0 else [f"--resume={killed}"]
        process = subprocess.Popen(command(*first), env=environment, stdout=subprocess.DEVNULL)
        # wait for it to be training, then for a moment nobody chose
        seen = _lines(killed)
        while process.poll() is None and _lines(killed) <= seen:
            time.sleep(0.001)  # leaves the core to the run
        until = time.monotonic() + moments.uniform(0.0, 0.3)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 2
    finish(f"--resume={killed}")
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, killed)
    ]
    for a, b in zip(*rows, strict=True):
        assert (a["epoch"], a["loss"], a["validation_accuracy"]) == (
            b["epoch"],
            b["loss"],
            b["validation_accuracy"],
        )


def _lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_polite_end_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [a for a in ARGUMENTS if not a.startswith(("--epochs", "--checkpoint"))]
    arguments += ["--epochs=100000", "--checkpoint_every=100000", f"--out={run}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(*arguments), env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and _lines(run) < 3:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"protoseam train --resume {run}" in said
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    assert len(saved) == 1
    # the signal may come between an epoch's line and its state; --resume then takes the line back
    assert _lines(run) - 1 <= int(saved[0].removeprefix("epoch-")) <= _lines(run)
