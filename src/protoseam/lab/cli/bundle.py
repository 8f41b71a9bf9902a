"""``protoseam bundle``: take a study from one machine to another, unfinished runs included."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pack = actions.add_parser("pack", help="write a study as files of limited size")
    pack.add_argument("study", type=Path, help="the study's directory, as reproduce --out names it")
    pack.add_argument("parts", type=Path, help="a new folder for the parts and their manifest")
    pack.add_argument("--part-mib", type=float, default=15, help="size of the largest part in MiB (15)")
    unpack = actions.add_parser("unpack", help="add the runs of a packed study to one that is here")
    unpack.add_argument("parts", type=Path, help="the folder with the parts and their manifest")
    unpack.add_argument("study", type=Path, help="the study to add them to; made if it is not there")


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.engine.config import ConfigError
    from protoseam.lab.experiments import bundle

    if args.action == "unpack":
        found = bundle.unpack(args.parts, args.study)
        print(f"added to {args.study}: {', '.join(found.taken) or 'nothing'}")
        if found.kept:
            print(f"kept, as it was there already: {', '.join(found.kept)}")
        return 0
    if not 2**-10 <= args.part_mib <= 1024:
        raise ConfigError(f"--part-mib must be between 0.001 and 1024, got {args.part_mib:g}")
    written = bundle.pack(args.study, args.parts, part_bytes=int(args.part_mib * 2**20))
    size = sum(path.stat().st_size for path in written) / 2**20
    print(f"written: {len(written)} files, {size:.1f} MiB in all, in {args.parts}")
    print(f"elsewhere: protoseam bundle unpack {args.parts} STUDY, then the study's own command goes on")
    return 0
