"""No line of the library unpickles, evaluates or hands a string to a shell: its syntax trees are searched for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import protoseam

SOURCES = sorted(Path(protoseam.__file__).parent.rglob("*.py"))
# The one module that may: it lists a pickle's instructions before it follows the few that are harmless.
UNPICKLER = "data/pickles.py"
IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__", "breakpoint"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
ARCHIVES = ("extractall", "extract", "unpack_archive")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, f"import {n}") for n in names if n.split(".")[0] in IMPORTS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {k.arg: k.value for k in node.keywords}

            def is_not(argument: str, value: bool, given: dict[str | None, ast.expr] = given) -> bool:
                found = given.get(argument)
                return not (isinstance(found, ast.Constant) and found.value is value)

            if name in BUILTINS | SHELLS | YAML:
                yield node.lineno, name
            if "shell" in given and is_not("shell", False):
                yield node.lineno, f"{name}(shell=…)"
            if name in ("torch.load", "load_state_dict_from_url") and is_not("weights_only", True):
                yield node.lineno, f"{name} without weights_only=True"
            if name in ("np.load", "numpy.load") and is_not("allow_pickle", False):
                yield node.lineno, f"{name} without allow_pickle=False"
            if name.startswith("torch.") and name.endswith(
                ("jit.load", "hub.load", "package.PackageImporter")
            ):
                yield node.lineno, name
            if name.rpartition(".")[2] in ARCHIVES and "." in name and not name.startswith("archives."):
                yield node.lineno, f"{name}: unpack with protoseam.lab.data.archives.extract"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_of_the_kind_is_called(path: Path) -> None:
    found = list(offences(ast.parse(path.read_text(encoding="utf-8"))))
    if path.as_posix().endswith(UNPICKLER):
        found = [offence for offence in found if offence[1] != "import pickle"]
    assert not found, f"{path}: {found}"


def test_the_unpickler_uses_pickle_only_as_a_base_class() -> None:
    path = next(path for path in SOURCES if path.as_posix().endswith(UNPICKLER))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.Unpickler"}
    bases = [dotted(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    assert bases == ["pickle.Unpickler"]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from joblib import load", "eval('1')", "exec(text)", "subprocess.run(c, shell=True)",
        "subprocess.run(c, shell=flag)", "os.system(c)", "torch.load(p)", "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=flag)", "np.load(p)", "np.load(p, allow_pickle=True)", "yaml.load(t, L)",
        "torch.hub.load(r, m)", "archive.extractall(d)", "torch.jit.load(p)", "import cloudpickle as c",
    ],
)  # fmt: skip
def test_the_search_finds(line: str) -> None:
    assert list(offences(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(p, weights_only=True)",
        "np.load(p, allow_pickle=False)",
        "yaml.safe_load(t)",
        "model.eval()",
        "re.compile(r)",
    ],
)
def test_the_search_lets_pass(line: str) -> None:
    assert not list(offences(ast.parse(line)))
