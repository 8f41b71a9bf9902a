"""The options of commands that train: their own, and every setting of a run, from a recipe, a file and words."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from protoseam.lab.cli.options import spelled
from protoseam.lab.engine.config import ConfigError, RunConfig, to_dict
from protoseam.lab.engine.settings import from_dict, parse_yaml, read_word, settings, to_yaml


class Parser(argparse.ArgumentParser):
    """argparse with the settings of a run as options, and a suggestion for what was probably meant."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, f"{prog} [--OPTION VALUE …]", description, allow_abbrev=False)
        self.add_argument("--config", metavar="FILE", help="a YAML file of settings")
        self.add_argument(
            "--recipe", metavar="NAME", help="start from a recipe, e.g. cifar100-resnet8-protoseam"
        )
        self.add_argument("--print_config", action="store_true", help="print the settings and stop")
        self.add_argument("--quiet", nargs="?", const="true", default="false", help="show no progress")

    def add_settings(self) -> None:
        """Add an option for every setting; what its value must be is checked by :func:`read_command`."""
        group = self.add_argument_group("settings")
        for setting in settings().values():
            about = f"{setting.about} ({setting.wanted}; default {_shown(setting.default)})".replace(
                "%", "%%"
            )
            group.add_argument(
                f"--{setting.name}",
                dest=setting.name,
                default=argparse.SUPPRESS,
                metavar="X",
                help=about.strip(),
            )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with the nearest known option."""
        known = [name.removeprefix("--") for name in self._option_string_actions]
        # lrr is meant for optim.lr: compare with the last part of each name, too
        by_part = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
        for name in re.findall(r"--([\w.-]+)", message):
            close = difflib.get_close_matches(name, by_part, n=1, cutoff=0.6)
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
    given = parser.parse_args(spelled(argv, parser))
    given.quiet = truth("quiet", given.quiet)
    chosen: dict[str, Any] = {}
    if given.recipe is not None:
        from protoseam.lab.experiments.recipes import recipe

        chosen = _dotted(to_dict(recipe(given.recipe)))
    if given.config is not None:
        chosen |= _read_file(given, parser)
    known = settings()
    for name in [name for name in vars(given) if name in known]:
        chosen[name] = read_word(known[name], getattr(given, name))
    config = from_dict(chosen)
    if given.print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return given, config


def _read_file(given: argparse.Namespace, parser: Parser) -> dict[str, Any]:
    """Return the settings of ``--config``; options of the command itself, which a file may hold too, go into given."""
    path = Path(given.config)
    if not path.is_file():
        raise ConfigError(f"--config {given.config:.200}: there is no such file")
    try:
        found = _dotted(parse_yaml(path.read_bytes()))
        own = {name: value for name, value in found.items() if name in vars(given) and name not in settings()}
        found = {name: value for name, value in found.items() if name not in own}
        from_dict(found)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--config {given.config:.200}: {error}") from error
    for name, value in own.items():
        if getattr(given, name) == parser.get_default(name):
            setattr(given, name, value)
    return found


def _dotted(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables of settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inside = isinstance(value, dict) and key in ("optim", "lift")
        flat |= {f"{key}.{k}": v for k, v in value.items()} if inside else {key: value}
    return flat


def truth(name: str, word: str | bool) -> bool:
    """Return what true and false mean."""
    if isinstance(word, bool) or word in ("true", "false"):
        return word in (True, "true")
    raise ConfigError(f"--{name} must be true or false, got {word}")
