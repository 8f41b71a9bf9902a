"""Figures to files, so that the same data gives the same bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from protoseam.lab.engine.files import write_atomically

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
                paths.append(out / f"{name}.{suffix}")
                drawn = io.BytesIO()
                figure.savefig(drawn, format=suffix, dpi=160, metadata=metadata)
                write_atomically(paths[-1], drawn.getvalue())
    return paths
