"""SIGKILL inside a loop that does nothing but save: what is on disk afterwards must be whole, and not old."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from harness import arguments, fork, kill, report

from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.files import write_json

SIZES = (1_000, 100_000, 1_000_000)  # numbers in a state: 4 kB, 400 kB, 4 MB


def save_for_ever(folder: Path, size: int, acknowledge: int) -> int:
    """Save epoch after epoch, and say so after each; a file that is replaced in place goes along."""
    state = {"weights": torch.zeros(size), "nested": {"momentum": [torch.zeros(size // 10)]}}
    epoch = 0
    while True:
        epoch += 1
        state["weights"].fill_(epoch)
        write_json(folder / "summary.json", {"epoch": epoch, "filler": "x" * 5000})
        checkpoint.save(folder / "checkpoints", epoch, state)
        os.write(acknowledge, epoch.to_bytes(4, "little"))


def attempt(folder: Path, size: int, delay: float) -> tuple[str, str | None]:
    """One process, killed ``delay`` seconds after its first save: ``(where, what is wrong or None)``."""
    reading, writing = os.pipe()
    pid = fork(lambda: save_for_ever(folder, size, writing), folder / "log")
    os.close(writing)
    told = os.read(reading, 4)
    if len(told) < 4:
        return "-", f"it ended by itself: {(folder / 'log').read_text()[-300:]}"
    time.sleep(delay)
    if not kill(pid):
        return "-", "it ended by itself"
    while chunk := os.read(reading, 4096):
        told = (told + chunk)[-4:]
    os.close(reading)
    acknowledged = int.from_bytes(told, "little")
    where = "while writing" if any((folder / "checkpoints").glob(".building-*")) else "between two writes"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # damage that is only warned about is unreadable too
        try:
            found = checkpoint.latest(folder / "checkpoints")
        except (checkpoint.CheckpointError, checkpoint.CheckpointWarning) as error:
            return where, str(error)
    json.loads((folder / "summary.json").read_text())
    if found is None or found[0] < acknowledged:
        return where, f"epoch {acknowledged} was saved, {found and found[0]} is on disk"
    if not bool((found[1]["weights"] == found[0]).all()):
        return where, f"epoch {found[0]} holds the numbers of another"
    return where, None


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    rng = random.Random(6)
    kills = 6 if options.quick else 200
    fell: Counter[str] = Counter()
    misses = []
    for i in range(kills):
        folder = Path(tempfile.mkdtemp(prefix="protoseam-saves-"))
        where, problem = attempt(folder, SIZES[i % len(SIZES)], rng.uniform(0, 0.15))
        shutil.rmtree(folder)
        fell[where] += 1
        if problem:
            misses.append(f"kill {i}, {SIZES[i % len(SIZES)]} numbers, {where}: {problem}")
    promise = "a checkpoint on disk is whole or absent, and one that was reported saved is there"
    return report(options.out, promise, kills, misses, started, {"kills fell": dict(fell)})


if __name__ == "__main__":
    sys.exit(main())
