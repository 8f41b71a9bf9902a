"""Cutting a model at a named layer, proved on a probe; or the reason why not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CLASSES, FEATURES, HIDDEN, Noisy, batches, network

import protoseam as ps

X = batches()[0][0]


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out(h + self.second(h))


class Tied(nn.Module):
    """One weight on both sides; ``how`` the forward reaches it the second time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.middle = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = self.first if how == "module" else nn.Linear(FEATURES, FEATURES)
        if how != "module":
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.first.weight) if self.how == "function twice" else self.first(x)
        h = self.middle(h)
        if self.how.startswith("function"):
            return F.linear(h, self.first.weight if self.how == "function twice" else self.last.weight)
        return self.last(h)


class Fetching(nn.Module):
    """Parameters and constants read directly, those of the second half before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 2.0))
        self.register_buffer("shift", torch.ones(HIDDEN))
        self.weight = nn.Parameter(torch.randn(3, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        late = self.weight
        h = self.body(x) * self.scale + self.shift
        return F.linear(torch.tanh(h) + self.shift, self.head.weight) @ late.T


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h if h.sum() > 0 else -h)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x), training=self.training))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(FEATURES, FEATURES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x))


def test_halves_of_a_sequential_model() -> None:
    model = network()
    n1, n2 = ps.split(model, at="0", probe=X)
    assert torch.equal(n2(n1(X)), model(X))
    assert torch.equal(n1(X), model[0](X))
    assert {id(p) for p in n1.parameters()} == {id(p) for p in model[0].parameters()}
    assert {id(p) for p in n2.parameters()} == {id(p) for p in model[2].parameters()}


@pytest.mark.parametrize("at", ["layer4", "avgpool", "layer2.1"])
def test_halves_of_a_resnet(at: str) -> None:
    model = pytest.importorskip("torchvision.models").resnet18(num_classes=CLASSES)
    x = torch.randn(2, 3, 32, 32)
    state = copy.deepcopy(model.state_dict())
    n1, n2 = ps.split(model, at=at, probe=x)
    model.eval(), n1.eval(), n2.eval()
    assert torch.equal(n2(n1(x)), model(x))
    assert (
        n1(x).shape == {"layer4": (2, 512, 1, 1), "avgpool": (2, 512, 1, 1), "layer2.1": (2, 128, 4, 4)}[at]
    )
    assert len([*n1.parameters(), *n2.parameters()]) == len([*model.parameters()])
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_lifting_behind_a_resnets_pooling() -> None:
    model = pytest.importorskip("torchvision.models").resnet18(num_classes=CLASSES)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8) % CLASSES
    with pytest.raises(ValueError, match="right after ReLU"):
        ps.lift(model, at="layer4", probe=x)
    net = ps.lift(model, at="avgpool", probe=x)
    assert (net.dim, net.seam_shape) == (512, (512, 1, 1))
    with pytest.warns(ps.SeamWarning) as warned:
        net.initialize([(x, y)])
    assert {str(w.message)[:20] for w in warned} == {"no embedding has a n", "class 0 has 2 sample"}
    net(x, y).total.backward()
    net.eval()
    assert torch.equal(net.deploy()(x), net(x))


def test_a_layer_inside_a_block() -> None:
    model = Noisy().eval()
    n1, n2 = ps.split(model, at="body.1", probe=X)
    assert torch.equal(n2(n1(X)), model(X))
    assert torch.equal(n1(X), model.body[1](model.body[0](X)))


def test_modes_are_left_alone() -> None:
    model = Noisy()
    model.body[1].eval()  # frozen by hand
    n1, n2 = ps.split(model, at="body.2", probe=X)
    assert model.training
    assert n1.training
    assert n2.training
    assert not model.body[1].training
    assert model.body[3].training


def test_each_half_fetches_its_own() -> None:
    model = Fetching()
    n1, n2 = ps.split(model, at="body", probe=X)
    assert torch.equal(n2(n1(X)), model(X))
    assert {id(p) for p in n1.parameters()} == {id(p) for p in model.body.parameters()}
    assert id(model.weight) in {id(p) for p in n2.parameters()}
    assert not {id(p) for p in n1.parameters()} & {id(p) for p in n2.parameters()}


def test_a_skip_connection_across_the_cut() -> None:
    with pytest.raises(
        ps.SplitError, match=r"'first', computed before it, is read again by 'add' \(a skip connection"
    ):
        ps.split(Skip(), at="second", probe=X)
    n1, n2 = ps.split(Skip(), at="out", probe=X)
    assert n2(n1(X)).shape == (len(X), CLASSES)
    model = pytest.importorskip("torchvision.models").resnet18(num_classes=CLASSES)
    with pytest.raises(ps.SplitError, match="Cut where only one value passes"):
        ps.split(model, at="layer4.0.conv1", probe=torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("how", ["module", "weight", "function", "function twice"])
def test_weights_tied_across_the_cut(how: str) -> None:
    with pytest.raises(
        ps.SplitError, match=r"both halves would use 'first\.\w+': parameters tied across the seam"
    ):
        ps.split(Tied(how), at="middle", probe=X)


def test_a_forward_that_depends_on_values() -> None:
    with pytest.raises(
        ps.SplitError, match=r"Untraceable cannot be traced \(TraceError.*ps\.lift\(\(n1, n2\)\)"
    ):
        ps.split(Untraceable(), at="body", probe=X)


def test_a_forward_that_depends_on_the_mode() -> None:
    with pytest.raises(ps.SplitError, match=r"Dropping differs between train\(\) and eval\(\)"):
        ps.split(Dropping(), at="body", probe=X)


def test_a_layer_that_does_not_run_exactly_once() -> None:
    with pytest.raises(ps.SplitError, match="layer 'body' of Twice is called more than once"):
        ps.split(Twice(), at="body", probe=X)
    with pytest.raises(ps.SplitError, match="layer 'unused' of Twice is not called as a whole"):
        ps.split(Twice(), at="unused", probe=X)


def test_what_tracing_cannot_see_the_probe_does() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * (1.0 if torch.is_grad_enabled() else 2.0)

    with pytest.raises(
        ps.SplitError, match="cutting Hidden at 'body' does not give the same output on the probe"
    ):
        ps.split(Hidden(), at="body", probe=X)


def test_layers_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"has no layer named 'bodi'\. Did you mean 'body'"):
        ps.split(Twice(), at="bodi", probe=X)


def test_the_probe_is_guessed_where_the_first_layer_shows_it() -> None:
    model = network()
    n1, n2 = ps.split(model, at="0")
    assert torch.equal(n2(n1(X)), model(X))
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    n1, n2 = ps.split(images.double(), at="1")
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    assert torch.equal(n2(n1(x)), images(x))
    digits = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, CLASSES))
    assert ps.split(digits, at="1")[0](torch.randn(1, 1, 28, 28)).shape == (1, 2 * 26 * 26)


@pytest.mark.parametrize("forward", ["another shape", "two inputs", "no layer to read it off"])
def test_the_probe_is_asked_for_elsewhere(forward: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3) if forward == "no layer to read it off" else nn.Linear(3, 3)

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            if forward == "two inputs":
                return self.embed(x) + more[0]
            return self.embed(x.reshape(-1, 4, 3)) if forward == "another shape" else self.embed(x)

    with pytest.raises(ps.SplitError, match="cannot guess an input for Odd: pass a batch of inputs, probe=x"):
        ps.split(Odd(), at="embed")
