"""A PostgreSQL server of one's own for as long as a test takes, from binaries found here; as user postgres if root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

__all__ = ["missing", "postgres"]


def _binaries() -> Path | None:
    on_path = shutil.which("initdb")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(on_path).parent if on_path else found[-1].parent if found else None


def missing() -> str | None:
    """What would have to be installed to start a server and talk to it, or None."""
    if _binaries() is None:
        return "PostgreSQL: no initdb on PATH or under /usr/lib/postgresql"
    return None if find_spec("psycopg") else "psycopg: pip install 'psycopg[binary]'"


@contextmanager
def postgres() -> Iterator[str]:
    """A server on a socket in a temporary directory; yields its URL."""
    binaries = _binaries()
    assert binaries is not None
    # it refuses to run as root
    prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    home = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has to be short
    home.chmod(0o777)

    def run(*words: str) -> None:
        subprocess.run([*prefix, *words], check=True, stdout=subprocess.DEVNULL, cwd=home)

    control = [str(binaries / "pg_ctl"), "-D", str(home / "data"), "-w", "-l", str(home / "log")]
    try:
        run(str(binaries / "initdb"), "-D", str(home / "data"), "-U", "torture", "-A", "trust")
        run(*control, "-o", f"-k {home} -c listen_addresses=''", "start")
        try:
            yield f"postgresql+psycopg://torture@/postgres?host={home}"
        finally:
            run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)
