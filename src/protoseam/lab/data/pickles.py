"""The pickles inside the official CIFAR archives, read without running anything they ask for.

A pickle is a program, and this reader does not trust it. It lists the instructions and compares them with those a
CIFAR file needs. The few names a file may mention stand for small inert classes of this module, so not even numpy's
own unpickling code runs. Arrays are rebuilt here, after their shape, type and length have been checked.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protoseam.errors import DataError

MAX_BYTES = 512 * 2**20  # CIFAR-100's train file, the largest there is, has 155 MB
_MAX_INSTRUCTIONS = 5_000_000  # CIFAR-100's train file has about 400,000

_NEEDED = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1
STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8
EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_INSTRUCTIONS = frozenset(_NEEDED.split())


class _Array:
    """Stands for numpy's ndarray and for the function that makes an empty one; keeps the state, unopened."""

    def __init__(self, *arguments: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Dtype:
    """Stands for numpy's dtype; keeps the type code."""

    def __init__(self, code: object = None, *arguments: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass  # byte order and field layout do not matter for single bytes


class _Encode:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes into a protocol-2 pickle."""

    def __new__(cls, text: object, codec: object = "latin1") -> Any:
        if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
            raise DataError("it encodes text in a way the CIFAR files do not")
        return text.encode("latin-1")

    def __setstate__(self, state: object) -> None:
        pass


# Classes, never functions: a pickle may set attributes on what it names, and on a class that fails.
_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _Encode,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise DataError(f"the pickle asks for {module}.{name}") from None

    def persistent_load(self, pid: object) -> Any:
        raise DataError("the pickle asks for an object stored elsewhere")


def read_cifar_pickle(data: bytes, where: str) -> dict[str, Any]:
    """Return the pickled dict with keys as text, `data` arrays as uint8 and everything else as plain values."""
    try:
        if len(data) > MAX_BYTES:
            raise DataError(f"it has {len(data):,} bytes, more than the {MAX_BYTES:,} such a file may have")
        _inspect(data)
        # "bytes" leaves the byte strings that Python 2 wrote as they are
        loaded = _RestrictedUnpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise DataError(f"it holds a {type(loaded).__name__}, not the dict of a CIFAR file")
        return {_text(key): _plain(value) for key, value in loaded.items()}
    except DataError as error:
        raise DataError(f"{where} refused: {error}; fetch it again from the official source") from error
    except Exception as error:
        raise DataError(
            f"{where} cannot be read: it is damaged or not a CIFAR file ({type(error).__name__}: {error}); "
            "fetch it again from the official source"
        ) from error


def _inspect(data: bytes) -> None:
    """List the instructions without following them, and refuse those that no CIFAR file needs."""
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if count > _MAX_INSTRUCTIONS:
            raise DataError(f"the pickle has more than {_MAX_INSTRUCTIONS:,} instructions")
        if instruction.name not in _INSTRUCTIONS:
            raise DataError(f"the pickle uses the instruction {instruction.name}")
        if instruction.name == "GLOBAL":
            # its argument is "module name", so it is refused before it is followed
            module, _, name = str(argument).partition(" ")
            if (module, name) not in _STAND_INS:
                raise DataError(f"the pickle asks for {module}.{name}")
        # Honest picklers number their memos one by one. The unpickler allocates a table up to the highest
        # number it meets, so a single instruction could otherwise claim all memory.
        if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= count + 1:
            raise DataError(f"the pickle numbers a memo {argument} after {count} instructions")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value
    raise DataError(f"a key or name is a {type(value).__name__}, not text")


def _plain(value: object) -> Any:
    if isinstance(value, _Array):
        return _rebuild(value.state)
    if isinstance(value, (str, bytes)):
        return _text(value)
    if isinstance(value, list) and all(isinstance(item, (str, bytes)) for item in value):
        return [_text(item) for item in value]
    return value


def _rebuild(state: object) -> NDArray[np.uint8]:
    """numpy's array state: (version, shape, dtype, column by column?, bytes)."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise DataError("an array in it has no proper state")
    _, shape, dtype, by_column, raw = state
    if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", b"u1", "|u1", b"|u1"):
        raise DataError(f"an array in it has type {getattr(dtype, 'code', dtype)!r}, not single bytes (u1)")
    if isinstance(raw, str):
        raw = raw.encode("latin-1")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise DataError(f"an array in it has the shape {shape!r}")
    held = len(raw) if isinstance(raw, bytes) else -1
    if len(shape) != 2 or held != math.prod(shape):
        raise DataError(f"an array of shape {shape} in it has {max(held, 0)} bytes")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if by_column else "C")
