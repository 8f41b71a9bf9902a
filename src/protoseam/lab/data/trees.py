"""Files by relative name: the interface that folders and archives share."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protoseam.errors import DataError

_SAMPLED = 256  # files whose content is looked at before a decoded copy of the folder is trusted
_ENDS = 32 * 1024


class Tree(ABC):
    """Files by their relative names (`train/cat/1.png`), wherever they are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """Return every file's name except hidden files and macOS leftovers."""

    @abstractmethod
    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Yield the wanted files in the order in which they are stored."""

    def stamp(self) -> list[tuple[str, int, str]]:
        """Return (name, bytes, marks) of what is on disk: if none changes, the content counts as unchanged.

        The last entry is the absolute path. The marks are the times of the last change of the content and of the
        file's entry, which no program can set, and a digest of the content of up to 256 files, evenly spaced.
        """
        files = self._stats()
        sampled = set(range(0, len(files), -(-len(files) // _SAMPLED) or 1))
        marks = []
        for i, (path, name, info) in enumerate(files):
            digest = _digest_of_ends(path, info.st_size) if i in sampled else ""
            marks.append((name, info.st_size, f"{info.st_mtime_ns} {info.st_ctime_ns} {digest}"))
        return [*marks, (str(self.path.resolve()), 0, "")]

    def _stats(self) -> list[tuple[Path, str, os.stat_result]]:
        return [(self.path, self.path.name, self.path.stat())]


class FolderTree(Tree):
    """A folder of the user. Links are followed, because data is often linked in, but never in a circle."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files: dict[str, os.stat_result] = {}
        self._folders: list[str] = []
        self._scan("", frozenset())

    def names(self) -> list[str]:
        return list(self._files)

    def folders(self) -> list[str]:
        """Return the relative names of all sub-folders, empty ones too, which a message can then name."""
        return self._folders

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        for name in self._files:
            if wanted(name):
                try:
                    yield name, (self.path / name).read_bytes()
                except OSError as error:
                    raise DataError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def _stats(self) -> list[tuple[Path, str, os.stat_result]]:
        return [(self.path / name, name, info) for name, info in self._files.items()]

    def _scan(self, below: str, above: frozenset[str]) -> None:
        here = self.path / below
        real = os.path.realpath(here)
        if real in above:  # a link back to a folder we are inside of
            return
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"the folder {here} cannot be listed: {error.strerror or error}") from error
        for entry in entries:
            name = f"{below}{entry.name}"
            if ignored(name):
                continue
            if entry.is_dir():
                self._folders.append(name)
                self._scan(f"{name}/", above | {real})
            elif entry.is_file():  # a dangling link or a pipe is neither
                self._files[name] = entry.stat()


def _digest_of_ends(path: Path, size: int) -> str:
    """Return the SHA-256 of the first and the last 32 KiB."""
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_ENDS))
            file.seek(max(size - _ENDS, 0))
            digest.update(file.read(_ENDS))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def ignored(name: str) -> bool:
    """Return whether this is a hidden file, or one that macOS or Windows leaves behind."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith(".") or name.startswith("__MACOSX") or last in ("Thumbs.db", "desktop.ini")


def only(names: Iterable[str]) -> Callable[[str], bool]:
    """Return a `wanted` for the files with one of these last names, in any folder."""
    last_names = frozenset(names)
    return lambda name: name.rsplit("/", 1)[-1] in last_names
