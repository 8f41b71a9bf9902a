"""Several runs side by side on one device: their steps interleave on streams of their own.

A small network leaves most of a large GPU idle. Each run keeps its own parameters, data order, random numbers
and graph, so packing changes when its kernels run and nothing of what they compute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from protoseam.engine.trainer import Run

__all__ = ["run_epoch_together"]


def run_epoch_together(runs: list[Run]) -> list[dict[str, Any]]:
    """One epoch of every run; returns their metrics."""
    for run in runs:
        with _on_stream(run):
            run.begin_epoch()
    for i in range(max(run.data.steps for run in runs)):
        for run in runs:
            if i < run.data.steps:
                with _on_stream(run):
                    run.step.run()
    for run in runs:
        run.prepare_next()
    rows = []
    for run in runs:
        with _on_stream(run):
            rows.append(run.end_epoch())
    return rows


def _on_stream(run: Run) -> AbstractContextManager[Any]:
    return nullcontext() if run.step.stream is None else torch.cuda.stream(run.step.stream)
