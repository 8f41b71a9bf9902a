"""What the theory's audit adds to training, as a share of an epoch, and what the whole command costs.

    python benchmarks/audit.py --out results/bench/audit-cpu.json                  about 1 min on one CPU core
    python benchmarks/audit.py --device cuda --out results/bench/audit-cuda.json   about 1 min on a GPU

``share`` is seconds of one quick audit over seconds of one epoch, divided by 10: the cost of audit_every=10. Epochs
and audits alternate, so that a drift of the clock meets both; medians. On a CPU with one thread the time is the
process's own, which other processes on the machine do not change; on CUDA it is wall-clock time between
synchronisations.

The parts: digits with the MLP, whose epochs are the shortest there are; CIFAR-shaped random images (on a CPU with
the small convnet and an epoch extrapolated from some steps); and the audit alone on 45,000 embeddings of width 32 in
100 classes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protoseam.core.covariance import class_moments, factorize
from protoseam.lab.audit import FULL, QUICK, audit_seam, audited_head
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import OptimConfig, RunConfig
from protoseam.lab.engine.epoch import audit as audit_epoch
from protoseam.lab.engine.epoch import begin_epoch, end_epoch, train_epoch
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import environment

EVERY = 10
TARGET = 0.02


def clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def seconds(work: Callable[[], Any], now: Callable[[], float], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = now()
        work()
        times.append(now() - start)
    return statistics.median(times)


def share(audit: float, epoch: float) -> dict[str, float]:
    return {"audit_seconds": audit, "epoch_seconds": epoch, "share": audit / epoch / EVERY}


def alternate(run: Run, now: Callable[[], float], epochs: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {"epoch": [], "audit": []}
    for _ in range(epochs):
        marks = [now()]
        train_epoch(run)
        marks.append(now())
        audit_epoch(run)
        marks.append(now())
        spent["epoch"].append(marks[1] - marks[0])
        spent["audit"].append(marks[2] - marks[1])
    skip = 2  # compilation, capture, first touches
    return share(statistics.median(spent["audit"][skip:]), statistics.median(spent["epoch"][skip:]))


def part_digits(device: torch.device) -> dict[str, Any]:
    out, data = {}, load("digits")
    for augment in ("none", "paper"):
        optim = OptimConfig(lr=0.01)
        config = RunConfig(
            data="digits", model="mlp", augment=augment, optim=optim, device=str(device), epochs=50
        )
        out[f"augment={augment}"] = alternate(Run(config, data), clock(device), 22)
    return out


def images(count: int, classes: int = 100) -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for n in (count, classes)]
    y = [np.arange(n, dtype=np.int64) % classes for n in (count, classes)]
    return ArrayDataset("synthetic", x[0], y[0], x[1], y[1], tuple(map(str, range(classes))))


def part_images(device: torch.device) -> dict[str, Any]:
    now = clock(device)
    if device.type == "cuda":
        out = {}
        for model in ("resnet8", "vit_s"):
            config = RunConfig(data="synthetic", model=model, device=str(device), epochs=20)
            out[model] = alternate(Run(config, images(50_000)), now, 7)
        return out
    # validation=0.5: as many validation images as CIFAR-100's 5,000, and few to train on
    config = RunConfig(
        data="synthetic",
        model="convnet",
        device="cpu",
        epochs=2,
        validation=0.5,
        eval_every=2,
        augment="none",
    )
    run = Run(config, images(10_000))
    begin_epoch(run)
    step = seconds(run.step.run, now, 8)
    end_epoch(run, time.perf_counter())
    return {"convnet": share(seconds(lambda: audit_epoch(run), now, 3), step * (45_000 // config.batch_size))}


def part_embeddings(device: torch.device) -> dict[str, Any]:
    """The audit alone, without a sweep of the network."""
    N, C, K = 45_000, 100, 32
    generator = torch.Generator().manual_seed(0)
    s_CK = torch.randn(C, K, generator=generator)
    y_N = torch.arange(N) % C
    z_NK = s_CK[y_N] + 0.3 * torch.randn(N, K, generator=generator)
    factors, _ = factorize(class_moments(z_NK, y_N, C)[2], 0.1)
    linear = nn.Linear(*s_CK.T.shape, bias=False)
    linear.weight = nn.Parameter(s_CK.to(device))
    head = audited_head(linear)
    z_NK, y_N, s_CK, factors = (t.to(device) for t in (z_NK, y_N, s_CK, factors))

    def audit(settings: Any) -> Callable[[], Any]:
        return lambda: audit_seam(
            z_NK, y_N, s_CK, factors, head, rho=4.0, floor=0.1, generator=generator, settings=settings
        )

    now = clock(device)
    quick = seconds(audit(QUICK), now, 5)
    start = now()
    audit(FULL)()
    return {"samples": N, "classes": C, "dim": K, "quick_seconds": quick, "full_seconds": now() - start}


PARTS = {"digits": part_digits, "images": part_images, "embeddings": part_embeddings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=None, help="write the figures there, as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    result: dict[str, Any] = {"environment": environment(), "every": EVERY, "target": TARGET}
    for name in args.parts:
        result[name] = PARTS[name](device)
        for case, found in result[name].items():
            if isinstance(found, dict):
                verdict = "" if found["share"] <= TARGET else f"  over the target of {TARGET:.0%}"
                print(f"{name} {case}: {100 * found['share']:.2f} % of an epoch{verdict}", flush=True)
        if "quick_seconds" in result[name]:
            print(f"{name}: {result[name]}", flush=True)
    # the same audit against the epoch that has as many training images as there are embeddings
    if "images" in result and "embeddings" in result:
        for case, found in result["images"].items():
            ratio = result["embeddings"]["quick_seconds"] / found["epoch_seconds"] / EVERY
            result["embeddings"][f"share_of_{case}_epoch"] = ratio
            print(f"embeddings, against an epoch of {case}: {100 * ratio:.2f} %")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
