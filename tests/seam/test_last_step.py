"""The last step: after the last epoch the two Linears around the seam become one fitted classifier."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from toys import CLASSES, FEATURES, HIDDEN, Batch, Noisy, batches, lifted, network, same, sgd, step

import protoseam as ps
from protoseam.core.covariance import class_factors, class_moments
from protoseam.core.logistic import logistic_regression
from protoseam.seam.last_step import held_out_errors, is_worth_it

DATA = batches()
X, Y = (torch.cat(part) for part in zip(*DATA, strict=True))


def trained(model: nn.Module | None = None, data: list[Batch] = DATA, **options: Any) -> ps.Lifted:
    """One epoch of two, and the steps of the second, without its end."""
    torch.manual_seed(0)
    net = lifted(model, **{"init": "fsinit", **options})
    optimizer = sgd(net)
    net.initialize(data)
    for epoch in range(2):
        net.set_progress(epoch, 2)
        for x, y in data:
            step(net, optimizer, x, y)
        if epoch == 0:
            before = net.n2.weight.clone()
            net.refresh(data)
            assert torch.equal(net.n2.weight, before)  # not the last epoch
    return net.eval()


def spoiled(net: ps.Lifted) -> ps.Lifted:
    """A head that answers the last class, which the last step is worth replacing; its weights stay."""
    with torch.no_grad():
        net.n2.bias.copy_(1e3 * torch.arange(len(net.n2.bias)))
    return net


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(1, keepdim=True)


@pytest.mark.parametrize("dim", [2, 3, 5])
@pytest.mark.parametrize("weights", ["uniform", "frequency"])
def test_the_network_answers_as_the_fitted_classifier(dim: int, weights: str) -> None:
    few = [(x[y > 0], y[y > 0]) for x, y in DATA[2:]] + DATA[:2]  # of class 0 half
    net = spoiled(trained(data=few, dim=dim, class_weights=weights))
    x, y = (torch.cat(part) for part in zip(*few, strict=True))
    h = net.n1[:-1](x).detach()
    share = None if weights == "frequency" else torch.bincount(y).double() ** -0.5
    weight, bias = logistic_regression(h, y, CLASSES, class_weights=share, rank=dim)
    expected = centred(h.double() @ weight.T + bias)
    assert not torch.allclose(centred(net(x)).double(), expected, atol=0.1)
    net.refresh(few)
    assert torch.allclose(centred(net(x)).double(), expected, atol=1e-4)
    assert torch.allclose(centred(net.deploy(fold=True)(x)).double(), expected, atol=1e-4)


@pytest.mark.parametrize("covariance", [ps.ExactCovariance(), ps.RunningCovariance(structure="shared")])
def test_the_seam_follows(covariance: ps.AbstractCovariance) -> None:
    net = spoiled(trained(dim=5, covariance=covariance))
    before = net.embed(X).detach(), net.prototypes.detach().clone()
    net.refresh(DATA)
    z = net.embed(X).detach()
    _, means, _ = class_moments(z, Y, CLASSES)
    assert torch.allclose(net.prototypes.double(), means, atol=1e-5)
    structure = net.covariance.structure
    factors = class_factors(z, Y, CLASSES, 0.1, structure=structure).factors
    assert torch.allclose(net.covariance.factors, factors, atol=1e-4)
    # as far apart as before where N2 looks, around the same centre of embeddings, and elsewhere the same
    seen = torch.linalg.svd(net.n2.weight.detach() - net.n2.weight.detach().mean(0))[2][: CLASSES - 1]
    spread = [(s - s.mean(0)).norm() for s in (before[1], net.prototypes @ seen.T)]
    assert torch.allclose(spread[0], spread[1], rtol=1e-4)
    assert torch.allclose(z.mean(0), before[0].mean(0), atol=1e-5)  # classes of one size
    unseen = torch.eye(5) - seen.T @ seen
    assert torch.allclose(z @ unseen, before[0] @ unseen, atol=1e-4)
    assert not torch.allclose(z, before[0], atol=1e-2)


def samples(n: int, features: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Features around the class means, labels, and the means."""
    g = torch.Generator().manual_seed(0)
    means, y = torch.randn(CLASSES, features, generator=g), torch.arange(n) % CLASSES
    return means[y] + spread * torch.randn(n, features, generator=g), y, means


def worth(h: Tensor, y: Tensor, wrong: int, penalty: float | None = None) -> bool:
    """With a trained classifier that gets every so many samples wrong."""
    answers = torch.where(torch.arange(len(y)) % len(y) < wrong, y + 1, y) % CLASSES
    known = {tuple(row.tolist()): answer for row, answer in zip(h, answers, strict=True)}

    def as_trained(h_BD: Tensor) -> Tensor:
        return torch.eye(CLASSES)[[int(known[tuple(row.tolist())]) for row in h_BD]]

    def fit(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return logistic_regression(h, y, CLASSES, penalty=penalty)

    return is_worth_it(as_trained, fit(h, y), fit, h, y)


def test_it_is_worth_it_unless_other_samples_say_no() -> None:
    h, y, _ = samples(400, 10, 2.0)
    weight, bias = logistic_regression(h, y, CLASSES)
    fitted = int(((h.double() @ weight.T + bias).argmax(1) != y).sum())
    assert 100 < fitted < 200
    assert worth(h, y, 2 * fitted)
    assert worth(h, y, fitted)  # about as good
    assert worth(h, y, fitted - 1)  # learned by heart


def test_a_fit_that_learned_few_samples_by_heart_is_not_taken() -> None:
    """Many features of few samples, as after one look at augmented images: all right, and useless elsewhere."""
    h, y, _ = samples(80, 400, 8.0)
    weight, bias = logistic_regression(h, y, CLASSES)
    assert ((h.double() @ weight.T + bias).argmax(1) == y).all()
    _, held = held_out_errors(
        lambda h: h[:, :CLASSES], lambda *part: logistic_regression(*part, CLASSES), h, y
    )
    assert held > 20
    for wrong in range(1, 40):
        assert worth(h, y, wrong) is (held <= wrong + 2 * wrong**0.5)


def test_a_training_that_learned_its_samples_by_heart_is_replaced() -> None:
    h, y, _ = samples(400, 10, 2.0)
    assert worth(h, y, 0)


def test_of_many_samples_a_part_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    h, y, _ = samples(400, 10, 2.0)
    fits = []

    def fit(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fits.append(torch.bincount(y).tolist())
        return logistic_regression(h, y, CLASSES)

    for enough, folds in ((1, 1), (101, 2), (400, 4), (8192, 4)):
        monkeypatch.setattr("protoseam.seam.last_step._ENOUGH", enough)
        fits.clear()
        held_out_errors(lambda h: h[:, :CLASSES], fit, h, y)
        assert fits == folds * [[75] * CLASSES]


@pytest.mark.parametrize("covariance", [ps.ExactCovariance, ps.RunningCovariance, ps.IsotropicCovariance])
def test_a_classifier_that_is_not_worth_replacing_stays(
    covariance: type[ps.AbstractCovariance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protoseam.seam.last_step.is_worth_it", lambda *_: False)
    net, without = (trained(covariance=covariance(), refit=refit) for refit in (True, False))
    net.refit_head(DATA)
    without.load_state_dict(net.state_dict())
    for one in (net, without):
        one.refresh(DATA)
    assert same(net.state_dict(), without.state_dict())
    net.refit_head(DATA)
    assert not same(net.state_dict(), without.state_dict())  # on request it is fitted again


def test_an_undertrained_network_gets_better() -> None:
    net = trained()
    with torch.no_grad():
        net.n2.weight.zero_()
    net.refresh(DATA)
    assert (net(X).argmax(1) == Y).double().mean() > 0.9


class Averaging(nn.Module):
    """N1 goes on behind its Linear: the mean over two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(FEATURES // 2, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x.unflatten(1, (2, -1))).tanh()).mean(1)


def test_n2_alone_is_fitted_where_no_linear_ends_n1_or_it_is_frozen() -> None:
    frozen = trained(dim=5)
    frozen.n1[-1].requires_grad_(False)
    shared = ps.RunningCovariance(structure="shared")
    n1 = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN))
    halves = ps.lift((n1, nn.Linear(HIDDEN, CLASSES)), covariance=shared, probe=X[:4])
    halves.initialize(DATA)
    halves.set_progress(0, 1)
    wrapped = trained(dim=5)
    wrapped.n1[-1] = weight_norm(wrapped.n1[-1])  # whose weight is computed anew in each forward
    for net in map(spoiled, (frozen, wrapped, trained(Averaging(), dim=5), halves.eval())):
        z, prototypes = net.embed(X).detach(), net.prototypes.detach().clone()
        net.refresh(DATA)
        assert torch.equal(net.embed(X), z)
        assert torch.equal(net.prototypes, prototypes)
        share = torch.bincount(Y).double() ** -0.5
        weight, bias = logistic_regression(z, Y, CLASSES, class_weights=share)
        assert torch.allclose(net.n2.weight.double(), weight, atol=1e-5)
        assert torch.allclose(net.n2.bias.double(), bias, atol=1e-5)


@pytest.mark.filterwarnings("ignore:class 0 has no sample")
def test_nothing_changes_where_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    without, frozen, deep, many, long, wrapped, own = (
        spoiled(net)
        for net in (
            trained(refit=False),
            *(trained() for _ in range(5)),
            trained(loss_fn=nn.MultiMarginLoss(reduction="none")),
        )
    )
    frozen.n2.requires_grad_(False)
    deep.n2 = nn.Sequential(deep.n2)
    wrapped.n2 = weight_norm(wrapped.n2)
    few = [(x[y > 0], y[y > 0]) for x, y in DATA]
    absent = lifted(init="random")
    absent.initialize(few)
    absent.set_progress(0, 1)
    equal = trained()
    with torch.no_grad():
        for p in equal.n1[:-1].parameters():
            p.zero_()
    nets = without, frozen, deep, wrapped, own, absent, many, long
    least = 10 * CLASSES * CLASSES * (HIDDEN + 64)  # ten samples of each class
    limits = {many: ("_MOST", len(X) * HIDDEN), long: ("_MOST_WORK", least)}
    for net in nets:
        before = {name: p.clone() for name, p in net.named_parameters()}
        with monkeypatch.context() as limit:
            if net in limits:
                name, most = limits[net]
                limit.setattr(f"protoseam.seam.last_step.{name}", most)
                assert net.refits_now
                limit.setattr(f"protoseam.seam.last_step.{name}", most - 1)
            net.refresh(few if net is absent else DATA)
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    before = equal.n2.weight.clone()
    with pytest.warns(ps.SeamWarning, match="all embeddings are equal"):
        equal.refresh(DATA)
    assert torch.equal(equal.n2.weight, before)


def test_prototypes_that_a_fit_has_moved_are_not_judged() -> None:
    """On the classes' means they may be close together, and N2 tells them apart all the same."""
    fitted, left = spoiled(trained(alpha=0.01)), trained(alpha=0.01, refit=False)
    for net in (fitted, left):
        net.set_progress(2, 3)
        for x, y in 3 * DATA:
            net.objective(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.refresh(DATA)
    with pytest.warns(ps.SeamWarning, match="closer than the 1/α"):
        left.refresh(DATA)


@pytest.mark.parametrize("covariance", [ps.ExactCovariance(), ps.RunningCovariance(structure="shared")])
def test_refit_head_does_the_same_on_request(covariance: ps.AbstractCovariance) -> None:
    one, two = (spoiled(trained(covariance=covariance)) for _ in range(2))
    one.refresh(DATA)
    two.refit_head(DATA)
    assert same(one.state_dict(), two.state_dict())
    few = [(x[y > 0], y[y > 0]) for x, y in DATA]
    with pytest.raises(ps.ArgumentError, match="samples of every class, but class 0 has none"):
        two.refit_head(few)


def test_the_data_is_swept_once() -> None:
    net = spoiled(trained(covariance=ps.ExactCovariance()))
    swept = []

    def once() -> Iterator[Batch]:
        swept.append(1)
        yield from DATA

    class Data:
        def __iter__(self) -> Iterator[Batch]:
            return once()

        def __len__(self) -> int:
            return len(DATA)

    net.refresh(Data())
    assert len(swept) == 1


def test_of_more_samples_than_a_fit_can_take_it_takes_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    net = spoiled(trained())
    most = 10 * CLASSES + 3  # of 64
    monkeypatch.setattr("protoseam.seam.last_step._MOST_WORK", most * CLASSES * (HIDDEN + 64))
    taken = []
    fit = logistic_regression

    def watched(h: Tensor, y: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        taken.append(torch.bincount(y).tolist())
        return fit(h, y, *more, **options)

    monkeypatch.setattr("protoseam.seam.last_step.logistic_regression", watched)
    net.refresh(DATA)
    assert sum(taken[0]) == most
    assert max(taken[0]) - min(taken[0]) <= 1
    assert (net(X).argmax(1) == Y).double().mean() > 0.9


def test_a_part_has_a_sample_of_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protoseam.seam.last_step._MOST_WORK", 10 * CLASSES * CLASSES * (HIDDEN + 64))
    common, rare = Y < CLASSES - 1, (Y == CLASSES - 1).nonzero()[:4, 0]
    data = [(X[common], Y[common])] * 20 + [(X[rare], Y[rare])]
    net = trained(data=data)
    net.refit_head(data)
    assert net.n2.weight.isfinite().all()


def test_a_last_linear_that_is_called_by_keyword_is_fitted() -> None:
    class ByKeyword(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=self.body(x))

    net = spoiled(trained(ByKeyword()))
    before = net.n1.fc.weight.clone()
    net.refresh(DATA)
    assert not torch.equal(net.n1.fc.weight, before)


def test_embeddings_alone_leave_the_classifier_as_it_was() -> None:
    net = spoiled(trained())
    before = net.n2.weight.clone()
    net.refresh(embeddings=(net.embed(X).detach(), Y))
    assert torch.equal(net.n2.weight, before)


def test_mixed_targets_leave_the_head_as_it_was_trained() -> None:
    net = spoiled(trained(covariance=ps.RunningCovariance()))
    before = net.n2.weight.clone()
    mixed = [(x, torch.full((len(x), CLASSES), 1 / CLASSES)) for x, _ in DATA]
    with pytest.warns(
        ps.SeamWarning, match="N2 stays as it was trained: refresh needs the class of each sample"
    ):
        net.refresh(mixed)
    assert torch.equal(net.n2.weight, before)


def test_data_without_an_end_is_not_swept() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Batch]:
            while True:
                yield from DATA

    net = lifted(init="random", covariance=ps.RunningCovariance())
    before = net.n2.weight.clone()
    net.set_progress(0, 1)
    net.objective(*DATA[0])
    net.refresh(Endless())
    net.refresh()
    assert torch.equal(net.n2.weight, before)


def test_a_network_in_bfloat16_is_fitted_too() -> None:
    net = trained(network())
    net.bfloat16()
    data = [(x.bfloat16(), y) for x, y in DATA]
    with torch.no_grad():
        net.n2.weight.zero_()
    net.refresh(data)
    assert (net(X.bfloat16()).argmax(1) == Y).double().mean() > 0.9
