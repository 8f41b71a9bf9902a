"""The drawn parameters of the augmentation: their laws, and torchvision's erasing step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from protoseam.lab.pipeline.augment import Augmentation, Draws, Erase, draw_parameters
from protoseam.lab.pipeline.counter_rng import random_words, uniform
from protoseam.lab.pipeline.randaugment import OPS, RandAugment

# Every statistical test has a fixed seed, so it passes or fails for good; this is what an honest generator
# falls below once in a thousand.
SIGNIFICANCE = 1e-3


@pytest.fixture(scope="module")
def many() -> Draws:
    return draw_parameters(torch.arange(40_000), policy=Augmentation(), seed=42, epoch=0, height=32, width=32)


def test_operations_and_signs_are_uniform_and_independent(many: Draws) -> None:
    pairs = many.op_SB[0] * len(OPS) + many.op_SB[1]
    assert stats.chisquare(np.bincount(pairs.numpy(), minlength=len(OPS) ** 2)).pvalue > SIGNIFICANCE
    for slot in range(2):
        signed = 2 * many.op_SB[slot] + many.negative_SB[slot]
        assert stats.chisquare(np.bincount(signed.numpy(), minlength=2 * len(OPS))).pvalue > SIGNIFICANCE


def test_crop_offsets_and_flips_are_uniform_and_independent(many: Draws) -> None:
    cells = (many.crop_2B[0] * 9 + many.crop_2B[1]) * 2 + many.flip_B
    counts = np.bincount(cells.numpy(), minlength=162)
    assert len(counts) == 162
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (8, 8), (20, 48)])
def test_erasing_follows_torchvision(height: int, width: int) -> None:
    indices = torch.arange(40_000)
    drawn = draw_parameters(
        indices, policy=Augmentation(), seed=5, epoch=1, height=height, width=width
    ).erase_4B
    drawn = drawn[:, drawn[2] > 0]
    transform, image = v2.RandomErasing(p=1.0), torch.zeros(3, height, width)
    official = torch.tensor(
        [
            [made["i"], made["j"], made["h"] * (made["v"] is not None), made["w"] * (made["v"] is not None)]
            for made in (transform.make_params([image]) for _ in range(3000))
        ]
    ).T
    official = official[:, official[2] > 0]
    top, left, tall, wide = drawn
    assert bool((top + tall <= height).all())
    assert bool((left + wide <= width).all())
    for name, feature in {
        "height": lambda e: e[2],
        "width": lambda e: e[3],
        "area": lambda e: e[2] * e[3],
        "aspect": lambda e: (e[2] + 1) / (e[3] + 1),
        "top": lambda e: e[0] / (height - e[2] + 1),
        "left": lambda e: e[1] / (width - e[3] + 1),
    }.items():
        test = stats.ks_2samp(feature(drawn).numpy(), feature(official).numpy())
        assert test.pvalue > SIGNIFICANCE, name


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (20, 48)])
def test_erasing_step_by_step(height: int, width: int) -> None:
    # torchvision's loop on our uniform numbers: draw 3 decides, 8 and 9, 10 and 11, … are tried, 4 and 5 place.
    indices = torch.arange(1500)
    drawn = draw_parameters(indices, policy=Augmentation(), seed=5, epoch=1, height=height, width=width)
    uniforms = uniform(random_words(indices, seed=5, epoch=1, count=28)).T.tolist()
    later_attempts = 0
    for b, u in enumerate(uniforms):
        expected = None
        for attempt in range(10):
            area = height * width * (0.02 + 0.31 * u[8 + 2 * attempt])
            aspect = math.exp(math.log(0.3) + math.log(11.0) * u[9 + 2 * attempt])
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h < height and w < width:
                expected = [int(u[4] * (height - h + 1)), int(u[5] * (width - w + 1)), h, w]
                later_attempts += attempt > 0
                break
        if u[3] < 0.5 and expected is not None:
            assert drawn.erase_4B[:, b].tolist() == expected
        else:
            assert drawn.erase_4B[2:, b].tolist() == [0, 0]
    assert later_attempts > 0  # so that the retry is tested


def test_draws_are_independent_of_each_other(many: Draws) -> None:
    top, left, tall, wide = many.erase_4B
    halves = {
        "crop row": many.crop_2B[0] > 3,
        "crop column": many.crop_2B[1] > 3,
        "flip": many.flip_B,
        "erased": tall > 0,
        "top": 2 * top >= 32 - tall,
        "left": 2 * left >= 32 - wide,
        "first operation": many.op_SB[0] > 6,
        "second operation": many.op_SB[1] > 6,
        "first sign": many.negative_SB[0],
        "second sign": many.negative_SB[1],
    }
    names = list(halves)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            table = np.bincount((2 * halves[one] + halves[other].long()).numpy(), minlength=4).reshape(2, 2)
            assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE / 45, (one, other)
    area, erased = tall * wide, tall > 0
    for name in set(names) - {"erased", "top", "left"}:  # the places there are do depend on the area
        split = halves[name][erased]
        test = stats.ks_2samp(area[erased][split].numpy(), area[erased][~split].numpy())
        assert test.pvalue > SIGNIFICANCE, name


def test_erasing_probability(many: Draws) -> None:
    erased = int((many.erase_4B[2] > 0).sum())
    assert stats.binomtest(erased, 40_000, 0.5).pvalue > SIGNIFICANCE
    never = draw_parameters(
        torch.arange(500), policy=Augmentation(erase=None), seed=42, epoch=0, height=32, width=32
    )
    assert not never.erase_4B[2:].any()


def test_an_erasure_that_never_fits_is_left_out() -> None:
    policy = Augmentation(erase=Erase(probability=1.0, area=(1.0, 1.0), aspect=(1.0, 1.0)))
    drawn = draw_parameters(torch.arange(50), policy=policy, seed=0, epoch=0, height=16, width=16)
    assert not drawn.erase_4B[2:].any()


def test_switching_a_part_off_leaves_the_other_draws(many: Draws) -> None:
    policy = Augmentation(flip=False, randaugment=RandAugment(num_ops=3), erase=None)
    fewer = draw_parameters(torch.arange(100), policy=policy, seed=42, epoch=0, height=32, width=32)
    assert torch.equal(fewer.crop_2B, many.crop_2B[:, :100])
    assert torch.equal(fewer.op_SB[:2], many.op_SB[:, :100])
    assert not fewer.flip_B.any()
