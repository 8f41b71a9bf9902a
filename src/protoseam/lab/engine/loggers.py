"""Where a run's metrics go beside its own directory: CSV, TensorBoard, W&B, MLflow, or a logger of the caller's.

A logger has ``log_hyperparams(params)``, ``log_metrics(metrics, step)`` and ``finalize(status)``, as the loggers of
Lightning and its Fabric do. The step is the epoch, from 1; the status is ``success`` or ``failed``.
"""

from __future__ import annotations

import csv
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.files import explain_os_error, write_atomically

_OFFLINE = {
    "wandb": "Without an account: WANDB_MODE=offline",
    "mlflow": "In a local database: MLFLOW_TRACKING_URI=sqlite:///mlflow.db",
}
_PROJECT = "protoseam"  # of W&B and MLflow; their own environment variables name another


class Logger(Protocol):
    """What a run asks of a logger."""

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...
    def finalize(self, status: str) -> None: ...


def make_logger(name: str, out: Path) -> Logger:
    """Return the logger called ``name`` for the run in the directory ``out``.

    Args:
        name: ``csv`` writes ``out/log.csv``, ``tensorboard`` writes ``out/tensorboard``; ``wandb`` and ``mlflow`` write
            where their own settings and environment variables say, under the name of the directory.
        out: the run's directory.

    Raises:
        ConfigError: if there is no such logger, its package is not installed, or it cannot start.
    """
    if name not in LOGGERS:
        raise ConfigError(f"there is no logger {name!r}; there are {', '.join(LOGGERS)}")
    try:
        return LOGGERS[name](out.absolute())  # . has no name
    except ImportError as error:
        raise ConfigError(f"--logger {name} needs {error.name}: pip install 'protoseam[loggers]'") from error
    except ProtoSeamError:
        raise
    except Exception as error:  # those of the services: no login, no such store, no connection
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        hint = f". {_OFFLINE[name]}" if name in _OFFLINE else ""
        raise ConfigError(f"--logger {name} cannot start: {why}{hint}") from error


@contextmanager
def reporting(
    logger: Logger | str | None, out: Path, settings: dict[str, Any]
) -> Iterator[Callable[[dict[str, Any], int], None]]:
    """Tell a logger the settings, then what the returned function is given, and how the run ended.

    Args:
        logger: an object, the name of one, or None for no logger.
        out: the run's directory.
        settings: the run's config; nested tables become names with dots.

    Yields:
        ``report(row, step)``; numbers of nested tables get names with slashes, and what is not a number is left out.
    """
    if logger is None:
        yield lambda row, step: None
        return
    target = make_logger(logger, out) if isinstance(logger, str) else logger
    status = "failed"
    try:
        with suppress(NotImplementedError):  # what Fabric's CSVLogger answers
            target.log_hyperparams(_flat(settings, "."))

        def report(row: dict[str, Any], step: int) -> None:
            flat = _flat(row, "/").items()
            target.log_metrics({name: float(v) for name, v in flat if type(v) in (int, float)}, step)

        yield report
        status = "success"
    finally:
        target.finalize(status)


def _flat(values: dict[str, Any], between: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value, between) if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}{between}{key}": v for key, v in inner.items()}
    return flat


class CSVLog:
    """One row per step in ``log.csv``; a step that is run again after a resume replaces its row."""

    def __init__(self, out: Path) -> None:
        self.file = out / "log.csv"
        self.rows: dict[int, dict[str, Any]] = {}
        if self.file.exists():
            with self.file.open(encoding="utf-8", newline="") as file:
                self.rows = {int(row["step"]): dict(row) for row in csv.DictReader(file)}

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Nothing: config.yaml beside the file has them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = len(self.rows) if step is None else step
        self.rows[step] = {**self.rows.get(step, {}), **metrics, "step": step}
        columns = list(dict.fromkeys(["step", *(name for row in self.rows.values() for name in row)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(self.rows[step] for step in sorted(self.rows))
        with explain_os_error("the log", self.file.parent):
            write_atomically(self.file, text.getvalue().encode())

    def finalize(self, status: str) -> None:
        """Nothing: the file is complete after every step."""


class TensorBoardLog:
    """Scalars and hyperparameters in ``tensorboard``, to be shown by ``tensorboard --logdir``."""

    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in params.items()}
        scalars = {"validation_accuracy": 0.0, "test_accuracy": 0.0}  # their names; values follow
        for summary in hparams(plain, scalars):
            self.writer._get_file_writer().add_summary(summary)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finalize(self, status: str) -> None:
        self.writer.close()


class WandbLog:
    """A W&B run in the project of WANDB_PROJECT, or ``protoseam``; WANDB_MODE=offline needs no account."""

    def __init__(self, out: Path) -> None:
        import wandb

        def begin(name: str) -> str:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=out.name,
                id=name,
                resume="allow",
                reinit="create_new",  # several runs of one process
            )
            return name

        known = _remembered(out / "wandb-id", lambda: begin(uuid.uuid4().hex))
        if not hasattr(self, "run"):
            begin(known)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.run.config.update(params, allow_val_change=True)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.run.log(metrics, step=step)

    def finalize(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "success"))


class MLflowLog:
    """An MLflow run in the store of MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME or ``protoseam``."""

    def __init__(self, out: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        self.new = not (out / "mlflow-id").exists()
        create = self.client.create_run
        self.id = _remembered(out / "mlflow-id", lambda: create(experiment, run_name=out.name).info.run_id)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        for name, value in params.items() if self.new else ():  # MLflow refuses to change them
            self.client.log_param(self.id, name, value)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        entries = [Metric(name, value, now, step or 0) for name, value in metrics.items()]
        self.client.log_batch(self.id, metrics=entries)

    def finalize(self, status: str) -> None:
        self.client.set_terminated(self.id, "FINISHED" if status == "success" else "FAILED")


def _remembered(file: Path, make: Callable[[], str]) -> str:
    """The name that a service knows the run by, kept in the run's directory so that a resumed run goes on under it."""
    if not file.exists():
        with explain_os_error("the run", file.parent, going_on=""):
            write_atomically(file, make().encode())
    return file.read_text(encoding="utf-8").strip()


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "csv": CSVLog,
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "mlflow": MLflowLog,
}
