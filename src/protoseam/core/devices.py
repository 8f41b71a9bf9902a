"""Where a formula has a kernel of its own."""

from __future__ import annotations

import functools
import importlib
import warnings
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
        module = importlib.import_module("protoseam.core.kernels")
        # the first launch builds a launcher, for which it needs a C compiler
        module.repulsion(torch.zeros(2, 16, device="cuda"), 1.0)
    except ImportError:
        return None
    except Exception as error:  # whatever a missing compiler, header or driver makes of it
        warnings.warn(
            f"Triton cannot run here ({error}): slower operations of torch are used. A C compiler and Python's headers "
            "are what it usually lacks",
            stacklevel=2,
        )
        return None
    return module
