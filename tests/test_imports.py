"""The one-way street: which room may import which, read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "protoseam"
MODULES = sorted(ROOT.rglob("*.py"))

# What each room may import beside itself and errors.py, which everyone may.
BELOW = {"core", "seam", "models", "data"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "theory": {"core"},
    "seam": {"core"},
    "models": set(),
    "data": set(),
    "adapters": {"core", "seam"},
    "engine": BELOW | {"theory"},
    "experiments": BELOW | {"engine", "theory"},
    "report": BELOW | {"engine", "theory", "experiments"},
    "cli": BELOW | {"engine", "theory", "experiments", "report"},
    "errors": set(),
    "__init__": {"core", "seam"},  # the names users meet
}
# protoseam's own names, re-exported from core and seam: `import protoseam as ps` counts as those
PUBLIC = {"core", "seam"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> set[str]:
    """The rooms a module imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT.parent).parts[: -node.level]) if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if base == "protoseam" else base for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top != "protoseam":
                continue
            first = rest.split(".")[0]
            known = first in ALLOWED
            found |= {first} if known else PUBLIC if not first.startswith("__") else set()
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = room(path)
    assert own in ALLOWED, f"{own} is a new room: say in this test what it may import"
    reversed_ = imports(ast.parse(path.read_text(encoding="utf-8")), path) - ALLOWED[own] - {own, "errors"}
    assert not reversed_, (
        f"{path.relative_to(ROOT)} imports {sorted(reversed_)}, but {own} may only import {ALLOWED[own]}"
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import protoseam.cli.main", {"cli"}),
        ("from protoseam.engine import trainer", {"engine"}),
        ("from protoseam import core, data", {"core", "data"}),
        ("from protoseam import lift", {"core", "seam"}),
        ("import protoseam as ps", {"core", "seam"}),
        ("def f():\n    from protoseam.report import html", {"report"}),
        ("from ..engine import config", {"engine"}),
        ("from .. import engine", {"engine"}),
        ("from . import covariance", {"core"}),
        ("from protoseam import __version__", set()),
        ("import torch\nfrom torch import nn", set()),
    ],
)
def test_the_reader_of_imports(source: str, found: set[str]) -> None:
    assert imports(ast.parse(source), ROOT / "core" / "objective.py") == found


def test_the_lowest_room_needs_torch_alone() -> None:
    for path in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            third_party = {n.split(".")[0] for n in names} - {
                "torch", "protoseam", "math", "collections", "typing", "dataclasses", "contextlib", "__future__",
                "functools", "importlib", "warnings",
            }  # fmt: skip
            if path.name == "kernels.py":  # loaded for CUDA tensors only, and only where Triton is
                third_party -= {"triton"}
            assert not third_party, f"{path.name} imports {third_party}"
