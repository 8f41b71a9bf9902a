"""A run's network in each format: the same answers from raw inputs, in a process without this library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from protoseam.lab import models
from protoseam.lab.cli.main import main
from protoseam.lab.data.loading import load
from protoseam.lab.engine import export as exporting
from protoseam.lab.engine import session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.evaluate import evaluate, load_deployed

# Runs in a process of its own, where importing this library fails.
ALONE = """
import json, sys
sys.modules["protoseam"] = None
import numpy as np, torch
folder = sys.argv[1]
inputs = np.load(folder + "/inputs.npy")
told = {}
def answer(name, about, logits):
    told[name] = [about, np.asarray(logits).tolist()]
"""

PLAIN = """
tensor = torch.from_numpy(inputs)
extra = {"about.json": ""}
program = torch.export.load(folder + "/net.pt2", extra_files=extra)
answer("pt2", json.loads(extra["about.json"]), program.module()(tensor).detach())
import onnxruntime
session = onnxruntime.InferenceSession(folder + "/net.onnx")
answer("onnx", session.get_modelmeta().custom_metadata_map, session.run(["logits"], {"inputs": inputs})[0])
program = torch.export.load(folder + "/hub/model.pt2")
answer("hub", json.load(open(folder + "/hub/config.json")), program.module()(tensor).detach())
"""

TESTS = str(Path(__file__).parents[2])
TIMM = f"""
sys.path.insert(0, {TESTS!r})
import torchvision_ops
import timm
from timm.data import resolve_model_data_config
model = timm.create_model("local-dir:" + folder + "/hub", pretrained=True).eval()
about = resolve_model_data_config(model)
mean, std = (torch.tensor(about[name]).view(-1, 1, 1) for name in ("mean", "std"))
answer("timm", about, model((torch.from_numpy(inputs) - mean) / std).detach())
"""


def answers(
    folder: Path, inputs: np.ndarray, load: str
) -> dict[str, tuple[dict[str, Any], list[list[float]]]]:
    """What each export in the folder says of itself, and its logits."""
    np.save(folder / "inputs.npy", inputs)
    code = ALONE + load + "print(json.dumps(told))"
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, tuple[dict[str, Any], list[list[float]]]] = json.loads(done.stdout.splitlines()[-1])
    return told


def logits_of(run: Path) -> np.ndarray:
    """Of the run itself, with the two Linears around the seam as they were trained."""
    network, data = load_deployed(run)
    with torch.no_grad():
        return torch.cat([network(x) for x, _ in data.batches("test")]).numpy()


def digits_run(out: Path, model: str, **options: Any) -> dict[str, Any]:
    config = RunConfig(
        data="digits",
        model=model,
        model_options=options,
        epochs=2,
        augment="none",
        optim=OptimConfig(lr=0.01, warmup_epochs=1),
        lift=LiftConfig(dim=4, rho_max=2.0),
        device="cpu",
    )
    return session.train(config, out, quiet=True)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return (load("digits").test_images.transpose(0, 3, 1, 2) / 255).astype(np.float32)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    out = tmp_path_factory.mktemp("vit") / "run"
    return out, digits_run(out, "vit_s", patch=4, dim=32, depth=1, heads=2, mlp=32)["test_accuracy"]


def test_each_format_answers_as_the_run_does(
    vit: tuple[Path, float], images: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, accuracy = vit
    assert main(["export", str(run), str(tmp_path / "new" / "net.pt2")]) == 0
    assert "images from 0 to 1 of shape (N, 1, 8, 8), gives logits of 10 classes" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.pt2"]
    assert main(["export", str(run), str(tmp_path / "new" / "net.onnx")]) == 0
    assert 'onnxruntime.InferenceSession("' in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "new" / "hub"), "--to", "hub"]) == 0
    told = answers(tmp_path / "new", images, PLAIN)  # 359 images; the programs were traced with 2
    for name, (_, logits) in told.items():
        np.testing.assert_allclose(logits, logits_of(run), atol=1e-4, rtol=1e-4, err_msg=name)
    names = [str(i) for i in range(10)]
    assert told["pt2"][0]["classes"] == names
    assert json.loads(told["onnx"][0]["classes"]) == names
    assert json.loads(told["onnx"][0]["about"])["shape"] == [1, 8, 8]
    assert told["hub"][0]["id2label"] == dict(zip(names, names, strict=True))
    assert told["hub"][0]["architecture"] == "vit_s"
    card = (tmp_path / "new" / "hub" / "README.md").read_text()
    environment = json.loads((run / "env.json").read_text())
    for said in (f"| Test accuracy | {100 * accuracy:.2f} % |", "| Seed | 42 |", environment["commit"]):
        assert said in card


def test_exported_programs_name_no_file_of_this_machine(vit: tuple[Path, float], tmp_path: Path) -> None:
    """torch keeps a stack trace for each operation, with the paths of the sources that were traced."""
    here = str(Path(exporting.__file__).parent).encode()
    for name in ("net.pt2", "net.onnx"):
        exporting.export(vit[0], tmp_path / name)
    with zipfile.ZipFile(tmp_path / "net.pt2") as archive:
        parts = [archive.read(member) for member in archive.namelist()]
    assert not any(here in part for part in [*parts, (tmp_path / "net.onnx").read_bytes()])


def test_a_run_without_data_json_is_read_from_its_data(vit: tuple[Path, float], tmp_path: Path) -> None:
    run, _ = vit
    before = exporting.export(run, tmp_path / "a.safetensors")[2]
    said = (run / "data.json").read_bytes()
    try:
        (run / "data.json").unlink()  # as a run of an earlier version
        assert exporting.export(run, tmp_path / "b.safetensors")[2] == before
    finally:
        (run / "data.json").write_bytes(said)


def test_onnx_that_answers_otherwise_is_refused(
    vit: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_ONNX_TOLERANCE", 0.0)  # rounding alone is too much
    with pytest.raises(exporting.ConfigError, match=r"logits that differ by .* from PyTorch's on 1 inputs"):
        exporting.export(vit[0], tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_safetensors_fit_the_plain_architecture(vit: tuple[Path, float]) -> None:
    assert main(["export", str(vit[0]), "--to", "safetensors"]) == 0
    with safe_open(vit[0] / "net.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["classes"] == [str(i) for i in range(10)]
    assert len(about["mean"]) == 1
    plain = models.build("vit_s", 10, (1, 8, 8), patch=4, dim=32, depth=1, heads=2, mlp=32)
    plain.load_state_dict(weights)  # the two Linears around the seam are one


def test_an_export_replaces_neither_the_run_nor_a_readme_of_ones_own(
    vit: tuple[Path, float], tmp_path: Path
) -> None:
    """The folded weights in the place of the run's are weights that no verb can load any more."""
    run = tmp_path / "run"
    shutil.copytree(vit[0], run)
    for words in ([run / "model.safetensors"], [run, "hub"]):
        with pytest.raises(ConfigError, match=r"run/model\.safetensors is a file of the run itself"):
            exporting.export(run, *words)
    (readme := tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"README\.md is not of an earlier export"):
        exporting.export(run, tmp_path, "hub")
    assert readme.read_text() == "mine"
    for _ in "ab":  # its own it replaces
        exporting.export(run, None, "hub")
    assert evaluate(run)["accuracy"] == vit[1]


def test_a_hub_folder_of_a_timm_network_loads_by_timm(images: np.ndarray, tmp_path: Path) -> None:
    """The image size is an argument of this one; the images have one channel, timm's default is three."""
    run = tmp_path / "run"
    digits_run(run, "test_vit2", img_size=8, patch_size=4)
    assert main(["export", str(run), "--to", "hub"]) == 0
    about, logits = answers(run, images, TIMM)["timm"]
    np.testing.assert_allclose(logits, logits_of(run), atol=1e-4, rtol=1e-4)
    assert about["input_size"] == [1, 8, 8]
    config = json.loads((run / "hub" / "config.json").read_text())
    assert config["label_names"] == [str(i) for i in range(10)]
    assert "timm.create_model" in (run / "hub" / "README.md").read_text()


def test_features_are_taken_as_they_are(tmp_path: Path) -> None:
    rng, y = np.random.default_rng(0), np.arange(120) % 3
    x = (5 + 50 * rng.normal(y[:, None], 0.1, (120, 4))).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = RunConfig(
        data=str(tmp_path / "rows.npz"), model="mlp", variant="baseline", epochs=20, device="cpu"
    )
    assert session.train(config, tmp_path / "run", quiet=True)["test_accuracy"] > 0.9
    (tmp_path / "rows.npz").unlink()  # all that is needed is in the run
    exporting.export(tmp_path / "run", tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert (program(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["net.zip"], "net.zip must end in .pt2, .onnx or .safetensors; for a folder say --to hub"),
        (["net.pt2", "--to", "onnx"], "got net.pt2: name it net.onnx"),
    ],
)
def test_a_name_that_does_not_fit_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), *words]) == 1
    assert said in capsys.readouterr().err
