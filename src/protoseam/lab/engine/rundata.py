"""The record of a run's data in ``data.json``: its place, classes, a fingerprint and the normalisation.

A path in the config is as the user typed it, so from another folder it may lead to other data, and the files may have
changed since training. The record finds the same data again, or says what has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protoseam.errors import DataWarning
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import is_catalogued, load
from protoseam.lab.engine.config import ConfigError, RunConfig
from protoseam.lab.engine.files import explain_os_error, read_json, write_json
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.schemas import DATA, check_normalised
from protoseam.lab.pipeline.resident import Resident

_FILE = "data.json"
_IMAGES = 1000  # in the fingerprint, evenly spaced; of the labels all
_NAMED = 5  # classes
_REMEDY = "restore the data it was trained on, or train a new run"


@dataclass(frozen=True)
class RunData:
    """The record. Samples are known by their number and fingerprint; a missing test part has an empty list."""

    path: str | None  # absolute, if the data is a path and not a name
    root: str | None  # absolute, if the config names one
    classes: list[str]
    sample_shape: list[int]  # as the network sees it: (C, H, W) or (F,)
    train: list[int | str]
    test: list[int | str]
    mean: list[float]
    std: list[float]
    image_size: int | None = None  # to which images were resized, if they were
    held_out: bool = False  # whether the test part is a fifth of one folder

    @classmethod
    def of(cls, config: RunConfig, dataset: ArrayDataset, data: Resident) -> RunData:
        root = config.data_root
        return cls(
            path=None if is_catalogued(config.data) else str(Path(config.data).expanduser().resolve()),
            root=None if root is None else str(Path(root).expanduser().resolve()),
            classes=list(dataset.classes),
            sample_shape=list(data.sample_shape),
            train=_fingerprint(dataset.train_images, dataset.train_labels),
            test=_fingerprint(dataset.test_images, dataset.test_labels),
            mean=data.mean.tolist(),
            std=data.std.tolist(),
            image_size=config.image_size,
            held_out=dataset.held_out,
        )

    @classmethod
    def read(cls, run: Path) -> RunData | None:
        """Return the record of the run in a directory; None for a run of an earlier version, which has none."""
        if not (run / _FILE).exists():
            return None
        values = check_normalised(run / _FILE, read_json(run / _FILE), DATA)
        values = {"image_size": None, "held_out": False, **values}  # runs of earlier versions have none
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    def write(self, run: Path) -> None:
        with explain_os_error("the run", run, going_on=""):
            write_json(run / _FILE, dataclasses.asdict(self))

    def place(self, config: RunConfig) -> tuple[str, str | None]:
        """Return (data, root): the recorded places if they still exist, otherwise those the config names."""
        path = self.path if self.path and Path(self.path).exists() else config.data
        root = self.root if self.root and Path(self.root).exists() else config.data_root
        return path, root

    def told(self, validation: int) -> str:
        """Return a sentence: which classes, and how many samples of each part; ``validation`` of training's."""
        names = ", ".join(self.classes[:_NAMED]) + ", …" * (len(self.classes) > _NAMED)
        kind = "images" if len(self.sample_shape) == 3 else "rows"
        train, test = (int(part[0]) if part else 0 for part in (self.train, self.test))
        cut = f", {validation:,} of them for validation," if validation else ""
        how = " (a fifth, chosen by file name)" if self.held_out else ""
        return (
            f"{len(self.classes):,} classes: {names}; {train:,} training{cut} and {test:,} test {kind}{how}."
        )

    def normalise(self, data: Resident) -> None:
        """Normalise as training did so far, which is what the network was trained on."""
        data.mean.copy_(torch.tensor(self.mean))
        data.std.copy_(torch.tensor(self.std))

    def check(self, run: Path, dataset: ArrayDataset) -> list[str]:
        """Return what has changed about the samples; raise ConfigError for other classes or another sample shape."""
        classes, now, difference = self.classes, list(dataset.classes), ""
        if len(classes) != len(now):
            difference = f"it had {len(classes)} classes and has {len(now)}"
        elif classes != now:
            first = next(i for i, name in enumerate(classes) if name != now[i])
            difference = f"class {first} was {classes[first]!r} and is {now[first]!r}"
        elif self.sample_shape != list(dataset.input_shape):
            difference = f"samples had shape {tuple(self.sample_shape)} and have {dataset.input_shape}"
        if difference:
            raise ConfigError(f"the data for {run} has changed since training ({difference}): {_REMEDY}")
        changed = []
        for part, then in (("train", self.train), ("test", self.test)):
            images, labels = getattr(dataset, f"{part}_images"), getattr(dataset, f"{part}_labels")
            if then and len(labels) and then != (found := _fingerprint(images, labels)):
                how = "are not the same" if then[0] == found[0] else f"were {then[0]} and are {found[0]}"
                changed.append(f"its {part}ing samples {how}")
        return changed


def find_data(
    run: Path, config: RunConfig, remembered: RunData | None, *, test: bool = True
) -> tuple[ArrayDataset, list[str]]:
    """Return a run's data, without its test part if ``test`` is False, and what has changed since training."""
    name, root = remembered.place(config) if remembered else (config.data, config.data_root)
    if remembered and remembered.path and not Path(name).expanduser().exists():
        raise ConfigError(
            f"the data of {run} lay in {remembered.path} and is not there any more: {_REMEDY}. Data that "
            "has moved: eval takes --data PLACE; to train on, move it back"
        )
    dataset = load(name, Path(root) if root else None, image_size=config.image_size)
    if not test:
        dataset = dataset.without_test()
    return dataset, remembered.check(run, dataset) if remembered else []


def data_of(run: Path) -> RunData | Resident:
    """What a run remembers of its data; one of an earlier version remembers nothing, so its data has to be there."""
    return RunData.read(run) or load_again(run, RunDirectory(run).read_config())


def load_again(
    run: Path, config: RunConfig, device: torch.device | str = "cpu", *, place: str | None = None
) -> Resident:
    """Load the data of a run for evaluation, normalised as in training; warn if its samples have changed.

    ``place`` is where the data lies now, if it has moved.
    """
    remembered = where = RunData.read(run)
    if place is not None:
        config = dataclasses.replace(config, data=place)
        where = remembered and dataclasses.replace(remembered, path=None)
    dataset, changed = find_data(run, config, where)
    if changed:
        told = f"the data for {run} has changed since training: {'; '.join(changed)}"
        if len(changed) > 1:  # both parts: files may have moved from one to the other
            told += (
                ". If the test part is a fifth of one folder, images that were trained on may be among it now"
            )
        warnings.warn(told, DataWarning, stacklevel=3)
    data = Resident(
        dataset, seed=config.seed, batch_size=config.batch_size, validation=config.validation, device=device
    )
    if remembered:
        remembered.normalise(data)
    return data


def _fingerprint(images: NDArray[Any], labels: NDArray[np.int64]) -> list[int | str]:
    """Return the number of samples and a SHA-256 of labels and evenly spaced images; an empty list without samples."""
    if not len(labels):
        return []
    digest = hashlib.sha256(np.ascontiguousarray(labels).tobytes())
    rows = np.unique(np.linspace(0, len(images) - 1, _IMAGES).round().astype(np.int64))
    digest.update(np.ascontiguousarray(images[rows]).tobytes())
    return [len(labels), digest.hexdigest()]
