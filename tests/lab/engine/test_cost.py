"""What a run costs: seconds over all its visits, and joules where the device can be asked for its power."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from protoseam.lab.engine.cost import metered, read_cost
from protoseam.lab.engine.files import StorageError

CPU = torch.device("cpu")


def test_time_and_energy_add_up_over_the_visits_of_a_run(tmp_path: Path) -> None:
    for _ in range(2):
        with metered(tmp_path, CPU, watts=lambda: 500.0, interval=0.02):
            time.sleep(0.4)
    found = read_cost(tmp_path)
    assert found["seconds"] == pytest.approx(0.8, abs=0.3)
    assert found["joules"] == pytest.approx(500 * found["metered_seconds"], rel=0.2)
    assert found["metered_seconds"] == pytest.approx(found["seconds"], abs=0.2)


def test_an_interrupted_run_is_charged_and_a_cpu_has_no_joules(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), metered(tmp_path, CPU):
        raise KeyboardInterrupt
    assert read_cost(tmp_path).keys() == {"seconds"}
    (tmp_path / "cost.json").write_text('{"seconds": -1}')
    with pytest.raises(StorageError, match=r"cost\.json: seconds is -1"):
        read_cost(tmp_path)
