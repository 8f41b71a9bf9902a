"""The embeddings a summary keeps: what the last layer sees, at two dimensions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from protoseam.errors import DataWarning
from protoseam.lab import models
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.evaluate import load_deployed
from protoseam.lab.engine.latents import read_file
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.session import train


def trained(out: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "data": "digits",
        "model": "mlp",
        "model_options": {"hidden": [16]},
        "epochs": 2,
        "optim": OptimConfig(lr=0.02, warmup_epochs=1),
        "lift": LiftConfig(dim=2, rho_max=2.0),
        "device": "cpu",
        "keep_embeddings": 50,
    }
    return train(RunConfig(**(settings | changes)), out, quiet=True)


def points(kept: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([[float(v) for v in kept[key].split()] for key in ("x", "y")]).T


def test_a_seam_of_two_dimensions_is_kept_as_it_is(tmp_path: Path) -> None:
    kept = trained(tmp_path / "run")["embeddings"]
    plain, data = load_deployed(tmp_path / "run")
    x = torch.cat([x for x, _ in data.batches("test")])
    y = torch.cat([y for _, y in data.batches("test")])
    chosen = torch.linspace(0, len(x) - 1, 50).round().long()
    embedded = plain.fc[0](plain.features(x))[chosen]  # type: ignore[index, operator]
    assert torch.allclose(points(kept), embedded, rtol=1e-3, atol=1e-3)
    assert kept["labels"].split() == [str(label) for label in y[chosen].tolist()]
    assert (kept["width"], kept["shown"]) == (2, 1.0)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints", torch.device("cpu"))
    assert found is not None
    state = found[1]["objective"]
    assert torch.allclose(torch.tensor(kept["prototypes"]), state["net.prototypes"])
    factors = state["net.covariance.factors"]
    assert torch.allclose(torch.tensor(kept["covariances"]), factors @ factors.mT, atol=1e-6)


def test_a_wider_last_layer_is_seen_where_it_varies_most(tmp_path: Path) -> None:
    kept = trained(tmp_path / "run", variant="baseline", keep_embeddings=10_000)["embeddings"]
    plain, data = load_deployed(tmp_path / "run")
    z = torch.cat([plain.features(x) for x, _ in data.batches("test")]).double().detach()  # type: ignore[operator]
    singular = torch.linalg.svdvals(z - z.mean(0))
    found = torch.linalg.svdvals(points(kept).double())
    assert torch.allclose(
        found, singular[:2], rtol=1e-3
    )  # as far apart as the two leading directions have it
    assert kept["shown"] == pytest.approx(
        float(singular[:2].square().sum() / singular.square().sum()), abs=1e-3
    )
    assert kept["width"] == 16
    assert "prototypes" not in kept


@pytest.mark.parametrize("covariance", ["isotropic", "exact"])
def test_a_covariance_shared_by_all_classes_is_given_for_each(tmp_path: Path, covariance: str) -> None:
    lift = LiftConfig(dim=2, rho_max=2.0, covariance=covariance, structure="shared")  # type: ignore[arg-type]
    kept = trained(tmp_path / "run", lift=lift)["embeddings"]
    assert len(kept["covariances"]) == 10
    assert all(c == kept["covariances"][0] for c in kept["covariances"])
    if covariance == "isotropic":  # ρ⁻¹ I and the floor
        assert torch.allclose(torch.tensor(kept["covariances"][0]), (1 / 2.0 + 0.1**2) * torch.eye(2))


def test_nothing_is_kept_unasked(tmp_path: Path) -> None:
    assert "embeddings" not in trained(tmp_path / "run", keep_embeddings=0)
    with pytest.raises(ConfigError, match="keep_embeddings"):
        RunConfig(keep_embeddings=-1)


def test_a_network_without_a_last_linear_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of timm's end in a convolution; the run must not end before its results are written."""

    def convolution(num_classes: int, shape: tuple[int, ...]) -> nn.Module:
        return nn.Sequential(nn.Conv2d(shape[0], num_classes, shape[1]), nn.Flatten())

    monkeypatch.setitem(models._BUILDERS, "mlp", convolution)
    assert "embeddings" not in trained(tmp_path / "run", variant="baseline", model_options={})


def kept_and_read(out: Path, data: Path, **changes: Any) -> dict[str, Any]:
    kept: dict[str, Any] = trained(out, data=str(data), model_options={"hidden": [32]}, **changes)
    assert RunDirectory(out).read_summary() is not None  # raises if it is not what a summary may hold
    assert read_file(out) is not None
    return dict(kept["embeddings"])


@pytest.mark.parametrize("variant", ["protoseam", "baseline"])
def test_a_summary_can_be_read_whatever_the_network_sees(tmp_path: Path, variant: str) -> None:
    """A single test sample has no covariance, and a network that has collapsed has none but zeros."""
    rng, y = np.random.default_rng(0), np.arange(60) % 3
    rows = {"x_train": rng.normal(size=(60, 6)).astype(np.float32), "y_train": y}
    np.savez(tmp_path / "one.npz", **rows, x_test=rows["x_train"][:1], y_test=y[:1])
    np.savez(tmp_path / "same.npz", **rows, x_test=np.zeros((9, 6), np.float32), y_test=y[:9])
    wide = {"variant": variant, "lift": LiftConfig(dim=8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # equal images, which is the point
        assert kept_and_read(tmp_path / "a", tmp_path / "one.npz", **wide)["shown"] == 1
        assert kept_and_read(tmp_path / "b", tmp_path / "same.npz", **wide)["shown"] == 1
        line = {"variant": variant, "lift": LiftConfig(dim=1)}
        assert "prototypes" not in kept_and_read(tmp_path / "c", tmp_path / "one.npz", **line)
