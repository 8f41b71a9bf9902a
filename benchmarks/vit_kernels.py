"""The kernels of ViT-S's block, each alone, in several shapes and beside what they could be replaced by.

    python benchmarks/vit_kernels.py --out vit-kernels.json       a CUDA device, about 2 min

Microseconds a launch, by graphs of 30 launches over the tensors of six blocks, so that the caches are about as warm
as in training. A candidate that is not in the library is here with its code.
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

from protoseam.lab.engine.rundir import environment
from protoseam.lab.kernels import vit as vit_kernels
from protoseam.lab.kernels import vit_launches
from protoseam.lab.kernels.vit import _normal_tail
from protoseam.lab.kernels.vit_launches import described

BLOCKS, BATCH, TOKENS, WIDTH, HIDDEN, HEADS = 6, 128, 64, 256, 1024, 8
T, D, F = BATCH * TOKENS, WIDTH, HIDDEN


@triton.jit
def linear_gelu_slope(
    a_desc, w_desc, bias, slope, out,
    K: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """GELU and GELU' of a·wᵀ + bias in the product's epilogue, instead of in a kernel of their own."""
    first = (tl.program_id(0) // (F // BN)) * BM
    col = (tl.program_id(0) % (F // BN)) * BN
    cols = col + tl.arange(0, BN)
    early = tl.load(bias + cols)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([first, k]), w_desc.load([col, k]).T, acc)
    v = (acc + early.to(tl.float32)[None, :]).to(tl.bfloat16).to(tl.float32)
    tail, e = _normal_tail(v)
    below = tl.where(v >= 0.0, 1.0 - tail, tail)
    at = (first + tl.arange(0, BM))[:, None] * F + cols[None, :]
    tl.store(out + at, (v * below).to(tl.bfloat16))
    tl.store(slope + at, (below + v * e * 0.3989422804014327).to(tl.bfloat16))


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
    for rows, warps, stages in ((64, 8, 3), (64, 8, 4), (64, 8, 5), (64, 4, 4), (128, 8, 3), (128, 8, 4)):
        shape = f"{rows} rows, {warps} warps, {stages} stages"
        more: dict[str, Any] = {"D": D, "DROP": False, "BM": rows, "BK": 64}
        more |= {"num_warps": warps, "num_stages": stages}

        def add_norm(
            i: int, a: list[Tensor], w: list[Tensor], more: dict[str, Any] = more, rows: int = rows
        ) -> None:
            vit_kernels.linear_add_norm[(T // rows,)](
                described(a[i], [rows, 64]), described(w[i], [D, 64]), b.vector[i], b.narrow[0][i], b.vector[i],
                b.vector[i], b.narrow[1][i], b.narrow[2][i], b.stats[0], b.stats[1], 1e-5, b.narrow[0][i], 1.0,
                K=a[i].shape[1], XROWS=0, POOL=False, **more,
            )  # fmt: skip

        def backward(
            i: int, d: list[Tensor], w: list[Tensor], more: dict[str, Any] = more, rows: int = rows
        ) -> None:
            vit_kernels.linear_norm_backward[(T // rows,)](
                described(d[i], [rows, 64]), described(w[i], [64, D]), b.narrow[0][i], b.narrow[1][i], b.stats[0],
                b.stats[1], b.vector[i], b.narrow[2][i], b.part[i], 0, b.part.shape[2], b.narrow[0][i],
                b.narrow[2][i], 1.0, K=d[i].shape[1], **more,
            )  # fmt: skip

        b(f"linear_add_norm K=1024, {shape}", lambda i, f=add_norm: f(i, b.wide[0], b.w2))
        b(f"linear_add_norm K=256, {shape}", lambda i, f=add_norm: f(i, b.narrow[3], b.wo))
        b(f"linear_norm_backward K=1024, {shape}", lambda i, f=backward: f(i, b.wide[0], b.w1))
        b(f"linear_norm_backward K=768, {shape}", lambda i, f=backward: f(i, b.triple[0], b.wqkv))


def activations(b: Bench) -> None:
    width = b.part.shape[2]
    b(
        "gelu",
        lambda i: vit_kernels.gelu[(T * F // 4096,)](
            b.wide[0][i], b.wide[1][i], b.wide[0][i], 1.0, DROP=False, BLOCK=4096, num_warps=8
        ),
    )
    shapes = [(128, 128, 8, 3), (128, 128, 8, 2), (64, 256, 8, 3), (64, 128, 4, 4), (128, 256, 8, 3)]
    for rows, cols, warps, stages in shapes:
        shape = f"{rows}×{cols}, {warps} warps, {stages} stages"
        grid = (T // rows * (F // cols),)
        tiles: dict[str, Any] = {"K": D, "F": F, "BM": rows, "BN": cols, "BK": 64, "num_warps": warps}
        tiles["num_stages"] = stages
        b(
            f"linear_gelu, {shape}",
            lambda i, g=grid, r=rows, c=cols, t=tiles: vit_kernels.linear_gelu[g](
                described(b.narrow[0][i], [r, 64]), described(b.w1[i], [c, 64]), b.long[i], b.wide[1][i], **t
            ),
        )
        b(
            f"linear_gelu_slope, {shape}",
            lambda i, g=grid, r=rows, c=cols, t=tiles: linear_gelu_slope[g](
                described(b.narrow[0][i], [r, 64]), described(b.w1[i], [c, 64]), b.long[i], b.wide[0][i],
                b.wide[1][i], **t,
            ),
        )  # fmt: skip
        b(
            f"linear_scale_backward, {shape}",
            lambda i, g=grid, r=rows, c=cols, t=tiles: vit_kernels.linear_scale_backward[g](
                described(b.narrow[0][i], [r, 64]), described(b.w2[i], [64, c]), b.wide[0][i], b.wide[1][i],
                b.part[i], 0, width, L=TOKENS, **t,
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

    b("weight_gradients and add_slices", lambda i: vit_launches.weight_gradients(pairs(i)))
    b("weight gradients by cuBLAS", lambda i: [torch.mm(d.t(), x) for d, x in pairs(i)])
    shapes = [(d.shape[1], x.shape[1]) for d, x in pairs(0)]
    total = sum(o * i for o, i in shapes)
    sizes: dict[str, Any] = {
        f"{side}{j}": n for j, pair in enumerate(shapes) for side, n in zip("OI", pair, strict=True)
    }

    def launch(i: int, cols: int, warps: int, stages: int, programs: int) -> None:
        tiles = sum(o // 128 * (n // cols) for o, n in shapes)
        slices = max(1, programs // tiles)
        part = torch.empty(slices, total, device="cuda")
        blocks = [[64, 128], [64, cols]] * 4
        tensors = [t for pair in pairs(i) for t in pair]
        vit_kernels.weight_gradients[(tiles * slices,)](
            *(described(t, block) for t, block in zip(tensors, blocks, strict=True)), part, T,
            -(-(T // 64) // slices), total, BM=128, BN=cols, BK=64, num_warps=warps, num_stages=stages, **sizes,
        )  # fmt: skip

    for choice in ((128, 8, 3, 264), (128, 4, 3, 264), (128, 8, 4, 132), (256, 8, 3, 132), (256, 8, 4, 132)):
        cols, warps, stages, programs = choice
        b(
            f"weight_gradients alone, 128×{cols}, {warps} warps, {stages} stages, {programs} programs",
            lambda i, c=choice: launch(i, *c),
        )


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
