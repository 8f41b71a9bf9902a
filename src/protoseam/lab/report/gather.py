"""Runs as a page needs them, from whatever they left: a run's directory, a study's file, or a folder of either."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protoseam.errors import DataWarning
from protoseam.lab.engine.config import ConfigError, RunConfig, as_begun, resolved, to_dict
from protoseam.lab.engine.files import StorageError, read_json
from protoseam.lab.engine.latents import read_file
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.schemas import ROW, SHARE, nullable, problem
from protoseam.lab.engine.settings import from_dict

_ROW = {**ROW, "test_accuracy": nullable(SHARE)}


@dataclass(frozen=True)
class Gathered:
    """All that is known of a run; what it did not leave is empty or None."""

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    data: RunData | None = None
    latents: dict[str, Tensor] = field(default_factory=dict)
    bound: dict[str, float] = field(default_factory=dict)
    place: Path | None = None  # of a run's directory
    command: str = ""  # that trains it again, where protoseam train does not

    @property
    def test(self) -> float | None:
        return self.summary.get("test_accuracy")

    @property
    def validation(self) -> float | None:
        seen = [row["validation_accuracy"] for row in self.metrics if row["validation_accuracy"] is not None]
        return self.summary.get("validation_accuracy") or (seen[-1] if seen else None)

    @property
    def seconds(self) -> float | None:
        found = self.summary.get("seconds")
        return sum(row.get("seconds", 0.0) for row in self.metrics) or None if found is None else found

    @property
    def class_count(self) -> int:
        """Of those named and those that labels and answers show."""
        seen = (int(self.latents[n].max()) + 1 for n in ("label", "first") if n in self.latents)
        return max(len(self.classes), *seen, 0)

    def class_name(self, index: int) -> str:
        return self.classes[index] if index < len(self.classes) else str(index)


class _NoRunError(StorageError):
    """A JSON file that is sound, and not that of a run."""


def gather(places: Sequence[Path]) -> list[Gathered]:
    """The runs at these places, in order; a folder without a run of its own stands for the runs in it.

    Raises:
        ConfigError: if there is no run at one of them.
    """
    found = [run for place in places for run in _at(place)]
    if not found:
        raise ConfigError("there is no run to report on")
    return found


def _at(place: Path) -> list[Gathered]:
    if place.suffix == ".json" and place.is_file():
        return [_from_row(place)]
    if (place / "config.yaml").is_file():
        return [_from_directory(place)]
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}")
    inside = [_from_directory(file.parent) for file in sorted(place.glob("*/config.yaml"))]
    for file in sorted([*place.glob("*.json"), *place.glob("*/*.json")]):
        if not (file.parent / "config.yaml").exists():
            try:
                inside.append(_from_row(file))
            except _NoRunError:
                pass
            except StorageError as error:
                warnings.warn(f"left out: {error}", DataWarning, stacklevel=4)
    if not inside:
        raise ConfigError(
            f"{place} holds no run: neither config.yaml, nor folders with one, nor files of a study"
        )
    return inside


def _from_directory(path: Path) -> Gathered:
    directory = RunDirectory(path)
    config = directory.read_config()
    summary, metrics = directory.read_summary() or {}, directory.read_metrics()
    data = RunData.read(path)
    kept, about = read_file(path) or ({}, {})
    classes = summary.get("classes") or (data.classes if data else [])
    run = Gathered(
        name=path.resolve().name,
        config=to_dict(resolved(config)),
        metrics=metrics,
        summary=summary,
        environment=directory.read_environment(),
        classes=list(classes),
        data=data,
        latents=kept if {"share", "label"} & set(kept) else {},  # reduced, as a run that has ended leaves it
        bound=about.get("bound") or _last_audit(metrics),
        place=path,
    )
    _check_classes(path, run)
    return run if run.latents else _with_embeddings(run)


def _check_classes(path: Path, run: Gathered) -> None:
    counts = {run.latents[n].shape[1] for n in ("prototypes", "head") if n in run.latents}
    counts |= {len(run.latents[n]) for n in ("spread", "rival") if n in run.latents}
    if run.classes and counts | {run.class_count} != {len(run.classes)}:
        raise StorageError(
            f"{path / 'latents.safetensors'} is of other classes than the run's {len(run.classes)}: remove it"
        )


def _from_row(file: Path) -> Gathered:
    row = read_json(file)
    if (wrong := problem(row, _ROW)) is not None:
        raise _NoRunError(f"{file} is no finished run, {wrong}: name the directory of one")
    try:
        config = to_dict(resolved(from_dict(as_begun(row["config"]))))
    except ConfigError:  # of another version
        config = {**to_dict(RunConfig()), **row["config"]}
    run = Gathered(
        name=file.stem,
        config=config,
        metrics=row["metrics"],
        summary={k: v for k, v in row.items() if k not in ("metrics", "config", "environment")},
        environment=row.get("environment") or {},
        bound=_last_audit(row["metrics"]),
    )
    return _with_embeddings(run)


def _last_audit(metrics: list[dict[str, Any]]) -> dict[str, float]:
    return next((row["audit"] for row in reversed(metrics) if "audit" in row), {})


def _with_embeddings(run: Gathered) -> Gathered:
    """The two-dimensional picture that a summary may hold, as a latent space of one epoch."""
    kept = run.summary.get("embeddings")
    if not kept:
        return run
    z_N2 = torch.tensor([[float(v) for v in kept[axis].split()] for axis in ("x", "y")]).T
    label_N = torch.tensor([int(v) for v in kept["labels"].split()], dtype=torch.int32)
    latents = {
        "epochs": torch.tensor([run.summary["epochs"]], dtype=torch.int32),
        "z": z_N2[None].half(),
        "label": label_N,
        "points": torch.arange(len(label_N), dtype=torch.int32),
        "share": torch.tensor([kept["shown"] / 2] * 2),
    }
    if kept.get("prototypes"):
        values, vectors = torch.linalg.eigh(torch.tensor(kept["covariances"], dtype=torch.float64))
        roots = vectors * values.clamp_min(0).sqrt()[:, None] @ vectors.mT
        latents["prototypes"] = torch.tensor(kept["prototypes"])[None]
        latents["roots"] = roots[None].half()
    return dataclasses.replace(run, latents=latents)
