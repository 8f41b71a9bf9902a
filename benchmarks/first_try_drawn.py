"""First tries that nobody chose: cells of the first-try panel's tasks and networks, drawn by chance.

    python benchmarks/first_try_drawn.py           # sixty cells, two seeds: about 25 minutes on two cores
    python benchmarks/first_try_drawn.py --table   # print the summary of what was measured

The grid holds every network of a task, eight optimizers with their rates, and short to long schedules. What is in the
panel itself is left out. Each cell also draws whether the rate decays and whether the loop clips all gradients to a
norm of 1, as many loops do. Both sides get the same. Raw results go to results/first_try/drawn.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_try
from first_try_tasks import TASKS

import protoseam as ps

OUT = first_try.OUT.with_name("drawn.jsonl")
IMAGES = {"digits": ("cnn_bn", "cnn", "vit"), "digits32": ("timm_resnet",), "fine_tuning": ("cnn_bn", "cnn")}
RATES = {"sgd": (0.01, 0.02, 0.05, 0.1, 0.2), "adamw": (3e-4, 1e-3, 3e-3)}
SMALL = ("wine", "cancer", "fine_tuning")  # batches of 32 instead of 64
SIDES = ("cross-entropy", "lifted")
# a cell of the panel, whether the rate decays, and the norm to which the loop clips
Drawn = tuple[first_try.Cell, bool, float | None]


def grid() -> Iterator[first_try.Cell]:
    for task in TASKS:
        for network in IMAGES.get(task, ("mlp", "mlp_bn")):
            for optimizer, rates in RATES.items():
                for lr in rates:
                    for epochs in (3, 5, 10, 20) if task == "fine_tuning" else (5, 20, 60):
                        yield task, network, optimizer, lr, epochs, 32 if task in SMALL else 64


def drawn(count: int = 60) -> list[Drawn]:
    known = {cell[:5] for cell in first_try.CELLS}
    draw = random.Random(1)
    cells = draw.sample([cell for cell in grid() if cell[:5] not in known], count)
    return [(cell, draw.choice([True, False]), draw.choice([None, 1.0])) for cell in cells]


def run(job: tuple[Drawn, str, int]) -> dict[str, Any]:
    (cell, decays, clip), side, seed = job
    try:
        found = first_try.accuracy(*first_try.trained(cell, side, seed, decays=decays, clip=clip))
    except ps.SeamError as error:
        print(f"{cell} seed {seed}: {error}", flush=True)
        found = math.nan
    return {"cell": list(cell), "decays": decays, "clip": clip, "side": side, "seed": seed, "accuracy": found}


def read(path: Path) -> dict[tuple[Drawn, str, int], float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {((tuple(r["cell"]), r["decays"], r["clip"]), r["side"], r["seed"]): r["accuracy"] for r in rows}


def table(found: dict[tuple[Drawn, str, int], float]) -> str:
    """The cells that are behind by more than half a point, and the counts of all."""
    lines = [
        "| task | network | optimizer | epochs | rate | clipped | cross-entropy | lifted | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gaps = []
    for key in drawn():
        mean = {
            side: statistics.fmean(v for (k, s, _), v in found.items() if k == key and s == side)
            for side in SIDES
        }
        gap = mean["lifted"] - mean["cross-entropy"]
        gaps.append(gap)
        if not gap >= -0.5:
            (task, network, optimizer, lr, epochs, _), decays, clip = key
            row = [task, network, f"{optimizer} {lr:g}", str(epochs), "cosine" if decays else "constant"]
            row += ["yes" if clip else "no", *(f"{mean[side]:.1f}" for side in SIDES), f"{gap:+.1f}"]
            lines.append("| " + " | ".join(row) + " |")
    counts = (
        f"{len(gaps)} cells: {sum(g >= -1.5 for g in gaps)} within 1.5 points of cross-entropy or above, "
    )
    counts += f"{sum(g > 0 for g in gaps)} above it, {sum(g >= -0.5 for g in gaps)} within 0.5; "
    counts += f"{sum(math.isnan(g) for g in gaps)} not finite, {statistics.fmean(gaps):+.1f} on average."
    return "\n".join([*lines, "", counts])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    found = read(args.out)
    jobs = [
        (key, side, seed)
        for seed in args.seeds
        for key in drawn()
        for side in SIDES
        if (key, side, seed) not in found
    ]
    if jobs and not args.table:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool, args.out.open("a") as file:
            for row in pool.imap_unordered(run, jobs):
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(table(read(args.out)))


if __name__ == "__main__":
    main()
