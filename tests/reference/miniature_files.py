"""Small files in the official formats, written byte by byte; and the tools that damage them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from protoseam.errors import ProtoSeamError

Parts = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]


def cifar_parts(names: list[str], rows: int = 4, classes: int = 10, seed: int = 0) -> Parts:
    """Random images for each file; every label appears twice in the first file."""
    rng = np.random.default_rng(seed)
    parts = {}
    for i, name in enumerate(names):
        count = max(rows, 2 * classes) if i == 0 else rows
        labels = np.arange(count) % classes
        parts[name] = (rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), labels)
    return parts


def planes(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)


def binary_records(images: NDArray[np.uint8], labels: NDArray[np.int64], coarse: bool = False) -> bytes:
    columns = [labels.astype(np.uint8)[:, None], planes(images)]
    if coarse:
        columns.insert(0, np.full((len(labels), 1), 19, dtype=np.uint8))
    return np.concatenate(columns, axis=1).tobytes()


class Python2Pickle:
    """Writes protocol 2 the way Python 2 and the numpy of 2009 did: byte strings, old module names, memos."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memos = 0

    def dumps(self, value: object) -> bytes:
        self._write(value)
        return bytes(self._out) + b"."

    def _memo(self) -> None:
        self._memos += 1
        self._out += (
            b"q" + bytes([self._memos]) if self._memos < 256 else b"r" + struct.pack("<I", self._memos)
        )

    def _text(self, value: bytes) -> None:
        short = len(value) < 256
        self._out += (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value
        self._memo()

    def _write(self, value: object) -> None:
        if isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, dict):
            self._out += b"}"
            self._memo()
            self._out += b"("
            for key, item in value.items():
                self._write(key)
                self._write(item)
            self._out += b"u"
        elif isinstance(value, list):
            self._out += b"]"
            self._memo()
            self._out += b"("
            for item in value:
                self._write(item)
            self._out += b"e"
        elif isinstance(value, str):
            self._text(value.encode())
        elif isinstance(value, int):
            self._out += b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
        else:
            raise TypeError(type(value))

    def _array(self, array: NDArray[np.uint8]) -> None:
        self._out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self._memo()
        self._out += b"cnumpy\nndarray\n"
        self._memo()
        self._out += b"K\x00\x85"
        self._text(b"b")
        self._out += b"\x87R(K\x01"
        for side in array.shape:
            self._out += b"J" + struct.pack("<i", side)
        self._out += b"\x86cnumpy\ndtype\n"
        self._text(b"u1")
        self._out += b"K\x00K\x01\x87R(K\x03"
        self._text(b"|")
        self._out += b"NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\x00tb\x89"
        self._text(array.tobytes())
        self._out += b"tb"


def python2_batch(images: NDArray[np.uint8], labels: NDArray[np.int64], key: str) -> bytes:
    return Python2Pickle().dumps(
        {
            "batch_label": "training batch 1 of 5",
            key: [int(label) for label in labels],
            "data": planes(images),
            "filenames": [f"image_s_{i:06}.png" for i in range(len(labels))],
        }
    )


def protocol0_names(key: str, names: list[str]) -> bytes:
    """Class names as a text pickle, protocol 0: what some copies of batches.meta are."""
    lines = ["(dp1", "S'num_cases_per_batch'", "p2", "I10000", f"sS'{key}'", "p3", "(lp4"]
    for i, name in enumerate(names):
        lines += [f"S'{name}'", f"p{5 + i}", "a"]
    return ("\n".join(lines) + "\ns.").replace("a\nS", "aS").replace("a\ns", "as").encode()


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    sides = b"".join(struct.pack(">I", side) for side in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sides + array.tobytes()


def write_idx(
    folder: Path, *, compressed: bool, joint: str = "-", seed: int = 0
) -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    arrays = {
        f"train-images{joint}idx3-ubyte": rng.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        f"train-labels{joint}idx1-ubyte": (np.arange(20) % 10).astype(np.uint8),
        f"t10k-images{joint}idx3-ubyte": rng.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        f"t10k-labels{joint}idx1-ubyte": np.arange(10).astype(np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        data = idx_bytes(array)
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(data) if compressed else data)
    return arrays


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def png(array: NDArray[np.uint8], mode: str | None = None, **options: object) -> bytes:
    from PIL import Image

    image = Image.fromarray(array.squeeze())
    out = io.BytesIO()
    (image.convert(mode) if mode else image).save(out, "PNG", **options)
    return out.getvalue()


def jpeg(array: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(array.squeeze()).save(out, "JPEG", quality=95)
    return out.getvalue()


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """The valid bytes cut, extended, or with a few of them overwritten; or anything."""

    def overwrite(edits: list[tuple[int, int]], cut: int, tail: bytes) -> bytes:
        data = bytearray(valid)
        for place, value in edits:
            data[place % len(data)] = value
        return bytes(data[: len(data) - cut % len(data)]) + tail

    edits = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=4)
    return st.binary(max_size=200) | st.builds(
        overwrite, edits, st.sampled_from([0, 0, 0, 1, 7, 100]), st.sampled_from([b"", b"", b"\0"])
    )


def survives(read: Callable[[], object]) -> None:
    try:
        read()
    except ProtoSeamError as error:
        assert str(error)  # noqa: PT017  any other exception fails the test


class Exploit:
    """Pickles to a call with one argument."""

    def __init__(self, call: Callable[[str], object], argument: str) -> None:
        self._reduced = (call, (argument,))

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return self._reduced
