"""A data set by name or by path, from what is on disk: `load` decodes it once, `verify` hashes it again."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protoseam.errors import DataError, DataWarning
from protoseam.lab.data import archives, arrays, cache, catalog, images, readers
from protoseam.lab.data.archives import FolderTree, Tree
from protoseam.lab.data.catalog import Entry
from protoseam.lab.data.dataset import ArrayDataset, check
from protoseam.lab.data.download import download as download_file
from protoseam.lab.data.download import progress
from protoseam.lab.data.split import stratified_split

READERS: dict[str, readers.Reader] = {
    "idx": readers.read_idx,
    "cifar10-python": readers.read_cifar10_python,
    "cifar10-binary": readers.read_cifar10_binary,
    "cifar100-python": readers.read_cifar100_python,
    "cifar100-binary": readers.read_cifar100_binary,
    "tinyimagenet": images.read_tiny_imagenet,
}


def load(
    name_or_path: str, root: Path | None = None, *, download: bool = False, image_size: int | None = None
) -> ArrayDataset:
    """Load a data set by name or path, and check that it can be trained on.

    Args:
        name_or_path: digits (always there), mnist, fashion-mnist, cifar10, cifar100 or tinyimagenet; or the path of an
            .npz file, a folder of .npy arrays, a folder or archive (.zip, .tar.gz) of images in class folders, or one
            in any of the official formats. A name wins over a file of the same name: write ./mnist for the file.
        root: where the files of the named sets lie, as published or as a folder <root>/<name>/ of .npy arrays;
            $PROTOSEAM_DATA by default, else ~/.cache/protoseam/data.
        download: fetch the files of a named set that are not there.
        image_size: resize the shorter side of every image to that many pixels and crop the centre to a square, so that
            a folder may hold images of any sizes.

    Raises:
        DataError: if the data is missing, damaged, unsafe or not fit to train on.
    """
    if image_size is not None and image_size**2 > images.MAX_PIXELS:
        raise DataError(f"image_size={image_size}: at most {math.isqrt(images.MAX_PIXELS)} is possible")
    root = _root(root)
    entry = _entry(name_or_path)
    if entry is not None:
        dataset = _load_named(entry, root, download)
        sizes = (len(dataset.train_labels), len(dataset.test_labels))
        if sizes != (entry.train_size, entry.test_size):
            warnings.warn(
                f"{entry.name} has {sizes[0]:,} training and {sizes[1]:,} test images here; the official set has "
                f"{entry.train_size:,} and {entry.test_size:,}. Results will not compare with published ones.",
                DataWarning,
                stacklevel=2,
            )
    else:
        dataset = _load_path(name_or_path, root, image_size)
    check(dataset)
    if image_size is None:
        return dataset
    if dataset.train_images.ndim != 4:
        raise DataError(f"image_size={image_size}, but {dataset.name} has features, not images: leave it out")
    both = (dataset.train_images, dataset.test_images)
    train, test = (images.resize_arrays(part, image_size) for part in both)
    return dataclasses.replace(dataset, train_images=train, test_images=test)


def _root(given: Path | None) -> Path:
    return Path(given).expanduser() if given is not None else catalog.default_root()


def describe(dataset: ArrayDataset) -> str:
    """Return the numbers of samples and classes and the sample's shape as one phrase."""
    shape = "×".join(map(str, dataset.sample_shape))
    return (
        f"{len(dataset.train_labels):,} training and {len(dataset.test_labels):,} test samples of {shape}, "
        f"{dataset.num_classes:,} classes"
    )


def array_folder(entry: Entry, root: Path) -> Path | None:
    """Return <root>/<name>/ if it holds the data set as .npy arrays, else None."""
    folder = root / entry.name
    return folder if (folder / arrays.FOLDER_FILES[0]).is_file() else None


def locate(entry: Entry, root: Path) -> tuple[str, Tree] | None:
    """Return format and files of the first source that is wholly under the root, as an archive or unpacked."""
    for folder in entry.folders:
        base = root / folder
        for source in entry.sources:
            if source.format == "idx":
                # a download that broke off after two of the four files must not count as found
                if base.is_dir() and not readers.missing_idx_files(tree := FolderTree(base)):
                    return source.format, tree
                continue
            for place in (source.files[0].name, source.folder):
                if place and (base / place).exists():
                    return source.format, archives.open_tree(base / place)
    return None


def absence(name: str, root: Path | None = None) -> str:
    """Return why a data set of the catalogue cannot be loaded, with the remedy; "" where its files are there."""
    entry = catalog.entry(name)
    root = _root(root)
    there = entry.embedded or array_folder(entry, root) or locate(entry, root) or cache.newest(root, name)
    return "" if there else _missing(entry, root)


def fetch(entry: Entry, root: Path, sha256: str | None = None) -> list[Path]:
    """Download the entry's files to where `load` looks for them."""
    if entry.embedded:
        return []
    source = entry.sources[0]
    if sha256 is not None and len(source.files) > 1:
        raise DataError(f"--sha256 is for data sets of one file; {entry.name} has {len(source.files)}")
    fetched = []
    for file in source.files:
        with progress(file.name) as report:
            fetched.append(download_file(file, root / entry.folders[0], sha256=sha256, report=report))
    return fetched


def _load_named(entry: Entry, root: Path, download: bool) -> ArrayDataset:
    if entry.embedded:
        return _digits(entry)
    if (folder := array_folder(entry, root)) is not None:
        return arrays.read_array_folder(folder, entry.name)
    located = locate(entry, root)
    if located is None and (folder := cache.newest(root, entry.name)) is not None:
        return arrays.read_array_folder(folder, entry.name)
    if located is None and download:
        fetch(entry, root)
        located = locate(entry, root)
    if located is None:
        raise DataError(_missing(entry, root))
    kind, tree = located
    read = READERS[kind]
    return cache.cached(root, entry.name, stamp_of(tree, kind), lambda: read(tree, entry.name, entry.classes))


def _load_path(given: str, root: Path, image_size: int | None = None) -> ArrayDataset:
    path = Path(given).expanduser()
    try:
        exists = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise DataError(f"{given:.200} cannot be read: {error.strerror or error}") from error
    if not exists:
        close = difflib.get_close_matches(given.lower(), catalog.CATALOG, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise DataError(
            f"{given!r} is neither a data set's name nor an existing path.{hint} The names are "
            f"{', '.join(catalog.CATALOG)}."
        )
    name = path_name(path)
    if path.suffix.lower() == ".npz":
        return arrays.read_npz(path, name)
    if path.is_dir() and (path / arrays.FOLDER_FILES[0]).is_file():
        return arrays.read_array_folder(path, name)
    tree = archives.open_tree(path)
    kind = format_of(tree)
    read = READERS.get(kind)
    if read is None:  # resized as they are decoded: only then may their sizes differ
        read = functools.partial(images.read_image_folder, image_size=image_size)
    return cache.cached(root, name, stamp_of(tree, kind, image_size), lambda: read(tree, name))


def stamp_of(tree: Tree, kind: str, image_size: int | None = None) -> cache.Stamp:
    """Return what the decoded copy of a tree of that format depends on."""
    stamp = list(tree.stamp())
    if kind == "images":
        stamp.append(("layout", images.LAYOUT_VERSION, ""))
        if image_size is not None:
            stamp.append(("image_size", image_size, ""))
    return stamp


def format_of(tree: Tree) -> str:
    """Return the format that the names of the files tell; images in class folders if none does."""
    last_names = {name.rsplit("/", 1)[-1] for name in tree.names()}
    if any(map(readers.idx_stem, last_names)):
        return "idx"
    for format_name, telling in (
        ("cifar10-python", {"data_batch_1", "test_batch"}),
        ("cifar10-binary", {"data_batch_1.bin", "test_batch.bin"}),
        ("cifar100-python", {"train", "test", "meta"}),
        ("cifar100-binary", {"train.bin", "test.bin"}),
        ("tinyimagenet", {"wnids.txt", "val_annotations.txt"}),
    ):
        if telling <= last_names:
            return format_name
    return "images"


def _digits(entry: Entry) -> ArrayDataset:
    """scikit-learn's 1,797 digits, 0…16 spread over 0…255; a fifth of each class is the test set, by seed 0."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    train, test = stratified_split(labels, fraction=0.2, seed=0)
    return ArrayDataset(entry.name, pixels[train], labels[train], pixels[test], labels[test], entry.classes)


def _missing(entry: Entry, root: Path) -> str:
    folder = root / entry.folders[0]
    options = []
    for source in entry.sources:
        files = " and ".join(str(folder / file.name) for file in source.files)
        unpacked = f" (or the folder {source.folder})" if source.folder else ""
        options.append(f"put {files} in place{unpacked}")
    return (
        f"{entry.name} is not under {root}. Either {'; or '.join(options)}; or run `protoseam data get "
        f"{entry.name}` (load(…, download=True)), which fetches {entry.sources[0].download_size / 1e6:.0f} MB from "
        f"{entry.sources[0].files[0].url.split('/')[2]}. Files you have elsewhere: set {catalog.ROOT_VARIABLE} to "
        "their folder, or give it to the command (data: --root, train and sweep: --data_root, reproduce: --data-root)."
    )


def is_catalogued(given: str) -> bool:
    """Return whether this names a data set of the catalogue; anything else is the user's own data."""
    return _entry(given) is not None


def is_class_folders(given: str) -> bool:
    """Return whether this is a folder in which each folder may become a class."""
    path = Path(given).expanduser()
    arrays_inside = (path / arrays.FOLDER_FILES[0]).is_file()
    return (
        not is_catalogued(given)
        and path.is_dir()
        and not arrays_inside
        and format_of(FolderTree(path)) == "images"
    )


def _entry(given: str) -> Entry | None:
    return None if looks_like_path(given) else catalog.find(given)


def looks_like_path(given: str) -> bool:
    """Return whether this can only be a path, even if a data set of that name exists."""
    return os.sep in given or "/" in given or given.startswith(("~", ".")) or given.endswith(".npz")


def path_name(path: Path) -> str:
    """Return the name of a data set read from a path: the file's or folder's name without its suffix."""
    name = path.resolve().name
    longest = max((s for s in (*archives.ARCHIVE_SUFFIXES, ".npz", "") if name.lower().endswith(s)), key=len)
    return name[: len(name) - len(longest)]


@dataclass(frozen=True)
class Finding:
    """One result of a check. A damaged decoded copy is rebuilt at once; a damaged source file cannot be."""

    what: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    dataset: ArrayDataset
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def verify(name_or_path: str, root: Path | None = None, *, image_size: int | None = None) -> Verification:
    """Check a data set's source files and decoded copy, and load it; ``image_size`` as for :func:`load`.

    Raises:
        DataError: if it cannot be loaded at all.
    """
    root = _root(root)
    path = Path(name_or_path).expanduser()
    entry = _entry(name_or_path)
    findings: list[Finding] = []
    tree: Tree | None = None
    kind = ""
    if entry is not None:
        kind, tree = locate(entry, root) or ("", None)
        findings += _sources(entry, root)
    elif path.is_dir() or path.name.lower().endswith(archives.ARCHIVE_SUFFIXES):
        tree = archives.open_tree(path)
        kind = format_of(tree)
    folder = None
    if tree is not None:
        stamp = stamp_of(tree, kind, None if entry else image_size)  # a set by name is decoded as it is
        folder = cache.folder_of(root, entry.name if entry else path_name(path), stamp)
    elif entry is not None:
        folder = cache.newest(root, entry.name)
    if folder is not None and folder.exists():
        damage = cache.damage(folder, hashes=True)
        if damage is None:
            findings.append(Finding(str(folder), True, "every SHA-256 matches its manifest"))
        elif tree is not None:
            cache.discard(folder)
            findings.append(Finding(str(folder), True, f"was damaged ({damage}); rebuilt from its source"))
        else:
            findings.append(Finding(str(folder), False, f"{damage}, and its source is gone: get it again"))
    dataset = load(name_or_path, root, image_size=image_size)
    findings.append(Finding(dataset.name, True, f"loads: {describe(dataset)}"))
    return Verification(dataset, tuple(findings))


def _sources(entry: Entry, root: Path) -> list[Finding]:
    findings = []
    for folder in dict.fromkeys((root / name).resolve() for name in entry.folders):
        for file in (file for source in entry.sources for file in source.files):
            path = folder / file.name
            if not path.is_file():
                continue
            if file.sha256 is None:
                findings.append(Finding(str(path), True, "no official SHA-256 is known to compare with"))
            elif (found := cache.sha256_of(path)) == file.sha256:
                findings.append(Finding(str(path), True, "is the official file, by its SHA-256"))
            else:
                detail = f"is not the official file: its SHA-256 is {found}, not {file.sha256}"
                findings.append(Finding(str(path), False, detail))
    return findings
