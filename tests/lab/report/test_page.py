"""The page as a text: its size, what it says of old runs and of several, names that are not markup, and damage."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from made_up_pages import made_up_run, several
from made_up_runs import row, written

from protoseam.errors import DataWarning
from protoseam.lab.cli.main import main
from protoseam.lab.cli.parser import read_command
from protoseam.lab.cli.train import build_parser
from protoseam.lab.engine import session
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig, resolved
from protoseam.lab.engine.files import StorageError
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.settings import from_dict
from protoseam.lab.report.compare import grouped, paired
from protoseam.lab.report.gather import Gathered, gather
from protoseam.lab.report.markup import Markup, tag
from protoseam.lab.report.page import page, write_page
from protoseam.lab.report.payload import calibration
from protoseam.lab.report.single import command_of

SMALL = RunConfig(
    model="mlp",
    model_options={"hidden": [8]},
    epochs=2,
    optim=OptimConfig(warmup_epochs=1),
    lift=LiftConfig(dim=4, rho_max=2.0),
    device="cpu",
)


def payload(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    session.train(SMALL, out, quiet=True)
    return out


def test_a_large_run_stays_below_one_and_a_half_megabytes() -> None:
    """10,000 colour images of pure noise, which no format compresses, 200 epochs and 100 classes."""
    large = made_up_run(classes=100, dim=32, images=10_000, epochs=200, side=32, channels=3, scatter=5)
    text = page([large])
    assert len(text.encode()) < 1_500_000
    drawn = payload(text)
    assert len(drawn["curves"][0]["epochs"]) == 200
    assert sum(n for *_, n in drawn["answers"]["confusion"]) == 10_000
    assert len(drawn["latent"]["epochs"]) == 24
    assert len(drawn["answers"]["thumb"]) > 1100  # points and mistakes


def test_nothing_is_asked_for_and_names_are_texts() -> None:
    text = page([made_up_run()])
    assert "default-src 'none'" in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg|http-equiv", "", text)
    assert "<img" not in text
    assert "&lt;img src=x" in text
    assert tag("p", "<b>", Markup("<i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></p>'


def test_a_run_gets_its_page_with_its_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    text = (run / "report.html").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert f"{100 * summary['test_accuracy']:.2f} %" in text
    for heading in (
        "How it learned",
        "The latent space",
        "What it confuses",
        "Class by class",
        "What theory promises",
    ):
        assert heading in text
    assert "protoseam train --model mlp" in text


def test_training_ends_with_a_page_unless_told_not_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model=mlp", "--epochs=1", "--variant=baseline", "--device=cpu", "--quiet=true"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert f"page: {tmp_path / 'a' / 'report.html'}" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "b"), "--no-page"]) == 0
    assert "page: " not in capsys.readouterr().out
    assert not (tmp_path / "b" / "report.html").exists()
    (tmp_path / "a" / "latents.safetensors").write_bytes(b"nonsense")
    assert (
        main(["train", "--resume", str(tmp_path / "a")]) == 0
    )  # a page that fails does not fail the command
    assert "no page: " in capsys.readouterr().err
    assert main(["report", str(tmp_path / "a")]) == 1


def test_reliability_is_the_calibration_error_of_eval(run: Path) -> None:
    from protoseam.lab.engine.evaluate import evaluate

    found, expected = calibration(gather([run])[0]), evaluate(run, device="cpu")
    assert found is not None
    assert found["ece"] == pytest.approx(expected["ece"], abs=1e-5)
    assert found["nll"] == pytest.approx(expected["nll"], abs=1e-4)
    assert sum(n for n, *_ in found["bins"]) == expected["samples"]


def test_old_runs_get_a_page_with_what_they_have(run: Path, tmp_path: Path) -> None:
    name = "cifar100-resnet8-protoseam-{}".format
    study = written(tmp_path / "study", {name(s): row(name(s), 0.7 + s / 1000) for s in (42, 43)})
    assert "2 runs of 1 setting" in write_page([study]).read_text()
    alone = write_page([study / f"{name(42)}.json"], tmp_path / "one.html").read_text()
    assert "How it learned" in alone
    assert "latent" not in payload(alone)
    for file in ("latents.safetensors", "seam.safetensors", "data.json"):
        (run / file).rename(tmp_path / file)
    try:
        assert "How it learned" in write_page([run], tmp_path / "less.html").read_text()
    finally:
        for file in ("latents.safetensors", "seam.safetensors", "data.json"):
            (tmp_path / file).rename(run / file)


def test_several_runs_are_paired_by_seed() -> None:
    runs = several()
    text = page(runs)
    ours, theirs = ([r.test for r in runs if r.config["variant"] == v] for v in ("protoseam", "baseline"))
    gaps = 100 * (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64))
    reach = 4.302653 * float(gaps.std()) / 3**0.5  # Student's t with two degrees of freedom
    low, high = float(gaps.mean()) - reach, float(gaps.mean()) + reach
    assert f"{float(gaps.mean()):+.2f} [{low:+.2f}, {high:+.2f}]" in text
    assert [group.label for group in grouped(runs)] == ["baseline", "protoseam"]
    assert payload(text)["compare"][0]["series"].keys() == {"baseline", "protoseam"}
    assert payload(text)["compare"][0]["cut"]  # as the section says, the first epochs may lie below
    assert paired({1: 2.0}, {2: 1.0}) is None
    assert paired({1: 2.0}, {1: 1.5}) == (0.5, None)


def test_groups_are_named_by_what_differs() -> None:
    runs = several()
    changed = dataclasses.replace(
        runs[5], config={**runs[5].config, "lift": {**runs[5].config["lift"], "rho_max": 8.0}}
    )
    assert [group.label for group in grouped([*runs[:5], changed])] == [
        "baseline",
        "protoseam, rho_max 16",
        "protoseam, rho_max 8",
    ]


def test_a_baseline_is_one_setting_whatever_the_seam_of_the_others() -> None:
    """The cluster figure's Baseline names a seam of two dimensions, which it does not have."""
    runs = several()
    narrow = {**runs[0].config, "lift": {**runs[0].config["lift"], "dim": 2}}
    assert len(grouped([dataclasses.replace(runs[0], config=narrow), *runs[1:]])) == 2


def test_the_committed_study_has_one_setting_per_variant() -> None:
    """Its older files leave the optimizer and the seam's rate to the defaults, and its newer ones name them."""
    study = Path(__file__).parents[3] / "results" / "paper"
    runs = [run for run in gather([study]) if run.name.startswith("cifar10-vit_s_conv-")]
    assert sorted((g.label, len(g.runs)) for g in grouped(runs)) == [
        ("baseline", 3),
        ("protoseam", 3),
        ("unlifted", 3),
    ]


def test_the_reference_is_the_baseline_with_the_most_seeds() -> None:
    runs = several()
    other = {**runs[0].config, "epochs": 7, "seed": 99}
    text = page([dataclasses.replace(runs[0], config=other), *runs])
    assert f"To baseline, epochs {runs[0].config['epochs']}" in text
    assert re.search(r"[+−][0-9.]+ \[[+−][0-9.]+, [+−][0-9.]+\]", text)


def test_data_of_the_same_name_is_told_apart_by_its_samples() -> None:
    """A copy in another place is the same data, and so is another image size; changed samples are not."""
    base = several()[0]
    places = [("/a/photos", "1", None), ("/b/photos", "1", None), ("/c/photos", "2", None)]
    places += [("/a/photos", "3", 32), ("/d/birds", "4", None)]

    def of(path: str, print_: str, size: int | None) -> Gathered:
        data = RunData(path, None, ["x", "y"], [1], [9, print_], [9, print_], [0.0], [1.0], size)
        return dataclasses.replace(base, config={**base.config, "data": path, "image_size": size}, data=data)

    groups = grouped([of(*place) for place in places])
    assert [group.block.partition(",")[0] for group in groups] == [
        "/a/photos",
        "/c/photos",
        "/a/photos",
        "birds",
    ]
    assert [len(group.runs) for group in groups] == [2, 1, 1, 1]
    blocks = [group.block for group in grouped([of("/a/photos", p, None) for p in "12"])]
    assert all(re.match(r"/a/photos \([0-9a-f]{8}\), ", block) for block in blocks)
    assert blocks[0] != blocks[1]


def test_epochs_are_named_where_they_differ_between_variants() -> None:
    runs = [
        dataclasses.replace(
            run, config={**run.config, "epochs": 5 if run.config["variant"] == "baseline" else 9}
        )
        for run in several()
    ]
    assert [group.label for group in grouped(runs)] == ["baseline, epochs 5", "protoseam, epochs 9"]


def test_trials_of_a_sweep_are_compared_by_validation_accuracy() -> None:
    trials = [
        dataclasses.replace(
            run,
            config={**run.config, "optim": {**run.config["optim"], "lr": 0.1 * (1 + i % 3)}, "seed": 1},
            summary={"test_accuracy": None, "validation_accuracy": 0.5 + i / 100},
        )
        for i, run in enumerate(several()[3:])
    ]
    text = page(trials)
    assert "Validation accuracy, %" in text
    assert "Test accuracy, %" not in text
    assert re.search(r"protoseam, lr 0.3</th><td>1</td><td>52.00", text)


def test_a_damaged_file_of_a_study_is_not_left_out_in_silence(tmp_path: Path) -> None:
    one, two = (f"cifar100-resnet8-baseline-{seed}" for seed in (42, 43))
    for name in (one, two):
        (tmp_path / f"{name}.json").write_text(json.dumps(row(name, 0.7)))
    (tmp_path / "toy.json").write_text('{"rows": []}')
    assert [run.name for run in gather([tmp_path])] == [one, two]
    (tmp_path / f"{two}.json").write_text('{"name": "cif')
    with pytest.warns(DataWarning, match=f"left out: .*{two}.json cannot be read"):
        assert [run.name for run in gather([tmp_path])] == [one]


def test_latents_of_other_classes_are_refused(run: Path, tmp_path: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "classes": ["a", "b"]}))
    try:
        with pytest.raises(StorageError, match="of other classes than the run's 2"):
            write_page([run], tmp_path / "x.html")
    finally:
        (run / "summary.json").write_text(json.dumps(summary))


def test_the_command_repeats_the_config(run: Path) -> None:
    """What the command says, read back as settings, is the run's config."""
    config = gather([run])[0].config
    _, again = read_command(build_parser(), shlex.split(command_of(config))[2:])
    assert resolved(again) == resolved(from_dict(config))
