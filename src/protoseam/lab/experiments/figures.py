"""The study's figures: sweeps, training curves, clusters, the toy model; and the demo's two-dimensional seam.

Data in: records of :mod:`protoseam.lab.experiments.aggregate`, runs with embeddings, or a lifted network; data out:
figures. A figure without data is None. Needs matplotlib (extra ``report``).

Legend: N points, C classes, G points along one side of the background, K = 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import protoseam as ps
from protoseam.lab.experiments.aggregate import Band, Point, Runs, published_curve
from protoseam.lab.experiments.drawing import new_figure, save_figures
from protoseam.lab.experiments.plans import Scope, cluster_name
from protoseam.lab.experiments.recipes import TITLES
from protoseam.theory import toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Paul Tol's "muted" scheme, made for colour-vision deficiencies, with a dark grey for the tenth; the class is also
# written at its star, so no reader depends on the colours.
COLORS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933",
    "#DDCC77", "#CC6677", "#882255", "#AA4499", "#555555",
)  # fmt: skip
INK = {"text": "#222222", "baseline": "#444444", "unlifted": "#c4501b", "protoseam": "#1b6ca8"}
PAPER = "#999999"
# terms of the loss: what each panel of the lower row shows beside its total
DASHES = {"total": "-", "classification": "--", "consensus": ":", "repulsion": "-."}


def sweep_figure(points: Sequence[Point], scope: Scope, setting: str) -> Figure | None:
    """fig:penalty-sweep: mean and min–max over seeds; the paper's own beside it in grey."""
    if not any(point.by_seed for point in points):
        return None
    figure, (axes,) = new_figure(5.2, 3.6, note=scope.note)
    ours = [(point.value, point.measured) for point in points if point.measured]
    paper = [(1.04 * point.value, point.published) for point in points if point.published]
    for label, color, rows in (("paper", PAPER, paper), ("here", INK["protoseam"], ours)):
        if rows:
            x = [value for value, _ in rows]
            mean, low, high = zip(*(numbers for _, numbers in rows), strict=True)
            reach = [np.subtract(mean, low), np.subtract(high, mean)]
            axes.errorbar(x, mean, yerr=reach, fmt="o-", ms=4, capsize=2.5, color=color, label=label)
    values = [point.value for point in points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    name = {"rho_max": r"$\rho_{\max}$", "dim": "$k$"}[setting]
    data, _, model = scope.sweep.partition("-")
    title = f"{TITLES[model]} on {TITLES[data]}, mean and min–max"
    axes.set(xlabel=name, ylabel="test accuracy, %", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25, lw=0.5)
    return figure


def curves_figure(bands: Sequence[Band], scope: Scope) -> Figure | None:
    """Above: validation accuracy. Below: the losses. A column for each data set and network with runs."""
    columns = list(dict.fromkeys((band.data, band.model) for band in bands))
    if not columns:
        return None
    panels = [1.0] * len(columns)
    figure, grid = new_figure(0.6 + 3.9 * len(columns), 6.6, panels, rows=2, note=scope.note)
    for column, (data, model) in enumerate(columns):
        upper, lower = grid[column], grid[len(columns) + column]
        for band in bands:
            if (band.data, band.model) == (data, model):
                accuracy = band.quantity == "validation accuracy"
                _draw_band(upper if accuracy else lower, band, "-" if accuracy else DASHES[band.quantity])
                printed = published_curve(data, model, band.variant) if accuracy else {}
                if printed:
                    label = f"{TITLES[band.variant]}, paper"
                    x, y = list(printed), list(printed.values())
                    upper.plot(x, y, ":", color=INK[band.variant], lw=1.3, label=label)
        upper.set(title=f"{TITLES[data]}, {TITLES[model]}")
        lower.set(xlabel="epoch", yscale="log")
        for axes in (upper, lower):
            axes.grid(alpha=0.25, lw=0.5)
        upper.legend(frameon=False, fontsize=7)
        # below, because losses cover the whole height of their panel
        lower.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    grid[0].set_ylabel("validation accuracy, %")
    grid[len(columns)].set_ylabel("training loss")
    return figure


def _draw_band(axes: Any, band: Band, style: str) -> None:
    """The line is the mean of the seeds, the band their range."""
    term = {"validation accuracy": ""}.get(band.quantity, f": {band.quantity}")
    if band.variant != "protoseam":
        term = term.replace("total", "cross-entropy")  # all there is
    color = INK[band.variant]
    axes.plot(band.epochs, band.mean, style, color=color, lw=1.3, label=TITLES[band.variant] + term)
    axes.fill_between(band.epochs, band.low, band.high, color=color, alpha=0.2, lw=0)


def cluster_panels(runs: Runs, scope: Scope) -> Figure | None:
    """fig:cluster: what each variant's last layer sees; for ProtoSeam also the samples it learns from."""
    found = [(v, runs[cluster_name(scope, v)]) for v in scope.variants if cluster_name(scope, v) in runs]
    if not found:
        return None
    panels = [(variant, run, False) for variant, run in found]
    panels += [(variant, run, True) for variant, run in found if "prototypes" in run["embeddings"]]
    figure, grid = new_figure(4.1 * len(panels), 4.7, [1.0] * len(panels), note=scope.note)
    for axes, panel in zip(grid, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(True)
        _draw_cluster(axes, *panel)
    return figure


def _draw_cluster(axes: Any, variant: str, run: dict[str, Any], sampled: bool) -> None:
    kept = run["embeddings"]
    images_N2 = np.array([kept["x"].split(), kept["y"].split()], dtype=float).T
    label_N = np.array(kept["labels"].split(), dtype=int)
    lifted = "prototypes" in kept
    samples_N2 = _samples(kept, label_N) if lifted else images_N2
    shown_N2 = samples_N2 if sampled else images_N2
    for c in range(label_N.max() + 1):
        own = shown_N2[label_N == c]
        axes.scatter(own[:, 0], own[:, 1], s=5, color=_color(c), alpha=0.6, linewidths=0)
    for c, centre in enumerate(kept.get("prototypes", [])):
        _ellipse(axes, centre, kept["covariances"][c], str(c))
    # one square window for images and samples, so that their panels can be compared
    both = np.concatenate([images_N2, samples_N2])
    centre, half = (both.max(0) + both.min(0)) / 2, 0.54 * np.ptp(both, axis=0).max()
    axes.set(xlim=(centre[0] - half, centre[0] + half), ylim=(centre[1] - half, centre[1] + half))
    axes.set(title=_panel_title(variant, run, sampled), xticks=[], yticks=[], aspect="equal")


def _panel_title(variant: str, run: dict[str, Any], sampled: bool) -> str:
    if sampled:
        return "ProtoSeam: what $N_2$ learns from"
    kept, right = run["embeddings"], f"{100 * run['test_accuracy']:.1f} % right"
    if kept["width"] == 2:
        return f"{TITLES[variant]}: $N_1(x)$, {right}"
    share = f"{100 * kept['shown']:.0f} % of the variance"
    return f"{TITLES[variant]}: {kept['width']} features, {right}\n(two directions, {share})"


def _samples(kept: dict[str, Any], label_N: np.ndarray) -> np.ndarray:
    """z ~ N(s_i, Σ̃_i), as many as there are images of class i; the same ones every time."""
    factors_C22 = np.linalg.cholesky(np.array(kept["covariances"]))
    noise_N21 = np.random.default_rng(0).standard_normal((len(label_N), 2, 1))
    moved_N21 = factors_C22[label_N] @ noise_N21
    return np.array(kept["prototypes"])[label_N] + moved_N21[..., 0]


def _ellipse(
    axes: Any, centre: tuple[float, float], covariance: Sequence[Sequence[float]], name: str
) -> None:
    """The prototype as a star, and two standard deviations of Σ̃ around it."""
    from matplotlib.patches import Ellipse

    values, vectors = np.linalg.eigh(np.array(covariance))
    angle = math.degrees(math.atan2(vectors[1, 1], vectors[0, 1]))
    width, height = 4 * np.sqrt(values[::-1])  # diameters: twice two deviations
    axes.add_patch(Ellipse(centre, width, height, angle=angle, fill=False, ec="black", lw=0.8))
    axes.plot(*centre, "*", color="white", mec="black", ms=6, mew=0.6)
    axes.annotate(name, centre, xytext=(4, 4), textcoords="offset points", fontsize=8, fontweight="bold")


@torch.no_grad()
def cluster_figure(net: ps.Lifted, x: Tensor, y_N: Tensor, *, draws: int = 60, seed: int = 0) -> Figure:
    """Draw N1's outputs for ``x`` on the left, as many of N2's sampled inputs on the right, and N2's decision behind.

    The clouds look alike as far as the Gaussian assumption, eq:classAssumption, holds. Images held out of training
    scatter more than the samples do, because Σ̃ is estimated from the training images.

    Raises:
        ValueError: if the seam does not have two dimensions.
    """
    if net.dim != 2:
        raise ValueError(f"the picture needs a two-dimensional seam, not dim={net.dim}: lift with dim=2")
    generator = torch.Generator(net.prototypes.device).manual_seed(seed)
    sampled = ps.core.sample(net.prototypes, net.covariance.factors, draws=draws, generator=generator)
    drawn_NK, label_N = sampled.flatten(0, 1).cpu(), torch.arange(net.num_classes).repeat(draws)
    z_NK, s_CK, y_N = net.eval().embed(x).cpu(), net.prototypes.detach().cpu(), y_N.cpu()
    correct = 100 * (net(x).argmax(1).cpu() == y_N).double().mean()

    figure, axes = new_figure(10, 5.2, (1, 1))
    low, high = _window(torch.cat([z_NK, drawn_NK, s_CK]))
    titles = (
        f"$N_1(x)$: where the images land ({correct:.1f} % right)",
        "$z_i \\sim \\mathcal{N}(s_i, \\tilde{\\Sigma}_i)$: what $N_2$ learns from",
    )
    for ax, points_NK, classes_N, title in zip(axes, (z_NK, drawn_NK), (y_N, label_N), titles, strict=True):
        _regions(ax, net, low, high)
        for c in range(net.num_classes):
            own = points_NK[classes_N == c]
            ax.scatter(own[:, 0], own[:, 1], s=11, color=_color(c), alpha=0.75, linewidths=0)
        _stars(ax, s_CK)
        ax.set_title(title, fontsize=11, color=INK["text"])
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xticks=[], yticks=[])
    return figure


def _color(c: int) -> str:
    return COLORS[c % len(COLORS)]


def _window(points_NK: Tensor) -> tuple[list[float], list[float]]:
    """A square around all points, so that both axes have one scale and both panels one frame."""
    low, high = points_NK.amin(0), points_NK.amax(0)
    centre, half = (low + high) / 2, 0.54 * (high - low).max()
    return (centre - half).tolist(), (centre + half).tolist()


def _regions(ax: Any, net: ps.Lifted, low: list[float], high: list[float], G: int = 400) -> None:
    """N2's decision at every point, faintly."""
    from matplotlib.colors import ListedColormap

    sides = [torch.linspace(a, b, G) for a, b in zip(low, high, strict=True)]
    grid_K = torch.cartesian_prod(*sides).to(net.prototypes.device)
    decision_GG = net.head(grid_K).argmax(1).reshape(G, G).T.cpu().numpy()
    palette = ListedColormap([_color(c) for c in range(net.num_classes)])
    ax.imshow(
        decision_GG, cmap=palette, vmin=-0.5, vmax=net.num_classes - 0.5, alpha=0.13, origin="lower",
        extent=(low[0], high[0], low[1], high[1]), interpolation="nearest",
    )  # fmt: skip


def _stars(ax: Any, s_CK: Tensor) -> None:
    from matplotlib.patheffects import withStroke

    for c, (a, b) in enumerate(s_CK.tolist()):
        ax.scatter(a, b, s=260, marker="*", color=_color(c), edgecolors=INK["text"], linewidths=1.1, zorder=3)
        ax.annotate(
            str(c), (a, b), xytext=(9, 8), textcoords="offset points", fontsize=12, fontweight="bold",
            color=INK["text"], path_effects=[withStroke(linewidth=3, foreground="white")], zorder=4,
        )  # fmt: skip


_TOY_INK = {"identity": "#444444", "matched": "#1b6ca8", "limit": "#c4501b", "random": "#bbbbbb"}


def _selection_figure(rows: Sequence[dict[str, float]], note: str) -> Figure:
    """fig:toy-selection: the heads that sampling selects, and simulated a* and slope beside their closed forms."""
    figure, (left, right) = new_figure(9.6, 3.8, (1, 1), note=note)
    z = torch.linspace(-1.9, 1.9, 401, dtype=torch.float64)
    heads = [("identity, $a=0$", 0.0, _TOY_INK["identity"], 1.0)]
    shown = (0.1, 0.3, 0.7)  # the paper's
    for sigma, alpha in zip(shown, torch.linspace(1.0, 0.4, len(shown)).tolist(), strict=True):
        a = toy.optimal_a(sigma)
        heads.append((f"$\\sigma={sigma:g}$, $a^\\star={a:.3f}$", a, _TOY_INK["matched"], alpha))
    heads += [("limit, $a=-1/2$", toy.LIMITING_HEAD, _TOY_INK["limit"], 1.0)]
    for label, a, color, alpha in heads:
        left.plot(z, toy.head(z, a), color=color, alpha=alpha, lw=1.6, label=label)
        for at in (-1.0, 1.0):
            near = torch.tensor([at - 0.35, at + 0.35])
            left.plot(near, at + (1 + 2 * a) * (near - at), ":", color=color, alpha=alpha, lw=1)
    left.plot([-1, 1], [-1, 1], "o", color="black", ms=4, zorder=5)
    left.set(xlabel="$z$", ylabel="$g_a(z)$", ylim=(-2, 2), title="All heads fit both prototypes")
    left.legend(frameon=False, fontsize=8, loc="upper left")

    sigmas = [row["sigma"] for row in rows]
    grid = torch.linspace(min(sigmas), max(sigmas), 200).tolist()
    right.plot(grid, [toy.optimal_a(s) for s in grid], color=_TOY_INK["matched"], label=r"$a^\star(\sigma)$")
    right.plot(
        grid, [toy.sensitivity(s) for s in grid], color=_TOY_INK["limit"], label=r"$|g'_{a^\star}(1)|$"
    )
    for key, color, scale in (("a_hat_mean", _TOY_INK["matched"], 1), ("slope_mean", _TOY_INK["limit"], 2)):
        reach = [scale * row["a_hat_std"] for row in rows]  # the slope is 1 + 2a
        told = "simulated, ± 1 seed deviation" if scale == 1 else None
        values = [row[key] for row in rows]
        right.errorbar(sigmas, values, yerr=reach, fmt="o", ms=4, color=color, capsize=2, label=told)
    right.axhline(0, color="black", lw=0.5)
    right.set(xlabel=r"$\sigma$", title="Simulation and closed form")
    right.legend(frameon=False, fontsize=8)
    return figure


def _perturbation_figure(generator: torch.Generator, note: str) -> Figure:
    """fig:toy-perturbation: loss under a fixed reconnection error δ, linear, and log–log with the slopes 2 and 4."""
    sigma, reach = 0.2, 0.5  # the paper's
    figure, (left, right) = new_figure(9.6, 3.8, (1, 1), note=note)
    others = (torch.rand(24, generator=generator, dtype=torch.float64) * 2 - 1).tolist()
    named = [
        ("identity, $a=0$", 0.0, _TOY_INK["identity"]),
        (f"$a^\\star({sigma:g})={toy.optimal_a(sigma):.3f}$", toy.optimal_a(sigma), _TOY_INK["matched"]),
        ("limit, $a=-1/2$", toy.LIMITING_HEAD, _TOY_INK["limit"]),
    ]
    linear = torch.linspace(-reach, reach, 301, dtype=torch.float64)
    logarithmic = torch.logspace(-3, 0, 200, dtype=torch.float64) * reach
    for axes, delta in ((left, linear), (right, logarithmic)):
        for a in others:
            axes.plot(delta, toy.perturbation_loss(a, delta), color=_TOY_INK["random"], lw=0.6)
        for label, a, color in named:
            axes.plot(delta, toy.perturbation_loss(a, delta), color=color, lw=1.8, label=label)
        axes.set(xlabel=r"reconnection error $\delta$")
    left.set(ylabel=r"$E_Y[(g_a(Y+\delta)-Y)^2]$", ylim=(0, 1.2 * reach**2), title="Near the prototypes")
    left.legend(frameon=False, fontsize=8, loc="upper center")
    right.set(xscale="log", yscale="log", title=r"Order $\delta^2$ against $\delta^4$")
    for power, start, text in ((2, 1.0, r"$\delta^2$"), (4, 2.25, r"$\frac{9}{4}\delta^4$")):
        ends = logarithmic[[20, 90]]
        right.plot(ends, start * ends**power, "--", color="black", lw=0.8)
        right.annotate(text, (float(ends[0]), float(start * ends[0] ** power)), fontsize=9, va="top")
    return figure


def save_toy_figures(
    rows: Sequence[dict[str, float]], out: Path, *, seed: int = 0, note: str = ""
) -> list[Path]:
    """Write ``toy-selection`` and ``toy-perturbation`` as PNG and SVG into ``out``; returns the paths."""
    generator = torch.Generator().manual_seed(seed)
    figures = {
        "toy-selection": _selection_figure(rows, note),
        "toy-perturbation": _perturbation_figure(generator, note),
    }
    return save_figures(figures, out)
