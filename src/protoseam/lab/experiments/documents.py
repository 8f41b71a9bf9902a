"""Tables inside documents: between two comments, README.md and docs/ show what the raw results say.

Data in: finished runs, a Markdown file; data out: the file with its blocks rewritten. A test compares them.
"""

from __future__ import annotations

from pathlib import Path

from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.experiments import aggregate, tables
from protoseam.lab.experiments.aggregate import Cell, Runs
from protoseam.lab.experiments.covariances import adopt
from protoseam.lab.experiments.plans import Scope
from protoseam.lab.experiments.plans import table_1 as plan_of_table_1
from protoseam.lab.experiments.recipes import NETWORKS, STUDIED, TITLES
from protoseam.lab.experiments.reporting import inventory, part_tables

_PARTS = ("covariance", "sweep-rho", "sweep-k")


def blocks(runs: Runs, where: str = "results/paper", results: Path = Path("results")) -> dict[str, str]:
    """Return the generated blocks by name, of the paper's whole study.

    ``where`` is the address of its files in the text, ``results`` the folder with what was measured outside it.

    A network that the study does not run in full appears where at least one run is there, and in the summary where it
    has every seed.
    """
    scope, whole = Scope(models=NETWORKS), Scope()
    runs = adopt(runs, whole, results)
    grid = part_tables("unlifted-grid", runs, whole)["unlifted-grid"]
    counted = aggregate.counted(plan_of_table_1(scope), runs)
    every = aggregate.cells(counted, scope)
    begun = {(cell.data, cell.model) for cell in every if cell.by_seed or cell.model in STUDIED}
    cells = [cell for cell in every if (cell.data, cell.model) in begun]
    return {
        "results": _summary(cells, scope, where),
        "table1": tables.markdown(tables.table_1(cells, scope)),
        "differences": tables.markdown(tables.paired(aggregate.differences(cells), scope)),
        "inventory": inventory(runs, whole),
        "cost": f"{tables.cost_line(runs)}\n",
        **{part: tables.markdown(part_tables(part, runs, whole, results)[part]) for part in _PARTS},
        "unlifted-grid": f"{grid.caption}\n\n{tables.markdown(grid)}",
        "wavering": tables.markdown(tables.wavering_table(aggregate.wavering(counted, scope), scope)),
    }


def _summary(cells: list[Cell], scope: Scope, where: str) -> str:
    """One line per data set and network: means, and ProtoSeam's distance to Baseline."""
    rows = []
    for gain in aggregate.differences(cells):
        own = [cell for cell in cells if (cell.data, cell.model) == (gain.data, gain.model)]
        stands = gain.model in STUDIED or all(len(cell.by_seed) == len(scope.seeds) for cell in own)
        if stands and gain.variant == "protoseam − baseline":
            means = [_mean(cell, scope) for cell in own]
            rows.append([TITLES[gain.data], TITLES[gain.model], *means, _gain(gain)])
    header = ("data", "network", *(TITLES[v] for v in scope.variants), "ProtoSeam − Baseline")
    planned = [cell for cell in cells if cell.model in STUDIED]
    there = sum(len(cell.by_seed) for cell in planned)
    words = (
        f"Mean test accuracy in % over seeds {', '.join(map(str, scope.seeds))}, the paper's in parentheses; the "
        "difference is paired over the seeds both have, with a 95 % interval from two on. Of the "
        f"study's {len(planned) * len(scope.seeds)} runs, {there} are in [{where}]({where}); *missing* was not run "
        "yet.\n\n"
    )
    return words + tables.markdown(tables.Table("", header, rows))


def _mean(cell: Cell, scope: Scope) -> str:
    published = f"({cell.published:.2f})"
    if cell.mean is None:
        return f"{tables.MISSING} {published}"
    seeds = (
        "" if len(cell.by_seed) == len(scope.seeds) else f", {len(cell.by_seed)} of {len(scope.seeds)} seeds"
    )
    return f"{cell.mean:.2f} {published}{seeds}"


def _gain(gain: Cell) -> str:
    published = f"({gain.published:+.2f})"
    if gain.mean is None:
        return f"{tables.MISSING} {published}"
    interval = "" if gain.interval is None else f" [{gain.interval[0]:+.2f}, {gain.interval[1]:+.2f}]"
    return f"{gain.mean:+.2f}{interval} {published}"


def fill(document: Path, found: dict[str, str]) -> bool:
    """Rewrite what stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; True if that changed it."""
    try:
        before = document.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{document} cannot be read: {error.strerror}") from error
    ends = "\r\n" if "\r\n" in before else "\n"
    text, filled = before.replace("\r\n", "\n"), 0
    for name, block in found.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        head, opened, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if opened and not closed:
            raise ConfigError(f"{document} has {begin.strip()} but no {end} behind it: nothing was rewritten")
        if opened:
            text, filled = f"{head}{begin}{block}{end}{tail}", filled + 1
    if not filled:
        raise ConfigError(
            f"{document} has no block to fill: put <!-- NAME:begin --> and <!-- NAME:end --> on lines of their own "
            f"where a table belongs; NAME is one of {', '.join(found)}"
        )
    text = text.replace("\n", ends)
    if text != before:
        write_atomically(document, text.encode())
    return text != before
