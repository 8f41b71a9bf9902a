"""The seam's share of a training step on a CPU: ResNet-8, batch 128, 100 classes, k = 32.

    python benchmarks/seam_cpu.py --out results/bench/seam-cpu.json

Times whole lifted steps, and the seam's own part alone (the three terms, forward and backward, from given
embeddings). The two alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import protoseam as ps
from protoseam.lab import models
from protoseam.lab.engine.rundir import environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    result: dict[str, object] = {"environment": environment(), "threads": torch.get_num_threads()}
    for name, covariance in {"exact": ps.ExactCovariance(), "running": ps.RunningCovariance()}.items():
        torch.manual_seed(0)
        net = ps.lift(models.resnet8(100), num_classes=100, dim=32, init="random", covariance=covariance)
        optimizer = torch.optim.SGD(net.param_groups(lr=0.01), momentum=0.9, nesterov=True)
        x, y = torch.randn(128, 3, 32, 32), torch.arange(128) % 100
        z = torch.randn(128, 32, requires_grad=True)
        whole, seam = [], []
        for step in range(args.steps + 1):
            start = time.perf_counter()
            optimizer.zero_grad()
            net(x, y).total.backward()
            optimizer.step()
            middle = time.perf_counter()
            net._terms(z, y, None).total.backward()
            net.covariance.observe(z.detach(), y)
            end = time.perf_counter()
            if step:  # the first one warms up
                whole.append(middle - start)
                seam.append(end - middle)
        share = statistics.median(seam) / statistics.median(whole)
        result[name] = {"step_seconds": whole, "seam_seconds": seam, "share": share}
        print(f"{name}: the seam takes {100 * share:.2f} % of a step")
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
