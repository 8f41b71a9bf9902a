"""``protoseam reproduce``: the paper's runs, a study directory at a time, and their tables and figures."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protoseam.lab.experiments.aggregate import Runs
    from protoseam.lab.experiments.plans import Scope
    from protoseam.lab.experiments.study import Planned

WHAT = {
    "table1": "tab:main, its paired differences and hyperparameters",
    "sweep-rho": "fig:penalty-sweep (a)",
    "sweep-k": "fig:penalty-sweep (b)",
    "curves": "training curves of table1's runs",
    "clusters": "fig:cluster: MNIST at k = 2",
    "toy": "the toy model's table and figures",
    "all": "everything, tables first",
    "recipes": "list the settings of all runs, and run nothing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from protoseam.lab.experiments import paper
    from protoseam.lab.experiments.recipes import NETWORKS, STUDIED

    parts = "; ".join(f"{part}: {what}" for part, what in WHAT.items())
    parser.add_argument("part", choices=WHAT, metavar="PART", help=parts)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use the digits and small networks: every table and figure in minutes on a CPU",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the study's directory (default: results/paper; quick-output with --quick)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="directory of the tables and figures (default: OUT/report)"
    )
    parser.add_argument("--no-page", action="store_true", help="write no report.html beside them")
    parser.add_argument("--datasets", nargs="+", choices=paper.DATASETS)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=NETWORKS,
        help=f"{' and '.join(STUDIED)} by default; the sweeps use the first ViT-S named",
    )
    parser.add_argument("--variants", nargs="+", choices=paper.VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--epochs", type=int, help="for a trial; only the paper's 200 count in its tables")
    parser.add_argument(
        "--budget-minutes", type=float, help="save and stop within this time; start again to go on"
    )
    parser.add_argument("--data-root", help="directory of the data sets")
    parser.add_argument("--table-only", action="store_true", help="train nothing; report the runs that exist")
    parser.add_argument(
        "--readme",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="also rewrite the generated tables in these Markdown files",
    )


def run(args: argparse.Namespace) -> int:
    if args.part == "recipes":
        return _list_recipes()
    from protoseam.lab.cli.options import at_least_one, distinct

    at_least_one("epochs", args.epochs)
    for name in ("datasets", "models", "variants", "seeds"):
        distinct(name, getattr(args, name))
    if args.quick and (args.datasets or args.models or args.readme):
        print(
            "protoseam reproduce: --quick has its own data and networks, none of them the paper's: leave out "
            "--datasets, --models and --readme",
            file=sys.stderr,
        )
        return 2
    from protoseam.lab.cli.report import leave_page
    from protoseam.lab.data.links import refuse_links
    from protoseam.lab.experiments import reporting
    from protoseam.lab.experiments.study import read_study

    scope = _scope(args)
    out = args.out or Path("quick-output" if args.quick else "results/paper")
    parts = _within(args, scope) if args.part == "all" else (args.part,)
    undrawn = any(part != "table1" for part in parts) and not reporting.can_draw()
    if undrawn:
        print(
            "figures need matplotlib: pip install -e '.[report]' in the clone; tables do without",
            file=sys.stderr,
        )
    if args.table_only and not out.is_dir():
        print(
            f"protoseam reproduce: there is no study in {out.absolute()}; say --out, or run it without --table-only",
            file=sys.stderr,
        )
        return 2
    refuse_links(out)
    read_study(out)  # a file that is no run is better known of before training than after
    sound = args.table_only or _train(args, parts, scope, out)
    runs = read_study(out)
    again = "the same command without --table-only" if args.table_only else "the same command"
    _show(parts, runs, scope, out, again)
    written = reporting.write_report(parts, runs, scope, args.report or out / "report")
    print(f"written: {', '.join(path.name for path in written)} in {written[0].parent}")
    if not args.no_page and any(name != "toy" for name in runs):
        leave_page([out], (args.report or out / "report") / "report.html")
    if args.readme:
        from protoseam.lab.experiments import covariances
        from protoseam.lab.experiments.documents import blocks, fill

        found = blocks(runs, out.as_posix()) | covariances.blocks(runs, out.parent)
        for document in args.readme:
            changed = fill(document, found)
            print(f"{document}: {'rewritten' if changed else 'is up to date'}")
    return 0 if sound and not undrawn else 1


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
    """The parts of ``all`` that lie within the data sets, networks and variants asked for."""
    from protoseam.lab.experiments import reporting

    data, _, model = scope.sweep.partition("-")
    swept = data in scope.datasets and model in scope.models and "protoseam" in scope.variants
    outside = set() if swept else {"sweep-rho", "sweep-k"}
    if args.datasets or args.models:
        outside |= {"clusters", reporting.TOY}
    return tuple(part for part in reporting.PARTS if part not in outside)


def _train(args: argparse.Namespace, parts: tuple[str, ...], scope: Scope, out: Path) -> bool:
    """Run what the parts still lack, in order, until done, stopped or out of time; False if something failed."""
    from protoseam.errors import ProtoSeamError, SeamWarning
    from protoseam.lab.cli.options import budget_seconds, one_thread
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.engine.session import Interrupted
    from protoseam.lab.experiments.reporting import TOY
    from protoseam.lab.experiments.study import run_study

    allowed = budget_seconds(args.budget_minutes)
    deadline = math.inf if allowed is None else time.monotonic() + allowed
    sound = True
    with warnings.catch_warnings():
        if args.quick:
            one_thread()
            warnings.simplefilter("ignore", SeamWarning)  # short schedules and few images, and known to be
        for part, plan in _lacking(parts, scope, out):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            print(f"{part}: {len(plan)} runs to train on {plan[0][1].data}", flush=True)
            budget = None if math.isinf(left) else left
            try:
                if not run_study(plan, out, budget_seconds=budget, quiet=args.quick):
                    break
            except Interrupted:
                raise
            except ProtoSeamError as error:  # the rest may well be possible
                print(for_terminal(f"protoseam reproduce {part}: {error}"), file=sys.stderr)
                sound = False
        if TOY in parts and time.monotonic() < deadline:
            _simulate_toy(out, scope)
    return sound


def _lacking(parts: tuple[str, ...], scope: Scope, out: Path) -> list[tuple[str, list[Planned]]]:
    """What is still to be trained, by part and data set: one that is not there must not stop the others."""
    from protoseam.lab.experiments.plans import PLANS
    from protoseam.lab.experiments.study import done

    groups: dict[tuple[str, str], list[Planned]] = {}
    seen: set[str] = set()
    for part in parts:
        for name, config in PLANS[part](scope) if part in PLANS else []:
            if name not in seen and not done(out, name):
                groups.setdefault((part, config.data), []).append((name, config))
            seen.add(name)
    return [(part, plan) for (part, _), plan in groups.items()]


def _simulate_toy(out: Path, scope: Scope) -> None:
    from protoseam.lab.engine.files import write_json
    from protoseam.theory import toy

    samples, seeds = scope.toy
    if not (out / "toy.json").exists():
        rows = toy.simulate(samples=samples, seeds=seeds).rows()
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "toy.json", {"name": "toy", "samples": samples, "seeds": seeds, "rows": rows})


def _show(parts: tuple[str, ...], runs: Runs, scope: Scope, out: Path, again: str) -> None:
    from protoseam.lab.experiments import reporting, tables

    for part in parts:
        for name, table in reporting.part_tables(part, runs, scope).items():
            if name != "hyperparameters":
                print(f"{table.caption}\n\n{tables.markdown(table)}")
        absent, uncounted, total = reporting.shortfall(part, runs, scope)
        print(f"{part}: {total - len(absent) - len(uncounted)} of {total} runs are in {out}", end="")
        print(f"; {again} goes on" if absent else "")
        for name, why in uncounted.items():
            print(f"  {name} is {why} and not counted: move {out / name}.json away to run it")


def _list_recipes() -> int:
    from protoseam.lab.experiments.recipes import RECIPES

    for make in RECIPES.values():
        print(f"{make.__doc__}")
    return 0
