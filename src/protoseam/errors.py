"""What ProtoSeam raises on purpose: catch `ProtoSeamError` to catch all of it."""

from __future__ import annotations


class ProtoSeamError(Exception):
    """The base of every error this library raises on purpose; its message says what to do."""


class DataError(ProtoSeamError, ValueError):
    """A data set is missing, damaged, refused as unsafe, or not fit to train on."""


class DataWarning(UserWarning):
    """A data set can be used, but something about it deserves a look."""


class ModelError(ProtoSeamError, ValueError):
    """A network is unknown, or does not fit the data."""
