"""The last step of a training: the two Linears around the seam, fitted as one classifier on N1's features.

Data in: a trained network and a sweep of its features; data out: the same network with another last Linear of N1, N2,
prototypes and Σ̃. It keeps no state.

Legend: N samples, B batch, C classes, D features, K seam width, R rank of the classifier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.core.covariance import Reduce
from protoseam.core.logistic import logistic_regression
from protoseam.core.precision import at_least_float32
from protoseam.errors import ArgumentError
from protoseam.seam.calling import eagerly
from protoseam.seam.classifier import is_plain, last_linear
from protoseam.seam.guards import name_some
from protoseam.seam.heads import can_refit
from protoseam.seam.processes import all_reduce, broadcast, world_size

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["FeatureReader", "can_fit", "embedded", "fit_classifier", "held_out_errors", "is_worth_it"]

Classifier = tuple[Tensor, Tensor]  # weight_CD and bias_C

_MOST = 2**26  # features times samples, 512 MiB as double; ImageNet's are 40 times as many
_MOST_WORK = 2**32  # samples times classes times features: minutes on a CPU; all of CIFAR-100 is about half
_EXPONENTIAL = 64  # what a logit costs beside its product, in features
_EACH = 10  # samples of a class, on average, below which a fit to a part of the data is not tried
_CLOSE = 1e-2  # bf16 rounds to 2⁻⁸
_FOLDS = 4
_ENOUGH = 8192  # errors on so many held-out samples are known to half a point
_DEVIATIONS = 2  # chance makes √E more or fewer of E errors
_ROWS = 8192  # logits of so many samples at a time


def can_fit(net: LiftedNetwork) -> bool:
    """Whether the classifier may be fitted: N2 learns by cross-entropy, is one Linear, and the data is small enough."""
    last = last_linear(net.n1, net.seam_layer)
    features = net.dim if last is None else last.in_features
    samples = net._checks.samples / world_size()
    # several processes share products of features
    rows = samples if world_size() == 1 else max(samples, features)
    enough = _affordable(net.num_classes, features) >= _EACH * net.num_classes
    return net.loss_fn is None and can_refit(net) and rows * features <= _MOST and enough


def _affordable(classes: int, features: int) -> int:
    return _MOST_WORK // (classes * (features + _EXPONENTIAL))


class FeatureReader:
    """Returns the features of a batch: what the Linear that ends N1 reads, or N1's output where there is no such layer.

    Args:
        net: the network; it should be in eval mode.

    Attributes:
        last: the plain Linear that ends N1 and may change; None if there is none, or N1 goes on behind it.
    """

    def __init__(self, net: LiftedNetwork) -> None:
        self.net, self._proved = net, False
        last = last_linear(net.n1, net.seam_layer)
        free = last is not None and is_plain(last) and all(p.requires_grad for p in last.parameters())
        self.last: nn.Linear | None = last if free and len(net.seam_shape) == 1 else None

    def __call__(self, x: Any) -> Tensor:
        """Return the features of these inputs, ``(B, D)``."""
        if self.last is None:
            return self.net.embed(x)
        seen: list[Tensor] = []
        watched = self.last.register_forward_pre_hook(
            lambda _, inputs, named: seen.append((*inputs, *named.values())[0].detach()), with_kwargs=True
        )
        with eagerly(), watched:
            z_BK = self.net.embed(x)
        if not self._proved:  # the first batch decides
            self._proved = True
            if len(seen) != 1 or not _leads_to(self.last, seen[0], z_BK):
                self.last = None
                return z_BK
        return seen[-1]


def _leads_to(last: nn.Linear, h: Tensor, z_BK: Tensor) -> bool:
    if h.ndim != 2 or len(h) != len(z_BK) or last.weight.shape != (z_BK.shape[1], h.shape[1]):
        return False
    again, found = last(h.to(last.weight.dtype)).double(), z_BK.double()
    return bool((again - found).abs().max() <= _CLOSE * found.abs().max())


@torch.no_grad()
def fit_classifier(
    net: LiftedNetwork, last: nn.Linear | None, h_ND: Tensor, y_N: Tensor, *, always: bool = False
) -> bool:
    """Fit N2∘(the Linear that ends N1) to the features by penalised logistic regression; was anything changed?

    The fit W h + b, of rank R ≤ k, is split between the two Linears so that the seam stays what it was: N2's directions
    turn as little as possible, the classes' means keep their distances, and N1's other directions stay. The prototypes
    then move to the classes' new means. Without a Linear that may change N2 alone is fitted. Nothing is done where a
    class has no sample, or all features are equal.

    Args:
        net: the network; N2 is one Linear with a bias.
        last: ``FeatureReader.last`` after the sweep.
        h_ND: the features.
        y_N: their labels.
        always: fit even where :func:`is_worth_it` says no, and refuse data in which a class is missing.
    """
    reduce = all_reduce()
    h_ND, y_N = _part(h_ND, y_N, net.num_classes)
    count_C = torch.bincount(y_N, minlength=net.num_classes).to(net.prototypes.device)
    if reduce is not None:
        reduce(count_C)
    missing = (count_C == 0).nonzero()[:, 0].tolist()
    if missing and always:
        raise ArgumentError(
            f"refit_head needs samples of every class, but class {name_some(missing)} has none"
        )
    if missing:
        return False
    # Between 1/n and their share of the samples, as N2 stands in fact when classes weigh 1/n in its loss.
    weights_C = count_C.double().rsqrt() if net.class_weights == "uniform" else None

    def fit(h_ND: Tensor, y_N: Tensor) -> tuple[Tensor, Tensor]:
        return logistic_regression(
            h_ND, y_N, net.num_classes, class_weights=weights_C, rank=net.dim, reduce=reduce
        )

    def as_trained(h_BD: Tensor) -> Tensor:
        return net.head(_through(last, h_BD).to(count_C.device))

    weight_CD, bias_C = fit(h_ND, y_N)
    if not (bool(weight_CD.any()) and bool(weight_CD.isfinite().all())):
        return False
    if not always and not is_worth_it(as_trained, (weight_CD, bias_C), fit, h_ND, y_N, reduce):
        return False
    weight_CD, bias_C = weight_CD.to(count_C.device), bias_C.to(count_C.device)
    if last is None:
        _set(net.n2, weight_CD, bias_C)
    else:
        _split(net, last, weight_CD, bias_C, _class_means(h_ND, y_N, count_C, reduce))
    return True


def is_worth_it(
    as_trained: Callable[[Tensor], Tensor],
    fitted: Classifier,
    fit: Callable[[Tensor, Tensor], Classifier],
    h_ND: Tensor,
    y_N: Tensor,
    reduce: Reduce | None = None,
) -> bool:
    """Whether to replace a trained classifier by one fitted to the training samples.

    Yes if the fitted one makes more errors on the very samples it was fitted to: the trained one has learned them by
    heart. Else no if fits to three quarters of the samples make clearly more errors on the others than the trained
    classifier does, though that one has seen them: the fit itself learns these samples by heart, as with few samples,
    many features, or augmented images, of which the trained classifier has seen many forms and the fit one.
    """
    trained, now = _errors(h_ND, y_N, reduce, as_trained, _answers(*fitted))
    if now > trained:
        return True
    trained, held = held_out_errors(as_trained, fit, h_ND, y_N, reduce)
    return held <= trained + _DEVIATIONS * math.sqrt(max(1, trained))


def held_out_errors(
    as_trained: Callable[[Tensor], Tensor],
    fit: Callable[[Tensor, Tensor], Classifier],
    h_ND: Tensor,
    y_N: Tensor,
    reduce: Reduce | None = None,
) -> tuple[int, int]:
    """Errors of the trained classifier, and of fits to three quarters of the samples on the others.

    Each sample is left out once; of many samples, as many quarters are as hold ``_ENOUGH``.
    """
    fold_N = _folds(y_N)
    total = torch.tensor(float(len(y_N)), device=h_ND.device)
    if reduce is not None:
        reduce(total)
    trained = held = 0
    for fold in range(min(_FOLDS, math.ceil(_FOLDS * _ENOUGH / float(total)))):
        out_N = fold_N == fold
        classifier = fit(h_ND[~out_N], y_N[~out_N])
        found = _errors(h_ND[out_N], y_N[out_N], reduce, as_trained, _answers(*classifier))
        trained, held = trained + found[0], held + found[1]
    return trained, held


def _folds(y_N: Tensor) -> Tensor:
    """A quarter for each sample, by chance, with each class in all of them as evenly as can be."""
    order_N = _by_class(y_N)
    fold_N = torch.empty_like(order_N)
    fold_N[order_N] = torch.arange(len(y_N), device=y_N.device) % _FOLDS
    return fold_N


def _part(h_ND: Tensor, y_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Of more samples than a fit can take, a part by chance, of each class as much as of all, and at least one."""
    N, most = len(y_N), max(_EACH * num_classes, _affordable(num_classes, h_ND.shape[1]))
    if most >= N:
        return h_ND, y_N
    order_N = _by_class(y_N)
    rows = order_N[torch.arange(most, device=y_N.device) * N // most]
    first_C = order_N[torch.searchsorted(y_N[order_N], y_N.unique())]
    rows = torch.cat([rows, first_C[~torch.isin(y_N[first_C], y_N[rows])]])
    return h_ND[rows], y_N[rows]


def _by_class(y_N: Tensor) -> Tensor:
    """The rows of each class after the other, each in an order by chance."""
    order_N = torch.randperm(len(y_N), generator=torch.Generator().manual_seed(0)).to(y_N.device)
    return order_N[y_N[order_N].argsort(stable=True)]


def embedded(last: nn.Linear | None, h_ND: Tensor) -> Tensor:
    """The embeddings N1(x), ``(N, K)``, of samples with these features."""
    return at_least_float32(_through(last, h_ND))


def _through(last: nn.Linear | None, h_ND: Tensor) -> Tensor:
    if last is None:
        return h_ND
    return F.linear(h_ND, last.weight.to(h_ND), None if last.bias is None else last.bias.to(h_ND))


def _answers(weight_CD: Tensor, bias_C: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda h_BD: F.linear(h_BD.double(), weight_CD, bias_C)


def _errors(
    h_ND: Tensor, y_N: Tensor, reduce: Reduce | None, *answers: Callable[[Tensor], Tensor]
) -> list[int]:
    """How many samples, of all processes, each of these classifiers gets wrong."""
    wrong = torch.zeros(len(answers), dtype=torch.float64, device=h_ND.device)
    for h_BD, y_B in zip(h_ND.split(_ROWS), y_N.split(_ROWS), strict=True):
        for i, answer in enumerate(answers):
            wrong[i] += (answer(h_BD).argmax(1).to(y_B.device) != y_B).sum()
    if reduce is not None:
        reduce(wrong)
    return [int(n) for n in wrong.tolist()]


def _class_means(h_ND: Tensor, y_N: Tensor, count_C: Tensor, reduce: Reduce | None) -> Tensor:
    sum_CD = h_ND.new_zeros(len(count_C), h_ND.shape[1], dtype=torch.float64)
    sum_CD = sum_CD.index_add_(0, y_N, h_ND.double()).to(count_C.device)
    if reduce is not None:
        reduce(sum_CD)
    return sum_CD / count_C[:, None]


def _split(net: LiftedNetwork, last: nn.Linear, weight_CD: Tensor, bias_C: Tensor, mean_CD: Tensor) -> None:
    """Give N1's last Linear and N2 values whose product is the classifier, and move the prototypes along.

    W = U Rᵀ with orthonormal columns of U, ``(C, R)``. N2 becomes c·U Oᵀ, where O, ``(K, R)``, has orthonormal columns
    and comes as near to N2's old directions as it can (the polar factor of N2ᵀU). N1's embedding becomes (1/c)·O Rᵀ h
    in these directions and stays what it was in the others. c keeps the mean distance of the prototypes from their
    centre. Where there is none, nothing is done.
    """
    assert isinstance(net.n2, nn.Linear)
    old_KD, old_CK = last.weight.double(), net.n2.weight.double()
    U_CC, size_C, V_CD = torch.linalg.svd(weight_CD, full_matrices=False)
    R = min(net.dim, int((size_C > 1e-9 * size_C[0]).sum()))
    U_CR, R_RD = U_CC[:, :R], size_C[:R, None] * V_CD[:R]
    left_KR, _, right_RR = torch.linalg.svd((old_CK - old_CK.mean(0)).T @ U_CR, full_matrices=False)
    O_KR = left_KR @ right_RR
    s_CK = net.prototypes.double()
    c = ((mean_CD - mean_CD.mean(0)) @ R_RD.T).norm() / (s_CK - s_CK.mean(0)).norm()
    if not bool(c.isfinite() & (c > 0)):
        return
    new_KD = O_KR @ R_RD / c + old_KD - O_KR @ (O_KR.T @ old_KD)
    new_CK = c * U_CR @ O_KR.T
    mean_CK = mean_CD @ new_KD.T
    if last.bias is not None:  # the embeddings' centre stays where it was
        moved_K = last.bias.double() + (old_KD - new_KD) @ mean_CD.mean(0)
        bias_C = bias_C - new_CK @ moved_K
        mean_CK = mean_CK + moved_K
        last.bias.copy_(moved_K)
    last.weight.copy_(new_KD)
    net.prototypes.copy_(mean_CK)
    _set(net.n2, new_CK, bias_C)
    for p in (*last.parameters(), net.prototypes):
        broadcast(p.data)


def _set(head: nn.Module, weight_CK: Tensor, bias_C: Tensor) -> None:
    assert isinstance(head, nn.Linear)
    head.weight.copy_(weight_CK)
    head.bias.copy_(bias_C)
    for p in head.parameters():
        broadcast(p.data)  # the same to the last bit in every process
