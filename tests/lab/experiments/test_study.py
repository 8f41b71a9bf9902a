"""Studies: one file a run, skipped when done, picked up when cut off; plans with the paper's settings."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protoseam.errors import SeamError
from protoseam.lab.engine import epoch
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig, resolved
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.engine.session import train
from protoseam.lab.engine.settings import from_dict
from protoseam.lab.experiments import paper, study
from protoseam.lab.experiments.plans import QUICK, Scope, clusters, sweep_k, sweep_rho, table_1
from protoseam.lab.experiments.recipes import MINUTES, NAMES, NETWORKS, RECIPES, network, recipe

RESULTS = Path(__file__).parents[3] / "results" / "paper"

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
    (f"{variant}-{seed}", dataclasses.replace(SMALL, variant=variant, seed=seed, data_root="."))
    for variant in ("baseline", "protoseam")
    for seed in (1, 2)
]


def test_a_study_is_one_file_a_run(tmp_path: Path) -> None:
    assert study.run_study(PLAN, tmp_path, quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.json" for name, _ in sorted(PLAN)]
    row = study.read_study(tmp_path)["protoseam-2"]
    assert row["config"]["seed"] == 2
    assert row["config"]["data_root"] is None  # a path of this machine
    assert len(row["metrics"]) == 3
    assert 0 < row["test_accuracy"] <= 1
    assert row["environment"]["torch"]
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert study.run_study(PLAN, tmp_path, quiet=True)  # everything is there: nothing is run again
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_a_budget_cuts_it_off_and_the_rest_comes_out_the_same(tmp_path: Path) -> None:
    assert not study.run_study(PLAN, tmp_path / "cut", budget_seconds=1e-3, quiet=True)
    assert study.run_study(PLAN, tmp_path / "cut", quiet=True)
    assert study.run_study(PLAN, tmp_path / "whole", quiet=True)
    cut, whole = (study.read_study(tmp_path / name) for name in ("cut", "whole"))
    assert cut.keys() == whole.keys()
    for name, row in whole.items():
        assert cut[name]["test_accuracy"] == row["test_accuracy"]
        losses = [[epoch["loss"] for epoch in r["metrics"]] for r in (row, cut[name])]
        assert losses[0] == losses[1]


def test_a_run_that_diverges_stops_no_other_and_is_named_at_the_end(tmp_path: Path) -> None:
    wild = ("wild", dataclasses.replace(SMALL, optim=OptimConfig(lr=1e30, warmup_epochs=0)))
    for _ in range(2):  # nor when the study is started again, and its directory comes first
        with pytest.raises(study.StudyError, match=r"^wild: .*not finite"):
            study.run_study([wild, *PLAN[:3]], tmp_path, quiet=True)
        assert set(study.read_study(tmp_path)) == {name for name, _ in PLAN[:3]}


def test_so_is_one_that_the_seam_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = epoch.end_epoch

    def end(run: Run, started: float) -> dict[str, Any]:
        if run.config.seed == 1 and run.config.variant == "baseline":
            raise SeamError("it cannot go on")
        return original(run, started)

    monkeypatch.setattr(epoch, "end_epoch", end)
    with pytest.raises(study.StudyError, match=r"^baseline-1: it cannot go on"):
        study.run_study(PLAN, tmp_path, quiet=True)
    assert len(study.read_study(tmp_path)) == len(PLAN) - 1


def test_a_run_that_failed_is_named_even_if_the_budget_ends_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RunDirectory.create(tmp_path / "unfinished" / "baseline-1", PLAN[0][1])
    broken.close()
    (broken.path / "config.yaml").write_text("epochs: many")
    monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=iter((0.0, 0.0, 9.0)).__next__))
    assert not study.run_study(PLAN[:3], tmp_path, budget_seconds=5, quiet=True)
    assert "baseline-1: " in (said := capsys.readouterr().err)
    assert "epochs must be a whole number, got 'many'" in said
    assert set(study.read_study(tmp_path)) == {"baseline-2"}


def test_an_unfinished_run_with_other_settings_stops_no_other_and_is_left_alone(tmp_path: Path) -> None:
    other = dataclasses.replace(PLAN[0][1], epochs=9)
    RunDirectory.create(tmp_path / "unfinished" / "baseline-1", other).close()
    with pytest.raises(study.StudyError, match=r"other settings \(epochs: 9 there, 3 here\). Remove it"):
        study.run_study(PLAN[:2], tmp_path, quiet=True)
    assert set(study.read_study(tmp_path)) == {"baseline-2"}
    assert (tmp_path / "unfinished" / "baseline-1" / "config.yaml").exists()


def test_a_run_begun_with_fewer_looks_at_it_is_gone_on_with(tmp_path: Path) -> None:
    begun = dataclasses.replace(PLAN[2][1], audit_every=0, checkpoint_every=1)
    RunDirectory.create(tmp_path / "unfinished" / "protoseam-1", begun).close()
    assert study.run_study([(PLAN[2][0], dataclasses.replace(begun, audit_every=1))], tmp_path, quiet=True)
    assert all("audit" in line for line in study.read_study(tmp_path)["protoseam-1"]["metrics"])


def test_what_was_cut_off_comes_first_and_each_run_has_what_is_left_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    seen: list[tuple[str, float]] = []

    def forty_seconds(config: RunConfig, out: Path, budget_seconds: float, **more: Any) -> Any:
        seen.append((out.name, budget_seconds))
        clock.now += 40
        return train(config, out, **more)

    monkeypatch.setattr(study, "train", forty_seconds)
    monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=lambda: clock.now))
    RunDirectory.create(tmp_path / "unfinished" / PLAN[2][0], PLAN[2][1]).close()
    assert not study.run_study(PLAN, tmp_path, budget_seconds=100, quiet=True)
    assert seen == [("protoseam-1", 100), ("baseline-1", 60), ("baseline-2", 20)]


def test_the_plan_of_table_1_has_the_papers_54_runs_and_settings() -> None:
    plan = dict(table_1(Scope()))
    assert len(plan) == 54
    assert {(c.data, c.model, c.variant) for c in plan.values()} == set(paper.TABLE_1)
    lifted, baseline = plan["cifar100-resnet8-protoseam-43"], plan["cifar100-resnet8-baseline-43"]
    assert (lifted.optim.lr, lifted.optim.weight_decay, lifted.seed, lifted.epochs) == (0.02, 2e-3, 43, 200)
    assert (lifted.lift.dim, lifted.lift.rho_max, lifted.lift.covariance) == (32, 16.0, "exact")
    assert plan["cifar100-resnet8-unlifted-43"].optim == baseline.optim  # paper, rem:confound


def test_the_sweeps_change_one_setting_and_share_a_run_with_table_1() -> None:
    one_seed = Scope(seeds=(42,))
    assert [c.lift.rho_max for _, c in sweep_rho(one_seed)] == [1, 2, 4, 8, 16, 32]
    assert [c.lift.dim for _, c in sweep_k(one_seed)] == [8, 16, 32, 64, 128]
    for scope in (Scope(), QUICK):
        table, rho, k = (dict(plan(scope)) for plan in (table_1, sweep_rho, sweep_k))
        shared = table.keys() & rho.keys() & k.keys()
        assert shared == {f"{scope.sweep}-protoseam-{seed}" for seed in scope.seeds}
        assert all(table[name] == rho[name] == k[name] for name in shared)


def test_the_cluster_runs_have_two_dimensions_and_keep_them() -> None:
    plan = dict(clusters(Scope()))
    assert list(plan) == [f"clusters-mnist-convnet-{variant}-42" for variant in paper.VARIANTS]
    for config in plan.values():
        assert (config.data, config.lift.dim, config.keep_embeddings) == ("mnist", 2, 2000)
    assert dict(clusters(Scope(epochs=1)))["clusters-mnist-convnet-baseline-42"].epochs == 1
    quick = [{c.epochs for _, c in clusters(s)} for s in (QUICK, dataclasses.replace(QUICK, epochs=8))]
    assert quick == [{60}, {8}]


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
    planned = dict(table_1(Scope(models=NETWORKS)))
    assert set(planned) == {f"{name}-{s}" for name in NAMES[:27] for s in paper.SEEDS}
    with pytest.raises(ConfigError, match="did you mean cifar10-vit_s-baseline"):
        recipe("cifar10-vit-baseline")
    each = " or ".join(f"cifar100-resnet8-{variant}" for variant in paper.VARIANTS)
    with pytest.raises(ConfigError, match=rf"did you mean {each}\?"):
        recipe("cifar100-resnet8")
    for name, row in study.read_study(RESULTS).items():
        if name in planned:
            assert resolved(from_dict(row["config"])).optim == planned[name].optim
            assert row["config"]["seed"] == planned[name].seed
            assert row["config"]["model_options"] == planned[name].model_options
            assert row["epochs"] == 200


def test_a_recipe_says_its_command_its_time_and_the_papers_number() -> None:
    told = RECIPES["tinyimagenet-resnet8-unlifted"].about
    assert (
        "TinyImageNet, ResNet-8, Unlifted: learning rate 0.05, weight decay 0.001 (Baseline's), 200 epochs"
        in told
    )
    assert "``protoseam train --recipe tinyimagenet-resnet8-unlifted``" in told
    assert "Expect 58.32 % test accuracy (paper; at seeds 42, 43, 44: 57.70, 58.51, 58.75)" in told
    for name, (config, told) in RECIPES.items():
        data, model, variant = name.split("-")
        assert (config.data, config.model, config.variant) == (data, network(model), variant)
        assert f"learning rate {config.optim.lr:g}, weight decay {config.optim.weight_decay:g}" in told
        assert f"{config.epochs} epochs" in told
        assert config.audit_every == (20 if config.variant == "protoseam" else 0)
    for name in (
        "cifar100-vit_s_conv-protoseam",
        "cifar100-vit_s-protoseam",
    ):  # neither is known to be the paper's
        assert "Compare with 70.53 % test accuracy (paper;" in RECIPES[name].about
    assert "about 7 min on one H200" in RECIPES["cifar100-resnet8-protoseam"].about


def test_the_stated_times_are_those_of_the_committed_runs() -> None:
    """Within the factor that sharing the device makes."""
    for name, row in study.read_study(RESULTS).items():
        stated = MINUTES.get(name.rpartition("-")[0])
        if stated is not None:
            assert 0.5 < row["seconds"] / 60 / stated < 2, name


def test_a_file_that_is_no_finished_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"epochs": 2')
    with pytest.raises(StorageError, match=r"cut\.json cannot be read as JSON"):
        study.read_study(tmp_path)
    (tmp_path / "cut.json").write_text('{"epochs": 2, "config": {}, "metrics": []}')
    with pytest.raises(
        StorageError, match=r"no finished run, test_accuracy is missing, and must be a number"
    ):
        study.read_study(tmp_path)


def test_a_run_another_worker_holds_is_left_to_it_until_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunDirectory.claim(tmp_path / "unfinished" / "baseline-1")
    seen_while_waiting = []

    def the_other_dies(_: float) -> None:
        seen_while_waiting.append(set(study.read_study(tmp_path)))
        other.close()

    monkeypatch.setattr(study, "time", SimpleNamespace(sleep=the_other_dies, monotonic=time.monotonic))
    assert study.run_study(PLAN, tmp_path, quiet=True)
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
    metrics = [{"epoch": 3, "loss": {"total": 1.0}, "validation_accuracy": None}]
    kept = {"test_accuracy": 0.5, "epochs": 3, "config": {}, "metrics": metrics}
    (tmp_path / "baseline-2.json").write_text(json.dumps(kept))  # not yet cleared up
    assert study.run_study(PLAN[:2], tmp_path, quiet=True)
    found = study.read_study(tmp_path)
    assert found["baseline-1"]["test_accuracy"] == expected
    assert len(found["baseline-1"]["metrics"]) == 3
    assert found["baseline-2"]["test_accuracy"] == 0.5
    assert not (tmp_path / "unfinished").exists()
