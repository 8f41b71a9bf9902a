"""Six runs on one CUDA device, side by side in several ways, against six in a row.

    python benchmarks/pack_ways.py --out pack-ways.json

A way is a ratio: seconds of fifty steps of each run alone, added up, by seconds of the same steps together. Ways:
a stream each, which is what the engine does; all as branches of one CUDA graph; and a part of the multiprocessors
for each group of runs (green contexts, of the driver: torch's own always take the first multiprocessors).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import torch

from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.engine.trainer import Run

RUNS, STEPS = 6, 50


def runs_of(model: str, data: ArrayDataset, streams: list[torch.cuda.Stream] | None = None) -> list[Run]:
    runs = [Run(engine.config(model, seed=seed), data) for seed in range(RUNS)]
    for i, run in enumerate(runs):
        if streams is not None:
            run.step.stream = streams[i]
            run.step.stream.wait_stream(torch.cuda.default_stream())
        engine.begin(run)
    return runs


def together(runs: list[Run]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(STEPS):
            for run in runs:
                with torch.cuda.stream(run.step.stream):
                    run.step.run()
        for run in runs:
            run.step.counter.zero_()

    return work


def one_graph(runs: list[Run]) -> Callable[[], None]:
    graph, trunk = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for run in runs:
        graph.register_generator_state(run.step.generator)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=trunk):
        for run in runs:
            run.step.stream.wait_stream(trunk)
            with torch.cuda.stream(run.step.stream):
                run.step.fused.body()
        for run in runs:
            trunk.wait_stream(run.step.stream)
    for run in runs:
        run.step.fused.update.settle()

    def work() -> None:
        with torch.cuda.stream(trunk):
            for _ in range(STEPS):
                graph.replay()
            for run in runs:
                run.step.counter.zero_()

    return work


class Driver:
    """The few calls of the CUDA driver that part the multiprocessors."""

    SM, DEFAULT_STREAM, NON_BLOCKING = 1, 1, 1
    ALONE = 1  # multiprocessors one by one, not in the groups that a cluster of thread blocks may span
    BYTES = 144  # of a CUdevResource

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(self.device), torch.cuda.current_device())

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answered with error {status}")

    def streams(self, parts: int, multiprocessors: int, flags: int) -> list[torch.cuda.Stream]:
        """One in each of ``parts`` disjoint groups of at least so many multiprocessors."""
        whole, groups = (ctypes.create_string_buffer(n * self.BYTES) for n in (1, parts))
        self("cuDeviceGetDevResource", self.device, whole, self.SM)
        count = ctypes.c_uint(parts)  # all at once: a group or a remainder cannot be split again
        self(
            "cuDevSmResourceSplitByCount",
            groups, ctypes.byref(count), whole, None, ctypes.c_uint(flags), ctypes.c_uint(multiprocessors),
        )  # fmt: skip
        if count.value < parts:
            raise RuntimeError(f"only {count.value} groups of {multiprocessors} multiprocessors")
        out: list[torch.cuda.Stream] = []
        for i in range(parts):
            described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
            group = ctypes.byref(groups, i * self.BYTES)
            self("cuDevResourceGenerateDesc", ctypes.byref(described), group, ctypes.c_uint(1))
            self(
                "cuGreenCtxCreate",
                ctypes.byref(context), described, self.device, ctypes.c_uint(self.DEFAULT_STREAM),
            )  # fmt: skip
            self("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(self.NON_BLOCKING), 0)
            assert stream.value is not None
            out.append(torch.cuda.ExternalStream(stream.value))
        return out


def measure(model: str, data: ArrayDataset) -> dict[str, float | str]:
    out: dict[str, float | str] = {}

    def note(way: str, work: Callable[[], Callable[[], None]]) -> None:
        try:
            out[way] = row / engine.seconds(work(), 3)
        except Exception as error:  # a way that a driver does not offer must not cost the others' figures
            out[way] = f"{type(error).__name__}: {error}"
        print(model, out, flush=True)
        gc.collect()
        torch.cuda.empty_cache()

    runs = runs_of(model, data)
    row = sum(engine.seconds(engine.steps_of(run, STEPS), 3) for run in runs)
    note("a stream each", lambda: together(runs))
    note("one graph", lambda: one_graph(runs))
    runs.clear()
    for parts, multiprocessors, flags in ((2, 64, 0), (3, 40, 0), (6, 16, 0), (6, 22, Driver.ALONE)):

        def apart(
            parts: int = parts, multiprocessors: int = multiprocessors, flags: int = flags
        ) -> Callable[[], None]:
            streams = Driver().streams(parts, multiprocessors, flags)
            return together(runs_of(model, data, [streams[i % parts] for i in range(RUNS)]))

        note(f"{parts} parts of {multiprocessors} multiprocessors", apart)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    data = engine.synthetic()
    found = {model: measure(model, data) for model in ("resnet8", "vit_s")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
