"""The wheel: it builds from the tree, and its library needs torch and numpy alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import protoseam

ROOT = Path(__file__).parents[2]
TREE = ("src", "pyproject.toml", "README.md", "LICENSE")

LIFT = """
import torch
import protoseam as ps

torch.manual_seed(0)
y = torch.arange(120) % 3
x = torch.nn.functional.one_hot(y, 8).float() * 4 + torch.randn(120, 8)
loader = [(x[i : i + 12], y[i : i + 12]) for i in range(0, 120, 12)]
net = ps.lift(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)), dim=4)
optimizer = torch.optim.AdamW(net.param_groups(lr=1e-2))
for _ in net.epochs(loader, 5):
    for inputs, labels in loader:
        optimizer.zero_grad()
        net.objective(inputs, labels).total.backward()
        optimizer.step()
plain = net.deploy(fold=True)
assert type(plain[2]) is torch.nn.Linear
assert (plain(x).argmax(1) == y).float().mean() > 0.9
print(ps.__version__, ps.__file__)
"""


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def _link_with_needs(package: str, folder: Path) -> None:
    """Link an installed package, and those it requires, into ``folder``."""
    try:
        found = distribution(package)
    except PackageNotFoundError:  # another system's
        return
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    if all((folder / top).exists() for top in tops):
        return
    for top in tops:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    for requirement in found.requires or ():
        if "extra ==" not in requirement:
            _link_with_needs(re.split(r"[^\w.-]", requirement)[0], folder)


def test_the_wheel_installs_lifts_and_deploys_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    tree, installed, needed = tmp_path / "tree", tmp_path / "installed", tmp_path / "needed"
    tree.mkdir()
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree)
    built = _python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree))
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"protoseam-{protoseam.__version__}-py3-none-any.whl"
    pip = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--no-index",
        "--target",
        str(installed),
    )
    done = _python(*pip, str(wheel))
    assert done.returncode == 0, done.stderr
    assert (installed / "protoseam" / "py.typed").exists()
    needed.mkdir()
    for package in ("torch", "numpy"):
        _link_with_needs(package, needed)
    alone = f"{installed}{os.pathsep}{needed}"
    lifted = _python("-S", "-c", LIFT, PYTHONPATH=alone)  # -S: nothing that is installed beside them is seen
    assert lifted.returncode == 0, lifted.stderr
    assert lifted.stdout.split() == [protoseam.__version__, str(installed / "protoseam" / "__init__.py")]
    # without the extra, the command says which one it needs
    bare = _python("-S", "-m", "protoseam", "train", "--data", "digits", PYTHONPATH=alone)
    assert bare.returncode == 1
    assert "protoseam[lab]" in bare.stderr
