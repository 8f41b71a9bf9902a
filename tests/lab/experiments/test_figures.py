"""The study's figures say the numbers they were given, read back from what was drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protoseam.lab.experiments.aggregate import Band, Point
from protoseam.lab.experiments.figures import cluster_panels, curves_figure, sweep_figure
from protoseam.lab.experiments.plans import Scope, cluster_name


def test_error_bars_end_at_the_lowest_and_the_highest_seed() -> None:
    points = [
        Point(8, {42: 69.0, 43: 70.0, 44: 74.0}, (66.0, 65.0, 69.0)),
        Point(16, {42: 71.0, 43: 72.0, 44: 76.0}, (68.0, 64.0, 69.0)),
    ]
    figure = sweep_figure(points, Scope(), "rho_max")
    assert figure is not None
    means, ends = {}, {}
    for container in figure.axes[0].containers:
        line, _, (bars,) = container
        means[container.get_label()] = list(line.get_ydata())
        ends[container.get_label()] = [sorted(bar[:, 1]) for bar in bars.get_segments()]
    assert means == {"here": [71.0, 73.0], "paper": [66.0, 68.0]}
    assert ends == {"here": [[69.0, 74.0], [71.0, 76.0]], "paper": [[65.0, 69.0], [64.0, 69.0]]}


def test_a_curve_is_the_mean_in_a_band_from_the_lowest_to_the_highest_seed() -> None:
    bands = [
        Band("cifar100", "resnet8", "baseline", quantity, [1, 2, 4], mean, low, high)
        for quantity, mean, low, high in (
            ("validation accuracy", [40.0, 50.0, 60.0], [39.0, 45.0, 58.0], [44.0, 51.0, 63.0]),
            ("total", [3.0, 2.0, 1.0], [2.0, 1.75, 0.5], [3.5, 2.75, 1.25]),
        )
    ]
    figure = curves_figure(bands, Scope())
    assert figure is not None
    for axes, band in zip(figure.axes, bands, strict=True):
        (line,), (area,) = axes.lines, axes.collections
        assert line.get_xydata().tolist() == [list(pair) for pair in zip(band.epochs, band.mean, strict=True)]
        (outline,) = area.get_paths()
        at_epoch = [outline.vertices[outline.vertices[:, 0] == epoch, 1] for epoch in band.epochs]
        assert [heights.min() for heights in at_epoch] == band.low
        assert [heights.max() for heights in at_epoch] == band.high


def test_the_papers_curve_is_drawn_where_it_prints_one() -> None:
    values = [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]
    bands = [
        Band("tinyimagenet", "vit_s", "baseline", quantity, [1, 2], *values)
        for quantity in ("validation accuracy", "total")
    ]
    figure = curves_figure(bands, Scope())
    assert figure is not None
    ours, papers = figure.axes[0].lines
    assert (ours.get_label(), papers.get_label()) == ("Baseline", "Baseline, paper")
    assert (papers.get_xdata()[-1], papers.get_ydata()[-1]) == (200, 47.707)


def test_an_ellipse_is_two_standard_deviations_to_each_side_along_its_own_axes() -> None:
    deviations = np.array([3.0, 1.0])
    centres = [(1.0, -2.0), (20.0, 5.0)]
    # columns: the direction of the largest variance, and across; one class leans right, the other left
    directions = [
        np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        for turn in (math.radians(30), math.radians(100))
    ]
    kept = {
        "x": "1 2 20 21",
        "y": "-2 0 5 8",
        "labels": "0 0 1 1",
        "width": 2,
        "prototypes": centres,
        "covariances": [(axes * deviations**2 @ axes.T).tolist() for axes in directions],
    }
    run = {"embeddings": kept, "test_accuracy": 0.9}
    figure = cluster_panels({cluster_name(Scope(), "protoseam"): run}, Scope())
    assert figure is not None
    assert len(figure.axes) == 2  # images and samples
    turns = np.radians(np.arange(360))
    circle = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    for panel in figure.axes:
        for ellipse, centre, axes in zip(panel.patches, centres, directions, strict=True):
            outline = ellipse.get_patch_transform().transform(circle)
            from_centre = (outline - centre) @ axes
            assert np.ptp(from_centre, axis=0) == pytest.approx(4 * deviations)
            assert np.linalg.norm(from_centre / deviations, axis=1) == pytest.approx(2)
