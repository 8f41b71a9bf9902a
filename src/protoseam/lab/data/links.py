"""Untrusted folders: nothing in them is written, emptied, removed or renamed through a link.

The folder that the user names may be a link, and so may those above it; what lies below it may not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from protoseam.errors import ProtoSeamError


class LinkError(ProtoSeamError, OSError):
    """A file or folder that would be written to, emptied or removed is a link to another place."""


def refuse_link(path: Path) -> None:
    """Raise `LinkError` if ``path`` itself is a symbolic link; one that does not exist is none."""
    if path.is_symlink():
        raise LinkError(
            f"{path} is a link to {os.readlink(path)}: nothing is written through links. Remove it, or copy what it "
            "leads to"
        )


def refuse_links(folder: Path) -> None:
    """Raise `LinkError` for the first symbolic link anywhere below ``folder``, which may be one itself."""
    for here, folders, files in os.walk(folder):  # os.walk enters no linked folder below the first
        for name in (*folders, *files):
            refuse_link(Path(here, name))


def open_in_place(path: Path) -> IO[str]:
    """Open a file to read and append, made if it is not there; a link, a hard link or a device is refused."""
    refuse_link(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o644)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        os.close(descriptor)
        what = "has a second name (a hard link)" if stat.S_ISREG(info.st_mode) else "is not a plain file"
        raise LinkError(f"{path} {what}, so writing to it could change something else. Remove it, or copy it")
    return os.fdopen(descriptor, "a+", encoding="utf-8")
