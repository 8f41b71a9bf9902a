"""The augmentation's kernels give the bits of the plain functions, which are held to torchvision's elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.pipeline import augment as plain
from protoseam.lab.pipeline.augment import Augmentation, Erase, augment, augment_with, draw_parameters
from protoseam.lab.pipeline.randaugment import OPS, RandAugment
from protoseam.lab.pipeline.resident import Resident

pytestmark = pytest.mark.cuda

SHAPES = [(3, 32, 32), (3, 64, 64), (1, 28, 28), (3, 20, 34), (1, 8, 8)]


def images(shape: tuple[int, int, int], count: int, channels_last: bool = True) -> torch.Tensor:
    levels = torch.randint(0, 256, (count, *shape), generator=torch.Generator().manual_seed(0))
    levels[::4] = levels[::4, :, :1, :1]  # flat
    levels[1::4] = 60 + levels[1::4] // 4  # neither black nor white
    levels[2::8, :, : shape[1] // 2] = 200
    form = torch.channels_last if channels_last else torch.contiguous_format
    return levels.to(torch.uint8).cuda().contiguous(memory_format=form)


def both(levels: torch.Tensor, dtype: torch.dtype, policy: Augmentation) -> tuple[torch.Tensor, torch.Tensor]:
    from protoseam.lab.kernels import augment as augment_kernels

    channels = levels.shape[1]
    rows = torch.randperm(len(levels), generator=torch.Generator().manual_seed(1)).cuda()
    options: dict[str, Any] = {
        "policy": policy,
        "seed": 3,
        "epoch": torch.tensor(2).cuda(),
        "mean": torch.tensor([0.49, 0.47, 0.45][:channels]).cuda(),
        "std": torch.tensor([0.25, 0.24, 0.26][:channels]).cuda(),
    }
    out = torch.empty_like(levels, dtype=dtype)
    augment_with(augment_kernels, out, levels, rows, **options)
    return out, augment(levels[rows], rows, dtype=dtype, **options)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_operation_with_either_sign(
    shape: tuple[int, int, int], channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 8 * len(OPS)
    op = torch.arange(count).cuda() % len(OPS)
    negative = torch.arange(count).cuda() // len(OPS) % 2 == 1

    def drawn(*args: Any, **options: Any) -> Any:
        draws = draw_parameters(*args, **options)
        return draws._replace(
            op_SB=op.expand(2, -1).contiguous(), negative_SB=negative.expand(2, -1).contiguous()
        )

    monkeypatch.setattr(plain, "draw_parameters", drawn)
    for policy in (Augmentation(), Augmentation(crop_padding=0, erase=Erase(value=-1.5))):
        out, expected = both(images(shape, count, channels_last), torch.float32, policy)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "policy",
    [
        Augmentation(),
        Augmentation(randaugment=None),
        Augmentation(
            crop_padding=0, flip=False, erase=None, randaugment=RandAugment(num_ops=3, magnitude=14)
        ),
    ],
    ids=["paper", "no randaugment", "randaugment alone"],
)
def test_drawn_operations(policy: Augmentation, dtype: torch.dtype) -> None:
    out, expected = both(images((3, 32, 32), 3000), dtype, policy)
    assert torch.equal(out, expected)


def test_an_epoch_is_the_same_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from protoseam.lab.kernels import augment as augment_kernels

    monkeypatch.setattr(augment_kernels, "chunk", lambda images: 300)
    levels = images((3, 32, 32), 600).permute(0, 2, 3, 1).cpu().numpy()
    labels = np.arange(600) % 10
    data = ArrayDataset("random", levels, labels, levels[:10], labels[:10], tuple("abcdefghij"))
    made = {}
    for compile in (False, True):
        resident = Resident(
            data,
            seed=1,
            batch_size=32,
            policy=Augmentation(),
            device="cuda",
            dtype=torch.bfloat16,
            compile=compile,
        )
        for epoch in (0, 1):  # the kernels take over from the second epoch on
            resident.load_epoch(epoch)
        assert (resident._kernels is not None) == compile
        made[compile] = resident.x.clone()
    assert torch.equal(made[False], made[True])
