"""The epochs of a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any

from protoseam.errors import ArgumentError, ArgumentTypeError
from protoseam.seam.guards import check_not_empty, length_of

if TYPE_CHECKING:
    from protoseam.seam.lifted import Lifted


def each_epoch(
    net: Lifted, loader: Iterable[Any], epochs: int, start: int, looked_at: Iterable[Any]
) -> Iterator[int]:
    """See :meth:`Lifted.epochs`."""
    if not isinstance(epochs, Integral) or not isinstance(start, Integral):
        raise ArgumentTypeError(
            f"net.epochs(loader, epochs) takes the data first and then a whole number of epochs, got {loader!r:.60} "
            f"and {epochs!r:.60}{f', start={start!r}' if start else ''}"
        )
    if not 0 <= start <= epochs or epochs < 1:
        raise ArgumentError(f"need 0 ≤ start ≤ epochs and epochs ≥ 1, got start={start}, epochs={epochs}")
    for data in (loader, looked_at):
        if isinstance(data, Iterator):
            raise ArgumentTypeError(
                f"net.epochs goes over the data more than once, but a {type(data).__name__} can be read only once: "
                "pass a DataLoader or a list of batches"
            )
    check_not_empty(loader, "net.epochs")
    return _epochs(net, loader, epochs, start, looked_at)  # the checks come at once, not with the first epoch


def _epochs(
    net: Lifted, loader: Iterable[Any], epochs: int, start: int, looked_at: Iterable[Any]
) -> Iterator[int]:
    if not net.is_initialized:
        net.initialize(looked_at)
    net._checks.loop = "endless" if length_of(loader) is None else "counted"
    try:
        for epoch in range(start, epochs):
            net.set_progress(epoch, epochs, lr=net._rate)
            yield epoch
            net.refresh(looked_at)
    finally:
        net._checks.loop = None
