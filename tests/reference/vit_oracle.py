"""The vision transformer of Dosovitskiy et al. 2021 (eq. 1–4), spelled out on a state dict in float64.

``factors`` stand in for dropout, in the order in which the layers come, and ``branch`` for stochastic depth.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def features(
    p: dict[str, Tensor],
    x: Tensor,
    *,
    depth: int,
    heads: int,
    patch: int,
    conv: bool,
    cls: bool,
    factors: list[float],
    branch: float,
) -> Tensor:
    drop = iter(factors)
    tokens = _convolved(p, x) if conv else _patches(p, x, patch)
    if cls:
        tokens = torch.cat([p["cls_token"].expand(len(x), 1, -1), tokens], 1)
    tokens = (tokens + p["positions"]) * next(drop)
    for i in range(depth):
        b = {k.removeprefix(f"blocks.{i}."): v for k, v in p.items() if k.startswith(f"blocks.{i}.")}
        mixed = _attention(b, _norm(tokens, b["norm1.weight"], b["norm1.bias"]), heads) * next(drop)
        tokens = tokens + branch * mixed
        hidden = _norm(tokens, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.0.weight"].T + b["mlp.0.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))) * next(drop)
        tokens = tokens + branch * (hidden @ b["mlp.3.weight"].T + b["mlp.3.bias"]) * next(drop)
    tokens = _norm(tokens, p["norm.weight"], p["norm.bias"])
    return tokens[:, 0] if cls else tokens.sum(1) / tokens.shape[1]


def _patches(p: dict[str, Tensor], x: Tensor, patch: int) -> Tensor:
    """Row by row, and in a patch row by row, the channels of a pixel together."""
    rows = []
    for top in range(0, x.shape[2], patch):
        for left in range(0, x.shape[3], patch):
            piece = x[:, :, top : top + patch, left : left + patch]
            flat = torch.stack(
                [piece[:, c, i, j] for i in range(patch) for j in range(patch) for c in range(3)], 1
            )
            rows.append(flat @ p["stem.proj.weight"].T + p["stem.proj.bias"])
    return torch.stack(rows, 1)


def _convolved(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """3×3, then 3×3 of stride 2 twice; after all but the last BN by its running statistics, and ReLU."""
    for layer, stride in ((0, 1), (3, 2), (6, 2)):
        x = F.conv2d(x, p[f"stem.layers.{layer}.weight"], p.get(f"stem.layers.{layer}.bias"), stride, 1)
        if layer < 6:
            mean, var, w, b = (
                p[f"stem.layers.{layer + 1}.{name}"][:, None, None]
                for name in ("running_mean", "running_var", "weight", "bias")
            )
            x = ((x - mean) / (var + 1e-5).sqrt() * w + b).clamp(min=0)
    return torch.stack([x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])], 1)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _attention(b: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    width = x.shape[2] // heads
    q, k, v = (x @ b["attention.qkv.weight"].T + b["attention.qkv.bias"]).chunk(3, -1)
    parts = []
    for head in range(heads):
        at = slice(head * width, (head + 1) * width)
        scores = (q[..., at] @ k[..., at].transpose(1, 2) / math.sqrt(width)).exp()
        parts.append(scores / scores.sum(-1, keepdim=True) @ v[..., at])
    return torch.cat(parts, -1) @ b["attention.proj.weight"].T + b["attention.proj.bias"]
