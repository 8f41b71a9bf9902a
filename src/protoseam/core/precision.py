"""The one precision rule of the seam: never below float32, whatever autocast or the network does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["at_least_float32", "no_autocast"]


def at_least_float32(t: Tensor) -> Tensor:
    """``t`` itself if it is float32 or float64, else its float32 copy (bf16 and fp16 embeddings).

    Args:
        t: a floating-point tensor.

    Returns:
        ``t`` or its float32 copy.
    """
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products inside keep the precision of their factors; a device that knows no autocast needs no care."""
    # the question itself breaks a graph that torch 2.10 compiles
    known = device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)
    if not known or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
