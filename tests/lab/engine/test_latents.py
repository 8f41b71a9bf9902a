"""What a run keeps for its page: looking changes nothing, a resume keeps the same, a damaged file is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protoseam.lab.engine import latents as kept
from protoseam.lab.engine import session, thumbnails
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.evaluate import load_deployed
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.latents import FILE, Latents, read_file
from protoseam.lab.engine.seamfile import Seam, how_unusual, quantiles, read_seam
from protoseam.lab.engine.thumbnails import MOST_SHEET, contact_sheet

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [80]},
    epochs=4,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=2, rho_max=2.0),
    device="cpu",
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    session.train(SMALL, out, quiet=True)
    return out


def test_looking_leaves_the_run_as_it_was(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "look", lambda *_: None)
    monkeypatch.setattr(session, "finish", lambda *_: torch.zeros(0))
    session.train(SMALL, tmp_path / "blind", quiet=True)
    assert not (tmp_path / "blind" / FILE).exists()
    blind, seen = ((p / "model.safetensors").read_bytes() for p in (tmp_path / "blind", run))
    assert blind == seen


def test_a_resumed_run_keeps_the_same(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = session.train_epoch

    def stopped(run: Any) -> Any:
        if run.epoch == 3:
            raise KeyboardInterrupt
        return honest(run)

    monkeypatch.setattr(session, "train_epoch", stopped)
    with pytest.raises(session.Interrupted):
        session.train(SMALL, tmp_path / "cut", quiet=True)
    monkeypatch.undo()
    assert read_file(tmp_path / "cut")[0]["epochs"].tolist() == [1, 2, 3]
    assert set(Latents.resumed(tmp_path / "cut", 4, 2).frames) == {1, 2}  # from a checkpoint before that
    session.resume(tmp_path / "cut", quiet=True)
    assert (tmp_path / "cut" / FILE).read_bytes() == (run / FILE).read_bytes()


def test_the_picture_is_of_the_deployed_network(run: Path) -> None:
    tensors, about = read_file(run)
    plain, data = load_deployed(run)
    x = torch.cat([x for x, _ in data.batches("test")])
    with torch.no_grad():
        logits = plain(x)
    points = tensors["points"].long()
    z, head = tensors["z"][-1].float(), tensors["head"][-1]
    torch.testing.assert_close(z @ head[:, :2].T + head[:, 2], logits[points], atol=2e-2, rtol=1e-2)
    assert torch.equal(tensors["first"].long(), logits.argmax(1))
    torch.testing.assert_close(tensors["p_first"], logits.softmax(1).amax(1), atol=1e-5, rtol=1e-4)
    seam, levels = read_seam(run, 10)
    assert seam is not None
    torch.testing.assert_close(tensors["prototypes"][-1], seam.prototypes)
    roots = tensors["roots"][-1].double()
    torch.testing.assert_close(roots @ roots.mT, seam.roots() @ seam.roots().mT, atol=1e-3, rtol=1e-2)
    assert levels[0] == tensors["unusual"].min()
    assert levels[-1] == tensors["unusual"].max()
    assert {"risk", "bound", "sampled_loss"} <= set(about["bound"])


def test_wide_features_without_a_seam(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, variant="baseline", epochs=1)
    session.train(config, tmp_path / "run", quiet=True)
    tensors, about = read_file(tmp_path / "run")
    assert tensors["z"].shape[2] == kept.DIRECTIONS
    assert "prototypes" not in tensors
    assert about == {}
    assert read_seam(tmp_path / "run", 10)[0] is None


def test_the_score_is_the_distance_to_the_nearest_gaussian() -> None:
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    factor = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64).tril()
    factor.diagonal(dim1=1, dim2=2).abs_().add_(0.5)
    z = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    found = how_unusual(z, torch.zeros(5, 3), Seam(s, factor))
    for i in range(5):
        each = []
        for c in range(3):
            d = z[i] - s[c]
            each.append(float(d @ torch.linalg.inv(factor[c] @ factor[c].T) @ d) ** 0.5)
        assert float(found[i]) == pytest.approx(min(each), rel=1e-5)
    assert len(quantiles(found)) == 101


def test_frames_stay_within_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_BYTES", 5_000)
    latents = Latents(100)
    for epoch in range(1, 101):
        latents.add(epoch, torch.randn(100, 3), None, None)
    assert sum(t.nbytes for frame in latents.frames.values() for t in frame.values()) <= 5_000
    assert {1, 100} <= set(latents.frames)


def test_frequent_mistakes_are_shown_in_full_and_others_in_turn() -> None:
    label = torch.tensor([0] * 20 + [1] * 5 + [2] * 30)
    first = torch.tensor([1] * 20 + [0] * 5 + [2] * 30)
    shown = thumbnails._of_each_mistake(label, first)
    assert shown == [*range(12), *range(20, 25)]  # none of those that are right
    many = torch.arange(1000)
    assert len(thumbnails._of_each_mistake(many, many + 1)) == 400


def test_the_sheet_stays_within_its_size_for_noise() -> None:
    noise = torch.randint(0, 256, (1200, 3, 40, 30), dtype=torch.uint8)
    sheet, tile, columns = contact_sheet(noise)
    assert (len(sheet) <= MOST_SHEET, tile, columns) == (True, 32, 35)
    small, tile, _ = contact_sheet(torch.randint(0, 256, (300, 1, 8, 8), dtype=torch.uint8))
    assert tile == 8
    assert bytes(small[:4].tolist()) == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("first", lambda t: torch.full_like(t, 99), "first has values from 99 to 99"),
        ("p_first", lambda t: torch.full_like(t, float("nan")), "p_first has values from nan"),
        ("z", lambda t: torch.cat([t, t], 2), "does not fit the other tensors"),
        ("z", lambda t: t.float(), "z is torch.float32"),
        ("other", lambda t: torch.zeros(1), "'other' does not belong"),
    ],
)
def test_a_damaged_file_is_named(run: Path, tmp_path: Path, name: str, change: Any, told: str) -> None:
    tensors = load_file(run / FILE)
    save_file({**tensors, name: change(tensors.get(name))}, tmp_path / FILE)
    with pytest.raises(StorageError, match=told):
        read_file(tmp_path)
    (tmp_path / FILE).write_bytes(b"nonsense")
    with pytest.raises(StorageError, match="cannot be read"):
        read_file(tmp_path)
    with pytest.warns(UserWarning, match="The run goes on"):
        assert not Latents.resumed(tmp_path, 4, 2).frames
