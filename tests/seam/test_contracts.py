"""What the library promises about its names: abstract bases, errors, options declared once, what a repr shows."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import lifted

import protoseam as ps
from protoseam.seam.options import OPTIONS, Option, Options, checked

ROOT = Path(ps.__file__).parent
SOURCES = [
    ROOT / "errors.py",
    *(p for room in ("core", "seam", "theory") for p in (ROOT / room).glob("*.py")),
]


def test_an_unfinished_estimator_fails_when_it_is_made() -> None:
    class Unfinished(ps.AbstractCovariance):
        def bind(self, num_classes: int, dim: int) -> None:
            self.register_buffer("factors", torch.ones(1, 1))

    with pytest.raises(TypeError, match="refresh"):
        Unfinished()
    assert {"floor", "structure", "refreshes"} <= vars(ps.AbstractCovariance).keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_deliberate_error_is_the_librarys(path: Path) -> None:
    own = set(dir(ps))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        ):
            assert node.exc.func.id in own | {"error"}, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ps.ArgumentError, ValueError),
        (ps.ArgumentTypeError, TypeError),
        (ps.SeamError, RuntimeError),
        (ps.SplitError, ValueError),
        (ps.MissingDependencyError, ModuleNotFoundError),
    ],
)
def test_errors_are_also_the_builtin_kind(error: type[Exception], kind: type[Exception]) -> None:
    assert issubclass(error, ps.ProtoSeamError)
    assert issubclass(error, kind)


def test_a_misspelt_name_is_an_error_for_the_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text(
        "import protoseam as ps\nps.ExactCovarience()\nps.lift(1, alpah=2.0)\nps.ExactCovariance()\n"
    )
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--cache-dir",
        str(tmp_path),
        str(user),
    ]
    found = subprocess.run(command, capture_output=True, text=True, env={"MYPYPATH": str(ROOT.parent)})
    assert "user.py:2: error" in found.stdout
    assert "ExactCovarience" in found.stdout
    assert 'user.py:3: error: Unexpected keyword argument "alpah"' in found.stdout
    assert "user.py:4" not in found.stdout


def test_an_option_is_declared_once() -> None:
    for function in (ps.lift, ps.Lifted.__init__):
        shown = inspect.signature(function).parameters
        for name, option in OPTIONS.items():
            assert shown[name].default == option.default
            assert f"{name}: {option.description}" in function.__doc__
    assert OPTIONS.keys() == Options.__annotations__.keys()
    from protoseam.lab.engine.config import LiftConfig

    config = LiftConfig()
    for name in ("alpha", "draws", "antithetic", "init", "class_weights"):
        assert getattr(config, name) == OPTIONS[name].default
        assert OPTIONS[name].description in LiftConfig.__doc__


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        (Option(1.0, "", above=0), (1e-9, 5, None), (0, -1.0, float("inf"), float("nan"))),
        (Option(0.0, "", least=0, below=1), (0, 0.99), (1, -1e-9)),
        (Option("a", "", choices=("a", "b")), ("a", "b"), ("c", "")),
        (Option(None, ""), (-1, "x", None), ()),
    ],
    ids=str,
)
def test_bounds_of_an_option(option: Option, good: tuple, bad: tuple) -> None:
    for value in good:
        option.check("x", value)
    for value in bad:
        with pytest.raises(ps.ArgumentError, match="x must be"):
            option.check("x", value)
    assert checked({"alpha": 3.0})["alpha"] == 3.0
    assert checked({"alpha": 3.0})["draws"] is None


def test_a_repr_shows_what_a_network_is() -> None:
    shown = repr(lifted(covariance=ps.RunningCovariance(floor=0.2)))
    assert "classes=4, width=3, schedule=SineAnneal(rho_min=4, rho_max=8)" in shown
    assert "RunningCovariance(floor=0.2" in shown


def test_a_network_can_be_pickled() -> None:
    net = lifted()
    again = pickle.loads(pickle.dumps(net))  # noqa: S301
    assert torch.equal(again.prototypes, net.prototypes)
    again.load_state_dict(net.state_dict())
