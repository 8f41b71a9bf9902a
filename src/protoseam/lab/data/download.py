"""Downloads: https only, resumed after an interruption, and never used before their SHA-256 is right."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from protoseam.errors import DataError
from protoseam.lab.data.cache import sha256_of
from protoseam.lab.data.catalog import SourceFile
from protoseam.lab.data.links import refuse_link

_CHUNK = 2**18
_ATTEMPTS = 4
_TIMEOUT_SECONDS = 60.0
_UNKNOWN_SIZE_LIMIT = 16 * 2**30

Report = Callable[[int, int | None], None]  # bytes so far, bytes in all


def require_address(url: str, allowed: str = "https://") -> None:
    """Refuse an address that does not begin as it must. The tests allow their own loopback server."""
    if not url.lower().startswith(allowed) or not urlsplit(url).hostname:
        raise DataError(
            f"{url} refused: only {allowed} addresses are downloaded from, as anyone on the way can alter the rest"
        )


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        try:
            require_address(urljoin(req.full_url, newurl), self._allowed)
        except DataError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Unreachable(Exception):
    """The host does not exist or is not what it claims to be: another attempt would fail too."""


class _Interrupted(Exception):
    """The connection broke or ended early. What has arrived is kept and not asked for again."""


def download(
    file: SourceFile,
    folder: Path,
    *,
    sha256: str | None = None,
    allowed: str = "https://",
    report: Report | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Fetch `file` into `folder` and return its path; at once if it is already there and whole.

    What arrives goes to <name>.part, which the next attempt (of this call or a later one) continues. The file gets its
    proper name only when its SHA-256 equals the catalogue's, or the user's own `sha256`.
    """
    expected = _expected_hash(file, sha256)
    file = replace(file, size=file.size if sha256 in (None, file.sha256) else None)  # the user's own version
    target = folder / file.name
    by_hand = f"fetch it by other means and put it at {target} (SHA-256 {expected})"
    if target.is_file():
        if (found := sha256_of(target)) == expected:
            return target
        raise DataError(f"{target} has the SHA-256 {found}, not {expected}: move it away, or {by_hand}")
    require_address(file.url, allowed)
    _make_room(folder, file)
    part = folder / f"{file.name}.part"
    refuse_link(part)
    opener = urllib.request.build_opener(_CheckedRedirects(allowed))
    for attempt in range(_ATTEMPTS):
        resumed = part.exists() and part.stat().st_size > 0
        try:
            _transfer(opener, file, part, report)
        except _Interrupted as error:
            if attempt + 1 < _ATTEMPTS:
                pause(2.0**attempt)
                continue
            so_far = part.stat().st_size if part.exists() else 0
            of_all = f" of {file.size:,}" if file.size else ""
            raise DataError(
                f"{file.url} stopped after {so_far:,}{of_all} bytes ({error}); run the same command again to "
                f"continue from there, or {by_hand}"
            ) from error
        except _Unreachable as error:
            raise DataError(
                f"{file.url} cannot be reached ({error}); if this machine is offline, {by_hand}"
            ) from error
        except urllib.error.HTTPError as error:
            raise DataError(f"{file.url} was answered with {error.code} {error.reason}; {by_hand}") from error
        if (found := sha256_of(part)) == expected:
            os.replace(part, target)
            return target
        part.unlink()
        if not resumed:  # a part of an older version may explain it otherwise: then once more from the start
            raise DataError(
                f"what {file.url} sent was deleted, as its SHA-256 is {found} and not {expected}: the file was "
                f"altered on the way or has been replaced at its source; {by_hand}"
            )
    raise DataError(f"{file.url} could not be fetched in {_ATTEMPTS} attempts; {by_hand}")


def _expected_hash(file: SourceFile, given: str | None) -> str:
    expected = given or file.sha256
    if expected is None:
        raise DataError(
            f"no checksum is known for {file.name}, so it cannot be told from a forgery; find its SHA-256 at a "
            "source you trust and pass it (--sha256 on the command line)"
        )
    expected = expected.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{64}", expected):
        raise DataError(f"{expected!r} is not a SHA-256: it must be 64 hexadecimal digits")
    return expected


def _make_room(folder: Path, file: SourceFile) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be made or used ({error.strerror or error}): choose another with "
            "PROTOSEAM_DATA, or --root of `protoseam data`"
        ) from error
    if file.size and free < file.size:
        raise DataError(
            f"{file.name} needs {file.size:,} bytes but {folder} has {free:,} left: free some space, or choose "
            "another folder with PROTOSEAM_DATA, or --root of `protoseam data`"
        )


def _transfer(
    opener: urllib.request.OpenerDirector, file: SourceFile, part: Path, report: Report | None
) -> None:
    """Make one request and append what arrives; return when the server says that was all."""
    have = part.stat().st_size if part.exists() else 0
    if file.size is not None and have >= file.size:
        return  # complete, or too long and about to fail its checksum
    headers = {"User-Agent": "protoseam", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        request = urllib.request.Request(file.url, headers=headers)
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            begins = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not begins or int(begins[1]) != have:
                have = 0  # the server sends the whole file, so what is there already goes
            length = answer.headers.get("Content-Length", "")
            total = have + int(length) if length.isdecimal() else file.size
            _receive(answer, part, have, total, file, report)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            return  # nothing left to send: complete, or of another version; the checksum decides
        if error.code >= 500 or error.code in (408, 429):
            raise _Interrupted(f"the server answered {error.code} {error.reason}") from error
        raise
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        final = isinstance(reason, (socket.gaierror, ssl.SSLCertVerificationError))
        raise (_Unreachable if final else _Interrupted)(f"{type(reason).__name__}: {reason}") from error


def _receive(
    answer: Any, part: Path, have: int, total: int | None, file: SourceFile, report: Report | None
) -> None:
    limit = file.size or _UNKNOWN_SIZE_LIMIT
    with part.open("r+b" if have else "wb") as out:
        out.seek(have)
        try:
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                if have > limit:
                    break
                if report:
                    report(have, total)
        finally:
            out.flush()
            os.fsync(out.fileno())
    if have > limit:
        part.unlink()
        raise DataError(f"{file.url} sent more than the {limit:,} bytes {file.name} has; it was deleted")
    if total is not None and have < total:
        raise _Interrupted(f"the connection ended {total - have:,} bytes early")


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """Show a progress bar on a terminal, and one line per tenth elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        last = -1

        def report(done: int, total: int | None) -> None:
            nonlocal last
            tenth = done * 10 // total if total else done // (50 * 2**20)
            if tenth > last:
                last = tenth
                of_all = f" of {total / 1e6:.1f} MB ({done / total:.0%})" if total else " MB"
                print(f"{name}: {done / 1e6:.1f}{of_all}", file=sys.stderr, flush=True)

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    speed = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress("{task.description}", BarColumn(), *speed, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
