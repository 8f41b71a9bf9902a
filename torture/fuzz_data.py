"""What is fuzzed of data: files in the official formats, archives, arrays and images. See `fuzz_targets`."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from miniature_files import (
    binary_records,
    cifar_parts,
    idx_bytes,
    jpeg,
    planes,
    png,
    protocol0_names,
    python2_batch,
    write_tar,
    write_zip,
)
from PIL import Image

from protoseam.lab.data.archives import Tree, extract, open_tree
from protoseam.lab.data.arrays import FOLDER_FILES, read_array_folder, read_npz
from protoseam.lab.data.dataset import check
from protoseam.lab.data.images import read_image_folder
from protoseam.lab.data.loading import load
from protoseam.lab.data.readers import (
    read_cifar10_binary,
    read_cifar10_python,
    read_cifar100_binary,
    read_cifar100_python,
    read_idx,
)

Target = Callable[[bytes, Path], None]
_RNG = np.random.default_rng(0)
_BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
_TEN = [f"class{i}" for i in range(10)]


class MemoryTree(Tree):
    """Files that lie in no folder: the readers see no difference, and thousands a second can be tried."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Path("memory"))
        self._files = files

    def names(self) -> list[str]:
        return list(self._files)

    def read(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        return ((name, data) for name, data in self._files.items() if wanted(name))


def chosen(data: bytes) -> tuple[int, bytes]:
    """The first byte, which chooses a variant, and the others."""
    return (data[0], data[1:]) if data else (0, b"")


def _pixels(count: int, *shape: int) -> np.ndarray:
    return _RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


# ------------------------------------------------------------------------------------------ official formats

_IDX = {
    "train-images-idx3-ubyte": idx_bytes(_pixels(4, 3, 3)),
    "train-labels-idx1-ubyte": idx_bytes(np.array([0, 1, 0, 1], np.uint8)),
    "t10k-images-idx3-ubyte": idx_bytes(_pixels(2, 3, 3)),
    "t10k-labels-idx1-ubyte": idx_bytes(np.array([0, 1], np.uint8)),
}


def idx(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    name = list(_IDX)[choice % 4]
    check(read_idx(MemoryTree({**_IDX, name: data}), "fuzz"))


def idx_seeds() -> list[bytes]:
    plain = [bytes([i]) + data for i, data in enumerate(_IDX.values())]
    return plain + [seed[:1] + gzip.compress(seed[1:]) for seed in plain]


_PARTS = cifar_parts(_BATCHES, rows=1, classes=2)
_BINARY10 = {f"{name}.bin": binary_records(*part) for name, part in _PARTS.items()}
_BINARY100 = {
    name: binary_records(*part, coarse=True)
    for name, part in cifar_parts(["train.bin", "test.bin"], rows=1, classes=2).items()
}


def cifar_binary(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    if choice & 1:
        name = list(_BINARY10)[(choice >> 1) % 6]
        check(read_cifar10_binary(MemoryTree({**_BINARY10, name: data}), "fuzz", ["a", "b"]))
    else:
        name = ["train.bin", "test.bin", "fine_label_names.txt"][(choice >> 1) % 3]
        check(read_cifar100_binary(MemoryTree({**_BINARY100, name: data}), "fuzz", ["a", "b"]))


def cifar_binary_seeds() -> list[bytes]:
    return [b"\x01" + _BINARY10["test_batch.bin"], b"\x02" + _BINARY100["test.bin"], b"\x04one two"]


_PICKLED10 = {name: python2_batch(*part, "labels") for name, part in _PARTS.items()}
_PICKLED100 = {
    name: python2_batch(*part, "fine_labels")
    for name, part in cifar_parts(["train", "test"], rows=1, classes=2).items()
}


def cifar_python(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    if choice & 1:
        name = [*_PICKLED10, "batches.meta"][(choice >> 1) % 7]
        check(read_cifar10_python(MemoryTree({**_PICKLED10, name: data}), "fuzz", ["a", "b"]))
    else:
        name = ["train", "test", "meta"][(choice >> 1) % 3]
        check(read_cifar100_python(MemoryTree({**_PICKLED100, name: data}), "fuzz", ["a", "b"]))


def cifar_python_seeds() -> list[bytes]:
    images, labels = _PARTS["test_batch"]
    batch = {"data": planes(images), "labels": labels.tolist(), "fine_labels": labels.tolist()}
    modern = [pickle.dumps(batch, protocol=protocol) for protocol in (2, 3, 4, 5)]
    batches = [b"\x0b" + data for data in (_PICKLED10["test_batch"], *modern)]
    names = [
        b"\x0d" + protocol0_names("label_names", _TEN),
        b"\x04" + protocol0_names("fine_label_names", _TEN),
    ]
    return [*batches, *names, b"\x02" + _PICKLED100["test"]]


# ------------------------------------------------------------------------------------------ archives


def _archive(path: Path, box: Path) -> None:
    """Listed, read, unpacked and loaded; what is unpacked stays below the folder asked for."""
    tree = open_tree(path)
    names = tree.names()
    assert sorted(name for name, _ in tree.read(lambda name: True)) == names
    try:
        extract(path, box / "unpacked")
    finally:
        left = sorted(entry.name for entry in box.iterdir())
        assert left in ([path.name], sorted([path.name, "unpacked"])), f"left behind: {left}"
    load(str(path), box / "root")


def _rezipped(data: bytes) -> bytes:
    """The members' checksums put right, as far as the archive can be listed at all."""
    out = bytearray(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                at = info.header_offset
                name, extra = struct.unpack("<HH", data[at + 26 : at + 30])
                body = data[at + 30 + name + extra :][: info.compress_size]
                plain = body if info.compress_type == 0 else zlib.decompressobj(-15).decompress(body, 2**20)
                place = data.find(b"PK\x01\x02")
                while place >= 0:  # its entry in the directory
                    if data[place + 42 : place + 46] == struct.pack("<I", at):
                        out[place + 16 : place + 20] = struct.pack("<I", zlib.crc32(plain))
                    place = data.find(b"PK\x01\x02", place + 1)
    except Exception:
        return data
    return bytes(out)


def zip_archive(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    path = box / "input.zip"
    path.write_bytes(_rezipped(data) if choice & 1 else data)
    _archive(path, box)


def _little_pictures() -> dict[str, bytes]:
    return {f"{label}/{i}.png": png(_pixels(1, 2, 2)[0]) for label in "ab" for i in range(5)}


def _in_box(write: Callable[[Path], Path]) -> bytes:
    """The bytes of a file that a helper writes under a path."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder) / "x").read_bytes()


def zip_seeds() -> list[bytes]:
    def stored(path: Path) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**_little_pictures(), "./c/": b"", "d/e.txt": b"text"}.items():
                archive.writestr(name, data)
        return path

    packed = _in_box(lambda path: write_zip(path, _little_pictures()))
    digits = _in_box(lambda path: write_zip(path, {f"raw/{name}": data for name, data in _IDX.items()}))
    plain = _in_box(stored)
    return [bytes([flag]) + data for flag in (0, 1) for data in (packed, digits, plain)]


def _retarred(data: bytes) -> bytes:
    """Every header's checksum put right."""
    out, place = bytearray(data), 0
    while place + 512 <= len(out) and any(out[place : place + 512]):
        block = out[place : place + 512]
        block[148:156] = b" " * 8
        out[place + 148 : place + 156] = b"%06o\0 " % sum(block)
        try:
            size = int(bytes(block[124:135]).strip(b" \0") or b"0", 8)
        except ValueError:
            break
        place += 512 + -(-size // 512) * 512
    return bytes(out)


def tar_archive(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    path = box / "input.tar"
    path.write_bytes(_retarred(data) if choice & 1 else data)
    _archive(path, box)


def tar_seeds() -> list[bytes]:
    def links(path: Path) -> Path:
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            for kind, name in ((tarfile.SYMTYPE, "s"), (tarfile.LNKTYPE, "l"), (tarfile.DIRTYPE, "d" * 120)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "elsewhere"
                archive.addfile(info)
        return path

    plain = _in_box(lambda path: write_tar(path, _little_pictures(), "w"))
    gnu = _in_box(lambda path: write_tar(path, {"x" * 150: b"long name"}, "w"))
    packed = _in_box(lambda path: write_tar(path, {"a/1": b"1"}, "w:gz"))
    return [b"\0" + packed, *(b"\x01" + data for data in (plain, gnu, _in_box(links)))]


# ------------------------------------------------------------------------------------------ arrays and images

_ARRAYS = {
    "x_train": _pixels(4, 2, 2, 1),
    "y_train": np.array([0, 1, 0, 1]),
    "x_test": _pixels(2, 2, 2, 1),
    "y_test": np.array([0, 1]),
    "classes": np.array(["one", "two"]),
}


def _npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version, allow_pickle=True)
    return out.getvalue()


_MEMBERS = {f"{name}.npy": _npy(array) for name, array in _ARRAYS.items()}


def npz(data: bytes, box: Path) -> None:
    """The bytes as one array of an archive or folder that is otherwise sound, or as the whole archive."""
    choice, data = chosen(data)
    path = box / "input.npz"
    if choice % 3 == 0:
        path.write_bytes(_rezipped(data))
    elif choice % 3 == 1:
        with zipfile.ZipFile(path, "w") as archive:
            for i, (name, valid) in enumerate(_MEMBERS.items()):
                archive.writestr(name, data if i == choice // 3 % 5 else valid)
    else:
        for i, (file, valid) in enumerate(zip(FOLDER_FILES, _MEMBERS.values(), strict=False)):
            (box / file).write_bytes(data if i == choice // 3 % 5 else valid)
        (box / "classes.txt").write_bytes(data if choice // 3 % 5 == 4 else b"one\ntwo\n")
        check(read_array_folder(box, "fuzz"))
        return
    check(read_npz(path, "fuzz"))


def npz_seeds() -> list[bytes]:
    whole = io.BytesIO()
    np.savez(whole, **_ARRAYS)
    features = _npy(np.asfortranarray(_RNG.normal(size=(4, 3))), (2, 0))
    objects = _npy(np.array([{}, []], dtype=object))
    members = [bytes([3 * i + how]) + data for how in (1, 2) for i, data in enumerate(_MEMBERS.values())]
    return [*members, b"\x01" + features, b"\x02" + objects, b"\x0eone\ntwo", b"\0" + whole.getvalue()]


def _repng(data: bytes) -> bytes:
    """Every PNG chunk's checksum put right."""
    out, place = bytearray(data), 8
    while data.startswith(b"\x89PNG") and place + 12 <= len(out):
        (length,) = struct.unpack(">I", out[place : place + 4])
        if place + 12 + length > len(out):
            break
        crc = zlib.crc32(out[place + 4 : place + 8 + length])
        out[place + 8 + length : place + 12 + length] = struct.pack(">I", crc)
        place += 12 + length
    return bytes(out)


_SOUND = {
    f"{part}/{label}/1.png": png(_pixels(1, 6, 5, 3)[0]) for part in ("train", "test") for label in "ab"
}


def images(data: bytes, box: Path) -> None:
    choice, data = chosen(data)
    name = ("train/a/2.png", "test/b/2.jpg")[choice >> 1 & 1]
    check(read_image_folder(MemoryTree({**_SOUND, name: _repng(data) if choice & 1 else data}), "fuzz"))


def images_seeds() -> list[bytes]:
    def saved(image: Image.Image, kind: str, **options: object) -> bytes:
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    picture = Image.fromarray(_pixels(1, 6, 5, 3)[0])
    kinds = [
        saved(picture, kind) for kind in ("PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "TGA", "EPS", "PCX")
    ]
    modes = [saved(picture.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA")]
    moving = saved(picture, "GIF", save_all=True, append_images=[picture.rotate(90)])
    others = [jpeg(np.asarray(picture)), saved(picture.convert("CMYK"), "JPEG"), moving]
    others += [
        saved(picture, "TIFF", compression="tiff_lzw"),
        saved(picture.quantize(4), "PNG", transparency=1),
    ]
    return [b"\x01" + data for data in (*kinds, *modes, *others)]
