"""One sweep of N1 over a data loader, for FSInit and the exact covariance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from protoseam.core.precision import at_least_float32
from protoseam.errors import ArgumentError, ArgumentTypeError, SeamError
from protoseam.seam.calling import inputs_and_labels
from protoseam.seam.guards import check_not_empty, hard_labels, warn, warn_other_labels
from protoseam.seam.loaders import swept
from protoseam.seam.split import evaluating

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

# Embeddings of CIFAR at k = 32 are 6 MB, of ImageNet at k = 512 2.6 GB.
_DEVICE_BYTES = 2**28


def _moved(x: Any, device: torch.device) -> Any:
    """Inputs on the device: tensors, arrays, what can move itself, and those in containers; the rest as it is."""
    if isinstance(x, Tensor) or (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc"):
        return torch.as_tensor(x).to(device, non_blocking=True)
    if callable(
        getattr(x, "to", None)
    ):  # before containers: a PackedSequence is a tuple that keeps sizes on the CPU
        return x.to(device)
    if isinstance(x, Mapping):
        return {key: _moved(part, device) for key, part in x.items()}
    if isinstance(x, list | tuple):
        parts = [_moved(part, device) for part in x]
        if all(part is own for part, own in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def collect_embeddings(
    module: LiftedNetwork,
    embed: Callable[[Any], Tensor],
    loader: Iterable[Any],
    device: torch.device,
    what: str,
) -> tuple[Tensor, Tensor]:
    """``(z_NK, y_N)`` of the loader's data, each sample once, ≥ float32, without gradients, in eval mode.

    They stay on the device while they are small beside what a device holds anyway, else on the host.
    """
    zs: list[Tensor] = []
    ys: list[Tensor] = []
    size = 0
    before: Any = None
    shape: torch.Size | None = None
    if isinstance(loader, Mapping):
        raise ArgumentTypeError(
            f"{what} got a dict with the keys {', '.join(map(repr, list(loader)[:8]))}, not a loader: give it one of "
            "the dict's, loaders['train'] for instance"
        )
    if first := what == "initialize":
        check_not_empty(loader, what)
    with as_deployed(module, untrained=first) as fresh, swept(loader) as batches, torch.no_grad():
        for batch in batches:
            inputs, labels = inputs_and_labels(batch, what)
            x, y = _moved(inputs, device), torch.as_tensor(labels).to(device, non_blocking=True)
            if y.ndim == 0:
                raise ArgumentError(
                    f"{what} got single samples where batches were expected: pass a loader, as in "
                    "DataLoader(data, batch_size=64, shuffle=True)"
                )
            y = _labels(y, what)
            if first and not zs:
                module._checks.parts = 2 if isinstance(batch, Mapping) else len(batch)
                warn_other_labels(batch)
            # a normalisation without statistics cannot take them from one sample: it goes with the batch before
            joined = fresh and isinstance(x, Tensor) and len(x) == 1 and isinstance(before, Tensor)
            try:
                z = at_least_float32(embed(torch.cat([before, x]) if joined else x))
                z = z[-1:] if joined else z
            except RuntimeError as error:
                if shape is None or not isinstance(x, Tensor) or shape == x.shape[1:]:
                    raise
                raise ArgumentError(
                    f"{what}: the network took inputs of shape {tuple(shape)} but fails on {tuple(x.shape[1:])}: "
                    f"bring all of them to one size ({error})"
                ) from error
            before, shape = x, x.shape[1:] if isinstance(x, Tensor) else None
            size += z.nbytes
            if size > _DEVICE_BYTES and device.type != "cpu":
                z, y = z.cpu(), y.cpu()
                if zs and zs[0].device.type != "cpu":
                    zs, ys = [t.cpu() for t in zs], [t.cpu() for t in ys]
            zs.append(z)
            ys.append(y)
    if zs and zs[0].ndim != 2:
        raise SeamError(
            f"the network returned {tuple(zs[0].shape)} for a batch where (batch, numbers) was expected: lifting is "
            "for one label per sample. Pool tokens or pixels before the last layer"
        )
    if not zs:
        raise ArgumentError(
            f"{what} got an empty loader: was it a generator, used up by the loop before? Pass a "
            "DataLoader, which can be iterated again"
        )
    if fresh and _mostly_one_class(ys):
        warn(
            f"{what}: most batches hold one class only, and the network's BatchNorm layers, which have no statistics "
            "yet, normalise each batch by itself: the classes fall together. Shuffle the loader"
        )
    return torch.cat(zs), torch.cat(ys)


def _labels(y: Tensor, what: str) -> Tensor:
    """A class per sample; soft targets have one only where they are one-hot."""
    if not (y.is_floating_point() and y.ndim == 2 and y.shape[1] > 1):
        return y
    labels = hard_labels(y)
    if labels is None:
        raise ArgumentError(
            f"{what} needs the class of each sample, but the loader yields mixed targets (mixup, CutMix or label "
            "smoothing). Give it an unmixed loader of the same data: net.epochs(loader, epochs, sweep=clean_loader), "
            f"or net.{what}(clean_loader)"
        )
    return labels


def _mostly_one_class(ys: list[Tensor]) -> bool:
    several = [y for y in ys if len(y) > 1]
    pure = sum(bool((y == y[0]).all()) for y in several)
    return 2 * pure > len(several) and any(bool(y[0] != several[0][0]) for y in several)


@contextmanager
def as_deployed(module: nn.Module, untrained: bool = True) -> Iterator[bool]:
    """Eval mode, except that a BatchNorm which has seen no data yet uses its batch's statistics; are there such?

    Before the first step running statistics are 0 and 1, so eval mode would skip normalisation and FSInit
    would put the prototypes where training never is. Such layers keep their running statistics untouched. A BatchNorm
    that is trained in eval mode counts no batch either, but ``net(x)`` uses its statistics, and so does a sweep. If the
    whole network is in eval mode, its layers count as new only before training (``untrained``).
    """
    whole = untrained and not module.training
    fresh = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        and (m.training or whole)
        and m.num_batches_tracked is not None
        and int(m.num_batches_tracked) == 0
    ]
    kept = [(b, b.clone()) for m in fresh for b in m.buffers()]
    with evaluating(module):
        for m in fresh:
            m.train()
        try:
            yield bool(fresh)
        finally:
            for b, before in kept:
                b.copy_(before)
