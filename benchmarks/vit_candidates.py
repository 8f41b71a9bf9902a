"""Networks tried in the place of the paper's ViT-S that the library does not have, and their first epochs.

    python benchmarks/vit_candidates.py --out first-epochs.json --stop 20 \\
        tinyimagenet-vit_s-baseline+norm=post+init=torch tinyimagenet-vit_s-baseline+tokens=shifted+dim=512+mlp=512

A CUDA device, about a minute each. A candidate is a recipe with `+key=value` for what is changed: a setting of the run
(epochs, batch_size, seed), an option of `vit_s`, or one of `candidate` below. With `--stop` the first epochs of the
recipe's schedule are run, else all; OUT has the validation accuracy and loss of every epoch, and the test accuracy of
a run that came to its end.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.lab import models
from protoseam.lab.data.loading import load
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import environment
from protoseam.lab.experiments.recipes import recipe
from protoseam.lab.models.vit import VisionTransformer, vit_s

# B batch, L tokens, D width of a token, A heads, E width of a head


class TokenBatchNorm(nn.Module):
    """Batch normalisation over images and tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.bn(x_BLD.flatten(0, 1)).view_as(x_BLD)


class Renormed(nn.Module):
    """A `vit_s` whose normalisations are others.

    norm: "post" after each residual sum instead of before each branch; "batch" batch normalisation in place of every
    layer normalisation; "stem" batch normalisation behind the patches as well; "unnormed" none before the pooling.
    """

    def __init__(self, net: VisionTransformer, norm: str) -> None:
        super().__init__()
        if norm not in ("post", "batch", "stem", "unnormed"):
            raise ValueError(f"norm={norm!r} is not known; choose one of post, batch, stem, unnormed")
        dim = net.positions.shape[2]
        self.stem, self.cls_token, self.positions = net.stem, net.cls_token, net.positions
        self.drop, self.blocks, self.norm, self.head = net.drop, net.blocks, net.norm, net.head
        self.post = norm == "post"
        if norm == "batch":
            for block in self.blocks:
                block.norm1, block.norm2 = TokenBatchNorm(dim), TokenBatchNorm(dim)
            self.norm = TokenBatchNorm(dim)
        elif norm == "stem":
            self.stem = nn.Sequential(net.stem, TokenBatchNorm(dim))
        elif norm == "unnormed":
            self.norm = nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BLD = with_class_token(self.stem(x_BCHW), self.cls_token)
        x_BLD = self.drop(x_BLD + self.positions)
        for block in self.blocks:
            if self.post:
                x_BLD = block.norm1(x_BLD + block.attention(x_BLD))
                x_BLD = block.norm2(x_BLD + block.mlp(x_BLD))
            else:
                x_BLD = block(x_BLD)
        x_BLD = self.norm(x_BLD)
        return self.head(x_BLD.mean(dim=1) if self.cls_token is None else x_BLD[:, 0])


def with_class_token(x_BLD: Tensor, token_11D: Tensor | None) -> Tensor:
    if token_11D is None:
        return x_BLD
    return torch.cat([token_11D.expand(x_BLD.shape[0], -1, -1).to(x_BLD.dtype), x_BLD], dim=1)


class LocalAttention(nn.Module):
    """Attention without bias and with a width of its own; with a learned temperature no token sees itself."""

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float, temperature: str) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.proj = nn.Linear(heads * head_dim, dim)
        self.drop = nn.Dropout(dropout)
        scale = head_dim**-0.5
        self.temperature = {
            "layer": lambda: nn.Parameter(torch.tensor([math.log(scale)])),
            "head": lambda: nn.Parameter(torch.full((heads, 1, 1), scale)),
            "fixed": lambda: None,
        }[temperature]()

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, _ = x_BLD.shape
        qkv = self.qkv(x_BLD).view(B, L, 3, self.heads, self.head_dim)
        q_BALE, k_BALE, v_BALE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.temperature is None:
            y_BALE = F.scaled_dot_product_attention(q_BALE, k_BALE, v_BALE)
        else:
            t = self.temperature.exp() if self.temperature.dim() == 1 else self.temperature
            itself_LL = torch.zeros(L, L, device=x_BLD.device, dtype=x_BLD.dtype).fill_diagonal_(-1e4)
            q_BALE = q_BALE * t.to(q_BALE.dtype)
            y_BALE = F.scaled_dot_product_attention(q_BALE, k_BALE, v_BALE, attn_mask=itself_LL, scale=1.0)
        return self.drop(self.proj(y_BALE.transpose(1, 2).reshape(B, L, -1)))


class SmallDataViT(nn.Module):
    """Vision transformers for small data sets (Lee et al. 2021, "Vision Transformer for Small-Size Datasets").

    tokens: "shifted" (each patch beside its neighbours one pixel away), "half" (half a patch away, diagonally),
    "normed" (layer normalisation around the linear map) or "plain". Positions and class token are drawn with
    deviation 1, everything else is PyTorch's own initialisation (with "half": Xavier for queries, keys, values).
    """

    def __init__(
        self, num_classes: int, image_size: int, tokens: str, dim: int, depth: int, heads: int, head_dim: int, mlp: int,
        dropout: float, drop_path: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.patch = tokens, image_size // 8
        shifted = tokens in ("shifted", "half")
        width = 3 * self.patch**2 * (5 if shifted else 1)
        first = [] if tokens == "plain" else [nn.LayerNorm(width)]
        last = [nn.LayerNorm(dim)] if tokens == "normed" else []
        self.stem = nn.Sequential(*first, nn.Linear(width, dim), *last)
        self.positions = nn.Parameter(torch.randn(1, 65, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.drop = nn.Dropout(dropout)
        net = vit_s(
            num_classes, image_size, dim=dim, depth=depth, heads=heads, mlp=mlp, dropout=dropout, init="torch"
        )
        self.blocks, self.norm, self.head = net.blocks, net.norm, net.head
        temperature = {"shifted": "layer", "half": "head"}.get(tokens, "fixed")
        for block in self.blocks:
            block.attention = LocalAttention(dim, heads, head_dim, dropout, temperature)
            block.drop_path = drop_path
            if tokens == "half":
                nn.init.xavier_normal_(block.attention.qkv.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.tokens == "shifted":
            sides = ((1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))
            x_BCHW = torch.cat([x_BCHW, *(F.pad(x_BCHW, side) for side in sides)], dim=1)
        elif self.tokens == "half":
            s = self.patch // 2
            wide = F.pad(x_BCHW, (s, s, s, s))
            before, after = slice(None, -2 * s), slice(2 * s, None)
            corners = [wide[..., i, j] for i in (before, after) for j in (before, after)]
            x_BCHW = torch.cat([x_BCHW, *corners], dim=1)
        B, C, _, _ = x_BCHW.shape
        p = self.patch
        x = x_BCHW.permute(0, 2, 3, 1).reshape(B, 8, p, 8, p, C).transpose(2, 3).reshape(B, 64, p * p * C)
        x_BLD = with_class_token(self.stem(x), self.cls_token)
        return self.head(self.norm(self.blocks(self.drop(x_BLD + self.positions)))[:, 0])


def candidate(num_classes: int, shape: tuple[int, ...], **options: Any) -> nn.Module:
    """`vit_s`, or with `norm=` a Renormed, or with `tokens=` a SmallDataViT."""
    if "tokens" in options:
        sizes = {"depth": 6, "heads": 8, "head_dim": 64, "dropout": 0.0, "drop_path": 0.0}
        return SmallDataViT(num_classes, shape[1], **(sizes | options))
    norm = options.pop("norm", None)
    net = vit_s(num_classes, image_size=shape[1], in_channels=shape[0], **options)
    return net if norm is None else Renormed(net, norm)


def run(name: str, stop: int | None, root: Path | None) -> dict[str, Any]:
    base, *changes = name.split("+")
    config = dataclasses.replace(recipe(base), seed=42, audit_every=0)
    options = {}
    for change in changes:
        key, _, text = change.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if key in ("epochs", "batch_size", "seed"):
            config = dataclasses.replace(config, **{key: value})
        else:
            options[key] = value
    config = dataclasses.replace(config, model_options=config.model_options | options)
    began = time.perf_counter()
    trained = Run(config, load(config.data, root))
    rows: list[dict[str, Any]] = []
    while trained.epoch < min(stop or config.epochs, config.epochs):
        rows += train_epoch(trained)
    found: dict[str, Any] = {
        "validation": {row["epoch"]: round(100 * row["validation_accuracy"], 2) for row in rows},
        "loss": {row["epoch"]: row["loss"] for row in rows},
        "seconds": time.perf_counter() - began,
        "parameters": sum(p.numel() for p in trained.objective.parameters()),
        "environment": environment(),
    }
    if trained.epoch == config.epochs:
        found["test"] = round(100 * (trained.accuracy("test") or 0.0), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="RECIPE[+key=value]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop", type=int, help="end after this many epochs")
    parser.add_argument("--data-root", type=Path)
    args = parser.parse_args()
    models._BUILDERS["vit_s"] = candidate
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.names:
        found[name] = run(name, args.stop, args.data_root)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(name, list(found[name]["validation"].values()), found[name].get("test", ""), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
