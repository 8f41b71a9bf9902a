"""The documentation site: it builds, loads nothing from elsewhere, and every link in it leads somewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

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
    assert 'class="doc' in (site / "docs" / "api" / "protoseam.html").read_text(encoding="utf-8")
    # what is checked can fail
    home = site / "index.html"
    whole = home.read_text(encoding="utf-8")
    for broken, wrong in (
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js from elsewhere"),
        ('<a href="docs/nowhere.html">there</a>', "links to docs/nowhere.html, which does not exist"),
        ('<a href="SECURITY.html#none">there</a>', "that page has no such heading"),
    ):
        home.write_text(whole.replace("</body>", f"{broken}</body>"), encoding="utf-8")
        assert [wrong in problem for problem in builder.problems(site)] == [True]


def test_every_page_is_in_the_navigation(builder: ModuleType) -> None:
    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = set(builder.in_navigation(builder.existing(listed)))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert there <= shown, "add to nav in mkdocs.yml"
