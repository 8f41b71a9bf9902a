"""Bounded reading of untrusted files: forwards only, in small chunks, and never past the limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protoseam.errors import DataError

_CHUNK = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of what an archive may unpack to. tiny-imagenet-200.zip has 120,609 members and 260 MB."""

    members: int = 500_000
    member_bytes: int = 2**30
    total_bytes: int = 8 * 2**30
    ratio: float = 200.0  # photographs and idx files stay below 10
    ratio_free_bytes: int = 16 * 2**20  # small things may compress as well as they like
    remedy: str = "fetch the file again from its official source"

    def allow(self, what: str, size: int, packed: int) -> None:
        if size > self.ratio_free_bytes and size > self.ratio * max(packed, 1):
            raise DataError(
                f"{what} refused: {packed:,} bytes would unpack to {size:,} or more, which is the mark of a "
                f"decompression bomb; {self.remedy}"
            )


DEFAULT_LIMITS = Limits()


def inflate(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the data, decompressed if it is compressed, within the limits."""
    with damage_as_data_error(where, "compressed file"), decompressed(io.BytesIO(data)) as plain:
        return ForwardReader(plain, where, len(data), limits).read_all()


class ForwardReader(io.RawIOBase):
    """The stream that tarfile reads: forwards only, in bounded chunks, and no further than the limits.

    Otherwise tarfile would read a header's gigabyte-long name in one call, and every step back would make a gzip
    stream start over from its beginning.
    """

    def __init__(self, plain: IO[bytes], where: str, packed: int, limits: Limits) -> None:
        self._plain, self._where, self._packed, self._limits = plain, where, packed, limits
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _CHUNK:
            raise DataError(f"{self._where} refused: a header in it declares {size:,} bytes")
        data = self._plain.read(size)
        self._position += len(data)
        if self._position > self._limits.total_bytes:
            raise DataError(f"{self._where} refused: it unpacks to over {self._limits.total_bytes:,} bytes")
        self._limits.allow(self._where, self._position, self._packed)
        return data

    def _chunks(self, size: int) -> Iterator[bytes]:
        end = self._position + size
        while self._position < end:
            chunk = self.read(min(_CHUNK, end - self._position))
            if not chunk:
                raise DataError(f"{self._where} is cut short; fetch it again")
            yield chunk

    def read_exactly(self, size: int) -> bytes:
        return b"".join(self._chunks(size))

    def read_all(self) -> bytes:
        return b"".join(iter(lambda: self.read(_CHUNK), b""))

    def drain(self) -> None:
        while self.read(_CHUNK):
            pass

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self._position:
            raise DataError(f"{self._where} refused: its members are not stored one after the other")
        for _ in self._chunks(offset - self._position):
            pass
        return self._position


def decompressed(packed: IO[bytes]) -> IO[bytes]:
    """Return the stream, decompressed as its first bytes demand; the file's name does not matter."""
    magic = packed.read(6)
    packed.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=packed)  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(packed)
    if magic.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(packed)
    return packed


@contextmanager
def damage_as_data_error(where: Path | str, what: str) -> Iterator[None]:
    """Turn whatever a parser raises on damaged bytes into a `DataError` that names the file."""
    if isinstance(where, Path) and not where.is_file():
        raise DataError(f"{where} does not exist, or is not a file")
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{where} cannot be read as a {what}: it is damaged or cut short "
            f"({type(error).__name__}: {error}); fetch it again"
        ) from error
