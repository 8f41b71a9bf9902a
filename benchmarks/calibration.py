"""What a temperature fitted on few held-out samples does to the probabilities of the others.

    python benchmarks/calibration.py     # cells of the first-try panel, two seeds: some minutes on two cores

Each network of a cell is trained as in benchmarks/first_try.py. Of its test data, 10 to 200 samples are held out 20
times; a temperature is fitted on them, with several weights of the prior, and the negative log-likelihood and the
calibration error of all other test samples are kept. Raw results go to results/first_try/calibration.jsonl; ``prior``
null is the network as it was trained.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch
from first_try import CELLS, OUT, Cell, trained

import protoseam as ps

SIZES, PRIORS, REPEATS = (10, 30, 50, 100, 200), (None, 0.0, 0.25, 0.5, 1.0), 20
CHOSEN = (1, 2, 13, 16, 21, 24, 25, 28, 31, 38)  # one or two cells of each task with enough test data
SIDES = ("cross-entropy", "lifted")


def run(job: tuple[Cell, str, int]) -> list[dict[str, Any]]:
    cell, side, seed = job
    model, task = trained(cell, side, seed)
    model.eval()
    with torch.no_grad():
        logits, y = model(task.x_test), task.y_test
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for held in (h for h in SIZES if 2 * h <= len(y)):
        orders = [torch.randperm(len(y), generator=generator) for _ in range(REPEATS)]
        for prior in PRIORS:
            nll, ece = [], []
            for order in orders:
                a, b = order[:held], order[held:]
                t = 1.0 if prior is None else ps.core.fit_temperature(logits[a], y[a], prior=prior)
                nll.append(float(ps.core.negative_log_likelihood(logits[b] / t, y[b])))
                ece.append(float(ps.core.calibration_error(logits[b] / t, y[b])))
            found = {"nll": round(statistics.fmean(nll), 4), "ece": round(statistics.fmean(ece), 4)}
            rows.append(
                {"cell": list(cell), "side": side, "seed": seed, "held_out": held, "prior": prior, **found}
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Means over the networks, and in how many of them half a sample's prior lowers the likelihood's loss."""
    lines = [
        "| held-out samples | NLL as trained | by likelihood alone | with half a sample | NLL falls in "
        "| ECE as trained | with half a sample |",
        "|---|---|---|---|---|---|---|",
    ]
    for held in SIZES:
        of = {
            prior: [r for r in rows if (r["held_out"], r["prior"]) == (held, prior)] for prior in PRIORS
        }  # in the same order of networks
        better = sum(new["nll"] < old["nll"] for new, old in zip(of[0.5], of[None], strict=True))
        nll, ece = (
            {prior: f"{statistics.fmean(r[key] for r in these):.3f}" for prior, these in of.items()}
            for key in ("nll", "ece")
        )
        shown = [nll[None], nll[0.0], nll[0.5], f"{better} of {len(of[None])}", ece[None], ece[0.5]]
        lines.append(" | ".join([f"| {held}", *shown]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT.with_name("calibration.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.table:
        jobs = [(CELLS[i], side, seed) for i in CHOSEN for side in SIDES for seed in (0, 1)]
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            rows = [row for found in pool.imap(run, jobs) for row in found]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table([json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
