"""The kernels of ViT-S's block, each alone, in several shapes and beside what they could be replaced by.

    python benchmarks/vit_kernels.py --out results/bench/vit-kernels-h200.json       a CUDA device, about 2 min

Microseconds a launch, by graphs of 30 launches over the tensors of six blocks, so that the caches are about as warm
as in training. Candidates that lost, and are not in the library, are kept here with their code.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from protoseam.engine.rundir import environment
from protoseam.models import fused_vit, vit_kernels
from protoseam.models.fused_vit import _described as described
from protoseam.models.vit_kernels import _normal_tail

BLOCKS, BATCH, TOKENS, WIDTH, HIDDEN, HEADS = 6, 128, 64, 256, 1024, 8
T, D, F = BATCH * TOKENS, WIDTH, HIDDEN


@triton.jit
def linear_gelu(
    a_desc, w_desc, bias, h, out,
    K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h = a·wᵀ + bias and out = GELU(h), in the product's epilogue."""
    first = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([first, k]), w_desc.load([col, k]).T, acc)
    cols = col + tl.arange(0, BN)
    at = (first + tl.arange(0, BM))[:, None] * F + cols[None, :]
    rounded = (acc + tl.load(bias + cols).to(tl.float32)[None, :]).to(tl.bfloat16)
    tl.store(h + at, rounded)
    v = rounded.to(tl.float32)
    tail, _ = _normal_tail(v)
    tl.store(out + at, (v * tl.where(v >= 0.0, 1.0 - tail, tail)).to(tl.bfloat16))


@triton.jit
def linear_gelu_backward(
    d_desc, w_desc, h, dh, part, slot, width,
    K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dh = (d·w)·GELU'(h) and its sums over BM rows, in the product's epilogue."""
    pid = tl.program_id(0)
    first = pid * BM
    col = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(d_desc.load([first, k]), w_desc.load([k, col]), acc)
    cols = col + tl.arange(0, BN)
    at = (first + tl.arange(0, BM))[:, None] * F + cols[None, :]
    v = tl.load(h + at).to(tl.float32)
    tail, e = _normal_tail(v)
    slope = tl.where(v >= 0.0, 1.0 - tail, tail) + v * e * 0.3989422804014327
    d = (acc * slope).to(tl.bfloat16)
    tl.store(dh + at, d)
    tl.store(part + pid * width + slot + cols, tl.sum(d.to(tl.float32), 0))


@triton.jit
def _slice(d_desc, x_desc, oc, ic, lo, hi, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(lo, hi):
        acc = tl.dot(d_desc.load([i * BK, oc]).T, x_desc.load([i * BK, ic]), acc)
    return acc


@triton.jit
def described_weight_gradients(
    d0, x0, d1, x1, d2, x2, d3, x3, part, T, steps, total,
    O0: tl.constexpr, I0: tl.constexpr, O1: tl.constexpr, I1: tl.constexpr,
    O2: tl.constexpr, I2: tl.constexpr, O3: tl.constexpr, I3: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`vit_kernels.weight_gradients` with descriptors, which the hardware copies by itself."""
    n0: tl.constexpr = (O0 // BM) * (I0 // BN)
    n1: tl.constexpr = n0 + (O1 // BM) * (I1 // BN)
    n2: tl.constexpr = n1 + (O2 // BM) * (I2 // BN)
    n3: tl.constexpr = n2 + (O3 // BM) * (I3 // BN)
    t = tl.program_id(0) % n3
    s = tl.program_id(0) // n3
    lo, hi = s * steps, tl.minimum((s + 1) * steps, T // BK)
    if t >= n2:
        ins, base, tile = I3, O0 * I0 + O1 * I1 + O2 * I2, t - n2
        oc, ic = (tile // (I3 // BN)) * BM, (tile % (I3 // BN)) * BN
        acc = _slice(d3, x3, oc, ic, lo, hi, BM, BN, BK)
    elif t >= n1:
        ins, base, tile = I2, O0 * I0 + O1 * I1, t - n1
        oc, ic = (tile // (I2 // BN)) * BM, (tile % (I2 // BN)) * BN
        acc = _slice(d2, x2, oc, ic, lo, hi, BM, BN, BK)
    elif t >= n0:
        ins, base, tile = I1, O0 * I0, t - n0
        oc, ic = (tile // (I1 // BN)) * BM, (tile % (I1 // BN)) * BN
        acc = _slice(d1, x1, oc, ic, lo, hi, BM, BN, BK)
    else:
        ins, base, tile = I0, 0, t
        oc, ic = (tile // (I0 // BN)) * BM, (tile % (I0 // BN)) * BN
        acc = _slice(d0, x0, oc, ic, lo, hi, BM, BN, BK)
    rows = oc + tl.arange(0, BM)
    cols = ic + tl.arange(0, BN)
    tl.store(part + s * total + base + rows[:, None] * ins + cols[None, :], acc)


class Bench:
    """The tensors of six blocks, and the microseconds found so far."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.narrow = [self.tensors(T, D) for _ in range(5)]
        self.wide = [self.tensors(T, F) for _ in range(3)]
        self.triple = [self.tensors(T, 3 * D) for _ in range(2)]
        self.w1, self.w2 = self.tensors(F, D), self.tensors(D, F)
        self.wqkv, self.wo = self.tensors(3 * D, D), self.tensors(D, D)
        self.vector, self.long = self.tensors(D), self.tensors(F)
        self.stats = torch.ones(2, T, device="cuda")
        self.part = torch.zeros(BLOCKS, 1024, 9 * D + F, device="cuda")

    def tensors(self, *shape: int) -> list[Tensor]:
        return [0.1 * torch.randn(*shape, device="cuda").bfloat16() for _ in range(BLOCKS)]

    def __call__(self, label: str, launch: Callable[[int], Any]) -> None:
        try:
            for i in range(BLOCKS):
                launch(i)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    for i in range(BLOCKS):
                        launch(i)
            graph.replay()
            times = []
            for _ in range(3):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1000 / (2 * 5 * BLOCKS))
        except Exception as error:  # a shape that does not compile or fit is an answer too
            print(f"    fails  {label}: {type(error).__name__}", flush=True)
            return
        self.found[label] = min(times)
        print(f"{min(times):8.2f}  {label}", flush=True)


def products(b: Bench) -> None:
    b("dy·w2 by cuBLAS", lambda i: torch.mm(b.narrow[0][i], b.w2[i]))
    b("n2·w1 by cuBLAS", lambda i: torch.addmm(b.long[i], b.narrow[0][i], b.w1[i].t()))
    b("dh·w1 by cuBLAS", lambda i: torch.mm(b.wide[0][i], b.w1[i]))
    b("dqkv·wqkv by cuBLAS", lambda i: torch.mm(b.triple[0][i], b.wqkv[i]))
    b("dx1·wo by cuBLAS", lambda i: torch.mm(b.narrow[0][i], b.wo[i]))
    for rows, warps, stages in ((64, 8, 3), (64, 8, 4), (64, 8, 5), (64, 4, 4), (128, 8, 3), (128, 16, 3)):
        shape = f"{rows} rows, {warps} warps, {stages} stages"
        more: dict[str, Any] = {"D": D, "BM": rows, "BK": 64, "num_warps": warps, "num_stages": stages}

        def add_norm(
            i: int, a: list[Tensor], w: list[Tensor], more: dict[str, Any] = more, rows: int = rows
        ) -> None:
            vit_kernels.linear_add_norm[(T // rows,)](
                described(a[i], [rows, 64]), described(w[i], [D, 64]), b.vector[i], b.narrow[0][i], b.vector[i],
                b.vector[i], b.narrow[1][i], b.narrow[2][i], b.stats[0], b.stats[1], 1e-5,
                K=a[i].shape[1], XROWS=0, POOL=False, **more,
            )  # fmt: skip

        def backward(
            i: int, d: list[Tensor], w: list[Tensor], more: dict[str, Any] = more, rows: int = rows
        ) -> None:
            vit_kernels.linear_norm_backward[(T // rows,)](
                described(d[i], [rows, 64]), described(w[i], [64, D]), b.narrow[0][i], b.narrow[1][i], b.stats[0],
                b.stats[1], b.vector[i], b.narrow[2][i], b.part[i], 0, b.part.shape[2], K=d[i].shape[1], **more,
            )  # fmt: skip

        b(f"linear_add_norm K=1024, {shape}", lambda i, f=add_norm: f(i, b.wide[0], b.w2))
        b(f"linear_add_norm K=256, {shape}", lambda i, f=add_norm: f(i, b.narrow[3], b.wo))
        b(f"linear_norm_backward K=1024, {shape}", lambda i, f=backward: f(i, b.wide[0], b.w1))
        b(f"linear_norm_backward K=768, {shape}", lambda i, f=backward: f(i, b.triple[0], b.wqkv))


def activations(b: Bench) -> None:
    width = b.part.shape[2]
    b(
        "gelu",
        lambda i: vit_kernels.gelu[(T * F // 4096,)](b.wide[0][i], b.wide[1][i], BLOCK=4096, num_warps=8),
    )
    for rows, cols, warps in ((64, 64, 4), (32, 128, 4), (32, 128, 8), (64, 128, 4), (128, 64, 4)):
        b(
            f"gelu_backward, {rows}×{cols}, {warps} warps",
            lambda i, r=rows, c=cols, w=warps: vit_kernels.gelu_backward[(T // r, F // c)](
                b.wide[0][i], b.wide[1][i], b.wide[2][i], b.part[i], 0, width, F=F, BC=c, BM=r, num_warps=w
            ),
        )
    for rows, cols, warps in ((128, 128, 8), (128, 256, 8), (64, 128, 4)):
        tiles: dict[str, Any] = {"K": D, "F": F, "BM": rows, "BN": cols, "BK": 64, "num_warps": warps}
        b(
            f"linear_gelu (lost), {rows}×{cols}, {warps} warps",
            lambda i, r=rows, c=cols, t=tiles: linear_gelu[(T // r, F // c)](
                described(b.narrow[0][i], [r, 64]), described(b.w1[i], [c, 64]), b.long[i], b.wide[0][i],
                b.wide[1][i], num_stages=3, **t,
            ),
        )  # fmt: skip
        b(
            f"linear_gelu_backward (lost), {rows}×{cols}, {warps} warps",
            lambda i, r=rows, c=cols, t=tiles: linear_gelu_backward[(T // r, F // c)](
                described(b.narrow[0][i], [r, 64]), described(b.w2[i], [64, c]), b.wide[0][i], b.wide[1][i],
                b.part[i], 0, width, num_stages=3, **t,
            ),
        )  # fmt: skip


def attention(b: Bench) -> None:
    sizes: dict[str, Any] = {"L": TOKENS, "A": HEADS, "E": D // HEADS}
    for warps in (2, 4, 8):
        b(
            f"attention, {warps} warps",
            lambda i, w=warps: vit_kernels.attention[(BATCH * HEADS,)](
                b.triple[0][i], b.narrow[0][i], 0.18, num_warps=w, **sizes
            ),
        )
        b(
            f"attention_backward, {warps} warps",
            lambda i, w=warps: vit_kernels.attention_backward[(BATCH * HEADS,)](
                b.triple[0][i], b.narrow[0][i], b.triple[1][i], b.part[i], 0.18, 0, b.part.shape[2],
                num_warps=w, **sizes,
            ),
        )  # fmt: skip


def weight_gradients(b: Bench) -> None:
    def pairs(i: int) -> list[tuple[Tensor, Tensor]]:
        narrow, wide = b.narrow, b.wide
        return [
            (b.triple[0][i], narrow[0][i]),
            (narrow[1][i], narrow[2][i]),
            (wide[0][i], narrow[3][i]),
            (narrow[4][i], wide[1][i]),
        ]

    b("weight_gradients and add_slices", lambda i: fused_vit._weight_gradients(pairs(i)))
    b("weight gradients by cuBLAS", lambda i: [torch.mm(d.t(), x) for d, x in pairs(i)])
    shapes = [(d.shape[1], x.shape[1]) for d, x in pairs(0)]
    total = sum(o * i for o, i in shapes)
    sizes: dict[str, Any] = {
        f"{side}{j}": n for j, pair in enumerate(shapes) for side, n in zip("OI", pair, strict=True)
    }

    def launch(i: int, kernel: Any, wrap: bool, cols: int, depth: int, warps: int, stages: int) -> None:
        tiles = sum(o // 128 * (n // cols) for o, n in shapes)
        slices = max(1, 264 // tiles)
        part = torch.empty(slices, total, device="cuda")
        tensors: list[Any] = [t for pair in pairs(i) for t in pair]
        if wrap:
            blocks = [[depth, 128], [depth, cols]] * 4
            tensors = [described(t, block) for t, block in zip(tensors, blocks, strict=True)]
        kernel[(tiles * slices,)](
            *tensors, part, T, -(-(T // depth) // slices), total, BM=128, BN=cols, BK=depth, num_warps=warps,
            num_stages=stages, **sizes,
        )  # fmt: skip

    for cols, depth, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (128, 32, 4, 5),
        (256, 64, 8, 3),
        (128, 64, 8, 4),
    ):
        shape = f"128×{cols}×{depth}, {warps} warps, {stages} stages"
        for name, kernel, wrap in (
            ("weight_gradients", vit_kernels.weight_gradients, False),
            ("described_weight_gradients", described_weight_gradients, True),
        ):
            choice = (kernel, wrap, cols, depth, warps, stages)
            b(f"{name} alone, {shape}", lambda i, c=choice: launch(i, *c))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bench = Bench()
    for part in (products, activations, attention, weight_gradients):
        part(bench)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"environment": environment(), "microseconds": bench.found}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
