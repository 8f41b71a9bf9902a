"""Folders, tar and zip archives as trees of files, and the checks that an untrusted archive must pass.

Members are read from the archive itself; only `extract` unpacks to disk. An archive is refused if a member's name is
absolute or leaves the folder (`../`), if a member is a link or a device, is encrypted or appears twice, and if the
whole unpacks to more than the limits allow.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from protoseam.errors import DataError
from protoseam.lab.data import streams
from protoseam.lab.data.streams import DEFAULT_LIMITS, Limits, damage_as_data_error

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip")
_LOCAL_HEADER = 30  # bytes of a zip member's fixed local header
_SAMPLED = 256  # files whose content is looked at before a decoded copy of the folder is trusted
_ENDS = 32 * 1024


class Tree(ABC):
    """Files by their relative names (`train/cat/1.png`), wherever they are stored."""

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path, self._limits = path, limits

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
        self.folders: list[str] = []  # relative names, empty ones too, which a message can then name
        self._scan("", frozenset())

    def names(self) -> list[str]:
        return list(self._files)

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
                self.folders.append(name)
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


class _Archive(Tree):
    def names(self) -> list[str]:
        return sorted(name for name, _ in self._walk(lambda name: False))

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        return ((name, data) for name, data in self._walk(wanted) if data is not None)

    @abstractmethod
    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
        """Yield every file that is not ignored, with its content if it is wanted."""


class ZipTree(_Archive):
    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
        with damage_as_data_error(self.path, "zip archive"), zipfile.ZipFile(self.path) as archive:
            for name, info in self._members(archive).items():
                if not ignored(name):  # reading checks the CRC, and stops at the declared size
                    yield name, archive.read(info) if wanted(name) else None

    def _members(self, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        """Check the whole directory before the first byte of the first member is read."""
        entries = archive.infolist()
        tally = _Tally(self.path, self._limits)
        found: dict[str, zipfile.ZipInfo] = {}
        for info in entries:
            where = f"{self.path}: member {info.orig_filename!r}"
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{where} refused: it is a link or a device, not a file")
            if info.flag_bits & 0x1:
                raise DataError(f"{where} refused: it is encrypted; unpack the archive yourself first")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"{where} refused: compression method {info.compress_type} is not supported")
            # orig_filename still shows a NUL byte, at which zipfile silently cuts the name
            name = tally.add(info.orig_filename, info.file_size, info.is_dir())
            self._limits.allow(where, info.file_size, info.compress_size)
            if not info.is_dir():
                found[name] = info
        # Entries that share their packed bytes multiply a small file: the other form of a zip bomb.
        by_place = sorted(entries, key=lambda info: info.header_offset)
        for one, after in pairwise(by_place):
            if one.header_offset + _LOCAL_HEADER + one.compress_size > after.header_offset:
                raise DataError(f"{self.path} refused: {one.filename!r} and {after.filename!r} overlap")
        return found


class TarTree(_Archive):
    """A tar archive, plain or compressed, read forwards only and within limits."""

    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
        damage = damage_as_data_error(self.path, "tar archive")
        with damage, self.path.open("rb") as packed, streams.decompressed(packed) as plain:
            forward = streams.ForwardReader(plain, str(self.path), self.path.stat().st_size, self._limits)
            tally = _Tally(self.path, self._limits)
            with tarfile.open(fileobj=forward, mode="r:") as archive:
                for member in archive:
                    where = f"{self.path}: member {member.name!r}"
                    if not (member.isreg() or member.isdir()) or member.issparse():
                        raise DataError(f"{where} refused: it is a link or a device, not a file")
                    name = tally.add(member.name, member.size, member.isdir())
                    if member.isdir() or ignored(name):
                        continue
                    if wanted(name):
                        forward.seek(member.offset_data)
                        yield name, forward.read_exactly(member.size)
                    else:
                        yield name, None
            forward.drain()  # gzip's checksum comes last: unless it is read, a flipped bit goes unnoticed


def open_tree(path: Path, limits: Limits = DEFAULT_LIMITS) -> Tree:
    """Return the folder or archive at `path` as a tree of files."""
    if path.is_dir():
        return FolderTree(path)
    if path.name.lower().endswith(".zip"):
        return ZipTree(path, limits)
    if path.name.lower().endswith(TAR_SUFFIXES):
        return TarTree(path, limits)
    raise DataError(
        f"{path} is neither a folder nor an archive ({', '.join(ARCHIVE_SUFFIXES)}). Tables go into an .npz: "
        "np.savez('table.npz', x_train=…, y_train=…, x_test=…, y_test=…)"
    )


def extract(archive: Path, destination: Path) -> None:
    """Unpack into a new folder: all of it or, if anything is refused or fails, none of it."""
    if destination.exists():
        raise DataError(f"{destination} already exists: remove it, or choose another place to unpack to")
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".unpack-", dir=destination.parent))
    try:
        for name, data in open_tree(archive).read(lambda name: True):
            target = staging / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:  # x: a name that differs in case only must not overwrite
                    file.write(data)
            except OSError as error:
                raise DataError(f"{archive}: member {name!r} cannot be written: {error}") from error
        os.rename(staging, destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _safe_name(path: Path, raw: str) -> str:
    """Return the member's name without a leading `./`; refuse one that could point outside the archive's folder."""
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    suspect = (
        raw.startswith("/")
        or ".." in parts
        or "\\" in raw
        or re.match(r"[A-Za-z]:", raw) is not None
        or any(ord(character) < 32 for character in raw)
    )
    if suspect:
        raise DataError(f"{path}: member {raw!r} refused: its name points outside the archive's own folder")
    return "/".join(parts)


class _Tally:
    """Count members as they are listed, and refuse the first that is one too many, too large or a repeat."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._packed = path.stat().st_size
        self._members = self._bytes = 0
        self._seen: set[str] = set()

    def add(self, raw: str, size: int, is_folder: bool) -> str:
        name = _safe_name(self._path, raw)
        self._members += 1
        self._bytes += size
        limits, where = self._limits, f"{self._path}: member {raw!r}"
        if self._members > limits.members:
            raise DataError(f"{self._path} refused: it has more than {limits.members:,} members")
        if size < 0 or size > limits.member_bytes:
            raise DataError(f"{where} refused: {size:,} bytes; the limit is {limits.member_bytes:,}")
        if self._bytes > limits.total_bytes:
            raise DataError(f"{self._path} refused: it unpacks to more than {limits.total_bytes:,} bytes")
        limits.allow(str(self._path), self._bytes, self._packed)
        if not is_folder:
            if not name or name in self._seen:
                raise DataError(f"{where} refused: the archive has it twice, or without a name")
            self._seen.add(name)
        return name
