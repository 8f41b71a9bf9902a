"""The laboratory: data sets, an engine for whole runs, studies, and the ``protoseam`` command.

Needs the extra ``lab`` (``pip install 'protoseam[lab]'``). The library never imports it.
"""

try:
    import fcntl  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "protoseam.lab locks run directories with fcntl, which this operating system does not have. "
        "Use Linux, macOS or WSL. protoseam.lift and the rest of the library work here."
    ) from None
