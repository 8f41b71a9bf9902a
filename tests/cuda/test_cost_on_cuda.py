"""A run on a GPU is charged the energy that NVML reports."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from protoseam.lab.engine.cost import metered, power_reader, read_cost

pytestmark = pytest.mark.cuda


def test_the_energy_of_a_busy_gpu_is_counted(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    watts = power_reader(device)
    if watts is None:
        pytest.skip("NVML does not know this device")
    a = torch.randn(4096, 4096, device=device)
    with metered(tmp_path, device, interval=0.1):
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            (a @ a).sum().item()
    found = read_cost(tmp_path)
    assert 5 < found["joules"] / found["metered_seconds"] < 2000  # watts
