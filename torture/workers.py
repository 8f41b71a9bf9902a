"""Workers killed at random: a sweep or a study ends as if one worker had done it alone, each run once, none lost.

``python torture/workers.py --out results/torture/workers.json`` (``--quick``: few kills): a sweep on SQLite, a sweep on
a PostgreSQL server of its own with a directory for each worker, as if on machines that share nothing else, and a study
directory. Three workers are killed with SIGKILL again and again, and replaced, until the kills are used up.

Data out: a JSON summary. Every worker appends a line to a journal before each epoch it trains; who has run what is
read from there, and the results are compared with those of one worker left in peace, number by number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import random
import runpy
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Workers are forked by a process that has imported what takes seconds: most of their lives is then spent at work,
# and that is when they are killed.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["protoseam.lab.cli.sweep", "protoseam.lab.experiments.sweep", "optuna", "sklearn.datasets"]
)

WORKERS = 3
HEARTBEAT = 5  # seconds; three missed ones and a worker on the shared storage counts as dead
TOO_LONG = 1800  # seconds after which the workers must be waiting for something that never comes
EVENTS = ("ready", "killed")  # what stands in the journal beside runs
RATES, DECAYS = (0.005, 0.01, 0.015, 0.02, 0.025), (1e-4, 2e-4, 5e-4, 1e-3)


def work(job: dict[str, Any]) -> int:
    """One worker process: writes down every epoch it starts, and otherwise does what a user's worker does."""
    import torch

    from protoseam.lab.engine import session

    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  a worker's lines are not the summary's
    honest = session.train_epoch
    epochs: list[str] = []

    def journalled(run: Any) -> dict[str, Any]:
        if not Path(job["go"]).exists():  # all begin together, each with its first trial in hand
            note(job, f"{os.getpid()} ready 0")
            while not Path(job["go"]).exists():
                time.sleep(0.01)
        key = f"{run.config.optim.lr:g}-{run.config.optim.weight_decay:g}"
        note(job, f"{os.getpid()} {key} {run.epoch}")
        epochs.append(key)
        while len(epochs) > job["leash"]:  # so much work is meant to be its last, however late the kill comes
            time.sleep(0.01)
        return honest(run)

    session.train_epoch = journalled
    return {"sweep": sweep, "study": study}[job["kind"]](job)


def note(job: dict[str, Any], line: str) -> None:
    # one write of a short line to a file opened for appending: whole, or not there
    handle = os.open(job["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def sweep(job: dict[str, Any]) -> int:
    from protoseam.lab.cli.main import main

    words = ["sweep", f"--out={job['out']}", "--data=digits", "--model=mlp", f"--epochs={job['epochs']}"]
    words += [
        "--augment=none",
        "--device=cpu",
        "--deterministic=true",
        "--checkpoint_every=1",
        "--quiet=true",
    ]
    words += ["--lift.dim=4", "--lift.rho_max=2", "--optim.warmup_epochs=1", f"--heartbeat={HEARTBEAT}"]
    rates, decays = (",".join(map(str, values)) for values in job["grid"])
    words += ["--space", f"optim.lr=choice:{rates}", f"optim.weight_decay=choice:{decays}"]
    if job["storage"]:
        words += [f"--storage={job['storage']}", "--name=torture"]
    return main(words)


def study(job: dict[str, Any]) -> int:
    from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
    from protoseam.lab.experiments.study import run_study

    base = RunConfig(
        data="digits", model="mlp", epochs=job["epochs"], augment="none", device="cpu", deterministic=True,
        checkpoint_every=1, lift=LiftConfig(dim=4, rho_max=2.0),
    )  # fmt: skip
    plan = [
        (f"{i:03d}-{j}", dataclasses.replace(base, optim=OptimConfig(rate, decay, warmup_epochs=1.0)))
        for i, rate in enumerate(job["grid"][0])
        for j, decay in enumerate(job["grid"][1])
    ]
    return 0 if run_study(plan, Path(job["out"]), quiet=True) else 1


class Shift:
    """The workers of one job: started, killed, replaced. Owns the processes."""

    def __init__(self, job: dict[str, Any], outs: list[Path], certain: int) -> None:
        self.job, self.outs = job, outs
        self.certain = certain  # so many of the first will be killed, and not replaced
        self.journal = Path(job["journal"])
        self.processes: list[BaseProcess] = []
        self.killed: set[int] = set()

    def start(self, place: int) -> None:
        leash = 2 if place < self.certain else 10**9
        job = self.job | {"out": str(self.outs[place]), "leash": leash}
        process = PROCESSES.Process(target=runpy.run_path, args=(__file__, {"JOB": job}, "worker"))
        process.start()
        self.processes[place : place + 1] = [process]

    def kill(self, place: int) -> None:
        process = self.processes[place]
        # written down first: whoever takes its run over may be quicker than we are after the kill
        note(self.job, f"{process.pid} killed 0")
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL and process.pid is not None:
            self.killed.add(process.pid)

    def busy(self, process: BaseProcess) -> bool:
        """Whether it has begun to train."""
        return any(pid == process.pid and key not in EVENTS for pid, key, _ in read_journal(self.journal))

    def wait_ready(self) -> None:
        for process in self.processes:
            while process.is_alive() and (process.pid, "ready", 0) not in read_journal(self.journal):
                time.sleep(0.02)


def read_journal(path: Path) -> list[tuple[int, str, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), key, int(epoch)) for pid, key, epoch in (line.split() for line in lines)]


def harass(job: dict[str, Any], outs: list[Path], kills: int, seed: int, *, replace: bool) -> Shift:
    """Start a worker on each of ``outs`` and kill ``kills`` times, each at a random moment of its victim's work."""
    certain = 0 if replace else kills
    shift, moments = Shift(job, outs, certain), random.Random(seed)
    for place in range(len(outs)):
        shift.start(place)
    shift.wait_ready()
    Path(job["go"]).touch()
    doomed: dict[int, float] = {}  # pid → the moment it is killed
    while len(shift.killed) < kills and any(p.is_alive() for p in shift.processes):
        for place, process in enumerate(shift.processes):
            if not process.is_alive() or process.pid is None or len(shift.killed) == kills:
                continue
            if process.pid not in doomed and (replace or place < certain) and shift.busy(process):
                doomed[process.pid] = time.monotonic() + moments.uniform(0.0, job["patience"])
            if doomed.get(process.pid, float("inf")) <= time.monotonic():
                shift.kill(place)
                if replace:
                    shift.start(place)
        time.sleep(0.005)
    for process in shift.processes:
        process.join(TOO_LONG)
    codes = [process.exitcode for process in shift.processes if process.pid not in shift.killed]
    if not codes or any(code != 0 for code in codes):
        raise RuntimeError(f"workers that nobody killed ended with {codes}")
    return shift


def ran_twice(journal: list[tuple[int, str, int]]) -> set[str]:
    """Runs that a worker began before the last one at it was killed, or that came back to one."""
    twice: set[str] = set()
    killed: set[int] = set()
    owners: dict[str, list[int]] = {}
    for pid, key, _ in journal:
        if key == "killed":
            killed.add(pid)
        elif key != "ready" and owners.setdefault(key, [])[-1:] != [pid]:
            if pid in owners[key] or set(owners[key]) - killed:
                twice.add(key)
            owners[key].append(pid)
    return twice


def results(folders: list[Path]) -> dict[str, list[Any]]:
    """Every result file found: by name, what each says of its epochs."""
    found: dict[str, list[Any]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.json")):
        row = json.loads(path.read_text())
        epochs = [
            [e["epoch"], e["loss"], e["rho"], e["validation_accuracy"], e["seam"]] for e in row["metrics"]
        ]
        said = [row["validation_accuracy"], row["test_accuracy"], row["parameters"], epochs]
        found.setdefault(path.stem, []).append(said)
    return found


def finished_trials(folders: list[Path], storage: str | None) -> dict[tuple[Any, ...], list[float]]:
    """What Optuna has of each point of a sweep."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage or f"sqlite:///{folders[0] / 'sweep.db'}"
    found: dict[tuple[Any, ...], list[float]] = {}
    for summary in optuna.get_all_study_summaries(url):
        for trial in optuna.load_study(study_name=summary.study_name, storage=url).trials:
            if trial.state.is_finished() and trial.state.name != "FAIL":
                found.setdefault(tuple(trial.params.values()), []).append(trial.value)
    return found


def trial_of(
    kind: str, scratch: Path, *, storage: str | None = None, kills: int, epochs: int = 40, grid: Any = None,
    patience: float = 0.7, replace: bool = True, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Harass one job and say what came of it."""
    grid = grid or (RATES, DECAYS)
    job = {
        "kind": kind, "epochs": epochs, "grid": grid, "patience": patience, "storage": None,
        "journal": str(scratch / "journal-alone"), "go": str(scratch / "go-alone"),
    }  # fmt: skip
    scratch.mkdir(parents=True)
    peaceful = scratch.parent / f"{kind}-alone"  # both sweeps are compared with the same
    if not peaceful.exists():
        harass(job, [peaceful], 0, 0, replace=False)
    job |= {"journal": str(scratch / "journal"), "go": str(scratch / "go"), "storage": storage}
    # a directory for all, or, where only the storage is shared, one for each worker
    outs = [scratch / (f"machine-{i}" if storage else "shared") for i in range(WORKERS)]
    started = time.monotonic()
    shift = harass(job, outs, kills, seed, replace=replace)

    planned = len(grid[0]) * len(grid[1])
    journal = read_journal(shift.journal)
    epochs_run = sum(key not in EVENTS for _, key, _ in journal)
    alone, together = results([peaceful]), results(list(dict.fromkeys(outs)))
    lost = sorted(set(alone) - set(together))
    equal = all(said == alone.get(name, [None])[0] for name, rows in together.items() for said in rows)
    told_twice = 0
    if kind == "sweep":
        reference, told = finished_trials([peaceful], None), finished_trials(outs, storage)
        lost += [str(point) for point in reference if point not in told]
        told_twice = sum(len(values) > 1 for values in told.values())
        equal = equal and all(values[0] == reference.get(point, [])[0] for point, values in told.items())
    leftovers = [str(path) for out in outs for path in out.rglob("unfinished/*")]
    return {
        "workers": WORKERS, "kills": len(shift.killed), "trials": planned, "finished": len(together),
        "run_twice": len(ran_twice(journal)) + told_twice, "lost": len(lost), "equal": equal,
        "epochs_needed": planned * epochs, "epochs_run": epochs_run, "left_behind": len(leftovers),
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main() -> int:
    from postgres import missing, postgres  # next to this file

    parser = argparse.ArgumentParser(
        description="Kill workers of sweeps and studies; see the top of this file."
    )
    parser.add_argument("--out", type=Path, default=Path("results/torture/workers.json"))
    parser.add_argument("--quick", action="store_true", help="3 kills each instead of 30")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    options: dict[str, Any] = {"kills": 30, "seed": args.seed}
    if args.quick:
        options |= {"kills": 3, "epochs": 10, "patience": 1.0}
    summary: dict[str, Any] = {}

    def keep(name: str, outcome: dict[str, Any]) -> None:
        summary[name] = outcome
        print(f"{name}: {outcome}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        keep("sweep on SQLite", trial_of("sweep", Path(scratch, "sqlite"), **options))
        if lacking := missing():
            keep("sweep on PostgreSQL", {"not run": lacking})
        else:
            with postgres() as url:
                keep("sweep on PostgreSQL", trial_of("sweep", Path(scratch, "pg"), storage=url, **options))
        keep("study directory", trial_of("study", Path(scratch, "study"), **options))
    ran = [part for part in summary.values() if "kills" in part]
    good = all(
        p["kills"] == options["kills"]
        and p["equal"]
        and not (p["lost"] or p["run_twice"] or p["left_behind"])
        for p in ran
    )
    versions = {name: version(name) for name in ("torch", "optuna", "sqlalchemy")}
    summary |= {"all_good": good, "seed": args.seed, "python": platform.python_version(), **versions}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "worker":
    sys.exit(work(globals()["JOB"]))
