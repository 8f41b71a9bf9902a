"""All parts in turn, each a process of its own, and a table of what they found: ``make torture``.

A part is a script ``torture/NAME.py --out results/torture/NAME.json [--quick]``; its JSON says which promise it
tried, how often, how often that held, and what did not (:func:`rows` also reads the two that say more).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = (
    "kills",
    "saves",
    "damage",
    "disk",
    "nonfinite",
    "ranks",
    "lock",
    "workers",
    "links",
    "schemas",
    "fuzz",
)
TAKES_NO_QUICK = ("fuzz",)


def run(part: str, out: Path, quick: bool) -> int:
    command = [sys.executable, str(HERE / f"{part}.py"), "--out", str(out)]
    if quick:
        command += ["--minutes", "0.2"] if part in TAKES_NO_QUICK else ["--quick"]
    return subprocess.run(command, check=False).returncode


Row = tuple[str, int, int, list[str]]  # promise, tries, held, misses


def rows(part: str, value: dict[str, Any]) -> list[Row]:
    """Lines of the table for one report."""
    if part == "workers":
        return [_workers(name, one) for name, one in value.items() if isinstance(one, dict)]
    if part == "fuzz":
        found = [f"{name}: {miss['kind']}" for name, t in value["targets"].items() for miss in t["findings"]]
        tried = int(value["executions"])
        return [
            (
                f"{len(value['targets'])} readers: no error but the project's own",
                tried,
                tried - len(found),
                found,
            )
        ]
    return [(value["promise"], value["tries"], value["held"], value["misses"])]


def _workers(name: str, value: dict[str, Any]) -> Row:
    promise = f"no trial is run twice nor lost: {name}"
    if "kills" not in value:
        return promise, 0, 0, [f"{key}: {why}" for key, why in value.items()]
    bad = [f"{key}: {value[key]}" for key in ("run_twice", "lost", "left_behind") if value[key]]
    bad += [] if value["equal"] else ["results differ"]
    return promise, value["kills"], 0 if bad else value["kills"], bad


def summarise(folder: Path) -> str:
    """The table over the reports in ``folder``, and every miss below it."""
    lines = ["# What `make torture` found", ""]
    lines += ["| promise | raw | tries | held | misses |", "|---|---|---|---|---|"]
    missed = []
    for part in PARTS:
        file = folder / f"{part}.json"
        if file.exists():
            for promise, tries, held, misses in rows(part, json.loads(file.read_text())):
                lines.append(f"| {promise} | `{file.name}` | {tries:,} | {held:,} | {len(misses)} |")
                missed += [f"- `{part}`: {miss[:500]}" for miss in misses]
        elif (HERE / f"{part}.py").exists():
            lines.append(f"| not run | `{file.name}` | | | |")
    return "\n".join([*lines, "", "## Misses", "", *(missed or ["None."])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/torture"), help="folder of the reports")
    parser.add_argument("--quick", action="store_true", help="a few tries of each part")
    parser.add_argument("--only", nargs="*", choices=PARTS, help="these parts; none of them: only the table")
    options = parser.parse_args()
    chosen = PARTS if options.only is None else options.only
    there = [part for part in chosen if (HERE / f"{part}.py").exists()]
    options.out.mkdir(parents=True, exist_ok=True)
    codes = [run(part, options.out / f"{part}.json", options.quick) for part in there]
    (options.out / "summary.md").write_text(summarise(options.out))
    print((options.out / "summary.md").read_text())
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
