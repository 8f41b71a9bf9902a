"""``protoseam toy``: the solvable one-dimensional instance, simulated and compared with its closed form."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from protoseam.theory.toy import ToySimulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON row per noise level, nothing else")
    add("--seeds", type=int, default=25, help="repetitions per noise level (default: 25, as in the paper)")
    samples = "samples per repetition (default: 200000, as in the paper)"
    add("--samples", type=int, default=200_000, help=samples)
    add("--seed", type=int, default=0, help="first seed (default: 0)")
    add("--out", type=Path, metavar="DIR", help="write both figures into DIR, as PNG and SVG")


def run(args: argparse.Namespace) -> int:
    from protoseam.theory import toy

    simulation = toy.simulate(samples=args.samples, seeds=args.seeds, seed=args.seed)
    rows = simulation.rows()
    if args.json:
        for row in rows:  # NaN (the deviation of a single seed) is no JSON number
            print(json.dumps({key: None if math.isnan(value) else value for key, value in row.items()}))
    else:
        _print_table(rows)
    # with --json the remarks go to stderr, so that stdout is rows and nothing else
    remarks = sys.stderr if args.json else sys.stdout
    _print_agreement(simulation, remarks)
    if args.out is not None:
        from protoseam.lab.experiments.figures import save_toy_figures

        try:
            paths = save_toy_figures(rows, args.out, seed=args.seed)
        except (ImportError, OSError) as error:
            print(f"protoseam toy: no figures: {error}", file=sys.stderr)
            return 1
        print("figures: " + ", ".join(str(path) for path in paths), file=remarks)
    return 0


def _print_table(rows: list[dict[str, float]]) -> None:
    """80 columns wide; the closed form of the slope is 1 + 2a*, so only the JSON repeats it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("σ", "â", "± std", "a*", "slope", "loss", "closed", "identity", "matched", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        slopes = [f"{row['a_star']:.4f}", f"{row['slope_mean']:.4f}"]
        losses = [f"{row[key]:.3g}" for key in ("loss", "loss_closed_form")]
        shares = [f"{100 * row[f'accuracy_{head}']:.2f}" for head in ("identity", "matched", "limit")]
        simulated = [f"{row['a_hat_mean']:.5f}", f"{row['a_hat_std']:.5f}"]
        table.add_row(f"{row['sigma']:g}", *simulated, *slopes, *losses, *shares)
    Console().print(table)
    print("slope: |g'(1)| of the selected head; loss and accuracies (identity, â, a = −1/2; %) are held out")


def _print_agreement(simulation: ToySimulation, stream: TextIO) -> None:
    """Print where simulation and closed form differ, and how often chance alone would make them."""

    def levels(chosen: list[bool]) -> str:
        return ", ".join(f"{s:g}" for s, hit in zip(simulation.sigmas, chosen, strict=True) if hit) or "none"

    seeds, total = simulation.a_hat_GR.shape[1], simulation.a_hat_GR.numel()
    gap = f"line search: at most {simulation.line_search_gap_G.max():.1e} from the closed form of â"
    if seeds < 2:
        print(gap, "one seed has no deviation to compare with; use --seeds 2 or more", sep="\n", file=stream)
        return
    deviation_G, loss_G = simulation.deviation_G().abs(), simulation.loss_deviation_G().abs()
    lines = [
        gap,
        f"σ where the mean of â is over one seed deviation from a*: {levels((deviation_G > 1).tolist())}",
        f"σ where it is over two standard errors (1/√{seeds} of a deviation) from a*: "
        f"{levels((deviation_G * math.sqrt(seeds) > 2).tolist())}; expected by chance: about 5 % of the levels",
        f"single seeds over one seed deviation from a*: {int(simulation.seeds_outside_G().sum())} of {total} "
        "(about 32 % expected)",
        "σ where the held-out loss is over two standard errors from the closed form: "
        f"{levels((loss_G > 2).tolist())}",
    ]
    print(*lines, sep="\n", file=stream)
