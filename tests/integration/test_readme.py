"""The README's loop, as it stands, on a network and data it was not written for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

README = Path(__file__).parents[2] / "README.md"


def test_the_loop_exceeds_97_percent_in_15_epochs() -> None:
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"## In your own loop\n\n```python\n(.*?)```", text, re.DOTALL)
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(y))
    first, rest = order[:1200], order[1200:]
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x[first], y[first]), batch_size=64, shuffle=True)
    names: dict[str, Any] = {"model": model, "loader": loader, "epochs": 15}
    exec(code, names)  # noqa: S102
    plain = names["plain"]
    assert [type(m) for m in plain] == [type(m) for m in model]
    with torch.no_grad():
        right = (plain(x[rest]).argmax(1) == y[rest]).double().mean()
    assert float(right) > 0.97
