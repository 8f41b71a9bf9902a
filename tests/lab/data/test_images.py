"""Single images: formats and modes that are read or converted, and one report of all that cannot be used."""

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
from made_up_images import encoded, pictures, rgb
from miniature_files import jpeg, png, write_folder
from PIL import Image, ImageOps

from protoseam.errors import DataError
from protoseam.lab.data import images
from protoseam.lab.data.archives import open_tree
from protoseam.lab.data.images import Problem, decode_image, read_image_folder
from protoseam.lab.data.samples import fit_image


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


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation_turns_an_image_upright(kind: str, tag: int) -> None:
    """By Pillow's own `exif_transpose`; sizes are those after turning."""
    array = rgb(1, 6, 5)[0]
    exif = Image.Exif()
    exif[0x0112] = tag
    data = encoded(Image.fromarray(array), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    pixels, _ = decode_image(data)
    assert pixels.shape[:2] == ((5, 6) if tag > 4 else (6, 5))
    np.testing.assert_array_equal(pixels, np.asarray(expected.convert("RGB")))
    np.testing.assert_array_equal(
        decode_image(data, 4)[0], np.asarray(images.resize_image(expected.convert("RGB"), 4))
    )


def test_a_damaged_orientation_is_no_reason_to_refuse_an_image() -> None:
    data = encoded(Image.fromarray(rgb()[0]), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    with images.quiet_pillow():
        assert decode_image(data)[0].shape == (6, 5, 3)


def test_large_photographs_are_read_where_they_are_brought_to_a_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100 * 100)
    monkeypatch.setattr(images, "MAX_RESIZED_PIXELS", 300 * 300)
    y, x = np.mgrid[:160, :240]
    photograph = np.stack([x, y, x], axis=2).astype(np.uint8)
    for data in (jpeg(photograph), png(photograph)):
        small = decode_image(data, 16)[0]
        expected = np.asarray(images.resize_image(Image.fromarray(photograph), 16))
        assert np.abs(small.astype(int) - expected).max() <= 4
        np.testing.assert_array_equal(fit_image(decode_image(data, least=16)[0], (3, 16, 16)), small)
        with pytest.raises(Problem, match=r"is 240×160 pixels, .* 10,000: shrink it, or give --image_size"):
            decode_image(data)
    assert decode_image(jpeg(photograph), least=70)[0].shape == (80, 120, 3)  # decoded at a half
    with pytest.raises(Problem, match=r"is 301×300 pixels, over the limit of 90,000: shrink it$"):
        decode_image(png(np.zeros((300, 301), np.uint8)), 16)


def test_the_limit_lies_below_pillows_own() -> None:
    assert images.MAX_PIXELS < 50_000_000 < images.MAX_RESIZED_PIXELS < Image.MAX_IMAGE_PIXELS


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


def test_without_pillow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="pip install"):
        decode_image(b"")


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
