"""Three figures of an audit: the bound as a waterfall, the classes ranked, the terms over the epochs.

Each takes the dict of :func:`protoseam.lab.experiments.audit.audit_run`. Needs matplotlib (extra ``report``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protoseam.lab.data.names import for_figures
from protoseam.lab.experiments.drawing import new_figure, save_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TERMS = {  # in the order they are stacked
    "mean_mismatch": ("mean mismatch", "#1b6ca8"),
    "covariance_mismatch": ("covariance mismatch", "#7fb8d6"),
    "non_gaussianity": ("non-Gaussianity", "#e0a458"),
}
_SAMPLED, _RISK, _INK = "#8a8a8a", "#c4501b", "#333333"
_LOSSES = {
    "risk": ("risk $R$", _RISK),
    "sampled_loss": ("sampled loss", _SAMPLED),
    "smoothing_gap": ("smoothing gap, measured", "#1b6ca8"),
    "curvature": ("its second-order form", "#7fb8d6"),
}
_COLLAPSE = {
    "nc1_ratio": ("NC1 (tr $\\Sigma_W$ / tr $\\Sigma_B$)", "#1b6ca8"),
    "nc2_angle": ("NC2 (angles)", "#7fb8d6"),
    "nc3": ("NC3 (head and means)", "#e0a458"),
    "nc4": ("NC4 (nearest mean)", _RISK),
}
_NAMED = 20  # classes with a label


def _panels(
    report: dict[str, Any], width: float, height: float, panels: Sequence[float]
) -> tuple[Figure, list[Axes]]:
    figure, axes = new_figure(width, height, panels)
    data = f"epoch {report['epoch']}, {report['split']} data ({report['samples']:,} samples)"
    figure.suptitle(f"{for_figures(report['run'])}, {data}", fontsize=10, color=_INK)
    for one in axes:
        one.tick_params(colors=_INK, labelsize=9)
    return figure, axes


def waterfall_figure(report: dict[str, Any]) -> Figure:
    """Draw what was measured and, on the same quantity, the way from L_sample up to the bound, term by term."""
    total = report["totals"]["balanced"]
    figure, (left, right) = _panels(report, 10.5, 4.4, (1, 2.3))
    measured = [
        ("$\\ell(s)$\nat the\nprototypes", report["smoothing"]["point_loss"], "#c9c9c9"),
        ("$L_{sample}$\nsampled\nloss", total["sampled_loss"], _SAMPLED),
        ("$R$\ndeployed\nrisk", total["risk"], _RISK),
    ]
    for i, (_, value, color) in enumerate(measured):
        left.bar(i, value, color=color, width=0.62)
        _above(left, f"{value:.3g}", i, value)
    left.errorbar(1, total["sampled_loss"], yerr=4 * total["sampled_error"], color=_INK, capsize=3, lw=1)
    left.set_xticks(range(len(measured)), [name for name, _, _ in measured], fontsize=9)
    left.set_title("Measured", loc="left", fontsize=10)
    left.set_ylabel("cross-entropy, mean over classes")
    left.margins(y=0.12)
    _climb(right, total)
    return figure


def _above(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (0, 3), textcoords="offset points", ha="center", fontsize=9)


def _beside(axes: Axes, text: str, x: float, y: float, **style: Any) -> None:
    axes.annotate(text, (x, y), (2, 0), textcoords="offset points", annotation_clip=False, **style)


def _climb(axes: Axes, total: dict[str, Any]) -> None:
    """From the sampled loss to the bound; beside the bound the same statement by two other routes, and the risk."""
    bounds = {b["name"]: b for b in total["bounds"]}
    main = bounds["decomposition"]
    steps = [("$L_{sample}$", total["sampled_loss"], _SAMPLED)]
    for key, (name, color) in _TERMS.items():
        steps.append((name.replace(" ", "\n").replace("-G", "-\nG"), main["terms"][key], color))
    low, top, last = 0.0, main["bound"], len(steps)
    for i, (_, height, color) in enumerate(steps):
        axes.bar(i, height, bottom=low, color=color, width=0.62)
        low += height
        share = f"\n{100 * height / main['gap']:.0f} %" if i else ""
        _above(axes, f"{'+' if i else ''}{height:.3g}{share}", i, low)
        axes.plot([i + 0.31, i + 0.69], [low, low], color=_INK, lw=0.7)
    axes.bar(last, top, color="none", edgecolor=_INK, lw=1.2, width=0.62)
    times = f"\n{main['bound_over_risk']:.0f} × R" if main["bound_over_risk"] else ""
    _above(axes, f"{top:.3g}{times}", last, top)
    # direct transport is never the larger
    for key, name, side in (("transport", "direct transport", "top"), ("coupling", "coupling", "bottom")):
        value = bounds[key]["bound"]
        axes.plot([last - 0.31, last + 0.31], [value, value], color=_INK, lw=0.9, ls=":")
        _beside(axes, f"{name} {value:.3g}", last + 0.33, value, va=side, fontsize=8)
    axes.axhline(total["risk"], color=_RISK, lw=1.3, ls="--", zorder=5)
    risk = total["risk"]
    _beside(axes, f"$R$ = {risk:.3g}", last + 0.36, risk, va="bottom", color=_RISK, fontsize=9)
    axes.set_xticks(range(last + 1), [name for name, _, _ in steps] + ["bound"], fontsize=9)
    axes.set_xlim(-0.5, last + 1.35)
    axes.set_title("What the bound allows", loc="left", fontsize=10)
    axes.margins(y=0.18)


def classes_figure(report: dict[str, Any]) -> Figure:
    """Draw the classes with the largest bounds: stacked terms, beside measured risk and sampled loss."""
    rows = sorted(report["per_class"], key=lambda row: -row["bound"])
    shown = rows[:_NAMED]
    many = len(rows) > _NAMED
    width, ratios = (11.0, (2.2, 1.2, 1.2)) if many else (9.0, (2, 1))
    figure, panels = _panels(report, width, 1.6 + 0.26 * len(shown), ratios)
    bars, dots = panels[0], panels[1]
    place = range(len(shown))
    _stack(bars, shown, horizontal=True)
    bars.set_yticks(place, [for_figures(row["name"]) for row in shown], fontsize=9)
    bars.set_ylim(len(shown) - 0.4, -0.6)
    bars.set_xlabel("bound on the class's risk")
    heading = f"The {_NAMED} largest bounds of {len(rows)}" if many else "Bound, class by class"
    bars.set_title(heading, loc="left", fontsize=10)

    _pairs(dots, shown)
    dots.set_yticks(place, [""] * len(shown))
    dots.set_ylim(len(shown) - 0.4, -0.6)
    dots.set_xlabel("measured loss")
    dots.set_title("Measured", loc="left", fontsize=10)
    handles = [*bars.get_legend_handles_labels()[0], *dots.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside lower center", ncols=6)
    if many:
        _stack(panels[2], rows, horizontal=False)
        panels[2].axvline(_NAMED - 0.5, color=_INK, lw=0.8, ls=":")
        panels[2].set(xlabel="rank of the class", xlim=(-0.5, len(rows) - 0.5))
        panels[2].set_title("All classes", loc="left", fontsize=10)
    return figure


def _stack(axes: Axes, rows: list[dict[str, Any]], *, horizontal: bool) -> None:
    place, low = range(len(rows)), [0.0] * len(rows)
    parts = [("sampled loss", _SAMPLED, [row["sampled_loss"] for row in rows])]
    parts += [(name, color, [row["terms"][key] for row in rows]) for key, (name, color) in _TERMS.items()]
    for name, color, values in parts:
        if horizontal:
            axes.barh(place, values, left=low, color=color, height=0.72, label=name)
        else:
            axes.bar(place, values, bottom=low, color=color, width=1.0, label=name)
        low = [a + b for a, b in zip(low, values, strict=True)]


def _pairs(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Sampled loss and risk of each class, joined: the length of the line is what the bound limits."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    tiny = 1e-6  # a logarithmic axis has no zero
    sampled = [max(tiny, row["sampled_loss"]) for row in rows]
    risk = [max(tiny, row["risk"]) for row in rows]
    place = range(len(rows))
    axes.hlines(place, sampled, risk, color="#cccccc", lw=1.5, zorder=1)
    axes.scatter(sampled, place, s=26, color=_SAMPLED, label="$L_i$, sampled loss", zorder=2)
    axes.scatter(risk, place, s=26, color=_RISK, label="$R_i$, deployed risk", zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color="#eeeeee", zorder=0)


def epochs_figure(report: dict[str, Any]) -> Figure:
    """Draw the terms, the losses and the collapse measures over the epochs, from the audits made during training."""
    history = report["history"]
    epoch = [row["epoch"] for row in history]
    figure, (left, middle, right) = _panels(report, 12.5, 3.9, (1.15, 1, 1))
    title = f"{for_figures(report['run'])}, validation data; $\\Delta$ as its cap"
    figure.suptitle(title, fontsize=10, color=_INK)
    series = [[row["sampled_loss"] for row in history]]
    series += [[row[key] for row in history] for key in _TERMS]
    colors = [_SAMPLED, *(color for _, color in _TERMS.values())]
    labels = ["sampled loss", *(name for name, _ in _TERMS.values())]
    left.stackplot(epoch, series, colors=colors, labels=labels, alpha=0.95, lw=0)
    left.plot(epoch, [row["risk"] for row in history], color=_RISK, ls="--", lw=1.4, label="risk $R$")
    left.set_title("The bound and its terms", loc="left", fontsize=10)
    left.set_ylabel("cross-entropy")
    left.set_ylim(0, 1.32 * max(map(sum, zip(*series, strict=True))))  # room for the legend
    _lines(middle, history, _LOSSES)
    middle.set_yscale("log")
    middle.set_title("Losses and smoothing", loc="left", fontsize=10)
    _lines(right, history, _COLLAPSE)
    right.set_ylim(bottom=0)
    right.set_title("Neural collapse (0: collapsed)", loc="left", fontsize=10)
    for axes in (left, middle, right):
        axes.set_xlabel("epoch")
        axes.margins(x=0.02)
        axes.legend(frameon=False, fontsize=8, ncols=2 if axes is left else 1)
    return figure


def _lines(axes: Axes, history: list[dict[str, Any]], series: dict[str, tuple[str, str]]) -> None:
    epoch = [row["epoch"] for row in history]
    for key, (name, color) in series.items():
        values = [row.get(key, math.nan) for row in history]
        axes.plot(epoch, values, "o-", ms=3, lw=1.4, color=color, label=name)


def save_audit_figures(report: dict[str, Any], out: Path) -> list[Path]:
    """Write the figures as PNG and SVG into ``out``; returns the paths. ``epochs`` needs audits of two epochs."""
    figures = {"waterfall": waterfall_figure(report), "classes": classes_figure(report)}
    if len(report["history"]) > 1:
        figures["epochs"] = epochs_figure(report)
    return save_figures(figures, out)
