"""Images of any size brought to one: torchvision's resize and crop, for folders, named data and arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_up_images import RNG, encoded, rgb
from miniature_files import write_folder
from PIL import Image

from protoseam.errors import DataError
from protoseam.lab.data import images
from protoseam.lab.data.loading import load


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
    with pytest.raises(DataError, match="image_size=5000: at most 4096"):
        load("digits", image_size=5000)
    rows = RNG.normal(size=(6, 4)).astype(np.float32)
    np.savez(
        tmp_path / "rows.npz", x_train=rows, y_train=np.arange(6) % 2, x_test=rows, y_test=np.arange(6) % 2
    )
    with pytest.raises(DataError, match=r"image_size=.*features, not images"):
        load(str(tmp_path / "rows.npz"), image_size=16)
