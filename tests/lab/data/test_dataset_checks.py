"""check(): one error that lists everything wrong, warnings for what is only odd, and many classes at speed."""

from __future__ import annotations

import time
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from protoseam.errors import DataError, DataWarning, ProtoSeamError
from protoseam.lab.data.dataset import ArrayDataset, check

RNG = np.random.default_rng(0)


def dataset(train: list[int], test: list[int], classes: int = 3) -> ArrayDataset:
    def images(count: int) -> np.ndarray:
        return RNG.integers(0, 256, (count, 2, 2, 1), dtype=np.uint8)

    names = tuple(f"c{i}" for i in range(classes))
    return ArrayDataset(
        "toy",
        images(len(train)),
        np.array(train, np.int64),
        images(len(test)),
        np.array(test, np.int64),
        names,
    )


GOOD = dataset([0, 0, 1, 1, 2, 2], [0, 1, 2])


def test_good_data_pass_without_a_word() -> None:
    check(GOOD)
    assert GOOD.num_classes == 3
    assert GOOD.sample_shape == (2, 2, 1)
    with pytest.raises(FrozenInstanceError):
        GOOD.name = "x"  # type: ignore[misc]
    features = replace(
        GOOD,
        train_images=np.arange(18, dtype=np.float32).reshape(6, 3),
        test_images=np.eye(3, dtype=np.float32),
    )
    check(features)
    assert features.sample_shape == (3,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dataset([0, 0, 1, 1], [0, 1]), r"1 of 3 classes have no image at all: 'c2' \(2\)"),
        (dataset([0, 0, 1, 1], [0, 2]), r"training lacks 1 of the classes that test has: 'c2'"),
        (dataset([1, 1, 2, 2, 3, 3], [1, 2, 3]), "run from 1 to 3.*subtract 1"),
        (dataset([1, 1, 2, 2], [1, 2]), "run from 1 to 2.*subtract 1"),
        (dataset([0, 0, 1, -1, 2, 2], [0, 1]), "negative.*in 1 rows, first row 3 with -1"),
        (dataset([0, 0, 1, 1, 2, 7], [0, 1]), r"label 7 in row 5 \(and 0 more\) is not one of the 3 classes"),
        (replace(GOOD, train_labels=GOOD.train_labels[:-1]), "train has 6 images but 5 labels"),
        (replace(GOOD, test_labels=GOOD.test_labels[:0]), "test has 3 images but 0 labels"),
        (
            replace(GOOD, train_images=GOOD.train_images[:0], train_labels=GOOD.train_labels[:0]),
            "has no images",
        ),
        (replace(GOOD, train_images=GOOD.train_images.astype(np.float32)), "are float32 of shape"),
        (replace(GOOD, train_images=GOOD.train_images[..., 0]), "make them"),
        (replace(GOOD, train_images=GOOD.train_images.repeat(4, 3)), "train images have 4 channels: keep 1"),
        (replace(GOOD, test_images=GOOD.test_images[:, :1]), "bring both to one size"),
        (replace(GOOD, train_labels=GOOD.train_labels.astype(np.int32)), "give int64"),
        (replace(GOOD, classes=()), "no classes"),
    ],
)
def test_bad_data_are_named(bad: ArrayDataset, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(bad)


def test_nan_and_infinity_are_found() -> None:
    values = np.ones((5000, 2), np.float32)
    values[0, 0] = 2
    for bad in (np.nan, np.inf):
        broken = values.copy()
        broken[4321, 1] = bad
        labels = np.arange(5000, dtype=np.int64) % 3
        with pytest.raises(DataError, match="train features hold NaN or infinity, first in row 4321"):
            check(ArrayDataset("x", broken, labels, values, labels, ("a", "b", "c")))


def test_everything_wrong_is_said_at_once() -> None:
    bad = replace(GOOD, train_labels=GOOD.train_labels[:-1], test_images=GOOD.test_images[:, :1], classes=())
    with pytest.raises(DataError) as caught:
        check(bad)
    assert len(str(caught.value).splitlines()) == 4
    assert isinstance(caught.value, ProtoSeamError)
    assert isinstance(caught.value, ValueError)


def test_oddities_are_warned_about() -> None:
    with pytest.warns(DataWarning, match="1 classes have a single training image: 'c2'"):
        check(dataset([0, 0, 1, 1, 2], [0, 1]))
    same = np.full((6, 2, 2, 1), 9, np.uint8)
    with pytest.warns(DataWarning, match="all 6 train images are identical"):
        check(replace(GOOD, train_images=same))
    same[-1] = 8
    check(replace(GOOD, train_images=same))


def test_ten_thousand_classes() -> None:
    labels = np.arange(20_000, dtype=np.int64) % 10_000
    images = RNG.integers(0, 256, (20_000, 1, 1, 1), dtype=np.uint8)
    many = ArrayDataset("many", images, labels, images, labels, tuple(map(str, range(10_000))))
    start = time.perf_counter()
    check(many)
    with pytest.raises(DataError, match="have no image at all") as caught:
        check(replace(many, classes=tuple(map(str, range(20_000)))))
    assert "and 9990 more" in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(replace(many, train_images=images[:10_000], train_labels=labels[:10_000]))
    assert time.perf_counter() - start < 2  # milliseconds, in fact


def test_a_name_of_two_classes_is_refused() -> None:
    with pytest.raises(DataError, match="'c1' is the name of more than one class: give each its own"):
        check(replace(GOOD, classes=("c1", "c0", "c1")))
