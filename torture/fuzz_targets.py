"""What is fuzzed: one function a reader, from any bytes to a result or to the project's own error.

Data in: the fuzzer's bytes, whose first one chooses a variant (which of several files they become, and whether
checksums inside them are put right first, without which a mutation would never get past the checksum). Data out:
nothing; `ProtoSeamError` means refused, any other exception is a finding. Files are written below the folder given
and nowhere else. No state is kept.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from fuzz_data import (
    Target,
    cifar_binary,
    cifar_binary_seeds,
    cifar_python,
    cifar_python_seeds,
    idx,
    idx_seeds,
    images,
    images_seeds,
    npz,
    npz_seeds,
    tar_archive,
    tar_seeds,
    zip_archive,
    zip_seeds,
)
from fuzz_runs import checkpoint_seeds, config, config_seeds, json_files, json_seeds, run_checkpoint

TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "idx": (idx, idx_seeds),
    "cifar-binary": (cifar_binary, cifar_binary_seeds),
    "cifar-python": (cifar_python, cifar_python_seeds),
    "zip": (zip_archive, zip_seeds),
    "npz": (npz, npz_seeds),
    "images": (images, images_seeds),
    "tar": (tar_archive, tar_seeds),
    "checkpoint": (run_checkpoint, checkpoint_seeds),
    "config": (config, config_seeds),
    "json": (json_files, json_seeds),
}


def attempt(target: Target, data: bytes, box: Path) -> None:
    """Run a target in an empty folder, and leave it empty."""
    box.mkdir(exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target(data, box)
    finally:
        shutil.rmtree(box)
