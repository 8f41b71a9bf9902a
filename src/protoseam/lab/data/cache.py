"""Decoded data sets on disk: written whole or not at all, memory-mapped when read, rebuilt when damaged.

A cache is a folder <root>/cache/<name>-<fingerprint>/ with the arrays, classes.txt and a manifest that records
where they came from, their sizes and their SHA-256. It can be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data.arrays import FOLDER_FILES, read_array_folder
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.links import refuse_link

READER_VERSION = 1  # raise it when a reader starts to produce different arrays: old caches are then ignored

_MANIFEST = "manifest.json"
_FILES = (*FOLDER_FILES, "classes.txt")
_STAGING = ".writing-"
_STALE_SECONDS = 24 * 3600

Stamp = Sequence[tuple[str, int, str]]  # name, bytes and marks of each source file, see Tree.stamp


def cached(root: Path, name: str, stamp: Stamp, build: Callable[[], ArrayDataset]) -> ArrayDataset:
    """Return the cached data set for these source files, or build and cache it if it is missing or damaged."""
    folder = folder_of(root, name, stamp)
    if folder.exists():
        why = damage(folder)
        if why is None:
            return _read(folder, name)
        warnings.warn(
            f"the decoded copy {folder} is damaged ({why}) and is rebuilt from its source",
            DataWarning,
            stacklevel=4,
        )
    logging.getLogger("protoseam.lab.data").info("decoding %s once, into %s", name, folder)
    dataset = build()
    try:
        _write(folder, dataset, stamp)
    except OSError as error:  # a full disk or a read-only root slows the work down and does not stop it
        warnings.warn(
            f"the decoded copy {folder} cannot be written ({error.strerror or error}), so {name} is decoded again "
            "every time. Free some space, or set PROTOSEAM_DATA to a folder you can write to",
            DataWarning,
            stacklevel=4,
        )
        return dataset
    return _read(folder, name)


def _read(folder: Path, name: str) -> ArrayDataset:
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return dataclasses.replace(read_array_folder(folder, name), held_out=manifest.get("held_out") is True)


def folder_of(root: Path, name: str, stamp: Stamp) -> Path:
    """Return where the decoded form of these source files is, or will be."""
    digest = hashlib.sha256(json.dumps([READER_VERSION, list(stamp)]).encode()).hexdigest()
    return root / "cache" / f"{_file_name(name)}-{digest[:16]}"


def newest(root: Path, name: str) -> Path | None:
    """Return the latest whole cache of that name, or None. Its sources may have been deleted since."""
    folders = sorted(
        (root / "cache").glob(f"{_file_name(name)}-" + "[0-9a-f]" * 16),
        key=lambda folder: folder.lstat().st_mtime,
        reverse=True,
    )
    return next((folder for folder in folders if damage(folder) is None), None)


def damage(folder: Path, *, hashes: bool = False) -> str | None:
    """Return what is wrong with a cache, or None. Its arrays are read to compare ``hashes`` only."""
    for path in (folder, *(folder / file for file in (*_FILES, _MANIFEST))):
        if path.is_symlink():
            return f"{path.name} is a link"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["reader"] != READER_VERSION:
            return f"written by reader version {manifest['reader']}, now {READER_VERSION}"
        listed = {file: manifest["files"][file] for file in _FILES}
        expected = {file: (int(one["bytes"]), str(one["sha256"])) for file, one in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        return f"{_MANIFEST} cannot be read: {type(error).__name__}"
    for file, (size, sha256) in expected.items():
        path = folder / file
        if not path.is_file():
            return f"{file} is missing"
        if path.stat().st_size != size:
            return f"{file} has {path.stat().st_size:,} bytes, not {size:,}"
        if hashes and sha256_of(path) != sha256:
            return f"{file} does not match its SHA-256"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def discard(folder: Path) -> None:
    """Remove a cache. It is moved aside first, so that no reader meets half of one."""
    refuse_link(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder.parent))
    try:
        os.rename(folder, aside / "old")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(folder: Path, dataset: ArrayDataset, stamp: Stamp) -> None:
    refuse_link(folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(
        f"{_STAGING}*"
    ):  # of killed processes; a younger one may be being written
        if time.time() - leftover.lstat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder.parent))
    try:
        arrays = (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)
        for file, array in zip(FOLDER_FILES, arrays, strict=True):
            np.save(staging / file, array, allow_pickle=False)
        (staging / "classes.txt").write_text("".join(f"{c}\n" for c in dataset.classes), encoding="utf-8")
        manifest: dict[str, Any] = {
            "name": dataset.name,
            "reader": READER_VERSION,
            "held_out": dataset.held_out,
            "sources": [{"name": name, "bytes": size} for name, size, _ in stamp[:1000]],
            "files": {
                file: {"bytes": (staging / file).stat().st_size, "sha256": sha256_of(staging / file)}
                for file in _FILES
            },
        }
        (staging / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for file in (*_FILES, _MANIFEST):
            sync(staging / file)
        sync(staging)
        staging.chmod(0o755)  # mkdtemp's 0700 would hide it from colleagues
        if (folder.exists() or folder.is_symlink()) and damage(folder) is not None:
            discard(folder)
        try:
            os.rename(staging, folder)
        except OSError:
            if damage(folder) is not None:  # else another process was first, with the same content
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and needs no such sync
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_name(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "data"
    if len(plain) > 100:
        raise DataError(f"the name {name[:40]}… is too long for a folder; rename it")
    return plain
