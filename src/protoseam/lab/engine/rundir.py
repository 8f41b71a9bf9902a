"""A run's directory: its lock, config, environment, metrics and results.

``config.yaml`` (resolved), ``env.json``, ``data.json`` (what it trains on), ``metrics.jsonl`` (a line an epoch),
``checkpoints/``, ``summary.json`` (test accuracy, once, at the end), ``model.safetensors`` (the plain deployed
weights), ``seam.safetensors`` (prototypes and covariances), ``latents.safetensors`` (what the page shows) and
``report.html`` (the page).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from protoseam import __version__
from protoseam.errors import ProtoSeamError
from protoseam.lab.data.cache import sync
from protoseam.lab.data.links import open_in_place, refuse_links
from protoseam.lab.engine.config import ConfigError, RunConfig, as_begun, unlike
from protoseam.lab.engine.files import (
    GOING_ON,
    StorageError,
    explain_os_error,
    read_bounded,
    read_json,
    write_atomically,
    write_json,
)
from protoseam.lab.engine.schemas import ENVIRONMENT, METRICS, SUMMARY, check, problem
from protoseam.lab.engine.settings import from_dict, parse_yaml, to_yaml
from protoseam.seam.processes import world_size

_MOST_CONFIG = 2**16
_MOST_METRICS = 256 * 2**20
WRITTEN = {
    "config.yaml", "data.json", "env.json", "metrics.jsonl", "summary.json", "model.safetensors",
    "latents.safetensors", "seam.safetensors", "report.html", "cost.json",
}  # fmt: skip


class RunLockedError(ProtoSeamError, RuntimeError):
    """Another process is training in this directory."""


def go_on(path: Path) -> str:
    """Return the command that resumes the run."""
    return f"protoseam train --resume {shlex.quote(str(path))}"


class RunDirectory:
    """Open it with :meth:`create` or :meth:`claim`; close it (or use ``with``) to release the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None
        self._made = False  # by this object

    # ------------------------------------------------------------------ opening

    @classmethod
    def claim(cls, path: Path) -> RunDirectory:
        """Return the locked directory of a run, new or not; raise RunLockedError while another process holds it."""
        run = cls(path)
        going_on = GOING_ON if os.path.exists(path / "config.yaml") else ""
        with explain_os_error("the run", path, going_on), run._closed_on_error():
            try:
                run._made = not path.exists()
                path.mkdir(parents=True, exist_ok=True)
                refuse_links(path)
                run._acquire()
                assert run._lock is not None
                gone = not os.path.samestat(os.fstat(run._lock.fileno()), (path / "lock").stat())
            except FileNotFoundError:
                gone = True
            if gone:  # the process that finished it has removed it, and the lock with it
                raise RunLockedError(
                    f"{path} cannot be made, or another process has just removed it. Look again"
                )
            run._sweep_up()
        return run

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Return the directory of a new run; refuse one that holds a run with results."""
        run = cls.claim(path)
        with run._closed_on_error():
            results = any((path / name).exists() for name in ("metrics.jsonl", "summary.json"))
            if (path / "config.yaml").exists() and (results or any(run.checkpoints.glob("*"))):
                raise ConfigError(
                    f"{path} already holds a run. Go on with it: {go_on(path)}; or choose another --out"
                )
            run.start(config)
        return run

    def start(self, config: RunConfig) -> None:
        """Write the config and the environment of the run."""
        if config.seed >= 2**32:  # one word of entropy; two could be another seed's and an epoch's
            raise ConfigError(f"the seed of a new run must be below 2**32, got {config.seed}")
        with explain_os_error("the run", self.path, going_on=""):
            (self.path / "data.json").unlink(missing_ok=True)  # of an earlier attempt
            write_json(self.path / "env.json", environment(config.device))
            # last: with it the run exists
            write_atomically(self.path / "config.yaml", to_yaml(config).encode())

    def _sweep_up(self) -> None:
        """Remove temporary files of a process that was killed while it wrote."""
        for leftover in self.path.glob(".*.????????"):
            if leftover.name[1:-9] in WRITTEN:
                leftover.unlink()

    def read_config(self) -> RunConfig:
        file = self.path / "config.yaml"
        try:
            text = read_bounded(file, _MOST_CONFIG)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.path.is_dir():
                raise ConfigError(f"there is no directory {self.path}") from error
            inside = sorted(file.parent.name for file in self.path.glob("*/config.yaml"))
            more = f" and {len(inside) - 8} more" if len(inside) > 8 else ""
            hint = f"; the runs in it are {', '.join(inside[:8])}{more}" if inside else ""
            raise ConfigError(f"{self.path} holds no run: there is no config.yaml in it{hint}") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{file!s:.200} cannot be read: {why}") from error
        try:
            return from_dict(as_begun(parse_yaml(text)))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError unless ``config`` has the run's own settings; where it runs may differ."""
        if found := unlike(self.read_config(), config):
            raise ConfigError(
                f"{self.path} holds a run with other settings ({'; '.join(found)}). Go on with it as it is: "
                f"{go_on(self.path)}; or choose another --out"
            )

    def _acquire(self) -> None:
        # The kernel releases the lock with the process, however it dies, so there is no stale lock.
        lock = open_in_place(self.path / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunLockedError(
                f"{holder} is training in {self.path}. Wait for it, or choose another --out"
            ) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def withdraw(self) -> None:
        """Undo :meth:`start` for a run that failed before it began, so that the same command can be tried again."""
        for name in ("config.yaml", "data.json", "env.json"):
            (self.path / name).unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Delete the directory if this object has made it and nothing but the lock is in it."""
        if self._made and [file.name for file in self.path.iterdir()] == ["lock"]:
            self.remove()

    def remove(self) -> None:
        """Delete the directory and its lock; whoever locks it next must check whether the run is done."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what a run writes

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics, because later epochs are about to be run again."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with explain_os_error("metrics", self.path):
            write_atomically(self.path / "metrics.jsonl", text.encode())

    def append_metrics(self, row: dict[str, Any]) -> None:
        with explain_os_error("metrics", self.path), open_in_place(self.path / "metrics.jsonl") as file:
            file.write(json.dumps(row) + "\n")

    def sync_metrics(self) -> None:
        """Flush the metrics to disk before the checkpoint that relies on them."""
        if (self.path / "metrics.jsonl").exists():
            sync(self.path / "metrics.jsonl")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics, one row per epoch; damaged lines are left out."""
        file = self.path / "metrics.jsonl"
        try:
            text = read_bounded(file, _MOST_METRICS) if file.exists() else b""
        except (OSError, ValueError) as error:
            raise StorageError(f"{file} cannot be read ({error}): move it away") from error
        rows: dict[int, dict[str, Any]] = {}
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # the line a kill cut short
                continue
            if problem(row, METRICS) is None:
                rows.setdefault(row["epoch"], row)
        return [rows[epoch] for epoch in sorted(rows)]

    def write_summary(self, summary: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save

        with explain_os_error("the results", self.path):
            plain = {name: t.detach().cpu().contiguous() for name, t in weights.items()}
            write_atomically(self.path / "model.safetensors", save(plain))
            write_json(self.path / "summary.json", summary)

    def read_summary(self) -> dict[str, Any] | None:
        file = self.path / "summary.json"
        return check(file, read_json(file), SUMMARY) if file.exists() else None

    def note_changes(self, device: str) -> list[str]:
        """Return in what this environment differs from the one in which the run was started, and record it if so."""
        known, now = self.read_environment(), environment(device)
        resumed = known.pop("resumed", [])
        changes = [
            f"{k}: was {known.get(k, 'not recorded')}, is {now.get(k, 'not recorded')}"
            for k in sorted(known.keys() | now.keys())
            if (k in known) != (k in now) or known.get(k) != now.get(k)
        ]
        if changes and resumed[-1:] != [now]:
            write_json(self.path / "env.json", {**known, "resumed": [*resumed, now]})
        return changes

    def read_environment(self) -> dict[str, Any]:
        file = self.path / "env.json"
        return dict(check(file, read_json(file), ENVIRONMENT)) if file.exists() else {}


def environment(device: str = "auto") -> dict[str, Any]:
    """Return the versions and the hardware that decide whether a repeat on ``device`` can be bit-identical."""
    cuda = device != "cpu" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(None if device == "auto" else device) if cuda else ""
    return {
        "protoseam": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "device": name or platform.processor() or platform.machine(),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),  # another number adds up in another order
        "processes": world_size(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    """Return the processor's name and the vector instructions for which torch chose its kernels."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, UnicodeDecodeError), open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


_ROOT = Path(__file__).resolve().parents[4]


def _commit(root: Path = _ROOT) -> str | None:
    """Return the commit of a source checkout, with ``-dirty`` if src/ has changes; None if installed."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5)

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", "src").returncode == 1
    except (OSError, subprocess.SubprocessError):
        return None
    return None if head.returncode else head.stdout.strip() + "-dirty" * changed
