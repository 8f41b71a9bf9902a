"""``protoseam export DIR FILE``: a finished run's network as one file that any PyTorch can run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run's directory")
    parser.add_argument("out", type=Path, metavar="FILE", help="where to write it, e.g. net.pt2")


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.engine.export import export

    told = export(args.run, args.out)
    shape = ", ".join(map(str, told["shape"]))
    resized = f" ({told['resized']})" if "resized" in told else ""
    print(
        f"{args.out}: takes float32 {told['input']} of shape (N, {shape}){resized}, gives logits of "
        f'{len(told["classes"])} classes.\nWithout this library: torch.export.load("{args.out}").module()(inputs)'
    )
    return 0
