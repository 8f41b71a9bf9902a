"""HTML from Python: every text and attribute is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable

from protoseam.lab.data.names import for_html

_VOID = {"input"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Markup:
    """``<name attribute="…">children</name>``; an underscore in an attribute's name becomes a hyphen, a last one goes.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{for_html(value)}"' for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{words}>")
    inside = "".join(child if isinstance(child, Markup) else for_html(child) for child in children)
    return Markup(f"<{name}{words}>{inside}</{name}>")


def section(key: str, title: str, *children: str, short: str = "", lead: str = "") -> Markup:
    """A part of the page with a heading, which the contents call ``short``, and a sentence under it."""
    heading = tag("h2", title, id=f"{key}-title", data_short=short or title)
    under = [tag("p", lead, class_="lead")] if lead else []
    return tag("section", heading, *under, *children, id=key, aria_labelledby=f"{key}-title")


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]], **attributes: str) -> Markup:
    """A table that scrolls sideways in a narrow window; the first cell of each row names it."""
    body = [
        tag("tr", *(tag("td", cell) if i else tag("th", cell, scope="row") for i, cell in enumerate(row)))
        for row in rows
    ]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
        tag("tbody", *body),
        **attributes,
    )
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)
