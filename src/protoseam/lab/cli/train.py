"""``protoseam train``: flags, a config file, a recipe, or a run to go on with."""

from __future__ import annotations

import difflib
import os
import re
import sys
import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse

from protoseam.lab.cli.options import at_least_one, budget_seconds, known_variants, spare_threads, spelled
from protoseam.lab.engine.config import ConfigError, RunConfig, described, from_dict, parse_yaml, to_dict
from protoseam.lab.engine.loggers import NAMES

__all__ = ["Parser", "find_recipe", "flatten", "main", "refuse_clock_numbers", "vet_config_files"]

_OWN = {
    "config",
    "recipe",
    "resume",
    "out",
    "pack",
    "seeds",
    "variants",
    "budget_minutes",
    "quiet",
    "logger",
    "print_config",
}

_WORDS = ("--config", "--recipe", "--resume", "--out", "--data", "--data_root", "--name", "--storage")


_LISTS = {
    "seeds": "whole numbers, as in --seeds 42 43",
    "variants": "names, as in --variants baseline protoseam",
}


class Parser(jsonargparse.ArgumentParser):
    """jsonargparse, with a suggestion for what was probably meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(_suggest(message.strip(), self))


def _suggest(message: str, parser: Parser) -> str:
    wrong = re.match(r'Parser key "([\w.]+)":', message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    wanted = (_LISTS.get(wrong[1]) or described(wrong[1])) if wrong else None
    if wrong and given and wanted:
        return f"{wrong[1]} must be {wanted}, got {given[1]:.100}"
    known = [action.dest for action in parser._actions]
    for word in re.findall(r"--([\w.]+)|(?:[Kk]ey|[Oo]ption) [\"\']([\w.]+)", message):
        name = word[0] or word[1]
        # lrr is meant for optim.lr: compare with the last part of each name, too
        by_part = {k.rpartition(".")[2]: k for k in known} | {k: k for k in known}
        close = difflib.get_close_matches(name, by_part, n=1, cutoff=0.6)
        if name not in known and close:
            return f"{message}; did you mean --{by_part[close[0]]}?"
    return message


def build_parser(defaults: dict[str, Any] | None = None) -> Parser:
    parser = Parser(
        prog="protoseam train",
        description="Train a run into a new directory, or go on with one (--resume DIR).",
    )
    parser.add_argument("--config", action="config", help="a YAML file of settings")
    parser.add_argument("--recipe", type=str, help="start from a recipe, e.g. cifar100-resnet8-protoseam")
    parser.add_argument("--resume", type=str, metavar="DIR", help="go on with the run in DIR")
    parser.add_argument("--out", type=str, metavar="DIR", help="the run's directory; default runs/NAME")
    parser.add_argument(
        "--pack",
        type=int,
        default=1,
        metavar="R",
        help="runs trained side by side (with --seeds, --variants)",
    )
    parser.add_argument(
        "--seeds", type=list[int], help="train one run a seed, e.g. 42 43, into DIR/VARIANT-SEED"
    )
    parser.add_argument("--variants", type=list[str], help="train one run a variant, e.g. baseline protoseam")
    parser.add_argument("--budget-minutes", type=float, help="stop cleanly, saved, within this time")
    parser.add_argument("--quiet", type=bool, default=False, help="no progress")
    parser.add_argument("--logger", choices=NAMES, help="also log each epoch there")
    parser.add_class_arguments(RunConfig, None)
    if defaults:
        parser.set_defaults(flatten(defaults))
    return parser


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key in ("optim", "lift"):
            flat |= flatten(value, f"{key}.")
        else:
            flat[prefix + key] = value
    return flat


def find_recipe(argv: list[str]) -> dict[str, Any] | None:
    for i, word in enumerate(argv):
        name = word.split("=", 1)[1] if word.startswith("--recipe=") else None
        if word == "--recipe" and i + 1 < len(argv):
            name = argv[i + 1]
        if name is not None:
            from protoseam.lab.experiments.recipes import recipe

            return to_dict(recipe(name))
    return None


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted names (optim.lr), which jsonargparse knows, as the tables they stand for."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        part, dot, last = str(name).partition(".")
        if dot and isinstance(nested.setdefault(part, {}), dict):
            nested[part] = nested[part] | {last: value}
        else:
            nested[name] = value
    return nested


def refuse_clock_numbers(argv: list[str]) -> None:
    """Refuse ``--epochs=1:30``, which jsonargparse reads as YAML 1.1 does: 90."""
    for before, word in pairwise(["", *argv]):
        name, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and name not in _WORDS and re.fullmatch(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?", value):
            raise ConfigError(f"{name} {value} is not a number: write it without a colon")


def vet_config_files(argv: list[str], own: Collection[str] = _OWN) -> None:
    """Refuse what is more than plain settings before jsonargparse, which would go further, looks at it."""
    for i, word in enumerate(argv):
        given = word.partition("=")[2] if word.startswith("--config=") else None
        if word == "--config" and i + 1 < len(argv):
            given = argv[i + 1]
        if given is None:
            continue
        if not Path(given).is_file() and ":" not in given:  # settings in the command itself have a colon
            raise ConfigError(f"--config {given:.200}: there is no such file")
        try:
            settings = parse_yaml(Path(given).read_bytes() if Path(given).is_file() else given.encode())
            from_dict(_nested({name: value for name, value in settings.items() if name not in own}))
        except (ConfigError, OSError) as error:
            raise ConfigError(f"--config {given:.200}: {error}") from error


def main(argv: list[str]) -> int:
    from protoseam.lab.data.links import refuse_link
    from protoseam.lab.data.names import for_terminal
    from protoseam.lab.engine.rundir import RunDirectory
    from protoseam.lab.engine.session import resume, train_packed
    from protoseam.lab.engine.trainer import DivergedError
    from protoseam.seam.guards import SeamError

    vet_config_files(argv)
    refuse_clock_numbers(argv)
    parser = build_parser(find_recipe(argv))
    argv = _listed(spelled(argv, parser))
    values = parser.parse_args(argv).as_dict()
    budget = budget_seconds(values["budget_minutes"])
    at_least_one("pack", values["pack"])
    if values["resume"] is not None:
        _refuse_settings(argv)
        spare_threads(RunDirectory(Path(values["resume"])).read_config())
        summaries = [
            resume(
                Path(values["resume"]), quiet=values["quiet"], budget_seconds=budget, logger=values["logger"]
            )
        ]
        _say(summaries, [Path(values["resume"])])
        _say_chance(summaries, [Path(values["resume"])])
        return 0
    config = from_dict({k: v for k, v in values.items() if k not in _OWN})
    spare_threads(config)
    runs = _expand(config, values)
    for _, out in runs if len(runs) > 1 else []:
        refuse_link(out)  # a link in the directory of the runs; a single run's is the user's own
    pack = values["pack"]
    started = time.monotonic()
    status = 0
    groups = [runs[lo : lo + pack] for lo in range(0, len(runs), pack)]
    done: list[dict[str, Any]] = []
    places: list[Path] = []
    while groups:
        group = groups.pop(0)
        left = None if budget is None else budget - (time.monotonic() - started)
        several = len(runs) > 1
        try:
            summaries = train_packed(
                group,
                quiet=values["quiet"],
                budget_seconds=left,
                resuming=several,
                loggers=[values["logger"]] * len(group),
            )
        except (DivergedError, SeamError) as error:
            if not several:
                raise
            if len(group) > 1:  # one of them has stopped them all: each alone, from where it was saved
                groups[:0] = [[one] for one in group]
                continue
            print(for_terminal(f"protoseam train: {group[0][1]}: {error}"), file=sys.stderr)
            status = 1  # the others may well come through
            continue
        _say(summaries, [out for _, out in group])
        done, places = done + summaries, places + [out for _, out in group]
    _say_chance(done, places)
    return status


def _listed(argv: list[str]) -> list[str]:
    """``--seeds 42 43`` and ``--seeds 42,43`` as the list that the parser reads; the same for --variants."""
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name not in ("--seeds", "--variants"):
            words.append(word)
            continue
        values = [value] if value else []
        while not value and rest and not rest[0].startswith("-"):
            values.append(rest.pop(0))
        inside = ",".join(values)
        words.append(f"{name}={inside if inside.startswith('[') else f'[{inside}]'}")
    return words


def _refuse_settings(argv: list[str]) -> None:
    """A run goes on as it was begun: whoever asks for something else should hear so."""
    names = [word.partition("=")[0] for word in argv if word.startswith("--")]
    others = [name for name in names if name not in ("--resume", "--budget-minutes", "--quiet", "--logger")]
    if others:
        raise ConfigError(
            f"--resume goes on with the run's own settings: leave out {', '.join(others)}, or start a new run "
            "with --out"
        )


def _expand(config: RunConfig, values: dict[str, Any]) -> list[tuple[RunConfig, Path]]:
    """One run, or one for each variant and seed asked for."""
    import dataclasses

    name = f"{Path(config.data).name}-{config.model}"
    if not values["seeds"] and not values["variants"]:
        out = values["out"] or f"runs/{name}-{config.variant}-{config.seed}"
        return [(config, Path(out))]
    root = Path(values["out"] or f"runs/{name}")
    for option in ("seeds", "variants"):
        asked = values[option] or []
        if len(set(asked)) < len(asked):
            raise ConfigError(f"--{option} {asked} has something twice")
    known_variants(values["variants"] or [])
    return [
        (dataclasses.replace(config, variant=variant, seed=seed), root / f"{variant}-{seed}")
        for variant in values["variants"] or [config.variant]
        for seed in values["seeds"] or [config.seed]
    ]


def _say_chance(summaries: list[dict[str, Any]], outs: list[Path]) -> None:
    """Last of all, which of the runs have not learned anything, and what to try."""
    if os.environ.get("RANK", "0") != "0":
        return
    for summary, out in zip(summaries, outs, strict=True):
        if summary.get("at_chance"):
            print(f"{out}: {summary['at_chance']}")


def _say(summaries: list[dict[str, Any]], outs: list[Path]) -> None:
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first process speaks for all
        return
    for summary, out in zip(summaries, outs, strict=True):
        accuracy = summary["test_accuracy"]
        print(
            f"{out}: {'no test data, ' if accuracy is None else f'test accuracy {100 * accuracy:.2f} % '}"
            f"after {summary['epochs']} epochs in {summary['seconds']:.0f} s",
            file=sys.stdout,
        )
