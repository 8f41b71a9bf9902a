"""Mixup and CutMix: against loops over pixels, torchvision's boxes, and what a step trains on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import begin_epoch, train_epoch
from protoseam.lab.engine.mixing import draw_shares, mix_images, mix_labels
from protoseam.lab.engine.run import Run

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    variant="baseline",
    epochs=2,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
)


def run_of(**changes: Any) -> Run:
    return Run(dataclasses.replace(SMALL, **changes), load("digits"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "row",
    [[0.3, 0.3, 0, 0, 0, 0], [1 - 6 / 20, 1, 1, 3, 0, 3], [1, 1, 2, 2, 1, 4]],
    ids=["mixup", "cutmix", "empty box"],
)
def test_images_and_labels_by_loops(row: list[float], layout: torch.memory_format) -> None:
    x, y = torch.randn(3, 2, 4, 5).to(memory_format=layout), torch.tensor([2, 0, 2])
    found, q = mix_images(x, torch.tensor(row)), mix_labels(y, torch.tensor(row), 4)
    share, own, top, bottom, left, right = row
    for b in range(3):
        for r in range(4):
            for c in range(5):
                keep = 0.0 if top <= r < bottom and left <= c < right else own
                expected = keep * x[b, :, r, c] + (1 - keep) * x[b - 1, :, r, c]
                torch.testing.assert_close(found[b, :, r, c], expected)
        hot = [share * (k == y[b]) + (1 - share) * (k == y[b - 1]) for k in range(4)]
        assert q[b].tolist() == pytest.approx([float(value) for value in hot])
    assert found.is_contiguous(memory_format=layout)


def test_rows_of_features_are_mixed() -> None:
    x = torch.randn(4, 7)
    torch.testing.assert_close(
        mix_images(x, torch.tensor([0.25, 0.25, 0, 0, 0, 0])), 0.25 * x + 0.75 * x.roll(1, 0)
    )


def test_the_shares_have_their_law() -> None:
    rng = np.random.default_rng(0)
    rows = draw_shares(rng, 4000, mixup=0.4, cutmix=1.0, height=8, width=12)
    cuts = (rows[:, 3] - rows[:, 2]) * (rows[:, 5] - rows[:, 4])
    cut = rows[:, 1] == 1
    assert 0.46 < cut.mean() < 0.54
    assert (cuts[~cut] == 0).all()
    assert rows[cut, 0] == pytest.approx(1 - cuts[cut] / 96)
    # Beta(α, α) has mean ½ and variance 1/(4(2α+1))
    mixed = rows[~cut, 0]
    assert mixed.mean() == pytest.approx(0.5, abs=0.03)
    assert mixed.var() == pytest.approx(1 / (4 * 1.8), rel=0.1)
    assert rows[:, 2:].min() == 0
    assert rows[:, 3].max() <= 8
    assert rows[:, 5].max() <= 12
    assert (draw_shares(rng, 50, mixup=0.4, cutmix=0, height=8, width=8)[:, 2:] == 0).all()
    assert (draw_shares(rng, 50, mixup=0, cutmix=1.0, height=8, width=8)[:, 1] == 1).all()


def test_each_epoch_draws_its_own_and_a_resumed_one_the_same() -> None:
    run, other = run_of(mixup=0.2, cutmix=1.0), run_of(mixup=0.2, cutmix=1.0, seed=1)
    drawn = []
    for this, epoch in ((run, 0), (run, 1), (run, 0), (other, 0)):
        assert this.mixing is not None
        this.mixing.begin_epoch(this.config.seed, epoch)
        drawn.append(this.mixing.rows.clone())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[3])


def test_a_step_trains_on_mixed_images_and_smoothed_shares() -> None:
    run = run_of(mixup=0.5, label_smoothing=0.2)
    begin_epoch(run)
    assert run.mixing is not None
    rows = slice(0, run.data.batch_size)
    x, y = run.data.x[rows], run.data.y[rows]
    row = run.mixing.rows[0]
    assert 0 < row[0] < 1
    q = 0.8 * mix_labels(y, row, 10) + 0.2 / 10
    logits = run.objective.logits(mix_images(x, row))
    expected = -(q * F.log_softmax(logits.detach(), 1)).sum(1).mean()
    run.step.run()
    assert float(run.step.sums[0]) == pytest.approx(float(expected), rel=1e-5)


def test_without_mixing_labels_stay_whole_numbers() -> None:
    run = run_of()
    begin_epoch(run)
    assert run.mixing is None
    assert run.step.batch(run.step.counter)[1].dtype == torch.int64


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"belongs to no single class: .* lift\.covariance to exact"):
        run_of(variant="protoseam", mixup=0.2, lift=LiftConfig(covariance="running"))
    rows = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    table = ArrayDataset("table", rows, np.arange(60) % 3, rows, np.arange(60) % 3, ("a", "b", "c"))
    with pytest.raises(ConfigError, match="this data has rows of features: use mixup"):
        Run(dataclasses.replace(SMALL, data="./table", cutmix=1.0), table)
    train_epoch(Run(dataclasses.replace(SMALL, data="./table", mixup=0.4), table))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixup": -1.0}, "mixup is α of a Beta distribution"),
        ({"cutmix": float("inf")}, "cutmix is α of a Beta distribution"),
        ({"label_smoothing": 1.0}, "label_smoothing is a share"),
        ({"average": 1.0}, "average is the decay"),
        ({"optim": OptimConfig(clip=-1.0)}, "optim.clip is the largest norm"),
        ({"image_size": 2}, "image_size must be at least 4"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(SMALL, **changes)


def test_each_step_has_a_share_of_its_own() -> None:
    run = run_of(mixup=0.5)
    begin_epoch(run)
    assert run.mixing is not None
    batch, steps = run.data.batch_size, run.data.steps
    for step in (0, 1, 3):
        y = run.data.y[step * batch : (step + 1) * batch]
        expected = mix_labels(y, run.mixing.rows[step], 10)
        assert torch.equal(run.step.batch(torch.tensor([step]))[1], expected)
        assert torch.equal(run.step.batch(torch.tensor([steps + step]))[1], expected)  # an epoch later
    assert len(set(run.mixing.rows[:, 0].tolist())) == steps
