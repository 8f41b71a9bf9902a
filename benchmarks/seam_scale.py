"""What the seam costs as classes and width grow: memory against its bars, time as ratios.

``python benchmarks/seam_scale.py --out results/bench/seam-scale-cpu.json``: about 3 min on one CPU core.
``python benchmarks/seam_scale.py --device cuda --out …``: the same on a GPU.

The seam alone is measured: N1 is the identity on given embeddings, N2 one Linear. Memory is what a case adds to
what was there before it: allocated bytes on CUDA, the resident set's high-water mark on a CPU (each case in a
process of its own, because that mark never falls).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import protoseam as ps

MB = 1e6
BATCH = 128


class Peak:
    """Bytes above the start: ``now()`` the largest so far."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.start = torch.cuda.memory_allocated() if self.cuda else self._resident()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def _resident(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def now(self) -> int:
        if self.cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - self.start
        return self._resident() - self.start


def seam(n: int, k: int, covariance: ps.AbstractCovariance, device: torch.device) -> ps.Lifted:
    head = nn.Linear(k, n, device=device)
    return ps.lift((nn.Identity(), head), num_classes=n, dim=k, covariance=covariance, init="random").to(
        device
    )


def step(net: ps.Lifted, z_BK: Tensor, y_B: Tensor) -> None:
    """Forward and backward of all three terms for given embeddings."""
    net.zero_grad(set_to_none=True)
    z_BK.grad = None
    net(z_BK, y_B).total.backward()


def batch(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    z_BK = torch.randn(BATCH, k, device=device, requires_grad=True)
    return z_BK, torch.randint(n, (BATCH,), device=device)


class Embeddings:
    """A loader of ``per_class`` embeddings a class, made as they are asked for, in an order that mixes classes."""

    def __init__(self, n: int, k: int, per_class: int, device: torch.device) -> None:
        self.n, self.k, self.per_class, self.device = n, k, per_class, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self.device).manual_seed(0)
        for _ in range(self.per_class):
            y_B = torch.arange(self.n, device=self.device)
            yield torch.randn(self.n, self.k, device=self.device, generator=generator), y_B


def memory(
    n: int, k: int, covariance: ps.AbstractCovariance, per_class: int, device: torch.device
) -> dict[str, float]:
    """Peaks after building the seam, after three steps, and after a refresh (each includes the earlier ones)."""
    _warm_up(device)
    peak = Peak(device)
    net = seam(n, k, covariance, device)
    found = {"state_MB": peak.now() / MB}
    z_BK, y_B = batch(n, k, device)
    for _ in range(3):
        step(net, z_BK, y_B)
    found["step_MB"] = peak.now() / MB
    net.zero_grad(set_to_none=True)
    if per_class:
        net.refresh(Embeddings(n, k, per_class, device))
        found["refresh_MB"] = peak.now() / MB
        found["embeddings_MB"] = n * per_class * k * 4 / MB
    factors = net.covariance.factors
    found["factors_MB"] = factors.numel() * factors.element_size() / MB
    found["peak_MB"] = peak.now() / MB
    return {name: round(value, 1) for name, value in found.items()}


def _warm_up(device: torch.device) -> None:
    """Load what the first use of each operation loads, so that it is not counted."""
    net = seam(8, 4, ps.ExactCovariance(), device)
    step(net, *batch(8, 4, device))
    net.refresh(Embeddings(8, 4, 8, device))


# name → (n, k, covariance, embeddings a class at the refresh, bar, what the bar is measured in)
CASES: dict[str, tuple[int, int, Callable[[], ps.AbstractCovariance], int, float, str]] = {
    "full factors": (1000, 512, ps.ExactCovariance, 16, 1.3, "× factors"),
    "full factors, |D_i| > k": (1000, 512, ps.ExactCovariance, 520, 1.3, "× factors"),
    "diagonal": (10_000, 128, lambda: ps.ExactCovariance(structure="diagonal"), 0, 1500, "MB a step"),
    # for information: running moments are float64 and kept beside the factors
    "full running": (1000, 256, ps.RunningCovariance, 1, 0.0, "× factors"),
}


def measure_memory(device: torch.device) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (n, k, covariance, per_class, bar, unit) in CASES.items():
        if device.type == "cuda":
            torch.cuda.empty_cache()
            case: dict[str, Any] = dict(memory(n, k, covariance(), per_class, device))
        else:
            command = [sys.executable, __file__, "--case", name]
            # glibc keeps freed blocks below 32 MiB for itself; hand them back, so that the mark is what is alive
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            case = json.loads(done.stdout)
        value = case["peak_MB"] / case["factors_MB"] if unit == "× factors" else case["step_MB"]
        case |= {"n": n, "k": k, "embeddings_per_class": per_class, "value": round(value, 3), "unit": unit}
        verdict = ""
        if bar:
            case |= {"bar": bar, "met": value <= bar}
            verdict = f"bar {bar:g}: {'met' if value <= bar else f'MISSED by {value / bar - 1:.0%}'}"
        shown = ", ".join(f"{key[:-3]} {mb:,.0f} MB" for key, mb in case.items() if key.endswith("_MB"))
        print(f"{name:24s} n={n:<6d} k={k:<4d} {value:8,.2f} {unit:10s} {verdict:20s} ({shown})", flush=True)
        found[name] = case
    return found


def seconds(net: ps.Lifted, z_BK: Tensor, y_B: Tensor, budget: float = 1.0) -> float:
    """The fastest of many steps, on a CPU in its own time: what else runs on the machine must not count."""
    cuda = z_BK.is_cuda
    clock = time.perf_counter if cuda else time.process_time

    def timed() -> float:
        begun = clock()
        step(net, z_BK, y_B)
        if cuda:
            torch.cuda.synchronize()
        return clock() - begun

    for _ in range(3):
        first = timed()
    return min(timed() for _ in range(max(10, min(200, int(budget / max(first, 1e-6))))))


def measure_time(device: torch.device) -> dict[str, list[dict[str, float]]]:
    sweeps = {
        "n doubles, k=32": [(n, 32) for n in (100, 200, 400, 800, 1600)],
        "k doubles, n=100": [(100, k) for k in (32, 64, 128, 256, 512)],
    }
    found: dict[str, list[dict[str, float]]] = {}
    for estimator in (ps.ExactCovariance, ps.RunningCovariance):
        for title, sizes in sweeps.items():
            rows: list[dict[str, float]] = []
            for n, k in sizes:
                net = seam(n, k, estimator(), device)
                ms = 1e3 * seconds(net, *batch(n, k, device))
                ratio = ms / rows[-1]["ms"] if rows else 1.0
                rows.append({"n": n, "k": k, "ms": round(ms, 4), "ratio": round(ratio, 2)})
            name = f"{estimator.__name__}, {title}"
            found[name] = rows
            print(
                f"{name:36s} {rows[0]['ms']:6.2f} ms  "
                + "  ".join(f"×{r['ratio']:.2f}" for r in rows[1:])
                + f"  = {rows[-1]['ms']:.1f} ms",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and time of the seam alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--case", choices=CASES, help="one memory case on the CPU, as a line of JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.case:
        n, k, covariance, per_class, _, _ = CASES[args.case]
        print(json.dumps(memory(n, k, covariance(), per_class, device)))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of the CPU; one thread's time can be told from other work
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": BATCH,
        "memory": measure_memory(device),
        "time": measure_time(device),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
