"""What is fuzzed of runs and studies: checkpoints, configs and JSON files. See `fuzz_targets`."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from fuzz_data import chosen

from protoseam.lab.data.arrays import FOLDER_FILES
from protoseam.lab.data.cache import damage
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.config import RunConfig, to_dict
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.experiments import reporting
from protoseam.lab.experiments.plans import PLANS, QUICK
from protoseam.lab.experiments.study import read_study


def run_checkpoint(data: bytes, box: Path) -> None:
    """A stranger's checkpoint: its manifest fits, whatever the state is."""
    folder = box / "epoch-000001"
    folder.mkdir()
    (folder / "state.pt").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest = {"format": 1, "epoch": 1, "size": len(data), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoint.latest(box)


def checkpoint_seeds() -> list[bytes]:
    out, legacy = io.BytesIO(), io.BytesIO()
    state = {"w": torch.arange(4.0), "n": {"a": [1, 2.5, "x", None, True]}}
    torch.save(state, out)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    return [out.getvalue(), legacy.getvalue()]


def config(data: bytes, box: Path) -> None:
    (box / "config.yaml").write_bytes(data)
    to_dict(RunDirectory(box).read_config())


def config_seeds() -> list[bytes]:
    whole = yaml.safe_dump(to_dict(RunConfig(model_options={"widths": [4, 8]})), sort_keys=False).encode()
    tags = b"model: !!python/object/apply:os.mkdir [owned]\nseed: &a 1\nepochs: *a\noptim: {lr: 2001-01-01}\n"
    return [whole, tags, b"epochs: 3\nlift: {dim: 4, floor: auto}\n"]


_ROW = {
    "test_accuracy": 0.5,
    "epochs": QUICK.epochs or 1,
    "config": to_dict(PLANS["table1"](QUICK)[0][1]),
    "metrics": [{"epoch": 1, "loss": {"total": 1.0}, "validation_accuracy": 0.5, "audit": {"risk": 1.0}}],
}
_JSON: tuple[tuple[str, Callable[[Path], object], dict[str, object]], ...] = (
    (
        "summary.json",
        lambda box: RunDirectory(box).read_summary(),
        {**{k: _ROW[k] for k in ("test_accuracy", "epochs", "config")}, "validation_accuracy": None}
        | {"seconds": 1.5, "parameters": 10, "classes": ["a", "b"]},
    ),
    ("metrics.jsonl", lambda box: RunDirectory(box).read_metrics(), _ROW["metrics"][0]),
    (
        "env.json",
        lambda box: RunDirectory(box).read_environment(),
        {"torch": "2", "resumed": [{"a": 1}]},
    ),
    (
        "data.json",
        RunData.read,
        {"path": None, "root": "/x", "classes": ["a", "b"], "sample_shape": [1, 8, 8], "train": [9, "f"]}
        | {"test": [], "mean": [0.5], "std": [0.25]},
    ),
    (
        "manifest.json",
        damage,
        {"reader": 1, "files": {f: {"bytes": 1, "sha256": ""} for f in FOLDER_FILES}},
    ),
    (f"{PLANS['table1'](QUICK)[0][0]}.json", lambda box: _reported(box), _ROW),
)


def _reported(box: Path) -> None:
    runs = read_study(box)
    for part in reporting.PARTS:
        reporting.part_tables(part, runs, QUICK)
    reporting.index(runs, QUICK)


def json_files(data: bytes, box: Path) -> None:
    """The bytes as one of the JSON files that a run or a study keeps."""
    choice, data = chosen(data)
    name, read, _ = _JSON[choice % len(_JSON)]
    (box / name).write_bytes(data)
    read(box)


def json_seeds() -> list[bytes]:
    return [bytes([i]) + json.dumps(value).encode() for i, (_, _, value) in enumerate(_JSON)]
