"""Work on tensors of fixed shapes as CUDA graphs: for short kernels, one launch instead of a hundred.

Data in: a function, the tensors and numbers it is called with, and the other tensors it reads; data out: what it
returns, in memory that the next call overwrites. It owns the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from protoseam.errors import SeamError

__all__ = ["Graphs"]

Input = Tensor | list[Tensor] | float | None
Work = Callable[..., Any]

_MOST = 8  # kinds of calls remembered: hard and soft targets, training or not


class Graphs:
    """Calls of a function; two of a kind in a row are captured at the second, and replayed from then on.

    A graph reads and writes fixed addresses, so two calls are of one kind if all that they read besides their inputs
    lies where it did. What comes once in a while, as an epoch's last batch, is not worth a graph.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._last: Graph | None = None

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()  # a copy of the network lies elsewhere, and captures its own

    def run(
        self,
        work: Work,
        inputs: Sequence[Input],
        *,
        reads: Iterable[Tensor],
        kind: Hashable,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Return ``work(*inputs)``, from copies of the inputs; its tensors are valid until the next call.

        Args:
            work: the function. It must not wait for the device, and what it does may depend on ``kind`` alone besides
                the values of tensors.
            inputs: its arguments: tensors, None, lists of tensors of shapes that follow from ``reads``, and numbers,
                which it gets as scalar tensors and which may change from call to call.
            reads: all other tensors that it reads or writes.
            kind: what else decides on its operations.
            generator: that it draws from, besides the device's default one.

        Raises:
            SeamError: the function cannot be captured.
        """
        forms = tuple(
            (i.shape, i.dtype) if isinstance(i, Tensor) else len(i) if isinstance(i, list) else type(i)
            for i in inputs
        )
        key = kind, forms, tuple(t.data_ptr() for t in reads), id(generator)
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) == _MOST:
                self._graphs.pop(next(iter(self._graphs)))
            graph = self._graphs[key] = Graph(work, inputs, generator)
        again, self._last = graph is self._last, graph
        return graph.run(inputs, capture=again)


class Graph:
    """One kind of call: its inputs' places, the numbers there, and the captured graph with its outputs."""

    def __init__(self, work: Work, inputs: Sequence[Input], generator: torch.Generator | None) -> None:
        self._device = next(i.device for i in inputs if isinstance(i, Tensor))
        self._places = [None if i is None else self._place(i) for i in inputs]
        self._numbers = [i if isinstance(i, float) else None for i in inputs]
        self._work, self._generator = work, generator
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None

    def _place(self, value: Tensor | list[Tensor] | float) -> Tensor | list[Tensor]:
        if isinstance(value, list):
            return [torch.empty_like(t) for t in value]
        if isinstance(value, Tensor):
            return value.detach().to(self._device, copy=True)
        return torch.full((), value, device=self._device)

    @torch.no_grad()
    def _fill(self, inputs: Sequence[Input]) -> None:
        for at, (place, value) in enumerate(zip(self._places, inputs, strict=True)):
            if isinstance(place, list) and isinstance(value, list):
                torch._foreach_copy_(place, value)
            elif isinstance(place, Tensor) and isinstance(value, Tensor):
                place.copy_(value)
            elif isinstance(place, Tensor) and isinstance(value, float) and value != self._numbers[at]:
                place.fill_(value)
                self._numbers[at] = value

    def run(self, inputs: Sequence[Input], *, capture: bool) -> Any:
        """Return what the function returns for inputs of the same forms as the first."""
        self._fill(inputs)
        if self._replay is None and not capture:
            return self._work(*self._places)
        if self._replay is None:
            self._replay = self._captured()
        self._replay()
        return self._outputs

    def _captured(self) -> Callable[[], None]:
        """Record the function without running it; return what runs the record."""
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        stream = torch.cuda.Stream(self._device)
        try:
            # thread_local: a DataLoader's thread may pin memory meanwhile
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                torch.clear_autocast_cache()  # a copy of a weight made before would be read for ever
                self._outputs = self._work(*self._places)
                torch.clear_autocast_cache()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise SeamError(
                f"the seam's work cannot be captured in a CUDA graph ({reason}): call "
                "net.backward(…, capture=False), which launches it piece by piece"
            ) from error
        return graph.replay
