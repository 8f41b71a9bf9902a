"""Files that are complete or absent: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protoseam.errors import ArgumentError, ProtoSeamError
from protoseam.lab.data.cache import sync
from protoseam.lab.data.links import refuse_link

GOING_ON = ", then go on (protoseam train --resume, or the same study again). What was saved before is intact"
_MOST_JSON = 16 * 2**20  # a study's file of 200 epochs has 0.3 MB


class StorageError(ProtoSeamError, OSError):
    """The system cannot write or read a file: the disk is full, read-only, or gone, or the file is damaged."""


@contextmanager
def explain_os_error(what: str, path: Path, going_on: str = GOING_ON) -> Iterator[None]:
    """Turn an OSError into a StorageError that says what could not be written and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ProtoSeamError):  # it has a message of ours already
            raise
        why = {
            errno.ENOSPC: "the disk is full: free some space",
            errno.EDQUOT: "the disk quota is used up: free some space",
            errno.EFBIG: "the file would exceed the size limit of this process: raise it (ulimit -f)",
            errno.EROFS: "the folder is on a read-only file system: choose another place",
            errno.EEXIST: "a file of that name is in the way: choose another place",
            errno.ENOTDIR: "a part of that path is a file: choose another place",
            errno.EACCES: "the folder is not writable: check its permissions or choose another place",
        }.get(error.errno or 0, str(error))
        raise StorageError(f"cannot write {what} in {path}: {why}{going_on}") from error


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of it, whenever the process dies.

    Raises:
        LinkError: if ``path`` is a link.
    """
    refuse_link(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide results from colleagues
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a plain file of at most ``most``; a pipe or a device is refused without waiting."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ArgumentError("it is not a plain file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ArgumentError(f"it has more than {most:,} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most 16 MiB; raise StorageError, which names the file."""
    try:
        value = json.loads(read_bounded(path, _MOST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read as JSON ({error}): remove it, or restore it") from error
    if not isinstance(value, dict):
        raise StorageError(
            f"{path} holds a {type(value).__name__}, not a JSON object: remove it, or restore it"
        )
    return value
