"""The picture of a two-dimensional seam, after fig:cluster. Needs matplotlib (extra ``report``).

Legend: N points, C classes, G points along one side of the background, K = 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import protoseam as ps
from protoseam.lab.experiments.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Paul Tol's "muted" scheme, made for colour-vision deficiencies, with a dark grey for the tenth; the class is also
# written at its star, so no reader depends on the colours.
COLORS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933",
    "#DDCC77", "#CC6677", "#882255", "#AA4499", "#555555",
)  # fmt: skip
INK = "#222222"


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
        ax.set_title(title, fontsize=11, color=INK)
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
        ax.scatter(a, b, s=260, marker="*", color=_color(c), edgecolors=INK, linewidths=1.1, zorder=3)
        ax.annotate(
            str(c), (a, b), xytext=(9, 8), textcoords="offset points", fontsize=12, fontweight="bold",
            color=INK, path_effects=[withStroke(linewidth=3, foreground="white")], zorder=4,
        )  # fmt: skip
