"""Docstrings as the site shows them: those that are completed on import, and roles of Sphinx as code."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites docstrings as they are read; the sources stay as they are."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        if re.search(
            r"\{\w+\}|\*\*options", obj.docstring.value
        ):  # options are described once, and filled in
            completed = _import(obj.path)
            obj.docstring.value = inspect.getdoc(completed) or ""
            if isinstance(obj, griffe.Function):
                obj.parameters = _parameters(obj, inspect.signature(completed))
        obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)


def _import(path: str) -> Any:
    """The object at a dotted path, of which the longest importable part is a module."""
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def _parameters(function: griffe.Function, signature: inspect.Signature) -> griffe.Parameters:
    """The parameters as read, and in place of ``**options`` those that the signature has."""
    read = [p for p in function.parameters if p.name != "options"]
    filled = [
        griffe.Parameter(
            name,
            annotation=_shown(p.annotation),
            kind=griffe.ParameterKind.keyword_only,
            default=repr(p.default),
        )
        for name, p in signature.parameters.items()
        if name not in {p.name for p in read}
    ]
    return griffe.Parameters(*read, *filled)


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
