"""The one-way street: which room may import which, and that the library needs torch and numpy alone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import rooms

LIBRARY = {"core", "seam", "theory", "errors", "protoseam"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "seam": {"core", "errors"},
    "theory": {"core", "errors"},
    "protoseam": {"core", "seam", "theory", "errors"},  # the names users meet
    "adapters": {"core", "seam", "errors", "protoseam"},
    "__main__": {"lab.cli"},
    "lab": set(),
    "lab.data": {"lab", "errors"},
    "lab.models": {"lab", "errors"},
    "lab.kernels": {"lab", "lab.models", "core", "errors"},
    "lab.pipeline": {"lab", "lab.data", "lab.kernels", "errors"},
    "lab.audit": {"lab", "core", "theory", "errors"},
    "lab.engine": {"lab", "lab.audit", "lab.data", "lab.models", "lab.kernels", "lab.pipeline", *LIBRARY},
}
ALLOWED["lab.experiments"] = ALLOWED["lab.engine"] | {"lab.engine"}
ALLOWED["lab.report"] = ALLOWED["lab.experiments"] | {"lab.experiments"}
ALLOWED["lab.cli"] = ALLOWED["lab.report"] | {"lab.report"}


@pytest.mark.parametrize(
    ("room", "others"), sorted(rooms.edges().items()), ids=lambda v: v if v is str else ""
)
def test_imports_go_one_way(room: str, others: set[str]) -> None:
    assert room in ALLOWED, f"{room} is a new room: say in this test what it may import"
    assert not others - ALLOWED[room], f"{room} imports {sorted(others - ALLOWED[room])}, which lie above it"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import protoseam.lab.cli.main", {"protoseam.lab.cli.main"}),
        ("from protoseam.lab.engine import step", {"protoseam.lab.engine.step"}),
        ("def f():\n    from protoseam import core, theory", {"protoseam.core", "protoseam.theory"}),
        ("from ..seam import lift", {"protoseam.seam.lift"}),
        ("from . import covariance", {"protoseam.core.covariance"}),
        ("import torch\nfrom torch import nn", {"torch", "torch.nn"}),
    ],
)
def test_the_reader_of_imports(source: str, found: set[str]) -> None:
    assert rooms.imported(source, "protoseam.core.objective") == found


ROOT = Path(__file__).parents[1]
SCRIPTS = [path for folder in ("benchmarks", "torture") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_import_names_that_exist(script: Path) -> None:
    """Most benchmarks run on a device or for an hour, so nothing else here would notice a name that is gone."""
    for node in ast.walk(ast.parse(script.read_text())):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module is None or not module.startswith("protoseam") or module.endswith("kernels"):
            continue
        for alias in node.names:
            name = f"{module}.{alias.name}"
            assert hasattr(importlib.import_module(module), alias.name) or importlib.util.find_spec(name), (
                name
            )


TRAIN_WITH_NOTHING_ELSE = """
import importlib.metadata, sys

TORCH = {"torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"}
TORCH |= {"typing_extensions", "setuptools", "pkg_resources", "_distutils_hack"}
for name in set(importlib.metadata.packages_distributions()) - TORCH - {"numpy", "protoseam"}:
    sys.modules[name] = None  # an import of it now fails as if it were not installed
sys.modules["protoseam.lab"] = None
import torch
import protoseam as ps

for name in ps.__all__:
    getattr(ps, name)
import protoseam.theory
torch.manual_seed(0)
x, y = torch.randn(64, 5), torch.arange(64) % 3
x[:, 0] += 3.0 * y
loader = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
net = ps.lift(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)), num_classes=3)
opt = torch.optim.AdamW(net.param_groups(lr=1e-3))
for _ in net.epochs(loader, 2):
    for batch in loader:
        opt.zero_grad()
        net.objective(*batch).total.backward()
        opt.step()
plain = net.deploy(fold=True)
print(tuple(plain(x).shape), type(plain).__name__)
"""


def test_the_library_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN_WITH_NOTHING_ELSE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(64, 3) Sequential"


WITHOUT = """
import sys
from pathlib import Path
for name in {missing!r}:
    sys.modules[name] = None  # an import of it now fails as if it were not installed
from protoseam.__main__ import main
sys.argv = ["protoseam", *{words!r}]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("missing", "words", "told"),
    [
        (["yaml"], ["train", "--epochs=3"], ["protoseam train", "yaml", "pip install 'protoseam[lab]'"]),
        (
            ["safetensors", "safetensors.torch"],
            ["eval", "nowhere"],
            ["protoseam eval", "safetensors", "[lab]"],
        ),
        (["fcntl"], ["train"], ["fcntl", "WSL", "protoseam.lift"]),
    ],
)
def test_the_command_says_what_is_missing(missing: list[str], words: list[str], told: list[str]) -> None:
    code = WITHOUT.format(missing=missing, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in told), done.stderr


ADAPTERS = sorted(path for name, path in rooms.modules().items() if name.startswith("protoseam.adapters."))
HOSTS = {"huggingface": {"transformers"}}  # the other adapters are named as their host is


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_needs_its_own_host_alone(path: Path) -> None:
    names = rooms.imported(path.read_text(encoding="utf-8"), f"protoseam.adapters.{path.stem}")
    own = HOSTS.get(path.stem, {path.stem}) | {"torch", "numpy", "protoseam"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in names} <= own
    assert not [name for name in names if name.startswith("protoseam.adapters.")]
