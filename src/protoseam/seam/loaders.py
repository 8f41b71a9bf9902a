"""A loader's data for one sweep: each sample once, over all processes, and the loader left as it was.

Training loaders shuffle, drop the last batch, and on several processes repeat samples until every process has equally
many. A sweep wants none of that, so it reads the same data set through a loader of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from protoseam.seam.processes import world_size


class _Share(NamedTuple):
    """What a loader reads: these samples of its data set, dealt out to ``world`` processes."""

    indices: Sequence[int]
    shuffled: bool
    rank: int = 0
    world: int = 1


@contextmanager
def swept(loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """Batches of this process's share of the data, while the loader and torch's random state stay as they are.

    A DataLoader on a map-style data set is read through another one, if its sampler is one of torch's, accelerate's,
    Lightning's, timm's or transformers' that take every sample once: without padding, with the last batch, in an order
    of its own. Any other loader is iterated itself, and its generators are put back afterwards.

    Args:
        loader: the loader a user trains with.

    Yields:
        What to iterate over.
    """
    again = _again(loader)
    generators = [] if again is not None else list(_generators(loader))
    states = [generator.get_state() for generator in generators]
    state = torch.get_rng_state()
    try:
        yield loader if again is None else again
    finally:
        torch.set_rng_state(state)
        for generator, before in zip(generators, states, strict=True):
            generator.set_state(before)


def _again(loader: Any) -> Any:
    """Another loader of the same samples, or None where this one must be iterated itself."""
    if isinstance(fabric := getattr(loader, "_dataloader", None), DataLoader):
        return fabric if (again := _again(fabric)) is None else again
    if isinstance(inner := getattr(loader, "loader", None), DataLoader):  # timm's, normalising on the device
        if (again := _again(inner)) is None:
            return None
        outer = copy.copy(loader)
        outer.loader = again
        return outer
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    own = type(loader).__iter__ is DataLoader.__iter__ or type(loader).__module__.startswith("accelerate.")
    share = _share(loader) if own else None
    if share is None:
        return None
    order = share.indices
    if share.shuffled:  # fixed, but mixed: a BatchNorm without statistics normalises each batch by itself
        generator = torch.Generator().manual_seed(0)
        order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
    same = ["num_workers", "collate_fn", "pin_memory", "worker_init_fn"]
    if loader.num_workers:
        same += ["timeout", "multiprocessing_context", "prefetch_factor"]
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_sampler.batch_size,  # type: ignore[union-attr]
        sampler=order[share.rank :: share.world],
        **{name: getattr(loader, name) for name in same},
    )


def _share(loader: DataLoader[Any]) -> _Share | None:
    """The samples a loader takes once per epoch; None if its sampler chooses in a way of its own."""
    batches: Any = loader.batch_sampler
    rank, world = 0, 1
    if hasattr(batches, "process_index") and hasattr(batches, "num_processes"):  # a shard of accelerate's
        rank, world, batches = batches.process_index, batches.num_processes, batches.batch_sampler
    elif hasattr(loader, "slice_fn") and world_size() > 1:  # accelerate's DataLoaderDispatcher
        rank, world = dist.get_rank(), world_size()
    if type(batches) is not BatchSampler:
        return None
    share = _sampled(batches.sampler, loader.dataset)
    return share if share is None or world == 1 else share._replace(rank=rank, world=world)


def _sampled(sampler: Any, dataset: Any) -> _Share | None:
    if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):  # torch's for processes, timm's two
        share: _Share | None = _Share(range(len(dataset)), bool(getattr(sampler, "shuffle", False)))
        own = getattr(sampler, "dataset", ())
        if hasattr(own, "_sampler"):  # Lightning's, around a sampler of the user's
            share = _sampled(own._sampler, dataset)
        elif len(own) != len(dataset):
            return None
        return None if share is None else share._replace(rank=sampler.rank, world=sampler.num_replicas)
    if isinstance(sampler, SubsetRandomSampler):
        return _Share(list(sampler.indices), True)
    whole = len(getattr(sampler, "data_source", ())) == len(dataset)
    if isinstance(sampler, SequentialSampler) and whole:
        return _Share(range(len(dataset)), False)
    if isinstance(sampler, RandomSampler) and whole:
        once = not sampler.replacement and sampler.num_samples == len(dataset)
        return _Share(range(len(dataset)), True) if once else None
    lengths = getattr(sampler, "lengths", ())
    if type(sampler).__module__.startswith("transformers.") and len(lengths) == len(dataset):
        return _Share(sorted(range(len(dataset)), key=lengths.__getitem__), False)  # little padding
    return None


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators that iterating over a loader would move."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    yield from found.values()
