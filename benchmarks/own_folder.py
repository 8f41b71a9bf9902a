"""A new user's four commands: a folder of images of different sizes → trained → evaluated → predicted → page.

    python benchmarks/own_folder.py > results/first_try/own-folder.txt

The images are scikit-learn's digits as PNG files, 16 to 40 pixels on a side, in four colour modes, one of them damaged.
Every thirtieth is kept out of the folder, for ``predict``. About a minute on an idle CPU core.
"""

from __future__ import annotations

import csv
import io
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

COMMANDS = (
    "train --data photos --image_size 16 --epochs 15 --out runs/photos --quiet true",
    "eval runs/photos",
    "predict runs/photos new --csv",
    "report runs/photos",
    "train --data photos --image_size 16 --epochs 15 --out runs/plain --variant baseline --quiet true",  # to compare
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
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
        for command in COMMANDS:
            started = time.perf_counter()
            words = [sys.executable, "-m", "protoseam", *shlex.split(command)]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
            print(
                f"\n$ protoseam {command}\n[{time.perf_counter() - started:.1f} s, status {done.returncode}]"
            )
            if "--csv" in command:
                rows = list(csv.DictReader(io.StringIO(done.stdout)))
                right = sum(Path(r["name"]).stem[-1] == r["label"][-1] for r in rows)
                print(f"{right} of {len(rows)} new images right")
            else:
                print(done.stdout.strip())
            print(done.stderr.strip())


if __name__ == "__main__":
    main()
