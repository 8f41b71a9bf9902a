"""Show ``:func:`lift``` in a docstring as code on the site: Sphinx knows such roles, Markdown does not."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Rewrites docstrings as they are read; the sources stay as they are."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
