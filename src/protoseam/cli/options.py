"""What several commands make of the same option."""

from __future__ import annotations

import os

from protoseam.engine.config import ConfigError, RunConfig

__all__ = ["budget_seconds", "spare_threads"]


def budget_seconds(minutes: float | None) -> float | None:
    if minutes is not None and not minutes > 0:
        raise ConfigError(
            f"the budget must be more than 0 minutes, got {minutes:g}; leave it out for no limit"
        )
    return None if minutes is None else 60 * minutes


def spare_threads(config: RunConfig) -> None:
    """The digits' networks lose more than they gain by sharing cores, unless the user has said how many.

    For a resumed run as well: with other threads sums would be taken in another order.
    """
    if config.data == "digits" and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)
