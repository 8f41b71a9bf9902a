"""The same task through every host: digits, one network, AdamW with a cosine decay, 20 epochs, five seeds, on a CPU.

    python benchmarks/hosts.py                    # what is missing, a few seconds per run
    python benchmarks/hosts.py --only lightning
    python benchmarks/hosts.py --table            # print the table of what was measured

A host is one function in HOSTS: it gets a task, a network with its first weights and a seed, trains the network lifted
with the library's defaults in the way the host's page shows, and returns the deployed network. ``plain`` is the loop of
the README. Raw results go to results/hosts/digits.jsonl, one line per run; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from first_try_tasks import Task, cnn_bn, digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

OUT = Path(__file__).parents[1] / "results" / "hosts" / "digits.jsonl"
SEEDS = range(5)
EPOCHS, BATCH, LR = 20, 64, 1e-3  # a cell of the first-try panel


class Parts(NamedTuple):
    """What every loop needs, made before a host gets its hands on it."""

    net: ps.Lifted
    loader: DataLoader[Any]
    optimizer: torch.optim.Optimizer
    decay: torch.optim.lr_scheduler.LRScheduler  # one step per batch


def parts(task: Task, network: nn.Module) -> Parts:
    net = ps.lift(network, num_classes=task.classes)
    loader = DataLoader(TensorDataset(task.x_train, task.y_train), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(net.param_groups(lr=LR))
    steps = EPOCHS * len(loader)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps)))
    return Parts(net, loader, optimizer, decay)


def plain(task: Task, network: nn.Module, seed: int) -> nn.Module:
    net, loader, optimizer, decay = parts(task, network)
    for _ in net.epochs(loader, EPOCHS):
        for x, y in loader:
            loss = net.objective(x, y).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
    return net.deploy(fold=True)


def sklearn(task: Task, network: nn.Module, seed: int) -> nn.Module:
    from protoseam.adapters.sklearn import ProtoSeamClassifier

    estimator = ProtoSeamClassifier(network, lr=LR, epochs=EPOCHS, batch_size=BATCH, random_state=seed)
    return estimator.fit(task.x_train.numpy(), task.y_train.numpy()).net_.deploy(fold=True)


def lightning(task: Task, network: nn.Module, seed: int) -> nn.Module:
    import lightning.pytorch as pl

    from protoseam.adapters.lightning import SeamCallback

    net, loader, optimizer, decay = parts(task, network)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return self.net.objective(*batch).total

        def configure_optimizers(self) -> Any:
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = pl.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=1,
            callbacks=[SeamCallback()],
            enable_checkpointing=False,
            default_root_dir=folder,
            **quiet,
        )
        trainer.fit(Module(), loader)
    return net.deploy(fold=True)


def accelerate(task: Task, network: nn.Module, seed: int) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    net, *others = parts(task, network)
    model, loader, optimizer, decay = accelerator.prepare(net, *others)
    for epoch in net.epochs(loader, EPOCHS):
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = model(x, y).total
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            decay.step()
    return net.deploy(fold=True)


def fabric(task: Task, network: nn.Module, seed: int) -> nn.Module:
    from lightning.fabric import Fabric

    host = Fabric(accelerator="cpu", devices=1)
    net, data, adamw, decay = parts(task, network)
    model, optimizer = host.setup(net, adamw)
    loader = host.setup_dataloaders(data)
    for _ in net.epochs(loader, EPOCHS):
        for x, y in loader:
            loss = model(x, y).total
            optimizer.zero_grad()
            host.backward(loss)
            optimizer.step()
            decay.step()
    return net.deploy(fold=True)


def huggingface(task: Task, network: nn.Module, seed: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    from protoseam.adapters.huggingface import LiftedForTrainer, SeamCallback

    # nn.Sequential's forward calls its argument input
    rows = [{"input": x, "labels": int(y)} for x, y in zip(task.x_train, task.y_train, strict=True)]
    lifted = LiftedForTrainer(ps.lift(network, num_classes=task.classes))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=LR,
            weight_decay=0.01,  # AdamW's own default
            lr_scheduler_type="cosine",
            seed=seed,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        optimizers = lifted.optimizers(args)
        Trainer(lifted, args, train_dataset=rows, callbacks=[SeamCallback()], optimizers=optimizers).train()
    return lifted.deploy()


def timm(task: Task, network: nn.Module, seed: int) -> nn.Module:
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    from protoseam.adapters.timm import LiftedTask

    net, loader, *_ = parts(task, network)
    training = LiftedTask(net)
    optimizer = create_optimizer_v2(net.param_groups(lr=LR), opt="adamw", weight_decay=0.01)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS)
    for epoch in net.epochs(loader, EPOCHS):
        for x, y in loader:
            loss = training(x, y)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(epoch + 1)
    return training.deploy()


HOSTS: dict[str, Callable[[Task, nn.Module, int], nn.Module]] = {
    f.__name__: f for f in (plain, sklearn, lightning, accelerate, fabric, huggingface, timm)
}


def run(job: tuple[str, int]) -> dict[str, Any]:
    host, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = digits(seed)
    torch.manual_seed(seed)
    network = cnn_bn(task)
    start = time.perf_counter()
    torch.manual_seed(seed)
    deployed = HOSTS[host](task, network, seed).eval()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = (deployed(task.x_test).argmax(1) == task.y_test).double().mean()
    return {"host": host, "seed": seed, "accuracy": 100 * float(right), "seconds": round(seconds, 2)}


def read(path: Path = OUT) -> dict[str, dict[int, float]]:
    """Return host → seed → test accuracy in %."""
    found: dict[str, dict[int, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found.setdefault(row["host"], {})[row["seed"]] = row["accuracy"]
    return found


def table(found: dict[str, dict[int, float]]) -> list[str]:
    lines = ["| host | mean | lowest | highest | to the plain loop |", "|---|---|---|---|---|"]
    base = statistics.fmean(found["plain"].values())
    for host, seeds in found.items():
        values = list(seeds.values())
        mean = statistics.fmean(values)
        gap = "" if host == "plain" else f"{mean - base:+.2f}"
        lines.append(f"| {host} | {mean:.2f} | {min(values):.2f} | {max(values):.2f} | {gap} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=HOSTS, help="one host")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    found = read()
    jobs = [
        (host, seed)
        for host in HOSTS
        for seed in SEEDS
        if args.only in (None, host) and seed not in found.get(host, {})
    ]
    if jobs and not args.table:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.workers) as pool, OUT.open("a") as file:
            for row in pool.imap(run, jobs):
                file.write(json.dumps(row) + "\n")
                file.flush()
    print("\n".join(table(read())))


if __name__ == "__main__":
    main()
