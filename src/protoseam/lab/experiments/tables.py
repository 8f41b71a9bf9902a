"""Tables from raw results only, as CSV, Markdown and LaTeX (booktabs). What was not run is marked as missing.

Data in: records of :mod:`protoseam.lab.experiments.aggregate`; data out: a :class:`Table` of text, or its three forms.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from protoseam.lab.engine.files import read_json
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.aggregate import (
    Band,
    Cell,
    Point,
    Runs,
    difference,
    other_covariances,
    published_curve,
    refused,
)
from protoseam.lab.experiments.plans import Scope, grid_names
from protoseam.lab.experiments.recipes import TITLES, network

MISSING = "missing"


@dataclass(frozen=True)
class Table:
    """Text in rows under a header; every form of it shows ``note``."""

    caption: str
    header: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


# ---------------------------------------------------------------------- what the tables say


def _table(caption: str, header: tuple[str, ...], rows: list[list[str]], scope: Scope) -> Table:
    """Leave the paper's columns out where the runs are not the paper's."""
    kept = [not (scope.note and "paper" in name) for name in header]
    head, *lines = (list(itertools.compress(row, kept)) for row in (header, *rows))
    return Table(caption, tuple(head), lines, scope.note)


def _seeds(scope: Scope) -> list[str]:
    return [f"seed {seed}" for seed in scope.seeds]


def _names(cell: Cell | Band) -> list[str]:
    variants = " − ".join(TITLES[variant] for variant in cell.variant.split(" − "))
    return [TITLES[cell.data], TITLES[cell.model], variants]


def table_1(table: Sequence[Cell], scope: Scope) -> Table:
    header = ("data", "network", "variant", *_seeds(scope), "mean", "spread", "paper", "to paper")
    rows = []
    for cell in table:
        by_seed = [_shown(cell.by_seed.get(seed)) for seed in scope.seeds]
        to_paper = difference(cell.mean, cell.published)
        numbers = [_shown(cell.mean), _shown(cell.spread, ""), _shown(cell.published, ""), _signed(to_paper)]
        rows.append([*_names(cell), *by_seed, *numbers])
    caption = (
        "Test accuracy in %, after the paper's Table 1 (tab:main); spread is the largest minus the smallest."
    )
    return _table(caption, header, rows, scope)


def paired(found: Sequence[Cell], scope: Scope) -> Table:
    header = ("data", "network", "difference", *_seeds(scope), "mean", "95 % interval", "paper")
    rows = []
    for cell in found:
        by_seed = [_signed(cell.by_seed.get(seed), MISSING) for seed in scope.seeds]
        interval = "none: one seed" if cell.by_seed else MISSING
        if cell.interval is not None:
            interval = f"{cell.interval[0]:+.2f} to {cell.interval[1]:+.2f}"
        rows.append([*_names(cell), *by_seed, _signed(cell.mean, MISSING), interval, _signed(cell.published)])
    caption = (
        "Differences in points, paired over seeds, with the 95 % interval of Student's t; paper is the difference of "
        "its means. Seeds are few: the intervals are wide."
    )
    return _table(caption, header, rows, scope)


def curves_table(bands: Sequence[Band], scope: Scope) -> Table:
    """Every fifth epoch, as the paper prints its curves, and the last."""
    rows = []
    for band in bands:
        if band.quantity != "validation accuracy" or not band.epochs:
            continue
        for epoch, *values in zip(band.epochs, band.mean, band.low, band.high, strict=True):
            if epoch % 5 == 0 or epoch == band.epochs[-1]:
                printed = published_curve(band.data, band.model, band.variant).get(epoch)
                numbers = [*(f"{value:.2f}" for value in values), _shown(printed, "")]
                rows.append([*_names(band), str(band.seeds), str(epoch), *numbers])
    caption = "Validation accuracy in % over the epochs: mean, lowest and highest of the seeds."
    header = ("data", "network", "variant", "seeds", "epoch", "mean", "lowest", "highest", "paper mean")
    return _table(caption, header, rows, scope)


def wavering_table(found: Sequence[Cell], scope: Scope) -> Table:
    rows = [[*_names(w), str(len(w.by_seed)), _shown(w.mean), _shown(w.published, "")] for w in found]
    caption = (
        "How far the validation accuracy of one seed strays from its course between epochs 15 and 100, in points: its "
        "deviation from the mean of those five epochs before and after."
    )
    return _table(caption, ("data", "network", "variant", "seeds", "wavers by", "paper"), rows, scope)


def audits(runs: Runs, scope: Scope) -> Table:
    """eq:bures: the risk-transfer bound on held-out images, term by term at a run's last look, for ProtoSeam's runs."""
    terms = ("risk", "sampled_loss", "mean_mismatch", "covariance_mismatch", "non_gaussianity", "bound")
    words = ("R", "sampled loss", "mean mismatch", "covariance mismatch", "non-Gaussianity (cap)", "bound")
    rows = []
    for data, model, seed in itertools.product(scope.datasets, scope.models, scope.seeds):
        metrics = runs.get(f"{data}-{model}-protoseam-{seed}", {}).get("metrics", [])
        looks = [row["audit"] for row in metrics if all(term in row.get("audit", {}) for term in terms)]
        held = sum(look["risk"] <= look["bound"] for look in looks)
        last = [f"{looks[-1][term]:.2f}" for term in terms] if looks else [""] * len(terms)
        verdict = f"{held} of {len(looks)}" if looks else "not audited"
        if metrics:
            rows.append([TITLES[data], TITLES[model], str(seed), verdict, *last])
    caption = (
        "The deployed risk R and its bound (thm:risk-transfer) on held-out images: at how many looks it held, and the "
        "terms whose sum it is at the last."
    )
    return _table(caption, ("data", "network", "seed", "held", *words), rows, scope)


def hyperparameters(runs: Runs, scope: Scope) -> Table:
    """tab:hyperparameters, beside what the files say was used."""
    header = ("data", "network", "variant", "paper lr", "paper decay", "used lr", "used decay")
    rows = []
    for data, model, variant in itertools.product(scope.datasets, scope.models, scope.variants):
        names = [f"{data}-{model}-{variant}-{seed}" for seed in scope.seeds]
        found = [runs[name] for name in names if name in runs]
        rates = _values(run["config"]["optim"]["lr"] * run.get("rate_scale", 1.0) for run in found)
        decays = _values(run["config"]["optim"]["weight_decay"] for run in found)
        inherits = variant == "unlifted" and data in paper.DATASETS
        tuned = paper.TUNED.get((data, network(model)), {}).get(variant)
        stated = [f"{v:g}" for v in tuned] if tuned else ["Baseline's" if inherits else ""] * 2
        rows.append([TITLES[data], TITLES[model], TITLES[variant], *stated, rates, decays])
    return _table("Learning rate and weight decay (tab:hyperparameters).", header, rows, scope)


def _values(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(values))) or MISSING


def sweep_table(points: Sequence[Point], scope: Scope, setting: str) -> Table:
    name = {"rho_max": "ρmax", "dim": "k"}[setting]
    three = ("mean", "lowest", "highest")
    header = (name, *_seeds(scope), *three, *(f"paper {word}" for word in three), "to paper")
    rows = []
    for point in points:
        by_seed = [_shown(point.by_seed.get(seed)) for seed in scope.seeds]
        measured, stated = point.measured, point.published
        to_paper = measured[0] - stated[0] if measured and stated else None
        ours = [_shown(v) for v in measured or (None,) * 3]
        theirs = [_shown(v, "") for v in stated or (None,) * 3]
        rows.append([str(point.value), *by_seed, *ours, *theirs, _signed(to_paper)])
    data, _, model = scope.sweep.partition("-")
    caption = (
        f"Test accuracy in % of ProtoSeam over {name}, {TITLES[model]} on {TITLES[data]} (fig:penalty-sweep)."
    )
    return _table(caption, header, rows, scope)


def grid_table(runs: Runs, scope: Scope) -> Table:
    """Unlifted's own search by validation accuracy, best first, beside the variants as the paper has them."""
    found = [(point, _validation(runs.get(name))) for point, name in grid_names(scope).items()]
    found.sort(key=lambda item: -1.0 if item[1] is None else item[1], reverse=True)
    rows = [[f"{rate:g}", f"{decay:g}", _shown(accuracy)] for (rate, decay), accuracy in found]
    seed = scope.seeds[0]
    beside = {v: runs.get(f"{scope.grid}-{v}-{seed}") for v in ("unlifted", "baseline", "protoseam")}
    told = ", ".join(f"{TITLES[v]} {_shown(_validation(run))}" for v, run in beside.items())
    data, _, model = scope.grid.partition("-")
    caption = (
        f"Validation accuracy in % of Unlifted with a search of its own, {TITLES[model]} on {TITLES[data]}, seed "
        f"{seed} (rem:confound). With the settings of Table 1: {told}."
    )
    return Table(caption, ("learning rate", "weight decay", "validation accuracy"), rows, scope.note)


def _validation(run: dict[str, Any] | None) -> float | None:
    return None if run is None or run.get("validation_accuracy") is None else 100 * run["validation_accuracy"]


def cost_line(runs: Runs) -> str:
    """The cost of all runs in one sentence: hours, and the energy of those whose device was asked for its power."""
    trained = [run for run in runs.values() if "config" in run]
    seconds = sum(run.get("cost", run).get("seconds", 0.0) for run in trained)
    costs = [run["cost"] for run in trained if "joules" in run.get("cost", {})]
    known = {str(run.get("environment", {}).get("device")) for run in trained} - {"None"}
    where = f" on {', '.join(sorted(known))}" if known else ""
    joules, energy = sum(cost["joules"] for cost in costs), "not measured"
    if costs:
        energy = f"{joules / 1e6:.2f} MJ ({joules / 3.6e6:.2f} kWh) over {len(costs)} of them"
    shared = "" if all("cost" in run for run in trained) else " (runs that shared a device count in full)"
    hours = f"{seconds / 3600:.1f} hours of training{where}{shared}"
    return f"Cost: {len(trained)} runs, {hours}; energy {energy}."


# The setting lift.covariance, lift.structure → how a reader knows it.
_ESTIMATES = {
    ("exact", "full"): "exact: one pass after each epoch",
    ("running", "full"): "running: from the training batches",
    ("running", "diagonal"): "running, diagonal",
    ("isotropic", "full"): "isotropic: ρ⁻¹, nothing is estimated",
}


def covariance_table(runs: Runs, scope: Scope, results: Path | None) -> Table:
    """Return ProtoSeam's accuracy by network and estimate, in %, and the time of an epoch against Unlifted's.

    Args:
        runs: the study's runs, by name.
        scope: names the data and the network; the paper's scope adds ResNet-8.
        results: the folder that may hold ``covariance/*/summary.json`` and ``bench/engine-h200.json``. A run that
            differs from a recipe in more than the estimate is left out.
    """
    bench = results / "bench" / "engine-h200.json" if results else None
    measured = read_json(bench)["epochs"] if bench and bench.exists() else {}
    pairs = tuple(dict.fromkeys(([] if scope.note else ["cifar100-resnet8"]) + [scope.sweep]))  # DATA-MODEL
    everything = [run for name, run in runs.items() if name.startswith(("covariance-", *pairs))]
    everything += other_covariances(results)
    rows = []
    for pair, ((estimate, structure), words) in itertools.product(pairs, _ESTIMATES.items()):
        model = pair.partition("-")[2]
        changed: dict[str, Any] = {"lift.covariance": estimate, "lift.structure": structure}
        by_seed: dict[int, float] = {}
        for seed in scope.seeds:
            planned = scope.config(f"{pair}-protoseam", seed, **changed)
            if same := [run for run in everything if not refused(planned, run)]:
                by_seed[seed] = 100 * same[0]["test_accuracy"]
        if by_seed:
            overhead = measured.get(model, {}).get("overhead", {}) if structure == "full" else {}
            cost = f"{100 * overhead[estimate]:+.1f} %" if estimate in overhead else "not measured"
            accuracies = [_shown(by_seed.get(seed)) for seed in scope.seeds]
            rows.append([TITLES[model], words, *accuracies, _shown(fmean(by_seed.values())), cost])
    data = TITLES[scope.sweep.partition("-")[0]]
    caption = f"Test accuracy in % of ProtoSeam on {data} by covariance estimate."
    header = ("network", "covariance", *_seeds(scope), "mean", "epoch against Unlifted")
    return Table(caption, header, rows, scope.note)


def toy_table(rows: Sequence[dict[str, float]], note: str = "") -> Table:
    header = ("σ", "a simulated", "deviation", "a closed form", "slope simulated", "slope closed form")
    keys = ("a_hat_mean", "a_hat_std", "a_star", "slope_mean", "slope")
    shown = [[f"{row['sigma']:g}", *(f"{row[key]:.5f}" for key in keys)] for row in rows]
    return Table("The toy model: simulation beside closed form (fig:toy-selection).", header, shown, note)


def _shown(value: float | None, absent: str = MISSING) -> str:
    return absent if value is None else f"{value:.2f}"


def _signed(value: float | None, absent: str = "") -> str:
    return absent if value is None else f"{value:+.2f}"


# ---------------------------------------------------------------------- the forms they take


def markdown(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    note = f"**{table.note}**\n\n" if table.note else ""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return note + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def csv_text(table: Table) -> str:
    """Return the table as CSV, with the note in a column of its own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*table.header, "note"] if table.note else table.header)
    writer.writerows([*row, table.note] if table.note else row for row in table.rows)
    return text.getvalue()


def latex(table: Table) -> str:
    r"""A ``table`` float for ``\usepackage{booktabs}``; text left, numbers right."""
    columns = "".join(
        "r" if any(_numeric(row[i]) for row in table.rows) else "l" for i in range(len(table.header))
    )
    caption = f"{table.caption} {table.note[:1].upper() + table.note[1:]}".strip()
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _row(table.header),
        r"\midrule",
        *map(_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{_escaped(caption)}}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _numeric(text: str) -> bool:
    return text == MISSING or text.replace(".", "").replace("+", "").replace("-", "").isdigit()


def _row(texts: Sequence[str]) -> str:
    return " & ".join(map(_escaped, texts)) + r" \\"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "−": "--", "ρ": r"$\rho$", "σ": r"$\sigma$", "’": "'",
}  # fmt: skip


def _escaped(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text).replace(r"$\rho$max", r"$\rho_{\max}$")
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)  # a minus, not a hyphen
