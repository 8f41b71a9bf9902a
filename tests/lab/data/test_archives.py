"""Archives from strangers: what is refused, that nothing is left behind, and that honest ones read."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miniature_files import write_folder, write_tar, write_zip

from protoseam.errors import DataError, ProtoSeamError
from protoseam.lab.data.archives import Limits, TarTree, ZipTree, extract, open_tree
from protoseam.lab.data.streams import inflate

FILES = {"top/a.txt": b"alpha", "top/b/c.bin": bytes(range(256)) * 8, "top/block.bin": bytes(1024)}


def everything(path: Path, limits: Limits = Limits()) -> dict[str, bytes]:  # noqa: B008
    return dict(open_tree(path, limits).read(lambda name: True))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar_reads_back(tmp_path: Path, mode: str) -> None:
    path = write_tar(tmp_path / "a.tar.gz", {f"./{name}": data for name, data in FILES.items()}, mode)
    assert everything(path) == FILES
    assert open_tree(path).names() == sorted(FILES)
    assert dict(open_tree(path).read(lambda name: name.endswith("c.bin"))) == {
        "top/b/c.bin": FILES["top/b/c.bin"]
    }


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_long_and_foreign_names_read_back(tmp_path: Path, style: int) -> None:
    files = {"deep/" * 30 + "naïve.txt": b"1"}
    with tarfile.open(tmp_path / "a.tar", "w", format=style) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert everything(tmp_path / "a.tar") == files


def test_zip_and_folder_read_back_without_leftovers(tmp_path: Path) -> None:
    junk = {"__MACOSX/top/._a.txt": b"x", "top/.DS_Store": b"x", "top/Thumbs.db": b"x"}
    assert everything(write_zip(tmp_path / "a.zip", {**FILES, **junk})) == FILES
    assert everything(write_folder(tmp_path / "f", {**FILES, **junk})) == FILES


def test_a_compressed_tar_is_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{i}.bin": bytes([i % 256]) * (512 + i % 3) for i in range(300)}
    path = write_tar(tmp_path / "a.tar.gz", files)
    rewinds = []
    monkeypatch.setattr(gzip.GzipFile, "seek", lambda *_: rewinds.append(1))
    monkeypatch.setattr(gzip.GzipFile, "rewind", lambda *_: rewinds.append(1))
    assert everything(path) == files
    assert not rewinds


def tar_member(kind: bytes, name: str = "x", link: str = "") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with tarfile.open(folder / "bad.tar.gz", "w:gz") as archive:
            fine = tarfile.TarInfo("fine.txt")
            fine.size = 4
            archive.addfile(fine, io.BytesIO(b"fine"))
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
        return folder / "bad.tar.gz"

    return write


def zip_member(name: str, **attributes: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "bad.zip", "w") as archive:
            archive.writestr("fine.txt", "fine")
            info = zipfile.ZipInfo(name)
            for key, value in attributes.items():
                setattr(info, key, value)
            archive.writestr(info, "evil")
        return folder / "bad.zip"

    return write


def twice(folder: Path) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(folder / "bad.zip", "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("a.txt", "1")
        archive.writestr("./a.txt", "2")
    return folder / "bad.zip"


def tar_twice(folder: Path) -> Path:
    with tarfile.open(folder / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
        archive.addfile(tarfile.TarInfo("./a"))
    return folder / "bad.tar"


def zip_bomb(folder: Path) -> Path:
    return write_zip(folder / "bad.zip", {"zeros": bytes(20 * 2**20)})


def tar_bomb(folder: Path) -> Path:
    return write_tar(folder / "bad.tar.gz", {"zeros": bytes(20 * 2**20)})


def tar_header_bomb(folder: Path) -> Path:
    """A pax header of 32 MiB: read whole by tarfile, it would be taken into memory at once."""
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 32 * 2**20
    (folder / "bad.tar.gz").write_bytes(gzip.compress(info.tobuf() + bytes(info.size)))
    return folder / "bad.tar.gz"


def overlapping(folder: Path) -> Path:
    path = write_zip(folder / "bad.zip", {"a": b"1" * 50, "b": b"2" * 50})
    data = bytearray(path.read_bytes())
    second = data.rindex(b"PK\1\2")  # the second directory entry now points at the first member
    data[second + 42 : second + 46] = struct.pack("<I", 0)
    path.write_bytes(data)
    return path


def encrypted(folder: Path) -> Path:
    path = write_zip(folder / "bad.zip", {"a": b"1"})
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    return path


HOSTILE = {
    "tar climbs out": (tar_member(tarfile.REGTYPE, "../evil"), "points outside"),
    "tar climbs out inside": (tar_member(tarfile.REGTYPE, "a/../../evil"), "points outside"),
    "tar absolute": (tar_member(tarfile.REGTYPE, "/tmp/evil"), "points outside"),
    "tar backslash": (tar_member(tarfile.REGTYPE, "..\\evil"), "points outside"),
    "tar drive": (tar_member(tarfile.REGTYPE, "C:evil"), "points outside"),
    "tar symlink": (tar_member(tarfile.SYMTYPE, link="/etc/passwd"), "link or a device"),
    "tar hard link": (tar_member(tarfile.LNKTYPE, link="fine.txt"), "link or a device"),
    "tar device": (tar_member(tarfile.CHRTYPE), "link or a device"),
    "tar pipe": (tar_member(tarfile.FIFOTYPE), "link or a device"),
    "tar twice": (tar_twice, "twice"),
    "tar bomb": (tar_bomb, "decompression bomb"),
    "tar header bomb": (tar_header_bomb, "header in it declares"),
    "zip climbs out": (zip_member("../evil"), "points outside"),
    "zip absolute": (zip_member("/tmp/evil"), "points outside"),
    "zip drive": (zip_member("C:/evil"), "points outside"),
    "zip symlink": (zip_member("x", external_attr=0o120777 << 16), "link or a device"),
    "zip method": (zip_member("x", compress_type=zipfile.ZIP_LZMA), "compression method 14"),
    "zip twice": (twice, "twice"),
    "zip bomb": (zip_bomb, "decompression bomb"),
    "zip overlap": (overlapping, "overlap"),
    "zip encrypted": (encrypted, "it is encrypted; unpack"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing(tmp_path: Path, case: str) -> None:
    make, message = HOSTILE[case]
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    with pytest.raises(DataError, match=message):
        everything(path)
    with pytest.raises(DataError, match=message):
        extract(path, tmp_path / "out" / "here")
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert left == ["in", f"in/{path.name}", "out"]


def test_limits_on_count_and_size(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", FILES)
    for limits, message in (
        (Limits(members=2), "more than 2 members"),
        (Limits(member_bytes=100), "the limit is 100"),
        (Limits(total_bytes=1500), "unpacks to .*1,500 bytes"),
    ):
        with pytest.raises(DataError, match=message):
            everything(path, limits)
        with pytest.raises(DataError, match=message):
            everything(write_zip(tmp_path / "a.zip", FILES), limits)


def test_extract_writes_all_of_it(tmp_path: Path) -> None:
    extract(write_zip(tmp_path / "a.zip", FILES), tmp_path / "out")
    got = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    assert got == FILES
    with pytest.raises(DataError, match="already exists"):
        extract(tmp_path / "a.zip", tmp_path / "out")


def test_extract_of_a_file_that_is_also_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        extract(write_zip(tmp_path / "a.zip", {"a": b"1", "a/b": b"2"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_linked_folders_are_followed_but_never_in_a_circle(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", {"1.txt": b"1"})
    write_folder(tmp_path / "data", {"cat/2.txt": b"2"})
    (tmp_path / "data" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "bird").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "cat" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "gone").symlink_to(tmp_path / "nowhere")
    assert set(everything(tmp_path / "data")) == {"cat/2.txt", "dog/1.txt", "bird/1.txt"}


def test_what_is_no_archive_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.rar").write_bytes(b"Rar!")
    with pytest.raises(DataError, match="neither a folder nor an archive"):
        open_tree(tmp_path / "a.rar")
    with pytest.raises(DataError, match="does not exist"):
        open_tree(tmp_path / "a.zip").names()
    cut = write_tar(tmp_path / "cut.tar.gz", FILES)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.tar\.gz"):
        everything(cut)


def test_a_small_gzip_of_many_zeros_is_refused() -> None:
    with pytest.raises(DataError, match="decompression bomb"):
        inflate(gzip.compress(bytes(20 * 2**20)), "train-images.gz")
    with pytest.raises(DataError, match="damaged or cut short"):
        inflate(gzip.compress(b"abc" * 100)[:-9], "train-images.gz")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_fuzz_archives(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    path = tmp_path / f"fuzz.{kind}"
    if kind == "zip":
        write_zip(path, FILES)
    else:
        write_tar(path, FILES, "w" if kind == "tar" else "w:gz")
    content = bytearray(path.read_bytes())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=6)
    ):
        content[place % len(content)] = value
    path.write_bytes(
        content[: len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 30, 600])) % len(content)]
    )
    tree = ZipTree(path) if kind == "zip" else TarTree(path)
    try:
        assert set(tree.names()) >= set(dict(tree.read(lambda name: True)))
    except ProtoSeamError as error:
        assert str(path) in str(error)  # noqa: PT017  any other exception fails the test


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"])
def test_every_kind_of_tar_is_read(suffix: str, tmp_path: Path) -> None:
    kind = {".tar": "", ".tgz": "gz"}.get(suffix, suffix.rpartition(".")[2])
    archive = write_tar(tmp_path / f"a{suffix}", {"a/1": b"one"}, f"w:{kind}")
    assert dict(open_tree(archive).read(lambda name: True)) == {"a/1": b"one"}
