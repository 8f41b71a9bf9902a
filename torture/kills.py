"""SIGKILL at random moments of whole runs: each must end as the same run never killed, bit for bit.

Twenty runs cover every variant, estimator and structure, several runs of one command, batch normalisation, dropout and
augmentation. Kill moments are drawn over the epochs (with a fraction of one, so most fall within an epoch), over
the start, and over the moments between the last epoch and the results.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness import arguments, finish, kill, report, result, train

EPOCHS = 24
COMMON = ["--data=digits", "--device=cpu", "--deterministic=true", "--quiet=true", "--optim.warmup_epochs=2"]
COMMON += ["--lift.dim=6", "--lift.rho_max=4", f"--epochs={EPOCHS}"]
MLP = ["--model=mlp", "--model_options={hidden: [48]}", "--checkpoint_every=1"]
CONVNET = ["--model=convnet", "--model_options={widths: [4, 8]}", "--checkpoint_every=2"]
VIT = ["--model=vit_s", "--batch_size=256", "--checkpoint_every=2"]
VIT += ["--model_options={patch: 4, dim: 8, depth: 2, heads: 2, mlp: 16, dropout: 0.1, drop_path: 0.1}"]
NORMED = ["--model=vit_s", "--batch_size=256", "--checkpoint_every=3"]  # a convolutional stem has batch norm
NORMED += ["--model_options={patch: 4, dim: 8, depth: 1, heads: 2, mlp: 16, stem: conv}"]


def lifted(covariance: str, structure: str = "full", *more: str) -> list[str]:
    return [f"--lift.covariance={covariance}", f"--lift.structure={structure}", *more]


RUNS: dict[str, list[str]] = {
    "baseline": [*MLP, "--variant=baseline"],
    "baseline, convolutions": [*CONVNET, "--variant=baseline"],
    "baseline, batch normalisation": [*NORMED, "--variant=baseline"],
    "unlifted": [*MLP, "--variant=unlifted"],
    "unlifted, dropout": [*VIT, "--variant=unlifted"],
    "exact, full": [*MLP, *lifted("exact")],
    "exact, diagonal": [*MLP, *lifted("exact", "diagonal")],
    "exact, shared": [*CONVNET, *lifted("exact", "shared")],
    "exact, floor auto, clean pass": [
        *MLP,
        *lifted("exact", "full", "--lift.floor=auto"),
        "--lift.clean_pass=true",
    ],
    "exact, dropout, antithetic draws": [*VIT, *lifted("exact"), "--lift.draws=2", "--lift.antithetic=true"],
    "running, full": [*MLP, *lifted("running")],
    "running, diagonal": [*CONVNET, *lifted("running", "diagonal")],
    "running, shared, batch normalisation": [*NORMED, *lifted("running", "shared")],
    "running, floor auto": [*MLP, *lifted("running", "full", "--lift.floor=auto")],
    "isotropic": [*MLP, *lifted("isotropic")],
    "switch, full": [*MLP, *lifted("switch")],
    "switch, diagonal, audits": [*MLP, *lifted("switch", "diagonal"), "--audit_every=5"],
    "switch, shared, augmented": [*CONVNET, *lifted("switch", "shared"), "--augment=paper"],
    "three variants": [*MLP, "--variants=[baseline,unlifted,protoseam]"],
    "three seeds, dropout": [*VIT, *lifted("running"), "--seeds=[1,2,3]"],
}
QUICK = ("exact, full", "running, floor auto", "switch, full", "isotropic", "three variants")


def start(words: list[str], out: Path, log: Path) -> int:
    """Start the run, or go on with it: several by the same command, one alone by --resume."""
    if (out / "config.yaml").exists():
        return train([f"--resume={out}"], log)
    return train([*COMMON, *words, f"--out={out}"], log)


def run_directories(out: Path) -> list[Path]:
    return [out] if (out / "config.yaml").exists() else sorted(p for p in out.glob("*") if p.is_dir())


def lines(out: Path) -> int:
    """Return how many epochs are finished, in all runs together."""
    files = [p / "metrics.jsonl" for p in run_directories(out)]
    return sum(f.read_bytes().count(b"\n") for f in files if f.exists())


def wait_for(pid: int, out: Path, moment: float, epoch_seconds: float) -> None:
    """Until ``moment`` epochs have passed (its fraction in time), or the process has ended by itself."""
    while lines(out) < int(moment):
        if _over(pid):
            return
        time.sleep(0.0005)
    until = time.monotonic() + (moment % 1) * epoch_seconds
    while time.monotonic() < until and not _over(pid):
        time.sleep(0.0005)


def _over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def where(out: Path) -> str:
    """What the process was doing when it died, by what it left."""
    runs = run_directories(out)
    if not runs or not (runs[0] / "metrics.jsonl").exists():
        return "before the first epoch's end"
    if any(True for run in runs for _ in run.glob("checkpoints/.building-*")):
        return "while saving a checkpoint"
    if all((run / "summary.json").exists() for run in runs):
        return "after the results"
    return "within an epoch" if lines(out) % EPOCHS else "between the last epoch and the results"


def moments(rng: random.Random, kills: int, epochs: int) -> list[float]:
    """When to kill, in epochs: one at the start, one near the end, the others anywhere; two are the last two."""
    middle = sorted(rng.uniform(0.5, epochs - 1) for _ in range(kills - 2)) or [rng.uniform(1, epochs - 1)]
    return [rng.uniform(0, 0.99), *middle, epochs - 1 + rng.uniform(0.5, 1.6)][-kills:]


def torture(
    name: str, words: list[str], folder: Path, kills: int, seed: int
) -> tuple[list[str], list[str], int]:
    """One run, killed ``kills`` times: ``(where each kill fell, what went wrong, resumes)``."""
    rng = random.Random(f"{seed} {name}")
    whole, killed, log = folder / "whole", folder / "killed", folder / "log"
    begun = time.monotonic()
    if code := finish(start(words, whole, log)):
        return [], [f"{name}: the undisturbed run ended with {code}: {log.read_text()[-500:]}"], 0
    epochs = EPOCHS * len(run_directories(whole))
    epoch_seconds = (time.monotonic() - begun) / epochs
    log.write_text("")
    fallen: list[str] = []
    starts = 0
    for moment in moments(rng, kills, epochs):
        pid = start(words, killed, log)
        starts += 1
        wait_for(pid, killed, moment, epoch_seconds)
        if kill(pid):
            fallen.append(where(killed))
    code = finish(start(words, killed, log))
    problems = [] if code == 0 else [f"{name}: ended with {code}: {log.read_text()[-500:]}"]
    if "Warning" in log.read_text():
        problems.append(f"{name}: warned: {log.read_text()[-500:]}")
    for a, b in zip(run_directories(whole), run_directories(killed), strict=True):
        one, other = result(a), result(b)
        problems += [f"{name}, {b.name}: its {part} differ" for part in one if one[part] != other[part]]
        problems += [f"{name}, {b.name}: left {p.name}" for p in b.rglob(".*")]
    return fallen, problems, starts


def through_a_shell(folder: Path, seed: int) -> tuple[list[str], list[str], int]:
    """The same by the command line, in fresh interpreters, with kills from the first import on."""
    words = [*COMMON, *RUNS["exact, full"]]
    command = [sys.executable, "-m", "protoseam", "train"]
    rng = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    subprocess.run([*command, *words, f"--out={whole}"], env=environment, check=True, capture_output=True)
    lifetime = time.monotonic() - begun
    fallen = []
    for _ in range(5):
        known = (killed / "config.yaml").exists()
        process = subprocess.Popen(
            [*command, f"--resume={killed}"] if known else [*command, *words, f"--out={killed}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(rng.uniform(0.3, 0.9) * lifetime)
        if kill(process.pid):
            fallen.append(where(killed))
        process.returncode = 0  # waited for already
    last = [f"--resume={killed}"] if (killed / "config.yaml").exists() else [*words, f"--out={killed}"]
    subprocess.run([*command, *last], env=environment, check=True, capture_output=True)
    return fallen, [] if result(whole) == result(killed) else ["by the command line: the runs differ"], 5


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    chosen = {name: RUNS[name] for name in QUICK} if options.quick else RUNS
    wanted = 2 * len(chosen) if options.quick else 100
    fallen: Counter[str] = Counter()
    misses: list[str] = []
    table = []
    seed = kills = 0
    while kills < wanted and seed < 5:  # a run may end before its last kill: spare rounds fill up
        for name, words in chosen.items():
            if seed and kills >= wanted:
                break
            folder = Path(tempfile.mkdtemp(prefix="protoseam-kills-"))
            places, problems, starts = torture(name, words, folder, 2 if options.quick else 5, seed)
            shutil.rmtree(folder)
            table.append(
                {"run": name, "seed": seed, "kills": len(places), "starts": starts, "equal": not problems}
            )
            fallen.update(places)
            misses += problems
            kills += len(places)
        seed += 1
    if not options.quick:
        folder = Path(tempfile.mkdtemp(prefix="protoseam-kills-"))
        places, problems, starts = through_a_shell(folder, seed)
        shutil.rmtree(folder)
        table.append(
            {"run": "by the command line", "kills": len(places), "starts": starts, "equal": not problems}
        )
        fallen.update(places)
        misses += problems
        kills += len(places)
    return report(
        options.out,
        "kill -9 at any moment: the finished run is bit-identical to one never killed",
        kills,
        misses,
        started,
        {"runs": len(table), "kills fell": dict(fallen), "table": table},
        missed=sum(row["kills"] for row in table if not row["equal"]),
    )


if __name__ == "__main__":
    sys.exit(main())
