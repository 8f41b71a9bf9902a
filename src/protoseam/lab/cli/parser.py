"""Options that commands share; for those that train, every setting of a run, from a recipe, a file and words."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from protoseam.lab.engine.config import ConfigError, RunConfig, Variant, to_dict
from protoseam.lab.engine.settings import dotted, from_dict, parse_yaml, read_word, settings, to_yaml


class Parser(argparse.ArgumentParser):
    """argparse with the settings of a run as options, and a suggestion for what was probably meant."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, f"{prog} [--OPTION VALUE …]", description, allow_abbrev=False)
        add = self.add_argument
        add("--config", metavar="FILE", help="a YAML file of settings")
        add("--recipe", metavar="NAME", help="start from a recipe, e.g. cifar100-resnet8-protoseam")
        add("--print_config", action="store_true", help="print the settings and stop")
        add("--quiet", nargs="?", const="true", default="false", help="show no progress")
        add("--budget-minutes", type=float, help="save and stop within this time")
        add("--no-page", action="store_true", help="write no report.html at the end")
        group = self.add_argument_group("settings")  # read_command checks what their values must be
        for name, setting in settings().items():
            default = _shown(setting.default)
            about = f"{setting.about} ({setting.wanted}; default {default})".replace("%", "%%").strip()
            group.add_argument(f"--{name}", dest=name, default=argparse.SUPPRESS, metavar="X", help=about)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with the nearest known option."""
        place = re.fullmatch(r"unrecognized arguments: ([^-].*)", message)
        if place and os.path.exists(place[1]):
            raise ConfigError(f"{message}; did you mean --data {shlex.quote(place[1])}?")
        known = [name.removeprefix("--") for name in self._option_string_actions]
        # lrr is meant for optim.lr: compare with the last part of each name, too
        by_part = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
        for name in re.findall(r"--([\w.-]+)", message):
            close = difflib.get_close_matches(name, by_part, n=1, cutoff=0.6)
            if f"{name}.name" in known:  # --optim adamw
                close = [f"{name}.name"]
            if name not in known and close:
                raise ConfigError(f"{message}; did you mean --{by_part[close[0]]}?")
        raise ConfigError(message)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def read_command(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Return a command's own options and the run's config: words go before the file, the file before the recipe.

    Raises:
        ConfigError: something is unknown, of the wrong kind or contradictory; it names the file if it stands there.
        SystemExit: after ``--help`` and ``--print_config``.
    """
    words = spelled(argv, parser)
    given = parser.parse_args(words)
    in_file: dict[str, Any] = {}
    if given.config is not None:
        own, in_file = _read_file(given.config, parser)
        given = parser.parse_args([*own, *words])
    chosen: dict[str, Any] = {}
    if given.recipe is not None:
        from protoseam.lab.experiments.recipes import recipe

        chosen = dotted(to_dict(recipe(given.recipe)))
    chosen |= in_file
    if given.quiet not in ("true", "false"):
        raise ConfigError(f"--quiet must be true or false, got {given.quiet}")
    given.quiet = given.quiet == "true"
    known = settings()
    for name in [name for name in vars(given) if name in known]:
        chosen[name] = read_word(known[name], getattr(given, name))
    config = from_dict(chosen)
    if given.print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return given, config


def _read_file(file: str, parser: Parser) -> tuple[list[str], dict[str, Any]]:
    """Return what a config file holds: options of the command itself, as its words, and the settings of the run."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--config {file:.200}: there is no such file")
    try:
        found = dotted(parse_yaml(path.read_bytes()))
        options = vars(parser.parse_args([])).keys() - {"config"}
        own = {name: found.pop(name) for name in list(found) if name in options}
        words = spelled([word for name, value in own.items() for word in _as_words(name, value)], parser)
        parser.parse_args(words)
        from_dict(found)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--config {file:.200}: {error}") from error
    return words, found


def _as_words(name: str, value: Any) -> list[str]:
    """Return an option as it is said in a command: true is the option alone, false and null leave it out."""
    if value is None or isinstance(value, bool):
        return [f"--{name}"] * bool(value)
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


# ---------------------------------------------------------------------- what any command may need


def spelled(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words as this parser takes them: --on-nonfinite is --on_nonfinite, and ~ the home directory.

    Shells expand ~ at the beginning of a word, but not in --out=~/runs.
    """

    def known(word: str) -> str:
        name, equals, value = word.partition("=")
        forms = (name, "--" + name[2:].replace("-", "_"), "--" + name[2:].replace("_", "-"))
        found = next((form for form in forms if form in parser._option_string_actions), name)
        return found + equals + os.path.expanduser(value)

    return [known(word) if word.startswith("--") else os.path.expanduser(word) for word in argv]


def usual_name(config: RunConfig) -> str:
    """Return what a directory is called by default: the name of the data, of ``.`` too, and of the model."""
    return f"{Path(os.path.abspath(config.data)).name}-{config.model}"


def refuse_inside_data(data: str, out: Path, beside: str) -> None:
    """Refuse to write runs among class folders, of which they would be one for every later run.

    The message proposes a place in a folder ``beside`` the data.
    """
    from protoseam.lab.data.loading import is_class_folders

    folder = Path(data).expanduser().resolve()
    if out.resolve().is_relative_to(folder) and is_class_folders(data):
        raise ConfigError(
            f"--out {out} lies in the data folder {folder}, where it would be taken for a class: choose a place "
            f"beside it, such as --out {folder.parent / beside / folder.name}"
        )


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"--{name} must be at least 1, got {value}")


def distinct(name: str, values: Sequence[object] | None) -> None:
    if values is not None and len(set(values)) < len(values):
        raise ConfigError(f"--{name} names one twice: {' '.join(map(str, values))}")


def listed(values: Sequence[str] | None) -> list[str]:
    """Return the words of ``42 43``, ``42,43`` or ``[42,43]``."""
    return [word for value in values or () for word in re.split(r"[\[\],\s]+", value) if word]


def known_seeds(asked: Sequence[str] | None) -> list[int]:
    """Return the seeds; raise ConfigError for a word that is none."""
    words = listed(asked)
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ConfigError(f"--seeds must be whole numbers, as in --seeds 42 43, got {wrong[0]:.100}")
    distinct("seeds", seeds := list(map(int, words)))
    return seeds


def known_variants(asked: Sequence[str] | None) -> list[Variant]:
    """Return the variants of these names; raise ConfigError for an unknown one."""
    known = {str(variant): variant for variant in get_args(Variant)}
    distinct("variants", names := listed(asked))
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no variant {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def budget_seconds(minutes: float | None) -> float | None:
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--budget-minutes must be above 0, got {minutes:g}; leave it out for no limit")
    return None if minutes is None else 60 * minutes


def one_thread() -> None:
    """Use one thread, which is fastest for very small networks, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def spare_threads(config: RunConfig) -> None:
    """Use one thread for the digits, when a run is resumed too: other threads would sum in another order."""
    if config.data == "digits":
        one_thread()


def speaks() -> bool:
    """Return whether this process prints and writes pages: under torchrun the first speaks for all."""
    return os.environ.get("RANK", "0") == "0"
