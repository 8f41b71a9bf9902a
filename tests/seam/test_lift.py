"""From a model, or two halves, to a lifted module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, HIDDEN, Noisy, Own, batches, network, sgd, step

import protoseam as ps

X, Y = batches()[0]


# ---------------------------------------------------------------------- the paper's form


@pytest.mark.parametrize("dim", [2, 32])
def test_a_sequential_model(dim: int) -> None:
    net = ps.lift(network(), num_classes=CLASSES, dim=dim, init="random")
    assert net.seam_layer == "2"
    assert (net.n1[2].in_features, net.n1[2].out_features) == (HIDDEN, dim)
    assert (net.n2.in_features, net.n2.out_features) == (dim, CLASSES)
    assert net.embed(X).shape == (len(X), dim)
    assert net.prototypes.shape == (CLASSES, dim)
    assert net(X).shape == (len(X), CLASSES)


def test_defaults_come_from_the_model_and_the_paper() -> None:
    net = ps.lift(network(7))
    assert (net.num_classes, net.dim) == (7, 32)
    assert (net.alpha, net.antithetic, net.class_weights) == (2.0, False, "uniform")
    assert [ps.lift(network(n)).draws for n in (2, 7, 63, 64, 1000)] == [
        32,
        10,
        2,
        1,
        1,
    ]  # 64 samples per step
    assert isinstance(net.covariance, ps.RunningCovariance)
    assert net.init == "fsinit"
    assert isinstance(net.schedule, ps.SineAnneal)


@pytest.mark.parametrize("make", [Own, Noisy, network])
def test_models_of_ones_own(make: type[nn.Module]) -> None:
    model = make()
    net = ps.lift(model, num_classes=CLASSES, dim=DIM)
    net.initialize(batches())
    step(net, sgd(net), X, Y)
    net.eval()
    assert torch.equal(net.deploy()(X), net(X))
    folded = net.deploy(fold=True)
    assert torch.allclose(folded(X), net(X), atol=1e-5)
    assert [type(m) for m in folded.modules()] == [type(m) for m in model.modules()]
    model.eval().load_state_dict(folded.state_dict())
    assert torch.equal(model(X), folded(X))


def test_the_seam_keeps_the_layers_bias_dtype_and_the_name() -> None:
    net = ps.lift(Own().double(), num_classes=CLASSES, dim=DIM)
    assert net.seam_layer == "head.out"
    assert net.n1.head["out"].bias is None
    assert net.n2.bias is None  # else folding would add one
    assert net.n1.head["out"].weight.dtype == net.n2.weight.dtype == torch.float64


def test_a_model_that_is_a_linear() -> None:
    net = ps.lift(nn.Linear(FEATURES, CLASSES), dim=DIM)
    net.initialize(batches())
    assert torch.equal(net.deploy()(X), net(X))
    folded = net.deploy(fold=True)
    assert type(folded) is nn.Linear
    assert torch.allclose(folded(X), net(X), atol=1e-6)


def test_the_last_linear_with_that_many_outputs_is_taken() -> None:
    class WithExtra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(FEATURES, CLASSES)
            self.unused = nn.Linear(FEATURES, 77)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    net = ps.lift(WithExtra(), num_classes=CLASSES, dim=DIM, init="random")
    assert net.seam_layer == "fc"
    assert net(X, Y).total.isfinite()


def test_naming_the_layer() -> None:
    net = ps.lift(network(), at="2", num_classes=9, dim=DIM)  # a new head on pretrained features
    assert (net.num_classes, net.dim, net.seam_layer) == (9, DIM, "2")
    assert net(X).shape == (len(X), 9)
    assert ps.lift(network(), at="2").num_classes == CLASSES


@pytest.mark.parametrize("source", ["torchvision", "timm"])
def test_models_of_others(source: str) -> None:
    library = pytest.importorskip("torchvision.models" if source == "torchvision" else "timm")
    if source == "torchvision":
        model = library.resnet18(num_classes=CLASSES)
    else:
        model = library.create_model(
            "vit_tiny_patch16_224", num_classes=CLASSES, img_size=32, patch_size=16, depth=1
        )
    data = [(torch.randn(8, 3, 32, 32), torch.arange(8) % CLASSES) for _ in range(2)]
    net = ps.lift(model, num_classes=CLASSES, dim=DIM)
    assert net.seam_layer == {"torchvision": "fc", "timm": "head"}[source]
    net.initialize(data)
    step(net, sgd(net), *data[0])
    net.eval()
    assert torch.equal(net.deploy()(data[0][0]), net(data[0][0]))
    assert torch.allclose(net.deploy(fold=True)(data[0][0]), net(data[0][0]), atol=1e-5)


# ---------------------------------------------------------------------- halves and other cuts


def test_halves_are_taken_as_they_are() -> None:
    n1, n2 = nn.Sequential(nn.Linear(FEATURES, DIM)), nn.Linear(DIM, CLASSES)
    net = ps.lift((n1, n2), init="random")
    assert net.n1 is n1
    assert net.n2 is n2
    assert (net.num_classes, net.dim) == (CLASSES, DIM)
    step(net, sgd(net), X, Y)


@pytest.mark.parametrize("how", ["probe", "sizes", "dim alone"])
def test_sizes_of_halves(how: str) -> None:
    n1 = nn.Linear(FEATURES, DIM)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(DIM, CLASSES)

        def forward(self, z: Tensor) -> Tensor:
            return self.out(z)

    options = {
        "probe": {"probe": X},
        "sizes": {"dim": DIM, "num_classes": CLASSES},
        "dim alone": {"dim": DIM},
    }[how]
    net = ps.lift((n1, Head()), init="random", **options)
    assert (net.num_classes, net.dim) == (CLASSES, DIM)
    assert net(X, Y).total.isfinite()


def test_sizes_of_a_deep_second_half() -> None:
    n2 = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    net = ps.lift((nn.Linear(FEATURES, DIM), n2), init="random")
    assert (net.num_classes, net.dim) == (CLASSES, DIM)


def test_a_probe_leaves_the_modes_alone() -> None:
    n1 = nn.Sequential(nn.Linear(FEATURES, DIM), nn.BatchNorm1d(DIM))
    n1[1].eval()  # frozen by hand
    ps.lift((n1, nn.Linear(DIM, CLASSES)), probe=X)
    assert n1.training
    assert not n1[1].training


def test_a_seam_of_several_axes() -> None:
    """An image at the seam: prototypes are flat, N2 gets its shape back."""
    n1 = nn.Conv2d(1, 2, 3)
    n2 = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, CLASSES))
    x = torch.randn(16, 1, 6, 6)
    net = ps.lift((n1, n2), probe=x, init="random")
    assert (net.dim, net.seam_shape) == (32, (2, 4, 4))
    assert net.embed(x).shape == (16, 32)
    terms = net(x, Y)
    terms.total.backward()
    assert net.n2[0].weight.grad is not None
    assert torch.equal(net.head(net.embed(x)), net(x))
    assert torch.equal(net.deploy()(x), net(x))


def test_cutting_behind_any_layer() -> None:
    model = network()
    net = ps.lift(model, at="0", probe=X, init="random")
    assert (net.dim, net.num_classes) == (HIDDEN, CLASSES)
    assert torch.equal(net(X), model(X))
    step(net, sgd(net), X, Y)
    assert not torch.equal(net(X), model(X))  # a copy was lifted
    state = torch.get_rng_state()
    guessed = ps.lift(model, at="1")  # the input is guessed, without touching the caller's draws
    assert (guessed.dim, guessed.num_classes) == (HIDDEN, CLASSES)
    assert torch.equal(torch.get_rng_state(), state)


class HeadFirst(nn.Module):
    """Its classifier was registered before the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.hidden: bool = False

    def forward(self, x: Tensor, *needed: Tensor) -> Tensor:
        if self.hidden:
            x = x + needed[0]
        return self.head(self.body(x))


@pytest.mark.parametrize("probe", [None, X])
def test_the_classifier_is_the_layer_whose_output_the_model_gives(probe: Tensor | None) -> None:
    net = ps.lift(HeadFirst(), at="head", dim=DIM, probe=probe)
    assert (net.seam_layer, net.dim, net.num_classes) == ("head", DIM, CLASSES)
    net.initialize(batches())
    inner = ps.lift(HeadFirst(), at="body.0", probe=probe)  # the last Linear by name, and not the classifier
    assert (inner.seam_layer, inner.dim, inner.num_classes) == (None, HIDDEN, CLASSES)
    with pytest.raises(
        ValueError, match=r"behind 'body\.0' is as wide as that layer's output: leave dim out"
    ):
        ps.lift(HeadFirst(), at="body.0", dim=DIM, probe=probe)


def test_the_classifier_of_a_model_whose_input_nobody_can_guess() -> None:
    model = HeadFirst()
    model.hidden = True
    assert ps.lift(model, at="head", dim=DIM).seam_layer == "head"
    with pytest.raises(ps.SplitError, match="pass a batch of inputs, probe=x"):
        ps.lift(model, at="head")
