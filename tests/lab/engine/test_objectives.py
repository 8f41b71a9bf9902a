"""The contract of objectives."""

from __future__ import annotations

import pytest
from torch import Tensor

from protoseam.lab.engine.objectives import AbstractObjective


def test_an_unfinished_objective_fails_when_it_is_made() -> None:
    class Unfinished(AbstractObjective):
        terms = ("total",)

        def logits(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"deploy.*forward"):
        Unfinished()  # type: ignore[abstract]
