"""The catalogue's facts, and load(): by name and by path, from every form the files may have."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from miniature_files import (
    binary_records,
    cifar_parts,
    png,
    protocol0_names,
    python2_batch,
    write_folder,
    write_idx,
    write_tar,
)

import protoseam.lab.data as data
from protoseam.errors import DataError, DataWarning
from protoseam.lab.data import cache, catalog, images, loading
from protoseam.lab.data.catalog import CATALOG
from protoseam.lab.data.dataset import ArrayDataset, check

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
PARTS = cifar_parts(BATCHES)
TRAIN = np.concatenate([PARTS[name][0] for name in BATCHES[:5]])


def load(name: str, root: Path) -> ArrayDataset:
    """Miniatures are never the official size: that warning, and no other, is expected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the official set has")
        return data.load(name, root)


def python_files() -> dict[str, bytes]:
    files = {name: python2_batch(*PARTS[name], "labels") for name in BATCHES}
    names = protocol0_names("label_names", list(CATALOG["cifar10"].classes))
    return {
        f"cifar-10-batches-py/{name}": content for name, content in {**files, "batches.meta": names}.items()
    }


def binary_files() -> dict[str, bytes]:
    return {f"cifar-10-batches-bin/{name}.bin": binary_records(*PARTS[name]) for name in BATCHES}


# -- the catalogue ---------------------------------------------------------------------------------------------


def test_every_entry_is_complete_and_downloads_by_https_only() -> None:
    assert list(CATALOG) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tinyimagenet"]
    digests = []
    for entry in CATALOG.values():
        assert len(entry.classes) in (0, entry.num_classes)
        assert len(set(entry.classes)) == len(entry.classes)
        for source in entry.sources:
            assert source.format in loading.READERS
            for file in source.files:
                assert file.url.startswith("https://")
                assert file.url.endswith(f"/{file.name}")
                assert file.size
                assert re.fullmatch("[0-9a-f]{64}", file.sha256 or "")
                digests.append(file.sha256)
    assert len(set(digests)) == len(digests) == 13


def test_names_forgive_case_and_hyphens() -> None:
    for written in ("CIFAR-10", "cifar_10", "Cifar10"):
        assert catalog.entry(written).name == "cifar10"
    assert catalog.entry("FashionMNIST").name == "fashion-mnist"
    with pytest.raises(DataError, match="the names are digits, mnist"):
        catalog.entry("imagenet")


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROTOSEAM_DATA", str(tmp_path))
    assert catalog.default_root() == tmp_path
    monkeypatch.delenv("PROTOSEAM_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.default_root() == tmp_path / ".cache" / "protoseam" / "data"


# -- by name ---------------------------------------------------------------------------------------------------


def test_digits_are_always_there(tmp_path: Path) -> None:
    dataset = data.load("digits", tmp_path / "nothing")
    entry = CATALOG["digits"]
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (entry.train_size, entry.test_size)
    assert dataset.sample_shape == entry.sample_shape
    assert (dataset.train_images.min(), dataset.train_images.max()) == (0, 255)
    assert np.bincount(dataset.test_labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    np.testing.assert_array_equal(data.load("digits").test_images, dataset.test_images)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("place", [".", "cifar10"])
@pytest.mark.parametrize("how", ["python archive", "python folder", "binary archive", "binary folder"])
def test_cifar10_in_each_form(tmp_path: Path, how: str, place: str) -> None:
    files = python_files() if "python" in how else binary_files()
    (tmp_path / place).mkdir(exist_ok=True)
    if "folder" in how:
        write_folder(tmp_path / place, files)
    else:
        write_tar(tmp_path / place / f"cifar-10-{how.split()[0]}.tar.gz", files)
    dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train_images, TRAIN)
    assert dataset.classes == CATALOG["cifar10"].classes
    assert isinstance(dataset.train_images, np.memmap)


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")]
)
def test_idx_sets_are_kept_apart(tmp_path: Path, name: str, folder: str) -> None:
    arrays = write_idx(tmp_path / folder, compressed=False)
    dataset = load(name, tmp_path)
    np.testing.assert_array_equal(dataset.train_images[..., 0], next(iter(arrays.values())))
    assert dataset.classes == CATALOG[name].classes
    other = "mnist" if name != "mnist" else "fashion-mnist"
    with pytest.raises(DataError, match=f"{other} is not under"):
        load(other, tmp_path)


def test_a_missing_set_says_which_file_goes_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load("cifar100", tmp_path)
    for part in (
        "cifar-100-binary.tar.gz",
        "cifar-100-python.tar.gz",
        "protoseam data get cifar100",
        "169 MB",
    ):
        assert part in str(caught.value)
    assert str(tmp_path / "cifar-100-python.tar.gz") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_short_set_is_announced(tmp_path: Path) -> None:
    write_folder(tmp_path, binary_files())
    with pytest.warns(
        DataWarning, match="36 training and 4 test images here; the official set has 50,000 and 10,000"
    ):
        data.load("cifar10", tmp_path)


def test_a_folder_of_arrays_under_the_root_will_do(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):
        np.save(tmp_path / "cifar10" / f"{split}_images.npy", TRAIN)
        np.save(tmp_path / "cifar10" / f"{split}_labels.npy", np.arange(len(TRAIN)) % 10)
    np.testing.assert_array_equal(load("cifar10", tmp_path).test_images, TRAIN)
    assert not (tmp_path / "cache").exists()


# -- by path ---------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOSEAM_DATA", str(tmp_path / "root"))
    write_folder(tmp_path, python_files())
    write_tar(tmp_path / "mine.tgz", binary_files())
    write_idx(tmp_path / "idx", compressed=True)
    x = TRAIN[:20]
    np.savez(
        tmp_path / "mine.npz", x_train=x, y_train=np.arange(20) % 2, x_test=x[:4], y_test=np.arange(4) % 2
    )
    pictures = {f"{c}/{i}.png": png(x[i + 5 * (c == "b")]) for c in "ab" for i in range(5)}
    write_folder(tmp_path / "pictures", pictures)
    for path, name, rows in (
        ("cifar-10-batches-py", "cifar-10-batches-py", 36),
        ("mine.tgz", "mine", 36),
        ("idx", "idx", 20),
        ("mine.npz", "mine", 20),
        ("pictures", "pictures", 8),
    ):
        dataset = data.load(str(tmp_path / path))
        assert (dataset.name, len(dataset.train_images)) == (name, rows)
        check(dataset)
    monkeypatch.chdir(tmp_path)
    assert data.load("mine.npz").name == "mine"
    assert data.load("./idx").num_classes == 10


def test_a_name_wins_over_a_file_unless_it_is_written_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROTOSEAM_DATA", str(tmp_path / "root"))
    write_idx(tmp_path / "digits", compressed=False)
    assert data.load("digits").sample_shape == (8, 8, 1)
    assert data.load("./digits").sample_shape == (28, 28, 1)


def test_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean cifar100\?"):
        data.load("cifra100", tmp_path)
    with pytest.raises(DataError, match="neither a data set's name nor an existing path"):
        data.load(str(tmp_path / "nowhere"))


def test_bad_labels_do_not_get_past_load(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        x_train=TRAIN,
        y_train=np.arange(36) % 3 + 1,
        x_test=TRAIN,
        y_test=np.arange(36) % 3 + 1,
    )
    with pytest.raises(DataError, match="subtract 1"):
        data.load(str(tmp_path / "a.npz"))


# -- the cache ---------------------------------------------------------------------------------------------------


def only_cache(root: Path) -> Path:
    (folder,) = (root / "cache").iterdir()
    return folder


def test_a_set_is_decoded_once_and_the_manifest_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_files())
    load("cifar10", tmp_path)
    manifest = json.loads((only_cache(tmp_path) / "manifest.json").read_text())
    assert manifest["sources"][0]["name"] == "cifar-10-binary.tar.gz"
    assert manifest["sources"][0]["bytes"] == (tmp_path / "cifar-10-binary.tar.gz").stat().st_size
    for file, facts in manifest["files"].items():
        assert cache.sha256_of(only_cache(tmp_path) / file) == facts["sha256"]
    monkeypatch.setitem(loading.READERS, "cifar10-binary", None)  # a second decoding would fail
    np.testing.assert_array_equal(load("cifar10", tmp_path).train_images, TRAIN)
    (tmp_path / "cifar-10-binary.tar.gz").unlink()  # and the source is no longer needed
    np.testing.assert_array_equal(load("cifar10", tmp_path).train_images, TRAIN)


def test_a_changed_source_is_decoded_anew(tmp_path: Path) -> None:
    files = binary_files()
    write_tar(tmp_path / "cifar-10-binary.tar.gz", files)
    load("cifar10", tmp_path)
    files["cifar-10-batches-bin/test_batch.bin"] = binary_records(TRAIN[:7], np.arange(7))
    write_tar(tmp_path / "cifar-10-binary.tar.gz", files)
    assert len(load("cifar10", tmp_path).test_images) == 7


def cut(folder: Path) -> None:
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-1])


def remove(folder: Path) -> None:
    (folder / "test_labels.npy").unlink()


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def outdate(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(f'"reader": {cache.READER_VERSION}', '"reader": 0'))


@pytest.mark.parametrize("damage", [cut, remove, garble, outdate])
def test_a_damaged_cache_is_noticed_and_rebuilt(tmp_path: Path, damage: object) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_files())
    load("cifar10", tmp_path)
    damage(only_cache(tmp_path))  # type: ignore[operator]
    with pytest.warns(DataWarning, match="is damaged .* and is rebuilt"):
        dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train_images, TRAIN)
    assert cache.damage(only_cache(tmp_path), hashes=True) is None


def test_a_flipped_byte_is_found_and_repaired_by_verify(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_files())
    load("cifar10", tmp_path)
    path = only_cache(tmp_path) / "train_images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.warns(DataWarning, match="official set"):
        result = data.verify("cifar10", tmp_path)
    assert "was damaged (train_images.npy does not match its SHA-256); rebuilt" in result.findings[1].detail
    np.testing.assert_array_equal(result.dataset.train_images, TRAIN)
    assert not result.ok  # the archive is not the official one, of course
    assert "is not the official file" in result.findings[0].detail
    assert cache.damage(only_cache(tmp_path), hashes=True) is None


def test_a_cache_that_cannot_be_written_slows_but_does_not_stop(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_files())
    (tmp_path / "cache").write_text("in the way")
    with pytest.warns(DataWarning, match="cannot be written"):
        dataset = load("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.train_images, TRAIN)


def test_a_killed_writer_leaves_no_half_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_files())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        load("cifar10", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    left = tmp_path / "cache" / ".writing-old"  # what SIGKILL would leave
    left.mkdir()
    os.utime(left, (0, 0))
    load("cifar10", tmp_path)
    assert not left.exists()


def test_an_edited_picture_folder_is_decoded_anew(tmp_path: Path) -> None:
    pictures = {f"{c}/{i}.png": png(TRAIN[i + 5 * (c == "b")]) for c in "ab" for i in range(5)}
    folder = write_folder(tmp_path / "p", pictures)
    before = load(str(folder), tmp_path)
    assert images.SPLIT_FRACTION == 0.2
    (folder / "a" / "9.png").write_bytes(png(TRAIN[9]))
    assert len(load(str(folder), tmp_path).train_images) == len(before.train_images) + 1
