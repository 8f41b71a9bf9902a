"""``protoseam train``: flags, a config file, a recipe, or a run to go on with."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from protoseam.lab.cli.parser import (
    Parser,
    budget_seconds,
    known_seeds,
    known_variants,
    read_command,
    refuse_inside_data,
    spare_threads,
    speaks,
    spelled,
    usual_name,
)
from protoseam.lab.cli.report import leave_page
from protoseam.lab.engine.config import ConfigError, RunConfig
from protoseam.lab.engine.loggers import LOGGERS

_GOES_ON = ("--resume", "--budget-minutes", "--quiet", "--logger", "--no-page")


def build_parser() -> Parser:
    parser = Parser("protoseam train", "Train a run into a new directory, or go on with one (--resume DIR).")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in DIR")
    parser.add_argument("--out", metavar="DIR", help="the run's directory; default runs/NAME")
    parser.add_argument("--seeds", nargs="+", help="train one run per seed (42 43), into DIR/VARIANT-SEED")
    parser.add_argument("--variants", nargs="+", help="train one run per variant, e.g. baseline protoseam")
    parser.add_argument("--logger", choices=LOGGERS, help="also log each epoch there")
    return parser


def main(argv: list[str]) -> int:
    from protoseam.errors import SeamError
    from protoseam.lab.data.links import refuse_link
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.engine.run import DivergedError
    from protoseam.lab.engine.session import Interrupted, train

    parser = build_parser()
    given, config = read_command(parser, argv)
    budget = budget_seconds(given.budget_minutes)
    if given.resume is None:
        runs = _expand(config, given)
    else:
        runs = [_going_on(Path(given.resume), spelled(argv, parser))]
    several = len(runs) > 1
    for one, out in runs if given.resume is None else []:
        refuse_inside_data(one.data, out, "runs")
    spare_threads(runs[0][0])
    for _, out in runs if several else []:
        refuse_link(out)  # a link in the directory of the runs; a single run's is the user's own
    started, status = time.monotonic(), 0
    done: dict[Path, dict[str, Any]] = {}
    for one, out in runs:
        left = None if budget is None else budget - (time.monotonic() - started)
        try:
            how = {"quiet": given.quiet, "budget_seconds": left, "logger": given.logger}
            done[out] = train(one, out, resuming=several or given.resume is not None, **how)
        except (DivergedError, SeamError) as error:
            if not several:
                raise
            print(for_terminal(f"protoseam train: {out}: {error}"), file=sys.stderr)
            status = 1  # the others may well come through
            continue
        except Interrupted as stop:
            if not several:
                raise
            why = f"{str(stop).partition(';')[0]} in {out}: everything is saved"
            again = f"and the same command goes on with all {len(runs)} runs"
            raise Interrupted(f"{why}, {again}", by_user=stop.by_user) from stop
        _say(out, done[out])
        if not given.no_page:
            leave_page([out])
    if len(done) > 1 and not given.no_page:
        leave_page(list(done))
    if several and speaks():
        _say_means(done)
    for out, summary in done.items() if speaks() else ():  # last: which have learned nothing, and what to try
        if summary.get("at_chance"):
            print(f"{out}: {summary['at_chance']}")
    return status


def _going_on(out: Path, argv: list[str]) -> tuple[RunConfig, Path]:
    """Return the run to resume; refuse settings beside --resume, as a run goes on as it was begun."""
    from protoseam.lab.engine.rundir import RunDirectory

    names = [word.partition("=")[0] for word in argv if word.startswith("--")]
    if others := [name for name in names if name not in _GOES_ON]:
        raise ConfigError(
            f"--resume goes on with the run's own settings: leave out {', '.join(others)}, or start a new run "
            "with --out"
        )
    return RunDirectory(out).read_config(), out


def _expand(config: RunConfig, given: argparse.Namespace) -> list[tuple[RunConfig, Path]]:
    """Return one run, or one for each variant and seed asked for, with its directory."""
    name = usual_name(config)
    seeds, variants = known_seeds(given.seeds), known_variants(given.variants)
    if not seeds and not variants:
        return [(config, Path(given.out or f"runs/{name}-{config.variant}-{config.seed}"))]
    root = Path(given.out or f"runs/{name}")
    return [
        (dataclasses.replace(config, variant=variant, seed=seed), root / f"{variant}-{seed}")
        for variant in variants or [config.variant]
        for seed in seeds or [config.seed]
    ]


def _say_means(done: dict[Path, dict[str, Any]]) -> None:
    """Print each variant's mean test accuracy over its seeds, and the range."""
    by_variant: dict[str, list[float]] = {}
    for summary in done.values():
        if summary["test_accuracy"] is not None:
            by_variant.setdefault(summary["config"]["variant"], []).append(100 * summary["test_accuracy"])
    for variant, found in by_variant.items():
        if len(found) > 1:
            ends = f"{min(found):.2f} to {max(found):.2f}"
            print(
                f"{variant}: mean test accuracy {statistics.fmean(found):.2f} % of {len(found)} runs, {ends}"
            )


def _say(out: Path, summary: dict[str, Any]) -> None:
    accuracy = summary["test_accuracy"]
    tested = "no test data, " if accuracy is None else f"test accuracy {100 * accuracy:.2f} % "
    if speaks():
        print(f"{out}: {tested}after {summary['epochs']} epochs in {summary['seconds']:.0f} s")
        if "temperature" in summary:
            print(
                f"{out}: probabilities calibrated on the validation data, temperature {summary['temperature']:.3g}"
            )
