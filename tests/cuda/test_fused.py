"""The fused forwards against the plain modules: values, gradients, statistics, graphs, and where they step aside."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protoseam.lab.kernels import accelerate, unaccelerate
from protoseam.lab.models import ResNet, build

pytestmark = pytest.mark.cuda
# read when the first matrix product runs; deterministic products need it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

BATCH, SHAPE = 128, (3, 32, 32)
NAMES = ["resnet8", "resnet18", "vit_s"]


def network(name: str, **options: Any) -> nn.Module:
    """On the GPU, channels_last, rounded to bf16 values, with norms and biases away from their initial 1 and 0."""
    torch.manual_seed(0)
    model = build(name, 10, SHAPE, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, std=0.05)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.cuda().to(memory_format=torch.channels_last)


def low(model: nn.Module) -> nn.Module:
    """As training sees it: bf16, batch normalisation kept in float32."""
    model = copy.deepcopy(model).bfloat16()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


def fused(model: nn.Module) -> nn.Module:
    model = low(model)
    assert accelerate(model, SHAPE)
    return model


def images(n: int = BATCH) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(n, *SHAPE, device="cuda", generator=generator) + 0.2
    return x.bfloat16().contiguous(memory_format=torch.channels_last)


def pull(features: Tensor) -> Tensor:
    """A fixed gradient of the features, in bf16 values."""
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randn(features.shape, device="cuda", generator=generator).bfloat16()


def step(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Features and the gradient of every parameter before the classifier."""
    model.zero_grad()
    features = model.features(x)
    features.backward(pull(features).to(features.dtype))
    return features.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.fixture(autouse=True)
def _exact_float32() -> Any:
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@pytest.mark.parametrize("name", NAMES)
def test_fused_is_as_near_to_float32_as_plain_bf16(name: str) -> None:
    model = network(name)
    x = images()
    exact, exact_grads = step(copy.deepcopy(model), x.float())
    plain, plain_grads = step(low(model), x)
    own, own_grads = step(fused(model), x)
    assert error(own, exact) < 2 * error(plain, exact)
    assert own_grads.keys() == exact_grads.keys()
    floor = max(error(plain_grads[n], g) for n, g in exact_grads.items()) / 4
    for n, g in exact_grads.items():
        assert own_grads[n].shape == g.shape
        assert error(own_grads[n], g) < 2 * max(error(plain_grads[n], g), floor), n


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_running_statistics_follow(name: str) -> None:
    model = network(name)
    own, plain, exact = fused(model), low(model), copy.deepcopy(model)
    for _ in range(3):
        own.features(images())
        plain.features(images())
        exact.features(images().float())
    for n, reference in exact.named_buffers():
        ours, theirs = own.get_buffer(n), plain.get_buffer(n)
        if n.endswith("num_batches_tracked"):
            assert int(ours) == int(theirs) == int(reference) == 3
        else:
            assert error(ours, reference) < 2 * error(theirs, reference) + 1e-3, n


@pytest.mark.parametrize("name", NAMES)
def test_eval_mode_is_the_plain_network(name: str) -> None:
    model = network(name)
    own = fused(model)
    for _ in range(3):
        own.features(images())
    exact = copy.deepcopy(model)
    exact.load_state_dict({n: v.float() for n, v in own.state_dict().items()})
    own.eval()
    exact.eval()
    plain = unaccelerate(copy.deepcopy(own))
    x = images(100)
    with torch.no_grad():
        reference = exact.features(x.float())
        assert error(own.features(x), reference) < 2 * error(plain.features(x), reference)


@pytest.mark.parametrize("name", NAMES)
def test_repeated_steps_are_bit_identical(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = network(name)
        first, second = step(fused(model), images()), step(fused(model), images())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first[0], second[0])
    for n, g in first[1].items():
        assert torch.equal(g, second[1][n]), n


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_gives_the_same_numbers(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model: Any = fused(network(name))
        x = images()
        expected = step(model, x)

        def body() -> Tensor:
            model.zero_grad()
            features: Tensor = model.features(static)
            features.backward(gradient)
            return features

        static, gradient = torch.zeros_like(x), pull(expected[0]).to(expected[0].dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            features = body()
        static.copy_(x)
        for _ in range(3):
            graph.replay()
            # what a replay may not depend on: whatever the caller allocates between two of them
            torch.full((64, 1024, 1024), float("nan"), device="cuda")
        # running means are the statistics' origin, so their history shows in the last bits of a ResNet
        bound = 0.0 if name == "vit_s" else 1e-2
        assert error(features, expected[0]) <= bound
        for n, p in model.named_parameters():
            if p.grad is not None:
                assert error(p.grad, expected[1][n]) <= (bound and 0.25), n
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "batch", "options"),
    [
        ("resnet8", 100, {}),
        ("resnet18", 32, {}),
        ("vit_s", 100, {}),
        ("vit_s", 3, {}),
        ("vit_s", 1, {}),
        ("vit_s", 8, {"dim": 128, "heads": 8, "mlp": 256}),
        ("vit_s", 5, {"dim": 384, "heads": 6, "mlp": 1536}),
        ("vit_s", 4, {"dim": 384, "heads": 12, "mlp": 384}),
        ("vit_s", 4, {"dim": 512, "heads": 8, "mlp": 512, "depth": 2}),
        ("vit_s", 128, {"stem": "conv", "mlp": 512}),
        ("vit_s", 128, {"pool": "cls"}),
        ("vit_s", 64, {"pool": "cls", "stem": "conv", "dim": 384, "heads": 6, "mlp": 384, "depth": 2}),
        ("vit_s", 64, {"stem": "conv", "dim": 384, "heads": 6, "mlp": 384, "depth": 2}),
    ],
)
def test_other_sizes(name: str, batch: int, options: dict[str, Any]) -> None:
    model = network(name, **options)
    x = images(batch)
    exact, exact_grads = step(copy.deepcopy(model), x.float())
    plain, plain_grads = step(low(model), x)
    quick = fused(model)
    own, own_grads = step(quick, x)
    assert error(own, exact) < 2 * error(plain, exact)
    if name == "vit_s":  # a ResNet's gradients at few images are mostly rounding
        floor = max(error(plain_grads[n], g) for n, g in exact_grads.items()) / 4
        for n, g in exact_grads.items():
            assert error(own_grads[n], g) < 2 * max(error(plain_grads[n], g), floor), n
        with torch.no_grad():
            assert error(quick.features(x), exact) < 2 * error(plain, exact)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_s", {"drop_path": 0.1}),
        ("vit_s", {"patch": 8}),
        ("vit_s", {"dim": 192}),
    ],
)
def test_unsupported_networks_stay_plain(name: str, options: dict[str, Any]) -> None:
    model: Any = low(network(name, **options))
    assert not accelerate(model, SHAPE)
    assert model.fused is None
    assert model.features(images()).isfinite().all()


def test_images_are_filled_up_for_a_class_token_where_none_is_looked_at_by_another() -> None:
    model: Any = fused(network("vit_s", pool="cls"))
    plain = unaccelerate(copy.deepcopy(model))
    x = images(100)
    assert torch.equal(model.train().features(x), plain.train().features(x))  # 65 tokens of 100 fill no tiles
    model.eval()
    plain.eval()
    with torch.no_grad():
        for n in (1, 100):
            assert not torch.equal(model.features(x[:n]), plain.features(x[:n]))
            assert error(model.features(x[:n]), plain.features(x[:n])) < 0.02


class Fixed(nn.Module):
    """Dropout whose draws are given."""

    def __init__(self, kept: Tensor, rate: float) -> None:
        super().__init__()
        self.factor = kept / (1 - rate)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.view_as(x).to(x.dtype)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_dropout_is_the_plain_networks_with_the_same_draws(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, draws, draw = 0.25, [], Tensor.bernoulli_
    monkeypatch.setattr(Tensor, "bernoulli_", lambda t, p: draws.append(draw(t, p)) or t)
    model: Any = network("vit_s", dropout=rate, pool=pool).train()
    x = images()
    own, own_grads = step(fused(model), x)
    (kept,) = draws
    assert abs(float(kept.float().mean()) - (1 - rate)) < 1e-3
    width, hidden = model.positions.shape[2], model.blocks[0].mlp[0].out_features
    sizes = [
        BATCH * model.positions.shape[1] * n for n in [width] + [width, hidden, width] * len(model.blocks)
    ]
    sites = iter(kept.float().split(sizes))
    model.drop = Fixed(next(sites), rate)
    for block in model.blocks:
        block.attention.drop = Fixed(next(sites), rate)
        block.mlp[2], block.mlp[4] = Fixed(next(sites), rate), Fixed(next(sites), rate)
    exact, exact_grads = step(copy.deepcopy(model), x.float())
    plain, plain_grads = step(low(model), x)
    assert error(own, exact) < 2 * error(plain, exact)
    floor = max(error(plain_grads[n], g) for n, g in exact_grads.items()) / 4
    for n, g in exact_grads.items():
        assert error(own_grads[n], g) < 2 * max(error(plain_grads[n], g), floor), n


def test_dropout_draws_anew_in_training_and_not_at_all_otherwise() -> None:
    model: Any = fused(network("vit_s", dropout=0.25))
    x = images()
    model.train()
    assert not torch.equal(step(model, x)[0], step(model, x)[0])
    torch.manual_seed(3)
    with_graph = model.features(x)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(model.features(x), with_graph)
    model.eval()
    plain = unaccelerate(copy.deepcopy(model))
    assert error(model.features(x), plain.features(x)) < 0.02


def test_each_layer_of_dropout_keeps_a_mode_and_rate_of_its_own() -> None:
    model: Any = fused(network("vit_s", dropout=0.25))
    x = images(4)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert torch.equal(model.features(x), model.features(x))
    model.eval()
    model.blocks[0].mlp[2].train()
    assert not torch.equal(model.features(x), model.features(x))
    model.train()
    model.blocks[0].mlp[2].p = 1.0
    assert model.features(x).isfinite().all()


def test_a_captured_forward_drops_anew_at_every_replay() -> None:
    model: Any = fused(network("vit_s", dropout=0.25)).train()
    x = images(8)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model.features(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            features = model.features(x)
        graph.replay()
        first = features.clone()
        graph.replay()
    assert first.isfinite().all()
    assert not torch.equal(first, features)


@pytest.mark.parametrize("name", NAMES)
def test_images_that_need_a_gradient_get_one(name: str) -> None:
    model = network(name)
    exact_x, x = images().float().requires_grad_(), images().requires_grad_()
    step(copy.deepcopy(model), exact_x)
    step(fused(model), x)
    assert exact_x.grad is not None
    assert x.grad is not None
    assert error(x.grad, exact_x.grad) < (0.4 if name.startswith("resnet") else 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused_and_not_wrong(name: str) -> None:
    model: Any = fused(network(name))
    features = model.features(images())
    (gradient,) = torch.autograd.grad(
        features.float().square().sum(), next(iter(model.parameters())), create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().square().sum().backward()


def test_a_grey_stem_is_not_recomputed() -> None:
    torch.manual_seed(0)
    model: Any = ResNet(10, (64, 128), (1, 1), in_channels=1).cuda().to(memory_format=torch.channels_last)
    own: Any = low(model)
    assert accelerate(own, (1, 32, 32))
    x = images()[:, :1].contiguous(memory_format=torch.channels_last)
    read: Callable[[Any, Tensor], Tensor] = lambda net, data: net.features(data).detach()  # noqa: E731
    exact, plain = read(copy.deepcopy(model), x.float()), read(low(model), x)
    assert error(read(own, x), exact) < 2 * error(plain, exact)
