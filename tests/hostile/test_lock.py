"""requirements.lock pins what constraints.txt pins, and every package in it by SHA-256."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    return {
        canonical(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }


def test_the_lock_agrees_with_the_constraints() -> None:
    locked = pins((ROOT / "requirements.lock").read_text())
    for name, version in pins((ROOT / "constraints.txt").read_text()).items():
        assert locked.get(name) == version, f"{name}: run .ci/lock.py again"


def test_the_lock_covers_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    wanted += [line for extra in ("vision", "report", "dev") for line in extras[extra]]
    names = {canonical(re.split(r"[<>=!~;\[ ]", line)[0]) for line in wanted}
    assert names <= pins((ROOT / "requirements.lock").read_text()).keys()


def test_every_package_has_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    entries = body.replace("\\\n", " ").splitlines()
    assert len(entries) > 60
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+", entry.strip()), entry[:80]
