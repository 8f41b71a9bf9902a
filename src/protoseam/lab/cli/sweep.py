"""``protoseam sweep``: search for settings by validation accuracy; start it as often as there are workers."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protoseam.lab.cli.parser import (
    Parser,
    at_least_one,
    budget_seconds,
    known_seeds,
    known_variants,
    read_command,
    refuse_inside_data,
    spare_threads,
    usual_name,
)
from protoseam.lab.cli.report import leave_page
from protoseam.lab.engine.config import ConfigError, RunConfig, Variant, resolved

if TYPE_CHECKING:
    from protoseam.lab.experiments.space import Space
    from protoseam.lab.experiments.sweep import Search

_MOST_TRIED = 1000  # combinations, until one is found that a value goes with


def build_parser() -> Parser:
    parser = Parser(
        prog="protoseam sweep",
        description="Search for the settings with the highest validation accuracy; test data is never touched. "
        "Start it again to go on, or several times at once: the workers share the trials.",
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="default sweeps/DATA-MODEL")
    forms = "choice:A,B,C  uniform:LOW:HIGH  loguniform:LOW:HIGH  int:LOW:HIGH; default: the paper's grid, 4 learning "
    add("--space", nargs="+", metavar="SETTING=FORM", help=f"{forms}rates × 5 weight decays")
    trials = "let Optuna choose N points instead of running every combination"
    add("--trials", type=int, metavar="N", help=trials)
    add("--seeds", nargs="+", help="judge by the mean over these seeds; default --seed")
    add("--variants", nargs="+", help="a search for each, e.g. baseline protoseam; default --variant")
    tune = "also search for Unlifted; the paper gives it Baseline's settings"
    add("--tune-unlifted", action="store_true", help=tune)
    add("--storage", metavar="URL", help="an Optuna storage that machines share; default DIR/sweep.db")
    add("--name", help="the sweep's name in that storage; default DIR's last part")
    beat = "with --storage: seconds between signs of life of a worker; when three are missing, its trial is retried"
    add("--heartbeat", type=int, default=60, metavar="SECONDS", help=beat)
    add("--report-only", action="store_true", help="run nothing; write and show the results so far")
    return parser


def main(argv: list[str]) -> int:
    from protoseam.lab.experiments.sweep import run_sweep

    given, config = read_command(build_parser(), argv)
    at_least_one("heartbeat", given.heartbeat)
    at_least_one("trials", given.trials)
    budget = budget_seconds(given.budget_minutes)
    spare_threads(config)
    out = Path(given.out or f"sweeps/{usual_name(config)}")
    if given.report_only and not out.is_dir():
        raise ConfigError(f"there is no sweep in {out}: start one without --report-only, or name --out")
    refuse_inside_data(config.data, out, "sweeps")
    space = _space(given.space, config)
    if not given.report_only:
        _check_fit(_first(config, space))
    searches = _searches(config, space, given, out)
    complete = given.report_only or run_sweep(searches, budget_seconds=budget, quiet=given.quiet, say=_say)
    found = _report(searches, out)
    trained = [search.folder for search in searches if any(search.folder.glob("*.json"))]
    if trained and not given.no_page:
        leave_page(trained, out / "report.html")
    if not complete:
        print("not everything is done; start again to go on")
    return 0 if complete and (found or given.report_only) else 1


def _space(words: list[str] | None, config: RunConfig) -> Space:
    from protoseam.lab.experiments import paper
    from protoseam.lab.experiments.space import ADAMW_GRID, Choice, parse_space

    if not words:
        grid = ADAMW_GRID if resolved(config).optim.name == "adamw" else paper.GRID
        return {key: Choice(values) for key, values in grid.items()}
    space = parse_space(words)
    for key, form in space.items():
        for value in form.values:  # raises if one is a word for a number, or fits none of the others
            _first(config, space | {key: Choice((value,))})
    return space


def _first(config: RunConfig, space: Space) -> RunConfig:
    """Return the config of the first combination whose settings go together; raise ConfigError if there is none."""
    from protoseam.lab.experiments.space import apply

    refusals = []
    points = itertools.product(*(form.values for form in space.values()))
    for point in itertools.islice(points, _MOST_TRIED):
        try:
            return apply(config, dict(zip(space, point, strict=True)))
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def _check_fit(config: RunConfig) -> None:
    """Raise if there is no such data or network, before a sweep is made that would be bound to the mistake."""
    from protoseam.lab import models
    from protoseam.lab.data.loading import load

    root = None if config.data_root is None else Path(config.data_root)
    dataset = load(config.data, root, image_size=config.image_size)
    models.build(config.model, dataset.num_classes, dataset.input_shape, **config.model_options)


def _variants(config: RunConfig, given: argparse.Namespace) -> list[Variant]:
    asked = known_variants(given.variants) or [config.variant]
    if given.tune_unlifted:
        asked.append("unlifted")
    elif "unlifted" in asked:
        raise ConfigError(
            "in the paper Unlifted is not searched for, it has Baseline's settings (rem:confound): sweep "
            "--variants baseline, which writes unlifted/best.yaml as well; or give it a search of its own with "
            "--tune-unlifted"
        )
    return list(dict.fromkeys(asked))


def _searches(config: RunConfig, space: Space, given: argparse.Namespace, out: Path) -> list[Search]:
    from protoseam.lab.data.links import refuse_links
    from protoseam.lab.experiments.sweep import plan_search
    from protoseam.lab.experiments.sweep_queue import open_storage

    variants, seeds = _variants(config, given), known_seeds(given.seeds) or [config.seed]
    shared = given.storage is not None
    database = (out / "sweep.db").resolve()
    if not shared and set("?#%") & set(str(database)):
        raise ConfigError(f"--out {out}: a database's address cannot hold ?, # or %; choose another place")
    out.mkdir(parents=True, exist_ok=True)
    refuse_links(out)
    storage = open_storage(given.storage or f"sqlite:///{database}", given.heartbeat)
    name = given.name or out.resolve().name
    return [
        plan_search(
            dataclasses.replace(config, variant=variant),
            space,
            seeds,
            out / variant,
            storage,
            name=f"{name}-{variant}",
            shared=shared,
            trials=given.trials,
        )
        for variant in variants
    ]


def _say(search: Search, slot: int, row: dict[str, Any]) -> None:
    from protoseam.lab.experiments.sweep import NOT_RUN

    params = "  ".join(
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row["params"].items()
    )
    if row["value"] is None:
        why = row["diverged"].partition(". ")[0]  # the remedy after it is for a single run
        what = why if why.startswith(NOT_RUN) else f"diverged: {why}"
    else:
        what = f"val {100 * row['value']:.2f} %"
    if not row["counted"]:
        what += "  (not counted: its heartbeats came too late, and another worker has it)"
    count = len(search.queue.points)
    print(f"{search.base.variant}  trial {slot} ({count} in all)  {params}  {what}", flush=True)


def _report(searches: list[Search], out: Path) -> bool:
    """Print the trials and write the best of each search; False if one has none."""
    from protoseam.lab.experiments import sweep as report
    from protoseam.lab.experiments.tables import markdown

    found = True
    tuned = {search.base.variant for search in searches}
    for search in searches:
        variant = search.base.variant
        rows = report.collect(search)
        path = report.write_report(search, rows)
        missing = sum(row["state"] == "missing" for row in rows)
        print(f"\n{variant}: {len(rows) - missing} of {len(rows)} trials, by validation accuracy\n")
        print(markdown(report.trials_table(search, rows)), end="")
        if path is None:
            found = False
            print(f"\nno trial of {variant} has finished: there is no best one")
            continue
        print(f"\nbest: protoseam train --config {shlex.quote(str(path))}")
        best = report.best_config(search, rows)
        own = "unlifted" in tuned or (out / "unlifted" / "trials.csv").exists()
        if variant == "baseline" and not own and best is not None:
            why = "Baseline's settings, as in the paper (rem:confound); sweep --tune-unlifted searches for its own"
            theirs = dataclasses.replace(best, variant="unlifted")
            inherited = report.write_best(out / "unlifted", theirs, why)
            print(f"Unlifted inherits: protoseam train --config {shlex.quote(str(inherited))}")
    return found
