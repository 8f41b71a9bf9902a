"""Which folders of a tree of images are its parts and which its classes, and what its names show to be a mistake."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from protoseam.errors import DataError, DataWarning

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
# images that are not read; a person who has some among others should know
_UNREAD = (
    *(".apng", ".arw", ".avif", ".cr2", ".cr3", ".dng", ".eps", ".exr", ".heic", ".heif", ".jfif", ".jp2", ".jxl"),
    *(".nef", ".pbm", ".pcx", ".psd", ".svg", ".tga"),
)  # fmt: skip
# in any case; of the test folders the first that exists is the test set
TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
_OF_PARTS = ("train", "test", "val")  # in the name of a folder
_SHOWN = 10

Pairs = list[tuple[str, str]]  # (class, file) of each image


class Layout(NamedTuple):
    """The images of both parts; the names of the files lack the ``prefix``."""

    prefix: str
    train: Pairs
    test: Pairs


def find_layout(where: str, names: Iterable[str], folders: Iterable[str]) -> Layout:
    """Return the classes and files of the training and the test part.

    Args:
        where: the place, for messages.
        names: of all files.
        folders: of all folders, empty ones too, as far as they are known.

    Raises:
        DataError: if the images are not in class folders, or a class folder has none.
    """
    names, folders = sorted(names), list(folders)
    pictures = [name for name in names if name.lower().endswith(SUFFIXES)]
    unread = [name for name in names if name.lower().endswith(_UNREAD)]
    prefix = _wrapper(pictures, but=TRAIN_FOLDERS)  # an archive often wraps everything in a folder
    pictures = [name.removeprefix(prefix) for name in pictures]
    parts = _parts(where, pictures)
    pairs: list[Pairs] = []
    for i, part in enumerate(parts):
        inside = [file for file in pictures if file.startswith(part)]
        if loose := [file for file in inside if "/" not in file.removeprefix(part)]:
            or_class = f", or rename {part} if it is a class" if part else ""
            raise DataError(
                f"{where}: {len(loose)} images lie in no class folder, first {loose[0]}: move or remove them{or_class}"
            )
        if part:  # which may be wrapped as well
            classes = {label for label, _ in pairs[0]} if pairs else ()
            parts[i] += _wrapper([file.removeprefix(part) for file in inside], but=classes)
        pairs.append([(file.removeprefix(parts[i]).split("/", 1)[0], file) for file in inside])
    told = _endings(unread)
    if not pairs[0]:
        raise DataError(
            f"{where} holds no images in class folders; expected train/<class>/… and test/<class>/…, or "
            f"<class>/…, with files ending in {', '.join(SUFFIXES)}{told and f'. {told}: convert them'}"
        )
    labels = {label for own in pairs for label, _ in own}
    for part in (prefix + part for part in parts):
        below = {folder.removeprefix(part) for folder in folders if folder.startswith(part)}
        below = {folder for folder in below if folder and "/" not in folder}
        hidden = [name.removeprefix(part) for name in unread if name.startswith(part)]
        below |= {name.split("/", 1)[0] for name in hidden if "/" in name}
        _refuse_empty(where, part, sorted(below - labels), names)
    if told:
        warnings.warn(
            f"{where}: {told}: they are left out; convert them to JPEG or PNG to have them read",
            DataWarning,
            stacklevel=3,
        )
    _warn_of_inner_folders(where, parts[0], pairs[0])
    return Layout(prefix, pairs[0], pairs[1] if len(pairs) > 1 else [])


def _parts(where: str, pictures: list[str]) -> list[str]:
    """Return the folders of the training and the test part; of a set without parts the one of all."""
    inside: dict[str, list[str]] = {}
    for file in pictures:
        top, _, rest = file.partition("/")
        if rest:
            inside.setdefault(top, []).append(rest)
    flat = {top for top, files in inside.items() if not any("/" in file for file in files)}
    named = {top.lower(): top for top in sorted(inside)}
    train = next((named[folder] for folder in TRAIN_FOLDERS if folder in named), None)
    held_out = [named[folder] for folder in TEST_FOLDERS if folder in named]
    others = [top for top in inside if not any(word in top.lower() for word in _OF_PARTS)]
    if train in flat and others and flat.issuperset(held_out):
        train = None  # images directly in it, beside other classes: it is one
    if train is None:
        _refuse_parts_as_classes(where, inside)
        return [""]
    if not held_out:
        raise DataError(
            f"{where} has {train}/ but none of {', '.join(f'{f}/' for f in TEST_FOLDERS)} with images in it: "
            "add one, or move the class folders up one level to have a fifth of each class set aside. If "
            f"{train}/ is a class, rename it"
        )
    parts = [f"{train}/", f"{held_out[0]}/"]
    if unread := [f"{top}/" for top in sorted(inside) if f"{top}/" not in parts]:
        warnings.warn(
            f"{where}: the data set is {parts[0]} and the test set {parts[1]}; what else there is "
            f"({', '.join(unread)}) is left unread; validation images are cut from {parts[0]}",
            DataWarning,
            stacklevel=4,
        )
    return parts


def _refuse_parts_as_classes(where: str, inside: dict[str, list[str]]) -> None:
    """Refuse folders such as seg_train/ and seg_test/ that hold the same folders: they are parts, not classes."""
    held: dict[str, set[str]] = {}
    for top, files in sorted(inside.items()):
        wrapper = _wrapper(files)
        inner = [file.removeprefix(wrapper) for file in files]
        held[top] = {file.split("/", 1)[0] if "/" in file else "" for file in inner}
    train = next((top for top in held if "train" in top.lower()), None)
    if train is None or "" in held[train] or len(held[train]) < 2:
        return
    alike = [top for top in held if held[top] == held[train]]
    if len(alike) == len(held) > 1 or any(word in top.lower() for top in alike for word in ("test", "val")):
        raise DataError(
            f"{where}: {', '.join(f'{top}/' for top in alike[:3])} each hold the folders "
            f"{', '.join(sorted(held[train])[:3])}…, so they look like parts of a data set rather than classes: name "
            "them train/ and test/"
        )


def _refuse_empty(where: str, part: str, empty: list[str], names: list[str]) -> None:
    """Refuse class folders without an image, each with the number of its files by ending."""
    told = []
    for folder in empty:
        found = _endings(name for name in names if name.startswith(f"{part}{folder}/"))
        told.append(f"{part}{folder}/ ({found or 'it is empty'})")
    if told:
        shown = ", ".join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")
        raise DataError(
            f"{where}: no image that can be read lies in {shown}. Convert what is there to JPEG or PNG, add images, "
            "or remove the folder"
        )


def _warn_of_inner_folders(where: str, part: str, pairs: Pairs) -> None:
    """Warn of class folders that hold two folders or more: those may be the classes that are meant."""
    inner: dict[str, set[str]] = {}
    for label, file in pairs:
        first, _, rest = file.removeprefix(f"{part}{label}/").partition("/")
        if rest:
            inner.setdefault(label, set()).add(first)
    if found := {label: sorted(below) for label, below in inner.items() if len(below) > 1}:
        label, below = next(iter(found.items()))
        warnings.warn(
            f"{where}: {label}/ holds folders itself ({', '.join(below[:3])}{', …' * (len(below) > 3)}), and all "
            f"images in them are of the class {label!r}{f'; so it is with {len(found) - 1} more' * (len(found) > 1)}. "
            "If the inner folders are the classes, move them up one level",
            DataWarning,
            stacklevel=4,
        )


def _endings(names: Iterable[str]) -> str:
    """Return ``10 files end in .heic, 2 in .avif``; nothing for no files."""
    counts = Counter(PurePosixPath(name).suffix.lower() or "no ending" for name in names)
    first, *rest = [(n, ending) for ending, n in counts.most_common(5)] or [(0, "")]
    told = f"{first[0]} {'file ends' if first[0] == 1 else 'files end'} in {first[1]}"
    return told + "".join(f", {n} in {ending}" for n, ending in rest) if counts else ""


def _wrapper(files: Sequence[str], but: Collection[str] = ()) -> str:
    """Return `wrapper/` (or `outer/inner/`) if everything lies under one folder that holds folders itself, else ""."""
    prefix = ""
    while True:
        tops = {file[len(prefix) :].split("/", 1)[0] for file in files}
        if len(tops) != 1 or any(file.count("/", len(prefix)) < 2 for file in files):
            return prefix
        (top,) = tops
        if top in but or top.lower() in but:
            return prefix
        prefix += f"{top}/"
