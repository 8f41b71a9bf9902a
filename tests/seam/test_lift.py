"""From a model, or two halves, to a lifted module; and every way to be told no."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, HIDDEN, Noisy, batches, network, sgd, step

import protoseam as ps

X, Y = batches()[0]


class Own(nn.Module):
    """A user's model: containers, functions between layers, a classifier without a bias."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.head = nn.ModuleDict(
            {"norm": nn.LayerNorm(HIDDEN), "out": nn.Linear(HIDDEN, classes, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head["out"](self.head["norm"](x))


class SoftmaxLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).softmax(1)


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(FEATURES, DIM), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Tokens(nn.Module):
    """Its last Linear gives one output a token."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, None].expand(-1, 5, -1))


class EndsIn(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(FEATURES, DIM), how
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        return {
            "module": lambda: self.relu(z),
            "function": lambda: F.relu(z),
            "method": lambda: z.relu(),
            "method with a minimum": lambda: z.clamp_min(0.0),
            "then flattened": lambda: torch.flatten(F.gelu(z), 1),
            "then dropped": lambda: F.dropout(input=F.silu(z), p=0.1),
            "then reshaped": lambda: torch.sigmoid(z).view(-1, DIM),
            "tanh": lambda: z.tanh(),
            "sum": lambda: F.relu(z) + z,
        }[self.how]()


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
    assert (net.alpha, net.draws, net.antithetic, net.class_weights) == (2.0, 1, False, "uniform")
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


# ---------------------------------------------------------------------- refusals


def test_a_cut_with_nothing_behind_it() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.LayerNorm(CLASSES))
    with pytest.raises(ValueError, match="nothing that could learn lies behind '1'"):
        ps.lift(model, at="1", probe=X)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.linear(F.normalize(x), F.normalize(self.weight), self.bias)


class Scaled(nn.Linear):
    """Plain at first, and more once it is trained."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def _hooked() -> nn.Module:
    model = network()
    next(m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)).register_forward_hook(print)
    return model


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (nn.Sequential(nn.Linear(FEATURES, HIDDEN), Cosine(HIDDEN, CLASSES)), "what Cosine computes beyond"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))),
            "what ParametrizedLinear computes beyond",
        ),
        (nn.Sequential(Scaled(FEATURES, CLASSES)), "what Scaled computes beyond"),
        (_hooked(), "its hooks"),
        (_tied(), r"the weight it shares with '0\.weight'"),
    ],
)
def test_what_a_plain_linear_cannot_replace_is_told(model: nn.Module, lost: str) -> None:
    with pytest.warns(ps.SeamWarning, match=f"Lost with it: {lost}.*ps.lift"):
        ps.lift(model, dim=DIM)


def test_a_last_layer_without_sizes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LazyLinear(CLASSES))
    with pytest.raises(ValueError, match=r"'1', has no sizes yet .*: run one batch through the model"):
        ps.lift(model, dim=DIM)
    model(X)
    ps.lift(model, dim=DIM).initialize(batches())


def test_halves_that_share_a_parameter() -> None:
    shared = nn.Linear(FEATURES, FEATURES)
    halves = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(FEATURES, CLASSES))
    with pytest.raises(ValueError, match=r"N2's '0\.weight' is also a parameter of N1: .* over the seam"):
        ps.lift(halves, init="random")


def test_layers_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"Own has no layer named 'head\.outt'\. Did you mean 'head\.out'"):
        ps.lift(Own(), at="head.outt")
    with pytest.raises(
        ValueError, match=r"Noisy has no layer named 'zzzz'\. It has 'body', 'fc'\? dict\(model"
    ):
        ps.lift(Noisy(), at="zzzz")
    with pytest.raises(ValueError, match="has no layer named ''"):
        ps.lift(Noisy(), at="")


def test_no_linear_to_lift() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear to lift.*ps\.split"):
        ps.lift(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()))


def test_another_class_count() -> None:
    with pytest.raises(
        ValueError, match=r"num_classes=9, but the last Linear of Sequential, '2', has 4 .*at='2'"
    ):
        ps.lift(network(), num_classes=9)
    with pytest.raises(ValueError, match="num_classes=9, but N2 has 4 outputs"):
        ps.lift((nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)), num_classes=9)
    with pytest.raises(ValueError, match=rf"dim=7, but N1 gives {DIM} numbers a sample"):
        ps.lift((nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)), dim=7, probe=X)


def test_sizes_nobody_can_tell() -> None:
    class Opaque(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z[:, :CLASSES]

    for options in ({}, {"dim": FEATURES}, {"num_classes": CLASSES}):
        with pytest.raises(ValueError, match=r"pass probe=x .*or dim=… and num_classes=…"):
            ps.lift((nn.Identity(), Opaque()), **options)
    assert ps.lift((nn.Identity(), Opaque()), dim=FEATURES, num_classes=CLASSES).dim == FEATURES


def test_arguments_that_contradict_each_other() -> None:
    halves = (nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES))
    with pytest.raises(ValueError, match="at='0' says where to cut a whole model, but two halves"):
        ps.lift(halves, at="0")
    with pytest.raises(
        ValueError, match="the seam behind '0' is as wide as that layer's output: leave dim out"
    ):
        ps.lift(network(), at="0", dim=DIM, probe=X)
    for wrong in ((halves[0],), (*halves, halves[0]), (halves[0], "head")):
        with pytest.raises(TypeError, match=r"two nn\.Modules"):
            ps.lift(wrong)  # type: ignore[arg-type]
    for options in ({"num_classes": 1, "at": "2"}, {"dim": 0}):
        with pytest.raises(ValueError, match="at least 2 classes and 1 dimension"):
            ps.lift(network(), **options)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.Softmax(1)])
def test_a_seam_after_a_relu_is_refused(activation: nn.Module) -> None:
    n1, n2 = nn.Sequential(nn.Linear(FEATURES, DIM), activation, nn.Dropout(0.1)), nn.Linear(DIM, CLASSES)
    name = type(activation).__name__
    with pytest.raises(ValueError, match=rf"right after {name}: .*non-negative orthant.*allow_relu=True"):
        ps.lift((n1, n2))
    assert ps.lift((n1, n2), allow_relu=True).dim == DIM


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ("module", "ReLU"),
        ("function", "relu"),
        ("method", "relu"),
        ("method with a minimum", "clamp_min"),
        ("then flattened", "gelu"),
        ("then dropped", "silu"),
        ("then reshaped", "sigmoid"),
        ("tanh", None),
        ("sum", None),
    ],
)
def test_relus_inside_a_forward_are_found(how: str, refused: str | None) -> None:
    halves = (EndsIn(how), nn.Linear(DIM, CLASSES))
    if refused is None:
        assert ps.lift(halves).dim == DIM
    else:
        with pytest.raises(ValueError, match=f"right after {refused}"):
            ps.lift(halves)


def test_halves_without_an_activation_in_sight() -> None:
    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if x.sum() > 0 else x

    for n1 in (nn.Identity(), nn.Flatten(), nn.Sequential(), nn.Sequential(nn.Dropout()), Untraceable()):
        assert ps.lift((n1, nn.Linear(DIM, CLASSES))).dim == DIM


def test_a_cut_behind_a_relu_is_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    with pytest.raises(ValueError, match="right after ReLU"):
        ps.lift(model, at="1", probe=X)
    assert ps.lift(model, at="1", probe=X, allow_relu=True).dim == HIDDEN


def test_embeddings_that_are_never_negative() -> None:
    n1 = nn.Sequential(nn.Linear(FEATURES, DIM), nn.ReLU())
    net = ps.lift((n1, nn.Linear(DIM, CLASSES)), allow_relu=True)
    with pytest.warns(ps.SeamWarning, match="no embedding has a negative coordinate"):
        net.initialize(batches())
    net.refresh(batches())  # said once
    net = ps.lift((n1, nn.Linear(DIM, CLASSES)), allow_relu=True, init="random")
    with pytest.warns(ps.SeamWarning, match="no embedding has a negative coordinate"):
        net.refresh(batches())  # nobody had to call initialize


def test_something_behind_the_last_linear() -> None:
    net = ps.lift(SoftmaxLast(), dim=DIM, init="random")
    with pytest.raises(
        ps.SeamError, match=r"output of SoftmaxLast is not the output of its layer 'fc': .*softmax"
    ):
        net(X, Y)
    with pytest.raises(ps.SeamError, match="layer 'fc'"):
        ps.lift(SoftmaxLast(), dim=DIM).initialize(batches())
    with pytest.raises(ps.SeamError, match=r"layer 'fc' \(which was not called\)"):
        ps.lift(NeverCalled(), dim=DIM, init="random")(X, Y)


def test_an_output_of_another_shape() -> None:
    with pytest.raises(ps.SeamError, match=rf"N1 returned shape \(16, 5, {DIM}\) where \(batch, {DIM}\)"):
        ps.lift(Tokens(), dim=DIM, init="random")(X, Y)
