"""``protoseam eval DIR``: the deployed network of a finished run, from its weights file alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run's directory")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--data", metavar="PLACE", help="where the run's data lies now, if it has moved")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.engine.evaluate import BINS, evaluate

    result = evaluate(args.run, split=args.split, device=args.device, place=args.data)
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"{args.run}: {args.split} accuracy {100 * result['accuracy']:.2f} % "
        f"({result['correct']} of {result['samples']}), NLL {result['nll']:.4f}, "
        f"ECE {100 * result['ece']:.2f} % ({BINS} equal-width bins)"
    )
    for name, accuracy in result["worst_classes"]:
        print(f"  {name}: {100 * accuracy:.1f} %")
    if result["at_chance"]:
        print(result["at_chance"])
    return 0
