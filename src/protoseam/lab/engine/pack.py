"""Several runs side by side on one device: their steps interleave on streams of their own.

What one run leaves idle another can use: most of a device where launches or small kernels bound the step, a few
percent where they do not. Each run keeps its own parameters, data order, random numbers
and graph, so packing changes when its kernels run and nothing of what they compute. The one exception: on CUDA,
captured graphs share the device's generator, from which dropout draws; train such networks one at a time there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.engine.trainer import Run

__all__ = ["run_epoch_together"]


def run_epoch_together(runs: list[Run]) -> list[dict[str, Any]]:
    """One epoch of every run; returns their metrics."""
    turns = [_Turn(run, len(runs) > 1) for run in runs]
    for run in runs:
        if run.step.stream is not None:  # a state may have been loaded on the caller's stream
            run.step.stream.wait_stream(torch.cuda.current_stream(run.device))
    for turn in turns:
        with turn.taken() as run:
            run.begin_epoch()
    for i in range(max(run.data.steps for run in runs)):
        for turn in turns:
            if i < turn.run.data.steps:
                with turn.taken() as run:
                    run.step.run()
    for run in runs:
        run.prepare_next()
    rows = []
    for turn in turns:
        with turn.taken() as run:
            rows.append(run.end_epoch())
    return rows


class _Turn:
    """A run among others: its stream, and its own state of the generator that dropout on a CPU draws from."""

    def __init__(self, run: Run, shared: bool) -> None:
        self.run = run
        self.shared = shared and run.device.type == "cpu"
        self.drawn: Tensor | None = None

    @contextmanager
    def taken(self) -> Iterator[Run]:
        if self.drawn is not None:
            torch.set_rng_state(self.drawn)
        # run.step.stream is None on a CPU, and then this does nothing
        with torch.cuda.stream(self.run.step.stream):
            yield self.run
        if self.shared:
            self.drawn = torch.get_rng_state()
