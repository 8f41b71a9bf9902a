"""What lifting costs in a user's own loop: a lifted step against one of cross-entropy, on one GPU.

    python benchmarks/library_step.py            # writes a JSON line per case to standard output

torchvision's ResNet-18, SGD with momentum, data on the device; eager, under autocast (bf16, channels last), compiled
(the network in both cases, by nn.Module.compile), and autocast with the whole step captured in a CUDA graph. *lifted*
takes net.objective and its backward, *backward* takes net.backward in their place, and *side* that with a stream of its
own for what no image enters. Blocks of steps of all alternate in one process, and ratios are those of the medians.
Peak memory is torch's, of each alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

import protoseam as ps

CASES = [
    {"pixels": 224, "batch": 256, "classes": 1000},
    {"pixels": 32, "batch": 128, "classes": 100},
]
MODES = ("eager", "autocast", "compiled", "graph")
KINDS = ("cross-entropy", "lifted", "backward", "side")
BLOCKS, STEPS, WARMUP = 9, 10, 12


def stepper(kind: str, mode: str, case: dict[str, int]) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = resnet18(num_classes=case["classes"]).cuda()
    shape = case["batch"], 3, case["pixels"], case["pixels"]
    x = torch.randn(shape, device="cuda")
    y = torch.arange(case["batch"], device="cuda") % case["classes"]
    if mode != "eager":
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    net = None if kind == "cross-entropy" else ps.lift(model, num_classes=case["classes"], init="random")
    if mode == "compiled":
        (model if net is None else net.n1).compile()
    groups: Any = model.parameters() if net is None else net.param_groups(lr=0.01)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    side = torch.cuda.Stream() if kind == "side" else None

    def casting() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, enabled=mode != "eager")

    def step() -> None:
        if net is not None and kind != "lifted":
            optimizer.zero_grad()
            net.backward(x, y, side=side, casting=casting)
        else:
            with casting():
                value = F.cross_entropy(model(x), y) if net is None else net.objective(x, y).total
            optimizer.zero_grad()
            value.backward()
        optimizer.step()

    return captured(step) if mode == "graph" else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The whole step as one CUDA graph: what is left of a difference when no launch waits for the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(
        _: Callable[[], None] = step,
    ) -> None:  # step holds the tensors that the graph reads and writes
        graph.replay()

    return replay


def milliseconds(step: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / STEPS


def compare(mode: str, case: dict[str, int]) -> dict[str, Any]:
    peaks, steps = {}, {}
    for kind in KINDS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[kind] = stepper(kind, mode, case)
        for _ in range(WARMUP):
            steps[kind]()
        torch.cuda.synchronize()
        peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(BLOCKS):
        for kind in KINDS:
            times[kind].append(milliseconds(steps[kind]))
    medians = {kind: statistics.median(times[kind]) for kind in KINDS}
    return {
        **case,
        "mode": mode,
        "milliseconds": medians,
        "ratios": {kind: medians[kind] / medians["cross-entropy"] for kind in KINDS[1:]},
        "spread": {kind: max(times[kind]) - min(times[kind]) for kind in KINDS},
        "peak_mib": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--pixels", nargs="+", type=int, default=[case["pixels"] for case in CASES])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("library_step.py times steps on a CUDA device, and there is none here")
    torch.backends.cudnn.benchmark = True
    for case in (case for case in CASES if case["pixels"] in args.pixels):
        for mode in args.modes:
            row = compare(mode, case)
            row["device"], row["torch"] = torch.cuda.get_device_name(), torch.__version__
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
