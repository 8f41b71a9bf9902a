"""``protoseam demo``: see lifted training work, on a CPU, in about a minute."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    out = "directory of the output files (default: demo-output)"
    add("--out", type=Path, default=Path("demo-output"), metavar="DIR", help=out)
    add("--seeds", type=int, nargs="+", default=[42, 43, 44], help="one run per variant and seed (42 43 44)")
    add("--epochs", type=int, default=40, help="epochs per run (40, for which the recipes are tuned)")
    add("--no-page", action="store_true", help="write no report.html")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from protoseam.lab.cli.parser import at_least_one, distinct, one_thread

    at_least_one("epochs", args.epochs)
    distinct("seeds", args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    console.print(
        "[bold]ProtoSeam[/bold] on the 8×8 digits of scikit-learn: the same small network trained three ways.\n"
    )
    from protoseam.errors import SeamWarning
    from protoseam.lab.engine.files import write_atomically
    from protoseam.lab.experiments import demo
    from protoseam.lab.report.demo import DemoPage

    one_thread()

    total = (len(demo.VARIANTS) * len(args.seeds) + demo.PICTURE_EPOCHS) * args.epochs
    watcher = _Watcher(console, total)
    with watcher.bar, warnings.catch_warnings():
        # N2 learns slowly at the paper's one rate, and ends well
        warnings.simplefilter("ignore", SeamWarning)
        watched = watcher if args.no_page else DemoPage(watcher, demo.PICTURE_EPOCHS * args.epochs)
        results, net, data = demo.run(args.seeds, args.epochs, watched)
    files = [args.out / "results.json"]
    write_atomically(files[0], (json.dumps(results, indent=1) + "\n").encode())
    try:
        from protoseam.lab.experiments.drawing import save_figures
        from protoseam.lab.experiments.figures import cluster_figure

        files += save_figures({"clusters": cluster_figure(net, *data.test)}, args.out)
    except ImportError as error:
        console.print(f"no picture: {error}", markup=False)
    if isinstance(watched, DemoPage):
        files.append(watched.write(results, net, data, args.out))
    console.print(_table(results), _verdict(results), sep="\n", end="\n\n")
    console.print(f"{results['seconds']:.0f} s. Written:", *(f"  {path}" for path in files), sep="\n")
    return 0


def _table(results: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    seeds = results["config"]["seeds"]
    table = Table(box=box.SIMPLE_HEAD, title="Test accuracy, %", title_justify="left")
    table.add_column("")
    for name in ("mean", "spread", "to Baseline", *(f"seed {seed}" for seed in seeds)):
        table.add_column(name, justify="right")
    best = max(row["mean"] for row in results["summary"].values())
    for variant, row in results["summary"].items():
        mean = f"{row['mean']:.2f}"
        single = {r["seed"]: r["test"] for r in results["runs"] if r["variant"] == variant}
        shown = f"[bold]{mean}[/bold]" if row["mean"] == best else mean
        gain = "" if variant == "Baseline" else f"{row['difference']:+.2f}"
        accuracies = (f"{single[seed]:.2f}" for seed in seeds)
        table.add_row(variant, shown, f"{row['spread']:.2f}", gain, *accuracies)
    return table


def _verdict(results: dict[str, Any]) -> str:
    """State in words whether ProtoSeam is ahead or behind."""
    gain = results["summary"]["ProtoSeam"]["difference"]
    images = results["config"]["data"]["test"]
    if abs(gain) < 1e-9:
        words = "ProtoSeam and Baseline are level"
    else:
        words = f"ProtoSeam is {abs(gain):.2f} points {'ahead of' if gain > 0 else 'behind'} Baseline"
    return (
        f"{words}. One of the {images} test images is {100 / images:.2f} points; "
        "spread is the largest minus the smallest of the seeds."
    )


class _Watcher:
    """Shows all runs as one progress bar in a terminal, and as one line per run elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console, self.total, self.done, self.begun = console, total, 0, time.perf_counter()
        validation = TextColumn("{task.percentage:3.0f} %  validation {task.fields[val]}")
        left = TimeRemainingColumn(compact=True), TextColumn("left")
        columns = TextColumn("{task.description:<20}"), BarColumn(), validation, *left
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=total, val="…")

    def epoch(self, name: str, row: dict[str, Any], net: object, data: object) -> None:
        self.done += 1
        val = f"{100 * row['validation_accuracy']:5.1f} %"
        self.bar.update(self.task, description=name, advance=1, val=val)

    def end(self, name: str, test: float, seconds: float) -> None:
        if self.bar.disable:
            left = (time.perf_counter() - self.begun) * (self.total - self.done) / self.done
            self.console.print(f"{name:<20} test {test:5.2f} %  {seconds:4.1f} s, about {left:.0f} s left")
