"""Numbers, tables, figures and documents of a study, from made-up runs whose answers are known."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import PLANNED, SCOPE, row, three_seeds

from protoseam.lab.engine.config import ConfigError, to_dict
from protoseam.lab.engine.files import read_json
from protoseam.lab.experiments import aggregate, paper, reporting, study, tables
from protoseam.lab.experiments.plans import PLANS, QUICK, Scope

ROOT = Path(__file__).parents[3]
GENERATED = ("README.md", "docs/reproduction.md", "docs/study-tables.md", "docs/vit-s-search.md")


def test_differences_are_paired_and_have_students_interval() -> None:
    cells = aggregate.cells(three_seeds(), SCOPE)
    gain, to_unlifted, _ = aggregate.differences(cells)
    assert gain.by_seed == pytest.approx({42: 2.0, 43: 3.0, 44: 1.0})
    assert gain.mean == pytest.approx(2.0)
    # t at 97.5 % with two degrees of freedom is 4.3027; the deviation of 2, 3, 1 is 1
    assert gain.interval == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4)
    assert gain.published == pytest.approx(78.34 - 76.757, abs=1e-3)
    assert to_unlifted.mean is to_unlifted.interval is None


def test_one_seed_has_no_interval_and_a_seed_counts_only_in_both() -> None:
    runs = three_seeds()
    del runs["cifar100-resnet8-protoseam-42"], runs["cifar100-resnet8-baseline-43"]
    found = aggregate.differences(aggregate.cells(runs, SCOPE))
    assert found[0].by_seed == pytest.approx({44: 1.0})
    assert found[0].interval is None
    shown = tables.markdown(tables.paired(found, SCOPE)).splitlines()
    assert shown[2].endswith(
        "| ProtoSeam − Baseline | missing | missing | +1.00 | +1.00 | none: one seed | +1.58 |"
    )
    assert shown[3].endswith(
        "| ProtoSeam − Unlifted | missing | missing | missing | missing | missing | +4.10 |"
    )


def test_only_the_papers_200_epochs_count_on_its_data() -> None:
    scope = Scope(datasets=("cifar100",), models=("resnet8",), epochs=30)
    short, whole = (f"cifar100-resnet8-baseline-{seed}" for seed in (42, 43))
    runs = {short: row(short, 0.99, epochs=30), whole: row(whole, 0.7)}
    assert list(aggregate.counted(PLANS["table1"](scope), runs)) == ["cifar100-resnet8-baseline-43"]
    absent, uncounted, total = reporting.shortfall("table1", runs, scope)
    assert (len(absent), uncounted, total) == (7, {short: "of 30 epochs"}, 9)
    assert "- cifar100-resnet8-baseline-42: there, but of 30 epochs: not counted" in reporting.index(
        runs, scope
    )


def test_a_file_counts_only_as_the_run_that_its_name_says() -> None:
    name = "cifar100-vit_s-protoseam-42"
    plan = PLANS["table1"](Scope(models=("vit_s",)))

    def why(**changes: Any) -> str:
        run = row(name, 0.9)
        run["config"] |= changes
        assert (name in aggregate.counted(plan, {name: run})) == (not aggregate.refused(PLANNED[name], run))
        return aggregate.refused(PLANNED[name], run)

    assert why(seed=43) == "with other settings (seed: 43 there, 42 here)"
    assert "model_options: {'stem': 'conv'} there, {} here" in why(model_options={"stem": "conv"})
    assert "augment: none there, auto here" in why(augment="none")
    assert "unknown setting depth" in why(depth=3)
    assert not why(augment="paper", data_root="/data", device="cuda", audit_every=0, checkpoint_every=1)
    old = row(name, 0.9)
    del (
        old["config"]["keep_embeddings"],
        old["config"]["lift"]["repulsion"],
    )  # of before there was such a setting
    assert not aggregate.refused(PLANNED[name], old)


def test_off_the_papers_data_the_plans_own_epochs_count_and_pictures_need_embeddings() -> None:
    (_, config), *_ = PLANS["table1"](QUICK)
    run = {"epochs": 24, "config": to_dict(config)}
    assert aggregate.refused(config, run) == "of 24 epochs"
    assert not aggregate.refused(config, {**run, "epochs": 25})
    (_, config), *_ = PLANS["clusters"](QUICK)
    run = {"epochs": 60, "config": to_dict(config)}
    assert aggregate.refused(config, run) == "without embeddings"
    assert not aggregate.refused(config, {**run, "embeddings": {}})


def test_no_run_of_the_quick_study_has_the_name_of_one_of_the_papers() -> None:
    quick = {name for plan in PLANS.values() for name, _ in plan(QUICK)}
    assert not quick & PLANNED.keys()


def test_a_toy_simulated_with_fewer_samples_is_not_the_papers() -> None:
    runs = {"toy": {"rows": [], "samples": 20_000, "seeds": 10}}
    assert reporting.shortfall("toy", runs, QUICK) == ([], {}, 1)
    assert reporting.shortfall("toy", runs, Scope()) == ([], {"toy": "of 20000 samples and 10 seeds"}, 1)
    assert "toy" in reporting.part_tables("toy", runs, QUICK)
    assert "toy" not in reporting.part_tables("toy", runs, Scope())


def test_a_report_keeps_nothing_of_an_earlier_one_that_has_no_data_now(tmp_path: Path) -> None:
    name = "sweep-cifar100-vit_s_conv-rho_max-8-42"
    reporting.write_report(["sweep-rho", "table1"], three_seeds() | {name: row(name, 0.7)}, SCOPE, tmp_path)
    (tmp_path / "mine.png").write_bytes(b"")
    before = {path.name for path in tmp_path.iterdir()}
    assert {"sweep-rho.png", "audits.md"} <= before
    reporting.write_report(["sweep-rho"], {}, SCOPE, tmp_path)
    assert before - {path.name for path in tmp_path.iterdir()} == {"sweep-rho.png", "sweep-rho.svg"}
    reporting.write_report(["table1"], {}, SCOPE, tmp_path)
    assert not list(tmp_path.glob("audits.*"))


def test_a_sweep_is_mean_lowest_and_highest_beside_the_papers() -> None:
    at_8 = "sweep-cifar100-vit_s_conv-rho_max-8"
    values = {f"{at_8}-42": 0.69, f"{at_8}-44": 0.71, "cifar100-vit_s_conv-protoseam-43": 0.7}
    runs = {name: row(name, value) for name, value in values.items()}
    points = {point.value: point for point in aggregate.sweep(runs, Scope(), "rho_max")}
    assert points[8].measured == pytest.approx((70.0, 69.0, 71.0))
    assert points[8].published == pytest.approx((69.3267, 68.6, 69.89))
    assert points[16].by_seed == pytest.approx({43: 70.0})  # Table 1's own run
    assert points[1].measured is None
    lines = tables.markdown(tables.sweep_table(list(points.values()), Scope(), "rho_max")).splitlines()
    assert (
        lines[5] == "| 8 | 69.00 | missing | 71.00 | 70.00 | 69.00 | 71.00 | 69.33 | 68.60 | 69.89 | +0.67 |"
    )
    assert aggregate.sweep(runs, QUICK, "rho_max")[0].published is None


def test_curves_are_the_range_of_the_seeds_where_all_have_a_value() -> None:
    runs = three_seeds()
    runs["cifar100-resnet8-baseline-42"]["metrics"][0]["validation_accuracy"] = (
        0.01  # the others have none here
    )
    bands = aggregate.curves(runs, SCOPE)
    assert [(b.variant, b.quantity) for b in bands] == [
        (variant, quantity)
        for variant in ("baseline", "protoseam")
        for quantity in ("validation accuracy", "total", "consensus")
    ]
    assert bands[0].epochs == [2, 4]
    assert bands[0].mean == pytest.approx([38.5, 77.0])
    assert (bands[0].low, bands[0].high) == (pytest.approx([38.0, 76.0]), pytest.approx([39.0, 78.0]))
    assert bands[1].epochs == [1, 2, 3, 4]
    assert tables.curves_table(
        bands, SCOPE
    ).rows == [  # every fifth epoch, of which there is none, and the last
        ["CIFAR-100", "ResNet-8", "Baseline", "3", "4", "77.00", "76.00", "78.00", ""],
        [
            "CIFAR-100",
            "ResNet-8",
            "ProtoSeam",
            "3",
            "4",
            *(f"{v[-1]:.2f}" for v in (bands[3].mean, bands[3].low, bands[3].high)),
            "",
        ],
    ]
    fifths = dataclasses.replace(
        bands[0], epochs=[4, 5, 10, 11], mean=[1, 2, 3, 4], low=[1] * 4, high=[9] * 4
    )
    assert [row[4:6] for row in tables.curves_table([fifths], SCOPE).rows] == [
        ["5", "2.00"],
        ["10", "3.00"],
        ["11", "4.00"],
    ]


def test_a_steady_climb_does_not_waver_and_independent_errors_come_out_as_large_as_they_are() -> None:
    assert aggregate.stray({e: 10 + 0.2 * e for e in range(1, 201)}) == pytest.approx(0, abs=1e-9)
    assert aggregate.stray({e: 0.2 * e for e in range(1, 20)}) is None  # none has one five epochs later
    # ±2 in turn at every fifth epoch: each is 4 from the mean of its neighbours
    zigzag = {e: 50.0 + 2 * (-1) ** (e // 5) for e in range(5, 201, 5)}
    assert aggregate.stray(zigzag) == pytest.approx(4 / math.sqrt(1.5))
    generator = np.random.default_rng(0)
    errors = [aggregate.stray(dict(enumerate(generator.normal(40, 3, 200)))) for _ in range(100)]
    assert np.mean([e for e in errors if e is not None]) == pytest.approx(3, rel=0.03)


def test_the_papers_curves_stand_beside_ours() -> None:
    """Its first and last printed values; for one seed its mean of three wavers √3 times as much."""
    curve = aggregate.published_curve("tinyimagenet", "vit_s", "protoseam")
    assert (len(curve), curve[5], curve[100], curve[200]) == (40, 7.083, 39.367, 52.353)
    name = "tinyimagenet-vit_s-protoseam-42"
    run = row(name, 0.5)
    run["metrics"] = [{"epoch": e, "validation_accuracy": 0.4, "loss": {}} for e in range(1, 201)]
    found = reporting.part_tables("curves", {name: run}, Scope(models=("vit_s",)))
    assert found["curves"].rows[0][3:] == ["1", "5", "40.00", "40.00", "40.00", "7.08"]
    strayed = aggregate.stray(curve)
    assert strayed is not None
    assert found["wavering"].rows == [
        ["TinyImageNet", "ViT-S, linear patches", "ProtoSeam", "1", "0.00", f"{strayed * math.sqrt(3):.2f}"]
    ]
    assert "wavering" not in reporting.part_tables("curves", three_seeds(), SCOPE)  # too short to say


def test_audits_count_the_looks_at_which_the_bound_held_and_show_the_last() -> None:
    runs = three_seeds()
    names = ("risk", "sampled_loss", "mean_mismatch", "covariance_mismatch", "non_gaussianity", "bound")
    metrics = runs["cifar100-resnet8-protoseam-43"]["metrics"]
    metrics[1]["audit"] = dict(zip(names, (9.0, 1.0, 1.0, 1.0, 1.0, 4.0), strict=True))
    metrics[3]["audit"] = dict(zip(names, (1.5, 0.25, 2.0, 1.0, 3.0, 6.25), strict=True))
    assert [row[2:] for row in tables.audits(runs, SCOPE).rows] == [
        ["42", "not audited", "", "", "", "", "", ""],
        ["43", "1 of 2", "1.50", "0.25", "2.00", "1.00", "3.00", "6.25"],
        ["44", "not audited", "", "", "", "", "", ""],
    ]
    assert "audits" in reporting.part_tables("table1", runs, SCOPE)
    assert "audits" not in reporting.part_tables("table1", {}, SCOPE)


def test_the_hyperparameters_are_the_papers_beside_the_files() -> None:
    runs = three_seeds()
    runs["cifar100-resnet8-protoseam-43"]["config"]["optim"]["lr"] = 0.8
    runs["cifar100-resnet8-protoseam-43"]["rate_scale"] = 0.125  # it has rewound three times
    table = tables.hyperparameters(runs, SCOPE)
    assert table.rows == [
        ["CIFAR-100", "ResNet-8", "Baseline", "0.05", "0.002", "0.05", "0.002"],
        ["CIFAR-100", "ResNet-8", "Unlifted", "Baseline's", "Baseline's", "missing", "missing"],
        ["CIFAR-100", "ResNet-8", "ProtoSeam", "0.02", "0.002", "0.02, 0.1", "0.002"],
    ]


def test_latex_of_a_table_without_rows_still_has_its_columns() -> None:
    assert r"\begin{tabular}{ll}" in tables.latex(tables.Table("none yet", ("a", "b"), []))


def test_latex_has_booktabs_one_column_a_header_and_no_bare_specials() -> None:
    table = tables.Table(
        "50 % of a_b", ("name", "ρmax", "gain"), [["A & B", "16", "-0.50"], ["A − B", "missing", "+1"]]
    )
    assert tables.latex(table).splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"name & $\rho_{\max}$ & gain \\",
        r"\midrule",
        r"A \& B & 16 & $-$0.50 \\",
        r"A -- B & missing & +1 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\caption{50 \% of a\_b}",
        r"\end{table}",
    ]


def test_a_note_goes_into_every_form_and_takes_the_papers_columns_away() -> None:
    table = tables.table_1(aggregate.cells({}, QUICK), QUICK)
    assert "paper" not in table.header
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(table))))
    assert {r["note"] for r in rows} == {"quick: digits, small networks, not the paper's numbers"}
    assert "**quick: digits" in tables.markdown(table)
    assert "Quick: digits" in tables.latex(table)


@pytest.mark.parametrize("document", GENERATED)
def test_the_generated_tables_are_those_of_the_results(document: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.md"
    copy.write_text((ROOT / document).read_text(encoding="utf-8"), encoding="utf-8")
    runs = study.read_study(ROOT / "results" / "paper")
    found = reporting.blocks(runs, results=ROOT / "results")
    assert not reporting.fill(copy, found), (
        f"{document} differs from the raw results; run: protoseam reproduce all --table-only "
        f"--readme {' '.join(GENERATED)}"
    )
    # and other results would show
    other = {"cifar100-resnet8-baseline-42": row("cifar100-resnet8-baseline-42", 0.5)}
    assert reporting.fill(copy, reporting.blocks(other))


def test_blocks_are_rewritten_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table1:begin -->\nold\n<!-- table1:end -->\nafter\n")
    assert reporting.fill(page, {"table1": "new\n", "other": "unused\n"})
    assert page.read_text() == "before\n<!-- table1:begin -->\nnew\n<!-- table1:end -->\nafter\n"
    assert not reporting.fill(page, {"table1": "new\n"})
    with pytest.raises(ConfigError, match="no block to fill: put <!-- NAME:begin -->"):
        reporting.fill(page, {"results": "x\n"})
    page.write_bytes(b"<!-- table1:begin -->\r\nold\r\n<!-- table1:end -->\r\n")
    assert reporting.fill(page, {"table1": "new\n"})
    assert page.read_bytes() == b"<!-- table1:begin -->\r\nnew\r\n<!-- table1:end -->\r\n"
    page.write_text("<!-- a:begin -->\n<!-- a:end -->\n<!-- b:begin -->\n")
    with pytest.raises(ConfigError, match="has <!-- b:begin --> but no <!-- b:end --> behind it"):
        reporting.fill(page, {"a": "new\n", "b": "new\n"})
    with pytest.raises(ConfigError, match="cannot be read"):
        reporting.fill(tmp_path / "nowhere.md", {"results": "x\n"})


def test_the_readme_summary_says_how_many_seeds_and_the_interval() -> None:
    runs = three_seeds()
    line = next(
        x for x in reporting.blocks(runs)["results"].splitlines() if x.startswith("| CIFAR-100 | ResNet-8")
    )
    assert line == (
        "| CIFAR-100 | ResNet-8 | 77.00 (76.76) | missing (74.24) | 79.00 (78.34) | +2.00 [-0.48, +4.48] (+1.58) |"
    )
    assert "6 are in [elsewhere](elsewhere)" in reporting.blocks(runs, "elsewhere")["results"]
    del runs["cifar100-resnet8-baseline-42"]
    assert "| 77.50 (76.76), 2 of 3 seeds |" in reporting.blocks(runs)["results"]


def test_a_network_that_is_not_studied_in_full_stands_where_it_has_a_run_and_in_the_summary_with_three_seeds() -> (
    None
):
    names = [f"cifar100-vit_s-{variant}-{seed}" for variant in paper.VARIANTS for seed in paper.SEEDS]
    title = "ViT-S, linear patches"
    assert title not in "".join(reporting.blocks({}).values())
    found = reporting.blocks({names[1]: row(names[1], 0.65)})
    assert [line for line in found["table1"].splitlines() if title in line] == [
        f"| CIFAR-100 | {title} | Baseline | missing | 65.00 | missing | 65.00 |  | 65.91 | -0.91 |",
        f"| CIFAR-100 | {title} | Unlifted | missing | missing | missing | missing |  | 64.97 |  |",
        f"| CIFAR-100 | {title} | ProtoSeam | missing | missing | missing | missing |  | 70.53 |  |",
    ]
    assert title not in found["results"]
    assert "Of the study's 54 runs, 0 are in" in found["results"]
    assert found["results"].count("| ViT-S, convolutional stem | missing") == 3  # this one always stands
    complete = reporting.blocks({name: row(name, 0.65) for name in names})["results"]
    assert f"| {title} | 65.00 (65.91) | 65.00 (64.97) | 65.00 (70.53) |" in complete
    used = tables.hyperparameters({}, Scope(datasets=("cifar100",), models=("vit_s_conv",)))
    assert used.rows[0][3:5] == ["0.01", "0.0001"]
    (_, _, (_, config), *_) = PLANS["table1"](Scope(datasets=("tinyimagenet",), models=("vit_s_conv",)))
    assert (config.model, config.model_options) == ("vit_s", {"stem": "conv"})


def test_a_covariance_stands_with_its_seeds_and_its_measured_cost(tmp_path: Path) -> None:
    exact, isotropic = "cifar100-resnet8-protoseam-42", "covariance-cifar100-vit_s_conv-isotropic-44"

    def elsewhere(name: str, accuracy: float, seed: int, lr: float = 0.02, **lift: Any) -> None:
        config = to_dict(PLANNED[exact])
        config |= {"seed": seed, "optim": config["optim"] | {"lr": lr}, "lift": config["lift"] | lift}
        summary = {"config": config, "epochs": 200, "test_accuracy": accuracy, "validation_accuracy": None}
        (tmp_path / "covariance" / name).mkdir(parents=True)
        more = {"seconds": 1.0, "parameters": 1, "classes": ["a", "b"]}
        (tmp_path / "covariance" / name / "summary.json").write_text(json.dumps(summary | more))

    elsewhere("a", 0.77, 42, covariance="running")
    elsewhere("b", 0.79, 44, covariance="running")
    elsewhere("c", 0.76, 43, covariance="running", structure="diagonal")
    elsewhere("d", 0.99, 43, lr=0.05, covariance="running")  # differs in more than the covariance
    overhead = {"epochs": {"resnet8": {"overhead": {"exact": 0.2299, "running": 0.0139}}}}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "engine-h200.json").write_text(json.dumps(overhead))
    runs = {exact: row(exact, 0.78), isotropic: row(isotropic, 0.71)}
    assert [line[1:] for line in tables.covariance_table(runs, Scope(), tmp_path).rows] == [
        ["exact: one pass after each epoch", "78.00", "missing", "missing", "78.00", "+23.0 %"],
        ["running: from the training batches", "77.00", "missing", "79.00", "78.00", "+1.4 %"],
        ["running, diagonal", "missing", "76.00", "missing", "76.00", "not measured"],
        ["isotropic: ρ⁻¹, nothing is estimated", "missing", "missing", "71.00", "71.00", "not measured"],
    ]


def test_every_committed_run_with_another_covariance_is_in_the_table_and_not_run_again() -> None:
    results = ROOT / "results"
    runs = aggregate.adopt(study.read_study(results / "paper"), Scope(), results)
    shown = tables.markdown(tables.covariance_table(runs, Scope(), results))
    for file in results.glob("covariance/*/summary.json"):
        assert f"| {100 * read_json(file)['test_accuracy']:.2f} |" in shown, file
    assert "covariance-cifar100-vit_s_conv-running-42" in runs


def test_the_search_of_unlifted_is_sorted_by_validation_and_shares_a_run_with_table_1() -> None:
    own, usual = "grid-cifar100-resnet8-unlifted-0.1-0.0005-42", "cifar100-resnet8-unlifted-42"
    runs = {name: row(name, 0.5) for name in (own, usual)}
    runs[own] |= {"test_accuracy": None, "validation_accuracy": 0.77}
    runs[usual]["validation_accuracy"] = 0.75
    table = reporting.part_tables("unlifted-grid", runs, Scope())["unlifted-grid"]
    assert table.rows[:2] == [["0.1", "0.0005", "77.00"], ["0.05", "0.002", "75.00"]]
    assert [line[2] for line in table.rows[2:]] == ["missing"] * 18
    assert "Unlifted 75.00, Baseline missing, ProtoSeam missing" in table.caption
    runs[own]["validation_accuracy"] = 1.0
    table = reporting.part_tables("unlifted-grid", runs, Scope())["unlifted-grid"]
    assert [line[2] for line in table.rows[:2]] == ["100.00", "75.00"]


def test_the_cost_of_the_study_is_one_line() -> None:
    names = [f"cifar100-resnet8-baseline-{seed}" for seed in paper.SEEDS]
    runs = {name: row(name, 0.7) | {"environment": {"device": "H200"}} for name in names}
    runs[names[0]] |= {"seconds": 3600.0}  # of before costs were kept
    runs[names[1]] |= {
        "seconds": 1.0,
        "cost": {"seconds": 7200.0, "joules": 3.6e6, "metered_seconds": 7200.0},
    }
    assert tables.cost_line({**runs, "toy": {"rows": []}}) == (
        "Cost: 3 runs, 3.0 hours of training on H200 (runs that shared a device count in full); energy 3.60 MJ "
        "(1.00 kWh) over 1 of them."
    )
