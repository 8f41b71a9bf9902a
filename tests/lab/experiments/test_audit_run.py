"""``protoseam audit`` on runs on the digits, and the audits a run makes as it trains."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protoseam.errors import DataWarning
from protoseam.lab.audit import QUICK, AuditSettings
from protoseam.lab.cli.main import main
from protoseam.lab.data.loading import load
from protoseam.lab.engine import auditing, session
from protoseam.lab.engine.config import ConfigError, LiftConfig, OptimConfig, RunConfig
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.evaluate import evaluate
from protoseam.lab.engine.run import Run
from protoseam.lab.engine.rundir import RunDirectory
from protoseam.lab.experiments.audit import audit_run

SMALL = RunConfig(
    data="digits",
    model="mlp",
    model_options={"hidden": [32]},
    epochs=5,
    augment="none",
    optim=OptimConfig(lr=0.02, weight_decay=1e-3, warmup_epochs=1),
    lift=LiftConfig(dim=6, rho_max=4.0),
    device="cpu",
    checkpoint_every=4,
    audit_every=2,
)
FEW = AuditSettings(pairs=32, points=16, directions=8)


def config(**changes: Any) -> RunConfig:
    return dataclasses.replace(SMALL, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audit") / "digits"
    session.train(SMALL, out, quiet=True)
    return out


def test_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(trained), "--device=cpu"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "The bound, term by term",
        "+ mean mismatch",
        "+ covariance mismatch",
        "+ non-Gaussianity",
        "deployed risk R",
        "of the gap used",
        "eq:controlled-bound-full",
        "Worst classes by deployed risk",
        "Sampling as smoothing",
        "NC4 nearest mean",
        "Covariance spectrum",
        "sampled from",
    ):
        assert words in shown
    assert "NO" not in shown.split()
    assert max(map(len, shown.splitlines())) <= 80 + len(str(trained))  # only paths may be longer
    for name in ("waterfall", "classes", "epochs"):
        for suffix, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            assert (trained / "audit" / f"{name}.{suffix}").read_bytes().startswith(magic)
    report = json.loads((trained / "audit" / "audit.json").read_text())
    assert report["all_bounds_hold"]
    assert report["classes_within_bound"] == report["classes"] == 10
    assert report["smoothing"]["holds"]


def test_json_goes_where_it_is_told(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", str(trained), "--device=cpu", "--json", "--split=test", "--out", str(tmp_path / "a")]
    assert main([*command, "--seed=3"]) == 0
    streams = capsys.readouterr()
    report = json.loads(streams.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert report == json.loads((tmp_path / "a" / "audit.json").read_text())
    assert "figures: waterfall.png" in streams.err
    assert (report["split"], report["seed"], report["epoch"]) == ("test", 3, 5)
    assert str(trained) not in streams.out  # a report can be shown around


def test_what_the_report_says(trained: Path) -> None:
    report = audit_run(trained, device="cpu", settings=FEW)
    assert [row["epoch"] for row in report["history"]] == [2, 4, 5]
    found = evaluate(trained, split="validation", device="cpu")
    balanced, sampled = report["totals"]["balanced"], report["totals"]["as_sampled"]
    assert sampled["accuracy"] == pytest.approx(found["accuracy"])
    assert report["samples"] == found["samples"] == sum(row["count"] for row in report["per_class"])
    assert 1 - sampled["accuracy"] <= sampled["error_bound"]
    rows = report["per_class"]
    assert balanced["risk"] == pytest.approx(sum(row["risk"] for row in rows) / 10)
    main_bound = next(b for b in balanced["bounds"] if b["name"] == "decomposition")
    assert main_bound["bound"] == pytest.approx(sum(row["bound"] for row in rows) / 10)
    for name, value in main_bound["terms"].items():
        assert value == pytest.approx(sum(row["terms"][name] for row in rows) / 10)
    for row in rows:
        assert row["bound"] == pytest.approx(row["sampled_loss"] + sum(row["terms"].values()))
        assert row["risk"] <= row["bound"]
        assert row["non_gaussianity_lower"] <= row["non_gaussianity"]
    worst = max(rows, key=lambda row: row["risk"])
    assert report["worst_by_risk"][0] == worst["name"]
    assert set(report["worst_by_bound"]) == {str(digit) for digit in range(10)}
    # the last epoch's own audit saw the same network, prototypes and Σ̃: exact terms agree, Δ is its cap there
    logged = report["history"][-1]
    assert logged["risk"] == pytest.approx(balanced["risk"], rel=1e-5)
    assert logged["nc1"] == pytest.approx(report["collapse"]["held_out"]["nc1"], rel=1e-4)
    assert logged["bound"] >= main_bound["bound"] - 0.1
    assert report["collapse"]["training"]["nc1"] < report["collapse"]["held_out"]["nc1"]
    # Σ̃ = Σ_train + σ0²I: no augmentation, the exact estimator, all but the samples of the last partial batch
    assert report["mismatch"]["training_sampling_shift"] < 0.1 * report["mismatch"]["covariance"]
    assert report["spectra"]["sampled from"]["eigenvalues"][-1] >= 0.999 * report["floor"] ** 2
    estimate = report["estimation"]
    assert estimate["error_from_halves"] < estimate["error"]  # N1 was fitted to the training data
    assert estimate["optimal_floor"] == pytest.approx(math.sqrt(estimate["error"] / (2 * math.sqrt(6))))
    assert 0 < estimate["optimal_floor_from_halves"] < estimate["optimal_floor"]


def test_metrics_hold_the_audits_that_were_due(trained: Path) -> None:
    rows = RunDirectory(trained).read_metrics()
    assert [row["epoch"] for row in rows if "audit" in row] == [2, 4, 5]  # every second, and the last
    for row in rows[1::2]:
        audit = row["audit"]
        assert all(isinstance(value, float) and math.isfinite(value) for value in audit.values())
        terms = audit["mean_mismatch"] + audit["covariance_mismatch"] + audit["non_gaussianity"]
        assert audit["bound"] == pytest.approx(audit["sampled_loss"] + terms)
        assert audit["risk"] <= audit["bound"]


def test_an_audit_changes_nothing_of_the_run() -> None:
    data = load("digits")
    looked_at, alone = Run(config(audit_every=1), data), Run(config(audit_every=0), data)
    rows = [train_epoch(looked_at) for _ in range(2)]
    assert all("audit" not in train_epoch(alone) for _ in range(2))
    a, b = looked_at.state()["objective"], alone.state()["objective"]
    assert all(torch.equal(a[name], b[name]) for name in b)
    again = Run(config(audit_every=1), data)
    assert [train_epoch(again)["audit"] for _ in range(2)] == [row["audit"] for row in rows]


def test_where_validation_rounds_to_no_sample_there_is_no_audit() -> None:
    data = load("digits")
    rows = np.concatenate([np.flatnonzero(data.train_labels == c)[:4] for c in range(10)])
    few = dataclasses.replace(
        data, train_images=data.train_images[rows], train_labels=data.train_labels[rows]
    )
    with pytest.warns(DataWarning, match="no audit"):
        run = Run(config(audit_every=1, batch_size=8, lift=LiftConfig(dim=2)), few)
    row = train_epoch(run)
    assert "audit" not in row
    assert row["validation_accuracy"] is None


LIFTS: dict[str, dict[str, Any]] = {
    "running, floor chosen": {"covariance": "running", "floor": "auto"},
    "isotropic": {"covariance": "isotropic"},
    "diagonal": {"structure": "diagonal"},
    "shared": {"structure": "shared"},
}


@pytest.mark.parametrize("name", LIFTS)
def test_every_kind_of_covariance_can_be_audited(name: str, tmp_path: Path) -> None:
    lift = dataclasses.replace(SMALL.lift, **LIFTS[name])
    session.train(config(epochs=2, lift=lift), tmp_path / "run", quiet=True)
    report = audit_run(tmp_path / "run", device="cpu", settings=FEW)
    assert report["all_bounds_hold"]
    assert report["floor"] > 0
    assert len(report["history"]) == 1


def test_a_run_that_is_not_finished_is_audited_at_its_checkpoint(tmp_path: Path) -> None:
    whole = tmp_path / "run"
    session.train(config(audit_every=0), whole, quiet=True)
    for path in (whole / "checkpoints" / "epoch-000005", whole / "summary.json", whole / "model.safetensors"):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink()
    report = audit_run(whole, device="cpu", settings=QUICK)
    assert (report["epoch"], report["epochs"], report["history"]) == (4, 5, [])
    assert report["spectra"] == {}
    json.dumps(report, allow_nan=False)  # what a quick audit does not know is null


def test_what_cannot_be_audited_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(name: str, *more: str, **changes: Any) -> str:
        path = tmp_path / name
        if not path.exists():
            session.train(config(epochs=1, **changes), path, quiet=True)
        assert main(["audit", str(path), "--device=cpu", *more]) == 1
        return capsys.readouterr().err

    assert "variant=baseline: it has no prototypes" in answer("baseline", variant="baseline")
    assert "Only runs of variant=protoseam can be audited" in answer("unlifted", variant="unlifted")
    assert "use --split test" in answer("all", validation=0.0, audit_every=0)
    assert main(["audit", str(tmp_path / "all"), "--device=cpu", "--split=test"]) == 0
    RunDirectory.create(tmp_path / "new", SMALL).close()
    assert "every 4 epochs and at the end: protoseam train --resume" in answer("new")
    assert "there is no directory" in _error(["audit", str(tmp_path / "nothing")], capsys)


def _error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 1
    return capsys.readouterr().err


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"audit_every=-1"):
        config(audit_every=-1)
    with pytest.raises(ConfigError, match="an audit needs validation data"):
        config(validation=0.0)


def test_a_run_without_a_seam_has_no_audit_and_a_failed_one_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = load("digits")
    assert "audit" not in train_epoch(Run(config(variant="baseline", audit_every=1), data))

    def fails(*_: object, **__: object) -> None:
        raise ValueError("all class means coincide")

    monkeypatch.setattr(auditing, "audit_seam", fails)
    run = Run(config(audit_every=1), data)
    with pytest.warns(auditing.AuditWarning, match="no audit of epoch 1: all class means coincide"):
        assert "audit" not in train_epoch(run)
