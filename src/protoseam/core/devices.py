"""Where a formula has a kernel of its own."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["cuda_kernels"]


def cuda_kernels(t: Tensor) -> Any | None:
    """:mod:`protoseam.core.kernels` for tensors on a CUDA device, if Triton is there and nothing is being traced."""
    return _kernels() if t.is_cuda and not torch.compiler.is_compiling() else None


@functools.cache
def _kernels() -> Any | None:
    try:
        return importlib.import_module("protoseam.core.kernels")
    except ImportError:
        return None
