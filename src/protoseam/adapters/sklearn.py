"""A scikit-learn classifier that trains a lifted network: ``ProtoSeamClassifier().fit(X, y)``.

Data in: arrays of rows or images, labels of any kind, weights; data out: labels, probabilities, scores. The estimator
owns the loop over the epochs; the lifted network it trained is ``net_``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from protoseam.errors import DataError, ModelError
from protoseam.seam.groups import table_decay
from protoseam.seam.lift import lift
from protoseam.seam.lifted import Lifted
from protoseam.seam.split import evaluating

_TABLE, _IMAGES = (128, 128), (32, 64)  # mlp and cnn_bn of benchmarks/first_try_tasks.py
_LEAST_STEPS = 10  # per epoch; with fewer the seam's own guard warns
_ROWS = 1024  # predicted at once


_NUMBERS: tuple[tuple[str, type, int], ...] = (
    ("lr", Real, 0),
    ("epochs", Integral, 1),
    ("batch_size", Integral, 1),
)


class ProtoSeamClassifier(ClassifierMixin, BaseEstimator):
    """A network, lifted and trained with AdamW and a cosine decay; the defaults are those of docs/first-try.md,
    except a table's weight decay.

    Standardise the columns of a table first: ``make_pipeline(StandardScaler(), ProtoSeamClassifier())``.

    Args:
        network: a module that ends in a Linear with one output per class; ``fit`` copies it and starts from its
            weights. Or the sizes of a network to build: ``(128, 128)`` are the widths of two hidden layers for a table;
            for images they are the channels of two blocks of convolution, BatchNorm, ReLU and pooling. None: two layers
            of 128 for a table, 32 and 64 channels for images, as on the first-try panel.
        image_shape: ``(channels, height, width)`` of images that come as the rows of a table. Arrays of shape
            ``(n, height, width)`` or ``(n, channels, height, width)`` are images without it.
        dim: width of the seam; :func:`protoseam.lift`'s default unless given.
        lr: learning rate of N1 at the start; the seam learns thirty times faster (``net.param_groups``).
        weight_decay: AdamW's, of N1; the seam has none. None: 0.01, torch's default, for images and for a module of
            yours; for a network built for a table, which N1 would fit too closely, ``1 / (10 * lr * steps)`` with the
            steps of an epoch.
        epochs: passes over the data.
        batch_size: rows per step at most. Small data get smaller batches, so that an epoch has ten steps.
        validation_fraction: share of the data (stratified) to hold out for early stopping; None trains all epochs on
            all of the data.
        patience: epochs without a better accuracy on the held-out part before training stops; the best network is kept,
            of equals the last. Without ``validation_fraction`` it does nothing.
        random_state: an int for the same network at every fit; None for another one each time.
        device: where to train and predict, as torch names it.
        options: further keyword arguments of :func:`protoseam.lift`, such as ``{"covariance": ps.ExactCovariance()}``.

    Attributes:
        classes_: the labels, sorted.
        net_: the trained :class:`protoseam.Lifted`; ``net_.deploy(fold=True)`` is the plain network.
        n_iter_: epochs trained.
        history_: per epoch a dict with ``rho``, the mean ``loss`` and, if a part is held out, its ``accuracy``.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
    """

    def __init__(
        self,
        network: nn.Module | Sequence[int] | int | None = None,
        *,
        image_shape: tuple[int, int, int] | None = None,
        dim: int | None = None,
        lr: float = 1e-3,
        weight_decay: float | None = None,
        epochs: int = 20,
        batch_size: int = 64,
        validation_fraction: float | None = None,
        patience: int = 10,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.network = network
        self.image_shape = image_shape
        self.dim = dim
        self.lr = lr
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.options = options

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> ProtoSeamClassifier:
        """Train on rows ``X`` of labels ``y``.

        Args:
            X: a table ``(n, features)`` or images, finite numbers.
            y: a label per row, numbers or strings.
            sample_weight: how often a row counts. Whole numbers repeat rows, and 0 leaves a row out. With other weights
                each epoch draws as many rows as have a weight, in proportion to it. The order of the rows does not
                matter.

        Returns:
            The estimator itself.

        Raises:
            DataError: (a ValueError) if there are fewer than two classes, or the weights are negative or all zero.
            ValueError: a rate is negative, or there is no epoch or no row in a batch.
            TypeError: one of them is no number.
        """
        for name, kind, least in _NUMBERS:
            check_scalar(getattr(self, name), name, kind, min_val=least)
        if self.weight_decay is not None:
            check_scalar(self.weight_decay, "weight_decay", Real, min_val=0)
        X, y = validate_data(self, X, y, dtype=[np.float32, np.float64], allow_nd=True)
        check_classification_targets(y)
        weight = _weights(sample_weight, len(X))
        X, y, weight = X[weight > 0], column_or_1d(y)[weight > 0], weight[weight > 0]
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y has 1 class ({self.classes_[0]!r}) among rows with a weight above 0; a classifier needs at least 2 "
                "classes"
            )
        random = check_random_state(self.random_state)
        order = _canonical_order(X, labels)
        X, labels, weight = X[order], labels[order], weight[order]
        held_out = None
        if self.validation_fraction is not None:
            train, rest = train_test_split(
                np.arange(len(X)), test_size=self.validation_fraction, stratify=labels, random_state=random
            )
            held_out = self._inputs(X[rest]), torch.as_tensor(labels[rest]), torch.as_tensor(weight[rest])
            X, labels, weight = X[train], labels[train], weight[train]
        device = torch.device(self.device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(random.randint(np.iinfo(np.int32).max)))
            self._train(self._inputs(X).float(), torch.as_tensor(labels), weight, held_out)
        return self

    def _train(
        self, x: Tensor, y: Tensor, weight: np.ndarray, held_out: tuple[Tensor, Tensor, Tensor] | None
    ) -> None:
        net = self._network(x).to(self.device)
        batches = _Batches(x, y, weight, self.batch_size)
        steps = self.epochs * len(batches)
        weight_decay = self._decay(x, len(batches))
        optimizer = torch.optim.AdamW(net.param_groups(lr=self.lr), weight_decay=weight_decay)
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / steps))
        )
        self.history_: list[dict[str, float]] = []
        best, best_epoch, kept = -1.0, 0, {}
        for epoch in net.epochs(batches, self.epochs):
            losses = []
            net.train()
            for xb, yb in batches:
                loss = net.objective(xb.to(self.device), yb.to(self.device)).total
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                decay.step()
                losses.append(loss.detach())
            self.history_.append({"rho": float(net.rho), "loss": float(torch.stack(losses).mean())})
            if held_out is not None:
                accuracy = self.history_[-1]["accuracy"] = _accuracy(net, *held_out, self.device)
                if accuracy > best:
                    best_epoch = epoch
                if accuracy >= best:  # of equals the later, at the larger ρ
                    best, kept = accuracy, copy.deepcopy(net.state_dict())
                if best_epoch + max(self.patience, 1) <= epoch < self.epochs - 1:  # not before the last step
                    break
        if held_out is not None:  # the refit of N2 comes after the last epoch
            accuracy = _accuracy(net, *held_out, self.device)
            if accuracy >= best:
                self.history_[-1]["accuracy"] = accuracy
            else:
                net.load_state_dict(kept)
        self.net_ = net.eval()
        self.n_iter_ = len(self.history_)

    def _decay(self, x: Tensor, steps: int) -> float:
        if self.weight_decay is not None:
            return self.weight_decay
        if x.ndim > 2 or isinstance(self.network, nn.Module) or self.lr == 0:
            return 0.01
        return table_decay(self.lr, steps)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the logits ``(n, classes)``; with two classes the second's minus the first's, ``(n,)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float32, np.float64], allow_nd=True, reset=False)
        net, x = self.net_, self._inputs(X)
        if self.device == "cpu" and not isinstance(self.network, nn.Module):
            net = copy.deepcopy(net).double()  # rounding then hides which rows were asked for together
        logits = _logits(net, x, self.device)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, ``(n, classes)`` in the order of ``classes_``."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def _inputs(self, X: np.ndarray) -> Tensor:
        x = torch.as_tensor(X)
        if self.image_shape is not None:
            if math.prod(self.image_shape) != math.prod(x.shape[1:]):
                raise DataError(
                    f"image_shape={self.image_shape} has {math.prod(self.image_shape)} numbers, but a row of X has "
                    f"{math.prod(x.shape[1:])}: give (channels, height, width) of the rows"
                )
            return x.reshape(len(x), *self.image_shape)
        return x[:, None] if x.ndim == 3 and not isinstance(self.network, nn.Module) else x

    def _network(self, x: Tensor) -> Lifted:
        network, classes = self.network, len(self.classes_)
        if not isinstance(network, nn.Module):
            default = _TABLE if x.ndim == 2 else _IMAGES
            sizes = default if network is None else np.atleast_1d(network).tolist()  # an array's ints, too
            if min(sizes, default=1) < 1:
                raise ModelError(f"network={network!r}: every width must be at least 1")
            network = (_table_network if x.ndim == 2 else _image_network)(x, sizes, classes)
        return lift(network, num_classes=classes, dim=self.dim, **(self.options or {}))


class _Batches:
    """Shuffled batches of one epoch, each row as often as its weight says."""

    def __init__(self, x: Tensor, y: Tensor, weight: np.ndarray, size: int) -> None:
        self.x, self.y = x, y
        whole = bool((weight == np.round(weight)).all())
        self.draws = int(weight.sum()) if whole else len(y)
        self.edges = np.cumsum(weight) * (self.draws / weight.sum())
        self.steps = max(math.ceil(self.draws / size), min(_LEAST_STEPS, self.draws // 2))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # systematic sampling: one draw in each unit of weight, so whole weights give the same rows in every epoch
        points = np.arange(self.draws) + float(torch.rand(()))
        rows = torch.as_tensor(np.searchsorted(self.edges, points, side="right").clip(max=len(self.y) - 1))
        for part in rows[torch.randperm(self.draws)].tensor_split(self.steps):
            yield self.x[part], self.y[part]


def _weights(sample_weight: Any, rows: int) -> np.ndarray:
    if sample_weight is None:
        return np.ones(rows)
    weight = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
    if weight.shape not in ((), (rows,)):
        raise DataError(
            f"sample_weight has shape {weight.shape}, but X has {rows} rows: give one weight per row"
        )
    weight = np.broadcast_to(weight, (rows,))
    if (weight < 0).any() or not weight.any():
        raise DataError(
            f"sample_weight must be 0 or more and not all zero, but reaches from {weight.min()} to {weight.max()}: "
            "leave rows out with 0"
        )
    return weight


def _canonical_order(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """An order of the rows that depends on their values alone: sorted by one fixed projection."""
    flat = X.reshape(len(X), -1)
    return np.lexsort((labels, flat @ np.random.RandomState(0).standard_normal(flat.shape[1])))


@torch.no_grad()
def _logits(net: Lifted, x: Tensor, device: str) -> np.ndarray:
    dtype = next(net.n1.parameters()).dtype
    with evaluating(net):
        return torch.cat([net(part.to(device, dtype)).double().cpu() for part in x.split(_ROWS)]).numpy()


def _accuracy(net: Lifted, x: Tensor, y: Tensor, weight: Tensor, device: str) -> float:
    return float(np.average(_logits(net, x, device).argmax(1) == y.numpy(), weights=weight.numpy()))


def _table_network(x: Tensor, widths: Sequence[int], classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    columns = x.shape[1]
    for width in widths:
        layers += [nn.Linear(columns, width), nn.ReLU()]
        columns = width
    return nn.Sequential(*layers, nn.Linear(columns, classes))


def _image_network(x: Tensor, channels: Sequence[int], classes: int) -> nn.Module:
    if x.ndim != 4:
        raise ModelError(
            f"X has rows of shape {tuple(x.shape[1:])}, and sizes build networks for tables (n, features) and images "
            "(n, channels, height, width) alone: give a network of your own"
        )
    _, planes, *sides = x.shape
    layers: list[nn.Module] = []
    for width in channels:
        layers += [nn.Conv2d(planes, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if min(sides) > 3:  # keep two by two for the Linear
            layers.append(nn.MaxPool2d(2))
            sides = [side // 2 for side in sides]
        planes = width
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2)]  # cnn_bn's
    return nn.Sequential(*layers, nn.Linear(4 * planes, classes))
