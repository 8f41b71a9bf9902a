"""What the page's script draws: numbers of a run, small enough to be inlined.

Legend: E epochs, N points, A test images with an answer, C classes, D directions.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.engine.evaluate import BINS
from protoseam.lab.report.gather import Gathered

_LEVELS = 65535


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Few digits, and null for what JSON has no number for."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def curves_payload(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One chart per quantity, each with its series over the epochs; what a run did not write is left out."""

    def seam(name: str) -> list[float | None]:
        return [row.get("seam", {}).get(name) for row in metrics]

    terms = dict.fromkeys(["total", *(name for row in metrics for name in row["loss"])])
    validation = [row["validation_accuracy"] for row in metrics]
    gaps = {"nearest pair": seam("prototype_gap_min"), "mean of nearest": seam("prototype_gap_mean")}
    charts: list[tuple[str, str, str, dict[str, list[float | None]]]] = [
        ("accuracy", "Validation accuracy", "%", {"validation": [v and 100 * v for v in validation]}),
        ("loss", "Loss and its terms", "", {n: [row["loss"].get(n) for row in metrics] for n in terms}),
        ("distance", "Prototype distances", "", gaps),
        ("spread", "Class spread in the seam", "", {"√tr Σ̃": seam("sample_spread")}),
        ("rho", "Consensus weight ρ", "", {"ρ": [row.get("rho") for row in metrics]}),
        ("lr", "Learning rate", "", {"rate": [row.get("lr") for row in metrics]}),
    ]
    found: list[dict[str, Any]] = []
    for key, title, unit, series in charts:
        drawn = {
            name: [rounded(v) for v in values]
            for name, values in series.items()
            if any(v is not None for v in values)
        }
        log = key == "loss" and all(v is None or v > 0 for values in drawn.values() for v in values)
        if drawn:
            found.append({"key": key, "title": title, "unit": unit, "log": log, "series": drawn})
    return [{**chart, "epochs": [row["epoch"] for row in metrics]} for chart in found]


def latent_payload(run: Gathered) -> dict[str, Any] | None:
    """Embeddings, prototypes and roots of Σ̃ as 16-bit levels of one scale, so that epochs can be compared."""
    kept = run.latents
    if "z" not in kept or not kept["z"].numel() or "points" not in kept:
        return None
    z_END = kept["z"].float()
    if z_END.shape[1] != len(kept["points"]) or z_END.shape[2] < 2:
        return None
    ends = [z_END] + ([kept["prototypes"]] if "prototypes" in kept else [])
    low, high = min(float(t.min()) for t in ends), max(float(t.max()) for t in ends)
    unit = (high - low) / _LEVELS or 1.0
    found: dict[str, Any] = {
        "epochs": kept["epochs"].tolist(),
        "points": len(kept["points"]),
        "directions": z_END.shape[2],
        "share": [rounded(v, 3) for v in kept["share"].tolist()],
        "low": low,
        "unit": unit,
        "z": _levels(z_END, low, unit),
        "width": int(run.config["lift"]["dim"]) if "prototypes" in kept else None,
    }
    if "prototypes" in kept and "roots" in kept:
        D = z_END.shape[2]
        root = kept["roots"].float()[..., *torch.tril_indices(D, D)]
        largest = float(root.abs().max()) / 32767 or 1.0
        found |= {
            "s": _levels(kept["prototypes"], low, unit),
            "root_unit": largest,
            "roots": _base64((root / largest).round().to(torch.int16)),
        }
    if "head" in kept and z_END.shape[2] == 2:
        found["head"] = _base64(kept["head"].float())
    return found


def _levels(t: Tensor, low: float, unit: float) -> str:
    # torch has few operations on uint16: the same bits as int16
    level = ((t.double() - low) / unit).round().clamp(0, _LEVELS).int()
    return _base64(torch.where(level > 32767, level - 65536, level).to(torch.int16))


def _base64(t: Tensor) -> str:
    return base64.b64encode(
        t.contiguous().numpy().astype(t.numpy().dtype.newbyteorder("<")).tobytes()
    ).decode()


def answers_payload(run: Gathered) -> dict[str, Any] | None:
    """The images that are shown with their answers, the confusion of all, the worst and the most doubtful."""
    kept = run.latents
    if "label" not in kept:
        return None
    points_N = kept["points"].long()
    shown_M = kept["shown"].long() if {"shown", "sheet", "layout"} <= set(kept) else points_N[:0]
    rows = torch.cat([points_N, shown_M]).unique()
    place = {row: i for i, row in enumerate(rows.tolist())}
    found: dict[str, Any] = {
        "row": rows.tolist(),
        "label": kept["label"][rows].tolist(),
        "point": [place[row] for row in points_N.tolist()],
    }
    if len(shown_M):
        thumb = [-1] * len(rows)
        for i, row in enumerate(shown_M.tolist()):
            thumb[place[row]] = i
        data = kept["sheet"].numpy().tobytes()
        kind = "png" if data[:4] == b"\x89PNG" else "jpeg"
        found["sheet"] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        found |= {"thumb": thumb, "tile": int(kept["layout"][0]), "columns": int(kept["layout"][1])}
        found["sheet_rows"] = -(-len(shown_M) // found["columns"])
    if "first" not in kept:
        return found
    label, first, C = kept["label"].long(), kept["first"].long(), run.class_count
    counts = torch.bincount(label * C + first, minlength=C * C)
    filled = counts.nonzero()[:, 0]
    found |= {
        "first": kept["first"][rows].tolist(),
        "second": kept["second"][rows].tolist(),
        "p": [round(v, 3) for v in kept["p_first"][rows].tolist()],
        "q": [round(v, 3) for v in kept["p_second"][rows].tolist()],
        "p_label": [round(v, 3) for v in kept["p_label"][rows].tolist()],
        "confusion": [
            [i // C, i % C, n] for i, n in zip(filled.tolist(), counts[filled].tolist(), strict=True)
        ],
        "worst": _ordered(kept["p_label"], rows, place, label != first),
        "doubtful": _ordered(kept["p_first"] - kept["p_second"], rows, place, None),
    }
    return found


def _ordered(value_A: Tensor, rows: Tensor, place: dict[int, int], only: Tensor | None) -> list[int]:
    """The 24 images with the smallest values among those that are shown."""
    chosen = rows if only is None else rows[only[rows]]
    return [place[row] for row in chosen[value_A[chosen].argsort(stable=True)].tolist()[:24]]


def calibration(run: Gathered) -> dict[str, Any] | None:
    """Accuracy, confidence and count per bin of confidence, ECE and NLL on the test data."""
    kept = run.latents
    if "p_first" not in kept or not len(kept["p_first"]):
        return None
    p_A, hit_A = kept["p_first"].double(), (kept["label"] == kept["first"]).double()
    bin_A = (p_A * BINS).ceil().clamp(1, BINS).long() - 1  # as core.calibration_error: right-closed
    count = torch.bincount(bin_A, minlength=BINS)
    divisor = count.clamp_min(1)
    confidence = torch.bincount(bin_A, weights=p_A, minlength=BINS) / divisor
    accuracy = torch.bincount(bin_A, weights=hit_A, minlength=BINS) / divisor
    return {
        "bins": [
            [int(n), round(float(c), 4), round(float(a), 4)]
            for n, c, a in zip(count, confidence, accuracy, strict=True)
        ],
        "ece": float((count * (confidence - accuracy).abs()).sum() / len(p_A)),
        "nll": abs(float(kept["p_label"].double().clamp_min(1e-12).log().mean())),
        "images": len(p_A),
    }
