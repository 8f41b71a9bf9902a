"""Weights and hub folders in use: the run's answers from them, and an error in words for those that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import protoseam as ps
from protoseam.lab.cli.main import main
from protoseam.lab.data.links import LinkError
from protoseam.lab.data.loading import load as load_data
from protoseam.lab.engine import session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.export import export

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [16]},
    epochs=2,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [16]},
    "vit_s": {"patch": 4, "dim": 32, "depth": 1, "heads": 2, "mlp": 32},
    "resnet8": {},  # its BatchNorm has buffers
    "test_vit2": {"img_size": 8, "patch_size": 4},  # of timm
}


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    return load_data("digits").test_images[:100]


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    session.train(SMALL, run, quiet=True)
    export(run, to="hub")
    export(run, to="safetensors")
    return run


@pytest.fixture
def hub(mlp: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mlp / "hub", tmp_path / "hub"))


@pytest.mark.parametrize("model", NETWORKS)
def test_weights_and_a_hub_folder_answer_as_the_run_does(
    model: str, digits: np.ndarray, tmp_path: Path
) -> None:
    changes = {"model": model, "model_options": NETWORKS[model], "epochs": 1}
    session.train(RunConfig(**{**vars(SMALL), **changes}), tmp_path / "run", quiet=True)
    export(tmp_path / "run", tmp_path / "hub", "hub")
    export(tmp_path / "run", tmp_path / "net.safetensors")
    net = ps.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    x = torch.stack([net.transform(image) for image in digits])
    expected = net.predict(digits)
    for place in ("hub", "net.safetensors"):
        found = ps.load(tmp_path / place)
        assert found.classes == net.classes
        assert torch.equal(torch.stack([found.transform(image) for image in digits]), x)
        torch.testing.assert_close(found(x), net(x), atol=1e-4, rtol=1e-4)  # two Linears are one
        answers = found.predict(digits)
        assert [one.label for one in answers] == [one.label for one in expected]
        np.testing.assert_allclose(
            [one.probability for one in answers], [one.probability for one in expected], atol=1e-4
        )
        assert answers[0].rank is None  # an export has no prototypes and no test images


def test_a_hub_folder_may_repeat_what_its_inputs_say(tmp_path: Path) -> None:
    """Timm writes a network's classes and channels among its arguments too, from 1.0.31 on."""
    changes = {"model": "test_vit2", "model_options": NETWORKS["test_vit2"], "epochs": 1}
    session.train(RunConfig(**{**vars(SMALL), **changes}), tmp_path / "run", quiet=True)
    export(tmp_path / "run", tmp_path / "hub", "hub")
    arguments = json.loads((tmp_path / "hub" / "config.json").read_text()).get("model_args", {})
    edit(tmp_path / "hub" / "config.json", model_args=arguments | {"num_classes": 10, "in_chans": 1})
    assert len(ps.load(tmp_path / "hub").classes) == 10


def test_features(tmp_path: Path) -> None:
    rng, y = np.random.default_rng(0), np.arange(120) % 3
    x = (5 + 50 * rng.normal(y[:, None], 0.1, (120, 4))).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = RunConfig(
        data=str(tmp_path / "rows.npz"), model="mlp", variant="baseline", epochs=4, device="cpu"
    )
    session.train(config, tmp_path / "run", quiet=True)
    net = ps.load(tmp_path / "run")
    for to in ("safetensors", "hub"):
        found = ps.load(export(tmp_path / "run", to=to)[0])
        assert [one.label for one in found.predict(x)] == [one.label for one in net.predict(x)]


def test_the_command_takes_both(
    mlp: Path, digits: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "new.npz", x=digits)
    told = []
    for place in (mlp, mlp / "hub", mlp / "net.safetensors"):
        assert main(["predict", str(place), str(tmp_path / "new.npz"), "--json"]) == 0
        told.append([json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()])
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 100


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_a_program_of_ones_own_loads_in_python(mlp: Path, digits: np.ndarray, tmp_path: Path) -> None:
    export(mlp, tmp_path / "net.pt2")
    with pytest.raises(ConfigError, match=r"say --trust \(in Python trust=True\)"):
        ps.load(tmp_path / "net.pt2")
    found = ps.load(tmp_path / "net.pt2", trust=True).predict(digits)
    assert [one.label for one in found] == [one.label for one in ps.load(mlp).predict(digits)]


# ---------------------------------------------------------------------- what cannot be used


def rewrite(file: Path, **changes: Any) -> None:
    """Change what a safetensors file says of itself; None leaves a field out."""
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["about"]) | changes
    kept = {name: value for name, value in about.items() if value is not None}
    save_file(load_file(file), file, metadata={"about": json.dumps(kept)})


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_weights_without_a_network_say_what_to_give(mlp: Path, tmp_path: Path) -> None:
    """Of an earlier version, of a run's directory, and of anyone."""
    shutil.copy(mlp / "net.safetensors", tmp_path / "net.safetensors")
    rewrite(tmp_path / "net.safetensors", model=None, model_options=None)
    for file, why in (
        (tmp_path / "net.safetensors", "model is missing"),
        (mlp / "model.safetensors", "classes is missing"),
    ):
        with pytest.raises(
            ConfigError, match=f"does not say which network .*: give the run's directory, .*{why}"
        ):
            ps.load(file)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("classes", ["\x1b[2J", "b"], "classes is .*printable text"),
        ("shape", [1, 8], "shape is .*one or three whole numbers"),
        ("mean", [0.0, 0.0], "samples of shape .* need 1 numbers"),
        ("std", [float("nan")], "std is .*a number"),
        ("std", [0.0], "std is .*a number"),
        ("model", "nowhere", "cannot be built .*no network is called 'nowhere'.*to .onnx instead"),
        ("model", "\x1b[2J", "model is .*printable text"),
        ("model", "local-dir:/", "no network is called"),
        ("model_options", {"hidden": [10**7, 10**7]}, "this machine has"),
        ("model_options", {"\x1b[2J": 1}, "model_options must be a table"),
        ("model_options", [1], "model_options is .*a table"),
        ("model_options", {"hidden": [9]}, "does not fit its network: .* has shape"),
        ("classes", ["a", "b"], "does not fit its network: .* has shape"),
    ],
)
def test_what_weights_say_is_checked(
    field: str, value: Any, said: str, mlp: Path, hub: Path, tmp_path: Path
) -> None:
    shutil.copy(mlp / "net.safetensors", tmp_path / "net.safetensors")
    rewrite(tmp_path / "net.safetensors", **{field: value})
    in_hub = {"classes": "id2label", "shape": "input_size", "model": "architecture"}
    in_hub["model_options"] = "model_args"
    if field == "classes":
        value = {str(i): name for i, name in enumerate(value)}
    edit(hub / "config.json", **{in_hub.get(field, field): value})
    for place in (tmp_path / "net.safetensors", hub):
        with pytest.raises(ConfigError, match=f"(?s){said}"):
            ps.load(place)


def test_no_option_loads_another_file(mlp: Path, tmp_path: Path) -> None:
    shutil.copy(mlp / "net.safetensors", tmp_path / "net.safetensors")
    for option in ("checkpoint_path", "pretrained_cfg", "cache_dir"):
        rewrite(tmp_path / "net.safetensors", model="test_vit2", model_options={option: "/etc/passwd"})
        with pytest.raises(ConfigError, match="would load files or settings from elsewhere"):
            ps.load(tmp_path / "net.safetensors")
    images = {"shape": [3, 64, 64], "mean": [0.5] * 3, "std": [0.5] * 3}
    rewrite(tmp_path / "net.safetensors", model="test_vit2", model_options={"pretrained": True}, **images)
    with pytest.raises(ConfigError, match="does not fit its network"):  # built; nothing was fetched
        ps.load(tmp_path / "net.safetensors")


def _without_weights(hub: Path) -> None:
    (hub / "model.safetensors").unlink()


def _without_a_tensor(hub: Path) -> None:
    tensors = load_file(hub / "model.safetensors")
    save_file(dict(list(tensors.items())[1:]), hub / "model.safetensors")


def _with_one_more(hub: Path) -> None:
    save_file({**load_file(hub / "model.safetensors"), "more": torch.zeros(1)}, hub / "model.safetensors")


def _no_safetensors(hub: Path) -> None:
    (hub / "model.safetensors").write_bytes(b"nonsense")


def _without_a_class(hub: Path) -> None:
    edit(hub / "config.json", id2label={str(i): str(i) for i in range(1, 11)})


def _of_another_transform(hub: Path) -> None:
    edit(hub / "config.json", pretrained_cfg={"interpolation": "bicubic"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without_weights, "has no model.safetensors: give the run's directory"),
        (_without_a_tensor, "has shape none, and"),
        (_with_one_more, r"'more' has shape \(1,\), and no such tensor is needed"),
        (_no_safetensors, "is no safetensors file"),
        (_without_a_class, "classes is None"),
        (_of_another_transform, "interpolation is 'bicubic', .*: load this folder with timm"),
    ],
)
def test_a_hub_folder_that_does_not_fit_is_named(spoil: Callable[[Path], None], said: str, hub: Path) -> None:
    spoil(hub)
    with pytest.raises(ConfigError, match=said):
        ps.load(hub)


def test_a_config_that_is_no_json_is_named(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b"\x80\x04", b"[" * 100_000, b"[]"):
        (hub / "config.json").write_bytes(content)
        assert main(["predict", str(hub), "x.png"]) == 1
        assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_a_hub_folder_is_read_through_no_link(name: str, there: bool, hub: Path, tmp_path: Path) -> None:
    shutil.move(hub / name, tmp_path / "elsewhere")
    (hub / name).symlink_to(tmp_path / ("elsewhere" if there else "nowhere"))
    with pytest.raises(LinkError, match=f"{name} is a link"):
        ps.load(hub)


def test_the_folder_that_the_user_names_may_be_a_link(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(hub)
    assert len(ps.load(tmp_path / "link").classes) == 10


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*net\.safetensors"):
        ps.load(tmp_path / "net.safetensors")
    (tmp_path / "net.safetensors").mkdir()  # a run may be called so
    with pytest.raises(ConfigError, match="holds no run"):
        ps.load(tmp_path / "net.safetensors")
