"""What of the fused forwards shows without a GPU: when they apply, when they step aside, eval mode folded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from protoseam.lab.kernels import accelerate, unaccelerate
from protoseam.lab.models import ResNet, VisionTransformer, convnet, resnet8, vit_s

pytest.importorskip("triton")
from protoseam.lab.kernels.fused_resnet import FusedResNet
from protoseam.lab.kernels.fused_vit import FusedViT


def trained(model: nn.Module) -> nn.Module:
    """With running statistics and affine parameters that are not the initial ones."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


@pytest.mark.parametrize(
    ("widths", "blocks", "shape", "expected"),
    [
        ((128, 256, 512), (1, 1, 1), (3, 32, 32), True),
        ((64, 192), (2, 2), (1, 16, 16), True),
        ((64, 96), (1, 1), (3, 32, 32), False),  # 96 channels leave half a tile
        ((64, 128), (1, 1), (3, 28, 28), False),  # 28 is no power of two
        ((64, 128), (1, 1), (3, 8, 8), False),
    ],
)
def test_which_residual_networks_are_fused(
    widths: tuple[int, ...], blocks: tuple[int, ...], shape: tuple[int, ...], expected: bool
) -> None:
    assert FusedResNet.supports(ResNet(10, widths, blocks, shape[0]), shape) is expected


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({}, (3, 32, 32), True),
        ({"image_size": 64}, (3, 64, 64), True),
        ({"dim": 128, "heads": 2, "mlp": 384, "in_channels": 1}, (1, 32, 32), True),
        ({"pool": "cls"}, (3, 32, 32), True),
        ({"pool": "cls", "patch": 8}, (3, 32, 32), False),
        ({"stem": "conv"}, (3, 32, 32), True),
        ({"stem": "conv", "image_size": 64}, (3, 64, 64), True),
        ({"stem": "conv", "image_size": 64, "patch": 4}, (3, 64, 64), False),  # 256 tokens
        ({"stem": "conv", "image_size": 16}, (3, 16, 16), True),
        ({"dropout": 0.1}, (3, 32, 32), True),
        ({"drop_path": 0.1}, (3, 32, 32), False),
        ({"patch": 8}, (3, 32, 32), False),  # 16 tokens
        ({"dim": 512}, (3, 32, 32), True),
        ({"dim": 640, "heads": 10}, (3, 32, 32), False),
        ({"heads": 32}, (3, 32, 32), False),  # 8 numbers a head
        ({"mlp": 1000}, (3, 32, 32), False),
        ({"image_size": 16}, (3, 16, 16), False),  # patches of 2×2×3 = 12 numbers
        ({"depth": 0}, (3, 32, 32), False),
    ],
)
def test_which_transformers_are_fused(
    options: dict[str, Any], shape: tuple[int, ...], expected: bool
) -> None:
    assert FusedViT.supports(vit_s(10, **options), shape) is expected


def test_nothing_is_accelerated_without_cuda() -> None:
    for model in (resnet8(10), vit_s(10, depth=1), convnet(10)):
        assert not accelerate(model, (3, 32, 32))
        assert getattr(model, "fused", None) is None


def test_unaccelerate_restores_the_plain_network() -> None:
    model = vit_s(10, depth=1)
    x = torch.randn(2, 3, 32, 32)
    expected = model.features(x)
    model.fused = lambda x: torch.zeros(len(x), 256)
    assert torch.count_nonzero(model.features(x)) == 0
    assert unaccelerate(model) is model
    assert torch.equal(model.features(x), expected)


@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("side", [8, 17])
def test_folded_evaluation_is_the_plain_one(blocks: tuple[int, ...], side: int) -> None:
    model = trained(ResNet(10, (16, 32, 48), blocks))
    assert isinstance(model, ResNet)
    x = torch.randn(5, 3, side, side)
    with torch.no_grad():
        expected, folded = model.features(x), FusedResNet(model)(x)
    assert (folded - expected).norm() < 1e-5 * expected.norm()


def test_fresh_normalisations_in_an_evaluation_run_layer_by_layer() -> None:
    model = ResNet(10, (16, 32), (1, 1)).eval()
    model.stem[1].train()
    other = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(FusedResNet(other)(x), model.features(x))


@pytest.mark.parametrize("training", [True, False])
def test_float32_transformers_run_layer_by_layer(training: bool) -> None:
    model: VisionTransformer = vit_s(10, depth=1).train(training)
    x = torch.randn(2, 3, 32, 32)
    expected = model.features(x)
    model.fused = FusedViT(model)
    assert torch.equal(model.features(x), expected)


def test_float32_residual_networks_train_layer_by_layer() -> None:
    model = ResNet(10, (64,), (1,))
    other = copy.deepcopy(model)
    other.fused = FusedResNet(other)
    x = torch.randn(64, 3, 16, 16)
    assert torch.equal(other.features(x), model.features(x))


def test_a_copy_is_fused_with_its_own_parameters() -> None:
    model = trained(ResNet(10, (16, 32), (1, 1)))
    assert isinstance(model, ResNet)
    model.fused = FusedResNet(model)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    before = model.features(x)
    with torch.no_grad():
        twin.stem[0].weight.mul_(-1)
    assert torch.equal(model.features(x), before)
    assert not torch.equal(twin.features(x), before)
