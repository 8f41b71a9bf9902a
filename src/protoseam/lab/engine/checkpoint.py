"""Checkpoints: a folder each, renamed into place when complete, verified by SHA-256 before it is trusted.

``checkpoints/epoch-000010/`` holds ``state.pt`` (tensors and plain numbers, read with ``weights_only``) and
``manifest.json`` (epoch, size, SHA-256). torch.save and safetensors notice no flipped byte; the manifest does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protoseam.errors import ProtoSeamError
from protoseam.lab.data.cache import sha256_of, sync
from protoseam.lab.data.links import refuse_link
from protoseam.lab.engine.bounded import Unbounded, bytes_of, load_bounded
from protoseam.lab.engine.files import explain_os_error, read_bounded, write_atomically
from protoseam.lab.engine.schemas import check_state

if TYPE_CHECKING:
    from protoseam.lab.engine.run import Run

_FORMAT = 1
_MOST_MANIFEST = 2**16
_KEEP = 2  # the newest, and the one before it in case the newest turns out damaged


class CheckpointError(ProtoSeamError, RuntimeError):
    """No checkpoint can be used."""


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and the one before it is used."""


def save(folder: Path, epoch: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of ``epoch`` finished epochs, then remove all but the two newest.

    Checkpoints of later epochs are removed too: the run has gone back before them.
    """
    with explain_os_error("a checkpoint", folder):
        refuse_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        target = folder / _name(epoch)
        refuse_link(target)
        building = Path(tempfile.mkdtemp(dir=folder, prefix=".building-"))
        try:
            _write(building, epoch, state)
            building.chmod(0o755)  # mkdtemp's 0700 would hide it from colleagues
            if target.exists():  # the same epoch again, after a resume from further back
                shutil.rmtree(target)
            os.rename(building, target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        sync(folder)
        found = _newest_first(folder)
        later = [path for path in found if path.name > target.name]
        for path in later + found[len(later) + _KEEP :]:
            shutil.rmtree(path, ignore_errors=True)
    return target


def _write(folder: Path, epoch: int, state: dict[str, Any]) -> None:
    # Through memory: torch.save to a file reports a full disk by an error that does not name it.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    digest = hashlib.sha256(data).hexdigest()
    manifest = {"epoch": epoch, "size": len(data), "sha256": digest, "format": _FORMAT}
    write_atomically(folder / "state.pt", data)
    write_atomically(folder / "manifest.json", json.dumps(manifest).encode())


def _name(epoch: int) -> str:
    return f"epoch-{epoch:06d}"


def latest(
    folder: Path, map_location: torch.device | str = "cpu", *, most_bytes: int | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Return ``(epoch, state)`` of the newest checkpoint that is whole, or None if there is none.

    A file of more than ``most_bytes`` is not opened, because the run's settings imply a smaller one.
    """
    found = _newest_first(folder)
    for path in found:
        try:
            return _read(path, map_location, most_bytes)
        except _Damaged as damage:
            warnings.warn(
                f"checkpoint {path.name} is damaged ({damage}); using the one before it",
                CheckpointWarning,
                stacklevel=2,
            )
    if found:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged ({', '.join(p.name for p in found)}): start the run "
            "again in a new folder"
        )
    return None


def load_into(run: Run, folder: Path) -> tuple[int, int]:
    """Load the last good checkpoint into ``run``; return its epoch and how often the run has rewound, or zeros.

    Raises:
        CheckpointError: it is no state of this run.
    """
    found = latest(folder, run.device, most_bytes=4 * bytes_of(run.state()) + 2**20)
    if found is None:
        return 0, 0
    epoch, state = found
    which = f"the checkpoint of epoch {epoch} in {folder.parent}"
    if wrong := check_state(state, epoch, run.config.epochs):
        raise CheckpointError(f"{which} is no state of this run: {wrong}. Restore it, or remove its folder")
    try:
        run.load_state(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{which} does not fit its config.yaml ({str(error).splitlines()[0]}): restore the one it was saved with, "
            "or start again"
        ) from error
    return epoch, int(state.get("rewinds", 0))


class _Damaged(Exception):
    pass


def _read(path: Path, map_location: torch.device | str, most_bytes: int | None) -> tuple[int, dict[str, Any]]:
    try:
        manifest = json.loads(read_bounded(path / "manifest.json", _MOST_MANIFEST))
        epoch, size, digest = int(manifest["epoch"]), int(manifest["size"]), str(manifest["sha256"])
        written = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise _Damaged(f"no readable manifest: {error}") from error
    if written != _FORMAT:
        raise _Damaged(f"its manifest names format {written}, this version reads {_FORMAT}")
    state_path = path / "state.pt"
    try:
        if state_path.stat().st_size != size:
            raise _Damaged(f"{state_path.stat().st_size} bytes instead of {size}")
        if most_bytes is not None and size > most_bytes:
            raise _Damaged(f"{size:,} bytes, while a state of this run has at most {most_bytes:,}")
        if sha256_of(state_path) != digest:
            raise _Damaged("its SHA-256 does not match")
        state = load_bounded(state_path, map_location)
    except _Damaged:
        raise
    except Unbounded as error:
        raise _Damaged(str(error)) from error
    except Exception as error:  # for bytes it did not write torch may raise anything
        raise _Damaged(_reason(error)) from error
    if path.name != _name(epoch) or not isinstance(state, dict):
        raise _Damaged(f"its manifest names epoch {epoch}")
    return epoch, state


def _reason(error: Exception) -> str:
    """Return one line. torch's own message advises weights_only=False, which would run what the file asks for."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return f"it asks for the Python object {asked[1]}, which no checkpoint of this library does"
    lines = [line for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else 'it is not a checkpoint'}"


def _newest_first(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("epoch-*") if p.is_dir()), reverse=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed save left half built."""
    for leftover in folder.glob(".building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
