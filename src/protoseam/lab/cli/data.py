"""``protoseam data list | get NAME | verify NAME``: list, download and check data sets."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protoseam.lab.data.catalog import Entry
    from protoseam.lab.data.dataset import ArrayDataset

# numpy and rich are imported by the functions that need them: `protoseam --help` stays fast.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared = argparse.ArgumentParser(add_help=False)
    root = "directory of the data files (default: $PROTOSEAM_DATA, else ~/.cache/protoseam/data)"
    shared.add_argument("--root", type=Path, metavar="DIR", help=root)
    shared.add_argument("--json", action="store_true", help="print JSON instead of text")
    actions = parser.add_subparsers(dest="data_action", required=True, metavar="list|get|verify")
    what = "list the data sets known by name, and which of them are on disk"
    actions.add_parser("list", parents=[shared], help=what)
    get = actions.add_parser("get", parents=[shared], help="download a data set, check and decode it")
    get.add_argument("name", help="a name that `protoseam data list` shows")
    sha256 = "the SHA-256 that the file must have, if none is known or the file was republished"
    get.add_argument("--sha256", metavar="HASH", help=sha256)
    again = "hash the files again, and load the data set"
    verify = actions.add_parser("verify", parents=[shared], help=again)
    verify.add_argument("name", help="a name that `protoseam data list` shows, or a path")
    size = "as for train: the size to which images of different sizes are resized and cropped"
    verify.add_argument("--image_size", type=int, metavar="PIXELS", help=size)


def run(args: argparse.Namespace) -> int:
    """Return 0, or 1 if `verify` found something wrong."""
    from protoseam.lab.data.catalog import default_root

    root = args.root.expanduser() if args.root else default_root()
    if args.data_action == "list":
        return _list(root, args.json)
    if args.data_action == "get":
        return _get(args.name, root, args.sha256, args.json)
    return _verify(args.name, root, args.image_size, args.json)


def _list(root: Path, as_json: bool) -> int:
    from protoseam.lab.data.catalog import CATALOG

    rows = [_row(entry, root) for entry in CATALOG.values()]
    if as_json:
        return _print_json({"root": str(root), "data_sets": rows})
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Data sets under {escape(str(root))}", title_justify="left")
    for heading in ("name", "classes", "train", "test", "image", "on disk", "download"):
        right = heading in ("classes", "train", "test", "download")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        counts = [str(row["classes"]), f"{row['train']:,}", f"{row['test']:,}"]
        download = f"{row['download_bytes'] / 1e6:.0f} MB" if row["download_bytes"] else "—"
        image = "×".join(map(str, row["image"]))
        table.add_row(row["name"], *counts, image, row["on_disk"] or "no", download)
    console = Console()
    console.print(table)
    console.print("To use files you have, put them under that folder (or name another with --root):")
    for row in rows:  # beside the table and not in it: the names are long and must not be broken
        if row["files"]:
            console.print(f"  {row['name']}: {' or '.join(row['files'])}", highlight=False, soft_wrap=True)
    return 0


def _row(entry: Entry, root: Path) -> dict[str, Any]:
    from protoseam.lab.data.cache import newest
    from protoseam.lab.data.loading import array_folder, locate

    files = []
    for source in entry.sources:
        names = [str(Path(entry.folders[0]) / file.name) for file in source.files]
        files.append(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")
    on_disk: str | None
    if entry.embedded:
        on_disk = "built in"
    elif array_folder(entry, root) is not None:
        on_disk = "arrays"
    elif (located := locate(entry, root)) is not None:
        on_disk = "folder" if located[1].path.is_dir() else "archive"
    else:
        on_disk = "decoded" if newest(root, entry.name) else None
    return {
        "name": entry.name,
        "title": entry.title,
        "classes": entry.num_classes,
        "train": entry.train_size,
        "test": entry.test_size,
        "image": list(entry.sample_shape),
        "on_disk": on_disk,
        "files": files,
        "download_bytes": entry.sources[0].download_size if entry.sources else 0,
        "urls": [file.url for file in entry.sources[0].files] if entry.sources else [],
    }


def _get(name: str, root: Path, sha256: str | None, as_json: bool) -> int:
    from protoseam.lab.data.catalog import entry
    from protoseam.lab.data.loading import array_folder, describe, fetch, load, locate

    found = entry(name)
    # what is there already, in any form, is not downloaded again
    there = sha256 is None and (array_folder(found, root) is not None or locate(found, root) is not None)
    files = [] if there else fetch(found, root, sha256)
    dataset = load(found.name, root)
    if as_json:
        return _print_json({**_summary(dataset), "files": [str(file) for file in files]})
    where = f" from {files[0].parent}" if files else f" from what was under {root}" if there else ""
    print(f"{dataset.name} is ready{where}: {describe(dataset)}")
    return 0


def _verify(name: str, root: Path, image_size: int | None, as_json: bool) -> int:
    from protoseam.lab.cli.parser import at_least_one
    from protoseam.lab.data.loading import verify

    at_least_one("image_size", image_size)
    result = verify(name, root, image_size=image_size)
    if as_json:
        findings = [dataclasses.asdict(finding) for finding in result.findings]
        _print_json({**_summary(result.dataset), "ok": result.ok, "findings": findings})
    else:
        for finding in result.findings:
            print(f"{'ok  ' if finding.ok else 'BAD '} {finding.what}: {finding.detail}")
    return 0 if result.ok else 1


def _summary(dataset: ArrayDataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "classes": dataset.num_classes,
        "train": len(dataset.train_labels),
        "test": len(dataset.test_labels),
        "sample_shape": list(dataset.sample_shape),
    }


def _print_json(value: dict[str, Any]) -> int:
    print(json.dumps(value, indent=2, ensure_ascii=False))
    return 0
