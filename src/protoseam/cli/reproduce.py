"""``protoseam reproduce``: the paper's runs, a study directory at a time, and their table."""

from __future__ import annotations

import argparse
from pathlib import Path

PARTS = ("table1", "sweep-rho", "sweep-k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from protoseam.experiments import paper

    parser.add_argument("part", choices=PARTS, help="table1: tab:main; the sweeps: fig:penalty-sweep")
    parser.add_argument(
        "--out", type=Path, default=Path("results/paper"), metavar="DIR", help="the study's directory"
    )
    parser.add_argument("--datasets", nargs="+", choices=paper.DATASETS, default=list(paper.DATASETS))
    parser.add_argument("--models", nargs="+", choices=paper.MODELS, default=list(paper.MODELS))
    parser.add_argument("--variants", nargs="+", choices=paper.VARIANTS, default=list(paper.VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(paper.SEEDS))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--pack", type=int, default=3, metavar="R", help="runs trained side by side")
    parser.add_argument(
        "--budget-minutes", type=float, help="stop cleanly within this time; start again to go on"
    )
    parser.add_argument("--data-root", help="where the data sets lie")
    parser.add_argument("--table-only", action="store_true", help="run nothing, print what is there")


def run(args: argparse.Namespace) -> int:
    from protoseam.experiments import plans, tables
    from protoseam.experiments.study import done, read_study, run_study

    common = {"epochs": args.epochs, "data_root": args.data_root}
    if args.part == "table1":
        plan = plans.table_1(args.datasets, args.models, args.seeds, args.variants, **common)
    else:
        plan = {"sweep-rho": plans.sweep_rho, "sweep-k": plans.sweep_k}[args.part](args.seeds, **common)
    complete = True
    if not args.table_only:
        budget = None if args.budget_minutes is None else 60 * args.budget_minutes
        complete = run_study(plan, args.out, pack=args.pack, budget_seconds=budget)
    runs = read_study(args.out)
    if args.part == "table1":
        cells = tables.table_1(runs, args.datasets, args.models, args.seeds)
        print(tables.markdown_table(cells, args.seeds), end="")
    else:
        for name, _ in plan:
            print(f"{name}: {100 * runs[name]['test_accuracy']:.2f}" if name in runs else f"{name}: missing")
    left = sum(not done(args.out, name) for name, _ in plan)
    print(
        f"{len(plan) - left} of {len(plan)} runs are in {args.out}"
        + ("" if complete else "; start again to go on")
    )
    return 0
