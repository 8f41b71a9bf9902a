"""A data set that lives on the device: uint8 images once, and each epoch's augmented, shuffled batches.

An epoch is prepared whole: order and augmentation are functions of (seed, epoch, index), so that a resumed run
sees the same images, and the training step only slices. The buffers keep their addresses from epoch to epoch,
which is what lets a CUDA graph read them.

Legend: N samples, B batch, S steps per epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protoseam.errors import DataError, DataWarning
from protoseam.lab import kernels
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.split import channel_statistics, stratified_split
from protoseam.lab.pipeline.augment import Augmentation, augment, augment_with, normalise

# Images augmented in one call: enough to fill an accelerator, few enough to bound the temporaries.
_CHUNK = 6000
# Images of one evaluation batch.
_EVALUATION_BATCH = 1000


def epoch_seed(seed: int, epoch: int, purpose: int) -> int:
    """Return a 63-bit seed for (seed, epoch, purpose), from numpy's hash of entropy words."""
    words = np.random.SeedSequence([seed, epoch, purpose]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def suitable_batch(samples: int, world: int = 1) -> int:
    """Return the largest power of two from 8 to 128 with which an epoch of ``samples`` has 20 steps.

    With fewer steps per epoch a schedule has too few updates to learn. For ``world`` processes that do not divide it,
    the next multiple of their number is returned.
    """
    batch = 128
    while batch > 8 and samples // batch < 20:
        batch //= 2
    return -(-batch // world) * world


class Resident:
    """Training, validation and test data of one run, on its device."""

    def __init__(
        self,
        dataset: ArrayDataset,
        *,
        seed: int,
        batch_size: int | None,
        validation: float = 0.1,
        policy: Augmentation | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        compile_at_once: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``batch_size`` None: :func:`suitable_batch`. ``compile`` the augmentation: from the second epoch on, which
        leaves the first step no time to wait for the compiler. The kernels for small images give the same bits;
        torch.compile, for large ones, may differ in the last, and ``compile_at_once`` is for where that must not
        depend on which epoch came first.
        """
        if batch_size is not None and batch_size % world:
            raise DataError(
                f"batch_size={batch_size} does not divide among {world} processes: choose a multiple of {world}"
            )
        self.device, self.dtype, self.seed = torch.device(device), dtype, seed
        self.classes, self.num_classes = dataset.classes, dataset.num_classes
        self.flat = dataset.train_images.ndim == 2
        self.sample_shape = dataset.input_shape
        self.policy = Augmentation.none() if policy is None or self.flat else policy
        self.rank, self.world = rank, world

        train, held = stratified_split(dataset.train_labels, validation, seed)
        if validation and not len(held):
            warnings.warn(
                f"validation={validation:g} of each class of {dataset.name} rounds to no sample: there is no "
                "validation accuracy, and no audit. Raise it, or set it to 0",
                DataWarning,
                stacklevel=2,
            )
        mean, std = channel_statistics(dataset.train_images, train)
        self.mean = torch.tensor(mean, dtype=torch.float32, device=self.device)
        # a constant channel (the border pixels of flat digits) carries nothing: leave it at zero
        self.std = torch.tensor(np.where(std > 0, std, 1.0), dtype=torch.float32, device=self.device)

        self.images, self.labels = self._put(dataset.train_images, dataset.train_labels, train)
        self.validation = self._put(dataset.train_images, dataset.train_labels, held)
        everything = np.arange(len(dataset.test_labels))
        self.test = self._put(dataset.test_images, dataset.test_labels, everything)

        self.size = len(train)
        if self.size < world:
            raise DataError(
                f"{self.size} training samples cannot be shared by {world} processes: start fewer"
            )
        if batch_size is None:
            batch_size = suitable_batch(self.size, world)
        self.batch_size = min(batch_size, self.size - self.size % world)
        self.local_batch = self.batch_size // world
        # the steps leave out the rest of a permutation, another one each epoch; it lies behind their rows, for passes
        # that want every sample
        self.steps = self.size // self.batch_size
        rows = self.steps * self.local_batch + len(range(rank, self.size % self.batch_size, world))
        self.x = torch.empty(rows, *self.sample_shape, dtype=dtype, device=self.device)
        if not self.flat:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.y = torch.empty(rows, dtype=torch.int64, device=self.device)
        # a tensor, like the epoch, so that one compiled augmentation serves every run and epoch
        self._seed = torch.tensor(seed, device=self.device)
        self._spare: _Spare | None = None
        self._augment: Callable[..., Tensor] = augment
        self._kernels: Any = None
        triton = kernels.find("step", self.device) is not None
        self._compiles = compile and triton and self.policy != Augmentation.none()
        if self._compiles and compile_at_once:
            self._compile()

    def _compile(self) -> None:
        self._compiles = False
        found = kernels.find("augment", self.device)
        if found is not None and found.supports(self.images):
            self._kernels = found
            return
        self._augment = torch.compile(augment, fullgraph=True, dynamic=False)

    # ------------------------------------------------------------------ training

    def load_epoch(self, epoch: int) -> None:
        """Fill ``x`` and ``y`` with this process's share of the epoch's batches, then with the samples left over."""
        if self._spare is None:
            self._fill(self.x, self.y, epoch)
            return
        with self._spare.taking():
            if self._spare.epoch == epoch:
                self.x.copy_(self._spare.x)
                self.y.copy_(self._spare.y)
            else:
                self._fill(self.x, self.y, epoch)

    def prepare(self, epoch: int) -> None:
        """Make epoch ``epoch``'s batches beside the queued work of the device; on CUDA, if memory allows."""
        if self.device.type != "cuda":
            return
        if self._spare is None:
            if 8 * self.x.nbytes > torch.cuda.mem_get_info(self.device)[0]:
                return
            self._spare = _Spare(self.x, self.y)
        try:
            with self._spare.making(epoch):
                self._fill(self._spare.x, self._spare.y, epoch)
        except torch.cuda.OutOfMemoryError:  # then load_epoch makes them
            self._spare = None

    def _fill(self, x: Tensor, y: Tensor, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch, purpose=0))
        order = torch.randperm(self.size, generator=generator)
        whole, rest = order.split([self.steps * self.batch_size, self.size % self.batch_size])
        mine = whole.view(self.steps, self.batch_size)[:, self.rank :: self.world].flatten()
        indices = torch.cat([mine, rest[self.rank :: self.world]]).to(self.device, non_blocking=True)
        at = torch.full((), epoch, dtype=torch.int64, device=self.device)
        torch.index_select(self.labels, 0, indices, out=y)
        most = _CHUNK if self._kernels is None else self._kernels.chunk(self.images)
        how: dict[str, Any] = {"policy": self.policy, "seed": self._seed, "epoch": at}
        how |= {"mean": self.mean, "std": self.std}
        for lo, hi in _equal_chunks(len(indices), most):
            rows = indices[lo:hi]
            if self._kernels is not None:
                augment_with(self._kernels, x[lo:hi], self.images, rows, **how)
                continue
            images = self.images.index_select(0, rows)
            if self.policy == Augmentation.none():
                x[lo:hi] = self._normalised(images)
            else:
                x[lo:hi] = self._augment(images, rows, dtype=self.dtype, **how)
        if self._compiles:
            self._compile()

    def clean(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's training samples without augmentation, in a fixed random order."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
        for rows in order[self.rank :: self.world].split(_EVALUATION_BATCH):
            yield self._normalised(self.images[rows]), self.labels[rows]

    def batches(self, split: str, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The validation or test data, normalised, in evaluation batches; of ``rows`` alone if they are given."""
        images, labels = {"validation": self.validation, "test": self.test}[split]
        count = len(labels) if rows is None else len(rows)
        for lo in range(0, count, _EVALUATION_BATCH):
            part = slice(lo, lo + _EVALUATION_BATCH)
            chosen = part if rows is None else rows[part]
            yield self._normalised(images[chosen]), labels[chosen]

    # ------------------------------------------------------------------ helpers

    def _normalised(self, images: Tensor) -> Tensor:
        if self.flat:
            return ((images - self.mean) / self.std).to(self.dtype)
        return normalise(images, self.mean, self.std, self.dtype)

    def _put(self, images: NDArray[Any], labels: NDArray[Any], rows: NDArray[Any]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(np.ascontiguousarray(images[rows])).to(self.device)
        if not self.flat:
            chosen = chosen.permute(0, 3, 1, 2)  # NHWC in memory is channels_last
        return chosen, torch.from_numpy(labels[rows]).to(self.device)


class _Spare:
    """Another epoch's batches, made on a stream of their own while the first ones are in use."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.stream = torch.cuda.Stream(x.device)
        with torch.cuda.stream(self.stream):  # deterministic mode fills new memory, on the current stream
            self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        self.taken = torch.cuda.Event()
        self.epoch: int | None = None

    @contextmanager
    def making(self, epoch: int) -> Iterator[None]:
        self.epoch = None  # until it is whole
        self.stream.wait_event(self.taken)
        with torch.cuda.stream(self.stream):
            yield
        self.epoch = epoch

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Order the current stream's work inside the context after these batches are made and before the next are."""
        stream = torch.cuda.current_stream(self.x.device)
        stream.wait_stream(self.stream)
        yield
        self.taken.record(stream)


def _equal_chunks(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of one size that cover ``total``; the last overlaps, so a compiled function sees one shape."""
    size = -(-total // -(-total // most))
    for hi in range(size, total + size, size):
        yield min(hi, total) - size, min(hi, total)
