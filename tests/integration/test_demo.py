"""``protoseam demo``, as short as it goes: what it prints and what it writes."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import protoseam as ps
from protoseam.lab.cli import demo as verb
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.experiments import demo
from protoseam.lab.experiments.figures import cluster_figure


def _arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args(argv)


# three epochs for the picture are too few for a gentle ρ, and the library says so
@pytest.mark.filterwarnings("ignore:ρ jumps")
def test_the_files_the_table_and_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert verb.run(_arguments("--out", str(out), "--seeds", "7", "--epochs", "1")) == 0

    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "clusters.png",
        "clusters.svg",
        "report.html",
    }
    assert (out / "clusters.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert {"summary", "runs", "picture", "config", "versions", "seconds"} == set(results)
    assert [(r["variant"], r["seed"]) for r in results["runs"]] == [(v, 7) for v in demo.VARIANTS]
    assert results["config"]["data"] == {"name": "scikit-learn digits", "train": 897, "val": 300, "test": 600}
    assert results["config"]["recipes"]["Baseline"]["momentum"] == 0.9
    for run in results["runs"]:
        assert 0 <= run["test"] <= 100
        assert round(run["test"] * 6, 6) == round(run["test"] * 6), "a whole number of 600 images"

    printed = capsys.readouterr().out
    for variant in demo.VARIANTS:
        assert f"{results['summary'][variant]['mean']:.2f}" in printed
        assert f"{variant}, seed 7" in printed
    for word in ("mean", "spread", "to Baseline", "clusters.svg", "0.17 points", "about 0 s left"):
        assert word in printed.replace("\n", ""), word


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--epochs must be at least 1, got 0"):
        verb.run(_arguments("--epochs", "0"))
    with pytest.raises(ConfigError, match="--seeds names one twice: 1 1"):
        verb.run(_arguments("--seeds", "1", "1"))


def test_defaults_are_the_tuned_ones() -> None:
    args = _arguments()
    assert args.epochs == demo.EPOCHS
    assert args.seeds == [42, 43, 44]


def test_the_split_is_fixed_stratified_and_disjoint() -> None:
    data, again = demo.load_data(), demo.load_data()
    for part in ("train", "val", "test"):
        x, y = getattr(data, part)
        assert torch.equal(x, getattr(again, part)[0])
        share = torch.bincount(y) / len(y)
        assert (share - 0.1).abs().max() < 0.01
    # 1,797 digits are all different, so equal rows would be leaks
    rows = torch.cat([getattr(data, part)[0].flatten(1) for part in ("train", "val", "test")])
    assert len(rows.unique(dim=0)) == len(rows) == 1797


def test_variants_start_from_the_same_features() -> None:
    nets = [demo.build(variant, seed=3) for variant in demo.VARIANTS]
    first = [next(net.parameters()) for net in nets[:2]]
    assert isinstance(nets[2], ps.Lifted)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], next(nets[2].n1.parameters()))
    assert not any(type(m).__module__.startswith("protoseam.seam") for m in nets[1].modules())


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ((97.0, 98.0, 99.0), "2.00 points ahead of Baseline"),
        ((97.0, 98.0, 96.5), "0.50 points behind Baseline"),
        ((97.0, 98.0, 97.0), "are level"),
    ],
)
def test_the_verdict_follows_the_table(tests: tuple[float, ...], words: str) -> None:
    runs = [{"variant": v, "seed": 0, "test": t} for v, t in zip(demo.VARIANTS, tests, strict=True)]
    results = {"summary": demo.summarize(runs), "config": {"data": {"test": 600}}}
    assert words in verb._verdict(results)


def test_the_summary_is_mean_spread_and_difference() -> None:
    runs = [{"variant": v, "test": t} for v in demo.VARIANTS for t in (90.0, 94.0)]
    runs += [{"variant": "ProtoSeam", "test": 98.0}]
    assert demo.summarize(runs) == {
        "Baseline": {"mean": 92.0, "spread": 4.0, "difference": 0.0},
        "Unlifted": {"mean": 92.0, "spread": 4.0, "difference": 0.0},
        "ProtoSeam": {"mean": 94.0, "spread": 8.0, "difference": 2.0},
    }


def test_a_terminal_gets_a_bar_with_accuracy_and_time_left() -> None:
    shown = io.StringIO()
    watcher = verb._Watcher(Console(file=shown, force_terminal=True, width=100), total=2)
    with watcher.bar:
        watcher.epoch("Baseline, seed 42", {"validation_accuracy": 0.9725}, None, None)
        watcher.end("Baseline, seed 42", 97.0, 1.0)
        watcher.epoch("Baseline, seed 43", {"validation_accuracy": 0.98}, None, None)
    text = shown.getvalue()
    assert "Baseline, seed 43" in text
    assert "98.0 %" in text
    assert "100 %" in text


def test_the_learning_rate_warms_up_and_decays_to_nothing() -> None:
    factor = demo._warmup_cosine(steps=100, warmup=0.1)
    rates = [factor(step) for step in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1e-3


def test_the_picture_wants_two_dimensions() -> None:
    net = demo.build("ProtoSeam", seed=0)
    assert isinstance(net, ps.Lifted)
    with pytest.raises(ValueError, match="two-dimensional"):
        cluster_figure(net, torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64))
