"""A full disk and a read-only folder: a clear message, the last good checkpoint kept, the run's end the same.

The disk is a real one, a tmpfs of a few megabytes in a mount namespace of this script's own. Where mounting is not
permitted only the limits of a process (RLIMIT_FSIZE) are tried, and the report says so.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

from harness import arguments, finish, fork, kill, protoseam_command, report, result, train

from protoseam.lab.engine import checkpoint

EPOCHS = 60
RUN = [
    "--data=digits",
    "--model=mlp",
    "--model_options={hidden: [64, 64]}",
    f"--epochs={EPOCHS}",
    "--device=cpu",
]
RUN += ["--lift.dim=4", "--deterministic=true", "--checkpoint_every=1", "--quiet=true"]
FULL, READ_ONLY, DENIED, LIMIT = "the disk is full", "read-only file system", "not writable", "size limit"


def in_own_namespace() -> bool:
    """Start again where mounts are this script's own, as root or as a user; False where that is not permitted."""
    if os.environ.get("PROTOSEAM_TORTURE_NAMESPACE"):
        return True
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", "--mount", *as_user, "--"]
    probe = [*unshare, "mount", "-t", "tmpfs", "-o", "size=1m", "none", tempfile.gettempdir()]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    os.environ["PROTOSEAM_TORTURE_NAMESPACE"] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])
    return False  # never reached: from here on this process is the one inside


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def fill(disk: Path, leave: int) -> Path:
    """Take all space but ``leave`` bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def refused(code: int, log: Path, why: str, run: Path) -> str | None:
    """One message with the reason; how to go on, if there is a run to go on with."""
    said, begun = log.read_text(), (run / "config.yaml").exists()
    if code != 1 or why not in said or ("--resume" in said) != begun or "Traceback" in said:
        return f"ended with {code} and said {said[-400:]!r}"
    return None


def goes_on(run: Path, whole: Path, log: Path) -> str | None:
    """With the trouble gone the run, if it had begun, reaches the same end."""
    known = (run / "config.yaml").exists()
    code = finish(train([f"--resume={run}"] if known else [*RUN, f"--out={run}"], log))
    if code:
        return f"afterwards it ended with {code}: {log.read_text()[-400:]}"
    return None if result(run) == result(whole) else "afterwards it ended differently"


def full_while_training(folder: Path, disk: Path, whole: Path, rng: random.Random) -> tuple[str, str | None]:
    """The disk fills up somewhere in the run, with some bytes left: where it breaks is chance."""
    run, log = disk / "run", folder / "log"
    pid = train([*RUN, f"--out={run}"], log)
    wanted = rng.randrange(1, EPOCHS // 2)
    while lines(run) < wanted and ended_not(pid):
        time.sleep(0.0005)
    filler = fill(disk, rng.choice((0, 500, 4096, 5000, 20_000, 100_000)))
    code = finish(pid)
    problem = refused(code, log, FULL, run)
    place = log.read_text().partition("cannot write ")[2].partition(" in ")[0]
    if problem is None:
        found = checkpoint.latest(run / "checkpoints")
        if found is None or found[0] < wanted - 1:
            problem = f"epoch {found and found[0]} is left of {wanted}"
    filler.unlink()
    return f"full, writing {place}", problem or goes_on(run, whole, folder / "again")


def ended_not(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def full_from_the_start(folder: Path, disk: Path, whole: Path, rng: random.Random) -> tuple[str, str | None]:
    filler = fill(disk, 0)
    log = folder / "log"
    problem = refused(finish(train([*RUN, f"--out={disk / 'run'}"], log)), log, FULL, disk / "run")
    filler.unlink()
    return "full from the start", problem or goes_on(disk / "run", whole, folder / "again")


def read_only(folder: Path, disk: Path, whole: Path, rng: random.Random) -> tuple[str, str | None]:
    """A run is killed, and its disk comes back read-only."""
    run, log = disk / "run", folder / "log"
    pid = train([*RUN, f"--out={run}"], folder / "first")
    wanted = rng.randrange(1, EPOCHS // 2)
    while lines(run) < wanted:
        time.sleep(0.0005)
    kill(pid)
    mount("-o", "remount,ro", str(disk))
    problem = refused(finish(train([f"--resume={run}"], log)), log, READ_ONLY, run)
    new, log = disk / "new", folder / "new"
    problem = problem or refused(finish(train([*RUN, f"--out={new}"], log)), log, READ_ONLY, new)
    mount("-o", "remount,rw", str(disk))
    return "read-only", problem or goes_on(run, whole, folder / "again")


def denied(folder: Path, disk: Path, whole: Path, rng: random.Random) -> tuple[str, str | None]:
    """Another user's folder: the process gives up its rights first."""
    log = folder / "log"
    log.touch()
    disk.chmod(0o755)  # a tmpfs is everybody's
    import_module(
        "torch._inductor.config"
    )  # deterministic mode's, and nobody may not be able to read Python itself

    def as_nobody() -> int:
        os.setgid(65534)
        os.setuid(65534)
        return protoseam_command(["train", *RUN, f"--out={disk / 'run'}"])

    return "no permission", refused(finish(fork(as_nobody, log)), log, DENIED, disk / "run")


def limited(folder: Path, disk: Path, whole: Path, rng: random.Random) -> tuple[str, str | None]:
    """A limit on the size of a file that the checkpoint exceeds."""
    run, log = disk / "run", folder / "log"

    def limited_run() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(8_000, 50_000),) * 2)
        return protoseam_command(["train", *RUN, f"--out={run}"])

    problem = refused(finish(fork(limited_run, log)), log, LIMIT, run)
    return "file size limit", problem or goes_on(run, whole, folder / "again")


def main() -> int:
    mounts = in_own_namespace()
    options = arguments(__doc__ or "")
    started = time.monotonic()
    rng = random.Random(8)
    base = Path(tempfile.mkdtemp(prefix="protoseam-disk-"))
    base.chmod(0o755)
    whole = base / "whole"
    finish(train([*RUN, f"--out={whole}"], base / "log"))
    each = 1 if options.quick else 5
    kinds = [
        *[full_while_training] * 4 * each,
        *[full_from_the_start] * each,
        *[read_only] * each,
        *[limited] * each,
    ]
    kinds += [denied] * each if os.geteuid() == 0 and not options.quick else []
    kinds = kinds if mounts else [limited] * each
    seen: Counter[str] = Counter()
    misses = []
    for i, kind in enumerate(kinds):
        folder = base / str(i)
        disk = folder / "disk"
        disk.mkdir(parents=True)
        if mounts:
            mount("-t", "tmpfs", "-o", "size=2m", "none", str(disk))
        what, problem = kind(folder, disk, whole, rng)
        seen[what] += 1
        if problem:
            misses.append(f"{i}, {what}: {problem}")
        if mounts:
            subprocess.run(["umount", str(disk)], check=True)
    shutil.rmtree(base)
    promise = "a full disk or a read-only folder stops the run with a clear message and keeps the last good checkpoint"
    details = {"tmpfs": mounts, "tried": dict(seen)}
    return report(options.out, promise, len(kinds), misses, started, details)


if __name__ == "__main__":
    sys.exit(main())
