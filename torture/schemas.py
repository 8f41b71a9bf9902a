"""Every field of every file that is read back: removed, null, of a wrong kind, huge, negative, NaN.

Whatever a field becomes, a command works or ends in the project's own error. Training that was paid for is not lost:
with the damaged file restored, the run is as good as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import arguments, report
from links import SMALL

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.export import export
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.session import resume, train
from protoseam.lab.experiments import reporting
from protoseam.lab.experiments.audit import audit_run
from protoseam.lab.experiments.plans import PLANS, QUICK
from protoseam.lab.experiments.study import read_study, write_row

VALUES: dict[str, Any] = {
    "null": None,
    "a word": "word\x1b[2J",
    "a list": [],
    "a table": {},
    "deep": [[[[{}]]]],
    "true": True,
    "huge": 10**400,
    "negative": -1,
    "a fraction": 0.5,
    "over one": 5.0,
    "NaN": float("nan"),
    "infinite": float("inf"),
}
_REMOVED = object()
Action = Callable[[Path], object]
JSON_FILES: dict[str, dict[str, Action]] = {
    "summary.json": {"train --resume": lambda run: resume(run, quiet=True)},
    "cost.json": {"train --resume": lambda run: resume(run, quiet=True)},
    "env.json": {"train --resume": lambda run: resume(run, quiet=True)},
    "data.json": {"train --resume": lambda run: resume(run, quiet=True), "data.json": RunData.read},
    "metrics.jsonl": {"train --resume": lambda run: resume(run, quiet=True)},
    "manifest.json": {"train --resume": lambda run: resume(run, quiet=True)},
    "state.pt": {"train --resume": lambda run: resume(run, quiet=True)},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON value, itself included; of a list the first and last entry."""
    yield path
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list) and value:
        inside = [(i, value[i]) for i in sorted({0, len(value) - 1})]
    for key, below in inside:
        yield from places(below, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of the value with another one at that path, or none."""
    if not path:
        return {} if new is _REMOVED else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is _REMOVED:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def damages(value: Any) -> Iterator[tuple[str, Any]]:
    for path in places(value):
        for kind, new in {"removed": _REMOVED, **VALUES}.items():
            yield f"{'.'.join(map(str, path)) or 'all of it'}: {kind}", changed(value, path, new)


def in_words(action: Action, place: Path) -> str | None:
    """What is wrong with how an action ends, or None: it works, or raises an error of the project's own."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            action(place)
    except ProtoSeamError as error:
        return None if str(error) else "an error without words"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.80} ({Path(where.filename).name}:{where.lineno})"
    return None


def _state(run: Path) -> Path:
    return run / "checkpoints" / "epoch-000003"


def write_state(folder: Path, data: bytes) -> None:
    """A state whose manifest fits: an edited checkpoint, not a damaged one."""
    (folder / "state.pt").write_bytes(data)
    manifest = {"format": 1, "epoch": 3, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def attempts(whole: Path, stopped: Path) -> Iterator[tuple[str, str, Path, Callable[[Path], None]]]:
    """(file, damage, which run it belongs to, what does it to a copy of that run)."""

    def writing(name: str, text: str) -> Callable[[Path], None]:
        return lambda run: (run / name).write_text(text) and None

    for name in ("summary.json", "cost.json", "env.json", "data.json"):
        run = whole if name == "summary.json" else stopped
        for damage, value in damages(json.loads((run / name).read_text())):
            yield name, damage, run, writing(name, json.dumps(value))
    lines = (stopped / "metrics.jsonl").read_text().splitlines()
    for damage, value in damages(json.loads(lines[1])):
        text = "\n".join([lines[0], json.dumps(value), lines[2]]) + "\n"
        yield "metrics.jsonl", damage, stopped, writing("metrics.jsonl", text)
    manifest = _state(stopped) / "manifest.json"
    for damage, value in damages(json.loads(manifest.read_text())):
        name = str(manifest.relative_to(stopped))
        yield "manifest.json", damage, stopped, writing(name, json.dumps(value))
    state = torch.load(_state(stopped) / "state.pt", weights_only=True)
    for damage, value in damages(state):
        with contextlib.suppress(Exception):  # what cannot be saved cannot be read
            out = io.BytesIO()
            torch.save(value, out)
            data = out.getvalue()
            yield "state.pt", damage, stopped, lambda run, data=data: write_state(_state(run), data)


def report_study(folder: Path) -> None:
    """What ``reproduce --table-only`` does with a study."""
    runs = read_study(folder)
    reporting.write_report(("table1", "curves", "clusters", "toy"), runs, QUICK, folder / "report")


def make(folder: Path) -> tuple[Path, Path, Path]:
    """A finished run, the same one without its results, and a study with a run and the toy model in it."""
    whole, stopped, study = folder / "whole", folder / "stopped", folder / "study"
    train(SMALL, whole, quiet=True)
    shutil.copytree(whole, stopped)
    for name in ("summary.json", "model.safetensors"):
        (stopped / name).unlink()
    study.mkdir()
    for part in ("table1", "clusters"):
        name, config = PLANS[part](QUICK)[-1]
        short = dataclasses.replace(config, epochs=2, audit_every=1 if config.validation else 0, device="cpu")
        train(short, folder / name, quiet=True)
        row = write_row(study, name, RunDirectory(folder / name))
        row["epochs"], row["config"]["epochs"] = config.epochs, config.epochs
        row["config"]["audit_every"] = config.audit_every
        (study / f"{name}.json").write_text(json.dumps(row))
    return whole, stopped, study


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    warnings.simplefilter("ignore")
    base = Path(tempfile.mkdtemp(prefix="protoseam-schemas-"))
    with contextlib.redirect_stdout(io.StringIO()):
        whole, stopped, study = make(base / "made")
    misses: list[str] = []
    counts: Counter[str] = Counter()
    place = base / "try"
    for i, (name, damage, run, break_it) in enumerate(attempts(whole, stopped)):
        if options.quick and i % 29:
            continue
        for words, action in JSON_FILES[name].items():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(run, place)
            break_it(place)
            counts[name] += 1
            if wrong := in_words(action, place):
                misses.append(f"{words}, {name}, {damage}: {wrong}")
    for readers, name in (((evaluate, _export), "data.json"), ((audit_run,), "metrics.jsonl")):
        for i, (file, damage, _, break_it) in enumerate(attempts(whole, stopped)):
            if file != name or i % (29 if options.quick else 3):
                continue
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(whole, place)
            break_it(place)
            for action in readers:
                counts[name] += 1
                if wrong := in_words(action, place):
                    misses.append(f"{action.__name__}, {name}, {damage}: {wrong}")
    for file in sorted(study.glob("*.json")):
        for i, (damage, value) in enumerate(damages(json.loads(file.read_text()))):
            if options.quick and i % 97:
                continue
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(study, place)
            (place / file.name).write_text(json.dumps(value))
            counts["a study's file"] += 1
            action = report_study if i % 20 == 0 else read_study
            if wrong := in_words(action, place):
                misses.append(f"{action.__name__}, {damage}: {wrong}")
    shutil.rmtree(base)
    promise = "a field of a file that is read back: removed, null, wrong, huge, negative or NaN ends in words"
    details = {f"tries with {name}": count for name, count in counts.items()}
    return report(options.out, promise, sum(counts.values()), misses, started, details)


def _export(run: Path) -> None:
    export(run, run / "net.pt2")


if __name__ == "__main__":
    sys.exit(main())
