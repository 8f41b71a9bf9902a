"""What a person sees of a run: the last epochs and a progress bar in a terminal, a plain line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from protoseam.lab.data.names import for_terminal

_SHOWN = 6  # epochs above the bar


class Progress:
    """Epoch by epoch; ``epoch(row)`` takes the metrics line of the epoch that just ended."""

    def __init__(self, title: str, done: int, epochs: int, *, quiet: bool = False) -> None:
        self.title, self.done, self.epochs, self.quiet = for_terminal(title), done, epochs, quiet
        self.started = time.monotonic()
        self.first = done
        self.rows: list[dict[str, str]] = []
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.markup import escape

            self._bar = _bar(self.rows)
            self._bar.start()
            self._task = self._bar.add_task(escape(self.title), total=self.epochs, completed=self.done)
        return self

    def __exit__(self, *_: object) -> None:
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
        news = _news(row)
        if self._bar is not None:
            self.rows[:] = [*self.rows, news][-_SHOWN:]
            self._bar.update(self._task, completed=self.done)
        elif not self.quiet:
            seconds = (time.monotonic() - self.started) / max(1, self.done - self.first)
            left = f"{news.pop('img/s')} img/s  {seconds * (self.epochs - self.done):,.0f} s left"
            news["epoch"] += f"/{self.epochs}"
            told = "  ".join(f"{name} {value}" for name, value in news.items())
            print(f"{self.title}  {told}  {left}", flush=True)


def _news(row: dict[str, Any]) -> dict[str, str]:
    """What counts of an epoch: validation, the loss and its terms, how close the nearest prototypes are, the speed."""
    loss, accuracy = row["loss"], row.get("validation_accuracy")
    news = {"epoch": str(row["epoch"])}
    if accuracy is not None:
        news["val"] = f"{100 * accuracy:.2f} %"
    news["loss"] = f"{loss['total']:.4f}"
    news |= {name: f"{value:.3g}" for name, value in loss.items() if name != "total"}
    if "prototype_gap_min" in row.get("seam", {}):
        news["nearest prototypes"] = f"{row['seam']['prototype_gap_min']:.3g}"
    return news | {"img/s": f"{row['images_per_second']:,.0f}"}


def _bar(rows: list[dict[str, str]]) -> Any:
    """A bar with the time left, and above it a table of the last epochs, which ``rows`` holds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    class Bar(Progress):
        def get_renderables(self) -> Iterator[Any]:
            if rows:
                table = Table(box=None, pad_edge=False, header_style="dim")
                names = list(dict.fromkeys(name for row in rows for name in row))
                for name in names:
                    table.add_column(name, justify="right")
                for row in rows:
                    table.add_row(*(row.get(name, "") for name in names))
                yield table
            yield self.make_tasks_table(self.tasks)

    return Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs,"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(stderr=True),
    )
