"""First tries through the command: ``protoseam train --data FOLDER`` on 300 small images, by default and with AdamW.

    python benchmarks/first_try_folder.py      # writes results/first_try/folder.jsonl; about five minutes on a CPU

The folder has five shapes in random colours, places and sizes with noise, 60 images of 48×48 each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

OUT = Path(__file__).parents[1] / "results" / "first_try" / "folder.jsonl"
SHAPES = ("circle", "square", "triangle", "cross", "ring")


def draw(shape: str, rng: np.random.Generator) -> Image.Image:
    dark, light = (tuple(int(v) for v in rng.integers(*ends, 3)) for ends in ((0, 120), (130, 256)))
    image = Image.new("RGB", (48, 48), dark)
    pen = ImageDraw.Draw(image)
    r, (x, y) = int(rng.integers(8, 16)), (int(v) for v in rng.integers(17, 31, 2))
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        pen.ellipse(box, fill=light)
    elif shape == "square":
        pen.rectangle(box, fill=light)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=light)
    elif shape == "cross":
        pen.rectangle((x - r, y - 3, x + r, y + 3), fill=light)
        pen.rectangle((x - 3, y - r, x + 3, y + r), fill=light)
    else:
        pen.ellipse(box, outline=light, width=4)
    noisy = np.asarray(image).astype(float) + rng.normal(0, 12, (48, 48, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch, OUT.open("w") as file:
        root = Path(scratch)
        for shape in SHAPES:
            (root / "shapes" / shape).mkdir(parents=True)
            for i in range(60):
                draw(shape, rng).save(root / "shapes" / shape / f"{i}.png")
        command = [sys.executable, "-m", "protoseam.lab.cli.main", "train", "--data", str(root / "shapes")]
        command += ["--epochs", "40", "--quiet", "true", "--data_root", str(root / "cache")]
        for seed in (42, 43, 44):
            for name in ("sgd", "adamw"):
                for variant in ("baseline", "protoseam"):
                    out = root / f"{variant}-{name}-{seed}"
                    told = [
                        "--variant",
                        variant,
                        "--optim.name",
                        name,
                        "--seed",
                        str(seed),
                        "--out",
                        str(out),
                    ]
                    subprocess.run([*command, *told], check=True, stdout=subprocess.DEVNULL)
                    summary = json.loads((out / "summary.json").read_text())
                    row = {"variant": variant, "optimizer": name, "seed": seed, "epochs": 40}
                    row["test_accuracy"] = summary["test_accuracy"]
                    print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
