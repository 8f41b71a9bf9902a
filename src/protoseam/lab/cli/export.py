"""``protoseam export DIR --to FORMAT``: a finished run's network in files that do not need this library."""

from __future__ import annotations

import argparse
from pathlib import Path

_LOADING = {
    "pt2": 'Without this library: torch.export.load("{out}").module()(inputs)',
    "onnx": 'Without this library: onnxruntime.InferenceSession("{out}").run(["logits"], {{"inputs": inputs}})',
    "safetensors": "Normalise the inputs first: mean and std are in the file's metadata.",
    "hub": "{out}/README.md says how to load it without this library.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a finished run's directory")
    out = "the file (net.pt2, net.onnx, net.safetensors) or the hub folder; default DIR/net.FORMAT or DIR/hub"
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help=out)
    parser.add_argument(
        "--to",
        choices=tuple(_LOADING),
        help="pt2: a program of torch.export. onnx: checked by onnxruntime. safetensors: weights. hub: a folder with "
        "config, weights and a model card. Default: what OUT ends in, else pt2",
    )


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.engine.export import export

    out, to, about = export(args.run, args.out, args.to)
    shape = ", ".join(map(str, about.shape))
    resized = f" ({about.resized})" if about.resized else ""
    print(
        f"{out}: takes float32 {about.input} of shape (N, {shape}){resized}, gives logits of "
        f"{len(about.classes)} classes.\n{_LOADING[to].format(out=out)}"
    )
    return 0
