"""Two processes under torchrun, gloo on a CPU, against one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from protoseam.lab.engine import session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig, to_dict
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.experiments.study import run_study
from protoseam.lab.experiments.sweep import run_sweep

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
    command += ["-m", "protoseam", "train", f"--config={file}", f"--out={out}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" epochs in ") == 1  # the result, not once for each process


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
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import OptimConfig, RunConfig
from protoseam.lab.engine.distributed import join
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.step import TrainStep
from protoseam.lab.engine.run import Run

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
row = train_epoch(run)
weights = torch.cat([p.detach().flatten() for p in run.objective.parameters()])
others = [torch.empty_like(weights) for _ in range(2)]
torch.distributed.all_gather(others, weights)
assert row["skipped_steps"] == 1, row
assert torch.equal(*others), "the processes drifted apart"
"""


MOMENTS = """
import torch
from torch import nn
import protoseam as ps
from protoseam.lab import models
from protoseam.core import class_moments
from protoseam.lab.data.loading import load
from protoseam.lab.engine import objectives
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.distributed import join
from protoseam.lab.engine.epoch import begin_epoch, end_epoch, sweep
from protoseam.lab.engine.run import Run
from protoseam.seam.processes import all_reduce

processes = join(torch.device("cpu"))
objectives._covariance = lambda lift: ps.RunningCovariance(1e-3, window=10**6, mean_window=10**6)
models.build = lambda *_, **__: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
config = RunConfig(model="mlp", variant="protoseam", epochs=1, augment="none", device="cpu", batch_size=64,
                   optim=OptimConfig(lr=1e-9, warmup_epochs=0), lift=LiftConfig(dim=4, covariance="running"))
run = Run(config, load("digits"), processes)
run.objective.net.n1[2].eval()  # embeddings that do not change, to compare the moments with
run.data.load_epoch(0)
run.objective.begin(sweep(run))
for step in range(run.data.steps):
    rows = slice(step * run.data.local_batch, (step + 1) * run.data.local_batch)
    run.step.objective(run.data.x[rows], run.data.y[rows], run.generator)
net, seen = run.objective.net, run.data.steps * run.data.local_batch
net.refresh()
found = (net.covariance.factors @ net.covariance.factors.mT).double()
with torch.no_grad():
    z = net.embed(run.data.x[:seen])
expected = class_moments(z, run.data.y[:seen], 10, reduce=all_reduce())[2]
error = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
assert error.max() < 0.01, f"a process's samples are lost: {error.tolist()}"

net.n1[2].running_mean += processes.rank  # as after a step, in which each has averaged its own
begin_epoch(run)
for _ in range(run.data.steps):
    run.step.run()
row = end_epoch(run, 0.0)
means = [torch.empty(16) for _ in range(2)]
torch.distributed.all_gather(means, net.n1[2].running_mean)
assert torch.equal(*means), "validated two networks"
"""


BUDGETS = """
import sys
from pathlib import Path
import numpy as np
import torch
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.distributed import join
from protoseam.lab.engine.session import Interrupted, train

folder = Path(sys.argv[1])
processes = join(torch.device("cpu"))
config = RunConfig(data=str(folder / "few.npz"), model="mlp", variant="protoseam", epochs=2, augment="none",
                   device="cpu", batch_size=8, checkpoint_every=5, lift=LiftConfig(dim=2, clean_pass=True),
                   optim=OptimConfig(lr=1e-3))
train(config, folder / "clean", quiet=True)  # fewer samples than one process's share of a batch of them
try:
    train(config, folder / "cut", quiet=True, budget_seconds=1e-9 if processes.rank == 1 else 1e9)
except Interrupted:
    sys.exit()
raise AssertionError("not stopped together")
"""


def run_script(text: str, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_processes_decide_alike_whether_a_step_counts(tmp_path: Path) -> None:
    run_script(UNEQUAL, tmp_path)


def test_every_processes_samples_are_in_the_moments_and_all_validate_one_network(tmp_path: Path) -> None:
    run_script(MOMENTS, tmp_path)


def test_processes_stop_together_and_share_few_samples(tmp_path: Path) -> None:
    """A budget that is spent for one is spent for all, or the others would wait for it in vain."""
    rng, y = np.random.default_rng(0), np.arange(200) % 4
    x = (3 * rng.normal(size=(4, 5))[y] + rng.normal(size=(200, 5))).astype(np.float32)
    np.savez(tmp_path / "few.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    run_script(BUDGETS, tmp_path)


@pytest.mark.parametrize("what", ["study", "sweep"])
def test_torchrun_is_refused_where_each_process_would_train_another_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=f"a {what} was started by torchrun as one of 2 .*several times instead"
    ):
        run_study([("run", CONFIG)], tmp_path) if what == "study" else run_sweep([])
