"""The cost of a run, kept in its ``cost.json``: wall-clock seconds, and joules where NVML can be asked.

NVML is NVIDIA's management library. A thread of its own samples the device's power about once per second, so no
training step waits for it. The figures add up over the visits of a run that was interrupted and resumed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from protoseam.lab.engine.files import read_json, write_json
from protoseam.lab.engine.schemas import COST, check

_FILE = "cost.json"
_BETWEEN_SAMPLES = 1.0  # seconds
_BETWEEN_WRITES = 30  # samples: a killed process loses at most this much of its account


def read_cost(run: Path) -> dict[str, Any]:
    """Return what a run has cost so far: ``seconds``, and ``joules`` over ``metered_seconds``; {} if unknown."""
    return dict(check(run / _FILE, read_json(run / _FILE), COST)) if (run / _FILE).exists() else {}


@contextmanager
def metered(
    run: Path | None,
    device: torch.device,
    *,
    watts: Callable[[], float | None] | None = None,
    interval: float = _BETWEEN_SAMPLES,
) -> Iterator[None]:
    """Add the time and energy spent inside this context to the ``cost.json`` of a run.

    Args:
        run: the run's directory, or None to keep no account, as in all processes but the first.
        device: where it trains; power is read for a CUDA device only.
        watts: reads the power; NVML by default.
        interval: seconds between two samples.
    """
    if run is None:
        yield
        return
    watts = watts or power_reader(device)
    total = {"seconds": 0.0, **read_cost(run)}
    last, samples = time.monotonic(), 0

    def sample() -> None:
        nonlocal last, samples
        now, power = time.monotonic(), watts() if watts else None
        spent = {"seconds": now - last}
        if power is not None:
            spent |= {"joules": power * (now - last), "metered_seconds": now - last}
        for key, value in spent.items():
            total[key] = total.get(key, 0.0) + value
        last, samples = now, samples + 1
        if samples % _BETWEEN_WRITES == 0:
            write()

    def write() -> None:
        with suppress(OSError):  # a full disk must end the run in the run's own words
            write_json(run / _FILE, {key: round(value, 3) for key, value in total.items()})

    try:
        with every(interval, sample):
            yield
    finally:
        sample()
        write()


@contextmanager
def every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` in a thread every so many seconds while the context is open; it has ended when this returns."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, name=f"protoseam-{action.__name__}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def power_reader(device: torch.device) -> Callable[[], float | None] | None:
    """Return a function that reads the device's power in watts, or None where NVML does not know the device."""
    if device.type != "cuda":
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
        return None

    def read() -> float | None:
        milliwatts = ctypes.c_uint()
        failed = nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        return None if failed else milliwatts.value / 1000

    return read
