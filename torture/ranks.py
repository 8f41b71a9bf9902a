"""A lost rank: one of two processes under torchrun is killed, torchrun starts both again, the result is the same.

Each try is `torchrun --nproc-per-node 2 --max-restarts 3 -m protoseam train …` with one to three kills of
rank 0 or rank 1, compared bit for bit with two processes that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, finish, fork, protoseam_command, report, result

EPOCHS = 30
COMMON = [
    "--data=digits",
    "--model=mlp",
    "--model_options={hidden: [16]}",
    f"--epochs={EPOCHS}",
    "--device=cpu",
]
COMMON += ["--lift.dim=4", "--lift.rho_max=4", "--deterministic=true", "--checkpoint_every=1", "--quiet=true"]
RUNS = {
    "exact": ["--lift.covariance=exact"],
    "running": ["--lift.covariance=running"],
    "switch": ["--lift.covariance=switch"],
    "baseline": ["--variant=baseline"],
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def undisturbed(words: list[str], out: Path, log: Path) -> None:
    """Two processes that meet as torchrun's do, without torchrun."""
    port = str(free_port())

    def rank(number: int) -> int:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return protoseam_command(["train", *COMMON, *words, f"--out={out}"])

    pids = [fork(lambda number=number: rank(number), log) for number in range(2)]  # type: ignore[misc]
    codes = [finish(pid) for pid in pids]
    if any(codes):
        raise SystemExit(f"the undisturbed run failed: {log.read_text()[-1000:]}")


def torchrun(words: list[str], out: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=3", "-m", "protoseam", "train", *COMMON, *words, f"--out={out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def worker(parent: int, rank: int, restarts: int) -> int | None:
    """The id of that rank's process in that start, once there is one."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if {b"RANK=%d" % rank, b"TORCHELASTIC_RESTART_COUNT=%d" % restarts} <= set(variables):
            return int(child)
    return None


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def attempt(words: list[str], folder: Path, victims: list[tuple[int, int]]) -> tuple[int, str | None]:
    """Kill each victim (rank, after this many epochs) in turn: ``(kills, what is wrong or None)``."""
    run, log = folder / "killed", folder / "killed.log"
    process = torchrun(words, run, log)
    kills = 0
    for rank, epoch in victims:
        while process.poll() is None:
            pid = worker(process.pid, rank, kills)
            if pid is not None and lines(run) >= epoch:
                os.kill(pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
    try:
        code = process.wait(timeout=200)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGTERM)  # torchrun ends its workers
        process.wait()
        return kills, "it hangs"
    if code:
        return kills, f"torchrun ended with {code}: {log.read_text()[-1500:]}"
    return kills, None if result(run) == result(folder / "whole") else "the results differ"


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    rng = random.Random(9)
    table, misses = [], []
    for i in range(1 if options.quick else 10):
        name = list(RUNS)[i % len(RUNS)]
        count = 1 if i < 7 else i - 6 if i < 9 else 3
        epochs = sorted(rng.sample(range(1, EPOCHS - 5), count))
        victims = [(rng.randrange(2), epoch) for epoch in epochs]
        folder = Path(tempfile.mkdtemp(prefix="protoseam-ranks-"))
        undisturbed(RUNS[name], folder / "whole", folder / "whole.log")
        kills, problem = attempt(RUNS[name], folder, victims)
        if problem is None and kills < count:
            problem = f"only {kills} of {count} kills came in time"
        shutil.rmtree(folder)
        table.append({"run": name, "kills (rank, epoch)": victims, "equal": problem is None})
        if problem:
            misses.append(f"try {i}, {name}, {victims}: {problem}")
    promise = "a lost rank: torchrun restarts both, and the run finishes with the same result"
    return report(options.out, promise, len(table), misses, started, {"table": table})


if __name__ == "__main__":
    sys.exit(main())
