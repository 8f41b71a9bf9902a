"""Divergence provoked by an abrupt ρ: where ``stop`` ends the run, ``rewind`` brings it to its end.

Half of the runs are also killed right after they first went back, and gone on with. A run counts as recovered if it
reaches its last epoch with finite weights, halved rates, whole metrics, and better than guessing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import arguments, finish, kill, report, train
from safetensors.torch import load_file

from protoseam.lab.engine.rundir import RunDirectory

EPOCHS = 10
COMMON = ["--data=digits", "--device=cpu", "--deterministic=true", "--quiet=true", "--checkpoint_every=1"]
COMMON += [
    f"--epochs={EPOCHS}",
    "--optim.warmup_epochs=0",
    "--lift.rho_min=1",
    "--lift.rho_max=32",
    "--lift.dim=8",
]
LINEAR = ["--model=mlp", "--model_options={hidden: []}"]
TRANSFORMER = ["--model=vit_s", "--model_options={patch: 4, dim: 8, depth: 1, heads: 2, mlp: 16}"]
RELU = ["--model=mlp", "--model_options={hidden: [32]}"]
CONVOLUTIONS = ["--model=convnet", "--model_options={widths: [4, 8]}"]
# rates that diverge, over a factor of four to eight
SETTINGS = {f"linear, rate {lr}": [*LINEAR, f"--optim.lr={lr}"] for lr in (0.005, 0.02, 0.04)}
SETTINGS |= {f"transformer, rate {lr}": [*TRANSFORMER, f"--optim.lr={lr}"] for lr in (0.05, 0.1, 0.2)}
# Too large a rate also kills ReLUs, with every number finite: the seam warns of it, going back does not undo it.
LIMITS = {
    "one hidden layer of ReLUs, rate 0.04": [*RELU, "--optim.lr=0.04"],
    "convolutions and ReLUs, rate 0.06": [*CONVOLUTIONS, "--optim.lr=0.06"],
}
# And rates beyond all reason, under twice the ρ: where rewinding at most five times comes to its end.
BEYOND = {
    "linear, rate 0.04": [*LINEAR, "--optim.lr=0.04"],
    "linear, rate 0.1": [*LINEAR, "--optim.lr=0.1"],
    "one hidden layer of ReLUs, rate 0.15": [*RELU, "--optim.lr=0.15"],
    "convolutions and ReLUs, rate 0.3": [*CONVOLUTIONS, "--optim.lr=0.3"],
    "transformer, rate 0.5": [*TRANSFORMER, "--optim.lr=0.5"],
}
LIMITS |= {f"{name}, ρ to 64": [*words, "--lift.rho_max=64"] for name, words in BEYOND.items()}
GUESSING = 0.1  # the digits' ten classes


def stops(words: list[str], folder: Path) -> str | None:
    """The plain run must diverge, or the try shows nothing; what is wrong, or None."""
    log = folder / "stop.log"
    code = finish(train([*words, f"--out={folder / 'stop'}"], log))
    said = log.read_text()
    if code != 1 or not ("have grown to" in said or "was not applied" in said):
        collapsed = ", N1 collapsed" if "has collapsed" in said else ""
        return f"with stop it ended with {code}{collapsed}: no divergence to recover from"
    return None


def recovers(words: list[str], folder: Path, killed: bool) -> tuple[dict[str, Any], str | None]:
    run, log = folder / "rewind", folder / "rewind.log"
    words = [*words, "--on_nonfinite=rewind", f"--out={run}"]
    pid = train(words, log)
    kills = 0
    if killed:
        while "Going back" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.001)
        kills += kill(pid)
        pid = train([f"--resume={run}"], log)
    code = finish(pid)
    directory = RunDirectory(run)
    summary = directory.read_summary()
    rewinds = log.read_text().count("Going back")
    if code or summary is None:
        return {"rewinds": rewinds}, f"it gave up with {code} after {rewinds} rewinds"
    facts = {
        "rewinds": rewinds,
        "killed after one": bool(kills),
        "test accuracy": round(summary["test_accuracy"], 3),
    }
    if not rewinds:
        return facts, "it never went back"
    if [row["epoch"] for row in directory.read_metrics()] != list(range(1, EPOCHS + 1)):
        return facts, "its epochs are not 1, 2, 3, …"
    if not all(t.isfinite().all() for t in load_file(run / "model.safetensors").values()):
        return facts, "its weights are not finite"
    state = torch.load(sorted((run / "checkpoints").iterdir())[-1] / "state.pt", weights_only=True)
    facts["rates times"] = state["rate_scale"]
    if state["rate_scale"] != 0.5**rewinds:
        return facts, f"its rates are scaled by {state['rate_scale']} after {rewinds} rewinds"
    if summary["test_accuracy"] <= GUESSING + 0.05:
        return facts, "it ended, but no better than guessing"
    return facts, None


def attempt(words: list[str], seed: int) -> tuple[dict[str, Any], str | None]:
    folder = Path(tempfile.mkdtemp(prefix="protoseam-nonfinite-"))
    every = [*COMMON, *words, f"--seed={seed}"]
    try:
        problem = stops(every, folder)
        return ({}, problem) if problem else recovers(every, folder, killed=seed % 2 == 1)
    finally:
        shutil.rmtree(folder)


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    settings = dict(list(SETTINGS.items())[:1]) if options.quick else SETTINGS
    seeds = range(2 if options.quick else 5)
    table, misses = [], []
    for name, words in settings.items():
        for seed in seeds:
            facts, problem = attempt(words, seed)
            table.append({"run": name, "seed": seed, **facts})
            if problem:
                misses.append(f"{name}, seed {seed}: {problem}")
    limits = []
    for name, words in () if options.quick else LIMITS.items():
        for seed in seeds:
            facts, problem = attempt(words, seed)
            limits.append({"run": name, "seed": seed, **facts, "outcome": problem or "recovered"})
    promise = "divergence provoked by an abrupt ρ: rewinding with a smaller step recovers"
    details = {"table": table, "beyond the promise, counted apart": limits}
    return report(options.out, promise, len(table), misses, started, details)


if __name__ == "__main__":
    sys.exit(main())
