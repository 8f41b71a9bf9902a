"""What a run that goes on finds in its directory: changes to be warned of, its last checkpoint, its metrics."""

from __future__ import annotations

import warnings
from typing import Any

from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.bounded import bytes_of
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.schemas import check_state


class ResumeWarning(UserWarning):
    """A run goes on in another environment than it was started in, or something of it is lost."""


def warn_of_changes(directory: RunDirectory, device: str, changed: list[str]) -> None:
    """Warn of another environment, which is noted in the directory, and of ``changed`` data."""
    changes = directory.environment_changes(device)
    if changes:
        directory.note_environment(device)
        _warn(
            f"this run was started in another environment, so it may not end bit-identically: {'; '.join(changes)}"
        )
    if changed:
        _warn(
            f"the data has changed since this run was started: {'; '.join(changed)}. Training continues with the "
            "present data"
        )


def load_checkpoint(run: Run, directory: RunDirectory) -> tuple[int, int]:
    """Load the last good checkpoint into ``run``; return its epoch and how often the run has rewound, or zeros.

    Raises:
        CheckpointError: it is no state of this run.
    """
    most = 4 * bytes_of(run.state()) + 2**20
    found = checkpoint.latest(directory.checkpoints, run.device, most_bytes=most)
    if found is None:
        return 0, 0
    epoch, state = found
    which = f"the checkpoint of epoch {epoch} in {directory.path}"
    if wrong := check_state(state, epoch, run.config.epochs, run.data.steps):
        raise checkpoint.CheckpointError(
            f"{which} is no state of this run: {wrong}. Restore it, or remove its folder"
        )
    try:
        run.load_state(state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise checkpoint.CheckpointError(
            f"{which} does not fit its config.yaml ({str(error).splitlines()[0]}): restore the one it was saved with, "
            "or start again"
        ) from error
    return epoch, int(state.get("rewinds", 0))


def load_history(directory: RunDirectory, done: int, *, writes: bool) -> list[dict[str, Any]]:
    """Return the metrics of the ``done`` epochs; if this process ``writes``, remove later ones from the file."""
    rows = [row for row in directory.read_metrics() if row["epoch"] <= done]
    if writes:
        lost = sorted(set(range(1, done + 1)) - {row["epoch"] for row in rows})
        if lost:
            _warn(
                f"{directory.path / 'metrics.jsonl'} is damaged: the lines of {len(lost)} epochs, between {lost[0]} "
                f"and {lost[-1]}, cannot be read and are left out. Training continues"
            )
        directory.rewind_metrics(done)
    return rows


def _warn(message: str) -> None:
    warnings.warn(message, ResumeWarning, stacklevel=6)  # where the user called train or resume
