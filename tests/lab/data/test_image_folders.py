"""Image folders and TinyImageNet: which layouts are read, how they are split, and which cannot be meant."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from made_up_images import RNG, pictures, rgb
from miniature_files import jpeg, png, write_folder, write_tar, write_zip
from PIL import Image

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data import images as images_module
from protoseam.lab.data.archives import open_tree
from protoseam.lab.data.dataset import check
from protoseam.lab.data.images import read_image_folder, read_tiny_imagenet
from protoseam.lab.data.loading import load


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("train", "val"), ("train", "validation"), ("Training", "Testing")]
)
@pytest.mark.parametrize("how", ["folder", "wrapped zip", "tar"])
def test_train_and_test_folders(tmp_path: Path, how: str, train: str, test: str) -> None:
    cat, dog, unseen = rgb(3), rgb(2), rgb(2)
    files = {**pictures(f"{train}/dog", dog), **pictures(f"{train}/cat/deeper", cat)}
    files |= {f"{test}/cat/1.PNG": png(unseen[0]), f"{test}/dog/2.png": png(unseen[1])}
    files[f"{train}/cat/readme.txt"] = b"not an image, and not taken for one"
    if how == "folder":
        path = write_folder(tmp_path / "pets", files)
    elif how == "tar":
        path = write_tar(tmp_path / "pets.tar.gz", files)
    else:
        path = write_zip(tmp_path / "pets.zip", {f"pets/{name}": data for name, data in files.items()})
    dataset = read_image_folder(open_tree(path), "pets")
    assert dataset.classes == ("cat", "dog")
    np.testing.assert_array_equal(dataset.train_images, np.concatenate([cat, dog]))
    np.testing.assert_array_equal(dataset.train_labels, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(dataset.test_images, unseen)
    np.testing.assert_array_equal(dataset.test_labels, [0, 1])
    check(dataset)


def test_class_folders_alone_are_split_by_the_documented_rule(tmp_path: Path) -> None:
    write_folder(tmp_path, {**pictures("a", rgb(10)), **pictures("b", rgb(5))})
    one, two = (read_image_folder(open_tree(tmp_path), "x") for _ in range(2))
    assert np.bincount(one.test_labels).tolist() == [2, 1]
    assert np.bincount(one.train_labels).tolist() == [8, 4]
    np.testing.assert_array_equal(one.test_images, two.test_images)


def test_grey_stays_grey_only_if_all_are(tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (10, 4, 4, 1), dtype=np.uint8)
    write_folder(tmp_path, pictures("a", grey))
    dataset = read_image_folder(open_tree(tmp_path), "x")
    assert dataset.sample_shape == (4, 4, 1)
    np.testing.assert_array_equal(
        np.sort(np.concatenate([dataset.train_images, dataset.test_images]), 0), np.sort(grey, 0)
    )
    write_folder(tmp_path, {"a/colour.png": png(rgb(1, 4, 4))})
    assert read_image_folder(open_tree(tmp_path), "x").sample_shape == (4, 4, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/a/1.png": b""}, "has train/ but none of test/, testing/, val/"),
        ({"a.txt": b""}, "no images in class folders"),
        ({"1.png": b"", "a/1.png": b""}, "1 images lie in no class folder"),
        (
            {"train/1.png": b"", "train/a/1.png": b"", "test/a/1.png": b""},
            "lie in no class folder, first train/1",
        ),
        (
            {f"seg_{part}/{label}/1.png": b"" for part in ("train", "test") for label in "abc"},
            r"seg_test/, seg_train/ each hold the folders a, b, c….*parts of a data set .*name them train/ and test/",
        ),
        (
            {f"seg_{part}/seg_{part}/{label}/1.png": b"" for part in ("train", "test") for label in "abc"}
            | {"seg_pred/seg_pred/1.png": b""},
            r"seg_test/, seg_train/ each hold the folders a, b, c….*name them train/ and test/",
        ),
        ({"train/1.png": b"", "test1/1.png": b""}, "has train/ but none of test/"),
        ({"train/1.png": b"", "test/1.png": b""}, "1 images lie in no class folder, first train/1.png"),
        (
            {"train/steam/1.png": b"", "car/1.png": b""},
            "move the class folders up one level .*If train/ is a class, rename it",
        ),
        ({"a/1.heic": b"", "b/2.heic": b""}, r"holds no images in .*\. 2 files end in \.heic: convert them"),
    ],
)
def test_layouts_that_cannot_be_meant(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_image_folder(open_tree(write_folder(tmp_path, files)), "x")


def test_classes_may_have_folders_of_their_own(tmp_path: Path) -> None:
    files = {f"{c}/{age}/{i}.png": png(rgb()[0]) for c in "ab" for age in ("old", "new") for i in range(5)}
    files |= pictures("c/one", rgb(5))
    told = (
        r"a/ holds folders itself \(new, old\).* class 'a'; so it is with 1 more\. If the inner folders are"
    )
    with pytest.warns(DataWarning, match=told):
        assert read_image_folder(open_tree(write_folder(tmp_path, files)), "x").classes == ("a", "b", "c")


def test_wrappers_around_the_set_and_inside_its_parts(tmp_path: Path) -> None:
    """`train/seg_train/CLASS`, as some archives unpack; a test part of one class is not taken for wrapped."""
    for i, (train, test) in enumerate((("train/seg_train", "test/seg_test"), ("train", "test"))):
        files = {**pictures(f"set/set/{train}/a", rgb(3)), **pictures(f"set/set/{train}/b/deeper", rgb(3))}
        files |= pictures(f"set/set/{test}/b/deeper", rgb(2))
        dataset = read_image_folder(open_tree(write_folder(tmp_path / str(i), files)), "x")
        assert dataset.classes == ("a", "b")
        assert (dataset.train_labels.tolist(), dataset.test_labels.tolist()) == ([0, 0, 0, 1, 1, 1], [1, 1])
        assert not dataset.held_out


def test_a_class_may_be_called_train_or_test(tmp_path: Path) -> None:
    files = {**pictures("train", rgb(5)), **pictures("car", rgb(5)), **pictures("test", rgb(5))}
    dataset = read_image_folder(open_tree(write_folder(tmp_path, files)), "x")
    assert dataset.classes == ("car", "test", "train")
    assert dataset.held_out


def test_what_was_held_out_is_known_from_the_decoded_copy(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pets", {**pictures("a", rgb(9)), **pictures("b", rgb(9))})
    assert [load(str(folder), tmp_path / "root").held_out for _ in range(2)] == [True, True]


@pytest.mark.parametrize("how", ["folder", "zip"])
def test_folders_and_files_that_cannot_be_read_are_counted_by_ending(tmp_path: Path, how: str) -> None:
    files = {**pictures("cat", rgb(5)), **pictures("dog", rgb(5)), "dog/1.HEIC": b"", "cat/2.avif": b""}
    files |= {f"ant/{i}.HEIC": b"" for i in range(10)} | {"ant/notes.txt": b""}
    write = write_folder if how == "folder" else write_zip
    missing = (
        r"lies in ant/ \(10 files end in \.heic, 1 in \.txt\)\. Convert what is there to JPEG or PNG, add"
    )
    with pytest.raises(DataError, match=missing):
        load(str(write(tmp_path / "pets.zip", files)), tmp_path / "root")
    kept = {name: data for name, data in files.items() if not name.startswith("ant/")}
    with pytest.warns(DataWarning, match=r"1 file ends in \.(heic|avif), 1 in .*: they are left out"):
        assert load(str(write(tmp_path / "two.zip", kept)), tmp_path / "root").classes == ("cat", "dog")


def test_a_validation_folder_beside_a_test_folder_is_named(tmp_path: Path) -> None:
    parts = ("Train", "VAL", "test")
    write_folder(tmp_path, {f"{part}/{c}/1.png": png(rgb()[0]) for part in parts for c in "ab"})
    with pytest.warns(DataWarning, match=r"test/.*\(VAL/\).*Train/"):
        assert len(read_image_folder(open_tree(tmp_path), "x").test_labels) == 2


def test_a_decoded_copy_of_another_layout_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts as a class has changed before; files of the official formats are not concerned."""
    folder = write_folder(tmp_path / "pets", {**pictures("a", rgb(9)), **pictures("b", rgb(9))})
    load(str(folder), tmp_path)
    load(str(folder), tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(images_module, "LAYOUT_VERSION", 99)
    load(str(folder), tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_too_few_images_to_split(tmp_path: Path) -> None:
    write_folder(tmp_path, pictures("a", rgb(2)))
    with pytest.raises(DataError, match="too few images"):
        read_image_folder(open_tree(tmp_path), "x")


def test_an_empty_class_folder_and_an_unseen_test_class_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {**pictures("train/a", rgb(3)), **pictures("test/b", rgb(1))})
    (tmp_path / "train" / "void").mkdir()
    with pytest.raises(
        DataError, match=r"lies in train/void/ \(it is empty\)\. Convert .*, or remove the folder"
    ):
        read_image_folder(open_tree(tmp_path), "x")
    (tmp_path / "train" / "void").rmdir()
    with pytest.raises(DataError, match=r"training lacks 1 .*'b'"):
        check(read_image_folder(open_tree(tmp_path), "x"))


def tiny_files(count: int = 3) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """Two classes whose order in wnids.txt is not the sorted one, and numbers past 9."""
    decoded, files = {}, {}
    for wnid in ("n02", "n01"):
        for i in (0, 2, 10):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(rgb(1, 8, 8)[0])
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b""
    for i in (0, 2, 10):
        files[f"val/images/val_{i}.JPEG"] = jpeg(rgb(1, 8, 8)[0])
    files["val/images/val_0.JPEG"] = jpeg(rgb(1, 8, 8)[0, ..., 0])  # a few of the official ones are grey
    files["test/images/test_0.JPEG"] = jpeg(rgb(1, 8, 8)[0])
    files["wnids.txt"] = b"n02\nn01\n"
    files["val/val_annotations.txt"] = (
        b"val_0.JPEG\tn02\t0\t0\t1\t1\nval_2.JPEG\tn01\t0\t0\t1\t1\nval_10.JPEG\tn02\t0\t0\t1\t1\n"
    )
    for name, data in files.items():
        if name.endswith("JPEG"):
            decoded[name] = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return files, decoded


@pytest.mark.parametrize("how", ["folder", "zip"])
def test_tiny_imagenet(tmp_path: Path, how: str) -> None:
    files, decoded = tiny_files()
    wrapped = {f"tiny-imagenet-200/{name}": data for name, data in files.items()}
    path = (
        write_folder(tmp_path / "d", wrapped) if how == "folder" else write_zip(tmp_path / "t.zip", wrapped)
    )
    dataset = read_tiny_imagenet(open_tree(path), "tinyimagenet")
    assert dataset.classes == ("n01", "n02")
    np.testing.assert_array_equal(dataset.train_labels, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(dataset.test_labels, [1, 0, 1])
    order = [f"train/{w}/images/{w}_{i}.JPEG" for w in ("n01", "n02") for i in (0, 2, 10)]
    np.testing.assert_array_equal(dataset.train_images, np.stack([decoded[name] for name in order]))
    order = [f"val/images/val_{i}.JPEG" for i in (0, 2, 10)]
    np.testing.assert_array_equal(dataset.test_images, np.stack([decoded[name] for name in order]))


def test_tiny_imagenet_that_is_not_whole(tmp_path: Path) -> None:
    files, _ = tiny_files()
    del files["val/images/val_2.JPEG"]
    with pytest.raises(DataError, match="2 of 3 annotated validation images"):
        read_tiny_imagenet(open_tree(write_zip(tmp_path / "a.zip", files)), "t")
    del files["val/val_annotations.txt"]
    with pytest.raises(DataError, match=r"lacks val_annotations\.txt"):
        read_tiny_imagenet(open_tree(write_zip(tmp_path / "b.zip", files)), "t")
