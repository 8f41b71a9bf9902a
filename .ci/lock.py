"""Write requirements.lock: the pins of constraints.txt and all they need, with the SHA-256 of every published file.

    python .ci/lock.py > requirements.lock

Data in: pyproject.toml, constraints.txt, and the index pages and metadata of PyPI (network). What
constraints.txt does not pin (the CUDA libraries that torch's Linux wheels need, the build backend) is taken at its
newest release that fits. Nothing is downloaded but pages and metadata, and no state is kept.
"""

from __future__ import annotations

import io
import re
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections import defaultdict
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parent.parent
INDEX = PyPI.simple_url
EXTRAS = (
    "lab",
    "vision",
    "report",
    "tune",
    "sklearn",
    "lightning",
    "timm",
    "huggingface",
    "loggers",
    "onnx",
    "docs",
    "dev",
)
HEADER = """\
# The locked environment of `make locked`: every package with the SHA-256 of every file of that release, as the
# index pages of PyPI list them. Made by .ci/lock.py from constraints.txt, for CPython 3.11 on Linux
# x86_64; do not edit. torch's hashes are those of PyPI's own wheels, which bring CUDA along: a CPU build of the same
# version from elsewhere (2.13.0+cpu) is another file, and --require-hashes refuses it. For that one use `make test`,
# which pins versions (constraints.txt) but not files.
"""


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []  # address, SHA-256

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        address, _, digest = (given.get("href") or "").partition("#sha256=")
        if tag == "a" and digest and "data-yanked" not in given:
            self.files.append((address, digest))


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        data: bytes = answer.read()
    return data


@cache
def releases(name: str) -> dict[Version, list[tuple[str, str]]]:
    page = _Links()
    page.feed(_get(f"{INDEX}/{name}/").decode())
    found: dict[Version, list[tuple[str, str]]] = defaultdict(list)
    for address, digest in page.files:
        file = address.rsplit("/", 1)[-1]
        try:
            version = (
                parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
            )
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue
        found[version].append((address, digest))
    return found


def _metadata(address: str) -> bytes:
    try:
        return _get(f"{address}.metadata")
    except urllib.error.HTTPError:  # older uploads have none beside them: look inside
        with zipfile.ZipFile(io.BytesIO(_get(address))) as wheel:
            return wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))


@cache
def needs(name: str, version: Version) -> list[Requirement]:
    """What a release asks for, from the metadata published beside a wheel that fits this machine."""
    tags = set(sys_tags())
    for address, _ in releases(name)[version]:
        file = address.rsplit("/", 1)[-1]
        if file.endswith(".whl") and tags & parse_wheel_filename(file)[3]:
            return list(Metadata.from_email(_metadata(address), validate=False).requires_dist or [])
    sys.exit(f"{name} {version} has no wheel for this machine")


def resolve(roots: list[Requirement], pins: dict[str, Version]) -> dict[str, Version]:
    """The newest release of each package that suits all who ask for it; starts over whenever one did not."""
    bounds: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    while True:
        chosen: dict[str, Version] = {}
        wanted, asked, before = list(roots), set(), dict(bounds)
        while wanted:
            requirement = wanted.pop()
            name = canonicalize_name(requirement.name)
            bounds[name] &= requirement.specifier
            if name not in chosen:
                fitting = list(bounds[name].filter([pins[name]] if name in pins else releases(name)))
                if not fitting:
                    sys.exit(
                        f"no release of {name} suits {bounds[name]}: change its pin or that of who asks for it"
                    )
                chosen[name] = max(fitting)
            for extra in requirement.extras or {""}:
                if (name, extra) not in asked:
                    asked.add((name, extra))
                    wanted += [
                        more
                        for more in needs(name, chosen[name])
                        if more.marker is None or more.marker.evaluate({"extra": extra})
                    ]
        if all(chosen[name] in bound for name, bound in bounds.items() if name in chosen):
            return chosen
        if before == bounds:
            sys.exit("the requirements contradict each other")


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in EXTRAS:
        lines += project["project"]["optional-dependencies"][extra]
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pins = {canonicalize_name(name): Version(version) for name, version in pinned}
    wanted = [Requirement(line) for line in lines]
    wanted += [Requirement(f"{name}=={version}") for name, version in pins.items()]
    print(HEADER, end="")
    for name, version in sorted(resolve(wanted, pins).items()):
        digests = sorted({digest for _, digest in releases(name)[version]})
        print(f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests), sep=" \\\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
