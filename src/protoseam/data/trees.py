"""Files by relative name, wherever they are stored: the face that folders and archives share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from protoseam.errors import DataError


class Tree(ABC):
    """Files by their relative names (`train/cat/1.png`), wherever they are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def names(self) -> list[str]:
        """Every file's name, hidden files and macOS leftovers aside."""

    @abstractmethod
    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """The wanted files, in whatever order they are stored."""

    def stamp(self) -> list[tuple[str, int, int]]:
        """(name, bytes, mtime in ns) of what is on disk: if none changes, the content is taken as unchanged."""
        info = self.path.stat()
        return [(self.path.name, info.st_size, info.st_mtime_ns)]


class FolderTree(Tree):
    """A folder of the user's own. Links are followed, as data is often linked in, but never in a circle."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files: dict[str, os.stat_result] = {}
        self._folders: list[str] = []
        self._scan("", frozenset())

    def names(self) -> list[str]:
        return list(self._files)

    def folders(self) -> list[str]:
        """Relative names of all sub-folders, empty ones too: an empty class folder is worth a message."""
        return self._folders

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        for name in self._files:
            if wanted(name):
                try:
                    yield name, (self.path / name).read_bytes()
                except OSError as error:
                    raise DataError(
                        f"{self.path / name} cannot be read: {error.strerror or error}"
                    ) from error

    def stamp(self) -> list[tuple[str, int, int]]:
        return [(name, info.st_size, info.st_mtime_ns) for name, info in self._files.items()]

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


def ignored(name: str) -> bool:
    """Hidden files and what macOS and Windows leave behind."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith(".") or name.startswith("__MACOSX") or last in ("Thumbs.db", "desktop.ini")


def only(names: Iterable[str]) -> Callable[[str], bool]:
    """A `wanted` that takes the files with one of these last names, in whatever folder."""
    last_names = frozenset(names)
    return lambda name: name.rsplit("/", 1)[-1] in last_names
