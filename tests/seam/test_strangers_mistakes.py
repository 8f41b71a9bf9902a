"""Mistakes that strangers made with the library, each of which went on in silence or ended in a riddle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import protoseam as ps

CLASSES = 3


def blobs(n: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % CLASSES
    return torch.eye(8)[y] * 3 + torch.randn(n, 8, generator=generator), y


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, CLASSES))


def train(
    net: ps.Lifted,
    loader: Any,
    epochs: int = 4,
    then: Callable[[ps.Lifted], Any] = lambda net: None,
    model: nn.Module | None = None,
) -> None:
    """The README's loop; ``then`` ends each epoch, and ``model`` is trained in the network's place."""
    optimizer = torch.optim.AdamW(net.param_groups(lr=1e-3) if model is None else model.parameters())
    for _ in net.epochs(loader, epochs):
        for x, y in loader:
            optimizer.zero_grad()
            net.objective(x, y).total.backward()
            optimizer.step()
        then(net)


def lifted(model: nn.Module | None = None, **options: Any) -> ps.Lifted:
    return ps.lift(network() if model is None else model, num_classes=CLASSES, dim=4, **options)


@pytest.fixture
def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*blobs()), 10, shuffle=True, generator=torch.Generator().manual_seed(1))


def test_a_batchnorm_that_trains_in_eval_mode_is_swept_in_eval_mode(loader: DataLoader[Any]) -> None:
    """It counts no batch, but the last step must see the features that the network gives."""
    norm = nn.BatchNorm1d(16)
    model = network(norm)
    norm.eval()
    norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    norm.running_var.fill_(9.0)  # type: ignore[union-attr]
    net = lifted(model)
    body, seen = net.n1[:-1], []
    net.n1[-1].register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    net.n1.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    net.initialize(loader)
    x, h = seen[:2]
    assert torch.equal(h, body(x))
    train(net, loader, 1)
    x, h = seen[-2:]
    assert torch.equal(h, body(x))


def test_a_model_in_eval_mode_is_lifted_in_train_mode() -> None:
    assert lifted(network(nn.Dropout(0.5)).eval()).n1.get_submodule("1").training
    frozen = network(nn.BatchNorm1d(16))
    frozen[1].eval()  # on purpose: the model as a whole is in train mode
    assert not lifted(frozen).n1.get_submodule("1").training


def test_steps_in_eval_mode_are_told_once(loader: DataLoader[Any]) -> None:
    with pytest.warns(ps.SeamWarning, match=r"eval mode.*net\.train\(\)") as told:
        train(lifted(), loader, then=lambda net: net.eval())
    assert len([w for w in told if "eval mode" in str(w.message)]) == 1


def test_a_validation_loss_in_eval_mode_is_no_step(loader: DataLoader[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(lifted(), loader, then=lambda net: (net.eval().objective(*blobs()), net.train()))


def test_batches_in_which_two_parts_look_like_labels_are_told() -> None:
    x, y = blobs()
    group = torch.arange(len(y)) // 2 % CLASSES
    with pytest.warns(ps.SeamWarning, match=r"3 parts, and not only the second but also part 3"):
        lifted().initialize(DataLoader(TensorDataset(x, group, y), 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lifted().initialize(DataLoader(TensorDataset(x, y, torch.arange(len(y))), 10, shuffle=True))


@pytest.mark.parametrize(
    "second", [torch.randn(120, 8), torch.rand(120), torch.ones(120, 2, dtype=torch.bool)]
)
def test_batches_whose_second_part_is_no_label_are_refused(second: Tensor) -> None:
    x, y = blobs()
    with pytest.raises(ps.ProtoSeamError, match=f"second of the 3 parts.*{second.dtype}"):
        lifted().initialize(DataLoader(TensorDataset(x, second, y), 10))


def test_classes_without_a_sample_name_the_part_that_was_read() -> None:
    x, y = blobs()
    group = torch.zeros_like(y)
    with pytest.raises(
        ps.ArgumentError, match=r"classes 1, 2 have no sample.*second of the 3 parts of a batch$"
    ):
        lifted().initialize(DataLoader(TensorDataset(x, group, y), 10))
    with pytest.raises(ps.ArgumentError, match=r"init='random'$"):
        lifted().initialize(DataLoader(TensorDataset(x, group), 10))


def test_a_dict_of_loaders_is_named(loader: DataLoader[Any]) -> None:
    with pytest.raises(TypeError, match=r"initialize got a dict with the keys 'train', 'val', not a loader"):
        next(iter(lifted().epochs({"train": loader, "val": loader}, 3)))


def test_batches_that_begin_with_the_label_are_told_the_order() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.fc = nn.EmbeddingBag(20, 8), nn.Linear(8, CLASSES)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.fc(self.bag(text, offsets))

    text, offsets, y = torch.randint(20, (24,)), torch.arange(0, 24, 2), torch.arange(12) % CLASSES
    with pytest.raises(
        ps.ArgumentTypeError, match=r"'offsets'.*the first part is the inputs and the second the l"
    ):
        lifted(Bag()).initialize([(y, text, offsets)])
    net = lifted(Bag(), init="random")
    assert net.objective({"text": text, "offsets": offsets}, y).total.isfinite()


def test_labels_as_arrays_are_labels() -> None:
    x, y = blobs()
    index = torch.arange(10)
    lifted().initialize([(x[i : i + 10], y[i : i + 10].numpy(), index) for i in range(0, 120, 10)])


WRONG: dict[str, tuple[Any, str]] = {
    "class_weights": (torch.tensor([1.0, 5.0, 20.0]), "'uniform', 'frequency'"),
    "refit": ("no", "True or False"),
    "draws": (1.5, "a whole number"),
    "alpha": ("2", "a number"),
    "label_smoothing": (True, "a number"),
    "antithetic": (1, "True or False"),
    "init": (np.zeros((3, 4)), "tensor, got a ndarray"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_the_wrong_kind_is_refused(name: str) -> None:
    value, words = WRONG[name]
    with pytest.raises(TypeError, match=f"{name} must be .*{words}"):
        lifted(**{name: value})
    lifted(draws=np.int64(2), alpha=np.float32(2), init=torch.zeros(3, 4))


UNKNOWN = {
    "rho_max": r"schedule=ps\.SineAnneal\(rho_max=…\)",
    "floor": r"covariance=ps\.RunningCovariance\(floor=…\)",
    "variance": r"covariance=ps\.IsotropicCovariance\(variance=…\)",
    "seam_lr": r"net\.param_groups\(seam_lr=…\)",
    "label_smothing": r"did you mean 'label_smoothing'\?",
    "device": r"\. help\(ps\.lift\)",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_keyword_that_is_no_option_is_refused(name: str) -> None:
    halves = nn.Linear(8, 4), nn.Linear(4, CLASSES)
    for lift in (lifted, lambda **options: ps.lift(halves, **options)):
        with pytest.raises(ps.ArgumentTypeError, match=f"no option '{name}'.*{UNKNOWN[name]}"):
            lift(**{name: 0.5})
    with pytest.raises(TypeError, match=r"'rho_max' .*, 'antithetik'"):
        ps.Lifted(*halves, num_classes=3, dim=4, rho_max=4, antithetik=True)  # type: ignore[call-arg]


def test_a_lifted_network_is_not_lifted_again() -> None:
    with pytest.raises(ps.ProtoSeamError, match=r"lifted already.*net\.deploy"):
        ps.lift(lifted(), num_classes=CLASSES)


def test_what_is_no_loader_is_named(loader: DataLoader[Any]) -> None:
    with pytest.raises(ps.ProtoSeamError, match=r"single samples.*DataLoader"):
        lifted().initialize(TensorDataset(*blobs()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the data first"):
        lifted().epochs(5, loader)  # type: ignore[arg-type]


def test_logits_per_token_are_refused(loader: DataLoader[Any]) -> None:
    x, y = torch.randn(40, 5, 8), torch.arange(40) % CLASSES
    with pytest.raises(ps.ProtoSeamError, match="one label per sample"):
        lifted().initialize(DataLoader(TensorDataset(x, y), 10))


def test_labels_among_the_inputs_do_not_reach_the_network(loader: DataLoader[Any]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, CLASSES)

        def forward(self, values: Tensor, labels: Tensor | None = None) -> Tensor:
            out: Tensor = self.fc(values)
            return out if labels is None else nn.functional.cross_entropy(out.view(-1, CLASSES), labels)

    x, y = blobs()
    net = lifted(Named(), init="random")
    batch = {"values": x, "labels": y}
    assert net.objective(batch, y).total.isfinite()
    assert torch.equal(net(batch), net({"values": x}))


def test_the_terms_say_which_of_them_to_train_by() -> None:
    net = lifted(init="random")
    with pytest.raises(ps.SeamError, match=r"\.total\.backward\(\)"):
        net.objective(*blobs()).backward()


def test_divergence_without_limits_names_them(loader: DataLoader[Any]) -> None:
    def diverge(groups: Any, net: ps.Lifted) -> None:
        optimizer = torch.optim.SGD(groups, lr=5.0, momentum=0.9)
        for _ in net.epochs(loader, 20):
            for x, y in loader:
                terms = net.objective(x, y)
                optimizer.zero_grad()
                (terms.consensus + terms.classification + terms.repulsion).backward()
                optimizer.step()

    net = lifted()
    with pytest.raises(ps.SeamError, match=r"limits act in the backward of net\.objective"):
        diverge(net.param_groups(lr=5.0), net)
    net = lifted()
    with pytest.raises(ps.SeamError, match=r"build the optimizer from net\.param_groups"):
        diverge(net.parameters(), net)


@pytest.mark.filterwarnings("ignore:ρ jumps")
def test_an_epoch_without_a_step_says_only_that(loader: DataLoader[Any]) -> None:
    model = network()
    with pytest.warns(ps.SeamWarning, match="moved neither") as told:
        train(lifted(model), loader, model=model)
    assert not any("N2 classifies" in str(w.message) for w in told)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "seam_lr", "body_lr", "prototype_lr"])
def test_negative_rates_are_refused(name: str) -> None:
    with pytest.raises(ps.ProtoSeamError, match=f"{name} must not be negative, got -1"):
        lifted().param_groups(**{"lr": 0.1, name: -1.0})  # type: ignore[arg-type]
