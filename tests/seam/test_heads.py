"""N2 in closed form: what the formulas need."""

from __future__ import annotations

import pytest
from toys import batches, lifted

import protoseam as ps

DATA = batches()


def test_a_head_weighted_by_counts_needs_them() -> None:
    net = lifted(class_weights="frequency")
    with pytest.raises(ps.SeamError, match="needs the class counts"):
        net.refit_head()
    net.initialize(DATA)
    net.refit_head()
    assert net.n2.weight.isfinite().all()
