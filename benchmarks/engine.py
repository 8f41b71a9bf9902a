"""Speed of the training engine on one CUDA device, as ratios measured in one run.

    python benchmarks/engine.py --out results/bench/engine.json [--parts step epochs …]

The images are random (speed does not depend on their content), in CIFAR's shape and number. Work is counted
as three forward passes, 2 operations a multiply-add, over convolutions, linear layers and attention products;
shares are of the bf16 matrix rate measured in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.engine.config import LiftConfig, RunConfig
from protoseam.lab.engine.epoch import begin_epoch, train_epoch
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import environment

BATCH = 128


def synthetic(classes: int = 100, train: int = 50_000, side: int = 32) -> ArrayDataset:
    rng = np.random.default_rng(0)

    def images(n: int) -> np.ndarray:
        return rng.integers(0, 256, (n, side, side, 3), dtype=np.uint8)

    def labels(n: int) -> np.ndarray:
        return np.arange(n, dtype=np.int64) % classes

    names = tuple(map(str, range(classes)))
    return ArrayDataset("synthetic", images(train), labels(train), images(10_000), labels(10_000), names)


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median time of ``work`` on the device, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_rate(n: int = 8192) -> float:
    """bf16 operations a second of an n×n×n product of random matrices."""
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    return 10 * 2 * n**3 / seconds(lambda: [a @ b for _ in range(10)])


def forward_operations(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Operations of one sample's forward pass, counted by hooks on the layers that multiply matrices."""
    total = 0

    def conv(m: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        assert isinstance(m, nn.Conv2d)
        total += 2 * output[0].numel() * m.weight[0].numel()

    def linear(m: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        assert isinstance(m, nn.Linear)
        total += 2 * output[0].numel() * m.in_features

    def attention(m: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        _, tokens, width = output.shape
        total += 2 * 2 * tokens * tokens * width  # QKᵀ and its product with V

    handles = []
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            handles.append(m.register_forward_hook(conv))
        elif isinstance(m, nn.Linear):
            handles.append(m.register_forward_hook(linear))
        elif type(m).__name__ == "Attention":
            handles.append(m.register_forward_hook(attention))
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    for handle in handles:
        handle.remove()
    return total


def config(model: str, variant: str = "baseline", covariance: str = "exact", **more: Any) -> RunConfig:
    lift = LiftConfig(covariance=covariance)
    # under CIFAR-100's name the paper's settings are the defaults: SGD, no clipping, no bounds
    return RunConfig(
        data="cifar100", model=model, variant=variant, epochs=50, lift=lift, eval_every=1000, **more
    )


def steps_of(run: Run, n: int) -> Callable[[], None]:
    def work() -> None:
        with torch.cuda.stream(run.step.stream):
            for _ in range(n):
                run.step.run()
            run.step.counter.zero_()

    return work


def begin(run: Run) -> None:
    with torch.cuda.stream(run.step.stream):
        begin_epoch(run)
    torch.cuda.synchronize()


def part_step(data: ArrayDataset, rate: float) -> dict[str, Any]:
    """Share of the matrix rate that one training step reaches, alone."""
    from protoseam.lab import models

    out = {}
    for name in ("resnet8", "resnet18", "vit_s"):
        operations = 3 * BATCH * forward_operations(models.build(name, 100, (3, 32, 32)), (3, 32, 32))
        torch.cuda.reset_peak_memory_stats()
        run = Run(config(name), data)
        begin(run)
        step = seconds(steps_of(run, 100), 7) / 100
        out[name] = {
            "step_us": 1e6 * step,
            "operations": operations,
            "share_of_matmul_rate": operations / step / rate,
            "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20,
        }
        print(name, out[name], flush=True)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return out


def part_epochs(data: ArrayDataset, rate: float) -> dict[str, Any]:
    """Whole epochs of ProtoSeam against Unlifted, and the augmentation's share."""
    out: dict[str, Any] = {}
    for name in ("resnet8", "vit_s"):
        kinds = {
            "unlifted": ("unlifted", "exact"),
            "exact": ("protoseam", "exact"),
            "running": ("protoseam", "running"),
            "isotropic": ("protoseam", "isotropic"),
        }
        runs = {kind: Run(config(name, *choice), data) for kind, choice in kinds.items()}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(4):  # interleaved, so that a drift of the clock meets all alike
            for kind, run in runs.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                train_epoch(run)
                torch.cuda.synchronize()
                times[kind].append(time.perf_counter() - start)
        medians = {kind: statistics.median(values[1:]) for kind, values in times.items()}
        augmentation = augmentation_seconds(runs["unlifted"])
        out[name] = {
            "epoch_seconds": medians,
            "overhead": {k: medians[k] / medians["unlifted"] - 1 for k in ("exact", "running", "isotropic")},
            "augmentation_seconds": augmentation,
            "augmentation_share": augmentation / medians["unlifted"],
        }
        print(name, out[name], flush=True)
        del runs
        gc.collect()
        torch.cuda.empty_cache()
    return out


def augmentation_seconds(run: Run) -> float:
    """What preparing the next epoch's images adds to an epoch of steps: with it, and without, in turn."""

    def steps(prepare: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(run.step.stream):
            run.data.load_epoch(run.epoch)
            for _ in range(run.data.steps):
                run.step.run()
        if prepare:
            run.data.prepare(run.epoch)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    times: dict[bool, list[float]] = {True: [], False: []}
    steps(True)
    for _ in range(4):
        for prepare in times:
            run.step.counter.zero_()
            times[prepare].append(steps(prepare))
    return statistics.median(times[True]) - statistics.median(times[False])


START = """
import sys, time
sys.path.insert(0, {here!r})
import torch
import engine
run = engine.Run(engine.config({model!r}), engine.synthetic())
engine.begin(run)
with torch.cuda.stream(run.step.stream):
    run.step.run()
torch.cuda.synchronize()
print(time.time() - {started})
import os
os._exit(0)
"""


def part_start(data: ArrayDataset, rate: float) -> dict[str, Any]:
    """A new process, from its start to the end of its first step: nothing compiled before, and once more."""
    out = {}
    for model in ("resnet8", "vit_s"):
        with tempfile.TemporaryDirectory() as cache:
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "TRITON_CACHE_DIR": f"{cache}/triton",
            }
            found = []
            for _ in range(2):
                code = START.format(here=str(Path(__file__).parent), model=model, started=time.time())
                command = [sys.executable, "-c", code]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found.append(float(done.stdout.split()[-1]))
        out[model] = dict(zip(("cold_seconds", "warm_seconds"), found, strict=True))
        print(model, out[model], flush=True)
    return out


def part_usual(data: ArrayDataset, rate: float) -> dict[str, Any]:
    """The usual loop: torchvision transforms on PIL images, 16 workers, eager autocast; and ours, per epoch."""
    from torch.utils.data import DataLoader, Dataset
    from torchvision import transforms as T

    from protoseam.lab import models

    class Images(Dataset[tuple[torch.Tensor, int]]):
        transform = T.Compose(
            [
                T.ToPILImage(),
                T.RandomCrop(32, padding=4),
                T.RandomHorizontalFlip(),
                T.RandAugment(),
                T.ToTensor(),
                T.Normalize((0.5,) * 3, (0.25,) * 3),
                T.RandomErasing(0.5, (0.02, 0.33)),
            ]
        )

        def __len__(self) -> int:
            return 45_000

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return self.transform(data.train_images[i]), int(data.train_labels[i])

    out = {}
    for name in ("resnet8", "vit_s"):
        torch.cuda.reset_peak_memory_stats()
        model = models.build(name, 100, (3, 32, 32)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4, nesterov=True)
        workers: Any = {"num_workers": 16, "pin_memory": True, "persistent_workers": True}
        loader = DataLoader(Images(), BATCH, shuffle=True, drop_last=True, **workers)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            for x, y in loader:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(
                        model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)
                    )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        usual_memory = torch.cuda.max_memory_allocated() / 2**20
        del loader, model, optimizer
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run = Run(config(name), data)
        ours = []
        for _ in range(4):
            start = time.perf_counter()
            train_epoch(run)
            torch.cuda.synchronize()
            ours.append(time.perf_counter() - start)
        out[name] = {
            "usual_epoch_seconds": times[-1],
            "our_epoch_seconds": statistics.median(ours[1:]),
            "ratio": times[-1] / statistics.median(ours[1:]),
            "usual_peak_memory_mib": usual_memory,
            "our_peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20,
        }
        print(name, out[name], flush=True)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return out


def compiled_steps(name: str, mode: str, data: ArrayDataset, device: str = "cuda") -> Callable[[int], None]:
    """The fastest loop that a user would write: data on the device, bf16 autocast, torch.compile, a fused optimizer."""
    from protoseam.lab import models

    images = torch.from_numpy(data.train_images).to(device).permute(0, 3, 1, 2)  # channels_last in memory
    labels = torch.from_numpy(data.train_labels).to(device)
    model = models.build(name, 100, (3, 32, 32)).to(device, memory_format=torch.channels_last)
    compiled = torch.compile(model, mode=mode)
    fused = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), **fused)

    def work(n: int) -> None:
        order = torch.randperm(len(labels), device=device)
        for step in range(n):
            rows = order[step * BATCH : (step + 1) * BATCH]
            with torch.autocast(device, torch.bfloat16):
                x = (images[rows].float() / 255 - 0.5) / 0.25
                loss = nn.functional.cross_entropy(compiled(x), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return work


def part_compiled(data: ArrayDataset, rate: float) -> dict[str, Any]:
    """A step of such a loop, which does not augment, beside ours, which reads augmented images."""
    out: dict[str, Any] = {}
    for name in ("resnet8", "resnet18", "vit_s"):
        out[name] = {}
        for mode in ("default", "reduce-overhead"):  # autotuning needs minutes per network
            work = compiled_steps(name, mode, data)
            out[name][mode] = 1e6 * seconds(lambda work=work: work(100), 5) / 100
            del work
            torch.compiler.reset()
            torch.cuda.empty_cache()
        run = Run(config(name), data)
        begin(run)
        out[name]["ours"] = 1e6 * seconds(steps_of(run, 100), 5) / 100
        print(name, out[name], flush=True)
        del run
        gc.collect()
        torch.cuda.empty_cache()
    return out


PARTS = {
    "start": part_start,
    "step": part_step,
    "epochs": part_epochs,
    "usual": part_usual,
    "compiled": part_compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rate = matmul_rate()
    result: dict[str, Any] = {"environment": environment(), "matmul_rate": rate, "batch": BATCH}
    print(f"bf16 matrix rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    data = synthetic()
    for name in args.parts:
        try:
            result[name] = PARTS[name](data, rate)
        except Exception as error:  # one part's failure must not cost the others' figures
            result[name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, result[name], flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
