"""Refuse a network that does not fit into memory before it is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protoseam.errors import ModelError

_BYTES = 12  # a float32 weight, its gradient and its momentum


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(name: str, make: Callable[..., nn.Module], /, *args: Any, **options: Any) -> None:
    """Count the parameters of a network without memory; raise ModelError if training it needs more than there is."""
    if options.get("pretrained"):  # such a network exists, and is not to be downloaded twice
        return
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make(*args, **options).parameters())
    except Exception:  # the real build reports what is wrong; and some networks cannot be built like this
        return
    if _BYTES * count > physical_memory():
        raise ModelError(
            f"{name} with these model_options would have {count:,} parameters, and training them takes "
            f"{_BYTES * count / 2**30:,.0f} GiB; this machine has {physical_memory() / 2**30:,.0f}: choose smaller ones"
        )
