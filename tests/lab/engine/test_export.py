"""A run's network as a file: the same answers from raw inputs, in a process that has never heard of this library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protoseam.lab.cli.main import main
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine import session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig

ALONE = """
import json, sys
import numpy as np, torch
extra = {"about.json": ""}
module = torch.export.load(sys.argv[1], extra_files=extra).module()
logits = module(torch.from_numpy(np.load(sys.argv[2])))
assert not any(name.startswith("protoseam") for name in sys.modules)
print(json.dumps([json.loads(extra["about.json"]), logits.argmax(1).tolist()]))
"""


def answers(file: Path, inputs: np.ndarray) -> tuple[dict[str, object], np.ndarray]:
    np.save(file.with_suffix(".npy"), inputs)
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(file), str(file.with_suffix(".npy"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    about, labels = json.loads(done.stdout)
    return about, np.array(labels)


@pytest.mark.parametrize("model", ["convnet", "vit_s"])
def test_the_file_answers_as_the_run_does(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(
        data="digits",
        model=model,
        model_options={"patch": 4, "dim": 32, "depth": 1, "heads": 2, "mlp": 32} if model == "vit_s" else {},
        epochs=2,
        augment="none",
        optim=OptimConfig(lr=0.01, warmup_epochs=1),
        lift=LiftConfig(dim=4, rho_max=2.0),
        device="cpu",
    )
    summary = session.train(config, tmp_path / "run", quiet=True)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "new" / "net.pt2")]) == 0
    assert "images from 0 to 1 of shape (N, 1, 8, 8), gives logits of 10 classes" in capsys.readouterr().out
    digits: ArrayDataset = load("digits")
    images = (digits.test_images.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    about, labels = answers(tmp_path / "new" / "net.pt2", images)
    assert (labels == digits.test_labels).mean() == pytest.approx(summary["test_accuracy"], abs=0.003)
    assert about["classes"] == list(digits.classes)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["net.npy", "net.pt2"]
    (tmp_path / "run" / "data.json").unlink()  # as a run of an earlier version
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again.pt2")]) == 0
    assert np.array_equal(answers(tmp_path / "again.pt2", images)[1], labels)


def test_features_are_taken_as_they_are(tmp_path: Path) -> None:
    rng, y = np.random.default_rng(0), np.arange(120) % 3
    x = (5 + 50 * rng.normal(y[:, None], 0.1, (120, 4))).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = RunConfig(
        data=str(tmp_path / "rows.npz"), model="mlp", variant="baseline", epochs=20, device="cpu"
    )
    assert session.train(config, tmp_path / "run", quiet=True)["test_accuracy"] > 0.9
    (tmp_path / "rows.npz").unlink()  # all that is needed is in the run
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "net.pt2")]) == 0
    assert (answers(tmp_path / "net.pt2", x)[1] == y).mean() > 0.9


def test_another_suffix_is_refused_with_a_way_to_onnx(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "net.onnx"]) == 1
    said = capsys.readouterr().err
    assert "net.onnx must end in .pt2" in said
    assert "torch.onnx.export(torch.export.load(FILE)" in said
