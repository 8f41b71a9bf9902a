"""The pages on hosts: their code runs, on one and on two processes, and every test that the table names exists."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from toys import CLASSES, Noisy, batches

import protoseam as ps

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "hosts"
HOSTS = ("accelerate", "fabric")


def script(page: str) -> str:
    (code,) = re.findall(
        r"```python\n(\"\"\"train\.py.*?)```", (PAGES / f"{page}.md").read_text("utf-8"), re.DOTALL
    )
    return str(code)


def run(page: str, start: int = 0) -> None:
    """Run a page's script in the current folder, where it leaves its network."""
    code = script(page).replace("\nSTART = 0", f"\nSTART = {start}")
    exec(compile(code, f"{page}.md", "exec"), {})  # noqa: S102


def left() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load("net.pt", weights_only=True)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def forget_accelerate() -> None:
    """Accelerate's state is one per process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder and settings of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    yield
    forget_accelerate()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("page", HOSTS)
def test_one_process(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page)
    through = left()
    (said,) = re.findall(r"1 processes, 1200 samples, accuracy (0\.\d+)", capsys.readouterr().out)
    assert float(said) > 0.9
    torch.manual_seed(999)
    run(page, start=4)
    assert same(left(), through)


# How each page says its script is started on two processes.
LAUNCHERS = {
    "accelerate": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "fabric": [
        "-c",
        "import conftest; from lightning.fabric.cli import _main; _main()",  # `fabric`, beside a CPU torchvision
        *("run", "--accelerator", "cpu", "--strategy", "ddp", "--devices", "2"),
    ],
}


@pytest.mark.parametrize("page", HOSTS)
def test_two_processes(page: str, tmp_path: Path) -> None:
    said = []
    states = []
    for start in (0, 4):
        code = "import conftest  # imports torchvision as the tests do\n" + script(page)
        code += "import processes\nprocesses.leave_together()\n"
        (tmp_path / "train.py").write_text(
            code.replace("\nSTART = 0", f"\nSTART = {start}"), encoding="utf-8"
        )
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, *LAUNCHERS[page], "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        said.append(done.stdout + done.stderr)
        states.append(torch.load(tmp_path / "net.pt", weights_only=True))
    (accuracy,) = re.findall(r"2 processes, 1200 samples, accuracy (0\.\d+)", said[0])
    assert float(accuracy) > 0.9
    assert same(*states)


def trained(host: Any, page: str, average: Any = None) -> ps.Lifted:
    """Three epochs on the toys, in a host's wrapper."""
    net = ps.lift(Noisy(), num_classes=CLASSES, dim=3, schedule=ps.SineAnneal(4, 8))
    optimizer = torch.optim.AdamW(net.param_groups(lr=0.01))
    model, optimizer = (host.prepare if page == "accelerate" else host.setup)(net, optimizer)
    averaged = average(net) if average is not None else None
    for _ in net.epochs(batches(), 3):
        for x, y in batches():
            loss = model(x, y).total
            optimizer.zero_grad()
            host.backward(loss)
            optimizer.step()
            if averaged is not None:
                averaged.update_parameters(net)
    return net if averaged is None else averaged.module


def host(page: str, precision: str | None = None) -> Any:
    if page == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True, mixed_precision=precision)
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1, precision=f"{precision}-mixed" if precision else None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("page", HOSTS)
def test_mixed_precision(page: str) -> None:
    net = trained(host(page, "bf16"), page)
    assert net.prototypes.dtype == net.covariance.factors.dtype == torch.float32
    plain = net.deploy(fold=True)
    with torch.no_grad():
        assert all(plain(x).isfinite().all() for x, _ in batches())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("page", HOSTS)
def test_averages(page: str) -> None:
    weights: list[torch.Tensor] = []

    def average(net: ps.Lifted) -> AveragedModel:
        averaged = AveragedModel(net, use_buffers=True)
        keep = averaged.update_parameters
        averaged.update_parameters = lambda net: (weights.append(net.n2.weight.detach().clone()), keep(net))
        return averaged

    averaged = trained(host(page), page, average)
    assert torch.allclose(averaged.n2.weight, torch.stack(weights).mean(0), atol=1e-6)
    x = batches()[0][0]
    averaged.eval()
    with torch.no_grad():
        assert torch.equal(averaged.deploy()(x), averaged(x))


@pytest.mark.usefixtures("alone")
def test_accelerate_accumulates() -> None:
    """Two halves of a batch leave N1 the gradients of the whole."""
    from accelerate import Accelerator

    x, y = batches()[0]
    found = []
    for parts in (1, 2):
        forget_accelerate()
        torch.manual_seed(0)
        net = ps.lift(
            nn.Sequential(nn.Linear(x.shape[1], 8), nn.Linear(8, CLASSES)), num_classes=CLASSES, dim=3
        )
        net.initialize(batches())
        host = Accelerator(cpu=True, gradient_accumulation_steps=parts)
        model, optimizer = host.prepare(net, torch.optim.SGD(net.param_groups(lr=1e-6)))
        for half_x, half_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with host.accumulate(model):
                host.backward(model(half_x, half_y).total)
                optimizer.step()
        found.append([p.grad for p in net.n1.parameters()])
    assert any(g.any() for g in found[0])
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(whole, halves, rtol=1e-4, atol=1e-6)


def test_every_test_that_the_table_names_exists() -> None:
    text = (PAGES / "README.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file
        tree = ast.parse(path.read_text("utf-8")) if path.exists() else ast.Module([], [])
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    assert not missing
    rows = re.findall(r"^\| .* \|$", text.split("## What works where")[1].split("\n\n")[2], re.MULTILINE)
    for row in rows[1:]:
        host, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        proved = [
            (cell.startswith("✓ `") and "::" in cell) or re.fullmatch(r"– .{10,}", cell) for cell in cells
        ]
        assert len(cells) == 6, host
        assert all(proved), (host, cells)


def test_every_host_is_within_a_point_of_the_plain_loop() -> None:
    """The committed runs, and the table that the page shows of them."""
    spec = importlib.util.spec_from_file_location("hosts", ROOT / "benchmarks" / "hosts.py")
    assert spec is not None
    assert spec.loader is not None
    hosts = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(hosts)
    found = hosts.read()
    assert set(found) == set(hosts.HOSTS)
    means = {host: sum(seeds.values()) / len(seeds) for host, seeds in found.items()}
    assert all(sorted(seeds) == list(hosts.SEEDS) for seeds in found.values())
    assert all(abs(mean - means["plain"]) <= 1 for mean in means.values()), means
    page = (PAGES / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"<!-- hosts:begin -->\n(.*?)<!-- hosts:end -->", page, re.DOTALL)
    assert shown.strip().splitlines() == hosts.table(found)
