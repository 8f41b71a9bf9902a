"""Everything one run owns, built from its config: data, objective, optimizer, step, and the state a checkpoint holds.

:func:`protoseam.lab.engine.epoch.train_epoch` advances a :class:`Run` by an epoch, and
:mod:`protoseam.lab.engine.session` repeats that to the end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from protoseam.errors import ProtoSeamError
from protoseam.lab import kernels, models
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.engine.adamw import FlatAdamW
from protoseam.lab.engine.average import Average
from protoseam.lab.engine.config import LIFTED_DECAY, ConfigError, RunConfig, resolved
from protoseam.lab.engine.distributed import Processes
from protoseam.lab.engine.embeddings import through_last_layer
from protoseam.lab.engine.initial import normalisation_of, read_tensors, take_over
from protoseam.lab.engine.mixing import Mixing
from protoseam.lab.engine.objectives import AbstractObjective, Casting, build_objective
from protoseam.lab.engine.optim import FlatOptimizer, FlatSGD
from protoseam.lab.engine.step import TrainStep, learning_rates
from protoseam.lab.pipeline.augment import Augmentation
from protoseam.lab.pipeline.resident import Resident
from protoseam.seam import heads
from protoseam.seam.classifier import find_classifier, get_layer
from protoseam.seam.groups import table_decay

_MOST_STEPS = 10**7  # the learning rate of each is kept


class DivergedError(ProtoSeamError, FloatingPointError):
    """A loss or gradient was not finite and was not applied, or the weights have grown too large."""


def resolve_device(name: str) -> torch.device:
    """Return the device that a config names; ``auto`` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but this machine has no CUDA device: use device=cpu or auto")
    return device


class _Precision(NamedTuple):
    """How a run computes: ``low`` copies of float32 weights, or autocast, or float32 throughout."""

    images: torch.dtype
    low: torch.dtype | None
    autocast: torch.dtype | None


def _precision(config: RunConfig, device: torch.device, world: int) -> _Precision:
    cuda = device.type == "cuda"
    native = cuda and torch.cuda.get_device_capability(device) >= (8, 0)
    if config.precision == "float32" or (config.precision == "auto" and not native):
        return _Precision(torch.float32, None, None)
    # this project's networks train on bf16 copies of float32 weights; others, and several processes, autocast
    copies = cuda and world == 1 and config.model in models.NAMES
    low = torch.bfloat16
    return _Precision(low, low if copies else None, None if copies else low)


class Run:
    """Everything one run owns. ``epoch`` counts the finished epochs."""

    def __init__(self, config: RunConfig, dataset: ArrayDataset, processes: Processes | None = None) -> None:
        self.config = config = resolved(config)
        self.processes = processes or Processes()
        self.device = self.processes.device or resolve_device(config.device)
        precision = _precision(config, self.device, self.processes.world)
        self.casting = Casting(self.device.type, precision.autocast)
        self.data = self._build_data(dataset, precision.images)
        torch.manual_seed(config.seed)  # initial weights: drawn on the CPU, the same on every device
        model = models.build(
            config.model, self.data.num_classes, self.data.sample_shape, **config.model_options
        )
        if config.model not in models.NAMES:
            models.refuse_unfit(config.model, model, self.data.sample_shape)
        self._classifier = _classifier_of(model, self.data.num_classes)
        self.objective: AbstractObjective = build_objective(config, model, self.data.num_classes)
        self.objective.to(self.device)
        if not self.data.flat:
            self.objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if precision.low is not None:
            kernels.accelerate(self.objective, self.data.sample_shape)
        self.optimizer = self._build_optimizer(precision.low)
        self.first_size = self.optimizer.size()
        self.average = (
            None if config.average is None else Average(config.average, self.objective, self.optimizer)
        )
        mixes = config.mixup > 0 or config.cutmix > 0
        self.mixing = Mixing(self.data, mixup=config.mixup, cutmix=config.cutmix) if mixes else None
        self.generator = torch.Generator(self.device)
        lr, _ = config.optim.resolved()
        self.rates = learning_rates(lr, config.epochs, self.data.steps, config.optim.warmup_epochs)
        self.step = TrainStep(
            self.processes.wrap(self.objective),
            len(self.objective.terms),
            self.optimizer,
            self.data,
            self.rates,
            casting=self.casting,
            generator=self.generator,
            graph=config.graph and self.processes.world == 1,
            keep_going=config.on_nonfinite == "skip",
            average=self.average,
            mixing=self.mixing,
        )
        self.epoch = 0
        self.rate_scale = 1.0
        self.temperature = 1.0  # of the deployed network's logits
        self.seconds = 0.0
        self._initial: str | None = None

    def _build_data(self, dataset: ArrayDataset, dtype: torch.dtype) -> Resident:
        config = self.config
        data = Resident(
            dataset,
            seed=config.seed,
            batch_size=config.batch_size,
            validation=config.validation,
            policy=Augmentation() if _augmented(config, dataset) else None,
            device=self.device,
            dtype=dtype,
            compile=config.compile,
            compile_at_once=config.deterministic,
            rank=self.processes.rank,
            world=self.processes.world,
        )
        if config.epochs * data.steps > _MOST_STEPS:
            raise ConfigError(
                f"{config.epochs:,} epochs of {data.steps:,} steps are {config.epochs * data.steps:,} steps; "
                f"a run has at most {_MOST_STEPS:,}: lower epochs, or raise batch_size"
            )
        return data

    def _build_optimizer(self, low: torch.dtype | None) -> FlatOptimizer:
        optim = self.config.optim
        lr, decay = optim.resolved()
        if optim.weight_decay is None:  # resolved() leaves it to the data
            table = len(self.data.sample_shape) == 1
            decay = table_decay(lr, self.data.steps) if table else LIFTED_DECAY
        self.weight_decay = decay
        kind = FlatAdamW if optim.name == "adamw" else FlatSGD
        return kind(
            self.objective.param_groups(lr, decay),
            momentum=optim.momentum,
            low=low,
            keep=_float32_parameters(self.objective),
            clip=optim.clip or None,
        )

    def start(self) -> str | None:
        """Load the network of ``init_from`` before the first epoch; return a sentence about it, or None.

        The inputs are then normalised as they were there, which is what the network was trained on.
        """
        if self.config.init_from is None or self._initial is not None:
            return self._initial
        source = Path(self.config.init_from).expanduser()
        tensors = read_tensors(source)
        with self.optimizer.full_precision():
            self._initial = take_over(tensors, self.objective.deployed_tensors(), self._classifier, source)
        self.optimizer.synchronise()
        self.first_size = self.optimizer.size()
        theirs = normalisation_of(source)
        if theirs is not None and len(theirs[0]) == len(self.data.mean):
            self.data.mean.copy_(torch.tensor(theirs[0]))
            self.data.std.copy_(torch.tensor(theirs[1]))
        return self._initial

    def slow_down(self, factor: float = 0.5) -> None:
        """Scale all remaining learning rates, after a divergence."""
        self.rate_scale *= factor
        self.step.rates.mul_(factor)
        self.rates = self.rates * factor

    # ------------------------------------------------------------------ evaluation: the deployed network

    def accuracy(self, split: str) -> float | None:
        """Return the accuracy of N2∘N1 on the validation or test data; None if that split is empty."""
        right, count = self.right(split)
        return sum(right) / sum(count) if sum(count) else None

    @torch.no_grad()
    def right(self, split: str) -> tuple[list[int], list[int]]:
        """Return how many samples of each class N2∘N1 answers rightly, and how many there are."""
        self.objective.eval()
        found = torch.zeros(2, self.data.num_classes, dtype=torch.int64, device=self.device)
        with self.averaged():
            for x, y in self.data.batches(split):
                with self.casting():
                    logits = self.objective.logits(x)
                found[0].index_add_(0, y, (logits.argmax(1) == y).long())
                found[1].index_add_(0, y, torch.ones_like(y))
        right, count = found.tolist()
        return right, count

    def averaged(self) -> AbstractContextManager[None]:
        """Give the network its averaged weights inside the context, if the run keeps an average."""
        return nullcontext() if self.average is None else self.average.applied()

    def deployed(self) -> nn.Module:
        """Return the plain network with float32 weights; averaged ones, if the run keeps an average."""
        with self.averaged(), self.optimizer.full_precision():
            plain = kernels.unaccelerate(self.objective.deploy())
        if self.temperature != 1:
            last = get_layer(plain, find_classifier(plain, self.data.num_classes))
            heads.scale_logits(last, 1 / self.temperature)
        return plain

    @torch.no_grad()
    def calibrate(self) -> None:
        """Fit the temperature of what :meth:`deployed` returns, if the config asks for it and the data suffices."""
        labels = self.data.validation[1]
        if not self.config.calibrate or len(labels) < heads.FEW_HELD_OUT:
            return
        self.temperature = 1.0
        held_out = self.data.batches("validation")
        z, logits, last = through_last_layer(self.deployed(), self.data.num_classes, held_out)
        if z is not None and last is not None and torch.allclose(last.cpu()(z), logits, rtol=1e-3, atol=1e-4):
            self.temperature = heads.temperature_of(logits, labels.cpu())

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: tensors and plain numbers."""
        self._settle()
        with self.optimizer.full_precision():
            objective = {k: v.detach().clone() for k, v in self.objective.state_dict().items()}
        return {
            "objective": objective,
            "optimizer": self.optimizer.state_dict(),
            "counter": int(self.step.counter),
            "epoch": self.epoch,
            "rate_scale": self.rate_scale,
            "seconds": self.seconds,
            **({} if self.average is None else {"average": self.average.state_dict()}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self._settle()
        self.optimizer.load_state_dict(state["optimizer"])
        with self.optimizer.full_precision():
            self.objective.load_state_dict(state["objective"])
        self.optimizer.synchronise()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.epoch, self.seconds = state["epoch"], state["seconds"]
        # not the state's own number: an epoch of data that has changed since has more or fewer steps
        self.step.counter.fill_(self.epoch * self.data.steps)
        self.slow_down(state["rate_scale"] / self.rate_scale)

    def _settle(self) -> None:
        """Make the current stream wait for all work that the run has queued."""
        if self.step.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.step.stream)


def _classifier_of(model: nn.Module, num_classes: int) -> str | None:
    try:
        return find_classifier(model, num_classes)
    except ValueError:  # a classifier that is no Linear
        return None


def _augmented(config: RunConfig, dataset: ArrayDataset) -> bool:
    if config.augment == "auto":
        shape = dataset.sample_shape
        return len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= 32
    return config.augment == "paper"


def _float32_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that keep float32: those of normalisation layers, and prototypes."""
    kept: set[nn.Parameter] = set()
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            kept.update(m.parameters(recurse=False))
        kept.update(p for name, p in m.named_parameters(recurse=False) if name == "prototypes")
    return kept
