"""Flipped bits, cut and missing files in a checkpoint: noticed, and the one before it used, with a warning.

Most tries read the damaged checkpoint; some go on with the whole run, which must end as if nothing had happened.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from harness import arguments, finish, report, result, train

from protoseam.lab.engine import checkpoint

EPOCHS = 6
RUN = ["--data=digits", "--model=mlp", "--model_options={hidden: [16]}", f"--epochs={EPOCHS}", "--device=cpu"]
RUN += [
    "--lift.dim=4",
    "--lift.covariance=running",
    "--deterministic=true",
    "--checkpoint_every=1",
    "--quiet=true",
]


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def blank(path: Path, rng: random.Random) -> None:
    """A block of zeros, as a disk that lost a sector gives."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    block = data[at : at + 512]
    data[at : at + 512] = bytes(byte ^ 0xFF if not any(block) else 0 for byte in block)
    path.write_bytes(data)


def grow(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES = (flip, flip, flip, cut, cut, blank, grow, delete)  # flips are what hardware does most
FILES = ("state.pt", "state.pt", "manifest.json")


def damage(folder: Path, rng: random.Random) -> str:
    kind, name = rng.choice(DAMAGES), rng.choice(FILES)
    kind(folder / name, rng)
    return f"{kind.__name__} {name}"


def read(run: Path, expected: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with reading ``run`` whose newest checkpoint is damaged, or None."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = checkpoint.latest(run / "checkpoints")
    if not any(f"epoch-{EPOCHS:06d} is damaged" in str(w.message) for w in said):
        return "not noticed"
    if found is None or found[0] != EPOCHS - 1:
        return "the one before was not used"
    same = all(torch.equal(found[1]["objective"][k], v) for k, v in expected.items())
    return None if same else "the one before came out different"


def go_on(run: Path, whole: Path, log: Path) -> str | None:
    """Resume the run by the command line's own way; what is wrong, or None."""
    for name in ("summary.json", "model.safetensors"):
        (run / name).unlink()
    if code := finish(train([f"--resume={run}"], log)):
        return f"--resume ended with {code}: {log.read_text()[-300:]}"
    if "is damaged" not in log.read_text():
        return "--resume said nothing"
    return None if result(run) == result(whole) else "the resumed run differs"


def main() -> int:
    options = arguments(__doc__ or "")
    started = time.monotonic()
    rng = random.Random(7)
    folder = Path(tempfile.mkdtemp(prefix="protoseam-damage-"))
    whole, run = folder / "whole", folder / "run"
    if finish(train([*RUN, f"--out={whole}"], folder / "log")):
        raise SystemExit((folder / "log").read_text())
    found = torch.load(whole / f"checkpoints/epoch-{EPOCHS - 1:06d}/state.pt", weights_only=True)
    kinds: Counter[str] = Counter()
    misses = []
    tries, resumes = (20, 2) if options.quick else (200, 20)
    for i in range(tries):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        kind = damage(run / "checkpoints" / f"epoch-{EPOCHS:06d}", rng)
        kinds[kind] += 1
        problem = read(run, found["objective"])
        if problem is None and i < resumes:
            problem = go_on(run, whole, folder / f"log{i}")
        if problem:
            misses.append(f"try {i}, {kind}: {problem}")
    shutil.rmtree(folder)
    promise = "a damaged checkpoint is noticed and the one before it is used, with a warning"
    details = {"damages": dict(sorted(kinds.items())), "of these, runs gone on with to their end": resumes}
    return report(options.out, promise, tries, misses, started, details)


if __name__ == "__main__":
    sys.exit(main())
