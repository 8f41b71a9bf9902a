"""What a person sees of a run: a progress bar in a terminal, a plain line an epoch elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from protoseam.lab.data.names import for_terminal

__all__ = ["Progress"]


class Progress:
    """Epoch by epoch; ``epoch(row)`` takes the metrics line of the epoch that just ended."""

    def __init__(self, title: str, done: int, epochs: int, *, quiet: bool = False) -> None:
        self.title, self.done, self.epochs, self.quiet = for_terminal(title), done, epochs, quiet
        self.started = time.monotonic()
        self.first = done
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.markup import escape
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[news]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                escape(self.title), total=self.epochs, completed=self.done, news=""
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Say something beside the epochs, on standard error."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def epoch(self, row: dict[str, Any]) -> None:
        self.done = row["epoch"]
        news = f"loss {row['loss']['total']:.4f}"
        if row.get("validation_accuracy") is not None:
            news += f"  val {100 * row['validation_accuracy']:.2f} %"
        news += f"  {row['images_per_second']:,.0f} img/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, news=news)
        elif not self.quiet:
            seconds = (time.monotonic() - self.started) / max(1, self.done - self.first)
            left = seconds * (self.epochs - self.done)
            print(f"{self.title}  epoch {self.done}/{self.epochs}  {news}  {left:,.0f} s left", flush=True)
