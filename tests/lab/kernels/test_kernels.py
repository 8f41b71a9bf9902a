"""The kernels' registry, and every kernel against its plain function by Triton's interpreter."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
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
        assert callable(pkgutil.resolve_name(f"protoseam.lab.kernels.{launcher}"))
        assert callable(pkgutil.resolve_name(plain if plain.startswith("torch") else f"protoseam.{plain}"))


def test_on_a_cpu_plain_functions_run() -> None:
    assert kernels.find("step", torch.device("cpu")) is None
