"""Bad data, through `protoseam train` and through the library: each kind either trains or says what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from miniature_files import png, write_folder
from torch import Tensor
from toys import FEATURES, network

import protoseam as ps
from protoseam.lab.cli.main import main
from protoseam.lab.engine import epoch
from protoseam.lab.engine.config import LiftConfig, RunConfig

CLASSES = 4
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def sound(rows: int = 40, classes: int = CLASSES) -> Arrays:
    """Separated blobs, every class equally often."""
    labels = np.arange(rows) % classes
    noise = 0.3 * np.random.default_rng(0).normal(size=(rows, FEATURES))
    x = (2 * np.eye(classes, FEATURES)[labels] + noise).astype(np.float32)
    return x, labels, x[: 2 * classes].copy(), labels[: 2 * classes].copy()


def empty_class() -> Arrays:
    x, y, x_test, y_test = sound()
    return x, np.where(y == 2, 3, y), x_test, np.where(y_test == 2, 3, y_test)


def one_sample_class() -> Arrays:
    x, y, *test = sound()
    keep = (y != 2) | (np.arange(len(y)) == 2)
    return x[keep], y[keep], *test


def identical() -> Arrays:
    x, y, x_test, y_test = sound()
    return np.ones_like(x), y, np.ones_like(x_test), y_test


def labels_from_one() -> Arrays:
    x, y, x_test, y_test = sound()
    return x, y + 1, x_test, y_test + 1


def unlabelled() -> Arrays:
    x, y, *test = sound()
    y[5] = -1
    return x, y, *test


def nan_labels() -> Arrays:
    x, y, *test = sound()
    y = y.astype(np.float64)
    y[5] = np.nan
    return x, y, *test


def nan_features() -> Arrays:
    x, y, *test = sound()
    x[7, 2] = np.nan
    return x, y, *test


def mixed_sizes() -> Arrays:
    x, y, x_test, y_test = sound()
    return x, y, x_test[:, :3], y_test


def class_only_in_test() -> Arrays:
    x, y, *test = sound()
    return x[y != 2], y[y != 2], *test


def one_class() -> Arrays:
    x, y, x_test, y_test = sound()
    return x, 0 * y, x_test, 0 * y_test


def ten_thousand_classes() -> Arrays:
    count = 10_000
    y = np.arange(2 * count) % count
    x = np.random.default_rng(0).normal(size=(2 * count, FEATURES)).astype(np.float32)
    return x, y, x[:count], y[:count]


@dataclass(frozen=True)
class Case:
    """`refused` and `warned` are what the command line says; `library` what the seam says of the training part."""

    data: Callable[[], Arrays]
    refused: str | None = None
    warned: str | None = None
    library: str | None = None
    library_raises: bool = False
    num_classes: int = CLASSES
    options: tuple[str, ...] = ()


CASES = [
    Case(
        empty_class,
        refused="have no image at all: '2' (2); add images or remove the classes",
        library="class 2 has no sample. Check num_classes and the labels, or start elsewhere: init='random'",
        library_raises=True,
    ),
    Case(
        one_sample_class,
        warned=r"'2' \(2\).*Add images if you can",
        library="class 2 has 1 samples but k=3.*raise the floor, lower dim",
    ),
    Case(identical, warned="identical; check the source files", library="all embeddings are equal"),
    Case(
        labels_from_one,
        refused="must start at 0: subtract 1",
        library="seem to start from 1: subtract 1",
        library_raises=True,
    ),
    Case(
        unlabelled,
        refused="negative (missing?) in 1 rows, first row 5 with -1: drop those rows",
        library="without a label: drop those",
        library_raises=True,
    ),
    Case(
        nan_labels,
        refused="no label (NaN) in 1 rows, first row 5: drop those rows",
        library=r"labels must be a vector of class indices \(int64\)",
        library_raises=True,
    ),
    Case(
        nan_features,
        refused="NaN or infinity, first in row 7: drop or fill such rows",
        library="1 of 40 samples, class 3. Look for NaN in their inputs first, and drop or fill those",
        library_raises=True,
    ),
    Case(
        mixed_sizes,
        refused="train images are (6,) each but test images (3,): bring both to one size",
        library=r"took inputs of shape \(6,\) but fails on \(3,\): bring all of them to one size",
        library_raises=True,
    ),
    Case(
        class_only_in_test,
        refused="training lacks 1 of the classes that test has: '2' (2); move some of their images to training",
        library="class 2 has no sample. Check num_classes and the labels, or start elsewhere: init='random'",
        library_raises=True,
    ),
    Case(
        one_class,
        refused="there is one class",
        library="a seam needs at least 2 classes",
        library_raises=True,
        num_classes=1,
    ),
    Case(
        ten_thousand_classes,
        options=("--lift.repulsion=1e-4",),
        library="class 0 has 2 samples but k=3 .10000 classes like it.: Σ̂ is singular; raise the floor, lower dim",
        num_classes=10_000,
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.data.__name__)


@cases
def test_the_command_line(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x_train, y_train, x_test, y_test = case.data()
    np.savez(tmp_path / "d.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    command = [
        "train",
        f"--data={tmp_path}/d.npz",
        "--model=mlp",
        '--model_options={"hidden": [8]}',
        "--epochs=1",
    ]
    command += ["--optim.lr=0.02", "--lift.dim=3", "--lift.rho_max=2", "--device=cpu", "--quiet=true"]
    command += ["--batch_size=20000", "--out", str(tmp_path / "run"), *case.options]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        code = main(command)
    said = capsys.readouterr()
    if case.refused is not None:
        assert code == 1
        assert case.refused in said.err
        return
    assert code == 0
    assert "test accuracy" in said.out
    if case.warned is not None:
        assert any(re.search(case.warned, str(w.message)) for w in caught)


@cases
def test_the_library(case: Case) -> None:
    x_train, y_train, x_test, y_test = case.data()
    batches: list[tuple[Tensor, Tensor]] = [(torch.tensor(x_train), torch.tensor(y_train))]
    if case.data is mixed_sizes:  # here all the data is training data
        batches.append((torch.tensor(x_test), torch.tensor(y_test)))
    if case.library_raises:
        with pytest.raises((ps.SeamError, ValueError), match=case.library):
            one_epoch(batches, case.num_classes)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = one_epoch(batches, case.num_classes)
    assert case.library is not None
    assert any(re.search(case.library, str(w.message)) for w in caught if w.category is ps.SeamWarning)
    assert torch.isfinite(net.prototypes).all()
    assert torch.isfinite(net.covariance.factors).all()
    assert torch.isfinite(net.deploy()(batches[0][0][:8])).all()


def one_epoch(batches: list[tuple[Tensor, Tensor]], num_classes: int) -> ps.Lifted:
    net = ps.lift(network(num_classes), num_classes=num_classes, dim=3, schedule=ps.SineAnneal(1, 2))
    optimizer = torch.optim.SGD(net.param_groups(lr=0.01))
    net.initialize(batches)
    net.set_progress(0, 1)
    for x, y in batches:
        terms = net.objective(x, y)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    net.refresh(batches)
    return net


def pictures(where: str, count: int, side: int = 4) -> dict[str, bytes]:
    rng = np.random.default_rng(len(where))
    return {
        f"{where}/{i}.png": png(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for i in range(count)
    }


@pytest.mark.parametrize(
    ("files", "empty", "message"),
    [
        ({**pictures("a", 5), **pictures("b", 5)}, "c", "lies in c/ (it is empty). Convert what is there"),
        ({**pictures("a", 5), **pictures("b", 3, side=6)}, None, "b/0.png is 6×6 while most are 4×4: resize"),
        (
            {**pictures("train/a", 3), **pictures("val/a", 2), **pictures("val/b", 2)},
            None,
            "training lacks 1 of the classes that test has: 'b' (1); move some",
        ),
        (pictures(".", 4), None, "4 images lie in no class folder, first 0.png: move or remove them"),
        (pictures("a", 5), None, "there is one class"),
    ],
    ids=["empty class folder", "mixed sizes", "class only in validation", "missing labels", "one class"],
)
def test_image_folders(
    files: dict[str, bytes],
    empty: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_folder(tmp_path / "images", files)
    if empty:
        (folder / empty).mkdir()
    command = ["train", f"--data={folder}", f"--data_root={tmp_path}/root", "--out", str(tmp_path / "run")]
    assert main(command) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--lift.dim=0", "lift.dim must be at least 1, got 0"),
        ('--model_options={"wdiths": 3}', "correct model_options"),
    ],
)
def test_settings_that_do_not_fit_the_data(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--data=digits", "--device=cpu", option, "--out", str(tmp_path / "run")]) == 1
    assert message in capsys.readouterr().err


def test_divergence_with_very_many_classes_names_the_repulsion() -> None:
    run = SimpleNamespace(data=SimpleNamespace(num_classes=10_000), config=RunConfig())
    assert "49,995,000 pairs: try lift.repulsion=1e-04. Lower optim.lr" in epoch._remedy(run)  # type: ignore[arg-type]
    run.config = RunConfig(lift=LiftConfig(repulsion=1e-4))
    assert "pairs" not in epoch._remedy(run)  # type: ignore[arg-type]
    run = SimpleNamespace(data=SimpleNamespace(num_classes=100), config=RunConfig())
    assert "pairs" not in epoch._remedy(run)  # type: ignore[arg-type]
