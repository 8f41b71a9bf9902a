"""Image folders and TinyImageNet: what is read, what is converted, and one report of all that cannot be used."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miniature_files import jpeg, png, write_folder, write_tar, write_zip
from PIL import Image

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data import images
from protoseam.lab.data import images as images_module
from protoseam.lab.data.archives import open_tree
from protoseam.lab.data.dataset import check
from protoseam.lab.data.images import Problem, decode_image, read_image_folder, read_tiny_imagenet
from protoseam.lab.data.loading import load

RNG = np.random.default_rng(0)


def rgb(count: int = 1, height: int = 6, width: int = 5) -> np.ndarray:
    return RNG.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def pictures(prefix: str, array: np.ndarray) -> dict[str, bytes]:
    return {f"{prefix}/{i:03}.png": png(image) for i, image in enumerate(array)}


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


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


def test_modes_that_convert() -> None:
    array = rgb()[0]
    np.testing.assert_array_equal(decode_image(png(array))[0], array)
    assert decode_image(png(array, "L"))[1]
    assert decode_image(png(array, "1"))[1]
    palette = Image.fromarray(array).quantize(4)
    np.testing.assert_array_equal(
        decode_image(encoded(palette, "PNG"))[0], np.asarray(palette.convert("RGB"))
    )
    see_through = np.dstack([array, np.full((6, 5), 255, np.uint8)])
    see_through[0, 0, 3] = 0
    got, grey = decode_image(encoded(Image.fromarray(see_through), "PNG"))
    assert not grey
    np.testing.assert_array_equal(got[0, 0], 0)  # transparent becomes black, not what lies beneath
    np.testing.assert_array_equal(got[1:], array[1:])


def png16() -> bytes:
    """A 16-bit RGB PNG, which Pillow reads but cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    rows = (b"\0" + bytes(12)) * 2
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def test_one_report_names_every_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100 * 100)
    array = rgb()[0]
    image = Image.fromarray(array)
    files = {
        **pictures("a", rgb(5)),
        "a/cut.png": png(array)[:-40],
        "a/cut.jpg": jpeg(rgb(1, 64, 64)[0])[:-400],
        "a/huge.png": png(np.zeros((101, 100, 3), np.uint8)),
        "a/moving.gif": encoded(image, "GIF", save_all=True, append_images=[Image.fromarray(rgb()[0])]),
        "a/ink.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "a/deep.png": encoded(Image.fromarray(np.zeros((6, 5), np.uint16)), "PNG"),
        "a/deep_rgb.png": png16(),
        "a/float.tif": encoded(Image.fromarray(np.zeros((6, 5), np.float32)), "TIFF"),
        "a/other_size.png": png(rgb(1, 5, 6)[0]),
        "a/text.png": b"not an image",
    }
    with pytest.raises(DataError, match="10 image files cannot be used") as caught:
        read_image_folder(open_tree(write_folder(tmp_path, files)), "x")
    message = str(caught.value)
    for name, reason in {
        "cut.png": "truncated",
        "cut.jpg": "truncated",
        "huge.png": "is 100×101 pixels",
        "moving.gif": "animated",
        "ink.jpg": "mode CMYK",
        "deep.png": "16 bits",
        "deep_rgb.png": "16 bits",
        "float.tif": "16 bits or more",
        "other_size.png": "is 6×5 while most are 5×6",
        "text.png": "is not one of PNG, JPEG",
    }.items():
        line = next(line for line in message.splitlines() if name in line and f"a/{name} " in line)
        assert reason in line, line


def test_a_long_report_is_cut_at_twenty(tmp_path: Path) -> None:
    write_folder(tmp_path, {f"a/{i}.png": b"x" for i in range(25)})
    with pytest.raises(DataError, match=r"25 image files cannot be used[\s\S]*… and 5 more") as caught:
        read_image_folder(open_tree(tmp_path), "x")
    assert len(str(caught.value).splitlines()) == 22


def test_decompression_bombs_in_a_picture_are_reported(tmp_path: Path) -> None:
    huge = png(np.zeros((2, 2), np.uint8)).replace(
        struct.pack(">II", 2, 2), struct.pack(">II", 60_000, 60_000)
    )
    crc = zlib.crc32(huge[12:29])
    write_folder(tmp_path, {"a/huge.png": huge[:29] + struct.pack(">I", crc) + huge[33:]})
    with pytest.raises(DataError, match=r"huge\.png is far larger"):
        read_image_folder(open_tree(tmp_path), "x")


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
    ],
)
def test_layouts_that_cannot_be_meant(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_image_folder(open_tree(write_folder(tmp_path, files)), "x")


def test_classes_may_have_folders_of_their_own(tmp_path: Path) -> None:
    files = {f"{c}/{age}/{i}.png": png(rgb()[0]) for c in "ab" for age in ("old", "new") for i in range(5)}
    assert read_image_folder(open_tree(write_folder(tmp_path, files)), "x").classes == ("a", "b")


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
    with pytest.raises(DataError, match=r"training lacks 1 .*'b'[\s\S]*have no image at all: 'void'"):
        check(read_image_folder(open_tree(tmp_path), "x"))


def test_without_pillow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install"):
        decode_image(b"")


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


BASES = [
    png(rgb()[0]),
    jpeg(rgb(1, 8, 8)[0]),
    encoded(Image.fromarray(rgb()[0]).quantize(4), "GIF"),
    encoded(Image.fromarray(rgb()[0]), "TIFF"),
    encoded(Image.fromarray(rgb()[0]), "WEBP"),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(BASES),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=5),
    st.integers(0, 60),
)
def test_fuzz_pictures(base: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(base)
    for place, value in edits:
        data[place % len(data)] = value
    try:
        with images.quiet_pillow():
            pixels, _ = decode_image(bytes(data[: len(data) - cut]))
        assert pixels.dtype == np.uint8
        assert pixels.shape[-1] == 3
    except Problem as problem:
        assert str(problem)  # noqa: PT017  any other exception fails the test


def test_no_program_is_started_for_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands EPS files to Ghostscript, whatever their name ends in."""
    started = []
    monkeypatch.setattr("subprocess.Popen.__init__", lambda self, *args, **options: started.append(args))
    monkeypatch.setattr("subprocess.check_call", lambda *args, **options: started.append(args))
    for kind in ("EPS", "PCX", "TGA", "ICO", "SGI"):
        with pytest.raises(Problem, match="is not one of PNG, JPEG"):
            decode_image(encoded(Image.fromarray(rgb()[0]), kind))
    assert not started


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "PPM", "GIF", "JPEG"])
def test_every_promised_format_is_read(kind: str) -> None:
    pixels, grey = decode_image(encoded(Image.fromarray(rgb()[0]), kind))
    assert pixels.shape == (6, 5, 3)
    assert not grey


def test_a_preview_does_not_make_a_photograph_animated() -> None:
    photograph = Image.fromarray(rgb()[0])
    data = encoded(photograph, "MPO", save_all=True, append_images=[photograph.resize((2, 2))])
    assert decode_image(data)[0].shape == (6, 5, 3)


def test_what_becomes_of_each_mode(tmp_path: Path) -> None:
    """1-bit and palette images with transparency are read; ink, 16 bits and animations are named with a remedy."""
    picture = Image.fromarray(rgb()[0])
    transparent = encoded(picture.quantize(4), "PNG", transparency=0)
    pixels, grey = decode_image(transparent)
    alpha = np.asarray(picture.quantize(4)) == 0
    assert alpha.any()
    assert not grey
    assert (pixels[alpha] == 0).all()  # composited over black
    assert decode_image(encoded(picture.convert("1"), "PNG"))[1]
    moving = [picture.rotate(90 * i) for i in range(1, 3)]
    files = {
        "a/cut.jpg": jpeg(rgb(1, 64, 64)[0])[:200],
        "a/moving.png": encoded(picture, "PNG", save_all=True, append_images=moving),
        "a/moving.webp": encoded(picture, "WEBP", save_all=True, append_images=moving),
        "a/pages.tif": encoded(picture, "TIFF", save_all=True, append_images=moving),
        "a/ink.tif": encoded(picture.convert("CMYK"), "TIFF"),
        "a/deep.tif": encoded(Image.fromarray(np.zeros((6, 5), np.uint16)), "TIFF"),
        "a/lab.tif": encoded(picture.convert("LAB"), "TIFF"),
    }
    with pytest.raises(DataError) as caught:
        read_image_folder(open_tree(write_folder(tmp_path, {**files, **pictures("b", rgb(5))})), "x")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("7 image files cannot be used:")
    remedies = {
        "cut.jpg": "replace or remove it",
        "moving.png": "is animated or has 3 pages: save the one you mean",
        "moving.webp": "is animated or has 3 pages: save the one you mean",
        "pages.tif": "is animated or has 3 pages: save the one you mean",
        "ink.tif": "has the colour mode CMYK: convert it to RGB",
        "deep.tif": "16 bits or more per channel: convert it to 8 bits",
        "lab.tif": "has the colour mode LAB: convert it to RGB",
    }
    for name, remedy in remedies.items():
        assert any(line.startswith(f"  - a/{name} ") and remedy in line for line in lines), (name, lines)


def mixed_sizes() -> dict[str, bytes]:
    """Eight files for each of two classes: sizes, modes and formats as a folder of photographs has them."""
    files = {}
    for label in ("a", "b"):
        for i, (height, width) in enumerate([(30, 40), (64, 48), (16, 16), (21, 90), (50, 50)]):
            colour = Image.fromarray(rgb(1, height, width)[0])
            files[f"{label}/{i}.png"] = encoded(colour, "PNG")
            files[f"{label}/{i}.jpg"] = encoded(colour, "JPEG")
        files[f"{label}/grey.png"] = encoded(Image.fromarray(rgb(1, 33, 20)[0]).convert("L"), "PNG")
        files[f"{label}/rgba.png"] = encoded(Image.fromarray(rgb(1, 20, 31)[0]).convert("RGBA"), "PNG")
        files[f"{label}/palette.png"] = encoded(Image.fromarray(rgb(1, 28, 28)[0]).convert("P"), "PNG")
    return files


def test_images_of_any_size_and_mode_are_resized(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "mixed", mixed_sizes())
    dataset = load(str(path), tmp_path / "root", image_size=24)
    assert dataset.sample_shape == (24, 24, 3)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 26
    again = load(str(path), tmp_path / "root", image_size=24)  # from the decoded copy
    np.testing.assert_array_equal(dataset.train_images, again.train_images)
    # another size is another decoded copy
    assert load(str(path), tmp_path / "root", image_size=16).sample_shape == (16, 16, 3)
    with pytest.raises(
        DataError, match=r"To have all images resized and cropped to one size: --image_size 24"
    ):
        load(str(path), tmp_path / "root")


@pytest.mark.parametrize("size", [(30, 41), (64, 48), (24, 24), (21, 90), (9, 7)])
def test_resizing_is_torchvisions(size: tuple[int, int]) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = Image.fromarray(rgb(1, *size)[0])
    expected = transforms.CenterCrop(24)(transforms.Resize(24)(image))
    np.testing.assert_array_equal(np.asarray(images.resize_image(image, 24)), np.asarray(expected))
    array = np.asarray(image)[None]
    np.testing.assert_array_equal(images.resize_arrays(array, 24)[0], np.asarray(expected))


def test_a_resized_image_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = np.asarray(images.resize_image(Image.fromarray(stripes), 8))
    assert abs(int(small.min()) - 127) < 12
    assert abs(int(small.max()) - 127) < 12


def test_named_and_array_data_are_resized_too(tmp_path: Path) -> None:
    assert load("digits", image_size=16).sample_shape == (16, 16, 1)
    rows = RNG.normal(size=(6, 4)).astype(np.float32)
    np.savez(
        tmp_path / "rows.npz", x_train=rows, y_train=np.arange(6) % 2, x_test=rows, y_test=np.arange(6) % 2
    )
    with pytest.raises(DataError, match=r"image_size=.*features, not images"):
        load(str(tmp_path / "rows.npz"), image_size=16)
