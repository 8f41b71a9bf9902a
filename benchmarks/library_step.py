"""What lifting costs in a user's own loop: a step of net.objective against one of cross-entropy, on one GPU.

    python benchmarks/library_step.py            # writes a JSON line per case to standard output

torchvision's ResNet-18, SGD with momentum, data on the device; eager, under autocast (bf16, channels last), compiled
(the network in both cases, by nn.Module.compile), and autocast with the whole step captured in a CUDA graph. Blocks of
steps of the two alternate in one process, and the ratio is that of the medians. Peak memory is torch's, of each alone.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
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
    loss: Callable[[], torch.Tensor]
    if kind == "lifted":
        net = ps.lift(model, num_classes=case["classes"], init="random")
        groups: Any = net.param_groups(lr=0.01)
        if mode == "compiled":
            net.n1.compile()
        loss = lambda: net.objective(x, y).total  # noqa: E731
    else:
        groups = model.parameters()
        if mode == "compiled":
            model.compile()
        loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=mode != "eager"):
            value = loss()
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
    kinds = ("cross-entropy", "lifted")
    peaks, steps = {}, {}
    for kind in kinds:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[kind] = stepper(kind, mode, case)
        for _ in range(WARMUP):
            steps[kind]()
        torch.cuda.synchronize()
        peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(BLOCKS):
        for kind in kinds:
            times[kind].append(milliseconds(steps[kind]))
    medians = {kind: statistics.median(times[kind]) for kind in kinds}
    return {
        **case,
        "mode": mode,
        "milliseconds": medians,
        "ratio": medians["lifted"] / medians["cross-entropy"],
        "spread": {kind: max(times[kind]) - min(times[kind]) for kind in kinds},
        "peak_mib": peaks,
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("library_step.py times steps on a CUDA device, and there is none here")
    torch.backends.cudnn.benchmark = True
    for case in CASES:
        for mode in MODES:
            row = compare(mode, case)
            row["device"], row["torch"] = torch.cuda.get_device_name(), torch.__version__
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
