"""New images for a trained network: files, folders, arrays and lists, brought to the shape it was trained on.

An image that cannot be used is a `Problem` in its place, so that the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protoseam.errors import DataError
from protoseam.lab.data.archives import ZipTree, ignored
from protoseam.lab.data.arrays import NPZ_LIMITS, parse_npy
from protoseam.lab.data.images import Problem, decode_image, quiet_pillow, resize_pixels
from protoseam.lab.data.layout import SUFFIXES

# (what to call it, its pixels (H, W, C) or features (F,), or why there are none)
Sample = tuple[str, "NDArray[Any] | Problem"]
NOT_FINITE = "holds NaN or infinity: drop or fill such values"
_MOST_BYTES = 256 * 2**20
_ARRAYS = ("x", "images", "x_test", "X_test", "test_images", "test_x")


def find_samples(places: Iterable[str], shape: Sequence[int], listed: Iterable[str] = ()) -> Iterator[Sample]:
    """Each sample at these places: image files, folders of them (all below), ``.npz`` arrays, ``-`` for a list.

    Args:
        places: paths, in the order in which they are answered.
        shape: of a training sample, (C, H, W) or (F,).
        listed: lines with one path each, read where a place is ``-``.

    Raises:
        DataError: if a place does not exist, or a folder holds no image.
    """
    for place in places:
        if place == "-":
            named = [line.rstrip("\r\n") for line in listed if line.strip()]
            if not named:
                raise DataError("standard input names no image: write one path per line")
            yield from find_samples(named, shape)
            continue
        path = Path(place).expanduser()
        if path.suffix == ".npz" and path.is_file():
            yield from _from_npz(path, shape)
        elif path.is_dir():
            found = sorted(path / name for name in _below(path) if name.lower().endswith(SUFFIXES))
            if not found:
                raise DataError(f"{path} holds no image: files must end in {', '.join(SUFFIXES)}")
            yield from ((str(file), _pixels(file, shape)) for file in found)
        elif path.exists() or path.suffix.lower() in SUFFIXES:
            yield str(path), _pixels(path, shape)  # a missing one of many is named like a damaged one
        else:
            raise DataError(
                f"there is no {path}: name images, folders of images, .npz files, or - for a list"
            )


def _below(folder: Path) -> Iterator[str]:
    """The files below a folder by their relative names; those that training leaves out are left out here."""
    for here, folders, files in os.walk(folder):
        inside = Path(here).relative_to(folder)
        folders[:] = [name for name in folders if not ignored((inside / name).as_posix())]
        yield from (name for name in ((inside / file).as_posix() for file in files) if not ignored(name))


def _pixels(path: Path, shape: Sequence[int]) -> NDArray[Any] | Problem:
    if len(shape) == 1:
        what = "an image" if path.suffix.lower() in SUFFIXES else "no .npz file"
        return Problem(
            f"is {what}, and the network takes rows of {shape[0]} features: np.savez('new.npz', x=rows)"
        )
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return Problem(f"has more than {_MOST_BYTES:,} bytes: shrink it")
        return read_image(data, shape)
    except OSError as error:
        return Problem(f"cannot be read ({error.strerror or error})")
    except Problem as problem:
        return problem


def read_image(data: bytes, shape: Sequence[int]) -> NDArray[np.uint8]:
    """The pixels (H, W, C) of an image file, as training reads them. Raises `Problem`."""
    with quiet_pillow():
        pixels, grey = decode_image(data, least=max(shape[1:]))
    return fit_image(pixels[..., :1] if grey else pixels, shape)


def fit_image(pixels: NDArray[np.uint8], shape: Sequence[int]) -> NDArray[np.uint8]:
    """Pixels (H, W, C) in the training shape (C, H, W): the centre, scaled to cover it, in colour or grey.

    For a square this is what ``image_size`` does in training. Grey becomes three equal channels where the network takes
    colours; colours become their luminance (ITU-R 601) where it takes grey.

    Raises:
        Problem: if the channels cannot be brought to the network's.
    """
    from PIL import Image

    channels, height, width = shape
    if pixels.shape[2] == 1 and channels == 3:
        pixels = pixels.repeat(3, axis=2)
    elif pixels.shape[2] == 3 and channels == 1:
        pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))[..., None]
    if pixels.shape[2] != channels:
        raise Problem(f"has {pixels.shape[2]} channels, and the network takes {channels}")
    return resize_pixels(pixels, height, width)


def _from_npz(path: Path, shape: Sequence[int]) -> Iterator[Sample]:
    tree = ZipTree(path, NPZ_LIMITS)
    present = [name.removesuffix(".npy") for name in tree.names()]
    name = next((n for n in _ARRAYS if n in present), present[0] if len(present) == 1 else None)
    if name is None:
        raise DataError(
            f"{path} holds {', '.join(present) or 'nothing'}: name the images one of {', '.join(_ARRAYS)}"
        )
    ((_, data),) = tree.read(lambda member: member.removesuffix(".npy") == name)
    array = parse_npy(data, f"{path}: {name}")
    if len(shape) == 1 and array.ndim == 2 and array.shape[1] == shape[0] and array.dtype.kind in "iufb":
        with np.errstate(over="ignore"):  # too large for float32 becomes infinity
            rows = array.astype(np.float32)
        yield from (
            (f"{path}[{i}]", row if np.isfinite(row).all() else Problem(NOT_FINITE))
            for i, row in enumerate(rows)
        )
        return
    if array.ndim == 3 and len(shape) == 3:
        array = array[..., None]
    if len(shape) == 1 or array.ndim != 4 or array.dtype != np.uint8:
        wanted = f"(N, {shape[0]}) numbers" if len(shape) == 1 else "uint8 (N, H, W, C) or (N, H, W) images"
        raise DataError(f"{path}: {name} is {array.dtype} of shape {array.shape}, and the run takes {wanted}")
    for i, pixels in enumerate(array):
        try:
            yield f"{path}[{i}]", fit_image(pixels, shape)
        except Problem as problem:
            yield f"{path}[{i}]", problem
