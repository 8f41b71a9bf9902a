"""Every file of a run and of a study replaced by a link, every command run: what it leads to is as it was.

A link leads to a file or folder elsewhere, or to a name elsewhere that does not exist yet and must not come to exist.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness import arguments, finish, fork, report

from protoseam.errors import ProtoSeamError
from protoseam.lab.cli.main import main as protoseam_command
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.session import Interrupted, train
from protoseam.lab.experiments.study import run_study

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [16]},
    epochs=3,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)
FLAGS = [
    "--model=mlp",
    "--model_options={hidden: [16]}",
    "--epochs=3",
    "--lift.dim=4",
    "--device=cpu",
    "--lift.rho_max=2",
]
FLAGS += ["--checkpoint_every=1", "--optim.warmup_epochs=1", "--quiet=true"]
SWEEP = ["sweep", *FLAGS, "--variant=baseline", "--space", "optim.lr=choice:0.05,0.01"]
Command = tuple[str, Callable[[Path], int]]
_RAISED = 70  # a command ended in an error that is not the project's own


def _cli(*words: str) -> Callable[[Path], int]:
    return lambda place: protoseam_command([word.replace("HERE", str(place)) for word in words])


def _study(place: Path) -> int:
    run_study([("a", SMALL), ("b", SMALL)], place, quiet=True)
    return 0


def _predict(place: Path) -> int:
    images = place.parent / "images.npz"
    np.savez(images, images=np.zeros((2, 8, 8, 1), dtype=np.uint8))
    return protoseam_command(["predict", str(place), str(images)])


RUN: list[Command] = [
    ("train --resume", _cli("train", "--resume=HERE", "--quiet=true")),
    ("train --out", _cli("train", *FLAGS, "--out=HERE")),
    ("eval", _cli("eval", "HERE")),
    ("audit", _cli("audit", "HERE", "--device=cpu")),
    ("export", _cli("export", "HERE", "HERE/net.pt2")),
    ("export --to hub", _cli("export", "HERE", "--to=hub")),
    ("predict", _predict),
    ("report", _cli("report", "HERE")),
]
STUDY: list[Command] = [
    ("a study", _study),
    ("reproduce --table-only", _cli("reproduce", "table1", "--quick", "--table-only", "--out=HERE")),
    ("bundle pack", _cli("bundle", "pack", "HERE", "HERE-packed")),
    ("report", _cli("report", "HERE")),
]
SWEPT: list[Command] = [
    ("sweep", _cli(*SWEEP, "--out=HERE")),
    ("sweep --report-only", _cli(*SWEEP, "--out=HERE", "--report-only")),
]


def make(folder: Path) -> dict[str, tuple[Path, list[Command]]]:
    """A finished run, one cut off, a study under way and a sweep, each with the commands that work on it."""
    finished, stopped, study, swept = (folder / name for name in ("finished", "stopped", "study", "swept"))
    train(SMALL, finished, quiet=True)
    protoseam_command(["audit", str(finished), "--device=cpu"])
    protoseam_command(["export", str(finished), str(finished / "net.pt2")])
    protoseam_command(["export", str(finished), "--to=hub"])
    protoseam_command(["report", str(finished)])
    with contextlib.suppress(Interrupted):
        train(SMALL, stopped, quiet=True, budget_seconds=0)
    shutil.copytree(finished / "checkpoints", stopped / "checkpoints")
    shutil.rmtree(stopped / "checkpoints" / "epoch-000003")
    shutil.copy(finished / "metrics.jsonl", stopped / "metrics.jsonl")
    run_study([("a", SMALL)], study, quiet=True)
    shutil.copytree(stopped, study / "unfinished" / "b")
    protoseam_command(["reproduce", "table1", "--quick", "--table-only", f"--out={study}"])
    protoseam_command([*SWEEP, f"--out={swept}"])
    shutil.copytree(stopped, swept / "baseline" / "unfinished" / "000-42")
    return {
        "finished": (finished, RUN),
        "stopped": (stopped, RUN),
        "study": (study, STUDY),
        "swept": (swept, SWEPT),
    }


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder: kind and mode, time of the last change, content."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_mtime_ns, content)
    return found


def links(place: Path, victims: Path) -> Iterator[tuple[str, str]]:
    """Replace each entry of ``place`` in turn by a link into ``victims``; put it back afterwards."""
    for entry in sorted(place.rglob("*")):
        name = str(entry.relative_to(place))
        aside = place.parent / "aside"
        for kind in ("there", "missing"):
            shutil.rmtree(victims, ignore_errors=True)
            victims.mkdir()
            if kind == "there":  # the entry itself, moved out, so that it is good enough to be used
                (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, victims / "victim")
            os.rename(entry, aside)
            entry.symlink_to(victims / "victim")
            yield name, kind
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
            os.rename(aside, entry)


def attempt(command: Callable[[Path], int], place: Path, victims: Path) -> tuple[bool, bool]:
    """Run a command in a process of its own: whether the victims are as they were, and whether it ended in words."""
    before = state(victims)
    log = place.parent / "log"
    log.unlink(missing_ok=True)
    code = finish(fork(lambda: _in_words(command, place), log))
    return state(victims) == before, code in (0, 1, 2)


def _in_words(command: Callable[[Path], int], place: Path) -> int:
    try:
        return command(place)
    except ProtoSeamError:
        return 1
    except Exception:
        return _RAISED


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    warnings.simplefilter("ignore")
    base = Path(tempfile.mkdtemp(prefix="protoseam-links-"))
    with contextlib.redirect_stdout(io.StringIO()):
        places = make(base / "made")
    victims, misses, tried = base / "victims", [], 0
    details: dict[str, int] = {}
    for name, (original, commands) in places.items():
        count = 0
        for i, (entry, kind) in enumerate(_fresh(original, base / "work", victims)):
            if options.quick and i % 9:
                continue
            for words, command in commands:
                # what a command has done to the copy must not spare the next one the work
                place = base / "work" / "try" / original.name
                shutil.rmtree(place.parent, ignore_errors=True)
                shutil.copytree(base / "work" / original.name, place, symlinks=True)
                same, quiet = attempt(command, place, victims)
                count += 1
                if not same:
                    misses.append(f"{words} on {name}: {entry} as a link ({kind}) changed what it leads to")
                if not quiet:
                    misses.append(f"{words} on {name}: {entry} as a link ({kind}) ended in another's error")
        details[f"tries with a {name} directory"] = count
        tried += count
    shutil.rmtree(base)
    promise = "a run's or study's files replaced by links: no command changes what they lead to"
    return report(options.out, promise, tried, misses, started, details)


def _fresh(original: Path, work: Path, victims: Path) -> Iterator[tuple[str, str]]:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(original, work / original.name)
    return links(work / original.name, victims)


if __name__ == "__main__":
    sys.exit(main())
