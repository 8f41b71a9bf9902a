"""Settings as plain values: from code, YAML files and words of a command to a checked config, and back to YAML.

:func:`from_dict` is the one check of names and kinds; :class:`~protoseam.lab.engine.config.RunConfig` itself checks
ranges, and settings that contradict each other.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from typing import Any, Literal, NamedTuple

from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig, to_dict

_MOST_BYTES, _MOST_DEPTH = 2**16, 20  # what RunConfig needs has 2 KB and 3 levels
_LARGEST = 1e300
_SECTIONS: dict[str, type] = {"optim": OptimConfig, "lift": LiftConfig}


class Setting(NamedTuple):
    """A setting of a run: its dotted name, what its value must be, its default, and a sentence about it."""

    name: str
    kind: Any
    default: Any
    about: str

    @property
    def wanted(self) -> str:
        """What the value must be, in words."""
        return _named(self.kind)


@functools.cache
def settings() -> dict[str, Setting]:
    """Return every setting by its dotted name (``optim.lr``), from the config's dataclasses and their docstrings."""
    found = {}
    for section, kind in {"": RunConfig, **_SECTIONS}.items():
        hints = typing.get_type_hints(kind)
        text = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
        about = {
            n: " ".join(t.split())
            for n, t in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
        }
        for field in dataclasses.fields(kind):
            if field.name in _SECTIONS:
                continue
            name = f"{section}.{field.name}".lstrip(".")
            default = {} if field.default is dataclasses.MISSING else field.default
            found[name] = Setting(name, hints[field.name], default, about.get(field.name, ""))
    return found


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Return the config of plain values by name; sections may be tables or dotted names.

    Raises:
        ConfigError: names the setting that is unknown, with the nearest known one, or whose value is of the wrong kind.
    """
    parts: dict[str, dict[str, Any]] = {"": {}}
    for key, value in dotted(values).items():
        if key in _SECTIONS:
            raise ConfigError(f"{key} must be a table of settings, got {value!r:.100}")
        section, _, last = str(key).rpartition(".")
        parts.setdefault(section, {})[last] = _checked(key, value)
    return RunConfig(**parts.pop(""), **{name: _SECTIONS[name](**part) for name, part in parts.items()})


def dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings in one level: a section's are called ``optim.lr`` and so on."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inside = key in _SECTIONS and isinstance(value, dict)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if inside else {key: value}
    return flat


def _checked(name: Any, value: Any) -> Any:
    known = settings()
    if name not in known:
        shown = name if str(name).isprintable() else repr(name)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"unknown setting {shown}; {hint}")
    if not (_fits(value, known[name].kind) and _printable(value)):
        raise ConfigError(f"{name} must be {known[name].wanted}, got {value!r:.100}")
    return float(value) if type(value) is int and _fits(0.5, known[name].kind) else value


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a plain value is of the kind a setting has; YAML and JSON know no others."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if hint is float:  # no setting is infinite; comparing takes any int, math.isfinite does not
        return type(value) in (int, float) and -_LARGEST < value < _LARGEST
    if hint in (int, bool):  # True is an int to Python, but nobody means one epoch by it
        return type(value) is hint
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return isinstance(value, hint)


def _printable(value: Any) -> bool:
    """Tell whether every word in a value can be shown on a terminal as it is."""
    if isinstance(value, dict):
        return all(map(_printable, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_printable, value))
    return not isinstance(value, str) or value.isprintable()


def _named(hint: Any) -> str:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_named, inside))
    if origin is Literal:
        return " or ".join(map(str, inside))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "printable text"}
    return {**names, type(None): "null"}.get(hint, "a table of settings")


def read_word(setting: Setting, word: str) -> Any:
    """Return the value that a word of a command means: text for a setting of text, otherwise what YAML reads.

    Raises:
        ConfigError: the word asks for more than plain values.
    """
    if _fits("", setting.kind):
        return None if word == "null" and _fits(None, setting.kind) else word
    try:
        return _load(word.encode())
    except ConfigError:
        raise ConfigError(f"{setting.name} must be {setting.wanted}, got {word!r:.100}") from None


# ---------------------------------------------------------------------- YAML


@functools.cache
def _dialect() -> tuple[Any, Any]:
    """Return YAML's safe loader and dumper, with numbers as everyone but YAML 1.1 writes them.

    1e-3 is one. 1:30, which would be 90, and 010, which would be 8, are words, and so refused where a number belongs.
    """
    import yaml

    numbers = {
        "int": r"[-+]?(0|[1-9][0-9_]*)$",
        "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|"
        r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
    }
    kinds: tuple[Any, Any] = (type("Loader", (yaml.SafeLoader,), {}), type("Dumper", (yaml.SafeDumper,), {}))
    tags = {f"tag:yaml.org,2002:{kind}": re.compile(form) for kind, form in numbers.items()}
    # the dumper keeps the old forms as well, so that it quotes words that look like them
    kinds[0].yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag not in tags]
        for first, forms in kinds[0].yaml_implicit_resolvers.items()
    }
    for kind in kinds:
        for tag, form in tags.items():
            kind.add_implicit_resolver(tag, form, list("-+.0123456789"))
    return kinds


def to_yaml(config: RunConfig) -> str:
    """Return the config as YAML, which :func:`parse_yaml` and :func:`from_dict` read back."""
    import yaml

    return str(yaml.dump(to_dict(config), Dumper=_dialect()[1], sort_keys=False))


def parse_yaml(text: bytes) -> dict[str, Any]:
    """Return the settings in a YAML file: numbers, words, lists and tables.

    Raises:
        ConfigError: the text is no table of plain values. Tags cannot make objects of them. Aliases are refused, as a
            few lines of them can stand for a structure larger than memory, and so is deep nesting, for which the
            parser's time grows with the square of the depth and more.
    """
    values = _load(text)
    if not isinstance(values, dict):
        raise ConfigError(f"these are no settings, one per line, but a {type(values).__name__}")
    return values


def _load(text: bytes) -> Any:
    import yaml

    if len(text) > _MOST_BYTES:
        raise ConfigError(f"it has {len(text):,} bytes; a file of settings has at most {_MOST_BYTES:,}")
    depth = 0
    loader, _ = _dialect()
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"*{event.anchor} is a YAML alias: write the value out in its place")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise ConfigError(f"its lists and tables are more than {_MOST_DEPTH} deep: no setting is")
        return loader(text).get_single_data()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no text, or 2001-99-99
        raise ConfigError(f"this is not valid YAML, or more than plain values: {error}") from error
