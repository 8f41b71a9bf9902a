"""Two processes on one run directory: the second is refused, and a killed one's lock is free at once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, finish, kill, report, result, train

EPOCHS = 25
RUN = ["--data=digits", "--model=mlp", "--model_options={hidden: [16]}", f"--epochs={EPOCHS}", "--device=cpu"]
RUN += ["--lift.dim=4", "--deterministic=true", "--checkpoint_every=1", "--quiet=true"]
SAID = "is training in"


def wait_for_epoch(run: Path) -> None:
    file = run / "metrics.jsonl"
    while not file.exists() or not file.read_bytes().count(b"\n"):
        time.sleep(0.001)


def second_is_refused(folder: Path, whole: Path) -> str | None:
    """One trains; a --resume and a new start beside it are refused, and do it no harm."""
    run = folder / "run"
    first = train([*RUN, f"--out={run}"], folder / "first")
    wait_for_epoch(run)
    os.kill(first, signal.SIGSTOP)  # held up within its training, or it might be done before the others look
    for i, words in enumerate(([f"--resume={run}"], [*RUN, f"--out={run}"])):
        log = folder / f"second{i}"
        code = finish(train(words, log))
        if code != 1 or f"process {first} on" not in log.read_text() or SAID not in log.read_text():
            kill(first)
            return f"a second process ended with {code}: {log.read_text()[-300:]}"
    os.kill(first, signal.SIGCONT)
    if finish(first) or result(run) != result(whole):
        return "the first was disturbed"
    return None


def one_of_four_wins(folder: Path, whole: Path) -> str | None:
    """Four start at the same moment in a new directory."""
    run = folder / "run"
    pids = [train([*RUN, f"--out={run}"], folder / f"log{i}") for i in range(4)]
    codes = [finish(pid) for pid in pids]
    if sorted(codes) != [0, 1, 1, 1]:
        return f"they ended with {codes}"
    return None if result(run) == result(whole) else "the winner's run differs"


def stale_is_taken_over(folder: Path, whole: Path) -> str | None:
    """The holder is killed; the next one goes on at once."""
    run = folder / "run"
    first = train([*RUN, f"--out={run}"], folder / "log")
    wait_for_epoch(run)
    if not kill(first):
        return "the run ended before it could be killed"
    if not (run / "lock").exists():
        return "there is no lock file to be stale"
    if code := finish(train([f"--resume={run}"], folder / "log")):
        return f"--resume ended with {code}: {(folder / 'log').read_text()[-300:]}"
    return None if result(run) == result(whole) else "the resumed run differs"


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="protoseam-lock-"))
    whole = base / "whole"
    finish(train([*RUN, f"--out={whole}"], base / "log"))
    misses = []
    kinds = (second_is_refused, one_of_four_wins, stale_is_taken_over)
    each = 1 if options.quick else 20
    for kind in kinds:
        for i in range(each):
            folder = base / f"{kind.__name__}{i}"
            folder.mkdir()
            if problem := kind(folder, whole):
                misses.append(f"{kind.__name__} {i}: {problem}")
    shutil.rmtree(base)
    promise = "two processes on one run directory: the second is refused, a killed one's lock is taken over"
    details = {kind.__name__.replace("_", " "): each for kind in kinds}
    return report(options.out, promise, each * len(kinds), misses, started, details)


if __name__ == "__main__":
    sys.exit(main())
