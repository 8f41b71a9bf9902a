"""Triton kernels and the fused networks built on them, each equal to a plain function elsewhere in the lab."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import nn

from protoseam.lab.models import ResNet, VisionTransformer

__all__ = ["accelerate", "unaccelerate"]


def accelerate(module: nn.Module, image_shape: Sequence[int]) -> bool:
    """Give the networks inside `module` their fused forward (bf16, CUDA, Triton); True if all have one now.

    For training loops that call backward once after each forward and then release the gradients, as
    `optimizer.zero_grad()` does: a fused normalisation writes its gradients into the same memory each time.
    """
    shape = tuple(image_shape)
    networks = [m for m in module.modules() if isinstance(m, ResNet | VisionTransformer)]
    on_cuda = all(p.is_cuda for p in module.parameters())
    if not networks or not on_cuda or importlib.util.find_spec("triton") is None:
        return False
    from protoseam.lab.kernels.fused_resnet import FusedResNet
    from protoseam.lab.kernels.fused_vit import FusedViT

    for network in networks:
        if isinstance(network, ResNet) and FusedResNet.supports(network, shape):
            network.fused = FusedResNet(network)
        if isinstance(network, VisionTransformer) and FusedViT.supports(network, shape):
            network.fused = FusedViT(network)
    return all(network.fused is not None for network in networks)


def unaccelerate(module: nn.Module) -> nn.Module:
    """Back to plain modules: what `accelerate` added is removed."""
    for network in module.modules():
        network.__dict__.pop("fused", None)
    return module
