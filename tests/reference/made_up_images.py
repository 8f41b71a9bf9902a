"""Random images, as arrays and as files of any format."""

from __future__ import annotations

import io

import numpy as np
from miniature_files import png
from PIL import Image

RNG = np.random.default_rng(0)


def rgb(count: int = 1, height: int = 6, width: int = 5) -> np.ndarray:
    return RNG.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def pictures(prefix: str, array: np.ndarray) -> dict[str, bytes]:
    return {f"{prefix}/{i:03}.png": png(image) for i, image in enumerate(array)}


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
