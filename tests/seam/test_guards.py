"""What goes wrong in lifted training is said in words; what goes right is left alone."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, DIM, FEATURES, Batch, batches, lifted, network, sgd, step

import protoseam as ps

X, Y = batches()[0]
DATA = batches()


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y + 1, f"0…3, but reach from 1 to {CLASSES}; they seem to start from 1: subtract 1"),
        (Y + 2, "but reach from 2 to 5; check num_classes"),
        (Y - 1, "but reach from -1 to 2; negative ones .* drop those"),
        (Y.float(), r"vector of class indices \(int64\), got torch\.float32 of shape \(16,\)"),
        (Y.bool(), r"got torch\.bool"),
        (Y.to(torch.uint8), r"got torch\.uint8 .*y\.long\(\)"),
        (
            Y[:, None],
            r"of shape \(16, 1\): pass y\.flatten\(\)\.long\(\)",
        ),  # argmax(1) would be class 0 for all
        (torch.eye(CLASSES)[Y].long(), r"of shape \(16, 4\): if they are one-hot, pass y\.argmax\(1\)"),
        (torch.eye(CLASSES).long()[Y], r"got torch\.int64 of shape \(16, 4\)"),
    ],
)
def test_labels(labels: Tensor, message: str) -> None:
    net = lifted()
    with pytest.raises(ValueError, match=message):
        net(X, labels)
    for sweep in (lifted(init="fsinit").initialize, net.refresh):
        with pytest.raises(ValueError, match=message):
            sweep([(X, labels)])


def test_as_many_labels_as_samples() -> None:
    net = lifted()
    for x, y in ((X, Y[:1]), (X[:1], Y)):
        message = f"{len(x)} samples but {len(y)} labels: give one label each"
        with pytest.raises(ValueError, match=message):
            net.objective(x, y)
        for sweep in (net.initialize, net.refresh):
            with pytest.raises(ValueError, match=message):
                sweep([(x, y)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "exact"}, r"an estimator such as ps.ExactCovariance\(.*got 'exact'"),
        ({"covariance": ps.ExactCovariance}, "an estimator such as"),
        ({"schedule": 16}, "a schedule such as .*got 16"),
        ({"num_classes": "10"}, "num_classes must be a whole number, got '10'"),
        ({"dim": 2.5}, "dim must be a whole number, got 2.5"),
        ({"draws": 0}, "draws .*at least 1, got 0"),
        ({"alpha": -1.0}, "alpha .*0.* got -1.0"),
        ({"repulsion_scale": float("nan")}, "repulsion_scale .*0.* got nan"),
        ({"schedule": lambda e, n: -1.0}, "gives ρ = -1.0 for epoch 1 of 2: ρ must be positive and finite"),
    ],
)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ps.lift(network(), **options)


def test_whole_numbers_of_other_libraries() -> None:
    net = ps.lift(network(), num_classes=np.int64(CLASSES), dim=torch.tensor(DIM))  # type: ignore[arg-type]
    assert (net.num_classes, net.dim) == (CLASSES, DIM)
    assert type(net.num_classes) is type(net.dim) is int


def test_only_models_are_lifted() -> None:
    with pytest.raises(TypeError, match=r"nn.Module\) or two halves .*got 'resnet'"):
        ps.lift("resnet")  # type: ignore[arg-type]


def test_labels_on_an_accelerator_are_checked_without_their_values() -> None:
    net = lifted().to("meta")
    with pytest.raises(ValueError, match="vector of class indices"):
        net(X.to("meta"), Y.float().to("meta"))


def test_labels_of_32_bits_and_empty_batches() -> None:
    net = lifted(covariance=ps.RunningCovariance("auto"))
    assert net(X, Y.int()).total.isfinite()
    from protoseam.seam.guards import check_labels

    check_labels(Y[:0], CLASSES)
    with pytest.raises(ValueError, match="the batch is empty"):
        net(X[:0], Y[:0])


def test_labels_that_are_no_tensor() -> None:
    net = lifted()
    with pytest.raises(
        TypeError, match=r"labels must be a tensor of class indices, got list: torch\.as_tensor"
    ):
        net.objective(X, Y.tolist())
    net.initialize([(x.numpy(), y.numpy()) for x, y in DATA])  # as some loaders give them
    assert net.class_count.sum() == sum(len(y) for _, y in DATA)


# ---------------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_embeddings_that_are_not_finite(value: float) -> None:
    x = X.clone()
    x[(Y == 1) | (Y == 3)] = value
    halves = nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)
    net = ps.lift(halves, init="random", covariance=ps.ExactCovariance())
    bad = int(((Y == 1) | (Y == 3)).sum())
    blame = rf"{bad} of 16 samples, class 1, 3\. .*lr·ρ"
    with pytest.raises(ps.SeamError, match=f"embeddings in the consensus term: {blame}"):
        net(x, Y)
    with pytest.raises(ps.SeamError, match=f"embeddings in refresh: {blame}"):
        net.refresh([(x, Y)])
    with pytest.raises(ps.SeamError, match="embeddings in initialize"):
        net.initialize([(x, Y)])


def test_a_batch_that_was_refused_leaves_no_trace() -> None:
    net = lifted(covariance=ps.RunningCovariance())
    x = X.clone()
    x[3] = torch.nan
    with pytest.raises(ps.SeamError, match="non-finite embeddings in the consensus term"):
        net(x, Y)
    assert not net.covariance.count_C_0.any()
    net(X, Y)
    net.refresh()


@pytest.mark.parametrize(
    ("who", "term"),
    [("prototypes", "consensus and classification and repulsion"), ("head", "classification")],
)
def test_other_values_that_are_not_finite(who: str, term: str) -> None:
    net = lifted()
    with torch.no_grad():
        (net.prototypes if who == "prototypes" else net.n2.weight).fill_(torch.nan)
    with pytest.raises(ps.SeamError, match=f"the {term} term is not finite although the embeddings are: "):
        net(X, Y)


def test_divergence_on_an_accelerator_is_noticed_at_the_epochs_end() -> None:
    net = lifted()
    net._checks._last_total = torch.tensor(torch.nan)  # what the last step left there
    for call in (lambda: net.set_progress(1, 9), lambda: net.refresh(DATA)):
        with pytest.raises(
            ps.SeamError, match=r"the objective is not finite: training has diverged\. Lower the learning"
        ):
            call()
    net.load_state_dict(net.state_dict())  # back to a checkpoint
    net.set_progress(1, 9)


# ---------------------------------------------------------------------- schedules, data, classes


def test_a_jump_of_rho() -> None:
    net = lifted(schedule=ps.SineAnneal(1, 16))
    net.set_progress(0, 2)
    with pytest.warns(
        ps.SeamWarning, match=r"ρ jumps from 1 to 16 between epochs 0 and 1 of 2\. .*lr·ρ·‖features‖²"
    ):
        net.set_progress(1, 2)
    for epoch in range(10):
        net.set_progress(epoch, 10)


def test_a_formula_typed_from_the_paper() -> None:
    net = lifted(schedule=lambda t, T: 1 + 15 * t / (T - 1))
    assert float(net.rho) == 16  # where it ends, until set_progress says otherwise
    net.set_progress(0, 1)
    assert float(net.rho) == 1  # as SineAnneal: a single epoch is the first
    net.set_progress(3, 11)
    assert float(net.rho) == 5.5
    net = lifted(schedule=lambda t, T: float("nan") if t == 2 else 1.0)
    with pytest.raises(ValueError, match="gives ρ = nan for epoch 2 of 5"):
        net.set_progress(2, 5)


def test_a_last_batch_of_one_before_a_fresh_normalisation() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    x, y = DATA[0]
    net = ps.lift(model, dim=2)
    net.initialize([(x[:-1], y[:-1]), (x[-1:], y[-1:])])
    assert int(net.class_count.sum()) == len(y)
    whole = ps.lift(model, dim=2)
    whole.load_state_dict(net.state_dict() | {"ready": torch.tensor(False)})
    whole.initialize([(x, y)])
    torch.testing.assert_close(net.prototypes, whole.prototypes, rtol=0.3, atol=0.1)


def test_batches_of_one_class_before_a_fresh_normalisation() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    x, y = (torch.cat(part) for part in zip(*DATA, strict=True))
    sorted_by_class = [(x[y == c], y[y == c]) for c in range(CLASSES)]
    with pytest.warns(ps.SeamWarning, match="most batches hold one class only.*Shuffle the loader"):
        ps.lift(model, dim=2).initialize(sorted_by_class)
    net = ps.lift(model, dim=2)
    net.initialize(DATA)
    net(x, y)
    net.refresh(sorted_by_class)  # with statistics of its own the order does not matter
    ps.lift(network(), dim=2).initialize(sorted_by_class)


def test_prototypes_without_values() -> None:
    with pytest.raises(
        ps.SeamError,
        match=r"FSInit.*net\.initialize\(loader\) before training, or .*init='random'.*SeamCallback",
    ):
        lifted(init="fsinit")(X, Y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
def test_prototypes_without_values_under_a_compiled_step() -> None:
    """A compiled step cannot ask; the calls between epochs do."""
    net = lifted(init="fsinit")
    net.set_progress(0, 2)  # as a loop may do before it initialises
    torch.compile(net, backend="eager")(X, Y)
    for between in (lambda: net.set_progress(1, 2), lambda: net.refresh(DATA)):
        with pytest.raises(ps.SeamError, match="the prototypes have no values yet"):
            between()


@pytest.mark.parametrize("what", ["initialize", "refresh"])
def test_loaders(what: str) -> None:
    sweep = getattr(lifted(), what)
    with pytest.raises(ValueError, match=f"{what} got an empty loader"):
        sweep([])
    used_up = iter(DATA)
    list(used_up)
    with pytest.raises(ValueError, match=f"{what} got an empty loader: was it a generator, used up"):
        sweep(used_up)
    for wrong, fact in ((X, "Tensor"), ((X,), "tuple"), ({"x": X, "y": Y}, "keys 'x', 'y'")):
        with pytest.raises(TypeError, match=rf"{what} .*{fact}"):
            sweep([wrong])
    with pytest.raises(ValueError, match=rf"net\.{what} needs the data"):
        sweep()
    sweep((x, y, "a third thing") for x, y in DATA)


def only(*classes: int) -> list[Batch]:
    return [
        (x[keep], y[keep])
        for x, y in DATA
        if len(keep := torch.isin(y, torch.tensor(classes)).nonzero()[:, 0])
    ]


def test_a_class_without_samples() -> None:
    with pytest.raises(
        ValueError, match="FSInit puts each prototype on its class mean, but class 2 has no sample"
    ):
        lifted(init="fsinit").initialize(only(0, 1, 3))
    net = lifted(dim=2)
    with pytest.warns(
        ps.SeamWarning, match=r"class 1, 2 has no sample: its prototype is trained by repulsion"
    ):
        net.initialize(only(0, 3))
    net.refresh(only(0, 3))
    assert torch.allclose(net.covariance.factors[1], 0.1 * torch.eye(2))


def test_fewer_samples_than_dimensions() -> None:
    net = lifted(dim=16)
    with pytest.warns(
        ps.SeamWarning, match=r"class 0 has 16 samples but k=16 \(4 classes like it\): Σ̂ is singular; raise"
    ):
        net.initialize(DATA)
    net.refresh(DATA)
    assert net.covariance.factors.isfinite().all()
    with pytest.warns(
        ps.SeamWarning, match=r"k=15: Σ̂ is singular.*ps\.RunningCovariance\(structure='diagonal'\)"
    ):
        lifted(dim=15).initialize([*DATA[1:], *only(0, 2, 3)[:1]])
    for covariance in (
        ps.ExactCovariance(structure="diagonal"),
        ps.RunningCovariance(structure="shared"),
        ps.IsotropicCovariance(),
    ):
        lifted(dim=16, covariance=covariance).initialize(DATA)
    lifted(dim=15).initialize(DATA)


def test_halves_of_classes_too_small_to_have_any() -> None:
    few = [(X[:6], torch.tensor([0, 0, 0, 0, 1, 1]))]
    for make in (ps.ExactCovariance, ps.RunningCovariance, ps.SwitchCovariance):
        net = ps.lift(nn.Linear(FEATURES, 2), dim=DIM, covariance=make("auto", "shared"))
        with pytest.warns(
            ps.SeamWarning, match="class 1 has fewer than 4 samples, and floor='auto' compares"
        ):
            net.initialize(few)


def test_fewer_samples_than_dimensions_without_initialize() -> None:
    net = lifted(dim=16)
    with pytest.warns(ps.SeamWarning, match=r"class 0 has 16 samples but k=16"):
        net.refresh(DATA)
    net.refresh(DATA)


def test_many_classes_are_not_all_named() -> None:
    net = ps.lift(network(30), dim=2, init="random")
    with pytest.warns(ps.SeamWarning, match="class 4, 5, 6, 7, 8, 9, 10, 11 and 18 more has no sample"):
        net.initialize(DATA)


def test_errors_can_be_caught_together() -> None:
    from protoseam.errors import ProtoSeamError

    assert issubclass(ps.SeamError, ProtoSeamError)
    assert issubclass(ps.SplitError, ProtoSeamError)
    assert issubclass(ps.SeamError, RuntimeError)
    assert issubclass(ps.SeamWarning, UserWarning)
    assert step(lifted(), sgd(lifted()), X, Y).total.isfinite()


def test_a_collapsed_network_is_named() -> None:
    net = ps.lift(nn.Linear(4, 3), num_classes=3, dim=2, init="random", covariance=ps.ExactCovariance())
    with torch.no_grad():
        net.n1.weight.zero_()
    data = [(torch.randn(9, 4), torch.arange(9) % 3)]
    with pytest.warns(ps.SeamWarning, match="all embeddings are equal"):
        net.refresh(data)


def test_a_collapse_is_told_in_its_epoch() -> None:
    """By an estimator that sweeps nothing, too; and then without advice about the head, which is not to blame."""
    net = ps.lift(network(), dim=3, refit=False, schedule=ps.ConstantRho(4))
    net.initialize(DATA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    said = []
    for epoch in range(8):
        if epoch == 1:  # as when its ReLUs have died
            net.n1.requires_grad_(False)[2].weight.zero_()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            net.set_progress(epoch, 8)
            for x, y in DATA:
                step(net, optimizer, x, y)
            net.objective(X[:2], Y[[0, 0]])  # one class may well be at one point
            net.objective(X, Y)
            net.refresh()
        said += [f"{epoch}: {w.message}" for w in told if "this epoch had" not in str(w.message)]
    assert len(said) == 1
    assert re.fullmatch(r"1: all embeddings are equal.*Nothing bounds.*net\.param_groups.*", said[0])


def test_a_last_batch_of_one_class_is_no_collapse() -> None:
    net = lifted(init="random")
    net.set_progress(0, 2)
    net.objective(X[[0, 0]], Y[[0, 0]])
    net.refresh(DATA)


def test_initialising_what_was_loaded_is_told() -> None:
    trained = lifted()
    net = ps.lift(network(), dim=trained.dim, covariance=ps.ExactCovariance())
    net.load_state_dict(trained.state_dict())
    with pytest.warns(ps.SeamWarning, match="had values already.*net.initialize"):
        net.initialize(DATA)


def test_a_schedule_that_is_a_class_is_told() -> None:
    with pytest.raises(TypeError, match=r"schedule must be a schedule such as ps\.SineAnneal\(1, 16\)"):
        ps.lift(network(), dim=2, schedule=ps.SineAnneal)
