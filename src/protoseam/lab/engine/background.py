"""Something done again and again in a thread while the work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def every(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` in a thread every so many seconds while the context is open; it has ended when this returns."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, name=f"protoseam-{action.__name__}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
