"""From a config to a finished run directory: training, checkpoints, resume, interruption, results."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from protoseam.errors import ProtoSeamError
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.answers import quantiles
from protoseam.lab.engine.bounded import bytes_of
from protoseam.lab.engine.chance import at_chance, epoch_of, few_steps, what_to_try
from protoseam.lab.engine.config import ConfigError, RunConfig, resolved, to_dict
from protoseam.lab.engine.cost import metered
from protoseam.lab.engine.distributed import Processes, join, naming_lost_processes, restarted
from protoseam.lab.engine.embeddings import embeddings
from protoseam.lab.engine.latents import Latents, finish, look, seam_of
from protoseam.lab.engine.log import Progress
from protoseam.lab.engine.loggers import Logger, reporting
from protoseam.lab.engine.pack import run_epoch_together
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.rundir import RunDirectory, go_on
from protoseam.lab.engine.schemas import check_state
from protoseam.lab.engine.seamfile import write_seam
from protoseam.lab.engine.trainer import DivergedError, Run, resolve_device

__all__ = ["DivergenceWarning", "Interrupted", "ResumeWarning", "resume", "train", "train_packed"]


_MOST_REWINDS = 5
# Of data: its name or path, the root it lies under, the size its images are brought to.
_Place = tuple[str, str | None, int | None]


class Interrupted(ProtoSeamError):
    """Stopped by the user or by the time budget, with everything saved; ``by_user`` says which."""

    def __init__(self, message: str, *, by_user: bool = False) -> None:
        super().__init__(message)
        self.by_user = by_user


class DivergenceWarning(UserWarning):
    """A run diverged and goes on from its last good epoch with a smaller step."""


class ResumeWarning(UserWarning):
    """A run goes on in another environment than it was started in."""


def train(
    config: RunConfig,
    out: Path,
    *,
    quiet: bool = False,
    budget_seconds: float | None = None,
    logger: Logger | str | None = None,
) -> dict[str, Any]:
    """Train one run from the start into the new directory ``out``; returns its summary."""
    return train_packed([(config, out)], quiet=quiet, budget_seconds=budget_seconds, loggers=[logger])[0]


def resume(
    out: Path,
    *,
    quiet: bool = False,
    budget_seconds: float | None = None,
    logger: Logger | str | None = None,
) -> dict[str, Any]:
    """Go on with the run in ``out`` from its last good checkpoint; returns its summary."""
    how: dict[str, Any] = {"quiet": quiet, "budget_seconds": budget_seconds, "loggers": [logger]}
    return train_packed([(RunDirectory(out).read_config(), out)], resuming=True, **how)[0]


def train_packed(
    runs: Sequence[tuple[RunConfig, Path]],
    *,
    quiet: bool = False,
    budget_seconds: float | None = None,
    resuming: bool = False,
    held: Sequence[RunDirectory] | None = None,
    test: bool = True,
    loggers: Sequence[Logger | str | None] | None = None,
) -> list[dict[str, Any]]:
    """Train several runs side by side on one device, each as it would be alone.

    With ``resuming``, a run whose directory exists goes on (or is only read, if it is finished). So it does when
    torchrun has started the processes again after it lost one. ``held`` are directories the caller has claimed, one a
    run: their locks stay the caller's. Without ``test`` the test data is taken away before anything is built, and the
    test accuracy is None: what tuning has to ask for. ``loggers``, one per run, are told of each epoch: see
    :mod:`protoseam.lab.engine.loggers`.
    """
    started = time.monotonic()
    runs = [(resolved(config), out) for config, out in runs]
    resuming = resuming or restarted()
    _deterministic([config for config, _ in runs])
    processes = join(resolve_device(runs[0][0].device))
    with ExitStack() as stack, naming_lost_processes(processes):
        device = processes.device or resolve_device(runs[0][0].device)
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        datasets: dict[_Place, ArrayDataset] = {}
        directories: Sequence[RunDirectory | None] = held or [None] * len(runs)
        sessions = [
            _Session(config, out, processes, resuming or held is not None, datasets, stack, directory, test)
            for (config, out), directory in zip(runs, directories, strict=True)
        ]
        for session, logger in zip(sessions, loggers or [None] * len(runs), strict=True):
            told = logger if session.writes and not session.finished else None
            session.report = stack.enter_context(reporting(told, session.out, to_dict(session.config)))
        active = [s for s in sessions if not s.finished]
        if active:
            with metered([s.directory.path for s in active if s.writes], device):
                _drive(active, quiet or processes.rank > 0, budget_seconds, started)
        for session in sessions:
            session.report({"test_accuracy": session.summary()["test_accuracy"]}, session.config.epochs)
        return [s.summary() for s in sessions]


class _Session:
    """One run and its directory (which only the first process writes)."""

    report: Callable[[dict[str, Any], int], None]  # to the run's logger

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        processes: Processes,
        resuming: bool,
        datasets: dict[_Place, ArrayDataset],
        stack: ExitStack,
        held: RunDirectory | None,
        test: bool,
    ) -> None:
        self.config, self.out, self.processes = config, out, processes
        self.writes = processes.rank == 0
        exists = (out / "config.yaml").exists()
        self.directory = held or RunDirectory(out)
        if held is not None and not exists:
            held.start(config)
        if self.writes and held is None:
            self.directory = (
                RunDirectory.open(out)[0] if resuming and exists else RunDirectory.create(out, config)
            )
            stack.enter_context(self.directory)
        if resuming and exists:
            self.directory.check_config(config)
        self.finished = resuming and exists and self.directory.read_summary() is not None
        if self.finished:
            return
        try:
            remembered = RunData.read(out) if resuming and exists else None
            if remembered and config.data_root != self.directory.read_config().data_root:
                remembered = dataclasses.replace(remembered, root=None)  # told anew where it lies
            name, root = remembered.place(config) if remembered else (config.data, config.data_root)
            place = name, root, config.image_size
            if place not in datasets:
                data = load(name, Path(root) if root else None, image_size=config.image_size)
                datasets[place] = data if test else data.without_test()
            self.changed = remembered.check(out, datasets[place]) if remembered else []
            self.run = Run(config, datasets[place], processes)
            if remembered:
                remembered.normalise(self.run.data)
            if not (resuming and exists):
                self.run.start()
            if self.writes and remembered is None:
                RunData.of(config, datasets[place], self.run.data).write(out)
        except Exception:
            if self.writes and not (resuming and exists):
                self.directory.withdraw()
            raise
        self.history: list[dict[str, Any]] = []
        self.saved = self.rewinds = 0
        self.latents = Latents(config.epochs)
        if resuming and exists:
            self._resume()
            self.latents = Latents.resumed(out, config.epochs, self.run.epoch)
        if self.run.epoch == 0:
            self.run.start()  # before its state is kept, to which a divergence may lead back
        processes.agree(self.run.epoch, "the last checkpoint's epoch")
        self.states: list[dict[str, Any]] = []
        self._remember()
        if self.run.epoch == config.epochs:  # ended between its last checkpoint and its results
            self._finish()

    def opening(self) -> list[str]:
        """What a person should know before the first epoch: the steps of an epoch, and what training starts from."""
        data = self.run.data
        notes = [epoch_of(data.size, data.batch_size), few_steps(self.config, data.size, data.batch_size)]
        notes.append(self.run.start() if self.run.epoch == 0 else None)
        return [f"{self.out.name}: {note}" for note in notes if note]

    def doubt(self) -> str | None:
        """A sentence, once, if validation is at chance after a fifth of the epochs."""
        looked = [row for row in self.history if row["validation_accuracy"] is not None]
        late = [row for row in looked if row["epoch"] >= max(3, self.config.epochs / 5)]
        if len(late) != 1 or late[0]["epoch"] == self.config.epochs or late[0] is not self.history[-1]:
            return None
        told = self._at_chance("validation", late[0]["validation_accuracy"])
        return None if told is None else f"{self.out.name}: after {late[0]['epoch']} epochs {told}"

    def _at_chance(self, split: str, accuracy: float) -> str | None:
        data = self.run.data
        labels = (data.validation if split == "validation" else data.test)[1]
        counts = torch.bincount(labels, minlength=data.num_classes).tolist()
        told = at_chance(accuracy, counts, data.classes, split)
        return told and f"{told} {what_to_try(self.config, data.size, data.batch_size)}"

    def _remember(self) -> None:
        """Keep the state after this epoch; the first and several of the last where divergence is to be undone."""
        # an interruption may come at any moment: replace the list in one go
        state = {**self.run.state(), "rewinds": self.rewinds}
        earlier = self.states if self.config.on_nonfinite == "rewind" else []
        self.states = [*earlier[:1], *earlier[1:][-_MOST_REWINDS:], state]

    def rewind(self) -> None:
        """Go back an epoch, and further each time, and on with half the learning rate.

        Weights can have been on their way out for a while before a number is not finite.
        """
        scale = self.run.rate_scale
        del self.states[max(1, len(self.states) - (self.rewinds - 1)) :]
        self.run.load_state(self.last_state)
        self.run.slow_down(0.5 * scale / self.run.rate_scale)
        self.last_state.update(rate_scale=self.run.rate_scale, rewinds=self.rewinds)
        self.history = self.history[: self.run.epoch]
        self.latents.forget_after(self.run.epoch)
        if self.writes:
            # a kill from here on must not bring the abandoned way back, nor the old rates
            checkpoint.save(self.directory.checkpoints, self.run.epoch, self.last_state)
            self.directory.rewind_metrics(self.run.epoch)
        self.saved = self.run.epoch

    @property
    def last_state(self) -> dict[str, Any]:
        return self.states[-1]

    def _resume(self) -> None:
        changes = self.directory.environment_changes(self.run.config.device)
        if changes and self.writes:
            self.directory.note_environment(self.run.config.device)
            warnings.warn(
                "this run was started in another environment, so it may not end bit-identically: "
                + "; ".join(changes),
                ResumeWarning,
                stacklevel=2,
            )
        if self.changed and self.writes:
            warnings.warn(
                f"the data has changed since this run was started: {'; '.join(self.changed)}. It goes on with what "
                "there is now",
                ResumeWarning,
                stacklevel=2,
            )
        most = 4 * bytes_of(self.run.state()) + 2**20
        found = checkpoint.latest(self.directory.checkpoints, self.run.device, most_bytes=most)
        if found is not None:
            steps = self.run.data.steps
            if wrong := check_state(found[1], found[0], self.config.epochs, steps):
                raise checkpoint.CheckpointError(
                    f"the checkpoint of epoch {found[0]} in {self.out} is no state of this run: {wrong}. Restore it, "
                    "or remove its folder"
                )
            try:
                self.run.load_state(found[1])
            except (
                LookupError,
                TypeError,
                ValueError,
                AttributeError,
                RuntimeError,
                ArithmeticError,
            ) as error:
                raise checkpoint.CheckpointError(
                    f"the checkpoint of epoch {found[0]} in {self.out} does not fit its config.yaml "
                    f"({str(error).splitlines()[0]}): restore the one it was saved with, or start again"
                ) from error
            self.saved, self.rewinds = found[0], int(found[1].get("rewinds", 0))
        self.history = [row for row in self.directory.read_metrics() if row["epoch"] <= self.run.epoch]
        lost = sorted(set(range(1, self.run.epoch + 1)) - {row["epoch"] for row in self.history})
        if lost and self.writes:
            warnings.warn(
                f"{self.out / 'metrics.jsonl'} is damaged: the lines of {len(lost)} epochs, between {lost[0]} and "
                f"{lost[-1]}, cannot be read and are left out. Training goes on",
                ResumeWarning,
                stacklevel=2,
            )
        if self.writes:
            self.directory.rewind_metrics(self.run.epoch)

    def record(self, row: dict[str, Any]) -> None:
        self.history.append(row)
        if self.writes:
            self.directory.append_metrics(row)
        self.report(row, row["epoch"])
        self._remember()
        if self.writes:
            look(self.run, self.latents)
        last = self.run.epoch == self.config.epochs
        if last or self.run.epoch % self.config.checkpoint_every == 0:
            self.save()
        if last:
            self._finish()

    def save(self) -> int:
        """Write the state after the last whole epoch; returns that epoch."""
        epoch = int(self.last_state["epoch"])
        if self.writes and epoch != self.saved:
            self.directory.sync_metrics()
            self.latents.write(self.out)
            checkpoint.save(self.directory.checkpoints, epoch, self.last_state)
            self.saved = epoch
        return epoch

    def _finish(self) -> None:
        """Test labels are touched here and nowhere else, and test images only for the picture of the latent space."""
        accuracy = self.run.accuracy("test")
        deployed = self.run.deployed()
        validation = [r["validation_accuracy"] for r in self.history if r["validation_accuracy"] is not None]
        self.result = {
            "test_accuracy": accuracy,
            "validation_accuracy": validation[-1] if validation else None,
            "epochs": self.run.epoch,
            "seconds": self.run.seconds,
            "parameters": sum(p.numel() for p in deployed.parameters()),
            "classes": list(self.run.data.classes),
            "config": to_dict(self.config),
        }
        if accuracy is not None and (told := self._at_chance("test", accuracy)):
            self.result["at_chance"] = told
        if self.run.rate_scale != 1:  # it has rewound, and the config names another learning rate
            self.result["rate_scale"] = self.run.rate_scale
        if self.config.keep_embeddings and accuracy is not None:  # there are test images
            with self.run.averaged():
                self.result["embeddings"] = embeddings(self.run, self.config.keep_embeddings)
        if self.writes:
            score = finish(self.run, self.latents, self.history)
            self.latents.write(self.out)
            write_seam(self.out, seam_of(self.run), quantiles(score))
            self.directory.write_summary(self.result, deployed.state_dict())

    def summary(self) -> dict[str, Any]:
        if not self.finished:
            return self.result
        summary = self.directory.read_summary()
        assert summary is not None
        return summary


def _drive(sessions: list[_Session], quiet: bool, budget_seconds: float | None, started: float) -> None:
    """Epoch by epoch until all are done, the budget is spent, or the user has had enough."""
    title = sessions[0].out.name if len(sessions) == 1 else f"{len(sessions)} runs"
    epochs = max(s.config.epochs for s in sessions)
    done = min(s.run.epoch for s in sessions)
    fastest = 0.0  # of the epochs so far: the first one also compiles, so the slowest would mislead
    active = sessions
    with Progress(title, done, epochs, quiet=quiet) as progress, _terminable():
        try:
            for note in (note for s in sessions for note in s.opening()):
                progress.note(note)
            while active := [s for s in sessions if s.run.epoch < s.config.epochs]:
                begun = time.monotonic()
                if budget_seconds is not None and sessions[0].processes.any(
                    begun - started + 2 * fastest > budget_seconds
                ):
                    raise Interrupted(_save_all(active, f"the budget of {budget_seconds:.0f} s is spent"))
                try:
                    rows = run_epoch_together([s.run for s in active])
                except DivergedError as divergence:
                    _recover(active, divergence)
                    continue
                for session, row in zip(active, rows, strict=True):
                    session.record(row)
                progress.epoch(rows[0])
                for doubt in filter(None, (session.doubt() for session in active)):
                    progress.note(doubt)
                seconds = time.monotonic() - begun
                fastest = min(fastest or seconds, seconds)
        except KeyboardInterrupt:
            # wherever it came; an epoch under way is forgotten: it will be run again, whole, and come out the same
            raise Interrupted(_save_all(active, "interrupted"), by_user=True) from None


def _recover(sessions: list[_Session], divergence: DivergedError) -> None:
    """Back to the last whole epoch: with half the learning rate if the run is to rewind, else for good.

    Packed runs share an epoch, so all of them repeat it; only the one that diverged is slowed down.
    """
    diverged = [s for s in sessions if s.run is divergence.run]
    for session in diverged:
        session.rewinds += 1
        if session.config.on_nonfinite != "rewind" or session.rewinds > _MOST_REWINDS:
            raise DivergedError(_given_up(session, sessions, divergence)) from divergence
    for session in sessions:
        session.run.load_state(session.last_state)
    for session in diverged:
        session.rewind()
        warnings.warn(
            f"{session.out.name}: {divergence}. Going back to epoch {session.run.epoch} with learning rates "
            f"times {session.run.rate_scale:g}",
            DivergenceWarning,
            stacklevel=2,
        )


def _given_up(diverged: _Session, sessions: list[_Session], divergence: DivergedError) -> str:
    others = [s for s in sessions if s is not diverged]
    whose = f"{diverged.out}: " if others else ""
    epoch = diverged.save()
    kept = f"This one's state after epoch {epoch} is kept" if epoch else "Of this one no epoch was whole"
    message = (
        f"{whose}{divergence}. That makes another run: give it an --out of its own. {kept}, and "
        f"{go_on(diverged.out)} would come to the same step"
    )
    return f"{message}\n{_save_all(others, 'the others stopped, too')}" if others else message


@contextmanager
def _terminable() -> Iterator[None]:
    """A polite request to end (SIGTERM, what preemption sends first) is treated like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _save_all(sessions: list[_Session], why: str) -> str:
    lines = [f"{why}; go on with:"]
    for session in sessions:
        epoch = session.save()
        state = f"saved after epoch {epoch}" if epoch else "not one epoch was whole: from the beginning"
        lines.append(f"  {go_on(session.out)}   ({state})")
    return "\n".join(lines)


def _deterministic(configs: list[RunConfig]) -> None:
    asked = {config.deterministic for config in configs}
    if len(asked) > 1:
        raise ConfigError("packed runs must agree on deterministic: it is a setting of the whole process")
    if asked == {True}:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True
