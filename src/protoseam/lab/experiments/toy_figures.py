"""The toy model's two figures: fig:toy-selection and fig:toy-perturbation. Needs matplotlib (extra ``report``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protoseam.lab.experiments.drawing import new_figure, save_figures
from protoseam.theory import toy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = {"identity": "#444444", "matched": "#1b6ca8", "limit": "#c4501b", "random": "#bbbbbb"}


def selection_figure(
    rows: Sequence[dict[str, float]],
    *,
    shown: Sequence[float] = (0.1, 0.3, 0.7),  # paper, fig:toy-selection
    note: str = "",
) -> Figure:
    """Draw the heads that sampling selects, and simulated a* and slope beside their closed forms."""
    figure, (left, right) = new_figure(9.6, 3.8, (1, 1), note=note)
    z = torch.linspace(-1.9, 1.9, 401, dtype=torch.float64)
    heads = [("identity, $a=0$", 0.0, _INK["identity"], 1.0)]
    for sigma, alpha in zip(shown, torch.linspace(1.0, 0.4, len(shown)).tolist(), strict=True):
        a = toy.optimal_a(sigma)
        heads.append((f"$\\sigma={sigma:g}$, $a^\\star={a:.3f}$", a, _INK["matched"], alpha))
    heads += [("limit, $a=-1/2$", toy.LIMITING_HEAD, _INK["limit"], 1.0)]
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
    right.plot(grid, [toy.optimal_a(s) for s in grid], color=_INK["matched"], label=r"$a^\star(\sigma)$")
    right.plot(grid, [toy.sensitivity(s) for s in grid], color=_INK["limit"], label=r"$|g'_{a^\star}(1)|$")
    for key, color, scale in (("a_hat_mean", _INK["matched"], 1), ("slope_mean", _INK["limit"], 2)):
        reach = [scale * row["a_hat_std"] for row in rows]  # the slope is 1 + 2a
        told = "simulated, ± 1 seed deviation" if scale == 1 else None
        values = [row[key] for row in rows]
        right.errorbar(sigmas, values, yerr=reach, fmt="o", ms=4, color=color, capsize=2, label=told)
    right.axhline(0, color="black", lw=0.5)
    right.set(xlabel=r"$\sigma$", title="Simulation and closed form")
    right.legend(frameon=False, fontsize=8)
    return figure


def perturbation_figure(
    *,
    generator: torch.Generator,
    sigma: float = 0.2,  # paper, fig:toy-perturbation
    reach: float = 0.5,
    random_heads: int = 24,
    note: str = "",
) -> Figure:
    """Draw the loss under a deterministic reconnection error δ: linear, and log–log with the slopes 2 and 4."""
    figure, (left, right) = new_figure(9.6, 3.8, (1, 1), note=note)
    others = (torch.rand(random_heads, generator=generator, dtype=torch.float64) * 2 - 1).tolist()
    named = [
        ("identity, $a=0$", 0.0, _INK["identity"]),
        (f"$a^\\star({sigma:g})={toy.optimal_a(sigma):.3f}$", toy.optimal_a(sigma), _INK["matched"]),
        ("limit, $a=-1/2$", toy.LIMITING_HEAD, _INK["limit"]),
    ]
    linear = torch.linspace(-reach, reach, 301, dtype=torch.float64)
    logarithmic = torch.logspace(-3, 0, 200, dtype=torch.float64) * reach
    for axes, delta in ((left, linear), (right, logarithmic)):
        for a in others:
            axes.plot(delta, toy.perturbation_loss(a, delta), color=_INK["random"], lw=0.6)
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
        "toy-selection": selection_figure(rows, note=note),
        "toy-perturbation": perturbation_figure(generator=generator, note=note),
    }
    return save_figures(figures, out)
