"""A new user's four commands: a folder of images of different sizes → trained → evaluated → predicted → page.

    OMP_NUM_THREADS=1 python benchmarks/own_folder.py > results/first_try/own-folder.txt

The images are scikit-learn's digits as PNG files, 16 to 40 pixels on a side, in four colour modes, one of them damaged.
Every thirtieth is kept out of the folder, for ``predict``. The seconds of a CPU say what an idle machine would take.
"""

from __future__ import annotations

import csv
import io
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

COMMANDS = (
    "train --data photos --image_size 16 --epochs 10 --out runs/photos --quiet true",
    "eval runs/photos",
    "predict runs/photos new --csv",
    "report runs/photos",
    "train --data photos --image_size 16 --epochs 10 --out runs/plain --variant baseline --quiet true",  # to compare
)


def write_images(root: Path) -> None:
    draw = random.Random(0)
    digits = load_digits()
    for i, (levels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((levels * 255 / 16).round().astype("uint8"))
        size = draw.randint(16, 40), draw.randint(16, 40)
        image = image.resize(size, Image.Resampling.BICUBIC).convert(draw.choice(["L", "RGB", "P", "RGBA"]))
        folder = root / "new" if i % 30 == 0 else root / "photos" / f"digit {label}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{i:04d}-is-{label}.png")
    (root / "new" / "damaged.png").write_bytes(b"\x89PNG and nothing more")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        print(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, OMP_NUM_THREADS {threads}"
        )
        for command in COMMANDS:
            started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            words = [sys.executable, "-m", "protoseam", *shlex.split(command)]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            told = f"{time.perf_counter() - started:.0f} s, {used:.0f} s of a CPU, status {done.returncode}"
            print(f"\n$ protoseam {command}\n[{told}]", flush=True)
            if "--csv" in command:
                rows = list(csv.DictReader(io.StringIO(done.stdout)))
                right = sum(Path(r["name"]).stem[-1] == r["label"][-1] for r in rows)
                print(f"{right} of {len(rows)} new images right")
            else:
                print(done.stdout.strip())
            print(done.stderr.strip(), flush=True)


if __name__ == "__main__":
    main()
