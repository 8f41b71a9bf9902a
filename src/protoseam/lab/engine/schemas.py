"""What each file that is read back must hold: fields, kinds and ranges, in one place.

A file may be damaged, edited or a stranger's. What passes here can be used without a further look; what does not ends
in a `StorageError` that names the file, the field and its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protoseam.lab.data.links import refuse_link
from protoseam.lab.data.names import printable
from protoseam.lab.engine.files import StorageError, read_bounded

_LARGEST = 1e300  # larger whole numbers of Python cannot be floats
_RESTORE = "restore the file, or remove it"


class Kind(NamedTuple):
    """What a field must be, in words, and how to tell; an ``optional`` field may be absent."""

    words: str
    fits: Callable[[Any], bool]
    optional: bool = False


Schema = Mapping[str, Kind]


def number(low: float = -_LARGEST, high: float = _LARGEST) -> Kind:
    """A number between the two, both included; NaN is not."""
    between = f" from {low:g} to {high:g}" if low > -_LARGEST else ""
    return Kind(f"a number{between}", lambda v: type(v) in (int, float) and low <= v <= high)


def whole(low: int, high: int = 2**53) -> Kind:
    return Kind(f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def nullable(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda v: v is None or kind.fits(v))


def optional(kind: Kind) -> Kind:
    return kind._replace(optional=True)


def listed(kind: Kind, least: int = 0) -> Kind:
    some = f" of at least {least}" if least else ""
    return Kind(
        f"a list{some}, each {kind.words}",
        lambda v: isinstance(v, list) and len(v) >= least and all(map(kind.fits, v)),
    )


def table(kind: Kind, *needed: str) -> Kind:
    """A JSON object whose values are all of one kind, with at least these names."""
    having = f" with {', '.join(needed)}" if needed else ""
    return Kind(
        f"a table{having}, each value {kind.words}",
        lambda v: (
            isinstance(v, dict) and all(name in v for name in needed) and all(map(kind.fits, v.values()))
        ),
    )


def record(schema: Schema) -> Kind:
    return Kind("a table of the fields it is written with", lambda v: problem(v, schema) is None)


ANY_NUMBER = Kind("a number", lambda v: type(v) is float or (type(v) is int and abs(v) < _LARGEST))
NAME = Kind("printable text", printable)
WORD = Kind("printable text", lambda v: isinstance(v, str) and v.isprintable())
# folders of this machine may have any name; a no-break space is not printable to Python
PATH = Kind("text", lambda v: isinstance(v, str) and "\0" not in v)
ANYTHING = Kind("a table", lambda v: isinstance(v, dict))
SHARE = number(0, 1)
SECONDS = number(0)
TENSOR = Kind("a tensor", lambda v: isinstance(v, Tensor))


def _is_number(word: Any) -> bool:
    try:
        return abs(float(word)) < _LARGEST
    except (TypeError, ValueError, OverflowError):
        return False


def words_of(kind: Callable[[str], bool]) -> Kind:
    """Numbers as text, separated by blanks."""
    return Kind("numbers as text", lambda v: isinstance(v, str) and bool(v) and all(map(kind, v.split())))


_FINGERPRINT = Kind(
    "the number of samples and a fingerprint",
    lambda v: isinstance(v, list) and len(v) == 2 and whole(1).fits(v[0]) and isinstance(v[1], str),
)
_PAIR = Kind("two numbers", lambda v: isinstance(v, list) and len(v) == 2 and all(map(number().fits, v)))


def _is_covariance(value: Any) -> bool:
    """Whether Cholesky's factors exist: ((a, b), (b, c)) with a > 0 and ac > b²."""
    if not (isinstance(value, list) and len(value) == 2 and all(map(_PAIR.fits, value))):
        return False
    (a, _), (b, c) = value
    return bool(a > 0 and a * c > b * b)


_COVARIANCE = Kind("a 2×2 covariance, positive definite", _is_covariance)
EMBEDDINGS: Schema = {
    "width": whole(1),
    "shown": SHARE,
    "x": words_of(_is_number),
    "y": words_of(_is_number),
    "labels": words_of(lambda word: word.isascii() and word.isdecimal() and len(word) < 7),
    "prototypes": optional(listed(_PAIR)),
    "covariances": optional(listed(_COVARIANCE)),
}


def _embedded(value: Any) -> bool:
    """As many labels as points, and prototypes for all of them."""
    if problem(value, EMBEDDINGS) is not None:
        return False
    labels = [int(word) for word in value["labels"].split()]
    counts = {len(value[axis].split()) for axis in ("x", "y")} | {len(labels)}
    prototypes = value.get("prototypes", [])
    complete = not prototypes or len(prototypes) == len(value.get("covariances", [])) > max(labels)
    return len(counts) == 1 and complete


# A line of metrics.jsonl. The first three are what tables, figures and a resume cannot do without.
METRICS: Schema = {
    "epoch": whole(1, 10**6),
    "loss": table(ANY_NUMBER, "total"),
    "validation_accuracy": nullable(SHARE),
    "rho": optional(nullable(ANY_NUMBER)),
    "lr": optional(ANY_NUMBER),
    "images_per_second": optional(ANY_NUMBER),
    "seconds": optional(SECONDS),
    "seam": optional(table(ANY_NUMBER)),
    "audit": optional(table(ANY_NUMBER)),
    "skipped_steps": optional(whole(0)),
}
_RESULTS: Schema = {
    "test_accuracy": nullable(SHARE),  # null where there was no test data, as in a sweep
    "epochs": whole(1, 10**6),
    "config": ANYTHING,
    "validation_accuracy": optional(nullable(SHARE)),
    "seconds": optional(SECONDS),
    "parameters": optional(whole(0)),
    "rate_scale": optional(number(0, 1)),
    "temperature": optional(number(0, 1000)),
    "embeddings": optional(Kind("points with labels, as training writes them", _embedded)),
}
SUMMARY: Schema = {
    **_RESULTS,
    "validation_accuracy": nullable(SHARE),
    "seconds": SECONDS,
    "parameters": whole(0),
    "classes": listed(NAME, 2),
}
_FACT = Kind(
    "a word, a number or null", lambda v: v is None or WORD.fits(v) or ANY_NUMBER.fits(v) or type(v) is bool
)
ENVIRONMENT: Schema = {"resumed": optional(listed(table(_FACT)))}
# cost.json: the run's share of the time and, where the device's power could be read, of its energy.
COST: Schema = {"seconds": SECONDS, "joules": optional(number(0)), "metered_seconds": optional(SECONDS)}
ROW: Schema = {
    **_RESULTS,
    "test_accuracy": SHARE,
    "metrics": listed(record(METRICS), 1),
    "environment": optional(ANYTHING),
    "name": optional(NAME),
    "cost": optional(record(COST)),
}
UNTESTED_ROW: Schema = {**ROW, "test_accuracy": Kind("null", lambda v: v is None)}  # of a search
TOY: Schema = {
    "samples": whole(1),
    "seeds": whole(1),
    "rows": listed(table(ANY_NUMBER, "sigma", "a_hat_mean", "a_hat_std", "a_star", "slope_mean", "slope")),
}
DATA: Schema = {
    "path": nullable(PATH),
    "root": nullable(PATH),
    "classes": listed(NAME, 2),
    "sample_shape": Kind(
        "one or three whole numbers from 1 on",
        lambda v: isinstance(v, list) and len(v) in (1, 3) and all(map(whole(1, 10**6).fits, v)),
    ),
    "train": _FINGERPRINT,
    "test": Kind(f"{_FINGERPRINT.words}, or nothing", lambda v: v == [] or _FINGERPRINT.fits(v)),
    "mean": listed(number(), 1),
    "std": listed(number(1e-30), 1),
    "image_size": optional(nullable(whole(1, 10**6))),
    "held_out": optional(Kind("true or false", lambda v: type(v) is bool)),
}
_STATE: Schema = {
    "epoch": whole(0, 10**6),
    "counter": whole(0),
    "rate_scale": number(1e-30, 1),
    "seconds": SECONDS,
    "rewinds": optional(whole(0, 100)),
    "objective": table(TENSOR),
    "optimizer": ANYTHING,
    "average": optional(record({"tensors": table(TENSOR)})),
}


def problem(value: Any, schema: Schema) -> str | None:
    """Return what is wrong with a value; None if nothing is. Fields that the schema does not name are accepted."""
    if not isinstance(value, dict):
        return f"it is {value!r:.80}, and must be a table"
    for name, kind in schema.items():
        if name not in value:
            if not kind.optional:
                return f"{name} is missing, and must be {kind.words}"
        elif not kind.fits(value[name]):
            return f"{name} is {value[name]!r:.80}, and must be {kind.words}"
    return None


def check(path: Path, value: Any, schema: Schema) -> Any:
    """The value, if it is what the schema says.

    Raises:
        StorageError: names the file, the field and the value.
    """
    if (wrong := problem(value, schema)) is not None:
        raise StorageError(f"{path}: {wrong}: {_RESTORE}")
    return value


def check_normalised(path: Path, value: Any, schema: Schema) -> dict[str, Any]:
    """The value, as `check` gives it, if mean and deviation are one number per channel or feature."""
    known: dict[str, Any] = check(path, value, schema)
    shape = tuple(known["sample_shape" if "sample_shape" in schema else "shape"])
    for name in ("mean", "std"):
        if len(known[name]) != shape[0]:
            raise StorageError(
                f"{path}: {name} is {known[name]!r:.80}, and samples of shape {shape} need {shape[0]} numbers: "
                f"{_RESTORE}"
            )
    return known


def check_state(state: dict[str, Any], epoch: int, epochs: int) -> str | None:
    """Return what is wrong with the state in a checkpoint of ``epoch``, in a run of ``epochs``, or None."""
    if (wrong := problem(state, _STATE)) is not None:
        return wrong
    if state["epoch"] != epoch or epoch > epochs:
        return f"epoch is {state['epoch']} in a checkpoint of epoch {epoch}, in a run of {epochs}"
    return None


class Form(NamedTuple):
    """Of a tensor in a file: its kind, a letter per dimension, and the range of its values.

    A letter has one length throughout a file. ``below`` names a letter whose length the values stay below. An empty
    ``letters`` leaves the shape open.
    """

    dtype: torch.dtype
    letters: str
    low: float = -_LARGEST
    high: float = _LARGEST
    below: str = ""


_CLASS = Form(torch.int32, "A", 0, below="C")
_PROBABILITY = Form(torch.float32, "A", 0, 1)
# latents.safetensors: E epochs, N points, A answers, C classes, D directions, M thumbnails. All of them may be absent.
LATENTS: Mapping[str, Form] = {
    "epochs": Form(torch.int32, "E", 1, 10**6),
    "z": Form(torch.float16, "END"),
    "prototypes": Form(torch.float32, "ECD"),
    "roots": Form(torch.float16, "ECDD"),
    "head": Form(torch.float32, "ECH"),
    "share": Form(torch.float32, "D", -0.01, 1.01),
    "spread": Form(torch.float32, "C", 0),
    "distance": Form(torch.float32, "C", 0),
    "rival": Form(torch.int32, "C", 0, below="C"),
    "label": _CLASS,
    "first": _CLASS,
    "second": _CLASS,
    "p_first": _PROBABILITY,
    "p_second": _PROBABILITY,
    "p_label": _PROBABILITY,
    "unusual": Form(torch.float32, "A"),
    "points": Form(torch.int32, "N", 0, below="A"),
    "shown": Form(torch.int32, "M", 0, below="A"),
    "sheet": Form(torch.uint8, "B"),
    "layout": Form(torch.int32, "2", 1, 10**4),
}
# seam.safetensors
SEAM: Mapping[str, Form] = {
    "prototypes": Form(torch.float32, "CK"),
    "factors": Form(torch.float32, ""),
    "quantiles": Form(torch.float32, "Q"),
}
# what an exported file says of itself
ABOUT: Schema = {"classes": listed(NAME, 2), "shape": DATA["sample_shape"]}
ABOUT_WEIGHTS: Schema = {
    **ABOUT,
    "mean": DATA["mean"],
    "std": DATA["std"],
    "model": NAME,
    "model_options": ANYTHING,
}
BOUND: Schema = {"bound": optional(table(ANY_NUMBER))}


def read_tensors(path: Path, forms: Mapping[str, Form], most: int) -> tuple[dict[str, Tensor], Any] | None:
    """The tensors of a safetensors file of at most ``most`` bytes, and its ``about``; None where there is no file.

    Raises:
        StorageError: if the file is damaged, or holds other tensors than are written into such a file.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    refuse_link(path)
    if not path.exists():
        return None
    try:
        tensors = load(read_bounded(path, most))
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise StorageError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): remove it, or restore it"
        ) from error
    _check_tensors(path, tensors, forms)
    return tensors, about


def _check_tensors(path: Path, tensors: dict[str, Tensor], forms: Mapping[str, Form]) -> None:
    lengths: dict[str, int] = {"2": 2}

    def wrong(name: str, why: str) -> StorageError:
        return StorageError(f"{path}: {name} {why}: {_RESTORE}")

    for name, tensor in tensors.items():
        if name not in forms:
            raise wrong(f"{name!r:.80}", "does not belong into this file")
        form = forms[name]
        if tensor.dtype != form.dtype or (form.letters and tensor.ndim != len(form.letters)):
            raise wrong(name, f"is {tensor.dtype} of shape {tuple(tensor.shape)}")
        for letter, length in zip(form.letters, tensor.shape, strict=bool(form.letters)):
            if lengths.setdefault(letter, length) != length:
                raise wrong(name, f"has shape {tuple(tensor.shape)}, which does not fit the other tensors")
    for name, tensor in tensors.items():
        form = forms[name]
        high = lengths.get(form.below, 2**31) - 1 if form.below else form.high
        low, top = map(float, tensor.aminmax()) if tensor.numel() else (form.low, form.low)
        if not (form.low <= low and top <= high):  # NaN is neither
            raise wrong(name, f"has values from {low:g} to {top:g}, and {form.low:g} to {high:g} is expected")
