"""Read a checkpoint with no more memory than its file has bytes.

An untrusted archive may run code, be compressed, ask for large objects in a few bytes, or hold tensors larger than
their storage. Checkpoints of this library do none of that, and archives that do are refused.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protoseam.errors import ProtoSeamError

_MOST_INSTRUCTIONS = 8 * 2**20  # bytes that describe the tensors, about 200 each
_NAMES = re.compile(r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch [A-Z]\w+Storage")


class Unbounded(ProtoSeamError, ValueError):
    """Reading a state could take more memory than its file has bytes; the message says why."""


def load_bounded(path: Path, map_location: torch.device | str) -> Any:
    """``torch.load`` of tensors and plain values, refused before it takes more memory than the file.

    Raises:
        Unbounded: the archive is compressed, asks for other objects, or has tensors that are larger than the file.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise Unbounded("it is compressed, which no checkpoint of this library is")
        if sum(member.file_size for member in members) > size:
            raise Unbounded("its parts overlap")
        instructions = [member for member in members if member.filename.endswith("data.pkl")]
        if sum(member.file_size for member in instructions) > _MOST_INSTRUCTIONS:
            raise Unbounded(f"its description of the tensors is over {_MOST_INSTRUCTIONS:,} bytes")
        for member in instructions:
            _inspect(archive.read(member))
    described = torch.load(path, map_location="meta", weights_only=True)  # shapes alone
    needed = bytes_of(described)
    if needed > size:
        raise Unbounded(f"its tensors need {needed:,} bytes, and the file has {size:,}")
    return torch.load(path, map_location=map_location, weights_only=True)


def bytes_of(state: Any) -> int:
    """Return the bytes that the tensors in nested dicts and lists take in memory."""
    return sum(t.numel() * t.element_size() for t in _tensors(state))


def _inspect(instructions: bytes) -> None:
    for instruction, argument, _ in pickletools.genops(instructions):
        if instruction.name == "STACK_GLOBAL" or (
            instruction.name in ("GLOBAL", "INST") and not _NAMES.fullmatch(str(argument))
        ):
            asked = str(argument or "computed while loading").replace(" ", ".")
            raise Unbounded(
                f"it asks for the Python object {asked}, which no checkpoint of this library does"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts and lists, each container once, because a pickle can repeat one."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
