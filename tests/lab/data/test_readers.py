"""Each official format is read back exactly; hostile and damaged files end in DataError and nothing else."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from miniature_files import (
    Exploit,
    Python2Pickle,
    binary_records,
    cifar_parts,
    idx_bytes,
    mutated,
    planes,
    protocol0_names,
    python2_batch,
    survives,
    write_folder,
    write_idx,
    write_tar,
    write_zip,
)

from protoseam.errors import DataError
from protoseam.lab.data.archives import open_tree
from protoseam.lab.data.catalog import CATALOG
from protoseam.lab.data.dataset import ArrayDataset, check
from protoseam.lab.data.pickles import read_cifar_pickle
from protoseam.lab.data.readers import (
    parse_cifar_binary,
    parse_cifar_python,
    parse_idx,
    read_cifar10_binary,
    read_cifar10_python,
    read_cifar100_binary,
    read_cifar100_python,
    read_idx,
)

TEN = [f"class{i}" for i in range(10)]
# the official file, byte for byte (MD5 5ff9c542aee3614f3951f8cda6e48888)
OFFICIAL_META = (
    b"\x80\x02}q\x01(U\x13num_cases_per_batchq\x02M\x10'U\x0blabel_namesq\x03]q\x04(U\x08airplaneq\x05U"
    b"\nautomobileq\x06U\x04birdq\x07U\x03catq\x08U\x04deerq\tU\x03dogq"
    b"\nU\x04frogq\x0bU\x05horseq\x0cU\x04shipq\rU\x05truckq\x0eeU\x07num_visq\x0fM\x00\x0cu."
)
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def assert_holds(dataset: ArrayDataset, parts: dict, train: list[str], test: str) -> None:
    np.testing.assert_array_equal(dataset.train_images, np.concatenate([parts[name][0] for name in train]))
    np.testing.assert_array_equal(dataset.train_labels, np.concatenate([parts[name][1] for name in train]))
    np.testing.assert_array_equal(dataset.test_images, parts[test][0])
    np.testing.assert_array_equal(dataset.test_labels, parts[test][1])
    assert dataset.train_images.dtype == np.uint8
    assert dataset.train_labels.dtype == np.int64
    check(dataset)


def stored(tmp_path: Path, how: str, files: dict[str, bytes], folder: str) -> Path:
    inside = {f"{folder}/{name}": data for name, data in files.items()}
    if how == "folder":
        return write_folder(tmp_path, inside) / folder
    return write_zip(tmp_path / "a.zip", inside) if how == "zip" else write_tar(tmp_path / "a.tar.gz", inside)


@pytest.mark.parametrize("how", ["folder", "tar", "zip"])
def test_cifar10_python(tmp_path: Path, how: str) -> None:
    parts = cifar_parts(BATCHES)
    files = {name: python2_batch(*parts[name], "labels") for name in BATCHES}
    files["batches.meta"] = OFFICIAL_META if how == "tar" else protocol0_names("label_names", TEN)
    dataset = read_cifar10_python(open_tree(stored(tmp_path, how, files, "cifar-10-batches-py")), "cifar10")
    assert_holds(dataset, parts, BATCHES[:5], "test_batch")
    assert dataset.classes == (CATALOG["cifar10"].classes if how == "tar" else tuple(TEN))


@pytest.mark.parametrize("how", ["folder", "tar"])
def test_cifar10_binary(tmp_path: Path, how: str) -> None:
    parts = cifar_parts(BATCHES)
    files = {f"{name}.bin": binary_records(*parts[name]) for name in BATCHES}
    files["batches.meta.txt"] = "\n".join([*TEN, "", ""]).encode()
    dataset = read_cifar10_binary(open_tree(stored(tmp_path, how, files, "cifar-10-batches-bin")), "cifar10")
    assert_holds(dataset, parts, BATCHES[:5], "test_batch")
    assert dataset.classes == tuple(TEN)


@pytest.mark.parametrize("how", ["folder", "tar"])
def test_cifar100_takes_fine_labels(tmp_path: Path, how: str) -> None:
    parts = cifar_parts(["train", "test"], classes=100)
    names = [f"fine{i}" for i in range(100)]
    python = {name: python2_batch(*parts[name], "fine_labels") for name in parts}
    python["meta"] = Python2Pickle().dumps({"fine_label_names": names, "coarse_label_names": TEN})
    binary = {f"{name}.bin": binary_records(*parts[name], coarse=True) for name in parts}
    binary["fine_label_names.txt"] = "\n".join(names).encode()
    (tmp_path / "p").mkdir()
    (tmp_path / "b").mkdir()
    one = read_cifar100_python(open_tree(stored(tmp_path / "p", how, python, "cifar-100-python")), "cifar100")
    two = read_cifar100_binary(open_tree(stored(tmp_path / "b", how, binary, "cifar-100-binary")), "cifar100")
    for dataset in (one, two):
        assert_holds(dataset, parts, ["train"], "test")
        assert dataset.classes == tuple(names)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_batch_pickled_by_python_3_reads_the_same(protocol: int) -> None:
    images, labels = cifar_parts(["a"])["a"]
    data = pickle.dumps({"data": planes(images), "labels": labels.tolist()}, protocol=protocol)
    got_images, got_labels = parse_cifar_python(data, "batch", "labels")
    np.testing.assert_array_equal(got_images, images)
    np.testing.assert_array_equal(got_labels, labels)


def test_column_order_arrays_are_put_right() -> None:
    images, labels = cifar_parts(["a"])["a"]
    data = pickle.dumps({"data": np.asfortranarray(planes(images)), "labels": labels.tolist()}, protocol=2)
    np.testing.assert_array_equal(parse_cifar_python(data, "batch", "labels")[0], images)


def test_without_names_the_given_ones_serve(tmp_path: Path) -> None:
    parts = cifar_parts(BATCHES)
    files = {f"{name}.bin": binary_records(*parts[name]) for name in BATCHES}
    dataset = read_cifar10_binary(open_tree(write_folder(tmp_path, files)), "cifar10", tuple(TEN))
    assert dataset.classes == tuple(TEN)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("joint", ["-", "."])
def test_idx(tmp_path: Path, compressed: bool, joint: str) -> None:
    train_x, train_y, test_x, test_y = write_idx(tmp_path, compressed=compressed, joint=joint).values()
    dataset = read_idx(open_tree(tmp_path), "mnist")
    np.testing.assert_array_equal(dataset.train_images, train_x[..., None])
    np.testing.assert_array_equal(dataset.train_labels, train_y)
    np.testing.assert_array_equal(dataset.test_images, test_x[..., None])
    np.testing.assert_array_equal(dataset.test_labels, test_y)
    assert dataset.classes == tuple("0123456789")


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("call", "argument", "name"),
    [
        (os.system, "mkdir {}", "system"),
        (exec, "import os; os.mkdir('{}')", "exec"),
        (os.mkdir, "{}", "mkdir"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_and_does_not(
    tmp_path: Path, call: Callable[[str], object], argument: str, name: str, protocol: int
) -> None:
    target = tmp_path / "proof"
    data = pickle.dumps({"data": Exploit(call, argument.format(target)), "labels": [0]}, protocol=protocol)
    with pytest.raises(DataError, match=rf"data_batch_1 refused: the pickle asks for \w+\.{name}"):
        read_cifar_pickle(data, "data_batch_1")
    assert not target.exists()
    pickle.loads(data)  # noqa: S301  the same bytes do harm in the usual reader, so this tests something
    assert target.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "numbers a memo 2147483647"),
        (b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\nu.", "no array 'data'"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}U\x01aK\x01sb.",
            "cannot be read",
        ),  # BUILD on a class
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "uses the instruction NEWOBJ"),
        (b"\x80\x02U\x01aQ.", "uses the instruction BINPERSID"),
        (b"\x80\x02\x82\x01.", "uses the instruction EXT1"),
        (b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0hex\x86R.", "encodes text in a way"),
        (b"]K\x01a.", "holds a list"),
        (b"", "cannot be read"),
        (b"\x80\x02}(U\x04data", "cannot be read"),
    ],
)
def test_odd_pickles_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_cifar_python(data, "batch", "labels")


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.zeros((2, 3072), np.float64), id="floats"),
        pytest.param(np.zeros((2, 3071), np.uint8), id="a column short"),
        pytest.param(np.zeros((0, 3072), np.uint8), id="empty"),
        pytest.param(np.array([[None] * 3072]), id="objects"),
    ],
)
def test_wrong_arrays_in_a_batch_are_refused(array: np.ndarray) -> None:
    with pytest.raises(DataError):
        parse_cifar_python(pickle.dumps({"data": array, "labels": [0, 0]}, protocol=2), "batch", "labels")


def test_an_array_state_that_lies_about_its_length_is_refused() -> None:
    data = python2_batch(*cifar_parts(["a"], classes=5)["a"], "labels")
    with pytest.raises(DataError, match="bytes"):
        parse_cifar_python(data.replace(b"J\x0a\0\0\0J", b"J\xff\xff\xff\x7fJ", 1), "batch", "labels")


def test_an_incomplete_folder_names_what_is_missing(tmp_path: Path) -> None:
    parts = cifar_parts(BATCHES)
    write_folder(tmp_path, {f"{n}.bin": binary_records(*parts[n]) for n in BATCHES if n != "data_batch_3"})
    with pytest.raises(DataError, match=r"lacks data_batch_3\.bin;"):
        read_cifar10_binary(open_tree(tmp_path), "cifar10")
    write_folder(tmp_path, {"copy/data_batch_1.bin": b"", "data_batch_3.bin": b""})
    with pytest.raises(DataError, match="more than one folder"):
        read_cifar10_binary(open_tree(tmp_path), "cifar10")


def test_idx_says_what_is_wrong() -> None:
    good = idx_bytes(np.zeros((2, 3, 3), np.uint8))
    with pytest.raises(DataError, match="should hold 18 values"):
        parse_idx(good[:-1], "x", 3)
    with pytest.raises(DataError, match="should hold 18 values"):
        parse_idx(good + b"\0", "x", 3)
    with pytest.raises(DataError, match="swapped"):
        parse_idx(idx_bytes(np.zeros(12, np.uint8)), "x", 3)
    with pytest.raises(DataError, match="not an idx file"):
        parse_idx(b"PK\3\4" + bytes(20), "x", 3)
    huge = bytes([0, 0, 8, 3]) + b"\xff" * 12
    with pytest.raises(DataError, match="should hold"):
        parse_idx(huge, "x", 3)


# -- fuzzing: any bytes at all, and valid files with a few bytes changed ---------------------------------------


SMALL = cifar_parts(["a"], rows=1, classes=1)["a"]


@settings(max_examples=150, deadline=None)
@given(mutated(idx_bytes(np.zeros((2, 3, 3), np.uint8))))
def test_fuzz_idx(data: bytes) -> None:
    survives(lambda: parse_idx(data, "x", 3))


@settings(max_examples=100, deadline=None)
@given(mutated(binary_records(*SMALL)))
def test_fuzz_cifar_binary(data: bytes) -> None:
    survives(lambda: parse_cifar_binary(data, "x", 1))


HEAD = python2_batch(*SMALL, "labels")
# the edits should hit the instructions, not the pixels: a pickle without them is as good
BARE = Python2Pickle().dumps({"labels": [3, 4], "data": np.zeros((1, 3), np.uint8), "filenames": ["a"]})


@settings(max_examples=300, deadline=None)
@given(mutated(BARE) | mutated(protocol0_names("label_names", TEN)) | mutated(HEAD))
def test_fuzz_cifar_python(data: bytes) -> None:
    survives(lambda: parse_cifar_python(data, "x", "labels"))
