"""docs/architecture.md against a run: the functions it lists exist, and run in that order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from protoseam.lab.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
COMMAND = ["--data=digits", "--model=mlp", "--epochs=1", "--augment=none", "--device=cpu", "--lift.dim=4"]


def test_a_batch_goes_the_way_that_the_page_lists(tmp_path: Path) -> None:
    listed = re.findall(r"^\d+\. `([\w.]+)`:", PAGE.read_text(), re.MULTILINE)
    assert 8 <= len(listed) <= 12
    order: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            name = f"{module.removeprefix('protoseam.')}.{frame.f_code.co_qualname}"
            if name in listed and name not in order:
                order.append(name)

    sys.setprofile(profile)
    try:
        code = main(["train", *COMMAND, "--quiet", "--no-page", "--out", str(tmp_path / "run")])
    finally:
        sys.setprofile(None)
    assert code == 0
    assert order == listed
