"""What a model may take and give: inputs in one argument, a tensor of logits, and words for everything else."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from toys import CLASSES, FEATURES, batches, lifted, network

import protoseam as ps
from protoseam.seam.passes import _moved

X, Y = batches()[0]
DATA = batches()


def test_a_head_that_reads_the_classifier_again_is_refused_in_words() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Conv1d(1, 3, 4)  # not a Linear, so the lift leaves it as it is
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.head(x) + self.other(x[:, None]).squeeze(2)) / 2

    net = ps.lift(TwoHeads(), num_classes=3, dim=8, init="random")
    with pytest.raises(ps.SeamError, match="two heads"):
        net(torch.randn(5, 4), torch.arange(5) % 3)


def test_a_wrong_input_is_not_blamed_on_the_seam() -> None:
    net = ps.lift(network(), dim=2, init="random")
    x, y = DATA[0]
    with pytest.raises(RuntimeError, match="dtype") as error:
        net.objective(x.double(), y)
    assert not isinstance(error.value, ps.SeamError)


def test_a_model_that_returns_a_dict_is_told_to_be_wrapped() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.classifier(x)}

    told = pytest.raises(ps.SeamError, match="returns a dict, not a tensor of logits: wrap it")
    with told:
        ps.lift(Named(), dim=2).initialize(DATA)
    with told:
        ps.lift(Named(), at="classifier", dim=2, probe=X)
    with told:
        ps.lift(Named(), dim=2).eval()(X)
    with told:
        ps.split(nn.Sequential(nn.Linear(FEATURES, FEATURES), Named()), "0", probe=X)


def test_a_model_that_returns_something_else_when_training() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aux, self.head = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            logits = self.head(x)
            return (logits, self.aux(x)) if self.training else logits

    net = ps.lift(TwoHeads(), dim=2)
    net.initialize(DATA)
    with pytest.raises(
        ps.SeamError, match="TwoHeads returns, when training, a tuple, not a tensor of logits"
    ):
        net.train().objective(X, Y)


def test_several_inputs_for_a_model_that_takes_them_apart() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.head(a + b)

    net = ps.lift(Apart(), dim=2, init="random")
    named = net.objective({"a": X, "b": X}, Y, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net({"a": X, "b": X}), net.n2(net.n1(X, X)))
    assert named.total.isfinite()
    with pytest.raises(TypeError, match=r"Apart .*dict with the keys 'a', 'c'"):
        ps.lift(Apart(), dim=2, init="random").objective({"a": X, "c": X}, Y)


def test_inputs_may_come_in_dicts_and_tuples() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Any) -> torch.Tensor:
            a, b = x.values() if isinstance(x, dict) else x
            return self.head(a + b)

    plain = ps.lift(Sum(), dim=2)
    plain.initialize([((x, x), y) for x, y in DATA])
    named = ps.lift(Sum(), dim=2)
    named.load_state_dict(plain.state_dict() | {"ready": torch.tensor(False)})
    named.initialize([({"a": x, "b": x}, y) for x, y in DATA])
    assert torch.equal(named.prototypes, plain.prototypes)


@dataclasses.dataclass
class Graph:
    """As the batches of graph libraries are: tensors, and a ``to`` that moves them."""

    x: torch.Tensor
    names: list[str]

    def to(self, device: Any) -> Graph:
        return Graph(self.x.to(device), self.names)


def packed(x: torch.Tensor) -> PackedSequence:
    lengths = torch.arange(len(x)) % 3 + 1  # in no order, so that it holds indices too
    return pack_padded_sequence(x[:, None].expand(-1, 3, -1), lengths, batch_first=True, enforce_sorted=False)


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "packed": (packed, lambda x: pad_packed_sequence(x, batch_first=True)[0][:, 0]),
    "packed in order": (
        lambda x: pack_sequence([row[None] for row in x]),  # None where the others have indices
        lambda x: pad_packed_sequence(x, batch_first=True)[0][:, 0],
    ),
    "object": (lambda x: Graph(x, ["a"] * len(x)), lambda x: x.x),
    "dict": (lambda x: {"x": x, "mask": None, "name": "a", "of": {"y": x.numpy()}}, lambda x: x["x"]),
    "list": (lambda x: [x, None, ["a"] * len(x)], lambda x: x[0]),
    "strings": (
        lambda x: [" ".join(map(str, row.tolist())) for row in x],
        lambda x: torch.tensor([[float(word) for word in row.split()] for row in x]),
    ),
    "array of strings": (
        lambda x: np.array(x.tolist()).astype(str),
        lambda x: torch.tensor(x.astype("float32")),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_need_not_be_tensors(kind: str) -> None:
    """The passes over the data take what the objective takes."""
    wrap, read = KINDS[kind]

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Any) -> torch.Tensor:
            return self.body(read(x))

    net = lifted(Reads(), init="fsinit")
    data = [(wrap(x), y) for x, y in DATA]
    net.initialize(data)
    assert net.objective(*data[0]).total.isfinite()
    net.refresh(data)
    plain = lifted(network(), init="fsinit")
    plain.n1.load_state_dict(net.n1.body.state_dict())
    plain.initialize(DATA)
    assert torch.allclose(net.prototypes, plain.prototypes, atol=1e-6)


def test_inputs_are_moved_as_they_ask_to_be() -> None:
    meta, x = torch.device("meta"), torch.randn(4, 6)
    moved = _moved({"in": [packed(x), Graph(x, ["a"])], "lengths": x.numpy(), "none": None, "id": "a"}, meta)
    sequence, graph = moved["in"]
    assert isinstance(sequence, PackedSequence)
    assert sequence.data.is_meta
    assert not sequence.batch_sizes.is_meta  # as torch's recurrent layers want it
    assert graph.x.is_meta
    assert moved["lengths"].is_meta
    assert (moved["none"], moved["id"]) == (None, "a")


def test_the_deployed_network_can_be_traced_before_it_is_deployed() -> None:
    net = lifted().eval()
    traced = torch.fx.symbolic_trace(net, concrete_args={"y": None, "generator": None})
    assert torch.equal(traced(X), net(X))


@pytest.mark.parametrize(("pure", "warns"), [(2, False), (3, True), (4, True)])
def test_batches_of_one_class_are_warned_about_when_they_are_most(pure: int, warns: bool) -> None:
    net = ps.lift(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)), dim=2)
    labels = [torch.full((8,), c) for c in range(pure)] + [torch.arange(8) % 4] * (4 - pure)
    loader = [(torch.randn(8, 4), y) for y in labels]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.initialize(loader)
    assert any("most batches hold one class only" in str(w.message) for w in caught) == warns


def test_inputs_of_two_sizes_are_named_in_a_pass() -> None:
    net = lifted()
    x, y = DATA[0]
    with pytest.raises(
        ValueError, match=r"took inputs of shape .* but fails on .*: bring all of them to one size"
    ):
        net.initialize([(x, y), (x[:, :-1], y)])


@pytest.mark.parametrize("scale", [-0.1, float("inf"), float("nan")])
def test_the_weight_of_the_repulsion_is_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=r"repulsion_scale .*finite.*0"):
        lifted(repulsion_scale=scale)
