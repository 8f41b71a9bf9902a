"""``protoseam report DIR…``: the page of a run, or of several side by side, as one HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protoseam.lab.cli.parser import speaks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = "a run's directory, a folder of runs, or a study's folder or file; several are compared"
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help=runs)
    out = "where to write it (report.html in DIR; for several in the folder they share)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.report.page import write_page

    path = write_page(args.runs, args.out)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB; open it in a browser")
    return 0


def leave_page(places: Sequence[Path], out: Path | None = None) -> None:
    """Write the page at the end of another command and say where; a page that fails does not fail the command."""
    if not speaks():
        return
    from protoseam.errors import ProtoSeamError
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.report.page import write_page

    try:
        path = write_page(places, out)
    except (ProtoSeamError, OSError) as error:
        print(for_terminal(f"no page: {error}"), file=sys.stderr)
    else:
        print(for_terminal(f"page: {path}"))
