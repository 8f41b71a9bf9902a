"""Every way to be told no by lift, and what is told beside a yes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, HIDDEN, Noisy, Own, batches, network

import protoseam as ps

X, Y = batches()[0]


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
    with pytest.raises(ValueError, match=r"has no layer named ''\. It has 'body', 'fc'\?"):
        ps.lift(Noisy(), at="")


def test_a_linear_is_a_layer_without_a_name() -> None:
    with pytest.raises(ValueError, match="say at='' to replace"):
        ps.lift(nn.Linear(FEATURES, 5), num_classes=CLASSES)
    net = ps.lift(nn.Linear(FEATURES, 5), num_classes=CLASSES, dim=DIM, at="")
    net.initialize(batches())
    assert net.deploy(fold=True)(X).shape == (len(X), CLASSES)


def test_no_linear_to_lift() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 5, 6), nn.Flatten()), torch.randn(2, 1, 8, 8)
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear to lift.*") as caught:
        ps.lift(model)
    # the advice works as it is printed, but for the layer's name
    assert "ps.lift(model, at='layer name', probe=x)" in str(caught.value)
    assert ps.lift(model, at="0", probe=x)(x).shape == (2, 5)
    assert "ps.lift((n1, n2), probe=x)" in str(caught.value)
    assert ps.lift((model[:1], model[1:]), probe=x)(x).shape == (2, 5)


@pytest.mark.parametrize("at", [None, "2"])
def test_a_model_without_values_is_refused(at: str | None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' of Sequential is on the meta device"):
        ps.lift(model, at=at)
    with pytest.raises(ValueError, match="is on the meta device"):
        ps.lift((model[:1], model[1:]))


@pytest.mark.parametrize("index", [torch.arange(12), torch.arange(12.0)])
def test_batches_that_begin_with_an_index_are_refused(index: torch.Tensor) -> None:
    net = ps.lift(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), dim=2)
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    with pytest.raises(TypeError, match=r"begin with \(inputs, labels\), .* an index"):
        net.initialize([(index, x, y)])
    net.initialize([(x, y, index)])  # what follows the labels is nobody's business


_ONE_SIDED = ["ReLU", "ReLU6", "Sigmoid", "Hardsigmoid", "Softplus", "Softmax", "Threshold"]
_ONE_SIDED += ["GELU", "SiLU", "Hardswish", "Mish"]


@pytest.mark.parametrize("name", _ONE_SIDED)
def test_every_one_sided_activation_before_the_seam_is_refused(name: str) -> None:
    tail = getattr(nn, name)(*{"Softmax": (1,), "Threshold": (0.0, 0.0)}.get(name, ()))
    with pytest.raises(ValueError, match=name):
        ps.lift((nn.Sequential(nn.Linear(4, 8), tail), nn.Linear(8, 3)))


@pytest.mark.parametrize("name", ["relu6", "hardsigmoid", "softplus", "gelu", "silu", "hardswish", "mish"])
def test_every_one_sided_function_before_the_seam_is_refused(name: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(nn.functional, name)(self.fc(x))

    with pytest.raises(ValueError, match=name):
        ps.lift((Half(), nn.Linear(8, 3)))


def test_an_activation_behind_a_layer_that_cannot_be_traced_is_seen() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ValueError, match="ReLU"):
        ps.lift((nn.Sequential(nn.Linear(4, 8), Odd(), nn.ReLU()), nn.Linear(8, 3)), dim=8, num_classes=3)


def test_a_hook_before_the_last_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model[2].register_forward_pre_hook(lambda module, inputs: None)
    with pytest.warns(ps.SeamWarning, match="Lost with it: its hooks"):
        ps.lift(model)


def test_another_class_count() -> None:
    with pytest.raises(
        ValueError, match=r"num_classes=9, but the last Linear of Sequential, '2', has 4 .*at='2'"
    ):
        ps.lift(network(), num_classes=9)
    with pytest.raises(ValueError, match="num_classes=9, but N2 has 4 outputs"):
        ps.lift((nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)), num_classes=9)
    with pytest.raises(ValueError, match=rf"dim=7.* {DIM} numbers"):
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
    exact = ps.ExactCovariance()
    net = ps.lift((n1, nn.Linear(DIM, CLASSES)), allow_relu=True, init="random", covariance=exact)
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
