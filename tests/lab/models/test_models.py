from __future__ import annotations

import importlib
import json
import math
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import vit_oracle
from torch import nn

from protoseam.errors import ModelError
from protoseam.lab.models import NAMES, build, convnet, mlp, refuse_unfit, resnet8, resnet18, vit_s


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def last_linear(model: nn.Module) -> nn.Linear:
    return [m for m in model.modules() if isinstance(m, nn.Linear)][-1]


def basic_block(inner: int, outer: int) -> int:
    shortcut = 0 if inner == outer else inner * outer + 2 * outer
    return 9 * inner * outer + 9 * outer * outer + 4 * outer + shortcut


def test_resnet8_has_the_papers_size() -> None:
    by_hand = 27 * 128 + 2 * 128 + basic_block(128, 128) + basic_block(128, 256) + basic_block(256, 512)
    assert parameters(resnet8(100)) == by_hand + 513 * 100 == 4_942_564


def test_a_strided_stem_halves_every_image_and_adds_no_parameter() -> None:
    whole, half = resnet8(10), resnet8(10, stem_stride=2)
    x = torch.randn(1, 3, 64, 64)
    assert whole.stages(whole.stem(x)).shape[2:] == (16, 16)
    assert half.stages(half.stem(x)).shape[2:] == (8, 8)
    assert parameters(half) == parameters(whole)


def test_resnet18_has_the_customary_size() -> None:
    assert parameters(resnet18(100)) == 11_220_132
    assert parameters(resnet18(10)) == 11_173_962


def test_vit_s_has_the_stated_size() -> None:
    block = 2 * 2 * 256 + 257 * 768 + 257 * 256 + 257 * 1024 + 1025 * 256
    by_hand = 49 * 256 + 64 * 256 + 6 * block + 2 * 256 + 257 * 100
    assert parameters(vit_s(100)) == by_hand == 4_793_700


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "vit_s", "convnet", "mlp"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)])
def test_the_last_linear_is_the_output(name: str, shape: tuple[int, int, int]) -> None:
    options = {"dim": 32, "depth": 1, "mlp": 32} if name == "vit_s" else {}
    model = build(name, 7, shape, **options).eval()
    seen: list[torch.Tensor] = []
    last_linear(model).register_forward_hook(lambda module, args, output: seen.append(output))
    out = model(torch.randn(2, *shape))
    assert out.shape == (2, 7)
    assert seen[0] is out


def test_names_all_build() -> None:
    assert set(NAMES) == {"resnet8", "resnet18", "vit_s", "convnet", "mlp"}
    assert all(isinstance(build(name, 3, (1, 8, 8)), nn.Module) for name in NAMES)


def test_resnet_stages_halve_from_the_second_on() -> None:
    model = resnet8(10)
    x = model.stem(torch.randn(1, 3, 32, 32))
    shapes = []
    for stage in model.stages:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert isinstance(model.stages[0][0].shortcut, nn.Identity)


def test_resnet_init_follows_he() -> None:
    weight = resnet8(10).stages[2][0].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-4)


def test_vit_trunc_normal_init() -> None:
    model = vit_s(100)
    linears = [m for part in (model.blocks, model.head) for m in part.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 6 * 4 + 1
    for linear in linears:
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.03)
        assert torch.count_nonzero(linear.bias) == 0
    assert model.positions.std().item() == pytest.approx(0.02, rel=0.05)
    # The stem keeps U(±1/√fan_in), standard deviation 1/√(3·fan_in).
    assert model.stem.proj.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 48), rel=0.05)


def test_vit_torch_init_keeps_the_frameworks_rule() -> None:
    weight = vit_s(100, init="torch").blocks[0].mlp[0].weight
    assert weight.std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.02)


@pytest.mark.parametrize(("size", "tokens"), [(32, 64), (64, 64), (16, 64)])
def test_vit_default_patch_gives_64_tokens(size: int, tokens: int) -> None:
    model = vit_s(5, image_size=size, dim=32, depth=1, mlp=32)
    assert model.positions.shape[1] == tokens
    assert model(torch.randn(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_vit_variants(stem: str, pool: str) -> None:
    model = vit_s(5, image_size=16, patch=4, dim=32, depth=2, mlp=64, pool=pool, stem=stem)
    assert model.positions.shape[1] == 16 + (pool == "cls")
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_patch_stem_is_a_strided_convolution() -> None:
    stem = vit_s(5, dim=32, depth=1, mlp=32).stem
    x = torch.randn(2, 3, 32, 32)
    kernel = stem.proj.weight.view(32, 4, 4, 3).permute(0, 3, 1, 2)
    expected = F.conv2d(x, kernel, stem.proj.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(stem(x), expected, rtol=1e-4, atol=1e-5)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(stem(channels_last), stem(x))


class Scaled(nn.Module):
    """In dropout's place, so that its place can be seen."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_the_vit_is_the_formulas(stem: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = (
        vit_s(5, image_size=8, patch=4, dim=24, heads=3, depth=2, mlp=20, pool=pool, stem=stem)
        .double()
        .eval()
    )
    for name, value in model.state_dict().items():  # nothing may be 0, 1 or small by initialisation
        if value.is_floating_point():
            value.copy_(
                torch.rand_like(value) + 0.5 if "running_var" in name else torch.randn_like(value) / 2
            )
    factors = [1.1, 0.9, 1.2, 0.8, 1.3, 0.7, 1.4]
    rest = iter(factors)
    model.drop = Scaled(next(rest))
    for block in model.blocks:
        block.attention.drop = Scaled(next(rest))
        block.mlp[2], block.mlp[4] = Scaled(next(rest)), Scaled(next(rest))
    monkeypatch.setattr(type(model.blocks[0]), "_keep", lambda self, branch: branch * 1.7)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    expected = vit_oracle.features(
        model.state_dict(), x, depth=2, heads=3, patch=4, conv=stem == "conv", cls=pool == "cls",
        factors=factors, branch=1.7,
    )  # fmt: skip
    torch.testing.assert_close(model.features(x), expected)
    torch.testing.assert_close(model(x), expected @ model.head.weight.T + model.head.bias)
    if stem == "conv":
        products = model.stem.products(x)
        torch.testing.assert_close(products + model.stem.layers[-1].bias, model.stem(x))
        assert not torch.allclose(products, model.stem(x))


def test_the_convnet_is_two_convolutions_rectified_and_pooled() -> None:
    model = convnet(5, image_size=8, widths=(3, 4))
    h = torch.randn(2, 1, 8, 8)
    out = model(h)
    for conv in (model.features[0], model.features[3]):
        h = F.conv2d(h, conv.weight, conv.bias, padding=1).clamp(min=0)
        h = h.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    torch.testing.assert_close(out, h.flatten(1) @ model.fc.weight.T + model.fc.bias)


@pytest.mark.parametrize("options", [{"dropout": 0.2}, {"drop_path": 0.5}])
def test_each_of_the_vits_regularizers_acts_in_training_only(options: dict[str, float]) -> None:
    model = vit_s(5, dim=32, depth=3, mlp=32, **options)
    rates = [block.drop_path for block in model.blocks]
    assert rates == ([0.0, 0.25, 0.5] if "drop_path" in options else [0.0] * 3)
    x = torch.randn(4, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_drop_path_keeps_the_mean() -> None:
    block = vit_s(5, dim=32, depth=1, mlp=32).blocks[0]
    block.drop_path = 0.25
    kept = block._keep(torch.ones(20_000, 1, 1))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert kept.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 5}, "does not divide into patches of 5"),
        ({"heads": 7}, "does not divide into heads=7"),
        ({"heads": 0}, "heads=0 must be at least 1"),
        ({"pool": "max"}, "pool='max' is not known; choose one of mean, cls"),
        ({"stem": "conv", "patch": 32, "dim": 48}, "must be a power of two"),
    ],
)
def test_vit_refuses_in_words(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("vit_s", 5, (3, 32, 32), **options)


def test_build_suggests_a_name() -> None:
    with pytest.raises(ValueError, match=r"no network is called 'resnet_8': did you mean 'resnet8'"):
        build("resnet_8", 10, (3, 32, 32))


def test_build_refuses_images_that_are_not_square() -> None:
    with pytest.raises(ValueError, match="vit_s takes square images"):
        build("vit_s", 10, (3, 32, 16))


def test_build_refuses_unknown_options() -> None:
    with pytest.raises(ModelError, match=r"depht.*correct model_options"):
        build("vit_s", 10, (3, 32, 32), depht=3)


@pytest.mark.parametrize("name", ["convnet", "test_vit2"])
def test_build_refuses_what_the_data_says(name: str) -> None:
    with pytest.raises(ModelError, match="the option num_classes follows from the data"):
        build(name, 10, (3, 32, 32), **{"num_classes": 5})  # noqa: PIE804 (as a run's settings give it)
    with pytest.raises(ModelError, match="correct model_options"):
        build(name, 10, (3, 32, 32), **{"name": "other", "make": None})  # noqa: PIE804


def test_build_without_timm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"timm, which would add its own, cannot be imported .* pip install"):
        build("wide_resnet", 10, (3, 32, 32))

    def of_another_build(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", of_another_build)
    with pytest.raises(
        ValueError, match=r"nms does not exist\): torch and torchvision are of different builds"
    ):
        build("wide_resnet", 10, (3, 32, 32))


def test_build_accepts_timm_names() -> None:
    pytest.importorskip("timm")
    model = build("test_convnext", 6, (1, 32, 32))
    assert model.eval()(torch.randn(2, 1, 32, 32)).shape == (2, 6)


@pytest.mark.parametrize("name", ["resnet8", "vit_s", "convnet", "mlp"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    options = {"dim": 64, "depth": 2, "mlp": 64} if name == "vit_s" else {}
    model = build(name, 4, (1, 8, 8), **options)
    y = torch.arange(16) % 4
    x = torch.randn(4, 1, 8, 8)[y] + 0.1 * torch.randn(16, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(16):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_small_networks_fit_their_images() -> None:
    assert convnet(10).fc.in_features == 64 * 7 * 7
    assert convnet(10, image_size=8).fc.in_features == 64 * 2 * 2
    with pytest.raises(ValueError, match="too small to be halved twice"):
        convnet(10, image_size=3)
    assert mlp(13, 3, hidden=())(torch.randn(5, 13)).shape == (5, 3)


def test_a_network_for_images_of_another_size_says_which_option_helps() -> None:
    pytest.importorskip("timm")
    told = r"takes images of 224×224 pixels, and the data has 32×32: give --image_size 224, or --model_options '(.*)'$"
    with pytest.raises(ModelError, match=told) as caught:
        build("vit_tiny_patch16_224", 3, (3, 32, 32), depth=1)
    options = json.loads(str(caught.value).partition("--model_options ")[2].strip("'"))
    network = build("vit_tiny_patch16_224", 3, (3, 32, 32), depth=1, **options)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_a_network_that_cannot_take_the_data_is_refused_before_training() -> None:
    pytest.importorskip("timm")
    for name in ("resnet8", "convnet", "test_resnet"):
        with pytest.raises(ModelError, match=f"{name} takes images, and the data is a table of 6 features"):
            build(name, 3, (6,))
    network = build("vgg11", 3, (3, 16, 16), mlp_ratio=0.01)
    with pytest.raises(ModelError, match=r"vgg11 cannot take images of 16×16 pixels .*a larger --image_size"):
        refuse_unfit("vgg11", network, (3, 16, 16))


def test_pretrained_weights_that_cannot_be_fetched_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")

    def offline(*_: object, **__: object) -> None:
        raise OSError("no such host\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(
        ModelError, match=r"weights of resnet10t cannot be loaded \(no such host\): check the conn"
    ):
        build("resnet10t", 3, (3, 32, 32), pretrained=True)
