"""Other people's models, through the whole life of a seam: lift, initialise, one step, deploy, fold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import protoseam as ps

tv = pytest.importorskip("torchvision.models")
timm = pytest.importorskip("timm")

CLASSES, DIM = 10, 16
# 8×8 patches of 32×32 images and two blocks: every kind of layer a ViT has, at a hundredth of its cost
SMALL_VIT = {"img_size": 32, "patch_size": 8, "depth": 2}


def _timm(name: str, **arguments: object) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, pretrained=False, num_classes=CLASSES, **arguments)


def _torchvision_vit() -> nn.Module:
    return tv.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=CLASSES
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision-resnet18": partial(tv.resnet18, num_classes=CLASSES),
    "torchvision-convnext_tiny": partial(tv.convnext_tiny, num_classes=CLASSES),
    "torchvision-efficientnet_b0": partial(tv.efficientnet_b0, num_classes=CLASSES),
    "torchvision-vit": _torchvision_vit,
    "torchvision-mobilenet_v3_small": partial(tv.mobilenet_v3_small, num_classes=CLASSES),
    "torchvision-densenet121": partial(tv.densenet121, num_classes=CLASSES),
    "torchvision-regnet_y_400mf": partial(tv.regnet_y_400mf, num_classes=CLASSES),
    "torchvision-shufflenet_v2": partial(tv.shufflenet_v2_x0_5, num_classes=CLASSES),
    "torchvision-mnasnet0_5": partial(tv.mnasnet0_5, num_classes=CLASSES),
    "timm-resnet10t": _timm("resnet10t"),
    "timm-convnext_atto": _timm("convnext_atto"),
    "timm-vit_tiny": _timm("vit_tiny_patch16_224", **SMALL_VIT),
    "timm-deit_tiny": _timm("deit_tiny_patch16_224", **SMALL_VIT),
    "timm-efficientnet_lite0": _timm("efficientnet_lite0"),
    "timm-mobilenetv3_small": _timm("mobilenetv3_small_050"),
    "timm-regnetx_002": _timm("regnetx_002"),
    "timm-repvgg_a0": _timm("repvgg_a0"),
    "timm-xcit_nano": _timm("xcit_nano_12_p16_224"),
    "timm-edgenext_xx_small": _timm("edgenext_xx_small"),
    "timm-mobilevit_xxs": _timm("mobilevit_xxs"),
}


def _loader() -> list[tuple[Tensor, Tensor]]:
    """Two batches of 32×32 images, two samples of every class in all."""
    y = torch.arange(CLASSES)
    return [(torch.randn(CLASSES, 3, 32, 32), y) for _ in range(2)]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_lifted_trained_deployed_and_folded(name: str) -> None:
    original = MODELS[name]()
    before = _shapes(original)
    loader = _loader()

    # two samples a class cannot fill sixteen dimensions: one pooled covariance can
    net = ps.lift(original, num_classes=CLASSES, dim=DIM, covariance=ps.ExactCovariance(structure="shared"))
    optimizer = torch.optim.SGD(net.param_groups(lr=1e-3, weight_decay=1e-4), momentum=0.9, nesterov=True)
    net.initialize(loader)
    assert net.prototypes.unique(dim=0).shape == (CLASSES, DIM)

    prototypes, head = net.prototypes.detach().clone(), net.n2.weight.detach().clone()
    net.set_progress(0, 2)
    net.train()
    terms = net.objective(*loader[0])
    optimizer.zero_grad()
    terms.total.backward()
    assert all(torch.isfinite(term) for term in terms)
    dead = [
        parameter
        for parameter, p in net.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all())
    ]
    assert not dead, f"no usable gradient: {dead}"
    first = next(net.n1.parameters())
    assert first.grad is not None
    assert first.grad.abs().max() > 0, "the consensus does not reach the first layer"
    optimizer.step()
    assert not torch.equal(net.prototypes, prototypes)
    assert not torch.equal(net.n2.weight, head)
    net.refresh(loader)
    assert net.covariance.factors.isfinite().all()

    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        logits = net.eval()(x)
        deployed, folded = net.deploy(), net.deploy(fold=True)
        assert torch.equal(deployed(x), logits)
        error = (folded(x) - logits).abs().max() / logits.abs().max()
    assert error <= 1e-5
    assert not [m for m in deployed.modules() if type(m).__module__.startswith("protoseam")]
    assert type(folded) is type(original)
    assert _shapes(folded) == before
    assert _shapes(original) == before, "lift must leave the model it was given alone"


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (partial(tv.squeezenet1_1, num_classes=CLASSES), "no nn.Linear to lift"),
        (_timm("dla34"), "no nn.Linear to lift"),
        (partial(tv.resnet18, num_classes=1000), "Build the model for 10 classes"),
    ],
    ids=["torchvision-squeezenet", "timm-dla", "wrong-class-count"],
)
def test_what_cannot_be_lifted_says_why(build: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        ps.lift(build(), num_classes=CLASSES, dim=DIM)
