"""Three real workers, two of them killed: every run once, none lost, the numbers of a worker alone.

The machinery is that of ``torture/workers.py``, whose long form has thirty kills, and a PostgreSQL server.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

GRID = ((0.01, 0.02, 0.03), (1e-4, 5e-4, 1e-3))


@pytest.fixture(scope="module")
def workers() -> ModuleType:
    path = Path(__file__).parents[3] / "torture" / "workers.py"
    spec = importlib.util.spec_from_file_location("torture_workers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["sweep", "study"])
def test_two_of_three_workers_are_killed_and_nothing_is_lost(
    workers: ModuleType, kind: str, tmp_path: Path
) -> None:
    outcome = workers.trial_of(
        kind, tmp_path / kind, kills=2, epochs=3, grid=GRID, patience=0.1, replace=False, seed=7
    )
    assert outcome["kills"] == 2
    assert outcome["finished"] == outcome["trials"] == 9
    assert outcome["lost"] == outcome["run_twice"] == outcome["left_behind"] == 0
    assert outcome["equal"]


@pytest.mark.parametrize(
    ("journal", "twice"),
    [
        ([(1, "a", 0), (1, "a", 1), (2, "b", 0)], set()),
        ([(1, "a", 0), (2, "a", 0)], {"a"}),
        ([(1, "a", 0), (1, "killed", 0), (2, "a", 0), (2, "a", 1)], set()),
        ([(1, "a", 0), (2, "a", 0), (1, "killed", 0)], {"a"}),  # 2 did not wait for 1 to die
        ([(1, "a", 0), (1, "killed", 0), (2, "a", 0), (1, "a", 1)], {"a"}),
        ([(1, "a", 0), (2, "b", 0), (1, "a", 1)], set()),
    ],
)
def test_the_journal_shows_what_was_run_twice(
    workers: ModuleType, journal: list[tuple[int, str, int]], twice: set[str]
) -> None:
    assert workers.ran_twice(journal) == twice
