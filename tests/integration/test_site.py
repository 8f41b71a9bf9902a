"""The documentation site: it builds, loads nothing from elsewhere, and every link in it leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import protoseam
from protoseam import errors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_a_problem(builder: ModuleType, tmp_path: Path) -> None:
    site = builder.build(tmp_path)
    assert not builder.problems(site)
    reference = (site / "docs" / "api" / "protoseam.html").read_text(encoding="utf-8")
    assert {"protoseam.lift", "protoseam.Lifted.objective"} <= set(re.findall(r'id="([\w.]+)"', reference))
    shown = re.sub(
        r"<[^>]+>", "", reference + (site / "docs" / "api" / "settings.html").read_text(encoding="utf-8")
    )
    assert "repulsion_scale: float | None = None" in shown  # an option that lift's signature gets on import
    assert not re.search(r"\{\w+\}|:\w+:`", shown)


def test_what_is_wrong_with_a_site_is_named(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    (tmp_path / "x.css").write_text('@import "https://fonts.example/a.css"; a {b: url(//cdn.example/b.woff)}')
    (tmp_path / "index.html").write_text(
        '<a href="other.html#there"></a><a href="https://example.org">fine</a><link href="x.css" rel="stylesheet">'
        '<script src="https://cdn.example/x.js"></script><a href="nowhere.html"></a><a href="other.html#none"></a>'
    )
    assert builder.problems(tmp_path) == [
        "index.html loads https://cdn.example/x.js from elsewhere",
        "index.html links to nowhere.html, which does not exist",
        "index.html links to other.html#none, and that page has no such heading",
        "x.css loads https://fonts.example/a.css from elsewhere",
        "x.css loads //cdn.example/b.woff from elsewhere",
    ]


def test_every_page_is_in_the_navigation(builder: ModuleType, tmp_path: Path) -> None:
    shown = list(builder.listed(builder.configuration(tmp_path / "pages", tmp_path / "site")["nav"]))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert there <= set(shown)
    assert len(shown) == len(set(shown))


def test_every_public_name_has_its_place_in_the_reference() -> None:
    text = (ROOT / "docs" / "api" / "protoseam.md").read_text(encoding="utf-8")
    public = set(protoseam.__all__) - {
        "__version__",
        "core",
        "theory",
        "adapters",
    }  # the last three have pages
    shown = {found.rpartition(".")[2] for found in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    everything = set(vars(errors)) if "errors" in shown else set()
    assert public <= shown | everything
