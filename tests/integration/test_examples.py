"""Every example runs as it stands; the README's loop has test_documents.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# What each must have said by its end, where that says it worked.
SAYS = {
    "01_lift_your_model": r"test accuracy 9\d\.\d %",
    "02_halves_and_split": r"refused: .*right after GELU",
    "03_covariance_estimators": r"exact → running +9\d\.\d %",
    "04_custom_loss_and_weights": r"frequency +rare digits",
    "05_save_resume_deploy": r"bitwise the same: True",
    "06_functions_only": r"test accuracy 9\d\.\d %",
    "07_ddp_two_processes": r"same in both: True",
    "08_fine_tune": r"new classes 9\d\.\d %",
    "timm_train": r"ResNet: validation accuracy of the average 9\d\.\d %",
}


def test_the_examples_are_the_ones_that_are_checked() -> None:
    assert {path.stem for path in EXAMPLES} == set(SAYS)
    too_long = [path.name for path in EXAMPLES if len(path.read_text().splitlines()) >= 60]
    assert not too_long


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    said = capfd.readouterr().out
    assert re.search(SAYS[path.stem], said), said
