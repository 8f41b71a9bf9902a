"""Figures to files, so that the same data gives the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_figures"]


def save_figures(figures: dict[str, Figure], out: Path) -> list[Path]:
    """Write each figure as PNG and SVG into ``out``; returns the paths."""
    import matplotlib

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "protoseam"}):  # fixed ids, and no date below
        for name, figure in figures.items():
            for suffix, metadata in (("png", None), ("svg", {"Date": None})):
                path = out / f"{name}.{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                paths.append(path)
    return paths
