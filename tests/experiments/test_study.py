"""Studies: one file a run, skipped when done, picked up when cut off; plans with the paper's settings."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from protoseam.cli.main import main
from protoseam.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.engine.rundir import RunDirectory
from protoseam.engine.session import train
from protoseam.experiments import paper, study, tables
from protoseam.experiments.plans import sweep_k, sweep_rho, table_1
from protoseam.experiments.recipes import NAMES, recipe

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [16]},
    epochs=3,
    augment="none",
    optim=OptimConfig(lr=0.02, warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)
PLAN = [
    (f"{variant}-{seed}", dataclasses.replace(SMALL, variant=variant, seed=seed))
    for variant in ("baseline", "protoseam")
    for seed in (1, 2)
]


def test_a_study_is_one_file_a_run(tmp_path: Path) -> None:
    assert study.run_study(PLAN, tmp_path, pack=3, quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.json" for name, _ in sorted(PLAN)]
    row = study.read_study(tmp_path)["protoseam-2"]
    assert row["config"]["seed"] == 2
    assert len(row["metrics"]) == 3
    assert 0 < row["test_accuracy"] <= 1
    assert row["environment"]["torch"]
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert study.run_study(PLAN, tmp_path, quiet=True)  # everything is there: nothing is run again
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_a_budget_cuts_it_off_and_the_rest_comes_out_the_same(tmp_path: Path) -> None:
    assert not study.run_study(PLAN, tmp_path / "cut", pack=2, budget_seconds=1e-3, quiet=True)
    assert study.run_study(PLAN, tmp_path / "cut", pack=2, quiet=True)
    assert study.run_study(PLAN, tmp_path / "whole", quiet=True)
    cut, whole = (study.read_study(tmp_path / name) for name in ("cut", "whole"))
    assert cut.keys() == whole.keys()
    for name, row in whole.items():
        assert cut[name]["test_accuracy"] == row["test_accuracy"]
        losses = [[epoch["loss"] for epoch in r["metrics"]] for r in (row, cut[name])]
        assert losses[0] == losses[1]


def test_the_plan_of_table_1_has_the_papers_54_runs_and_settings() -> None:
    plan = dict(table_1())
    assert len(plan) == 54
    assert {(c.data, c.model, c.variant) for c in plan.values()} == set(paper.TABLE_1)
    lifted, baseline = plan["cifar100-resnet8-protoseam-43"], plan["cifar100-resnet8-baseline-43"]
    assert (lifted.optim.lr, lifted.optim.weight_decay, lifted.seed, lifted.epochs) == (0.02, 2e-3, 43, 200)
    assert (lifted.lift.dim, lifted.lift.rho_max, lifted.lift.covariance) == (32, 16.0, "exact")
    assert plan["cifar100-resnet8-unlifted-43"].optim == baseline.optim  # paper, rem:confound
    assert [c.lift.rho_max for _, c in sweep_rho([42])] == [1, 2, 4, 8, 16, 32]
    assert [c.lift.dim for _, c in sweep_k([42])] == [8, 16, 32, 64, 128]


def test_the_published_means_are_the_printed_ones() -> None:
    """tab:main prints the means as well: a slip in copying a seed would show."""
    printed = {
        ("cifar10", "resnet8"): (94.91, 95.16, 95.46),
        ("cifar10", "vit_s"): (89.43, 90.05, 90.38),
        ("cifar100", "resnet8"): (76.76, 74.24, 78.34),
        ("cifar100", "vit_s"): (65.91, 64.97, 70.53),
        ("tinyimagenet", "resnet8"): (63.18, 58.32, 65.60),
        ("tinyimagenet", "vit_s"): (46.96, 47.93, 52.12),
    }
    for (data, model), means in printed.items():
        for variant, mean in zip(paper.VARIANTS, means, strict=True):
            assert sum(paper.TABLE_1[data, model, variant]) / 3 == pytest.approx(mean, abs=0.006)


def test_recipes_are_found_by_name_and_committed_runs_used_them() -> None:
    assert len(NAMES) == 18
    with pytest.raises(ConfigError, match="did you mean cifar10-vit_s-baseline"):
        recipe("cifar10-vit-baseline")
    for path in (Path(__file__).parents[2] / "results" / "paper").glob("*.json"):
        row = json.loads(path.read_text())
        name, _, seed = path.stem.rpartition("-")
        assert row["config"]["optim"] == dataclasses.asdict(recipe(name).optim)
        assert row["config"]["seed"] == int(seed)
        assert row["epochs"] == 200


def test_the_table_shows_what_is_there_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, accuracy in ((42, 0.77), (43, 0.79)):
        row = {"test_accuracy": accuracy, "epochs": 200}
        (tmp_path / f"cifar100-resnet8-protoseam-{seed}.json").write_text(json.dumps(row))
    short = {"test_accuracy": 0.99, "epochs": 30}
    (tmp_path / "cifar100-resnet8-baseline-42.json").write_text(json.dumps(short))
    command = ["reproduce", "table1", "--out", str(tmp_path), "--table-only", "--datasets", "cifar100"]
    assert main([*command, "--models", "resnet8"]) == 0
    shown = capsys.readouterr().out
    expected = "| CIFAR-100 | ResNet-8 | ProtoSeam | 77.00 | 79.00 | missing | 78.00 | 2.00 | 78.34 | -0.34 |"
    assert expected in shown
    assert (
        "| CIFAR-100 | ResNet-8 | Baseline | missing | missing | missing | missing |  | 76.76 |  |" in shown
    )
    assert "3 of 9 runs are in" in shown
    cells = tables.table_1(study.read_study(tmp_path), ["cifar100"], ["resnet8"])
    assert tables.csv_table(cells).splitlines()[3].endswith("77.00,79.00,missing,78.00,2.00,78.34,-0.34")


def test_a_run_another_worker_holds_is_left_to_it_until_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDirectory.claim(tmp_path / "unfinished" / "baseline-1")
    seen_while_waiting = []

    def the_other_dies(_: float) -> None:
        seen_while_waiting.append(set(study.read_study(tmp_path)))
        other.close()

    monkeypatch.setattr(study, "time", SimpleNamespace(sleep=the_other_dies, monotonic=time.monotonic))
    assert study.run_study(PLAN, tmp_path, pack=2, quiet=True)
    assert seen_while_waiting == [{name for name, _ in PLAN} - {"baseline-1"}]
    assert study.done(tmp_path, "baseline-1")
    assert not (tmp_path / "unfinished").exists()


def test_a_worker_may_die_between_the_last_epoch_the_results_and_their_file(tmp_path: Path) -> None:
    work = tmp_path / "unfinished" / "baseline-1"
    train(PLAN[0][1], work, quiet=True)
    expected = json.loads((work / "summary.json").read_text())["test_accuracy"]
    (work / "summary.json").unlink()  # the last checkpoint is there, the results are not
    leftover = tmp_path / "unfinished" / "baseline-2"
    leftover.mkdir()
    (tmp_path / "baseline-2.json").write_text('{"test_accuracy": 0.5}')  # kept, but not yet cleared up
    assert study.run_study(PLAN[:2], tmp_path, quiet=True)
    found = study.read_study(tmp_path)
    assert found["baseline-1"]["test_accuracy"] == expected
    assert len(found["baseline-1"]["metrics"]) == 3
    assert found["baseline-2"]["test_accuracy"] == 0.5
    assert not (tmp_path / "unfinished").exists()
