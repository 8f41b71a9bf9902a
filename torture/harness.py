"""What the torture scripts share: a parent that has torch loaded and forks, comparison of runs, the JSON report.

Loading torch takes seconds and a run here takes two, so each try is a fork of a parent that has imported everything
and computed nothing: a process of its own, with a real SIGKILL, that starts in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import protoseam.lab.cli.train
import protoseam.lab.engine.session
from protoseam.lab.cli.main import main as protoseam_command
from protoseam.lab.data.loading import load
from protoseam.lab.engine.rundir import RunDirectory

TIMINGS = ("seconds", "images_per_second")


def arguments(description: str) -> argparse.Namespace:
    """``--out FILE`` for the report, ``--quick`` for the short form that the ordinary tests run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON report goes")
    parser.add_argument("--quick", action="store_true", help="a few tries instead of all")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork, and would blur which sum comes first
    load("digits")  # brings scikit-learn in before the forks, as the imports above the rest
    protoseam.lab.cli.train.build_parser()
    return options


def fork(work: Callable[[], int], log: Path) -> int:
    """Start ``work`` in a process of its own, with its output in ``log``; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = work()
    except BaseException as error:  # the traceback belongs in the log, never in the parent's stack
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(words: Sequence[str], log: Path) -> int:
    """``protoseam train WORDS`` in a fork; returns its id."""
    return fork(lambda: protoseam_command(["train", *words]), log)


def ended(pid: int) -> int | None:
    """The exit status of a child that has ended (negative: the signal that ended it), or None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> bool:
    """SIGKILL; False if the process had ended by itself before."""
    os.kill(pid, signal.SIGKILL)  # a child not yet waited for can be signalled, dead or not
    return finish(pid) == -signal.SIGKILL


def result(run: Path) -> dict[str, Any]:
    """What has to be the same: the weights' bytes, every epoch's numbers, the summary; times are left out."""
    directory = RunDirectory(run)
    summary = directory.read_summary()
    return {
        "weights": (run / "model.safetensors").read_bytes() if summary else None,
        "metrics": [{k: v for k, v in row.items() if k not in TIMINGS} for row in directory.read_metrics()],
        "summary": summary and {k: v for k, v in summary.items() if k not in TIMINGS},
    }


def report(
    out: Path,
    promise: str,
    tries: int,
    misses: Sequence[str],
    started: float,
    details: dict[str, Any],
    *,
    missed: int | None = None,
) -> int:
    """Write the JSON that ``torture/all.py`` puts into its table; returns the exit status.

    ``missed``: tries that failed, where a line of ``misses`` can speak of several.
    """
    held = tries - (len(misses) if missed is None else missed)
    value = {
        "promise": promise,
        "tries": tries,
        "held": held,
        "misses": list(misses),
        "seconds": round(time.monotonic() - started, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "details": details,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(value, indent=2) + "\n")
    print(f"{out.stem}: {held} of {tries} held in {value['seconds']} s")
    for miss in misses:
        print(f"  miss: {miss}")
    return 1 if misses or not tries else 0
