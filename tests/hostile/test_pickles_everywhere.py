"""A pickle that runs code, put in every place a file is loaded from: refused in words, and nothing is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from miniature_files import (
    Exploit,
    cifar_parts,
    idx_bytes,
    png,
    python2_batch,
    write_folder,
    write_idx,
    write_tar,
    write_zip,
)

from protoseam.lab.cli.main import main
from protoseam.lab.data import cache
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.config import LiftConfig, RunConfig
from protoseam.lab.engine.session import train
from protoseam.lab.models import build

CONFIG = RunConfig(
    data="digits",
    model="mlp",
    epochs=1,
    validation=0.2,
    augment="none",
    device="cpu",
    lift=LiftConfig(dim=4, rho_max=2),
)
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(CONFIG, out, quiet=True)
    return out


class Place:
    """A folder to work in, a finished run to spoil, and pickles that would make the folder `owned`."""

    def __init__(self, folder: Path, finished: Path) -> None:
        self.folder, self.owned = folder, folder / "owned"
        self.bomb = Exploit(os.mkdir, str(self.owned))
        self.run = folder / "run"
        shutil.copytree(finished, self.run)

    def pickled(self, value: object | None = None, protocol: int = 2) -> bytes:
        return pickle.dumps(self.bomb if value is None else value, protocol=protocol)

    def load(self, path: Path) -> list[str]:
        return ["data", "verify", str(path), "--root", str(self.folder / "root")]

    def unfinished(self) -> list[str]:
        (self.run / "summary.json").unlink()
        return ["train", "--resume", str(self.run), "--quiet=true"]


def cifar10_batch(at: Place) -> list[str]:
    parts = cifar_parts(BATCHES)
    files = {f"cifar/{name}": python2_batch(*part, "labels") for name, part in parts.items()}
    files["cifar/data_batch_3"] = at.pickled({"data": at.bomb, "labels": [1]})
    return at.load(write_tar(at.folder / "cifar.tar.gz", files))


def cifar100_names(at: Place) -> list[str]:
    parts = cifar_parts(["train", "test"], classes=100)
    files = {name: python2_batch(*part, "fine_labels") for name, part in parts.items()}
    return at.load(write_folder(at.folder / "c100", {**files, "meta": at.pickled(protocol=4)}))


def idx_file(at: Place) -> list[str]:
    write_idx(at.folder / "idx", compressed=False)
    (at.folder / "idx" / "train-labels-idx1-ubyte").write_bytes(at.pickled())
    return at.load(at.folder / "idx")


def _npz(at: Place, member: bytes) -> list[str]:
    path = at.folder / "a.npz"
    np.savez(path, x_train=np.eye(4), y_train=np.arange(4) % 2, x_test=np.eye(4))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y_test.npy", member)
    return at.load(path)


def npz_of_objects(at: Place) -> list[str]:
    out = io.BytesIO()
    np.save(out, np.array([at.bomb, 1], dtype=object), allow_pickle=True)
    return _npz(at, out.getvalue())


def npz_member(at: Place) -> list[str]:
    return _npz(at, at.pickled())


def _arrays(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        np.save(folder / f"{split}_images.npy", np.zeros((4, 2, 2, 1), np.uint8))
        np.save(folder / f"{split}_labels.npy", np.arange(4) % 2)
    return folder


def array_folder(at: Place) -> list[str]:
    folder = _arrays(at.folder / "arrays")
    np.save(folder / "test_labels.npy", np.array([at.bomb] * 4, dtype=object), allow_pickle=True)
    return at.load(folder)


def memory_mapped_array(at: Place) -> list[str]:
    folder = _arrays(at.folder / "arrays")
    (folder / "train_images.npy").write_bytes(at.pickled())
    return at.load(folder)


def decoded_copy(at: Place) -> list[str]:
    """The source is gone and the cache is all there is, with a manifest that fits what was put there."""
    folder = _arrays(at.folder / "root" / "cache" / f"mnist-{'0' * 16}")
    np.save(folder / "train_labels.npy", np.array([at.bomb] * 4, dtype=object), allow_pickle=True)
    (folder / "classes.txt").write_text("a\nb\n")
    names = [*cache.FOLDER_FILES, "classes.txt"]
    files = {n: {"bytes": (folder / n).stat().st_size, "sha256": cache.sha256_of(folder / n)} for n in names}
    (folder / "manifest.json").write_text(json.dumps({"reader": cache.READER_VERSION, "files": files}))
    return ["data", "verify", "mnist", "--root", str(at.folder / "root")]


def image_folder(at: Place) -> list[str]:
    sound = {f"{label}/{i}.png": png(np.full((2, 2), i, np.uint8)) for label in "ab" for i in range(5)}
    return at.load(write_zip(at.folder / "images.zip", {**sound, "a/9.png": at.pickled()}))


def compressed_idx(at: Place) -> list[str]:
    folder = write_folder(at.folder / "gz", {"train-images-idx3-ubyte.gz": at.pickled()})
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(2, np.uint8)))
    return at.load(folder)


def _spoil_checkpoints(at: Place) -> None:
    for folder in (at.run / "checkpoints").iterdir():
        shutil.rmtree(folder)
    checkpoint.save(at.run / "checkpoints", 1, {"objective": at.bomb, "epoch": 1})


def resumed_checkpoint(at: Place) -> list[str]:
    _spoil_checkpoints(at)
    return at.unfinished()


def legacy_checkpoint(at: Place) -> list[str]:
    """The format torch wrote before 1.6, a bare pickle."""
    folder = next((at.run / "checkpoints").iterdir())
    torch.save({"x": at.bomb}, folder / "state.pt", _use_new_zipfile_serialization=False)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {
        "size": (folder / "state.pt").stat().st_size,
        "sha256": cache.sha256_of(folder / "state.pt"),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return at.unfinished()


def audited_checkpoint(at: Place) -> list[str]:
    _spoil_checkpoints(at)
    return ["audit", str(at.run), "--device=cpu"]


def manifest(at: Place) -> list[str]:
    (next((at.run / "checkpoints").iterdir()) / "manifest.json").write_bytes(at.pickled())
    return at.unfinished()


def deployed_weights(at: Place) -> list[str]:
    (at.run / "model.safetensors").write_bytes(at.pickled())
    return ["eval", str(at.run), "--device=cpu"]


def torch_file_as_weights(at: Place) -> list[str]:
    torch.save({"fc.weight": at.bomb}, at.run / "model.safetensors")
    return ["eval", str(at.run), "--device=cpu"]


def exported_weights(at: Place) -> list[str]:
    (at.folder / "net.safetensors").write_bytes(at.pickled())
    return ["predict", str(at.folder / "net.safetensors"), "x.png"]


def hub_config(at: Place) -> list[str]:
    write_folder(at.folder / "hub", {"config.json": at.pickled(), "model.safetensors": at.pickled()})
    return ["predict", str(at.folder / "hub"), "x.png"]


def run_config(at: Place) -> list[str]:
    (at.run / "config.yaml").write_bytes(at.pickled())
    return ["eval", str(at.run)]


def resumed_config(at: Place) -> list[str]:
    (at.run / "config.yaml").write_bytes(at.pickled(protocol=0))
    return at.unfinished()


def config_file(at: Place) -> list[str]:
    (at.folder / "c.yaml").write_bytes(at.pickled(protocol=0))
    return ["train", "--config", str(at.folder / "c.yaml"), "--out", str(at.folder / "new")]


def summary(at: Place) -> list[str]:
    (at.run / "summary.json").write_bytes(at.pickled())
    return ["train", "--resume", str(at.run)]


def environment(at: Place) -> list[str]:
    (at.run / "env.json").write_bytes(at.pickled())
    return at.unfinished()


def data_record(at: Place) -> list[str]:
    (at.run / "data.json").write_bytes(at.pickled())
    return ["eval", str(at.run), "--device=cpu"]


def study(at: Place) -> list[str]:
    write_folder(at.folder / "study", {"cifar10-resnet8-baseline-42.json": at.pickled()})
    return ["reproduce", "table1", "--table-only", "--out", str(at.folder / "study")]


PLACES: list[Callable[[Place], list[str]]] = [
    cifar10_batch, cifar100_names, idx_file, compressed_idx, npz_of_objects, npz_member, array_folder,
    memory_mapped_array, decoded_copy, image_folder, resumed_checkpoint, legacy_checkpoint, audited_checkpoint,
    manifest, deployed_weights, torch_file_as_weights, run_config, resumed_config, config_file, summary,
    data_record, environment, study, exported_weights, hub_config,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::protoseam.lab.engine.checkpoint.CheckpointWarning")
@pytest.mark.parametrize("spoil", PLACES, ids=lambda place: place.__name__)
def test_refused_and_not_run(
    spoil: Callable[[Place], list[str]],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = Place(tmp_path, finished)
    command = spoil(at)
    assert main(command) == 1  # a foreign exception would leave main as it is
    said = capsys.readouterr().err
    assert said.startswith(f"protoseam {command[0]}: ")
    assert "weights_only" not in said  # no advice to switch the protection off
    assert not at.owned.exists()


def test_the_pickle_would_have_run(tmp_path: Path) -> None:
    """The bomb is a live one: Python's own loader sets it off."""
    pickle.loads(pickle.dumps(Exploit(os.mkdir, str(tmp_path / "owned"))))  # noqa: S301
    assert (tmp_path / "owned").is_dir()


def test_a_checkpoint_that_asks_for_an_object_says_which(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": Exploit(os.mkdir, str(tmp_path / "owned"))})
    with (
        pytest.warns(checkpoint.CheckpointWarning, match=r"asks for the Python object posix\.mkdir"),
        pytest.raises(checkpoint.CheckpointError),
    ):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize(
    "option", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"]
)
def test_a_config_cannot_have_a_network_load_files(option: str) -> None:
    from protoseam.errors import ModelError

    with pytest.raises(ModelError, match=f"{option} would load files"):
        build("resnet18", 10, (3, 8, 8), **{option: "evil.pth"})
