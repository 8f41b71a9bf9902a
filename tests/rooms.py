"""The rooms of the house and which of them import which, read from the source.

    python tests/rooms.py

prints one line per room: ``lab.engine → core, errors, seam, …``. `test_imports.py` compares the same edges with the
rule. A room is a folder of `src/protoseam` or of `src/protoseam/lab`, or a module at the top.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "protoseam"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """``protoseam.lab.engine.step`` → ``lab.engine``; ``protoseam`` itself → ``protoseam``."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["lab"] else 1]) or "protoseam"


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(source: str, module: str, *, package: bool = False) -> set[str]:
    """Return every dotted name that `source` imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = node.level - package
            base = ".".join(module.split(".")[: -up or None]) if node.level else ""
            base = ".".join(filter(None, [base, node.module or ""]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_imports(module: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules of this project that `module` imports: the longest known prefix of each name."""
    found = set()
    for name in imported(path.read_text(encoding="utf-8"), module, package=path.name == "__init__.py"):
        parts = name.split(".")
        if parts[0] == "protoseam":
            found.add(next(p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in known))
    return found - {module}


def edges() -> dict[str, set[str]]:
    """Return room → the other rooms it imports."""
    found: dict[str, set[str]] = {}
    known = modules()
    for module, path in known.items():
        own = found.setdefault(room(module), set())
        own |= {room(other) for other in own_imports(module, path, set(known))} - {room(module)}
    return found


if __name__ == "__main__":
    for name, others in sorted(edges().items()):
        print(f"{name:<16} → {', '.join(sorted(others)) or '–'}")
