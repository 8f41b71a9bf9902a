"""A random sample of mutants of the seam, the engine and the data readers, each against the tests of its module.

    python tests/mutation/sample.py --count 160 --seed 0 --out results/mutation/sample.json

The mutants are those of `mutate.py`, drawn by a fixed seed from all modules that need neither a GPU nor several
processes. A mutant survives if all tests of its module pass. Data out: one JSON file; what survived is explained by
hand in `results/mutation/survivors.md`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
from pathlib import Path

import torch
from mutate import changes, ignored, survives

SOURCE = Path("src/protoseam")
# What several processes, a GPU or a terminal would be needed for.
LEFT_OUT = ("lab/engine/distributed.py", "seam/processes.py")
TESTS = {
    "seam/classifier.py": "seam/test_lift_refusals seam/test_lift",
    "seam/covariance.py": "seam/test_estimators",
    "seam/guards.py": "seam/test_guards seam/test_step_guard seam/test_inputs_outputs",
    "seam/lift.py": "seam/test_lift seam/test_lift_refusals seam/test_inputs_outputs",
    "seam/lifted.py": "seam/test_lifted seam/test_guards seam/test_step_guard seam/test_precision seam/test_resume",
    "seam/passes.py": "seam/test_lifted seam/test_inputs_outputs seam/test_guards",
    "seam/prototypes.py": "seam/test_lifted seam/test_lift",
    "seam/split.py": "seam/test_split seam/test_lift_refusals seam/test_lift",
    "lab/engine/auditing.py": "engine/test_training experiments/test_audit_run",
    "lab/engine/bounded.py": "hostile/test_memory engine/test_checkpoint",
    "lab/engine/checkpoint.py": "engine/test_checkpoint engine/test_promises hostile/test_memory hostile/test_schemas",
    "lab/engine/config.py": "engine/test_settings hostile/test_config_objects hostile/test_odd_settings",
    "lab/engine/embeddings.py": "engine/test_embeddings",
    "lab/engine/evaluate.py": "engine/test_promises engine/test_rundata engine/test_export",
    "lab/engine/export.py": "engine/test_export",
    "lab/engine/deployed.py": "engine/test_exported cli/test_predict",
    "lab/engine/files.py": "hostile/test_schemas hostile/test_links engine/test_promises engine/test_checkpoint",
    "lab/engine/log.py": "hostile/test_names engine/test_training",
    "lab/engine/objectives.py": "engine/test_training engine/test_promises hostile/test_memory",
    "lab/engine/optim.py": "engine/test_optim engine/test_training",
    "lab/engine/epoch.py": "engine/test_training engine/test_nonfinite engine/test_settings",
    "lab/engine/rundata.py": "engine/test_rundata hostile/test_schemas",
    "lab/engine/rundir.py": "hostile/test_schemas hostile/test_links engine/test_training experiments/test_study",
    "lab/engine/schemas.py": "hostile/test_schemas engine/test_rundata experiments/test_study",
    "lab/engine/session.py": "engine/test_training engine/test_nonfinite engine/test_promises hostile/test_schemas",
    "lab/engine/step.py": "engine/test_training engine/test_nonfinite",
    "lab/engine/run.py": "engine/test_training engine/test_nonfinite engine/test_settings hostile/test_memory",
    "lab/data/archives.py": "data/test_archives data/test_images data/test_image_folders data/test_decoded_copies",
    "lab/data/arrays.py": "data/test_arrays data/test_catalog hostile/test_names",
    "lab/pipeline/augment.py": "pipeline/test_augment pipeline/test_draws",
    "lab/data/cache.py": "data/test_catalog data/test_decoded_copies hostile/test_links hostile/test_schemas",
    "lab/data/catalog.py": "data/test_catalog data/test_data_cli",
    "lab/pipeline/counter_rng.py": "pipeline/test_counter_rng pipeline/test_draws pipeline/test_augment "
    "pipeline/test_randaugment",
    "lab/data/dataset.py": "data/test_dataset_checks hostile/test_bad_data data/test_arrays",
    "lab/data/download.py": "data/test_download hostile/test_links",
    "lab/data/images.py": "data/test_images data/test_image_folders data/test_resizing data/test_decoded_copies",
    "lab/data/links.py": "hostile/test_links",
    "lab/data/loading.py": "data/test_catalog data/test_image_folders data/test_resizing data/test_decoded_copies "
    "data/test_data_cli hostile/test_odd_settings",
    "lab/data/names.py": "hostile/test_names",
    "lab/data/pickles.py": "data/test_readers hostile/test_pickles_everywhere",
    "lab/pipeline/randaugment.py": "pipeline/test_randaugment",
    "lab/data/readers.py": "data/test_readers",
    "lab/pipeline/resident.py": "pipeline/test_resident engine/test_promises engine/test_training",
    "lab/data/split.py": "data/test_split",
    "lab/data/streams.py": "data/test_archives data/test_decoded_copies",
}
Mutant = tuple[str, int, int, int, str]  # module, node, which of its changes, line, what was changed


def population() -> list[Mutant]:
    found = []
    for folder in ("seam", "lab/engine", "lab/data", "lab/pipeline"):
        for path in sorted((SOURCE / folder).glob("*.py")):
            name = str(path.relative_to(SOURCE))
            if name not in LEFT_OUT and not name.endswith("__init__.py"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                skipped = ignored(tree)
                for index, node in enumerate(ast.walk(tree)):
                    found += [
                        (name, index, which, getattr(node, "lineno", 0), change)
                        for which, (change, _) in enumerate(changes(node) if id(node) not in skipped else ())
                    ]
    return found


def broken(module: str, index: int, which: int) -> str:
    """The source with that one change."""
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    node = list(ast.walk(tree))[index]
    list(changes(node))[which][1](node)
    return ast.unparse(ast.fix_missing_locations(tree))


def _file(test: str) -> str:
    return f"tests/{test}.py" if test.startswith(("seam/", "hostile/")) else f"tests/lab/{test}.py"


def lives(module: str, source: str) -> bool:
    name = "protoseam." + module.removesuffix(".py").replace("/", ".")
    return survives(name, SOURCE / module, source, [_file(test) for test in TESTS[module].split()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=40, help="stop after this time, with what was tried")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    everything = population()
    chosen = random.Random(options.seed).sample(everything, options.count)
    tried, survivors = 0, []
    for module, index, which, line, change in chosen:
        if time.monotonic() - started > 60 * options.minutes:
            break
        tried += 1
        if lives(module, broken(module, index, which)):
            survivors.append(f"{module}:{line}: {change}")
            print(survivors[-1], flush=True)
    sound = all(
        lives(m, (SOURCE / m).read_text(encoding="utf-8")) for m in sorted({m for m, *_ in chosen[:tried]})
    )
    value = {
        "mutants in all": len(everything),
        "seed": options.seed,
        "tried": tried,
        "killed": tried - len(survivors),
        "survivors": survivors,
        "the tests pass without any change": sound,
        "seconds": round(time.monotonic() - started),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(value, indent=1) + "\n")
    print(f"{tried - len(survivors)} of {tried} mutants were noticed in {value['seconds']} s")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
