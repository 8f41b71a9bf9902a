"""The sections of one run's page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from protoseam.lab.engine.config import RunConfig, to_dict
from protoseam.lab.engine.settings import dotted
from protoseam.lab.report.gather import Gathered
from protoseam.lab.report.markup import Markup, section, table, tag
from protoseam.lab.report.payload import answers_payload, calibration, curves_payload, latent_payload

_VARIANTS = {"baseline": "Baseline", "unlifted": "Unlifted", "protoseam": "ProtoSeam"}
_ENVIRONMENT = {
    "protoseam": "ProtoSeam", "commit": "Commit", "torch": "PyTorch", "python": "Python", "device": "Device",
    "cpu": "Processor", "threads": "Threads", "processes": "Processes", "system": "System",
}  # fmt: skip
# Terms of eq:decomposition, in the order of the bound, as a reader meets them.
_BOUND = (
    ("sampled_loss", "Loss on sampled points", "N2's loss on the points it learns from, drawn around the prototypes."),
    ("mean_mismatch", "Means beside prototypes", "The classes' held-out means do not lie on their prototypes."),
    ("covariance_mismatch", "Another spread", "Held-out images scatter otherwise than the points that N2 learns from."),
    ("non_gaussianity", "Not Gaussian", "The clouds of held-out images are not Gaussian. This is an upper estimate."),
)  # fmt: skip
# What the script fills: the parts of the page that are the same for every run.
_LATENT_VIEW = """<div class="controls"><button type="button" id="play">Play</button>
<input type="range" id="epoch" min="0" max="{last}" step="1" value="0" aria-label="Epoch">
<output id="epoch-shown" for="epoch"></output></div>
<div class="split">
<div class="stage"><canvas id="latent-view" tabindex="0" role="img" aria-label="The latent space"></canvas></div>
<div class="side"><div class="controls"><label>Plane <select id="plane"></select></label>
<label>Class <select id="only"><option value="-1">all</option></select></label>
<label><input type="checkbox" id="wrong"> only wrong answers</label></div>
<div id="point" aria-live="polite" class="card">Point at an image to see it here.</div>
<ul id="legend"></ul>
<p class="hint">With the keyboard: focus the picture, then the arrow keys go from image to image.</p></div></div>"""
_MISTAKES_VIEW = """<div class="split matrix-split">
<div id="confusion" class="scroll" tabindex="0" role="region" aria-label="Confusion matrix"></div>
<div class="side"><h3>Most frequent mistakes</h3><ul id="top-mistakes" class="chips"></ul>
<div id="cell" class="card" aria-live="polite">Choose a cell to see its images.</div></div></div>"""


def run_sections(run: Gathered) -> tuple[list[Markup], dict[str, Any]]:
    """HTML of the sections, and what the script draws in them."""
    payload: dict[str, Any] = {"classes": run.classes, "curves": curves_payload(run.metrics)}
    sections = [_curves(run)] if run.metrics else []
    if (latent := latent_payload(run)) is not None:
        payload["latent"] = latent
        sections.append(_latent(run, latent))
    answers = answers_payload(run)
    if answers is not None:
        payload["answers"] = answers
        payload["classes"] = [run.class_name(c) for c in range(run.class_count)]
    if answers is not None and "confusion" in answers:
        found = payload["reliability"] = calibration(run)
        sections += [_mistakes(run), _classes(run), _reliability(found or {}), _images("sheet" in answers)]
    if {"risk", "bound", *(key for key, *_ in _BOUND)} <= set(run.bound):
        sections.append(_bound(run.bound))
    return [*sections, _about(run)], payload


def percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def headline(run: Gathered) -> str:
    config = run.config
    seam = f", seam width {config['lift']['dim']}" if config["variant"] != "baseline" else ""
    return (
        f"{_VARIANTS[config['variant']]} training of {config['model']} on {Path(str(config['data'])).name}, "
        f"{config['epochs']} epochs, seed {config['seed']}{seam}"
    )


def tiles(run: Gathered) -> Markup:
    """The few numbers that a reader wants first."""
    shown = [("Test accuracy", percent(run.test)), ("Validation accuracy", percent(run.validation))]
    if (found := calibration(run)) is not None:
        shown += [("Calibration error", percent(found["ece"])), ("Test NLL", f"{found['nll']:.3f}")]
    shown.append(("Training time", duration(run.seconds)))
    if run.summary.get("parameters"):
        shown.append(("Parameters", f"{run.summary['parameters']:,}"))
    return _pairs(shown, "tiles")


def _pairs(shown: list[tuple[str, str]], kind: str) -> Markup:
    rows = [tag("li", tag("span", name), tag("strong", value)) for name, value in shown]
    return tag("ul", *rows, class_=kind)


def _curves(run: Gathered) -> Markup:
    done, planned = len(run.metrics), run.config["epochs"]
    lead = "One point per epoch. Point at a curve to read its values."
    if done < planned:
        lead += f" The run has ended {done} of {planned} epochs."
    grid = tag("div", id="curve-grid", class_="grid")
    return section("curves", "How it learned", grid, short="Curves", lead=lead)


def _latent(run: Gathered, latent: dict[str, Any]) -> Markup:
    kept, count = latent["points"], len(run.latents["label"])
    lifted = "s" in latent
    what = "N1's output" if lifted else "The input of the last layer"
    which = f"{kept:,} of {count:,}" if kept < count else f"the {count:,}"
    lead = f"{what} for {which} test images, coloured by true class."
    if lifted:
        lead += " Stars are prototypes; an ellipse reaches two deviations of the covariance that N2's samples have."
    if run.class_count > 20:
        lead += " Choose a class to see its name" + (" and its ellipse." if lifted else ".")
    if "head" in latent:
        lead += " The tint is N2's decision."
    if latent["directions"] > 2 or (latent["width"] or 3) > 2:
        lead += (
            f" Of {latent['width'] or 'many'} dimensions the page shows two at a time, along directions that were "
            "fitted once, on the last epoch, and stay still while the epochs pass."
        )
    view = Markup(_LATENT_VIEW.format(last=len(latent["epochs"]) - 1))
    return section("latent", "The latent space over the epochs", view, short="Latent space", lead=lead)


def _mistakes(run: Gathered) -> Markup:
    kept = run.latents
    wrong = int((kept["label"] != kept["first"]).sum())
    lead = f"{wrong:,} of {len(kept['label']):,} test images have a wrong answer. Choose a cell to see its images."
    return section("mistakes", "What it confuses", Markup(_MISTAKES_VIEW), short="Mistakes", lead=lead)


def _classes(run: Gathered) -> Markup:
    kept = run.latents
    C, label, hit = run.class_count, kept["label"].long(), (kept["label"] == kept["first"]).double()
    count = torch.bincount(label, minlength=C)
    right = torch.bincount(label, weights=hit, minlength=C) / count.clamp_min(1)
    located = "spread" in kept and len(kept["spread"]) == C
    head = ["Class", "Test images", "Right"]
    head += ["Spread", "Nearest rival", "Distance", "Distance / spread"] if located else []
    rows = []
    for c in right.argsort(stable=True).tolist():
        row: list[str] = [run.class_name(c), f"{int(count[c]):,}", _bar(float(right[c])) if count[c] else "–"]
        if located:
            spread, distance = float(kept["spread"][c]), float(kept["distance"][c])
            ratio = f"{distance / spread:.1f}" if spread > 0 else "–"
            row += [f"{spread:.3g}", run.class_name(int(kept["rival"][c])), f"{distance:.3g}", ratio]
        rows.append(row)
    where = "prototypes" if "prototypes" in kept else "class means"
    lead = "The classes with most errors come first."
    if located:
        lead += (
            " Spread is the root mean square distance of a class's test images from their mean; distance is from its "
            f"own to the nearest of the other {where}. Where their ratio is small, classes overlap."
        )
    shown = table("Test images by class", head, rows, class_="wide")
    return section("classes", "Class by class", shown, short="Classes", lead=lead)


def _bar(share: float) -> Markup:
    fill = tag("span", "", class_="fill", style=f"width:{100 * share:.1f}%")
    return tag("span", fill, tag("span", percent(share, 1)), class_="bar")


def _reliability(found: dict[str, Any]) -> Markup:
    lead = (
        "Test images, sorted by the probability of their answer. A bar that ends on the diagonal is right as "
        f"often as it says. The mean gap, the expected calibration error, is {percent(found.get('ece'))} over "
        f"{len(found.get('bins', []))} bins of equal width."
    )
    chart = tag("div", id="reliability-chart", class_="narrow")
    return section("reliability", "Can its probabilities be believed?", chart, short="Reliability", lead=lead)


def _images(pictures: bool) -> Markup:
    what = "images" if pictures else "samples"
    return section(
        "worst",
        f"The worst and the most doubtful {what}",
        tag("h3", "Least probability for the true class"),
        tag("ul", id="worst-images", class_="gallery"),
        tag("h3", "First and second answer closest"),
        tag("ul", id="doubtful-images", class_="gallery"),
        short=what.capitalize(),
        lead="The caption says the true class, then the answer with its probability.",
    )


def _bound(bound: dict[str, float]) -> Markup:
    total = max(bound["bound"], 1e-12)
    rows: list[list[str]] = [
        [name, f"{bound[key]:.4g}", _bar(max(0.0, bound[key] / total)), words] for key, name, words in _BOUND
    ]
    sum_of, risk = f"{bound['bound']:.4g}", _bar(min(1.0, bound["risk"] / total))
    rows += [
        ["Their sum: the bound", sum_of, "", "The loss on held-out images cannot exceed it."],
        ["Measured loss", f"{bound['risk']:.4g}", risk, "On the validation images, a mean over the classes."],
    ]
    times = f"{bound['bound'] / bound['risk']:.1f} times" if bound["risk"] > 0 else "above"
    lead = (
        "The loss of the deployed network is at most N2's loss on sampled points plus three terms that say how far the "
        "sampled points are from the images. The terms are weighted with the steepness of N2's loss. Here the bound is "
        f"{times} the measured loss."
    )
    head = ["Term", "Loss", "Share of the bound", "In words"]
    shown = table("The terms of the bound", head, rows, class_="words")
    return section("bound", "What theory promises", shown, short="Bound", lead=lead)


def changed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not the defaults, by their dotted names; where the data lies is not among them."""
    usual = dotted(to_dict(RunConfig()))
    return {k: v for k, v in dotted(config).items() if v != usual.get(k) and k != "data_root"}


def command_of(config: dict[str, Any]) -> str:
    """The command that trains this run again."""
    words = ["protoseam", "train"]
    for key, value in changed(config).items():
        if value is not None:
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def _about(run: Gathered) -> Markup:
    other = changed(run.config)
    settings = [
        [name, "none" if value is None else str(value), "changed" if name in other else ""]
        for name, value in dotted(run.config).items()
        if name != "data_root"
    ]
    facts = [("Data", _data(run)), ("Training time", duration(run.seconds))]
    known = ((name, run.environment.get(key)) for key, name in _ENVIRONMENT.items())
    facts += [(name, str(value)) for name, value in known if value is not None]
    if run.summary.get("rate_scale"):
        facts.append(("Learning rates", f"times {run.summary['rate_scale']:g}, after it diverged"))
    command = tag("code", run.command or command_of(run.config))
    heads = ["Setting", "Value", "Against the default"]
    return section(
        "about",
        "What was trained, and how",
        tag("h3", "To repeat it"),
        tag("pre", command, tabindex="0", role="region", aria_label="Command"),
        tag("h3", "Data and environment"),
        _pairs(facts, "facts"),
        tag("details", tag("summary", f"All {len(settings)} settings"), table("Settings", heads, settings)),
        short="Settings",
    )


def _data(run: Gathered) -> str:
    name = Path(str(run.config["data"])).name
    if run.data is None:
        return name
    parts = (("training", run.data.train), ("test", run.data.test))
    counts = ", ".join(f"{int(part[0]):,} {kind}" for kind, part in parts if part)
    shape = "×".join(map(str, run.data.sample_shape))
    return f"{name}: {counts} samples of shape {shape}, {len(run.data.classes)} classes"
