"""Two processes under torchrun, gloo on a CPU, against one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from protoseam.engine import session
from protoseam.engine.config import LiftConfig, OptimConfig, RunConfig, to_dict
from protoseam.engine.rundir import RunDirectory

CONFIG = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    variant="baseline",
    epochs=2,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
    checkpoint_every=1,
)


def torchrun(config: RunConfig, out: Path, folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(to_dict(config)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "protoseam.cli.main", "train", f"--config={file}", f"--out={out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1  # not once for each process


def test_two_processes_train_the_network_of_one(tmp_path: Path) -> None:
    """End to end nothing is random but the order: the weights agree to rounding."""
    torchrun(CONFIG, tmp_path / "two", tmp_path)
    session.train(CONFIG, tmp_path / "one", quiet=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-6)
    rows = [RunDirectory(tmp_path / name).read_metrics() for name in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert a["loss"]["total"] == pytest.approx(b["loss"]["total"], rel=1e-5)


@pytest.mark.parametrize("covariance", ["exact", "running"])
def test_lifted_in_two_processes(covariance: str, tmp_path: Path) -> None:
    """Each process draws its own samples, so the runs differ by that noise and by nothing else."""
    lift = dataclasses.replace(CONFIG.lift, covariance=covariance)
    config = dataclasses.replace(CONFIG, variant="protoseam", lift=lift)
    torchrun(config, tmp_path / "two", tmp_path)
    session.train(config, tmp_path / "one", quiet=True)
    rows = [RunDirectory(tmp_path / name).read_metrics() for name in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        for term in ("consensus", "classification", "repulsion"):
            assert b["loss"][term] == pytest.approx(a["loss"][term], rel=0.02)
        assert b["seam"]["sample_spread"] == pytest.approx(a["seam"]["sample_spread"], rel=0.02)


UNEQUAL = """
import sys
import torch
from protoseam.data.loading import load
from protoseam.engine.config import OptimConfig, RunConfig
from protoseam.engine.distributed import join
from protoseam.engine.pack import run_epoch_together
from protoseam.engine.step import TrainStep
from protoseam.engine.trainer import Run

processes = join(torch.device("cpu"))
original, calls = TrainStep.losses, [0]

def losses(self, x, y):
    calls[0] += 1
    # one process's loss is not finite, and no gradient shows it
    return original(self, x, y) + (torch.inf if processes.rank == 1 and calls[0] == 3 else 0.0)

TrainStep.losses = losses
config = RunConfig(model="mlp", variant="baseline", epochs=1, augment="none", on_nonfinite="skip", device="cpu",
                   optim=OptimConfig(lr=0.05))
run = Run(config, load("digits"), processes)
(row,) = run_epoch_together([run])
weights = torch.cat([p.detach().flatten() for p in run.objective.parameters()])
others = [torch.empty_like(weights) for _ in range(2)]
torch.distributed.all_gather(others, weights)
assert row["skipped_steps"] == 1, row
assert torch.equal(*others), "the processes drifted apart"
"""


def test_processes_decide_alike_whether_a_step_counts(tmp_path: Path) -> None:
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
