"""``protoseam audit DIR``: the theory's terms for a trained run, on held-out data."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_TERMS = {
    "mean_mismatch": "+ mean mismatch",
    "covariance_mismatch": "+ covariance mismatch",
    "non_gaussianity": "+ non-Gaussianity",
}
_WORST = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="DIR", help="a run's directory, finished or with a checkpoint")
    splits = ("validation", "test")
    add("--split", choices=splits, default="validation", help="held-out data (default: validation)")
    add("--json", action="store_true", help="print the whole audit as one JSON object")
    add("--out", type=Path, metavar="DIR", help="for audit.json and figures (default: DIR/audit)")
    add("--device", default="auto")
    add("--seed", type=int, default=0, help="seed of the Monte-Carlo draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    from protoseam.lab.data.links import refuse_link
    from protoseam.lab.engine.files import explain_os_error, write_json
    from protoseam.lab.experiments.audit import audit_run

    report = audit_run(args.run, split=args.split, device=args.device, seed=args.seed)
    out = args.run / "audit" if args.out is None else args.out
    with explain_os_error("the audit", out, going_on=""):
        if args.out is None:  # in a folder that may be a stranger's
            refuse_link(out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "audit.json", report)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    # with --json the remarks go to stderr, so that stdout is the object and nothing else
    remarks = sys.stderr if args.json else sys.stdout
    print(f"written: {out / 'audit.json'}", file=remarks)
    try:
        from protoseam.lab.experiments.audit_figures import save_audit_figures

        with explain_os_error("the audit's figures", out, going_on=""):
            paths = save_audit_figures(report, out)
        print("figures: " + ", ".join(path.name for path in paths), file=remarks)
    except ImportError as error:
        print(f"protoseam audit: no figures: {error}", file=sys.stderr)
    return 0


# ------------------------------------------------------------------------------------------ the tables


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    balanced, sampled = (report["totals"][kind]["accuracy"] for kind in ("balanced", "as_sampled"))
    means = "" if abs(balanced - sampled) < 5e-5 else f" ({100 * balanced:.2f} % as a mean over classes)"
    console.print(
        f"[bold]{escape(report['run'])}[/bold]  epoch {report['epoch']} of {report['epochs']}, {report['split']} data: "
        f"{report['samples']:,} samples, {report['classes_audited']} classes"
    )
    console.print(
        f"accuracy {100 * sampled:.2f} %{means}, seam width {report['dim']}, ρ = {report['rho']:g}, "
        f"σ0 = {report['floor']:.3g}, Σ̂ {report['covariance']} ({report['structure']})\n"
    )
    _print_waterfall(console, report)
    _print_bounds(console, report)
    _print_worst(console, report)
    _print_smoothing(console, report)
    _print_collapse(console, report)
    _print_spectrum(console, report)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title, title_justify="left")
    table.title_style = "bold"
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def _print_waterfall(console: Console, report: dict[str, Any]) -> None:
    total = report["totals"]["balanced"]
    main = next(b for b in total["bounds"] if b["name"] == "decomposition")
    distance, delta = report["mismatch"], report["non_gaussianity"]
    lower = "" if delta["lower"] is None else f"Δ between {delta['lower']:.3g} and {delta['upper']:.3g}"
    notes = {
        "mean_mismatch": f"‖μ − s‖ = {distance['mean']:.3g}; on training data "
        f"{_number(distance['training_mean_mismatch'])}",
        "covariance_mismatch": f"bures = {distance['covariance']:.3g}; the floor alone {distance['floor_bias']:.3g}",
        "non_gaussianity": lower,
    }
    table = _table("The bound, term by term (mean over classes)", "", "loss", "of gap", "where it comes from")
    table.columns[3].justify = "left"
    error = f"± {total['sampled_error']:.1g} (Monte Carlo)"
    table.add_row("sampled loss", f"{total['sampled_loss']:.4g}", "", error)
    for key, name in _TERMS.items():
        share = main["terms"][key]
        table.add_row(name, f"{share:.4g}", f"{100 * share / main['gap']:.0f} %", notes[key])
    over = main["bound_over_risk"]
    table.add_row("= bound", f"{main['bound']:.4g}", "", "" if over is None else f"{over:.3g} × R")
    used = f"{100 * main['tightness']:.2g} % of the gap used"
    table.add_row("deployed risk R", f"{total['risk']:.4g}", "", used)
    console.print(table)
    G = report["lipschitz"]
    console.print(
        f"steepness: G_i = {G['mean']:.3g} on average (paper's G = {G['paper']:.3g}); at the data "
        f"{_number(G['mean_slope'])}\n"
    )


def _print_bounds(console: Console, report: dict[str, Any]) -> None:
    table = _table("Every bound on R", "", "from", "bound", "× R", "tightness", "holds", left=2)
    for b in report["totals"]["balanced"]["bounds"]:
        numbers = f"{b['bound']:.3g}", _number(b["bound_over_risk"]), f"{100 * b['tightness']:.2g} %"
        table.add_row(b["name"], b["source"], *numbers, "yes" if b["holds"] else "[bold red]NO[/bold red]")
    console.print(table)
    slack = report["totals"]["balanced"]["bounds"][0]["slack"]
    console.print(
        f"with confidence {report['confidence']:g} and a slack of {slack:.2g} for the sampled loss; class by class for "
        f"{report['classes_within_bound']} of {report['classes_audited']}\n"
    )


def _print_worst(console: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape

    rows = sorted(report["per_class"], key=lambda row: -row["risk"])[:_WORST]
    columns = ("class", "n", "right", "R", "sampled", "bound", "‖μ − s‖", "bures", "Δ ≤")
    table = _table("Worst classes by deployed risk", *columns)
    for row in rows:
        losses = [f"{row[key]:.3g}" for key in ("risk", "sampled_loss", "bound")]
        terms = [f"{row[key]:.2g}" for key in ("mean_mismatch", "covariance_mismatch", "non_gaussianity")]
        right = f"{100 * row['accuracy']:.0f} %"
        table.add_row(escape(row["name"][:24]), str(row["count"]), right, *losses, *terms)
    console.print(table)
    console.print()


def _print_smoothing(console: Console, report: dict[str, Any]) -> None:
    s = report["smoothing"]
    console.print("[bold]Sampling as smoothing[/bold]")
    console.print(
        f"gap E ℓ(s + ζ) − ℓ(s) = {s['gap']:.3g} ± {s['gap_error']:.1g}; second-order form {_number(s['curvature'])} "
        f"({_number(s['floor_curvature'])} of it the floor's)"
    )
    if s["holds"] is not None:
        verdict = "within" if s["holds"] else "[bold red]BEYOND[/bold red]"
        console.print(
            f"they differ by {s['gap'] - s['curvature']:.2g}: class by class {verdict} what the remainder bound "
            f"({s['remainder']:.2g} on average) and the error of sampling allow"
        )
    console.print()


def _print_collapse(console: Console, report: dict[str, Any]) -> None:
    names = {
        "nc1": "NC1 tr(Σ_W Σ_B⁺)/n",
        "nc1_ratio": "NC1 tr Σ_W/tr Σ_B",
        "nc2_equinorm": "NC2 spread of norms",
        "nc2_angle": "NC2 angles",
        "nc2_max_cosine": "NC2 closest pair, cos",
        "nc2_frame_excess": "NC2 frame excess",
        "nc3": "NC3 head and means",
        "nc4": "NC4 nearest mean",
    }
    held_out, training = report["collapse"]["held_out"], report["collapse"]["training"]
    table = _table("Neural collapse (0: collapsed)", "", "held out", "training", "least possible")
    for key, name in names.items():
        floor = held_out.get(f"{key}_floor", 0.0)
        table.add_row(name, _number(held_out[key]), _number(training[key]), _number(floor))
    console.print(table)
    console.print()


def _print_spectrum(console: Console, report: dict[str, Any]) -> None:
    columns = ("", "trace", "eff. rank", "κ median", "κ max", "largest")
    table = _table("Covariance spectrum (mean over classes)", *columns)
    table.columns[5].justify = "left"
    for name, s in report["spectra"].items():
        largest = "  ".join(f"{value:.2g}" for value in s["eigenvalues"][:3])
        conditions = (_number(s[key], "∞") for key in ("condition_median", "condition_max"))
        table.add_row(name, f"{s['trace']:.3g}", f"{s['effective_rank']:.1f}", *conditions, largest)
    console.print(table)
    estimate = report["estimation"]
    console.print(
        f"ε̄ = ‖Σ̂ − Σ‖ with held-out Σ: {_number(estimate['error'])}, so σ0* = {_number(estimate['optimal_floor'])}; "
        f"from halves of the\ntraining data {_number(estimate.get('error_from_halves'))}, "
        f"so σ0* = {_number(estimate.get('optimal_floor_from_halves'))}"
    )
    console.print()


def _number(value: float | None, missing: str = "–") -> str:
    """Format a number; null stands for infinite or undefined."""
    return missing if value is None else f"{value:.3g}"
