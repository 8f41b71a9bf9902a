"""``protoseam reproduce``: train the runs of a study, and make its tables and figures."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protoseam.lab.engine.config import RunConfig
    from protoseam.lab.experiments.aggregate import Runs
    from protoseam.lab.experiments.plans import Scope

    Agenda = dict[str, tuple[str, RunConfig]]

WHAT = {
    "table1": "tab:main, its paired differences and hyperparameters",
    "sweep-rho": "fig:penalty-sweep (a)",
    "sweep-k": "fig:penalty-sweep (b)",
    "curves": "training curves of table1's runs",
    "clusters": "fig:cluster: MNIST at k = 2",
    "covariance": "ProtoSeam with the running and the isotropic covariance",
    "unlifted-grid": "Unlifted with a search of its own, by validation accuracy",
    "vit_s": "tab:main for ViT-S with linear patches",
    "toy": "the toy model's table and figures",
    "all": "everything, what the tables need most first",
    "recipes": "list the settings of all runs, and run nothing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from protoseam.lab.experiments import paper
    from protoseam.lab.experiments.recipes import NETWORKS, STUDIED

    parts = "; ".join(f"{part}: {what}" for part, what in WHAT.items())
    add = parser.add_argument
    add("part", choices=WHAT, metavar="PART", help=parts)
    quick = "use the digits and small networks: every table and figure in minutes on a CPU"
    add("--quick", action="store_true", help=quick)
    out = "the study's directory (default: results/paper; quick-output with --quick)"
    add("--out", type=Path, metavar="DIR", help=out)
    report = "directory of the tables and figures (default: OUT/report)"
    add("--report", type=Path, metavar="DIR", help=report)
    add("--no-page", action="store_true", help="write no report.html beside them")
    add("--datasets", nargs="+", choices=paper.DATASETS)
    models = f"{' and '.join(STUDIED)} by default; the sweeps use the first ViT-S named"
    add("--models", nargs="+", choices=NETWORKS, help=models)
    add("--variants", nargs="+", choices=paper.VARIANTS)
    add("--seeds", nargs="+", type=int)
    add("--epochs", type=int, help="for a trial; only the paper's 200 count in its tables")
    add("--budget-minutes", type=float, help="save and stop within this time; start again to go on")
    add("--data-root", help="directory of the data sets")
    add("--table-only", action="store_true", help="train nothing; report the runs that exist")
    readme = "also rewrite the generated tables in these Markdown files"
    add("--readme", nargs="+", type=Path, metavar="FILE", help=readme)


def run(args: argparse.Namespace) -> int:
    if args.part == "recipes":
        from protoseam.lab.experiments.recipes import RECIPES

        print("\n".join(recipe.about for recipe in RECIPES.values()))
        return 0
    from protoseam.lab.cli.parser import at_least_one, distinct
    from protoseam.lab.cli.report import leave_page
    from protoseam.lab.data.links import refuse_links
    from protoseam.lab.experiments import reporting
    from protoseam.lab.experiments.aggregate import adopt
    from protoseam.lab.experiments.study import read_study

    at_least_one("epochs", args.epochs)
    for name in ("datasets", "models", "variants", "seeds"):
        distinct(name, getattr(args, name))
    if args.quick and (args.datasets or args.models or args.readme):
        return _refuse("--quick has its own data and networks: leave out --datasets, --models and --readme")
    scope = _scope(args)
    out = args.out or Path("quick-output" if args.quick else "results/paper")
    parts = _within(args, scope) if args.part == "all" else (args.part,)
    if args.table_only and not out.is_dir():
        return _refuse(f"there is no study in {out.absolute()}: name one with --out, or omit --table-only")
    undrawn = any(part != "table1" for part in parts) and not reporting.can_draw()
    if undrawn:
        _refuse("figures need matplotlib: pip install -e '.[report]' in the clone; the tables do not")
    refuse_links(out)
    runs = adopt(read_study(out), scope, out.parent)  # before training: a file that is no run ends it here
    sound = args.table_only or _train(args, parts, scope, out, runs)
    runs = adopt(read_study(out), scope, out.parent)
    _show(parts, runs, scope, out, "without --table-only" if args.table_only else "again")
    report = args.report or out / "report"
    written = reporting.write_report(parts, runs, scope, report, out.parent)
    print(f"written: {', '.join(path.name for path in written)} in {report}")
    if not args.no_page and any(name != "toy" for name in runs):
        leave_page([out], report / "report.html")
    found = reporting.blocks(runs, out.as_posix(), out.parent) if args.readme else {}
    for document in args.readme or ():
        changed = reporting.fill(document, found)
        print(f"{document}: {'rewritten' if changed else 'is up to date'}")
    return 0 if sound and not undrawn else 1


def _refuse(why: str) -> int:
    print(f"protoseam reproduce: {why}", file=sys.stderr)
    return 2


def _scope(args: argparse.Namespace) -> Scope:
    from protoseam.lab.experiments.plans import QUICK, Scope
    from protoseam.lab.experiments.recipes import network

    names = ("datasets", "models", "variants", "seeds", "epochs", "data_root")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    candidates = [model for model in args.models or () if network(model) == "vit_s"]
    if candidates:
        given["sweep"] = f"cifar100-{candidates[0]}"
    return dataclasses.replace(QUICK if args.quick else Scope(), **given)


def _within(args: argparse.Namespace, scope: Scope) -> tuple[str, ...]:
    """Return the parts of ``all`` that lie within the data sets, networks and variants asked for."""
    from protoseam.lab.experiments import reporting
    from protoseam.lab.experiments.plans import PLANS

    def asked(pair: str, variant: str) -> bool:
        data, _, model = pair.partition("-")
        return data in scope.datasets and model in scope.models and variant in scope.variants

    outside = {part for part, plan in PLANS.items() if not plan(scope)}
    if not asked(scope.sweep, "protoseam"):
        outside |= {"sweep-rho", "sweep-k", "covariance"}
    if not asked(scope.grid, "unlifted"):
        outside.add("unlifted-grid")
    if args.datasets or args.models:
        outside |= {"clusters", "vit_s", reporting.TOY}
    return tuple(part for part in reporting.PARTS if part not in outside)


def _train(args: argparse.Namespace, parts: tuple[str, ...], scope: Scope, out: Path, runs: Runs) -> bool:
    """Run what the parts still lack until it is done or the time is up; False if something failed."""
    from protoseam.errors import SeamWarning
    from protoseam.lab.cli.parser import budget_seconds, one_thread
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.experiments.plans import agenda
    from protoseam.lab.experiments.reporting import TOY
    from protoseam.lab.experiments.study import StudyError, run_study

    budget = budget_seconds(args.budget_minutes)
    deadline = math.inf if budget is None else time.monotonic() + budget
    lacking = {name: item for name, item in agenda(parts, scope).items() if name not in runs}
    there, sound = _with_data(lacking, args.data_root)
    with warnings.catch_warnings():
        if args.quick:
            one_thread()
            warnings.simplefilter("ignore", SeamWarning)  # short schedules and few images, and known to be
        counts = Counter(part for part, _ in there.values())
        if counts:
            told = ", ".join(f"{part} {count}" for part, count in counts.items())
            print(f"runs to train: {told}", flush=True)
        plan = [(name, config) for name, (_, config) in there.items()]
        try:
            run_study(plan, out, budget_seconds=budget, quiet=args.quick)
        except StudyError as error:  # all other runs are there
            print(for_terminal(f"protoseam reproduce: {error}"), file=sys.stderr)
            sound = False
        if TOY in parts and time.monotonic() < deadline:
            _simulate_toy(out, scope)
    return sound


def _with_data(lacking: Agenda, root: str | None) -> tuple[Agenda, bool]:
    """Leave out the runs whose data set is not on this machine, and print why; False if there are any."""
    from protoseam.lab.data.loading import absence

    counts = Counter(config.data for _, config in lacking.values())
    absent = {data: why for data in counts if (why := absence(data, Path(root) if root else None))}
    for data, why in absent.items():
        print(f"protoseam reproduce: {counts[data]} runs are skipped: {why}", file=sys.stderr)
    return {name: item for name, item in lacking.items() if item[1].data not in absent}, not absent


def _simulate_toy(out: Path, scope: Scope) -> None:
    from protoseam.lab.engine.files import write_json
    from protoseam.theory import toy

    samples, seeds = scope.toy
    if not (out / "toy.json").exists():
        rows = toy.simulate(samples=samples, seeds=seeds).rows()
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "toy.json", {"name": "toy", "samples": samples, "seeds": seeds, "rows": rows})


def _show(parts: tuple[str, ...], runs: Runs, scope: Scope, out: Path, how: str) -> None:
    from protoseam.lab.experiments import reporting, tables

    for part in parts:
        for name, table in reporting.part_tables(part, runs, scope, out.parent).items():
            if not name.endswith("hyperparameters"):
                print(f"{table.caption}\n\n{tables.markdown(table)}")
        absent, uncounted, total = reporting.shortfall(part, runs, scope)
        print(f"{part}: {total - len(absent) - len(uncounted)} of {total} runs are in {out}", end="")
        print(f"; run the same command {how} to go on" if absent else "")
        for name, why in uncounted.items():
            print(f"  {name} is {why} and not counted: move {out / name}.json away to run it again")
    print(tables.cost_line(runs))
