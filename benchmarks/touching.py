"""Classes that touch: labels by a random linear teacher on Gaussian inputs, where lifting overfits.

    python benchmarks/touching.py            # three seeds, about a minute; writes results/first_try/touching.jsonl

500 training and 1,000 test samples of 20 features in five classes without a gap between them; an MLP with 64 hidden
units, AdamW at 0.003, batches of 25. Each way of training gets the same network, data and settings.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

OUT = Path(__file__).parents[1] / "results" / "first_try" / "touching.jsonl"
WAYS = ("cross-entropy", "lifted", "lifted, ρ = 0.1")


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * float((net(x).argmax(1) == y).double().mean())


def run(way: str, epochs: int, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    x = torch.randn(1500, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    loader = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=25, shuffle=True)
    net: nn.Module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    if way == "cross-entropy":
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        for _ in range(epochs):
            for xb, yb in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(xb), yb).backward()
                optimizer.step()
    else:
        schedule = ps.SineAnneal(1, 16) if way == "lifted" else ps.ConstantRho(0.1)
        net = lifted = ps.lift(net, num_classes=5, schedule=schedule)
        optimizer = torch.optim.AdamW(lifted.param_groups(lr=3e-3))
        for _ in lifted.epochs(loader, epochs):
            for xb, yb in loader:
                optimizer.zero_grad()
                lifted.objective(xb, yb).total.backward()
                optimizer.step()
    net.eval()
    found = {"train": accuracy(net, x[:500], y[:500]), "test": accuracy(net, x[500:], y[500:])}
    return {"way": way, "epochs": epochs, "seed": seed, **found}


def main() -> None:
    warnings.simplefilter("ignore", ps.SeamWarning)
    torch.set_num_threads(1)
    rows = [run(way, epochs, seed) for epochs in (5, 30, 100) for way in WAYS for seed in range(3)]
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
