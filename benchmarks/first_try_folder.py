"""First tries through the command: ``protoseam train --data FOLDER``, by default and with other settings.

    python benchmarks/first_try_folder.py shapes                     # about five minutes on two cores
    python benchmarks/first_try_folder.py photos --data_root DIR     # about twenty; needs CIFAR-10
    python benchmarks/first_try_folder.py unbalanced --data_root DIR # about three; needs CIFAR-10

*shapes*: five shapes in random colours, places and sizes with noise, 60 images of 48×48 each. *photos*: 200 pictures
each of four classes of CIFAR-10, brought to random sizes. *unbalanced*: 320, 24 and 8 pictures of three classes, and a
test part with 250 of each. Results go to results/first_try/TASK.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from protoseam.lab.data.loading import load

RESULTS = Path(__file__).parents[1] / "results" / "first_try"
SHAPES = ("circle", "square", "triangle", "cross", "ring")
PHOTOS = ("airplane", "automobile", "cat", "ship")
UNBALANCED = {"cat": 320, "dog": 24, "ship": 8}


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


def shapes(folder: Path, _: Path | None) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for i in range(60):
            draw(shape, rng).save(folder / shape / f"{i}.png")


def photos(folder: Path, data_root: Path | None) -> None:
    """Pictures of CIFAR-10 as a camera's folder has them: of many sizes, as JPEG or PNG, one in twenty grey."""
    data = load("cifar10", data_root)
    rng = np.random.default_rng(0)
    for c, name in enumerate(data.classes):
        if name not in PHOTOS:
            continue
        (folder / name).mkdir(parents=True)
        for i, row in enumerate(np.flatnonzero(data.train_labels == c)[:200]):
            image = Image.fromarray(np.asarray(data.train_images[row]))
            image = image.resize(
                (int(rng.integers(60, 160)), int(rng.integers(60, 160))), Image.Resampling.BICUBIC
            )
            image = image.convert("L") if rng.random() < 0.05 else image
            image.save(folder / name / f"{i}.{'png' if i % 2 else 'jpg'}")


def unbalanced(folder: Path, data_root: Path | None) -> None:
    data = load("cifar10", data_root)
    for name, few in UNBALANCED.items():
        c = list(data.classes).index(name)
        parts = (
            ("train", data.train_images, data.train_labels, few),
            ("test", data.test_images, data.test_labels, 250),
        )
        for part, images, labels, count in parts:
            (folder / part / name).mkdir(parents=True)
            for row in np.flatnonzero(labels == c)[:count]:
                Image.fromarray(np.asarray(images[row])).save(folder / part / name / f"{row}.png")


# the folder, the settings of all its runs, and those of each row
TASKS = {
    "shapes": (
        shapes,
        ["--epochs", "40"],
        [{"optim.name": "sgd"}, {"optim.name": "adamw"}, {"optim.name": "sgd", "optim.clip": 0}],
    ),
    "photos": (
        photos,
        ["--epochs", "60", "--image_size", "64"],
        [{"optim.weight_decay": decay} for decay in (0.01, 0.3, 3.0)],
    ),
    "unbalanced": (unbalanced, ["--epochs", "30"], [{}]),
}


def run(job: tuple[str, list[str], Path, dict[str, Any], str, int]) -> dict[str, Any]:
    task, common, root, settings, variant, seed = job
    out = root / "-".join(map(str, (*settings.values(), variant, seed)))
    command = [sys.executable, "-m", "protoseam", "train", "--data", str(root / task), *common]
    command += ["--quiet", "true", "--data_root", str(root / "cache"), "--out", str(out)]
    for name, value in {**settings, "variant": variant, "seed": seed}.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    accuracy = json.loads((out / "summary.json").read_text())["test_accuracy"]
    return {"task": task, **settings, "variant": variant, "seed": seed, "test_accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data_root", type=Path, help="where CIFAR-10 lies, for photos")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    make, common, rows = TASKS[args.task]
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch) / args.task, args.data_root)
        jobs = [
            (args.task, common, Path(scratch), settings, variant, seed)
            for seed in (42, 43, 44)
            for settings in rows
            for variant in ("baseline", "protoseam")
        ]
        with (RESULTS / f"{args.task}.jsonl").open("w") as file, ThreadPool(args.workers) as pool:
            for row in pool.imap(run, jobs):
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
