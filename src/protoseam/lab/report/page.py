"""The file itself: sections, style and script in one HTML page that asks for nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from protoseam import __version__
from protoseam.lab.engine.files import explain_os_error, write_atomically
from protoseam.lab.report.compare import comparison_sections, grouped
from protoseam.lab.report.gather import Gathered, gather
from protoseam.lab.report.markup import Markup, tag
from protoseam.lab.report.single import headline, run_sections, tiles

FILE = "report.html"
_SCRIPTS = ("core.js", "charts.js", "latent.js", "images.js", "page.js")
# nothing may be asked for, whatever a page holds
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(places: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of the runs at ``places``: directories of runs, folders of them, or files of a study.

    Args:
        places: one run, or several to be compared.
        out: the file; by default ``report.html`` in the directory that was named, for several in the one they share.

    Returns:
        The file.

    Raises:
        ConfigError: if there is no run at one of the places.
        StorageError: if a file of a run is damaged, or the page cannot be written.
    """
    runs = gather(places)
    target = out or _usual_place(places)
    text = page(runs, beside=target.parent)
    with explain_os_error("the page", target.parent, going_on=""):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode())
    return target


def _usual_place(places: Sequence[Path]) -> Path:
    if len(places) == 1 and places[0].is_dir():
        return places[0] / FILE
    shared = {place.parent for place in places}
    return shared.pop() / FILE if len(shared) == 1 and places[0].is_dir() else Path(FILE)


def page(
    runs: Sequence[Gathered],
    *,
    title: str | None = None,
    detail: Gathered | None = None,
    beside: Path | None = None,
) -> str:
    """The HTML of one run, or of several compared; ``detail`` is one of several that is shown in full as well."""
    if len(runs) == 1:
        sections, payload = run_sections(runs[0])
        return _document(title or runs[0].name, headline(runs[0]), [tiles(runs[0]), *sections], payload)
    groups = grouped(runs)
    settings = "setting" if len(groups) == 1 else "settings"
    about = f"{len(runs)} runs of {len(groups)} {settings}, side by side"
    sections, payload = comparison_sections(groups, beside)
    if detail is not None:
        heading = tag("h1", detail.name, class_="second")
        masthead = tag("header", heading, tag("p", headline(detail)), tiles(detail), class_="masthead")
        own, drawn = run_sections(detail)
        sections, payload = [*sections, masthead, *own], payload | drawn
    return _document(title or f"{len(runs)} runs", about, sections, payload)


def _document(title: str, about: str, sections: list[Markup], payload: dict[str, Any]) -> str:
    here = files("protoseam.lab.report")
    style = Markup(here.joinpath("page.css").read_text("utf-8"))
    script = "".join(here.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    data = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c")  # "<" in a name must not end the element
    head = [
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", f"{title} · ProtoSeam"),
        tag("style", style),
    ]
    masthead = tag(
        "header",
        tag("div", tag("h1", title), tag("p", about)),
        tag("button", "Dark", type="button", id="theme", class_="quiet"),
        class_="masthead",
    )
    body = [
        tag("a", "Skip to the content", href="#content", class_="skip"),
        masthead,
        tag("nav", tag("ul", id="contents"), aria_label="Sections"),
        tag("main", *sections, id="content"),
        tag("footer", tag("p", f"Written by ProtoSeam {__version__}. This file needs nothing else.")),
        Markup('<div id="tip" role="presentation" hidden></div>'),
        Markup(f'<script type="application/json" id="data">{data}</script>'),
        Markup(f"<script>(() => {{'use strict';\n{script}}})();</script>"),
    ]
    page_head, page_body = "".join(head), "".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{page_head}</head>\n<body>{page_body}</body></html>\n'
