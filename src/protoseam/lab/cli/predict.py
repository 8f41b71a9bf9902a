"""``protoseam predict DIR IMAGES…``: class, probability, runner-up and a score of unusual images."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from protoseam.lab.engine.deployed import Deployed, Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    net = "a finished run's directory; or an export of it: a .onnx, .pt2 or .safetensors file or a hub folder"
    add("run", type=Path, metavar="DIR", help=net)
    images = "image files, folders, .npz arrays; - reads a list of them"
    add("images", nargs="+", metavar="IMAGES", help=images)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    form.add_argument("--json", action="store_true", help="print one JSON object per line")
    add("--device", default="auto")
    trust = "load a .pt2 file, whose loader can run code: only one of your own"
    add("--trust", action="store_true", help=trust)


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.engine.deployed import load
    from protoseam.lab.engine.run import resolve_device

    net = load(args.run, device=resolve_device(args.device), trust=args.trust)
    write = _csv if args.csv else _json if args.json else _table
    damaged: list[str] = []
    write(_sound(net.answers(_inputs(net, args.images, damaged)), damaged), net)
    for line in damaged:
        print(for_terminal(f"protoseam predict: {line}"), file=sys.stderr)
    return 1 if damaged else 0


def _inputs(net: Deployed, places: list[str], damaged: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The images as the network takes them, in order; what cannot be used goes to ``damaged``."""
    from protoseam.lab.data.images import Problem
    from protoseam.lab.data.samples import find_samples

    for name, sample in find_samples(places, net.shape, sys.stdin):
        if isinstance(sample, Problem):
            damaged.append(f"{name} {sample}")
        else:
            yield name, net.normalised(sample)


def _sound(found: Iterator[Prediction], damaged: list[str]) -> Iterator[Prediction]:
    """The answers that are numbers; a network overflows on values far beyond those of its training."""
    for one in found:
        if math.isfinite(one.probability) and math.isfinite(one.unusual):
            yield one
        else:
            damaged.append(
                f"{one.name} has values so large that the network's answer is no number: correct them"
            )


def _csv(found: Iterator[Prediction], net: Deployed) -> None:
    from protoseam.lab.engine.deployed import Prediction

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Prediction))
    for one in found:
        writer.writerow(
            "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in dataclasses.astuple(one)
        )


def _json(found: Iterator[Prediction], net: Deployed) -> None:
    for one in found:
        print(json.dumps(dataclasses.asdict(one), ensure_ascii=False))


def _table(found: Iterator[Prediction], net: Deployed) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from protoseam.lab.data.names import for_terminal

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("image", "class", "prob.", "runner-up", "prob.", "unusual"):
        left = title in ("image", "class", "runner-up")
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    ranked = False
    for one in found:
        ranked |= one.rank is not None
        rank = "" if one.rank is None else f" ({100 * one.rank:.0f} %)"
        p, q = (f"{100 * share:.1f} %" for share in (one.probability, one.second_probability))
        cells = (one.name, one.label, p, one.second, q, f"{one.unusual:.3g}{rank}")
        table.add_row(*(Text(for_terminal(cell)) for cell in cells))
    if not table.row_count:
        return
    console = Console(highlight=False)
    console.print(table)
    distance = "the distance to the nearest prototype, in deviations"
    what = distance if net.seam else "the free energy of the logits"
    compared = "; in brackets, the share of the run's test images with a smaller one" if ranked else ""
    console.print(f"unusual: {what}; larger is less like the training data{compared}", markup=False)
