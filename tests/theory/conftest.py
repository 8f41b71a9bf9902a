"""Makes the naive oracles of tests/reference importable by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
