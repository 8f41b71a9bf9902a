"""Time of the augmentation per 5,000 images, eager, compiled and by its kernels, at 32 and 64 pixels.

    python benchmarks/augmentation.py [--out FILE] [--images 5000] [--repeats 20] [--device cuda]

Prints one JSON object and writes it to FILE. On CUDA the times are medians between events, the peak memory is
what a call adds to its input, and each is also timed as a CUDA graph replay, without launch costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.pipeline.augment import Augmentation, augment, augment_with


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of a call, after two to warm up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def graph_replay(call: Callable[[], Tensor]) -> Callable[[], None]:
    """The call captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def by_kernels(levels: Tensor, indices: Tensor, *, dtype: torch.dtype, **options: Any) -> Tensor:
    from protoseam.lab.kernels import augment as kernels

    out = torch.empty_like(levels, dtype=dtype)
    augment_with(kernels, out, levels, indices, **options)
    return out


def measure(size: int, images: int, device: torch.device, repeats: int) -> dict[str, float]:
    """One row of the report."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=generator)
    levels = levels.to(device, memory_format=torch.channels_last)  # as training has them
    indices = torch.arange(images, device=device)
    seed, epoch = torch.tensor(42, device=device), torch.tensor(0, device=device)

    def run(function: Callable[..., Tensor]) -> Tensor:
        return function(
            levels,
            indices,
            policy=Augmentation(),
            seed=seed,
            epoch=epoch,
            mean=(0.49, 0.48, 0.45),
            std=(0.25, 0.24, 0.26),
            dtype=torch.bfloat16,
        )

    row: dict[str, float] = {}
    scale = 5000 / images
    ways = {"eager": augment, "compiled": torch.compile(augment, fullgraph=True, dynamic=False)}
    if device.type == "cuda":
        ways["kernels"] = by_kernels
    for name, function in ways.items():
        begin = time.perf_counter()
        run(function)
        row[f"{name}_first_call_s"] = time.perf_counter() - begin
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(function)
            row[f"{name}_peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row[f"{name}_ms_per_5000"] = scale * milliseconds(lambda f=function: run(f), device, repeats)
        if device.type == "cuda":
            replay = graph_replay(lambda f=function: run(f))
            row[f"{name}_graph_ms_per_5000"] = scale * milliseconds(replay, device, repeats)
    for name, function in list(ways.items())[1:]:  # against the first, the plain functions
        row[f"{name}_largest_difference"] = float((run(augment) - run(function)).abs().max())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "images": options.images,
        "sizes": {},
    }
    for size in (32, 64):
        report["sizes"][str(size)] = measure(size, options.images, device, options.repeats)
    text = json.dumps(report, indent=2)
    sys.stdout.write(text + "\n")
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
