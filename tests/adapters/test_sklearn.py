"""The scikit-learn estimator under scikit-learn's own checks and tools."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from protoseam.adapters.sklearn import ProtoSeamClassifier, _Batches
from protoseam.errors import ProtoSeamError

IRIS = load_iris(return_X_y=True)
DIGITS = load_digits()
# what scikit-learn skips where pandas is not installed and SCIPY_ARRAY_API is not set
MAY_SKIP = {
    "check_sample_weights_pandas_series",
    "check_array_api_input",
    "check_classifier_data_not_an_array",
}


def quick(**options: Any) -> ProtoSeamClassifier:
    """An estimator for iris that trains in a fifth of a second."""
    return ProtoSeamClassifier(
        **{"network": 16, "dim": 8, "epochs": 5, "lr": 0.01, "random_state": 0, **options}
    )


def piped(**options: Any) -> Any:
    return make_pipeline(StandardScaler(), quick(**options))


def checked(estimator: ProtoSeamClassifier) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks fit 5 rows, and the seam says that they are few
        found = check_estimator(estimator, on_skip=None, on_fail="raise")
    return {check["check_name"]: check["status"] for check in found}


def test_every_check_of_scikit_learn_passes() -> None:
    statuses = checked(ProtoSeamClassifier(network=16, dim=4, epochs=4, lr=0.01))
    assert len(statuses) > 50
    assert {name for name, status in statuses.items() if status != "passed"} <= MAY_SKIP


@pytest.mark.slow
def test_every_check_passes_with_the_defaults() -> None:
    statuses = checked(ProtoSeamClassifier())
    assert {name for name, status in statuses.items() if status != "passed"} <= MAY_SKIP


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


@pytest.mark.parametrize(
    ("X", "options", "least"),
    [
        (DIGITS.data / 16, {}, 0.92),
        (DIGITS.images / 16, {"network": (8, 16), "epochs": 8, "lr": 0.005}, 0.9),
        (
            DIGITS.images[:, None].astype(np.float32) / 16,
            {"network": small_cnn(), "epochs": 8, "lr": 0.005},
            0.9,
        ),
        (DIGITS.data / 16, {"network": (8, 16), "image_shape": (1, 8, 8), "epochs": 8, "lr": 0.005}, 0.9),
    ],
    ids=["table", "images", "a network of one's own", "images as rows"],
)
def test_tables_and_images_by_size_or_network(X: np.ndarray, options: dict[str, Any], least: float) -> None:
    names = np.array([f"digit {digit}" for digit in DIGITS.target])
    estimator = ProtoSeamClassifier(random_state=0, **options).fit(X[:1200], names[:1200])
    assert estimator.score(X[1200:], names[1200:]) > least
    assert estimator.decision_function(X[:5]).shape == (5, 10)
    plain = estimator.net_.deploy(fold=True)
    if "network" in options and isinstance(options["network"], nn.Module):
        assert [type(m) for m in plain] == [type(m) for m in options["network"]]
        with torch.no_grad():
            logits = plain(torch.tensor(X[:5]))
        assert np.allclose(estimator.decision_function(X[:5]), logits, atol=1e-4)


def test_in_a_pipeline_searched_and_in_two_processes() -> None:
    widths = {"protoseamclassifier__network": [np.int64(8), (16, 16)]}  # np.arange gives such numbers
    search = GridSearchCV(piped(), widths, cv=2, error_score="raise").fit(*IRIS)
    assert search.best_score_ > 0.85
    alone = cross_val_score(piped(), *IRIS, cv=2)
    assert np.array_equal(cross_val_score(piped(), *IRIS, cv=2, n_jobs=2), alone)
    assert alone.mean() > 0.85


@pytest.mark.parametrize("method", ["sigmoid", "temperature"])
def test_calibrated(method: str) -> None:
    calibrated = CalibratedClassifierCV(piped(), method=method, cv=2).fit(*IRIS)
    probability = calibrated.predict_proba(IRIS[0])
    assert np.allclose(probability.sum(1), 1)
    assert calibrated.score(*IRIS) > 0.85


def test_pickles_and_repeats_itself_without_touching_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two, other = (quick(random_state=seed).fit(*IRIS).predict_proba(IRIS[0]) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    estimator = quick(random_state=1).fit(*IRIS)
    again = pickle.loads(pickle.dumps(estimator))  # noqa: S301
    assert np.array_equal(again.predict_proba(IRIS[0]), one)
    assert again.fit(*IRIS).n_iter_ == 5


def test_two_classes_are_scored_by_one_number() -> None:
    X, y = IRIS[0][:100], np.array(["no", "yes"])[IRIS[1][:100]]
    estimator = quick().fit(X, y)
    scores = estimator.decision_function(X)
    assert scores.shape == (100,)
    assert np.array_equal(estimator.predict(X), np.where(scores > 0, "yes", "no"))
    assert np.allclose(estimator.predict_proba(X)[:, 1], 1 / (1 + np.exp(-scores)))


def test_rows_are_drawn_by_their_weight() -> None:
    x, y = torch.arange(4.0)[:, None], torch.zeros(4, dtype=torch.int64)

    def drawn(weight: list[float], epochs: int = 1) -> list[int]:
        batches = _Batches(x, y, np.array(weight), size=2)
        seen = torch.cat([xb for _ in range(epochs) for xb, _ in batches]).flatten().long()
        return torch.bincount(seen, minlength=4).tolist()

    assert drawn([1, 1, 1, 1]) == [1, 1, 1, 1]
    assert drawn([3, 1, 2, 1]) == [3, 1, 2, 1]
    assert drawn([0.75, 0.25, 0.5, 0.5], epochs=100) == pytest.approx([150, 50, 100, 100], abs=15)


def test_weights_decide_between_contradicting_labels() -> None:
    X, y = np.tile(IRIS[0], (2, 1)), np.concatenate([IRIS[1], (IRIS[1] + 1) % 3])
    weight = np.repeat([1.5, 0.001], 150)
    estimator = quick().fit(X, y, sample_weight=weight)
    assert estimator.score(*IRIS) > 0.85
    assert quick().fit(X, y, sample_weight=weight[::-1]).score(*IRIS) < 0.2


def test_stops_early_and_keeps_the_best() -> None:
    estimator = quick(epochs=40, validation_fraction=0.3, patience=3).fit(*IRIS)
    accuracy = [epoch["accuracy"] for epoch in estimator.history_]
    first, last = np.flatnonzero(accuracy == np.max(accuracy))[[0, -1]]
    assert estimator.n_iter_ == len(accuracy) == first + 4 < 40
    assert int(estimator.net_.progress[0]) == last
    assert quick(patience=1).fit(*IRIS).n_iter_ == 5


def test_the_last_step_competes_with_the_epochs() -> None:
    """The closed form of N2 comes after the last epoch, and is worth some points after a few."""
    x = DIGITS.data / 8 - 1
    fits = [
        ProtoSeamClassifier(epochs=2, random_state=seed, validation_fraction=0.1).fit(
            x[:1200], DIGITS.target[:1200]
        )
        for seed in (0, 1)
    ]
    assert np.mean([fit.score(x[1200:], DIGITS.target[1200:]) for fit in fits]) > 0.84


@pytest.mark.parametrize(
    ("X", "options", "weight", "told"),
    [
        (DIGITS.data, {"image_shape": (1, 8, 9)}, None, r"72 numbers, but a row of X has 64"),
        (np.zeros((20, 2, 2, 2, 2)), {}, None, r"give a network of your own"),
        (IRIS[0], {}, np.full(150, -1.0), r"0 or more"),
        (IRIS[0], {}, np.ones(3), r"150 rows"),
    ],
)
def test_refusals(X: np.ndarray, options: dict[str, Any], weight: Any, told: str) -> None:
    with pytest.raises(ProtoSeamError, match=told) as caught:
        quick(**options).fit(X, np.arange(len(X)) % 3, sample_weight=weight)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("setting", "kind"), [({"epochs": 0}, ValueError), ({"lr": "a"}, TypeError), ({"lr": -1}, ValueError)]
)
def test_settings_that_are_no_use_are_named(setting: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(setting))):
        ProtoSeamClassifier(**setting).fit(*IRIS)


@pytest.mark.parametrize(
    ("X", "options", "expected"),
    [
        (DIGITS.data, {"lr": 0.01}, 1 / (10 * 0.01 * 10)),  # ten steps of ten rows
        (DIGITS.data, {"weight_decay": 0.3}, 0.3),
        (DIGITS.data, {"lr": 0.0}, 0.01),
        (DIGITS.data, {"network": nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))}, 0.01),
        (DIGITS.images, {}, 0.01),
    ],
    ids=["table", "given", "no rate", "a network of one's own", "images"],
)
@pytest.mark.filterwarnings("ignore::protoseam.errors.SeamWarning")
def test_the_network_built_for_a_table_gets_more_weight_decay(
    X: np.ndarray, options: dict[str, Any], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    adamw = torch.optim.AdamW

    def watched(groups: Any, weight_decay: float) -> torch.optim.AdamW:
        used.append(weight_decay)
        return adamw(groups, weight_decay=weight_decay)

    monkeypatch.setattr(torch.optim, "AdamW", watched)
    ProtoSeamClassifier(epochs=1, random_state=0, **options).fit(X[:100], DIGITS.target[:100])
    assert used == [pytest.approx(expected)]


def test_a_layer_without_a_neuron_is_refused() -> None:
    with pytest.raises(ProtoSeamError, match=r"network=\(8, 0\): every width must be at least 1"):
        ProtoSeamClassifier((8, 0)).fit(*IRIS)
