"""How large a network would be, before it is: one that cannot fit is refused in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protoseam.errors import ModelError

__all__ = ["physical_memory", "refuse_too_large"]

_BYTES = 12  # a float32 weight, its gradient and its momentum


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(name: str, make: Callable[..., nn.Module], *args: Any, **options: Any) -> None:
    """Build the network without memory and count: raises `ModelError` if training it takes more than there is."""
    if options.get("pretrained"):  # of a size that exists, and not to be fetched twice
        return
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make(*args, **options).parameters())
    except (
        Exception
    ):  # whatever is wrong is said when the network is built; and some cannot be built like this
        return
    if _BYTES * count > physical_memory():
        raise ModelError(
            f"{name} with these model_options would have {count:,} parameters, and training them takes "
            f"{_BYTES * count / 2**30:,.0f} GiB; this machine has {physical_memory() / 2**30:,.0f}: choose smaller ones"
        )
