"""Build the documentation site into build/site, and check it: ``make docs``.

The site's pages are the Markdown files of the repository. They are staged in a folder that mirrors the repository,
together with every file they link to, so that one relative link works in the repository and on the site.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).parents[1]
_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
_ASSETS = ("docs/**/*.css", "docs/**/*.svg", "docs/**/*.png", "docs/reports/**/*.html")
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
_ELSEWHERE = re.compile(r"[a-z]+:", re.IGNORECASE)


def stage(pages: Path) -> None:
    """Copy the pages, and all files and folders they link to, to ``pages``."""
    for pattern in _ASSETS:
        for file in ROOT.glob(pattern):
            _copy(file, pages)
    waiting = [file for pattern in _PAGES for file in sorted(ROOT.glob(pattern))]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        text = page.read_text(encoding="utf-8") if page.is_file() else _listing(page)
        target = pages / (page if page.is_file() else page / "index.md").relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)

        def linked(match: re.Match[str], page: Path = page) -> str:
            path = (page.parent if page.is_file() else page) / match[2]
            if _ELSEWHERE.match(match[2]) or not path.exists():
                return match[0]
            path = path.resolve()
            shown = match[2]
            if path.is_dir():  # a browser would need a server to find the page of a folder
                name = "README.md" if (path / "README.md").exists() else "index.md"
                shown = f"{shown.rstrip('/')}/{name}"
                path = path / "README.md" if name == "README.md" else path
            if path.suffix == ".md" or path.is_dir():
                if path not in seen:
                    seen.add(path)
                    waiting.append(path)
            else:
                _copy(path, pages)
            return f"{match[1]}{shown}{match[3]}"

        target.write_text(_LINK.sub(linked, text), encoding="utf-8")


def _copy(file: Path, pages: Path) -> None:
    target = pages / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _listing(folder: Path) -> str:
    files = sorted(
        path.relative_to(folder) for path in folder.rglob("*.*") if "__pycache__" not in path.parts
    )
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in files)


def configuration(pages: Path, site: Path) -> dict[str, Any]:
    """mkdocs.yml for these folders, with a navigation of the pages that exist."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    navigation = existing(config["nav"])
    unlisted = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")} - set(
        listed(navigation)
    )
    if unlisted:
        navigation.append({"More": sorted(unlisted)})
    config |= {"docs_dir": pages.name, "site_dir": site.name, "nav": navigation}
    for plugin in config["plugins"]:
        if isinstance(plugin, dict):
            python = plugin["mkdocstrings"]["handlers"]["python"]
            python["paths"] = [str(ROOT / "src")]
            python["options"]["extensions"] = [f"{ROOT / 'docs' / 'docstrings.py'}:Docstrings"]
    return config


def existing(entries: list[Any]) -> list[Any]:
    """The entries of a navigation that have a page."""
    kept: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):  # a pattern: every page that fits, under its own title
            kept += [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(entry))]
            continue
        ((title, value),) = entry.items()
        value = existing(value) if isinstance(value, list) else value
        if value and (isinstance(value, list) or (ROOT / value).exists()):
            kept.append({title: value})
    return kept


def listed(entries: list[Any]) -> Iterator[str]:
    """The pages of a navigation."""
    for entry in entries:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from listed(value) if isinstance(value, list) else [value]


class _Page(HTMLParser):
    """What a page loads, where it leads, and which places in it have names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.leads.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found.get("href", ""))
        elif "src" in found:
            self.loads.append(found["src"])


def problems(site: Path) -> list[str]:
    """What is wrong with a built site: loads from elsewhere, and links that lead nowhere.

    Args:
        site: its folder.

    Returns:
        One sentence per problem; an empty list if there is none.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [
            f"{name} loads {url} from elsewhere" for url in page.loads if re.match(r"(https?:)?//", url)
        ]
        for url in page.loads + page.leads:
            place, _, anchor = url.partition("#")
            if _ELSEWHERE.match(place) or place.startswith("//") or name.name == "404.html":
                continue
            target = (path.parent / unquote(place)).resolve() if place else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{name} links to {url}, which does not exist")
            elif anchor and target in pages and unquote(anchor) not in pages[target].names:
                wrong.append(f"{name} links to {url}, and that page has no such heading")
    for sheet in site.rglob("*.css"):
        for url in re.findall(
            r"(?:url\(|@import\s*)['\"]?((?:https?:)?//[^'\")]+)", sheet.read_text("utf-8")
        ):
            wrong.append(f"{sheet.relative_to(site)} loads {url} from elsewhere")
    return wrong


def build(folder: Path) -> Path:
    """Build the site in ``folder``.

    Args:
        folder: a place for the staged pages and the site; what is there of an earlier build is replaced.

    Returns:
        The folder of the site, whose ``index.html`` is the first page.
    """
    folder = folder.resolve()
    pages, site = folder / "pages", folder / "site"
    for old in (pages, site):
        shutil.rmtree(old, ignore_errors=True)
    stage(pages)
    config = folder / "mkdocs.yml"
    config.write_text(yaml.safe_dump(configuration(pages, site), allow_unicode=True, sort_keys=False))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "-f", str(config)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"zensical failed:\n{done.stdout}{done.stderr}")
    return site


def main() -> int:
    site = build(ROOT / "build")
    wrong = problems(site)
    print("\n".join([*wrong, f"{site / 'index.html'}: {len(wrong)} problems"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
