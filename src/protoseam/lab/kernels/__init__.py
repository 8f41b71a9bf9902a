"""The Triton kernels, and the one place that decides where they run.

Plain code says what is computed and asks :func:`find` for a faster way to compute it. Every launcher lies in a module
of this room, and :data:`EQUALS` names the plain function that it equals; tests compare the two, through Triton's
interpreter where that can run the kernel and on a CUDA device otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from protoseam.core.devices import cuda_kernels
from protoseam.lab.models import ResNet, VisionTransformer

__all__ = ["EQUALS", "accelerate", "find", "unaccelerate"]

# Launcher, by module and name in this room: the plain function, or the module's method, whose result it has.
EQUALS = {
    "augment.augment_rows": "lab.pipeline.augment.augment",
    "fused_resnet.FusedResNet": "lab.models.resnet.ResNet.features",
    "fused_vit.FusedViT": "lab.models.vit.VisionTransformer.plain_features",
    "step.Scattered.check": "lab.engine.optim.Gathered.check",
    "step.Scattered.update": "lab.engine.optim.sgd_update",
    "step.keep_books": "lab.engine.step.keep_books",
    "step.sgd_update": "lab.engine.optim.sgd_update",
    "step.take_batch": "lab.engine.step.take_batch",
    "sums.column_sums": "torch.sum",
}


def find(name: str, device: torch.device) -> Any | None:
    """Return the module ``name`` of this room for tensors on ``device``; None where plain functions are to run.

    Kernels need a CUDA device and a Triton that can compile for it, and nothing may be tracing.
    """
    if cuda_kernels(torch.empty(0, device=device)) is None:
        return None
    return importlib.import_module(f"{__name__}.{name}")


def accelerate(module: nn.Module, image_shape: Sequence[int]) -> bool:
    """Give the networks inside ``module`` their fused forward (bf16, CUDA); return whether all have one now.

    For training loops that call backward once after each forward and then release the gradients, as
    ``optimizer.zero_grad()`` does: a fused normalisation writes its gradients into the same memory each time.
    """
    shape = tuple(image_shape)
    networks = [m for m in module.modules() if isinstance(m, ResNet | VisionTransformer)]
    devices = {p.device for p in module.parameters()}
    if not networks or any(find("step", device) is None for device in devices):
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
    """Remove what :func:`accelerate` added and return the module."""
    for network in module.modules():
        network.__dict__.pop("fused", None)
    return module
