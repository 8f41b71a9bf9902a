"""Every RandAugment operation against torchvision's on the same uint8 tensor: equal, pixel by pixel."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_operation import apply_op
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor
from torchvision.transforms import v2

from protoseam.lab.pipeline import randaugment
from protoseam.lab.pipeline.randaugment import OPS, RandAugment

SPACE = v2.RandAugment._AUGMENTATION_SPACE
SHAPES = [(3, 32, 32), (3, 64, 64), (1, 28, 28), (1, 8, 8), (3, 21, 34)]
# The colours, of all 2²⁴, whose gray level a chain of fused float32 multiply-adds puts below the exact sum
UNLUCKY_COLOURS = ((250, 9, 228), (250, 13, 146), (250, 47, 199))


def torchvision_op(image_CHW: Tensor, op: int, negative: bool, policy: RandAugment) -> Tensor:
    """What `v2.RandAugment` does to one image once it has drawn this operation and this sign."""
    magnitudes, signed = SPACE[OPS[op]]
    table = magnitudes(policy.bins, *image_CHW.shape[-2:])
    magnitude = 0.0 if table is None else float(table[policy.magnitude])
    if signed and negative:
        magnitude = -magnitude
    transform = v2.RandAugment()
    return transform._apply_image_or_video_transform(
        image_CHW, OPS[op], magnitude, transform.interpolation, transform._fill
    )


def undecided(op: int, policy: RandAugment) -> bool:
    """Shears by 0.01·bin pixels a row, bin = 4·odd, put whole rows halfway between two source pixels: there the
    roundings of torchvision's matrix product, hence the BLAS library, choose the side. Not so at the default."""
    return OPS[op] in ("ShearX", "ShearY") and policy.magnitude % 8 == 4


@cache
def pictures(channels: int, height: int, width: int) -> Tensor:
    """Noise, flat, dark, gradients, two-level and clipped images, photographs, digits."""
    shape = (channels, height, width)
    generator = torch.Generator().manual_seed(height)
    noise = torch.randint(0, 256, (3, *shape), dtype=torch.uint8, generator=generator)
    ramp = torch.arange(width).expand(shape)
    made = [
        *noise,
        noise[0] // 16,
        noise[0] // 2 + 100,
        torch.full(shape, 77),
        torch.zeros(shape),
        torch.full(shape, 255),
        ramp * 255 // (width - 1),
        (ramp.mT if height == width else ramp) * 2,
        (noise[1] > 200) * 255,
        (noise[2] > 100) * 3 + 40,
        torch.where(ramp < width // 2, 0, noise[0]),
    ]
    unlucky = torch.tensor(UNLUCKY_COLOURS, dtype=torch.uint8)
    made.append(unlucky[torch.arange(height * width) % 3].T.reshape(3, height, width)[:channels])
    for name in ("china.jpg", "flower.jpg"):
        photo = torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1)
        made += [photo[:channels, 40 : 40 + height, 60 : 60 + width]]
        made += [photo[:channels, 10 : 10 + 5 * height : 5, 10 : 10 + 5 * width : 5]]
    digit = torch.from_numpy(load_digits().images[7]).mul(15.9).to(torch.uint8)
    made.append(torch.nn.functional.interpolate(digit[None, None], size=(height, width))[0].expand(shape))
    return torch.stack([image.to(torch.uint8) for image in made])


def test_policy_is_torchvisions_default() -> None:
    official, ours = v2.RandAugment(), RandAugment()
    assert tuple(SPACE) == OPS
    assert (ours.num_ops, ours.magnitude, ours.bins) == (
        official.num_ops,
        official.magnitude,
        official.num_magnitude_bins,
    )
    assert v2.InterpolationMode(official.interpolation) is v2.InterpolationMode.NEAREST
    assert official.fill is None  # which leaves grid_sample's zeros


@pytest.mark.parametrize("bins", [31, 11])
def test_strengths_are_torchvisions_tables(bins: int) -> None:
    for magnitude in range(bins):
        policy = RandAugment(magnitude=magnitude, bins=bins)
        for op, name in enumerate(OPS):
            table = SPACE[name][0](bins, 28, 64)
            expected = 0.0 if table is None else float(table[magnitude])
            assert policy.strength(op, 28, 64) == expected, (name, magnitude)


@pytest.mark.parametrize("negative", [False, True], ids=["plus", "minus"])
@pytest.mark.parametrize("op", range(len(OPS)), ids=OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operation_equals_torchvision(shape: tuple[int, int, int], op: int, negative: bool) -> None:
    policy = RandAugment()
    images = pictures(*shape)
    result = apply_op(
        images, torch.full((len(images),), op), torch.full((len(images),), negative), policy=policy
    )
    expected = torch.stack([torchvision_op(image, op, negative, policy) for image in images])
    assert result.dtype == torch.uint8
    assert torch.equal(result, expected)


def test_operations_do_something() -> None:
    # A guard on the comparison above: at the default magnitude only Identity, and Color on gray, do nothing.
    for channels in (1, 3):
        image = pictures(channels, 32, 32)[4:5]
        for op, name in enumerate(OPS):
            changed = not torch.equal(apply_op(image, torch.tensor([op]), torch.tensor([False])), image)
            assert changed == (name != "Identity" and (name != "Color" or channels == 3)), name


@pytest.mark.parametrize("magnitude", range(31))
def test_every_magnitude_in_one_mixed_batch(magnitude: int) -> None:
    policy = RandAugment(magnitude=magnitude)
    op = torch.arange(2 * len(OPS)) // 2
    negative = torch.arange(2 * len(OPS)) % 2 == 1
    for photo in pictures(3, 32, 32)[[0, -2]]:
        result = apply_op(photo.expand(len(op), -1, -1, -1), op, negative, policy=policy)
        for i in range(len(op)):
            expected = torchvision_op(photo, int(op[i]), bool(negative[i]), policy)
            assert torch.equal(result[i], expected) or undecided(int(op[i]), policy), OPS[op[i]]


@settings(max_examples=80, deadline=None)
@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    levels=st.integers(1, 256),
    op=st.integers(0, len(OPS) - 1),
    negative=st.booleans(),
    magnitude=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_any_image_any_operation(
    channels: int, height: int, width: int, levels: int, op: int, negative: bool, magnitude: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, levels, (channels, height, width), generator=generator).to(torch.uint8)
    policy = RandAugment(magnitude=magnitude)
    result = apply_op(image.unsqueeze(0), torch.tensor([op]), torch.tensor([negative]), policy=policy)[0]
    assert torch.equal(result, torchvision_op(image, op, negative, policy)) or undecided(op, policy)


def test_gray_levels_of_many_colours() -> None:
    generator = torch.Generator().manual_seed(1)
    colours = torch.randint(0, 256, (1, 3, 2**18), generator=generator)
    colours[0, :, : len(UNLUCKY_COLOURS)] = torch.tensor(UNLUCKY_COLOURS).T
    expected = v2.functional.rgb_to_grayscale(colours.to(torch.uint8).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(randaugment._gray(colours.to(torch.float32)).to(torch.uint8), expected)


def test_channels_last_input_gives_the_same_levels() -> None:
    images = pictures(3, 32, 32)
    op, negative = torch.arange(len(images)) % len(OPS), torch.arange(len(images)) % 2 == 0
    plain = apply_op(images, op, negative)
    assert torch.equal(apply_op(images.to(memory_format=torch.channels_last), op, negative), plain)


def test_surroundings_do_not_matter() -> None:
    images = pictures(3, 32, 32)
    op, negative = torch.arange(len(images)) % len(OPS), torch.arange(len(images)) % 2 == 0
    plain = apply_op(images, op, negative)
    precision = torch.get_float32_matmul_precision()
    randaugment._tables.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        with torch.inference_mode(), torch.autocast("cpu"):
            assert torch.equal(apply_op(images, op, negative), plain)
        assert not any(table.is_inference() for table in randaugment._tables(9, 31, 32, 32, images.device))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)


def test_input_is_left_alone() -> None:
    images = pictures(3, 32, 32).clone()
    kept = images.clone()
    apply_op(images, torch.arange(len(images)) % len(OPS), torch.zeros(len(images), dtype=torch.bool))
    assert torch.equal(images, kept)


def test_errors_name_the_value_and_the_remedy() -> None:
    image = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"normalise: .*\(2, 3, 8, 8\) torch.float32.*uint8"):
        randaugment.check_images(image.float(), "normalise")
    with pytest.raises(ValueError, match=r"\(2, 2, 8, 8\)"):
        randaugment.check_images(image[:, :2], "normalise")
    with pytest.raises(ValueError, match="magnitude=31 is no bin of bins=31"):
        RandAugment(magnitude=31)
    with pytest.raises(ValueError, match="num_ops=-1"):
        RandAugment(num_ops=-1)
