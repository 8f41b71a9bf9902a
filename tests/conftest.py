"""Shared set-up: torchvision beside a CPU torch, one thread a test, a seed before each."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

import torchvision_ops  # noqa: F401

os.environ.setdefault("PYTHONHASHSEED", "0")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the long forms of the tests")
    parser.addoption("--screenshots", metavar="DIR", help="take the documents' pictures of pages into DIR")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms unless asked for, and what needs a CUDA device where there is none."""
    left_out = set() if config.getoption("--run-slow") else {"slow"}
    if not torch.cuda.is_available():
        left_out.add("cuda")
    dropped = [item for item in items if left_out & set(item.keywords)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may talk to the world: connections other than to this machine fail."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("localhost", "127.0.0.1", "::1"):
            raise RuntimeError(f"a test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
