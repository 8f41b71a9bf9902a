"""`verify`: hash the source files and the decoded copy again, rebuild what is damaged, and load the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protoseam.lab.data import archives, cache, catalog
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import describe, format_of, load, locate, looks_like_path, path_name, stamp_of
from protoseam.lab.data.trees import Tree


@dataclass(frozen=True)
class Finding:
    """One result of a check. A damaged decoded copy is rebuilt at once; a damaged source file cannot be."""

    what: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    dataset: ArrayDataset
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def verify(name_or_path: str, root: Path | None = None) -> Verification:
    """Check a data set's source files and decoded copy, and load it.

    Raises:
        DataError: if it cannot be loaded at all.
    """
    root = Path(root).expanduser() if root is not None else catalog.default_root()
    path = Path(name_or_path).expanduser()
    entry = None if looks_like_path(name_or_path) else catalog.find(name_or_path)
    findings: list[Finding] = []
    tree: Tree | None = None
    kind = ""
    if entry is not None:
        located = locate(entry, root)
        if located is not None:
            tree, kind = located.tree, located.source.format
        findings += _sources(entry, root)
    elif path.is_dir() or path.name.lower().endswith(archives.ARCHIVE_SUFFIXES):
        tree = archives.open_tree(path)
        kind = format_of(tree)
    folder = None
    if tree is not None:
        folder = cache.folder_of(root, entry.name if entry else path_name(path), stamp_of(tree, kind))
    elif entry is not None:
        folder = cache.newest(root, entry.name)
    if folder is not None and folder.exists():
        damage = cache.full_damage(folder)
        if damage is None:
            findings.append(Finding(str(folder), True, "every SHA-256 matches its manifest"))
        elif tree is not None:
            cache.discard(folder)
            findings.append(Finding(str(folder), True, f"was damaged ({damage}); rebuilt from its source"))
        else:
            findings.append(Finding(str(folder), False, f"{damage}, and its source is gone: get it again"))
    dataset = load(name_or_path, root)
    findings.append(Finding(dataset.name, True, f"loads: {describe(dataset)}"))
    return Verification(dataset, tuple(findings))


def _sources(entry: catalog.Entry, root: Path) -> list[Finding]:
    findings = []
    for folder in dict.fromkeys((root / name).resolve() for name in entry.folders):
        for file in (file for source in entry.sources for file in source.files):
            path = folder / file.name
            if not path.is_file():
                continue
            if file.sha256 is None:
                findings.append(Finding(str(path), True, "no official SHA-256 is known to compare with"))
            elif (found := cache.sha256_of(path)) == file.sha256:
                findings.append(Finding(str(path), True, "is the official file, by its SHA-256"))
            else:
                detail = f"is not the official file: its SHA-256 is {found}, not {file.sha256}"
                findings.append(Finding(str(path), False, detail))
    return findings
