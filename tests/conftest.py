"""Shared set-up: torchvision beside a CPU torch, one thread a test, a seed before each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

# The published torchvision wheels expect a CUDA torch and fail on import beside a CPU one, because the
# operators of their extension are not registered. Declaring the two schemas it patches is enough for
# datasets, transforms and models, which is all the tests use.
if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
    _TORCHVISION = torch.library.Library("torchvision", "DEF")
    _TORCHVISION.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _TORCHVISION.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

os.environ.setdefault("PYTHONHASHSEED", "0")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the long forms of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow"):
        kept = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
        items[:] = kept


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
