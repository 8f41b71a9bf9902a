"""The kernels' registry, and every kernel against its plain function by Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch

from protoseam.lab import kernels

HERE = Path(__file__).parent


def test_kernels_equal_their_plain_functions_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_the_registry_names_what_exists() -> None:
    pytest.importorskip("triton")
    for launcher, plain in kernels.EQUALS.items():
        for name, root in ((launcher, "protoseam.lab.kernels"), (plain, "protoseam")):
            parts = name.split(".")
            modules = [i for i in range(len(parts), 0, -1) if _module(root, parts[:i])]
            module = importlib.import_module(".".join([root, *parts[: modules[0]]]))
            assert callable(reduce(getattr, parts[modules[0] :], module)), name


def _module(root: str, parts: list[str]) -> bool:
    try:
        return importlib.util.find_spec(".".join([root, *parts])) is not None
    except ModuleNotFoundError:
        return False


def test_on_a_cpu_plain_functions_run() -> None:
    assert kernels.find("step", torch.device("cpu")) is None
