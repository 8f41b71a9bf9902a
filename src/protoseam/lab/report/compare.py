"""Several runs side by side: accuracies, paired differences with intervals, curves, and which settings differ."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protoseam.lab.engine.config import BESIDE
from protoseam.lab.engine.settings import dotted
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.aggregate import interval
from protoseam.lab.report.gather import Gathered
from protoseam.lab.report.markup import Markup, section, table, tag
from protoseam.lab.report.payload import rounded
from protoseam.lab.report.single import duration, percent

_ASIDE = {*BESIDE, "seed", "data_root", "keep_embeddings", "audit_every", "eval_every", "checkpoint_every"}
_DRAWN = 10  # groups in one chart, as many as there are colours


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    settings: dict[str, Any]
    runs: list[Gathered]
    label: str = ""

    @property
    def block(self) -> str:
        """Only runs on the same data with the same network are compared."""
        options = ", ".join(f"{k} {v}" for k, v in (self.settings.get("model_options") or {}).items())
        network = f"{self.settings['model']}{options and f' ({options})'}"
        return f"{self.settings['data']}, {network}"

    def by_seed(self, what: str) -> dict[int, float]:
        """Percent by seed; of a seed that was run twice, the last."""
        found = {int(run.config["seed"]): getattr(run, what) for run in self.runs}
        return {seed: 100 * value for seed, value in found.items() if value is not None}


def grouped(runs: Sequence[Gathered]) -> list[Group]:
    """Groups in the order of their first runs, labelled by the settings in which they differ."""
    found: dict[str, Group] = {}
    for run, data in zip(runs, _data_names(runs), strict=True):
        settings = {k: v for k, v in dotted(run.config).items() if k not in _ASIDE}
        if settings["data"] in paper.DATASETS and settings["augment"] == "auto":
            settings["augment"] = "paper"  # the same for these images
        settings["data"] = data
        if settings["variant"] != "protoseam":  # of a seam Unlifted has the width, and Baseline nothing
            own = {"lift.dim"} if settings["variant"] == "unlifted" else set()
            settings = {k: v for k, v in settings.items() if not k.startswith("lift.") or k in own}
        found.setdefault(repr(sorted(settings.items(), key=str)), Group(settings, [])).runs.append(run)
    groups = list(found.values())
    return [dataclasses.replace(g, label=_label(g, groups)) for g in groups]


def _data_names(runs: Sequence[Gathered]) -> list[str]:
    """A name for the data of each run: the last part of its path, or more where other data has that, too.

    Data is the same wherever its samples lie, and at any image size; a path whose samples have changed is not.
    """
    places, prints, found = [], [], defaultdict(set)
    for run in runs:
        own = run.data if run.data and run.data.path else None
        place = str(own.path if own else run.config["data"])
        print_ = hashlib.sha256(repr((own.train, own.test)).encode()).hexdigest()[:8] if own else place
        places.append(place)
        prints.append(print_)
        found[place, own and own.image_size].add(print_)
    changed = {place for (place, _), several in found.items() if len(several) > 1}
    first = dict(zip(reversed(prints), reversed(places), strict=True))
    same = [f"{at} ({p})" if at in changed else first[p] for at, p in zip(places, prints, strict=True)]
    short = [Path(at if at in changed else one).name for at, one in zip(places, same, strict=True)]
    several = Counter(name for name, _ in set(zip(short, same, strict=True)))
    return [name if several[name] == 1 else one for name, one in zip(short, same, strict=True)]


def differing(groups: Sequence[Group]) -> list[str]:
    """The settings that are not the same in all groups; what a group does not have counts as no difference."""
    names = dict.fromkeys(name for group in groups for name in group.settings)
    values = {n: {repr(g.settings[n]) for g in groups if n in g.settings} for n in names}
    return [name for name in names if len(values[name]) > 1]


def _label(group: Group, groups: Sequence[Group]) -> str:
    """The variant, and within the same data, network and variant whatever else differs."""
    kin = [g for g in groups if (g.block, g.settings["variant"]) == (group.block, group.settings["variant"])]
    names = [name for name in differing(kin) if name not in ("data", "model", "model_options", "variant")]
    if len({g.settings["epochs"] for g in groups if g.block == group.block}) > 1:
        names = ["epochs", *(name for name in names if name != "epochs")]
    more = ", ".join(f"{name.rpartition('.')[2]} {_short(group.settings[name])}" for name in names)
    return f"{group.settings['variant']}{more and f', {more}'}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def paired(one: dict[int, float], other: dict[int, float]) -> tuple[float, tuple[float, float] | None] | None:
    """Mean difference over the seeds that both have, and its 95 % interval by Student's t from two seeds on."""
    values = [one[seed] - other[seed] for seed in one if seed in other]
    return (statistics.fmean(values), interval(values)) if values else None


def comparison_sections(groups: list[Group], beside: Path | None) -> tuple[list[Markup], dict[str, Any]]:
    """HTML of the comparison, and what the script draws in it."""
    tested = any(group.by_seed("test") for group in groups)
    what = "test" if tested else "validation"
    blocks: dict[str, list[Group]] = {}
    for group in groups:
        blocks.setdefault(group.block, []).append(group)
    sections = [_results(blocks, what), _charts(blocks), _settings(groups), _list(groups, beside)]
    return sections, {"compare": [_chart(name, own) for name, own in blocks.items()]}


def _reference(groups: list[Group]) -> Group:
    """Of variant baseline the first group with the most runs; without any, the first group."""
    plain = [group for group in groups if group.settings["variant"] == "baseline"]
    return max(plain, key=lambda group: len(group.runs), default=groups[0])


def _results(blocks: dict[str, list[Group]], what: str) -> Markup:
    tables = []
    for name, groups in blocks.items():
        reference, rows = _reference(groups), []
        for group in _best_first(groups, what):
            own = group.by_seed(what)
            mean = _mean(own.values())
            rows.append(
                [
                    group.label,
                    str(len(group.runs)),
                    "–" if mean is None else f"{mean:.2f}",
                    f"{max(own.values()) - min(own.values()):.2f}" if len(own) > 1 else "–",
                    "reference" if group is reference else _difference(own, reference.by_seed(what)),
                    duration(_mean(run.seconds for run in group.runs)),
                ]
            )
        head = ["Setting", "Runs", f"{what.capitalize()} accuracy, %", "Spread", f"To {reference.label}"]
        tables.append(table(name, [*head, "Time per run"], rows, class_="wide"))
    lead = (
        "Differences are in points, paired over the seeds that both have, with the 95 % interval of their mean "
        "(Student's t) in brackets. Spread is the largest minus the smallest."
    )
    return section("results", "Results", *tables, lead=lead)


def _difference(own: dict[int, float], reference: dict[int, float]) -> str:
    found = paired(own, reference)
    if found is None:
        return "no seed in common"
    mean, ends = found
    text = f"{mean:+.2f}" + (f" [{ends[0]:+.2f}, {ends[1]:+.2f}]" if ends else "")
    return text.replace("-", "−")


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _best_first(groups: list[Group], what: str) -> list[Group]:
    return sorted(groups, key=lambda group: _mean(group.by_seed(what).values()) or 0.0, reverse=True)


def _charts(blocks: dict[str, list[Group]]) -> Markup:
    lead = "The mean over the seeds of each setting; the first epochs may lie below the picture."
    if any(len(groups) > _DRAWN for groups in blocks.values()):
        lead += f" Of many settings the {_DRAWN} with the highest last validation accuracy are drawn."
    grid = tag("div", id="compare-grid", class_="grid broad")
    return section("compare", "Curves side by side", grid, short="Side by side", lead=lead)


def _chart(name: str, groups: list[Group]) -> dict[str, Any]:
    best = _best_first(groups, "validation")[:_DRAWN]
    chosen = [group for group in groups if group in best]
    epochs = sorted({row["epoch"] for group in chosen for run in group.runs for row in run.metrics})
    series = {}
    for group in chosen:
        by_epoch: dict[int, list[float]] = {}
        for row in (row for run in group.runs for row in run.metrics):
            if row["validation_accuracy"] is not None:
                by_epoch.setdefault(row["epoch"], []).append(100 * row["validation_accuracy"])
        series[group.label] = [rounded(_mean(by_epoch.get(epoch, ()))) for epoch in epochs]
    title = f"Validation accuracy: {name}"
    return {"title": title, "unit": "%", "log": False, "cut": True, "epochs": epochs, "series": series}


def _settings(groups: list[Group]) -> Markup:
    names = differing(groups)
    if not names:
        same = tag("p", "None: the runs differ in the seed alone.")
        return section("differing", "Which settings differ", same)
    rows = [[g.label, *(_short(g.settings.get(name, "")) for name in names)] for g in groups]
    shown = table("Settings that differ", ["Setting", *names], rows)
    lead = "All other settings are the same. An empty cell means that the variant does not have the setting."
    return section("differing", "Which settings differ", shown, short="Differences", lead=lead)


def _list(groups: list[Group], beside: Path | None) -> Markup:
    rows = []
    for run in (run for group in groups for run in group.runs):
        accuracies = percent(run.test), percent(run.validation)
        rows.append([_linked(run, beside), str(run.config["seed"]), *accuracies, str(len(run.metrics))])
    return section("runs", "All runs", table("Runs", ["Run", "Seed", "Test", "Validation", "Epochs"], rows))


def _linked(run: Gathered, beside: Path | None) -> str:
    """The name of a run, with a link to its own page where there is one."""
    own = None if run.place is None else run.place / "report.html"
    if own is None or beside is None or not own.exists() or own.resolve().parent == beside.resolve():
        return run.name
    return tag("a", run.name, href=os.path.relpath(own.resolve(), beside.resolve()))
