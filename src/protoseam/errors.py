"""The errors that ProtoSeam raises on purpose: ``except ProtoSeamError`` catches all of them.

Each of them is also the built-in kind that Python users expect, ``ValueError`` or ``TypeError`` for instance.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DataError",
    "DataWarning",
    "MissingDependencyError",
    "ModelError",
    "ProtoSeamError",
    "SeamError",
    "SeamWarning",
    "SplitError",
]


class ProtoSeamError(Exception):
    """The base of every error that this library raises on purpose; the message says what to do."""


class ArgumentError(ProtoSeamError, ValueError):
    """An argument has a value that the function cannot use."""


class ArgumentTypeError(ProtoSeamError, TypeError):
    """An argument has a type that the function cannot use."""


class MissingDependencyError(ProtoSeamError, ModuleNotFoundError):
    """A package of an optional extra is not installed; the message names the extra."""


class SeamError(ProtoSeamError, RuntimeError):
    """Lifted training cannot continue; the message says what to change."""


class SeamWarning(UserWarning):
    """Lifted training continues, but probably not as intended."""


class SplitError(ProtoSeamError, ValueError):
    """A model cannot be cut at this layer; the message says why and what to do."""


class DataError(ProtoSeamError, ValueError):
    """A data set is missing, damaged, refused as unsafe, or not fit to train on."""


class DataWarning(UserWarning):
    """A data set can be used, but something about it should be checked."""


class ModelError(ProtoSeamError, ValueError):
    """A network is unknown, or does not fit the data."""
