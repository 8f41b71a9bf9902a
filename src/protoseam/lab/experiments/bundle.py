"""A study that travels: its finished runs and the newest checkpoint of each unfinished one, in files of limited size.

``DIR/part-000``, ``part-001``, … are the pieces of one compressed tar archive; ``DIR/manifest.json`` has their sizes
and SHA-256. So a machine that is lent for ten minutes can hand a run of fifteen on to the next.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from protoseam.errors import DataError
from protoseam.lab.data.archives import extract
from protoseam.lab.data.links import refuse_links
from protoseam.lab.engine.config import ConfigError, unlike
from protoseam.lab.engine.files import explain_os_error, read_bounded, read_json, write_atomically, write_json
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.schemas import WORD, Schema, check, listed, record, whole
from protoseam.lab.experiments.study import done, read_study, working_directory

PART_MIB = 15
_MANIFEST = "manifest.json"
_PARTS: Schema = {
    "format": whole(1, 1),
    "parts": listed(record({"size": whole(1, 2**31), "sha256": WORD}), 1),
}


class Unpacked(NamedTuple):
    """Names of runs that an archive brought, and of those it did not because the study had as much already."""

    taken: list[str]
    kept: list[str]


def pack(study: Path, out: Path, *, part_bytes: int = PART_MIB * 2**20) -> list[Path]:
    """Write the study as an archive in parts, into the new or empty folder ``out``.

    Args:
        study: a study's directory; its runs must not be training.
        out: where the parts and the manifest go.
        part_bytes: size of the largest part.

    Returns:
        The files written, the manifest last.

    Raises:
        ConfigError: if ``study`` does not exist or ``out`` holds something.
        RunLockedError: if a process is training one of the runs.
    """
    if not study.is_dir():
        raise ConfigError(f"there is no study in {study}: name the directory that holds its runs")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: remove what is in it, or choose another place for the parts")
    refuse_links(study)
    paths: list[Path] = []
    parts = []
    with explain_os_error("the parts", out, going_on=""), ExitStack() as stack:
        for path in _unfinished(study):
            stack.enter_context(RunDirectory.claim(path))
        out.mkdir(parents=True, exist_ok=True)
        archive = stack.enter_context(tempfile.TemporaryFile(dir=out))
        _write_archive(study, archive)
        archive.seek(0)
        while data := archive.read(part_bytes):
            paths.append(out / _part(len(paths)))
            parts.append({"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
            write_atomically(paths[-1], data)
        write_json(out / _MANIFEST, {"format": 1, "parts": parts})
    return [*paths, out / _MANIFEST]


def _part(number: int) -> str:
    return f"part-{number:03d}"


def _unfinished(study: Path) -> list[Path]:
    return sorted(path.parent for path in study.glob("unfinished/*/config.yaml"))


def _checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoints/epoch-*"))


def _members(study: Path) -> Iterator[Path]:
    """Finished runs, and of each unfinished one its files and its newest checkpoint."""
    yield from sorted(study.glob("*.json"))
    for run in _unfinished(study):
        yield from sorted(path for path in run.iterdir() if path.is_file() and path.name != "lock")
        for newest in _checkpoints(run)[-1:]:
            yield from sorted(newest.iterdir())


def _write_archive(study: Path, file: io.BufferedRandom | tempfile._TemporaryFileWrapper[bytes]) -> None:
    """The same runs give the same bytes: no times, no owners."""
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in _members(study):
            member = tarfile.TarInfo(path.relative_to(study).as_posix())
            member.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(member, content)


def unpack(folder: Path, study: Path) -> Unpacked:
    """Add the runs of a packed study to ``study``, which may be new.

    A run that is finished in ``study``, or further on there, is kept as it is. Nothing is added unless every part is
    what the manifest says and every file in the archive is one that a study has.

    Raises:
        DataError: if a part or a file of the archive is missing, damaged or not a study's.
        ConfigError: if an unfinished run has other settings in ``study``.
    """
    manifest = check(folder / _MANIFEST, read_json(folder / _MANIFEST), _PARTS)
    study.mkdir(parents=True, exist_ok=True)
    refuse_links(study)
    with tempfile.TemporaryDirectory(dir=study, prefix=".unpack-") as work:
        archive, staged = Path(work, "study.tar.gz"), Path(work, "study")
        with archive.open("wb") as file:
            for data in _verified(folder, manifest["parts"]):
                file.write(data)
        extract(archive, staged)
        _vet(staged)
        found = Unpacked([], [])
        for row in sorted(staged.glob("*.json")):
            if done(study, row.stem):
                found.kept.append(row.stem)
            else:
                os.rename(row, study / row.name)
                found.taken.append(row.stem)
        for run in _unfinished(staged):
            (found.taken if _adopt(run, study) else found.kept).append(run.name)
    return found


def _verified(folder: Path, parts: list[dict[str, Any]]) -> Iterator[bytes]:
    for i, part in enumerate(parts):
        path = folder / _part(i)
        try:
            data = read_bounded(path, part["size"])
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}): bring the parts again") from error
        if len(data) != part["size"] or hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise DataError(f"{path} is damaged: its SHA-256 is not the manifest's. Bring the parts again")
        yield data


def _vet(staged: Path) -> None:
    """Refuse an archive that holds anything but finished runs and run directories."""
    for path in staged.rglob("*"):
        place = path.relative_to(staged).parts
        top = path.suffix == ".json" if len(place) == 1 and path.is_file() else place[0] == "unfinished"
        if not top or "lock" in place:
            raise DataError(f"the archive holds {'/'.join(place)}, which no study has: it is refused")
    read_study(staged)
    for run in _unfinished(staged):
        RunDirectory(run).read_config()


def _adopt(staged: Path, study: Path) -> bool:
    """Move an unfinished run into the study; False where the study is at least as far."""
    if done(study, staged.name):
        return False
    target = working_directory(study, staged.name)
    with RunDirectory.claim(target) as directory:
        if (target / "config.yaml").exists():
            if found := unlike(directory.read_config(), RunDirectory(staged).read_config()):
                raise ConfigError(
                    f"{target} holds an unfinished run with other settings ({'; '.join(found)}): move it away, and "
                    "unpack again"
                )
            here, there = ([path.name for path in _checkpoints(run)[-1:]] for run in (target, staged))
            if here >= there:
                return False
        for path in target.iterdir():
            if path.name == "checkpoints":
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        for path in sorted(staged.iterdir(), key=lambda path: path.name == "config.yaml"):
            os.rename(path, target / path.name)  # config.yaml last: with it the run exists
    return True
