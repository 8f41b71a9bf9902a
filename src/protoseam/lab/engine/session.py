"""From a config to a finished run directory: training, checkpoints, resume, interruption, results."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from protoseam.errors import ProtoSeamError
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.chance import at_chance, epoch_of, few_steps, optimizer_of, what_to_try
from protoseam.lab.engine.config import RunConfig, resolved, to_dict
from protoseam.lab.engine.cost import metered
from protoseam.lab.engine.distributed import Processes, join, naming_lost_processes, restarts
from protoseam.lab.engine.embeddings import embeddings
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.latents import Latents, finish, look
from protoseam.lab.engine.log import Progress
from protoseam.lab.engine.loggers import Logger, reporting
from protoseam.lab.engine.run import DivergedError, Run, resolve_device
from protoseam.lab.engine.rundata import RunData, find_data
from protoseam.lab.engine.rundir import RunDirectory, go_on
from protoseam.lab.engine.seamfile import Seam, quantiles, write_seam

_MOST_REWINDS = 5


class Interrupted(ProtoSeamError):
    """Training was stopped by the user or by the time budget, with everything saved; ``by_user`` says which."""

    def __init__(self, message: str, *, by_user: bool = False) -> None:
        super().__init__(message)
        self.by_user = by_user


class DivergenceWarning(UserWarning):
    """A run diverged and goes on from its last good epoch with a smaller step."""


class ResumeWarning(UserWarning):
    """A run goes on in another environment than it was started in, or something of it is lost."""


def resume(
    out: Path,
    *,
    quiet: bool = False,
    budget_seconds: float | None = None,
    logger: Logger | str | None = None,
) -> dict[str, Any]:
    """Go on with the run in ``out`` from its last good checkpoint and return its summary; see :func:`train`."""
    config = RunDirectory(out).read_config()
    return train(config, out, quiet=quiet, budget_seconds=budget_seconds, resuming=True, logger=logger)


def train(
    config: RunConfig,
    out: Path,
    *,
    quiet: bool = False,
    budget_seconds: float | None = None,
    resuming: bool = False,
    held: RunDirectory | None = None,
    test: bool = True,
    logger: Logger | str | None = None,
) -> dict[str, Any]:
    """Train one run into the directory ``out`` and return its summary.

    Args:
        config: the run's settings.
        out: its directory; a new one, unless ``resuming`` or ``held``.
        quiet: show no progress.
        budget_seconds: stop cleanly, saved, before this time has passed; None: no limit.
        resuming: go on with the run if the directory exists, or only read it if it is finished. The same holds when
            torchrun has started the processes again after it lost one.
        held: the directory, claimed by the caller, whose lock stays the caller's.
        test: False removes the test data before anything is built, and the test accuracy is None, as tuning needs.
        logger: told of each epoch; an object, or a name of :mod:`protoseam.lab.engine.loggers`.

    Raises:
        Interrupted: by the user or the budget; everything is saved.
        DivergedError: a loss or gradient was not finite, or the weights have grown too large.
    """
    started = time.monotonic()
    config = resolved(config)
    resuming = resuming or held is not None or restarts() > 0
    _set_determinism(config)
    processes = join(resolve_device(config.device))
    with ExitStack() as stack, naming_lost_processes(processes):
        device = processes.device or resolve_device(config.device)
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        goes_on = resuming and (out / "config.yaml").exists()
        directory = held or RunDirectory(out)
        if held is not None and not goes_on:
            held.start(config)
        elif held is None and processes.rank == 0:
            directory = RunDirectory.claim(out) if goes_on else RunDirectory.create(out, config)
            stack.enter_context(directory)
        if goes_on:
            directory.check_config(config)
            summary = directory.read_summary()
            if summary is not None:
                return summary
        try:
            session = Session(config, directory, processes, goes_on=goes_on, test=test)
            told = logger if session.writes else None
            session.report = stack.enter_context(reporting(told, out, to_dict(config)))
        except Exception:
            if not goes_on and processes.rank == 0:
                directory.withdraw()
                if held is None:
                    directory.remove_if_empty()
            raise
        with metered(out if session.writes else None, device):
            summary = session.run_to_end(quiet or processes.rank > 0, budget_seconds, started)
        session.report({"test_accuracy": summary["test_accuracy"]}, config.epochs)
        return summary


class Session:
    """One run and its directory, which only the first process writes."""

    report: Callable[[dict[str, Any], int], None]  # to the run's logger

    def __init__(
        self, config: RunConfig, directory: RunDirectory, processes: Processes, *, goes_on: bool, test: bool
    ) -> None:
        """Build the run, and load its last checkpoint if it ``goes_on``."""
        self.config, self.directory, self.processes = config, directory, processes
        self.out, self.writes = directory.path, processes.rank == 0
        self.name = self.out.absolute().name  # that of . is empty
        self.result: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []
        self.saved = self.rewinds = 0
        self.run, changed = self._build(goes_on, test)
        self.latents = Latents(config.epochs)
        if goes_on:
            self._go_on(changed)
        if self.run.epoch == 0:
            self.run.start()  # before its state is kept, to which a divergence may lead back
        processes.agree(self.run.epoch, "the last checkpoint's epoch")
        self.states: list[dict[str, Any]] = []
        self._remember()

    def _build(self, goes_on: bool, test: bool) -> tuple[Run, list[str]]:
        """Return the run on its data, and what has changed about the data since it was started."""
        config = self.config
        remembered = RunData.read(self.out) if goes_on else None
        if remembered and config.data_root != self.directory.read_config().data_root:
            remembered = dataclasses.replace(remembered, root=None)  # the user has said where it lies now
        dataset, changed = find_data(self.out, config, remembered, test=test)
        run = Run(config, dataset, self.processes)
        if remembered:
            remembered.normalise(run.data)
        if not goes_on:
            run.start()
        present = RunData.of(config, dataset, run.data)
        if self.writes and remembered is None:
            present.write(self.out)
        self.told = present.told(len(run.data.validation[1]))
        return run, changed

    def _go_on(self, changed: list[str]) -> None:
        """Load the last checkpoint and the metrics up to it; warn of another environment and ``changed`` data."""
        directory = self.directory
        if self.writes and (changes := directory.note_changes(self.config.device)):
            _warn(
                "this run was started in another environment, so it may not end bit-identically: "
                + "; ".join(changes)
            )
        if self.writes and changed:
            _warn(
                f"the data has changed since this run was started: {'; '.join(changed)}. Training continues with the "
                "present data"
            )
        self.saved, self.rewinds = checkpoint.load_into(self.run, directory.checkpoints)
        done = self.run.epoch
        self.history = [row for row in directory.read_metrics() if row["epoch"] <= done]
        lost = sorted(set(range(1, done + 1)) - {row["epoch"] for row in self.history})
        if self.writes and lost:
            _warn(
                f"{directory.path / 'metrics.jsonl'} is damaged: the lines of {len(lost)} epochs, between {lost[0]} "
                f"and {lost[-1]}, cannot be read and are left out. Training continues"
            )
        if self.writes:
            directory.write_metrics(self.history)
        if not changed:  # its frames are of the test images that there were
            self.latents = Latents.resumed(self.out, self.config.epochs, done)

    # ------------------------------------------------------------------ the way to the end

    def run_to_end(self, quiet: bool, budget_seconds: float | None, started: float) -> dict[str, Any]:
        """Train epoch by epoch and return the summary; stop at the budget or at the user's interrupt."""
        run, epochs = self.run, self.config.epochs
        fastest = 0.0  # of the epochs so far: the first one also compiles, so the slowest would mislead
        with Progress(self.name, run.epoch, epochs, quiet=quiet) as progress, _terminable():
            try:
                if run.epoch < epochs:
                    for note in self.opening():
                        progress.note(note)
                while run.epoch < epochs:
                    begun = time.monotonic()
                    spent = begun - started + 2 * fastest
                    if budget_seconds is not None and self.processes.any(spent > budget_seconds):
                        raise Interrupted(self._saved_because("the budget is spent"))
                    try:
                        row = train_epoch(run)
                    except DivergedError as divergence:
                        self._recover(divergence)
                        continue
                    self.record(row)
                    progress.epoch(row)
                    if doubt := self.doubt():
                        progress.note(doubt)
                    seconds = time.monotonic() - begun
                    fastest = min(fastest or seconds, seconds)
            except KeyboardInterrupt:
                # wherever it came; an unfinished epoch is run again as a whole, and comes out the same
                raise Interrupted(self._saved_because("interrupted"), by_user=True) from None
        # no result: it ended between its last checkpoint and its results
        return self.result or self._finish()

    def opening(self) -> list[str]:
        """Return what a person should know before the first epoch: its data and steps, and what it starts from."""
        run, size, batch = self.run, self.run.data.size, self.run.data.batch_size
        few = few_steps(self.config, size, batch, self.processes.world)
        start = run.start() if run.epoch == 0 else None
        notes = (self.told, optimizer_of(self.config, run.weight_decay), epoch_of(size, batch), few, start)
        return [f"{self.name}: {note}" for note in notes if note]

    def record(self, row: dict[str, Any]) -> None:
        """Keep the metrics and the state of the epoch that has just ended; after the last one, the results."""
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

    def doubt(self) -> str | None:
        """Return a sentence, once, if validation is at chance after a fifth of the epochs."""
        looked = [row for row in self.history if row["validation_accuracy"] is not None]
        late = [row for row in looked if row["epoch"] >= max(3, self.config.epochs / 5)]
        if len(late) != 1 or late[0]["epoch"] == self.config.epochs or late[0] is not self.history[-1]:
            return None
        told = self._at_chance("validation", *self.run.right("validation"))
        return None if told is None else f"{self.name}: after {late[0]['epoch']} epochs {told}"

    def _at_chance(self, split: str, right: list[int], counts: list[int]) -> str | None:
        data = self.run.data
        told = at_chance(right, counts, data.classes, split)
        return told and f"{told} {what_to_try(self.config, data.size, data.batch_size, data.world)}"

    def save(self) -> int:
        """Write the state after the last whole epoch; return that epoch."""
        epoch = int(self.last_state["epoch"])
        if self.writes and epoch != self.saved:
            self.directory.sync_metrics()
            self.latents.write(self.out)
            checkpoint.save(self.directory.checkpoints, epoch, self.last_state)
            self.saved = epoch
        return epoch

    def _saved_because(self, why: str) -> str:
        epoch = self.save()
        state = f"saved after epoch {epoch}" if epoch else "no epoch was finished: from the beginning"
        return f"{why}; go on with:\n  {go_on(self.out)}   ({state})"

    def _finish(self) -> dict[str, Any]:
        """Test the network, write the results and return them.

        Test labels are used here and nowhere else, and test images besides only for the picture of the latent space.
        """
        self.run.calibrate()
        right, counts = self.run.right("test")
        accuracy = sum(right) / sum(counts) if sum(counts) else None
        deployed = self.run.deployed()
        validation = [r["validation_accuracy"] for r in self.history if r["validation_accuracy"] is not None]
        result = {
            "test_accuracy": accuracy,
            "validation_accuracy": validation[-1] if validation else None,
            "epochs": self.run.epoch,
            "seconds": self.run.seconds,
            "parameters": sum(p.numel() for p in deployed.parameters()),
            "classes": list(self.run.data.classes),
            "config": to_dict(self.config),
        }
        if told := self._at_chance("test", right, counts):
            result["at_chance"] = told
        if self.run.temperature != 1:
            result["temperature"] = self.run.temperature
        if self.run.rate_scale != 1:  # it has rewound, and the config names another learning rate
            result["rate_scale"] = self.run.rate_scale
        if self.config.keep_embeddings and accuracy is not None:  # there are test images
            with self.run.averaged():
                if (kept := embeddings(self.run, self.config.keep_embeddings)) is not None:
                    result["embeddings"] = kept
        if self.writes:
            score = finish(self.run, self.latents, self.history)
            self.latents.write(self.out)
            write_seam(self.out, Seam.of(self.run.objective.seam), quantiles(score))
            self.directory.write_summary(result, deployed.state_dict())
        self.result = result
        return result

    # ------------------------------------------------------------------ divergence

    @property
    def last_state(self) -> dict[str, Any]:
        """The state after the last whole epoch."""
        return self.states[-1]

    def _remember(self) -> None:
        """Keep the state after this epoch; to undo a divergence, also the first and several of the last."""
        # an interruption may come at any moment: replace the list in one go
        state = {**self.run.state(), "rewinds": self.rewinds}
        earlier = self.states if self.config.on_nonfinite == "rewind" else []
        self.states = [*earlier[:1], *earlier[1:][-_MOST_REWINDS:], state]

    def _recover(self, divergence: DivergedError) -> None:
        """Return to an earlier epoch with half the learning rate if the run is to rewind; otherwise give up."""
        self.rewinds += 1
        if self.config.on_nonfinite != "rewind" or self.rewinds > _MOST_REWINDS:
            epoch = self.save()
            kept = f"The state after epoch {epoch} is kept" if epoch else "No epoch was finished"
            raise DivergedError(
                f"{divergence}. Changed settings make another run, with an --out of its own. {kept}; resuming with "
                f"{go_on(self.out)} would fail at the same step"
            ) from divergence
        self.rewind()
        warnings.warn(
            f"{self.name}: {divergence}. Going back to epoch {self.run.epoch} with learning rates "
            f"times {self.run.rate_scale:g}",
            DivergenceWarning,
            stacklevel=4,
        )

    def rewind(self) -> None:
        """Go back an epoch, and further each time, and on with half the learning rate.

        Weights may grow for several epochs before a number is not finite.
        """
        scale = self.run.rate_scale
        del self.states[max(1, len(self.states) - (self.rewinds - 1)) :]
        self.run.load_state(self.last_state)
        self.run.slow_down(0.5 * scale / self.run.rate_scale)
        self.last_state.update(rate_scale=self.run.rate_scale, rewinds=self.rewinds)
        self.history = [row for row in self.history if row["epoch"] <= self.run.epoch]
        self.latents.forget_after(self.run.epoch)
        if self.writes:
            # a kill from here on must bring back neither the abandoned epochs nor the old rates
            checkpoint.save(self.directory.checkpoints, self.run.epoch, self.last_state)
            self.directory.write_metrics(self.history)
        self.saved = self.run.epoch


def _warn(message: str) -> None:
    warnings.warn(message, ResumeWarning, stacklevel=6)  # where the user called train or resume


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM, which preemption sends first, like Ctrl-C."""
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


def _set_determinism(config: RunConfig) -> None:
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True
