"""The report of a study: every table and figure, an index of what is missing, and the tables inside documents.

Data in: the finished runs of a study and a scope; data out: files in one folder, or a Markdown file with the blocks
between two comments rewritten, as README.md and docs/ have them. Raw results are only read.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from protoseam.lab.data.names import for_markdown
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.experiments import aggregate, tables
from protoseam.lab.experiments.aggregate import Cell, Runs
from protoseam.lab.experiments.plans import PLANS, Scope
from protoseam.lab.experiments.recipes import NETWORKS, STUDIED, TITLES
from protoseam.lab.experiments.tables import Table

_SETTINGS = {"sweep-rho": "rho_max", "sweep-k": "dim"}
TOY = "toy"  # the toy model's file in a study: simulated, not trained
PARTS = (*PLANS, TOY)
# The files a part may write, less their endings.
_OUTPUTS = {
    "table1": ("table1", "differences", "hyperparameters", "audits"),
    "vit_s": ("vit_s", "vit_s-differences", "vit_s-hyperparameters", "vit_s-audits"),
    "curves": ("curves", "wavering"),
    TOY: ("toy", "toy-selection", "toy-perturbation"),
}


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def part_tables(part: str, runs: Runs, scope: Scope, results: Path | None = None) -> dict[str, Table]:
    """Return the tables of a part by file name; {} for parts that are figures only.

    ``results`` is where the covariance part finds runs and costs that were measured outside the study.
    """
    if part == TOY:
        rows = _toy_rows(runs, scope)
        return {TOY: tables.toy_table(rows, scope.note)} if rows is not None else {}
    if part == "covariance":
        return {part: tables.covariance_table(runs, scope, results)}
    ours = aggregate.counted(PLANS[part](scope), runs)
    if part in ("table1", "vit_s"):
        own = scope if part == "table1" else dataclasses.replace(scope, models=scope.besides)
        cells = aggregate.cells(ours, own)
        paired = tables.paired(aggregate.differences(cells), own)
        found = [tables.table_1(cells, own), paired, tables.hyperparameters(ours, own)]
        audits = tables.audits(ours, own)
        return dict(zip(_OUTPUTS[part], [*found, *([audits] if audits.rows else [])], strict=False))
    if part == "unlifted-grid":
        beside = aggregate.counted(PLANS["table1"](scope), runs)
        return {part: tables.grid_table(ours | beside, scope)}
    if part in _SETTINGS:
        points = aggregate.sweep(ours, scope, _SETTINGS[part])
        return {part: tables.sweep_table(points, scope, _SETTINGS[part])}
    if part == "curves":
        wavering = tables.wavering_table(aggregate.wavering(ours, scope), scope)
        curves = tables.curves_table(aggregate.curves(ours, scope), scope)
        return {part: curves, **({"wavering": wavering} if wavering.rows else {})}
    return {}


def _refused_toy(runs: Runs, scope: Scope) -> str:
    """Return why the toy model's file does not count, or "" if it does."""
    sizes = runs[TOY].get("samples"), runs[TOY].get("seeds")
    return "" if sizes == scope.toy else f"of {sizes[0]} samples and {sizes[1]} seeds"


def _toy_rows(runs: Runs, scope: Scope) -> list[dict[str, float]] | None:
    return runs[TOY]["rows"] if TOY in runs and not _refused_toy(runs, scope) else None


def _draw(part: str, runs: Runs, scope: Scope, folder: Path) -> list[Path]:
    """Draw those of a part's figures that have data into ``folder``; return the files."""
    from protoseam.lab.experiments import figures
    from protoseam.lab.experiments.drawing import save_figures

    if part == TOY:
        rows = _toy_rows(runs, scope)
        return figures.save_toy_figures(rows, folder, note=scope.note) if rows is not None else []
    ours = aggregate.counted(PLANS[part](scope), runs)
    figure = None
    if part in _SETTINGS:
        points = aggregate.sweep(ours, scope, _SETTINGS[part])
        figure = figures.sweep_figure(points, scope, _SETTINGS[part])
    elif part == "curves":
        figure = figures.curves_figure(aggregate.curves(ours, scope), scope)
    elif part == "clusters":
        figure = figures.cluster_panels(ours, scope)
    return [] if figure is None else save_figures({part: figure}, folder)


def write_report(
    parts: Sequence[str], runs: Runs, scope: Scope, folder: Path, results: Path | None = None
) -> list[Path]:
    """Write tables in three forms, figures in two (where matplotlib is installed), and ``index.md``.

    What an earlier report had, and this one has no data for, is removed. ``results`` as in :func:`part_tables`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    forms = {"csv": tables.csv_text, "md": tables.markdown, "tex": tables.latex}
    for part in parts:
        for name, table in part_tables(part, runs, scope, results).items():
            for suffix, form in forms.items():
                written.append(folder / f"{name}.{suffix}")
                write_atomically(written[-1], form(table).encode())
        if can_draw():
            written += _draw(part, runs, scope, folder)
        for name in _OUTPUTS.get(part, (part,)):
            for suffix in (*forms, *(("png", "svg") if can_draw() else ())):
                if folder / f"{name}.{suffix}" not in written:
                    (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    written.append(folder / "index.md")
    write_atomically(written[-1], index(runs, scope).encode())
    return written


# ---------------------------------------------------------------------- what is missing


def shortfall(part: str, runs: Runs, scope: Scope) -> tuple[list[str], dict[str, str], int]:
    """Return the runs of a part that are absent, those that do not count and why, and how many it has."""
    if part == TOY:
        why = _refused_toy(runs, scope) if TOY in runs else ""
        return ([] if TOY in runs else [TOY]), ({TOY: why} if why else {}), 1
    plan = PLANS[part](scope)
    absent = [name for name, _ in plan if name not in runs]
    reasons = {name: aggregate.refused(config, runs[name]) for name, config in plan if name in runs}
    return absent, {name: why for name, why in reasons.items() if why}, len(plan)


def index(runs: Runs, scope: Scope) -> str:
    """Return the report's index: how much of the study is there, its cost, and every run that is not."""
    lines = ["# Report", "", *([f"**{scope.note}**", ""] if scope.note else []), inventory(runs, scope)]
    lines += [tables.cost_line(runs), ""]
    for part in PARTS:
        absent, uncounted, _ = shortfall(part, runs, scope)
        if part != "curves" and (absent or uncounted):
            lines += [f"## Missing from {part}", ""]
            lines += [f"- {name}" for name in absent]
            for name, why in uncounted.items():
                lines.append(f"- {name}: there, but {for_markdown(why)}: not counted")
            lines.append("")
    return "\n".join(lines)


def inventory(runs: Runs, scope: Scope) -> str:
    """Return one line per part that has runs: how many are there."""
    rows = []
    for part in PARTS:
        if part in PLANS and not PLANS[part](scope):
            continue
        absent, uncounted, total = shortfall(part, runs, scope)
        missing = len(absent) + len(uncounted)
        rows.append([part, f"{total - missing} of {total}", f"{missing} missing" if missing else "complete"])
    return tables.markdown(Table("", ("part", "runs", ""), rows))


def blocks(runs: Runs, where: str = "results/paper", results: Path = Path("results")) -> dict[str, str]:
    """Return the generated blocks by name, of the paper's whole study.

    ``where`` is the address of its files in the text, ``results`` the folder with what was measured outside it.

    A network that the study does not run in full appears where at least one run is there, and in the summary where it
    has every seed.
    """
    scope, whole = Scope(models=NETWORKS), Scope()
    runs = aggregate.adopt(runs, whole, results)
    parts = ("covariance", "sweep-rho", "sweep-k", "unlifted-grid")
    own = {part: part_tables(part, runs, whole, results)[part] for part in parts}
    counted = aggregate.counted(PLANS["table1"](scope), runs)
    every = aggregate.cells(counted, scope)
    begun = {(cell.data, cell.model) for cell in every if cell.by_seed or cell.model in STUDIED}
    cells = [cell for cell in every if (cell.data, cell.model) in begun]
    return {
        "results": _summary(cells, scope, where),
        "table1": tables.markdown(tables.table_1(cells, scope)),
        "differences": tables.markdown(tables.paired(aggregate.differences(cells), scope)),
        "inventory": inventory(runs, whole),
        "cost": f"{tables.cost_line(runs)}\n",
        **{part: tables.markdown(table) for part, table in own.items()},
        "unlifted-grid": f"{own['unlifted-grid'].caption}\n\n{tables.markdown(own['unlifted-grid'])}",
        "wavering": tables.markdown(tables.wavering_table(aggregate.wavering(counted, scope), scope)),
    }


def _summary(cells: list[Cell], scope: Scope, where: str) -> str:
    """One line per data set and network: means, and ProtoSeam's distance to Baseline."""
    rows = []
    for gain in aggregate.differences(cells):
        own = [cell for cell in cells if (cell.data, cell.model) == (gain.data, gain.model)]
        stands = gain.model in STUDIED or all(len(cell.by_seed) == len(scope.seeds) for cell in own)
        if stands and gain.variant == "protoseam − baseline":
            means = []
            for cell in own:
                there, asked = len(cell.by_seed), len(scope.seeds)
                few = "" if there == asked else f", {there} of {asked} seeds"
                means.append(_beside_paper(cell, ".2f", seeds=few))
            ends = f" [{gain.interval[0]:+.2f}, {gain.interval[1]:+.2f}]" if gain.interval else ""
            rows.append([TITLES[gain.data], TITLES[gain.model], *means, _beside_paper(gain, "+.2f", ends)])
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


def _beside_paper(cell: Cell, form: str, interval: str = "", seeds: str = "") -> str:
    published = f"({cell.published:{form}})"
    if cell.mean is None:
        return f"{tables.MISSING} {published}"
    return f"{cell.mean:{form}}{interval} {published}{seeds}"


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
