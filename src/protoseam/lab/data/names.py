"""Checks of names from outside where they are read, and escapes for them where they are shown.

A class name can hold what a terminal, a Markdown file or a figure takes for a command. Names that cannot be printed
on one line are refused where they are read; what is shown in a language of its own is escaped for that language.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from protoseam.errors import DataError

LONGEST = 200


def printable(name: object) -> bool:
    """Return whether this is text of at most 200 characters without control characters or line breaks."""
    return isinstance(name, str) and name.isprintable() and len(name) <= LONGEST


def refuse_unprintable(where: str, names: Iterable[object]) -> None:
    """Raise `DataError` for the first class name that is not `printable`."""
    for i, name in enumerate(names):
        if not printable(name):
            raise DataError(
                f"{for_terminal(where)}: the name of class {i} is {name!r:.100}, which cannot be printed on one line "
                f"of {LONGEST} characters: rename it"
            )


def for_terminal(text: str) -> str:
    """Return the text with everything but letters, signs and line breaks as escapes: \\x1b."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def for_markdown(text: str) -> str:
    """Escape the text for Markdown, so that no table cell, link, picture or HTML begins in it."""
    return re.sub(r"([\\`*{}\[\]<>|#!~$])", r"\\\1", " ".join(text.split()))


def for_figures(text: str) -> str:
    """Escape the text for matplotlib, so that a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def for_html(text: str) -> str:
    """The text as a browser shows it, in the body of a page or in an attribute."""
    return html.escape(for_terminal(text), quote=True)
