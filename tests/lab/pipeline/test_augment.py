"""The batched pipeline against one image at a time through torchvision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from one_operation import apply_op
from torch import Tensor
from torchvision.transforms import v2

from protoseam.lab.pipeline import augment as augment_module
from protoseam.lab.pipeline.augment import Augmentation, Draws, Erase, augment, draw_parameters, normalise
from protoseam.lab.pipeline.counter_rng import random_words
from protoseam.lab.pipeline.randaugment import OPS, RandAugment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def settings_for(channels: int, **changes: Any) -> dict[str, Any]:
    return {
        "policy": Augmentation(),
        "seed": 42,
        "epoch": 3,
        "mean": MEAN[:channels],
        "std": STD[:channels],
    } | changes


def some_images(count: int, channels: int = 3, height: int = 32, width: int | None = None) -> Tensor:
    """Smooth random pictures of varied contrast."""
    generator = torch.Generator().manual_seed(count + height)
    coarse = torch.rand(count, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width or height), mode="bilinear")
    contrast = torch.rand(count, 1, 1, 1, generator=generator)
    return (255 * (0.5 + (smooth - 0.5) * contrast)).to(torch.uint8)


def naive(
    images: Tensor, draws: Draws, policy: Augmentation, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """One image at a time through torchvision, with the same random choices."""
    results = []
    height, width = images.shape[2:]
    for b, image in enumerate(images):
        image = v2.functional.pad(image, [policy.crop_padding] * 4)
        row, column = draws.crop_2B[:, b].tolist()
        image = v2.functional.crop(image, row, column, height, width)
        if draws.flip_B[b]:
            image = v2.functional.horizontal_flip(image)
        randaugment = policy.randaugment or RandAugment(num_ops=0)
        for slot in range(randaugment.num_ops):
            name = OPS[draws.op_SB[slot, b]]
            magnitudes, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
            table = magnitudes(randaugment.bins, height, width)
            magnitude = 0.0 if table is None else float(table[randaugment.magnitude])
            magnitude *= -1.0 if signed and draws.negative_SB[slot, b] else 1.0
            official = v2.RandAugment()
            image = official._apply_image_or_video_transform(
                image, name, magnitude, official.interpolation, official._fill
            )
        value = v2.functional.to_dtype(image, torch.float32, scale=True)
        value = v2.functional.normalize(value, list(mean), list(std))
        top, left, tall, wide = draws.erase_4B[:, b].tolist()
        value = v2.functional.erase(value, top, left, tall, wide, torch.zeros(1))
        results.append(value)
    return torch.stack(results)


@pytest.mark.parametrize(
    ("shape", "policy"),
    [
        pytest.param((600, 3, 32, 32), Augmentation(), id="cifar"),
        pytest.param((200, 3, 64, 64), Augmentation(), id="tinyimagenet"),
        pytest.param((300, 1, 28, 28), Augmentation(), id="mnist"),
        pytest.param((200, 1, 8, 8), Augmentation(crop_padding=1), id="digits"),
        pytest.param(
            (100, 3, 20, 34), Augmentation(randaugment=RandAugment(num_ops=3, magnitude=14)), id="oblong"
        ),
        pytest.param((60, 3, 32, 32), Augmentation(randaugment=None), id="no randaugment"),
        pytest.param((60, 3, 32, 32), Augmentation(crop_padding=0, flip=False), id="no crop or flip"),
        pytest.param((60, 3, 32, 32), Augmentation(crop_padding=0), id="no crop"),
        pytest.param((60, 3, 32, 32), Augmentation(erase=None), id="no erasing"),
        pytest.param((60, 1, 8, 8), Augmentation(crop_padding=9), id="crops off the image"),
    ],
)
def test_pipeline_equals_torchvision_image_by_image(
    shape: tuple[int, int, int, int], policy: Augmentation
) -> None:
    count, channels, height, width = shape
    images = some_images(*shape)
    indices = torch.randperm(10_000)[:count]
    options = settings_for(channels, policy=policy)
    result = augment(images, indices, **options)
    draws = draw_parameters(indices, policy=policy, seed=42, epoch=3, height=height, width=width)
    expected = naive(images, draws, policy, options["mean"], options["std"])
    # One level is 1/(255·std) > 0.0149: at this tolerance the levels are equal.
    torch.testing.assert_close(result, expected, rtol=0, atol=3e-6)
    assert torch.equal(result == 0.0, expected == 0.0) or policy.erase is None


def test_an_image_does_not_depend_on_its_batch() -> None:
    images, indices = some_images(64), torch.randperm(50_000)[:64]
    whole = augment(images, indices, **settings_for(3))
    order = torch.randperm(64)
    assert torch.equal(augment(images[order], indices[order], **settings_for(3)), whole[order])
    for b in (0, 17, 63):
        assert torch.equal(augment(images[b : b + 1], indices[b : b + 1], **settings_for(3))[0], whole[b])


def test_epoch_and_seed_change_the_result_and_nothing_else_does() -> None:
    images, indices = some_images(64), torch.arange(64)
    base = augment(images, indices, **settings_for(3))
    torch.manual_seed(1)
    assert torch.equal(augment(images, indices, **settings_for(3)), base)
    assert torch.equal(augment(images, indices, **settings_for(3, epoch=torch.tensor(3))), base)
    assert torch.equal(augment(images, indices, **settings_for(3, seed=torch.tensor(42))), base)
    for changed in ({"epoch": 4}, {"seed": 43}):
        other = augment(images, indices, **settings_for(3, **changed))
        assert (other != base).flatten(1).any(1).float().mean() > 0.95


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    images, indices = some_images(50), torch.arange(50)
    whole = augment(images, indices, **settings_for(3))
    monkeypatch.setattr(augment_module, "CHUNK_ELEMENTS_CPU", 7 * images[0].numel() + 1)
    assert torch.equal(augment(images, indices, **settings_for(3)), whole)
    monkeypatch.setattr(augment_module, "CHUNK_ELEMENTS_CPU", 1)
    assert torch.equal(augment(images[:3], indices[:3], **settings_for(3)), whole[:3])


@pytest.mark.parametrize("chunk", [2**30, 5 * 3 * 32 * 32])
def test_memory_format_is_kept(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(augment_module, "CHUNK_ELEMENTS_CPU", chunk)
    images, indices = some_images(12), torch.arange(12)
    plain = augment(images, indices, **settings_for(3))
    last = augment(images.to(memory_format=torch.channels_last), indices, **settings_for(3))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)
    only = normalise(images.to(memory_format=torch.channels_last), MEAN, STD)
    assert only.is_contiguous(memory_format=torch.channels_last)


def test_without_augmentation_it_normalises() -> None:
    images, indices = some_images(10), torch.arange(10)
    result = augment(images, indices, **settings_for(3, policy=Augmentation.none()))
    assert torch.equal(result, normalise(images, MEAN, STD))
    official = v2.functional.normalize(v2.functional.to_dtype(images, scale=True), list(MEAN), list(STD))
    torch.testing.assert_close(result, official, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        normalise(images, torch.tensor(MEAN), torch.tensor(STD)), result, rtol=0, atol=1e-6
    )


def test_lower_precision_is_the_float32_result_rounded() -> None:
    images, indices = some_images(10), torch.arange(10)
    full = augment(images, indices, **settings_for(3))
    for dtype in (torch.bfloat16, torch.float16):
        half = augment(images, indices, dtype=dtype, **settings_for(3))
        assert half.dtype == dtype
        assert torch.equal(half, full.to(dtype))


def test_an_empty_batch_stays_empty() -> None:
    empty = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert augment(empty, torch.zeros(0, dtype=torch.int64), **settings_for(3)).shape == (0, 3, 32, 32)


def test_compiles_whole_and_gives_the_same() -> None:
    # fullgraph: no shape and no branch depends on the data and nothing is read back by the host.
    torch._dynamo.reset()
    compiled = torch.compile(augment, backend="aot_eager", fullgraph=True)
    images, indices = some_images(40), torch.arange(40)
    for epoch in (torch.tensor(0), torch.tensor(7)):
        options = settings_for(3, epoch=epoch, seed=torch.tensor(9))
        assert torch.equal(compiled(images, indices, **options), augment(images, indices, **options))
    last = images.to(memory_format=torch.channels_last)
    result = compiled(last, indices, **options)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, augment(images, indices, **options))


def test_compiled_functions_follow_a_change_of_size_and_seed() -> None:
    torch._dynamo.reset()
    operation = torch.compile(apply_op, backend="aot_eager", fullgraph=True)
    for count, height in ((10, 32), (7, 28)):
        images = some_images(count, 1, height)
        op, negative = torch.arange(count) + 2, torch.arange(count) % 2 == 0
        assert torch.equal(operation(images, op, negative), apply_op(images, op, negative))
    words = torch.compile(random_words, backend="aot_eager", fullgraph=True)
    for seed, epoch in ((1, 0), (2, 1), (3, 1), (2**40, 5)):
        expected = random_words(torch.arange(9), seed=seed, epoch=epoch)
        assert torch.equal(words(torch.arange(9), seed=seed, epoch=epoch), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, on its first import
def test_inductor_gives_the_same() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(augment, fullgraph=True)
    for seed, count in ((1, 2000), (2, 500)):
        images, indices = some_images(count), torch.arange(count)
        options = settings_for(3, epoch=torch.tensor(0), seed=seed)
        expected = augment(images, indices, **options)
        torch.testing.assert_close(compiled(images, indices, **options), expected, rtol=0, atol=1e-6)


@pytest.mark.cuda
def test_cuda_gives_the_same() -> None:
    images, indices = some_images(500), torch.arange(500)
    expected = augment(images, indices, **settings_for(3))
    result = augment(images.cuda(), indices.cuda(), **settings_for(3))
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=1e-6)


def test_errors_name_the_value_and_the_remedy() -> None:
    images, indices = some_images(4), torch.arange(4)
    with pytest.raises(ValueError, match=r"augment: images are \(4, 3, 32, 32\) torch.float32"):
        augment(images.float(), indices, **settings_for(3))
    with pytest.raises(ValueError, match=r"4 images but indices of shape \(3,\)"):
        augment(images, indices[:3], **settings_for(3))
    with pytest.raises(ValueError, match="int32; pass"):
        augment(images, indices.int(), **settings_for(3))
    with pytest.raises(ValueError, match="seed=-1"):
        augment(images, indices, **settings_for(3, seed=-1))
    with pytest.raises(ValueError, match=r"epoch is a \(1,\) torch.int64 tensor"):
        augment(images, indices, **settings_for(3, epoch=torch.tensor([1])))
    with pytest.raises(ValueError, match="mean has 1 values for 3 channels"):
        normalise(images, (0.5,), STD)
    with pytest.raises(ValueError, match=r"std=\(0.2, 0.0, 0.2\) is not positive"):
        normalise(images, MEAN, (0.2, 0.0, 0.2))
    with pytest.raises(ValueError, match="crop_padding=-1"):
        Augmentation(crop_padding=-1)
    for wrong in ({"probability": 1.5}, {"area": (0.5, 0.1)}, {"aspect": (0.0, 1.0)}):
        with pytest.raises(ValueError, match=f"Erase: {next(iter(wrong))}="):
            Erase(**wrong)


def test_the_defaults_are_the_papers() -> None:
    policy, erasing = Augmentation(), v2.RandomErasing()
    assert (policy.crop_padding, policy.flip, policy.randaugment) == (4, True, RandAugment())
    assert policy.erase == Erase(0.5, (0.02, 0.33), tuple(erasing.ratio), erasing.value[0])
    assert math.isclose(erasing.p, 0.5)
