"""Training that starts from a finished run's network, or from a file of its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.export import Format, export
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.session import Interrupted, resume, train

VARIANTS = ("baseline", "unlifted", "protoseam")
SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [32]},
    epochs=3,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits 0–5 and 6–9 as .npz files, and a finished run of each variant on the first."""
    folder = tmp_path_factory.mktemp("initial")
    digits = load("digits")
    for name, labels in {"first": range(6), "rest": range(6, 10)}.items():
        parts: dict[str, Any] = {}
        for split in ("train", "test"):
            x, y = getattr(digits, f"{split}_images"), getattr(digits, f"{split}_labels")
            chosen = np.isin(y, list(labels))
            parts |= {f"x_{split}": x[chosen], f"y_{split}": y[chosen] - min(labels)}
        np.savez(folder / f"{name}.npz", **parts)
    for variant in VARIANTS:
        config = dataclasses.replace(SMALL, data=str(folder / "first.npz"), variant=variant)
        train(config, folder / variant, quiet=True)
    return folder


def config(place: Path, data: str, **changes: Any) -> RunConfig:
    return dataclasses.replace(SMALL, data=str(place / f"{data}.npz"), **changes)


def run_of(cfg: RunConfig) -> Run:
    return Run(cfg, load(cfg.data))


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_those_of_the_deployed_network(variant: str) -> None:
    run = Run(dataclasses.replace(SMALL, data="digits", variant=variant), load("digits"))
    live, deployed = run.objective.deployed_tensors(), run.deployed().state_dict()
    assert list(live) == list(deployed)
    assert all(torch.equal(live[name], value) for name, value in deployed.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_task_begins_with_the_whole_network(place: Path, variant: str) -> None:
    run = run_of(config(place, "first", variant=variant, init_from=str(place / variant)))
    told = run.start()
    weights = load_file(place / variant / "model.safetensors")
    assert told == f"{len(weights)} of {len(weights)} tensors are loaded from {place / variant}."
    found = run.deployed().state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.parametrize("source", VARIANTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_classes_begin_with_all_but_the_classifier(place: Path, source: str, variant: str) -> None:
    """From any variant to any other: what differs between them is the classifier alone."""
    run = run_of(config(place, "rest", variant=variant, init_from=str(place / source)))
    fresh = run.deployed().state_dict()
    told = run.start()
    assert told is not None
    assert "classifier has another shape" in told
    assert ": fc." in told
    weights, found = load_file(place / source / "model.safetensors"), run.deployed().state_dict()
    for name, value in found.items():
        taken = name in weights and weights[name].shape == value.shape
        assert torch.equal(value, weights[name] if taken else fresh[name]), name
        assert taken or name.startswith("fc.")
    if "baseline" not in (source, variant):  # the seam has the same shape, whatever the classes
        assert torch.equal(found["fc.0.weight"], weights["fc.0.weight"])
    mean = json.loads((place / source / "data.json").read_text())["mean"]
    assert run.data.mean.tolist() == pytest.approx(mean)


def test_a_run_goes_on_from_its_source_and_needs_it_no_more(place: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file(load_file(place / "protoseam" / "model.safetensors"), weights)
    cfg = config(place, "rest", init_from=str(weights), checkpoint_every=1)
    expected = train(cfg, tmp_path / "whole", quiet=True)
    with pytest.raises(Interrupted):
        train(cfg, tmp_path / "cut", quiet=True, budget_seconds=1e-9)
    found = resume(tmp_path / "cut", quiet=True)  # no checkpoint yet: it starts from its source again
    assert found["test_accuracy"] == expected["test_accuracy"]
    name = "model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    weights.unlink()
    (tmp_path / "whole" / "summary.json").unlink()
    assert resume(tmp_path / "whole", quiet=True)["test_accuracy"] == expected["test_accuracy"]


def test_a_network_that_differs_elsewhere_is_refused_by_its_first_tensor(place: Path, tmp_path: Path) -> None:
    wider = config(place, "rest", model_options={"hidden": [48]}, init_from=str(place / "baseline"))
    with pytest.raises(
        ConfigError, match=r"features\.1\.weight has shape \(32, 64\) there and \(48, 64\) here"
    ):
        run_of(wider).start()
    deeper = dataclasses.replace(wider, model_options={"hidden": [32, 16]})
    with pytest.raises(ConfigError, match=r"it has no tensor features\.3\.weight"):
        run_of(deeper).start()
    weights = load_file(place / "baseline" / "model.safetensors") | {"extra": torch.zeros(2)}
    save_file(weights, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="it has a tensor extra"):
        run_of(config(place, "rest", init_from=str(tmp_path / "more.safetensors"))).start()
    with pytest.raises(ConfigError, match="there is no such file"):
        run_of(config(place, "rest", init_from=str(tmp_path / "none"))).start()
    with pytest.raises(ConfigError, match=r"there is no model\.safetensors in it"):
        run_of(config(place, "rest", init_from=str(tmp_path))).start()
    (tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"cannot be read as a \.safetensors file"):
        run_of(config(place, "rest", init_from=str(tmp_path / "bad.safetensors"))).start()


def test_a_refused_source_leaves_no_run_behind(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        train(config(place, "rest", init_from="nowhere"), tmp_path / "run", quiet=True)
    train(config(place, "rest"), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("to", ["safetensors", "hub"])
def test_an_export_brings_its_normalisation(place: Path, tmp_path: Path, to: Format) -> None:
    exported, _, about = export(place / "protoseam", tmp_path / f"net.{to}", to)
    run = run_of(config(place, "rest", init_from=str(exported)))
    assert run.data.mean.tolist() != about.mean
    run.start()
    assert run.data.mean.tolist() == about.mean
    assert run.data.std.tolist() == about.std
