"""Small pictures of the test images that a page shows, all on one sheet.

Legend: A test images with an answer, M thumbnails, N points of the picture.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

MOST_SHEET = 600_000  # bytes
_TILE = 32  # pixels
_WORST, _FREQUENT, _PER_MISTAKE, _MISTAKES = 24, 12, 12, 400
_MOST_PNG = 300_000
_QUALITIES = (80, 65, 50, 35, 20)


def chosen_rows(points_N: Tensor, answers: dict[str, Tensor]) -> Tensor:
    """Rows of the images to be shown: the picture's points, the worst, the most doubtful, and some of each mistake."""
    label, first = answers["label"].long(), answers["first"].long()
    worst = answers["p_label"].argsort()[:_WORST]
    doubtful = (answers["p_first"] - answers["p_second"]).argsort()[:_WORST]
    mistakes = _of_each_mistake(label, first)
    return torch.cat([points_N, worst, doubtful, torch.tensor(mistakes, dtype=torch.int64)]).unique()


def _of_each_mistake(label: Tensor, first: Tensor) -> list[int]:
    """Up to 12 images of the most frequent mistakes, then one of each other kind, then a second, …"""
    kinds: dict[tuple[int, int], list[int]] = {}
    for row in (label != first).nonzero()[:, 0].tolist():
        kinds.setdefault((int(label[row]), int(first[row])), []).append(row)
    frequent = sorted(kinds.values(), key=len, reverse=True)
    shown = [row for rows in frequent[:_FREQUENT] for row in rows[:_PER_MISTAKE]]
    for turn in range(_PER_MISTAKE):
        shown += [rows[turn] for rows in frequent[_FREQUENT:] if len(rows) > turn]
    return shown[:_MISTAKES]


def contact_sheet(images: Tensor) -> tuple[Tensor, int, int]:
    """A PNG or JPEG of at most 600 kB as bytes, the side of a tile in pixels, and the number of columns.

    ``images`` are uint8 ``(M, channels, H, W)``. Larger images are brought to 32 pixels, smaller ones stay as they are.
    """
    from PIL import Image

    M, channels, height, width = images.shape
    pixels = images.permute(0, 2, 3, 1).numpy()
    pixels = pixels[..., :3] if channels >= 3 else pixels[..., :1]
    side = min(_TILE, max(height, width))
    columns = max(1, int(np.ceil(np.sqrt(M))))
    for tile in (side, _TILE):
        sheet = np.zeros((-(-M // columns) * tile, columns * tile, pixels.shape[3]), dtype=np.uint8)
        for i, image in enumerate(pixels):
            top, left = i // columns * tile, i % columns * tile
            small = _small(image, tile)
            sheet[top : top + small.shape[0], left : left + small.shape[1]] = small
        drawn = Image.fromarray(sheet[..., 0] if sheet.shape[2] == 1 else sheet)
        if tile == side:
            data = _saved(drawn, "PNG", optimize=True)
            if len(data) <= _MOST_PNG:
                return _as_tensor(data), tile, columns
    # tiles of 32 pixels: JPEG's blocks of 16 do not reach over their edges
    for quality in _QUALITIES:
        data = _saved(drawn, "JPEG", quality=quality, optimize=True)
        if len(data) <= MOST_SHEET:
            break
    return _as_tensor(data), _TILE, columns


def _small(image: np.ndarray, tile: int) -> np.ndarray:
    """The whole image in a tile, its proportions kept."""
    height, width = image.shape[:2]
    scale = tile / max(height, width)
    if scale >= 1 and tile == max(height, width):
        return image
    from PIL import Image

    size = max(1, round(width * scale)), max(1, round(height * scale))
    drawn = Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2] == 1 else image))
    small = np.asarray(drawn.resize(size, Image.Resampling.BILINEAR))
    return small[..., None] if small.ndim == 2 else small


def _saved(image: object, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)  # type: ignore[attr-defined]
    return buffer.getvalue()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
