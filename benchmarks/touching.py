"""Classes that touch or overlap, where lifting fits the training samples too well, and what helps.

    python benchmarks/touching.py            # three seeds, about 20 minutes; writes results/first_try/touching.jsonl
    python benchmarks/touching.py --table    # the tables of the rows that are there

*touching*: labels by a random linear teacher on 20 Gaussian features, five classes without a gap between them, 500
training samples; an MLP with 64 hidden units. *overlapping*: the panel's task and network of that name.

Ways to train, each with the same network, data, optimizer and rate:

- *cross-entropy* and *lifted*, with the weight decay that the row names;
- *regression*: end to end, without a seam, by the squared distance of the logits to the one-hot labels;
- *ρ = 0.1*: lifted with a weak constant pull;
- *tolerant*: a sample within 0.4 of the distance to the nearest other prototype is not pulled any further;
- *contrast*: cross-entropy over the distances to the prototypes in place of the pull, of which 1 % stays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from first_try import Batches, cosine
from first_try_tasks import NETWORKS, TASKS, Task
from torch import Tensor, nn

import protoseam as ps

OUT = Path(__file__).parents[1] / "results" / "first_try" / "touching.jsonl"
TOLERANCE = 0.4
SHARPNESS = 30.0


class Setting(NamedTuple):
    """What is trained, and how."""

    task: str
    optimizer: str
    lr: float
    decay: float
    epochs: int
    way: str


def settings() -> list[Setting]:
    every = ("cross-entropy", "lifted")
    rows = []
    for epochs in (5, 30, 100):
        rows += [Setting("touching", "adamw", 3e-3, d, epochs, w) for d in (0.01, 1.0, 3.0) for w in every]
        others = ("ρ = 0.1", "tolerant", "contrast", "regression")
        rows += [Setting("touching", "adamw", 3e-3, 0.01, epochs, w) for w in others]
    for lr, decays in ((0.02, (5e-4, 0.01, 0.04)), (0.1, (5e-4, 0.01, 0.04))):
        rows += [Setting("overlapping", "sgd", lr, d, 20, w) for d in decays for w in every]
    rows += [Setting("overlapping", "adamw", 1e-3, d, 20, w) for d in (0.01, 1.0, 3.0) for w in every]
    for name, lr, decay in (("sgd", 0.02, 5e-4), ("adamw", 1e-3, 0.01)):
        rows += [
            Setting("overlapping", name, lr, decay, 20, w) for w in ("tolerant", "contrast", "regression")
        ]
    return rows


def touching(seed: int) -> Task:
    torch.manual_seed(seed)
    x = torch.randn(1500, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    return Task(x[:500], y[:500], x[500:], y[500:], 5)


def tolerant(net: ps.Lifted, z_BK: Tensor, y_B: Tensor) -> Tensor:
    s_CK = net.prototypes
    apart_CC = torch.cdist(s_CK, s_CK).detach().fill_diagonal_(torch.inf)
    distance_B = (z_BK - s_CK[y_B]).square().sum(1).clamp_min(1e-12).sqrt()
    return net.rho / 2 * F.relu(distance_B - TOLERANCE * apart_CC.amin(1)[y_B]).square().mean()


def contrast(net: ps.Lifted, z_BK: Tensor, y_B: Tensor) -> Tensor:
    s_CK = net.prototypes
    square_BC = (z_BK[:, None] - s_CK).square().sum(2)
    scale = torch.pdist(s_CK.detach()).square().mean()
    pull = net.rho / 2 * square_BC.gather(1, y_B[:, None]).mean()
    return F.cross_entropy(-SHARPNESS * square_BC / scale, y_B) + 0.01 * pull


def regression(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    return (logits_BC - F.one_hot(y_B, logits_BC.shape[1])).square().sum(1).mean()


WITHOUT_SEAM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "regression": regression,
}


def optimizer(row: Setting, groups: Any) -> torch.optim.Optimizer:
    if row.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=row.lr, weight_decay=row.decay)
    return torch.optim.SGD(groups, lr=row.lr, momentum=0.9, weight_decay=row.decay)


def train(row: Setting, model: nn.Module, loader: Batches) -> nn.Module:
    net = None
    if row.way not in WITHOUT_SEAM:
        options = {"schedule": ps.ConstantRho(0.1)} if row.way == "ρ = 0.1" else {}
        net = ps.lift(model, num_classes=loader.task.classes, **options)
    opt = optimizer(row, model.parameters() if net is None else net.param_groups(row.lr, row.decay))
    decay = cosine(opt, row.epochs * len(loader))
    for _ in range(row.epochs) if net is None else net.epochs(loader, row.epochs):
        for x, y in loader:
            if net is None:
                loss = WITHOUT_SEAM[row.way](model(x), y)
            else:
                terms = net.objective(x, y)
                loss = terms.total
                pull = {"tolerant": tolerant, "contrast": contrast}.get(row.way)
                if pull is not None:
                    loss = terms.classification + terms.repulsion + pull(net, net.embed(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            decay.step()
    return model if net is None else net.deploy(fold=True)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net.eval()(x).argmax(1) == y).double().mean())


def run(job: tuple[Setting, int]) -> dict[str, Any]:
    row, seed = job
    warnings.simplefilter("ignore", ps.SeamWarning)
    torch.set_num_threads(1)
    if row.task == "touching":
        task, size = touching(seed), 25
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    else:
        task, size = TASKS["overlapping"](seed), 100
        torch.manual_seed(seed)
        model = NETWORKS["mlp_bn"](task)
    net = train(row, model, Batches(task, size, seed))
    found = {
        "train": accuracy(net, task.x_train, task.y_train),
        "test": accuracy(net, task.x_test, task.y_test),
    }
    return {**row._asdict(), "seed": seed, **found}


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds, test accuracy (training accuracy in brackets)."""
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        key = (row["task"], f"{row['optimizer']} {row['lr']:g}", row["epochs"], row["decay"])
        groups.setdefault(key, {}).setdefault(row["way"], []).append(row)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [
        "| task | optimizer | epochs | decay | " + " | ".join(ways) + " |",
        "|---" * (4 + len(ways)) + "|",
    ]
    for (task, opt, epochs, decay), found in groups.items():
        cells = [
            f"{mean(found[way], 'test'):.1f} ({mean(found[way], 'train'):.0f})" if way in found else "–"
            for way in ways
        ]
        lines.append(f"| {task} | {opt} | {epochs} | {decay:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.table:
        jobs = [(row, seed) for row in settings() for seed in args.seeds]
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool, args.out.open("w") as file:
            for row in pool.imap(run, jobs):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
    print(table([json.loads(line) for line in args.out.read_text("utf-8").splitlines()]))


if __name__ == "__main__":
    main()
