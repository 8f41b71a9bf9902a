"""Sweeps: the space, validation accuracy only, and what is written at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_sweep import BASE, TWO_RATES, command, rows

from protoseam.errors import DataWarning, SeamError
from protoseam.lab.cli.main import main
from protoseam.lab.engine import epoch, session
from protoseam.lab.engine.config import ConfigError, RunConfig
from protoseam.lab.engine.run import DivergedError, Run
from protoseam.lab.engine.session import DivergenceWarning
from protoseam.lab.experiments import paper
from protoseam.lab.experiments.space import Choice, Range, grid, parse_space

# ---------------------------------------------------------------------- the space


def test_a_space_is_read_from_words() -> None:
    words = ["optim.lr=loguniform:1e-3:1e-1", "lift.rho_max=choice:4,8,16", "lift.dim=int:2:9"]
    words += ["lift.floor=choice:auto,1e-1", "lift.antithetic=choice:true,false"]
    assert parse_space(words) == {
        "optim.lr": Range(1e-3, 1e-1, "loguniform"),
        "lift.rho_max": Choice((4, 8, 16)),
        "lift.dim": Range(2, 9, "int"),
        "lift.floor": Choice(("auto", 0.1)),
        "lift.antithetic": Choice((True, False)),
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lr=choice:1,2", "unknown setting lr; did you mean optim.lr?"),
        ("lift.rho_mx=choice:1,2", r"did you mean lift\.rho_max\?"),
        ("optim.lr", "write SETTING=FORM"),
        ("optim.lr=loguni:1:2", "did you mean loguniform"),
        ("optim.lr=uniform:1", "needs two numbers"),
        ("optim.lr=uniform:2:1", "LOW must be below HIGH"),
        ("optim.lr=loguniform:0:1", "above 0"),
        ("seed=choice:1,2", "seed cannot be searched over"),
        ("optim.lr=choice:", "choice needs values that differ"),
        ("optim.lr=choice:0.05,5e-2", "choice needs values that differ"),
        ("optim.lr=uniform:0:inf", "LOW must be below HIGH, and both finite"),
    ],
)
def test_a_space_that_cannot_be_is_explained(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_space([word])


def test_values_are_checked_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "s", "--space", "lift.dim=choice:4,wide") == 1
    assert "wide" in capsys.readouterr().err
    assert command(tmp_path / "s", "--space", "optim.lr=uniform:0.1:0.2") == 1
    assert "--trials N" in capsys.readouterr().err
    assert command(tmp_path / "s", "--validation=0") == 1
    assert "validation accuracy" in capsys.readouterr().err


def test_the_papers_grid_has_its_twenty_points() -> None:
    points = grid({key: Choice(values) for key, values in paper.GRID.items()})
    assert len(points) == 20
    assert {p["optim.lr"] for p in points} == {0.01, 0.02, 0.05, 0.1}
    assert {p["optim.weight_decay"] for p in points} == {1e-4, 2e-4, 5e-4, 1e-3, 2e-3}


# ---------------------------------------------------------------------- a sweep from end to end


def test_the_best_by_validation_is_a_config_to_train_with(tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert command(out, "--variants", "baseline", "protoseam", *TWO_RATES) == 0
    table = rows(out / "baseline")
    assert [row["optim.lr"] for row in table] == ["0.05", "0.01"]  # the larger learns more in two epochs
    best = out / "baseline" / "best.yaml"
    assert main(["train", f"--config={best}", f"--out={tmp_path / 'again'}", "--quiet=true"]) == 0
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert f"{100 * summary['validation_accuracy']:.2f}" == table[0]["validation accuracy, %"]
    assert summary["config"]["optim"]["lr"] == 0.05
    # rem:confound: Unlifted was not searched for, it has Baseline's settings
    inherited = yaml.safe_load((out / "unlifted" / "best.yaml").read_text())
    assert inherited == yaml.safe_load(best.read_text()) | {"variant": "unlifted"}
    assert (out / "baseline" / "trials.md").read_text().count("\n") == 4
    assert not (out / "baseline" / "unfinished").exists()


def test_unlifted_gets_a_search_of_its_own_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "s", "--variants", "unlifted", *TWO_RATES) == 1
    assert "--tune-unlifted" in capsys.readouterr().err
    assert command(tmp_path / "s", "--variant=baseline", "--tune-unlifted", *TWO_RATES) == 0
    assert len(rows(tmp_path / "s" / "unlifted")) == 2
    tuned = (tmp_path / "s" / "unlifted" / "best.yaml").read_bytes()
    assert command(tmp_path / "s", "--variant=baseline", *TWO_RATES) == 0
    assert (tmp_path / "s" / "unlifted" / "best.yaml").read_bytes() == tuned  # not replaced by Baseline's


def test_test_data_is_never_there_to_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    honest = session.Run

    def watched(config: RunConfig, dataset: Any, processes: Any) -> Any:
        built.append(len(dataset.test_labels))
        run = honest(config, dataset, processes)
        assert run.data.test[0].numel() == 0
        assert run.accuracy("test") is None
        return run

    monkeypatch.setattr(session, "Run", watched)
    assert command(tmp_path / "s", "--variant=baseline", *TWO_RATES) == 0
    assert built == [0, 0]
    for path in (tmp_path / "s" / "baseline").glob("*.json"):
        row = json.loads(path.read_text())
        assert row["test_accuracy"] is None
        assert row["validation_accuracy"] > 0
    assert "test" not in (tmp_path / "s" / "baseline" / "trials.csv").read_text()


def test_more_seeds_tune_on_their_mean(tmp_path: Path) -> None:
    assert command(tmp_path / "s", "--variant=baseline", "--seeds", "1", "2", *TWO_RATES) == 0
    for row in rows(tmp_path / "s" / "baseline"):
        mean = (float(row["seed 1"]) + float(row["seed 2"])) / 2
        assert float(row["validation accuracy, %"]) == pytest.approx(mean, abs=0.011)
    assert len(list((tmp_path / "s" / "baseline").glob("*.json"))) == 4


def test_a_sampled_sweep_can_be_cut_off_and_extended_but_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ["--variant=baseline", "--space", "optim.lr=loguniform:1e-3:1e-1"]
    assert command(tmp_path / "s", *space, "--trials=3", "--budget-minutes=1e-9") == 1
    assert "start again to go on" in capsys.readouterr().out
    assert command(tmp_path / "s", *space, "--trials=3") == 0
    capsys.readouterr()
    assert command(tmp_path / "s", *space, "--trials=4") == 0
    assert capsys.readouterr().out.count("(4 in all)") == 1
    assert command(tmp_path / "whole", *space, "--trials=4") == 0
    tables = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows(tmp_path / name / "baseline")]
        for name in ("s", "whole")
    ]
    assert tables[0] == tables[1]
    assert len({row["optim.lr"] for row in tables[0]}) == 4
    capsys.readouterr()
    assert command(tmp_path / "s", *space, "--trials=4", "--batch_size=64") == 1
    assert "batch_size: was 128, is 64" in capsys.readouterr().err


def test_a_trial_that_diverges_is_said_to_and_spoils_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ["--variant=baseline", "--space", "optim.lr=choice:1e30,0.05,0.02"]
    assert command(tmp_path / "s", *space) == 0
    assert "diverged: " in capsys.readouterr().out
    table = rows(tmp_path / "s" / "baseline")
    assert [row["validation accuracy, %"] for row in table][2] == "diverged"
    assert command(tmp_path / "alone", "--variant=baseline", "--space", "optim.lr=choice:0.05,0.02") == 0
    for row, alone in zip(table, rows(tmp_path / "alone" / "baseline"), strict=False):
        assert row["validation accuracy, %"] == alone["validation accuracy, %"]


def test_a_trial_that_the_seam_ends_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = epoch.end_epoch

    def end(run: Run, started: float) -> dict[str, Any]:
        if run.config.optim.lr == 0.05:
            raise SeamError("it cannot go on")
        return original(run, started)

    monkeypatch.setattr(epoch, "end_epoch", end)
    words = ["--variant=baseline", "--space", "optim.lr=choice:0.05,0.02"]
    assert command(tmp_path / "s", *words) == 0
    assert [row["validation accuracy, %"] for row in rows(tmp_path / "s" / "baseline")][1] == "diverged"


def test_a_trial_that_went_on_with_another_rate_does_not_count_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = epoch.end_epoch

    def end(run: Run, started: float) -> dict[str, Any]:
        if run.config.optim.lr == 0.05 and run.rate_scale == 1:
            raise DivergedError("inf")
        return original(run, started)

    monkeypatch.setattr(epoch, "end_epoch", end)
    words = ["--variant=baseline", "--on_nonfinite=rewind", "--space", "optim.lr=choice:0.05,0.02"]
    with pytest.warns(DivergenceWarning):
        assert command(tmp_path / "s", *words) == 0
    assert "diverged, and went on with learning rates times 0.5" in capsys.readouterr().out
    assert [row["validation accuracy, %"] for row in rows(tmp_path / "s" / "baseline")][1] == "diverged"


def test_samples_too_few_to_hold_any_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, y = np.random.default_rng(0), np.arange(24) % 6
    x = rng.normal(size=(24, 5)).astype(np.float32)
    np.savez(tmp_path / "few.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = ["--variant=baseline", f"--data={tmp_path / 'few.npz'}", "--space", "optim.lr=choice:0.05"]
    with pytest.warns(DataWarning, match="rounds to no sample"):
        assert command(tmp_path / "s", *words) == 1
    assert "validation=0.1 holds none of these few samples out" in capsys.readouterr().err


def test_the_best_has_the_first_of_the_tuning_seeds(tmp_path: Path) -> None:
    seeds = ["--seed=9", "--seeds", "2", "1", "3"]
    assert command(tmp_path / "s", "--variant=baseline", *seeds, "--space", "optim.lr=choice:0.05") == 0
    assert yaml.safe_load((tmp_path / "s" / "baseline" / "best.yaml").read_text())["seed"] == 2


def test_a_combination_that_cannot_be_is_told_as_such_and_the_others_are_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ["--space", "lift.rho_min=choice:1,3", "lift.rho_max=choice:2,4"]
    assert command(tmp_path / "s", "--variant=protoseam", *space) == 0
    said = capsys.readouterr().out
    assert (
        "trial 2 (4 in all)  lift.rho_min 3  lift.rho_max 2  not run: its settings do not go together" in said
    )
    assert "4 of 4 trials" in said
    table = rows(tmp_path / "s" / "protoseam")
    assert (table[-1]["trial"], table[-1]["validation accuracy, %"]) == ("2", "not run")
    assert {p.name for p in (tmp_path / "s" / "protoseam").glob("*.json")} == {
        f"00{slot}-{BASE.seed}.json" for slot in (0, 1, 3)
    }


def test_a_point_whose_network_does_not_fit_the_images_spoils_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ["--model=vit_s", '--model_options={"dim": 8, "depth": 1, "heads": 2, "patch": 4}']
    words = ["--variant=baseline", *network, "--space", "image_size=choice:8,10,12"]
    assert command(tmp_path / "s", *words) == 0
    assert "not run: vit_s cannot be built (image_size=10 does not divide" in capsys.readouterr().out
    table = {row["image_size"]: row["validation accuracy, %"] for row in rows(tmp_path / "s" / "baseline")}
    assert (table["10"], len(table)) == ("not run", 3)


@pytest.mark.parametrize("mistake", ["--data=digitz", "--model=convnext"])
def test_a_mistyped_name_leaves_no_sweep_behind(tmp_path: Path, mistake: str) -> None:
    space = ["--variant=baseline", "--space", "optim.lr=choice:0.05"]
    assert command(tmp_path / "s", *space, mistake) == 1
    assert not list(tmp_path.iterdir())
    assert command(tmp_path / "s", *space) == 0


def test_values_are_checked_beside_the_others_of_the_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ["--variant=protoseam", "--space", "lift.antithetic=choice:true,false"]
    assert command(tmp_path / "even", *pairs, "lift.draws=choice:2") == 0  # the recipe's one draw is odd
    capsys.readouterr()
    assert command(tmp_path / "odd", *pairs, "lift.draws=choice:1,3") == 1
    assert "lift.draws must be even" in capsys.readouterr().err


def test_seeds_named_twice_and_places_a_database_cannot_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "s", "--seeds", "1", "1") == 1
    assert "--seeds names one twice: 1 1" in capsys.readouterr().err
    assert command(tmp_path / "a?b") == 1
    assert "a?b: a database's address cannot hold ?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_sweep_without_a_winner_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "s", "--variant=baseline", "--space", "optim.lr=choice:1e30,1e31") == 1
    assert "no trial of baseline has finished" in capsys.readouterr().out
