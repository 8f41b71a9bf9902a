"""Images from files: the modes that convert without loss of meaning, and one report of all that do not.

- 8-bit grey, RGB, palette and 1-bit images are taken as they are. If every file is grey (1-bit, 8-bit, with or
  without alpha), the data set has one channel; otherwise every image becomes RGB.
- Transparency is composited over black. Dropping the alpha channel would uncover the colours beneath.
- 16-bit, floating-point, CMYK and other images are refused, because a silent conversion would change them.
- Animations are refused, because the frame is ambiguous; so are truncated and very large files. Without an image
  size, which bounds what is kept of each image, the limit is lower.
- Images are turned upright as their EXIF orientation says.
- With an image size, every image is resized and cropped to that square; without one, all must have one size.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protoseam.errors import DataError
from protoseam.lab.data.archives import FolderTree, Tree
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.layout import find_layout
from protoseam.lab.data.names import refuse_unprintable
from protoseam.lab.data.split import stratified_split

LAYOUT_VERSION = 4  # of what is taken for parts and classes, and of how a file becomes pixels
MAX_PIXELS = 4096 * 4096  # of an image that is kept as it is
MAX_RESIZED_PIXELS = 80_000_000  # of one that is brought to a size; Pillow itself warns above 89 million
# What Pillow may take a file for, whatever it is called: for some other formats it starts programs (EPS: gs).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
SPLIT_FRACTION = 0.2  # of a folder that comes without a test part

_GREY_MODES = ("1", "L", "LA", "La")
_CLEAN_MODES = (*_GREY_MODES, "RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "YCbCr")
_TIFF_BITS = 258  # the tag BitsPerSample
_ORIENTATION = 0x0112  # the EXIF tag, and the names of the turns that it stands for
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_SHOWN = 20


class Problem(Exception):
    """Why one image cannot be used; `decode_all` collects them into one error."""


def resize_image(image: Any, size: int) -> Any:
    """Resize a Pillow image's shorter side to ``size`` (bilinear, antialiased), and crop its centre to a square.

    The pixels equal those of torchvision's Resize(size) and CenterCrop(size).
    """
    width, height = image.size
    if min(width, height) != size:
        longer = int(size * max(width, height) / min(width, height))
        width, height = (size, longer) if width <= height else (longer, size)
        image = image.resize((width, height), _pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2.0), round((height - size) / 2.0)
    return image.crop((left, top, left + size, top + size))


def resize_pixels(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Scale pixels (H, W, C) to cover the new size, channel by channel, and crop the centre.

    For a square this is :func:`resize_image`.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = [_pillow().fromarray(np.ascontiguousarray(pixels[..., c])) for c in range(pixels.shape[2])]
    return np.stack([np.asarray(_cover(plane, height, width)) for plane in planes], axis=2)


def _cover(image: Any, height: int, width: int) -> Any:
    if height == width:
        return resize_image(image, height)
    scale = max(width / image.size[0], height / image.size[1])
    size = max(width, round(image.size[0] * scale)), max(height, round(image.size[1] * scale))
    image = image.resize(size, _pillow().Resampling.BILINEAR)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def resize_arrays(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Apply :func:`resize_image` to an array of images (N, H, W, C)."""
    if images.shape[1:3] == (size, size):
        return images
    resized = np.empty((len(images), size, size, images.shape[3]), dtype=np.uint8)
    for row, image in zip(resized, images, strict=True):
        row[:] = resize_pixels(image, size, size)
    return resized


def upright(image: Any) -> Any:
    """Return a Pillow image turned as its EXIF orientation says; without one, the image itself."""
    image.load()  # a TIFF is then upright already, and a PNG may have the tag behind the pixels
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged tag, which is no reason to refuse sound pixels
        return image
    return image if turn is None else image.transpose(getattr(_pillow().Transpose, turn))


def decode_image(
    data: bytes, image_size: int | None = None, *, least: int | None = None
) -> tuple[NDArray[np.uint8], bool]:
    """Return (H, W, 3) pixels, resized if a size is given, and whether the file was grey; raise `Problem`.

    An image larger than `MAX_PIXELS` is decoded only if a size is given, or ``least``, the shorter side that suffices:
    a JPEG then at a half, a quarter or an eighth of its size.
    """
    pil = _pillow()
    enough = image_size or least
    try:
        with pil.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            limit = MAX_RESIZED_PIXELS if enough else MAX_PIXELS
            if width * height > limit:
                remedy = (
                    "shrink it"
                    if enough or width * height > MAX_RESIZED_PIXELS
                    else "shrink it, or give --image_size"
                )
                raise Problem(f"is {width}×{height} pixels, over the limit of {limit:,}: {remedy}")
            if enough and width * height > MAX_PIXELS:
                image.draft(None, (enough, enough))  # of a JPEG; others decode whole
            # Phones write a JPEG and its preview as one MPO file: the first of the two is the photograph.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise Problem(f"is animated or has {image.n_frames} pages: save the one you mean")
            if image.mode.startswith(("I", "F")) or _has_16_bits(image, data):
                raise Problem("has 16 bits or more per channel: convert it to 8 bits")
            if image.mode not in _CLEAN_MODES:
                raise Problem(f"has the colour mode {image.mode}: convert it to RGB with a colour profile")
            grey, rgb = image.mode in _GREY_MODES, _to_rgb(upright(image), pil)
            return np.asarray(rgb if image_size is None else resize_image(rgb, image_size)), grey
    except Problem:
        raise
    except pil.UnidentifiedImageError as error:
        raise Problem(f"is not one of {', '.join(FORMATS)}: convert, replace or remove it") from error
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise Problem(f"is far larger than the limit of {MAX_RESIZED_PIXELS:,} pixels: shrink it") from error
    except Exception as error:  # decoders raise anything from OSError to struct.error on damaged bytes
        raise Problem(f"is truncated or damaged ({error}): replace or remove it") from error


def decode_all(
    where: str, files: Iterable[tuple[int, str, bytes]], count: int, image_size: int | None = None
) -> NDArray[np.uint8]:
    """Decode every (row, name, bytes) into one array, or raise one `DataError` that names every bad file."""
    images: NDArray[np.uint8] | None = None
    problems: list[tuple[str, str]] = []
    sizes: dict[str, tuple[int, int]] = {}
    all_grey = True
    with quiet_pillow():
        for row, name, data in files:
            try:
                pixels, grey = decode_image(data, image_size)
            except Problem as problem:
                problems.append((name, str(problem)))
                continue
            all_grey &= grey
            sizes[name] = (pixels.shape[0], pixels.shape[1])
            if images is None:
                images = _allocate(where, count, pixels.shape)
            if images.shape[1:] == pixels.shape:
                images[row] = pixels
    hint = ""
    if len(set(sizes.values())) > 1:
        hint = f"\nTo have all images resized and cropped to one size: --image_size {_usual_size(sizes.values())}"
        (height, width), _ = Counter(sizes.values()).most_common(1)[0]
        problems += [
            (name, f"is {w}×{h} while most are {width}×{height}: resize them all to one size")
            for name, (h, w) in sizes.items()
            if (h, w) != (height, width)
        ]
    if problems or images is None:
        lines = "".join(f"\n  - {name} {problem}" for name, problem in problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DataError(f"{where}: {len(problems)} image files cannot be used:{lines}{more}{hint}")
    return np.ascontiguousarray(images[..., :1]) if all_grey else images


def _usual_size(sizes: Collection[tuple[int, int]]) -> int:
    """Return the median of the shorter sides, at most 224, the input size of most networks."""
    shorter = sorted(min(size) for size in sizes)
    return max(8, min(224, shorter[len(shorter) // 2] // 8 * 8))


def read_image_folder(tree: Tree, name: str, image_size: int | None = None) -> ArrayDataset:
    """Read train/<class>/… and test/<class>/… (or val/), or <class>/… alone.

    The class names are the folder names, in plain string order. Without a test part, `stratified_split` holds out 20 %
    of each class by the names of the files, so the same folder gives the same test set anywhere. If both test/ and val/
    exist, test/ is the test set and val/ is not read: validation images come from train/. The names may also be
    Training/, TEST/ and so on. With ``image_size``, images of any sizes become squares of that size.
    """
    folders = tree.folders if isinstance(tree, FolderTree) else []
    prefix, train, test = find_layout(str(tree.path), tree.names(), folders)
    classes = tuple(sorted({label for label, _ in (*train, *test)}))
    refuse_unprintable(str(tree.path), classes)
    index = {label: i for i, label in enumerate(classes)}
    labels = np.array([index[label] for label, _ in (*train, *test)], dtype=np.int64)
    place = {prefix + file: row for row, (_, file) in enumerate((*train, *test))}
    found = ((place[file], file, data) for file, data in tree.read(place.__contains__))
    images = decode_all(str(tree.path), found, len(labels), image_size)
    train_rows: slice | NDArray[np.int64] = slice(0, len(train))
    test_rows: slice | NDArray[np.int64] = slice(len(train), None)
    if not test:
        names = [file for _, file in train]
        train_rows, test_rows = stratified_split(labels, SPLIT_FRACTION, names=names)
        if not len(test_rows):
            raise DataError(
                f"{tree.path} has too few images to hold out a fifth of each class: add test/<class>/"
            )
    parts = (images[train_rows], labels[train_rows], images[test_rows], labels[test_rows])
    return ArrayDataset(name, *parts, classes, held_out=not test)


def read_tiny_imagenet(tree: Tree, name: str, classes: Sequence[str] = ()) -> ArrayDataset:
    """Read tiny-imagenet-200: train/<wnid>/images/…, and val/ with its annotations as the test set.

    Labels number the WordNet ids of wnids.txt in sorted order, as is usual for this set; images follow the numbers in
    their names. The official test images have no labels and are not read.
    """
    texts = {
        member.rsplit("/", 1)[-1]: data.decode("utf-8", "replace")
        for member, data in tree.read(lambda n: n.endswith(("wnids.txt", "val/val_annotations.txt")))
    }
    if missing := {"wnids.txt", "val_annotations.txt"} - set(texts):
        raise DataError(
            f"{tree.path} lacks {' and '.join(sorted(missing))}: fetch tiny-imagenet-200.zip again"
        )
    wnids = sorted(set(texts["wnids.txt"].split()))
    index = {wnid: i for i, wnid in enumerate(wnids)}
    answers = dict(line.split("\t")[:2] for line in texts["val_annotations.txt"].splitlines() if "\t" in line)

    train, test, unanswered = [], [], []
    for member in tree.names():
        parts = member.split("/")
        if not parts[-1].lower().endswith((".jpeg", ".jpg")) or len(parts) < 3:
            continue
        if "train" in parts[:-2] and (wnid := parts[parts.index("train") + 1]) in index:
            train.append((index[wnid], _number(parts[-1]), member))
        elif parts[-3:-1] == ["val", "images"]:
            if answers.get(parts[-1]) in index:
                test.append((_number(parts[-1]), index[answers[parts[-1]]], member))
            else:
                unanswered.append(parts[-1])
    if unanswered or not train or len(test) != len(answers):
        raise DataError(
            f"{tree.path} is not whole: {len(train)} training images of the {len(wnids)} classes in wnids.txt, "
            f"{len(test)} of {len(answers)} annotated validation images, {len(unanswered)} without an annotation; "
            "fetch tiny-imagenet-200.zip again"
        )
    train.sort()
    test.sort()
    place = {member: row for row, (*_, member) in enumerate([*train, *test])}
    found = ((place[member], member, data) for member, data in tree.read(place.__contains__))
    images = decode_all(str(tree.path), found, len(place))
    if images.shape[-1] == 1:  # all grey can only happen in a cut-down copy; the set is an RGB one
        images = images.repeat(3, axis=-1)
    return ArrayDataset(
        name,
        images[: len(train)],
        np.array([label for label, *_ in train], dtype=np.int64),
        images[len(train) :],
        np.array([label for _, label, _ in test], dtype=np.int64),
        tuple(wnids),
    )


def _number(file: str) -> int:
    return int((re.findall(r"\d+", file) or ["0"])[-1][-18:])  # Python refuses to read thousands of digits


def _has_16_bits(image: Any, data: bytes) -> bool:
    # Pillow opens 16-bit RGB files as 8-bit RGB without a word; the PNG header and the TIFF tags tell.
    if image.format == "PNG":
        return data[24:25] == b"\x10"
    return image.format == "TIFF" and max(image.tag_v2.get(_TIFF_BITS, (8,))) > 8


def _to_rgb(image: Any, pil: ModuleType) -> Any:
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", rgba.size, (0, 0, 0, 255)), rgba)
    return image.convert("RGB")


def _allocate(where: str, count: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    try:
        return np.empty((count, *shape), dtype=np.uint8)
    except MemoryError as error:
        needed = count * np.prod(shape) / 2**30
        raise DataError(
            f"{where}: {count:,} images of {shape} need {needed:.1f} GiB of memory, more than there is: shrink them"
        ) from error


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("image files need Pillow: pip install -e '.[vision]' in the clone") from error
    return Image


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Ignore Pillow's warnings about odd metadata; treat its warning about huge images as an error."""
    pil = _pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", pil.DecompressionBombWarning)
        yield
