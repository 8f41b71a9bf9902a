"""Make figures outside pyplot, and save them so that the same data gives the same bytes. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protoseam.lab.engine.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(
    width: float, height: float, panels: Sequence[float] = (1,), *, rows: int = 1, note: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches, without global state or a window, and its axes row by row.

    ``panels`` are the relative widths in a row. Panels of a column share their x axis. ``note`` is printed above all.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install -e '.[report]' in the clone") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(
        rows, len(panels), width_ratios=panels, squeeze=False, sharex="col" if rows > 1 else False
    )
    if note:
        figure.suptitle(note, fontsize=9, color="#b00020")
    axes = list(grid.flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figures(figures: dict[str, Figure], out: Path) -> list[Path]:
    """Write each figure as PNG and SVG into ``out``; returns the paths."""
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "protoseam"}):  # fixed ids, and no date below
        for name, figure in figures.items():
            for suffix, metadata in (("png", None), ("svg", {"Date": None})):
                paths.append(out / f"{name}.{suffix}")
                drawn = io.BytesIO()
                figure.savefig(drawn, format=suffix, dpi=160, metadata=metadata)
                write_atomically(paths[-1], drawn.getvalue())
    return paths
