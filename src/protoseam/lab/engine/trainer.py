"""A training run: builds everything from a config, goes epoch by epoch, evaluates only the deployed network.

:class:`Run` is one run; :func:`~protoseam.lab.engine.pack.run_epoch_together` advances it, and others beside it, by an
epoch, and :mod:`protoseam.lab.engine.session` drives that to the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.core.devices import cuda_kernels
from protoseam.errors import ProtoSeamError
from protoseam.lab import kernels, models
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.engine.adamw import FlatAdamW
from protoseam.lab.engine.auditing import quick_audit
from protoseam.lab.engine.average import Average
from protoseam.lab.engine.config import ConfigError, RunConfig, resolved
from protoseam.lab.engine.distributed import Processes
from protoseam.lab.engine.initial import read_tensors, take_over
from protoseam.lab.engine.mixing import Mixing
from protoseam.lab.engine.objectives import build_objective
from protoseam.lab.engine.optim import FlatSGD
from protoseam.lab.engine.rundata import RunData
from protoseam.lab.engine.step import TrainStep, learning_rates
from protoseam.lab.pipeline.augment import Augmentation
from protoseam.lab.pipeline.resident import Resident, epoch_seed
from protoseam.seam.classifier import find_classifier
from protoseam.seam.passes import as_deployed

__all__ = ["DivergedError", "Run", "resolve_device"]


def resolve_device(name: str) -> torch.device:
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


# Weights this many times their size at the start mean nothing any more; sound training stays below 10.
_LOST = 100.0
_MANY_CLASSES = 1000
_MOST_STEPS = 10**7  # the rate of each is kept
_DROPOUT = 2**16  # where its seeds begin: above those of the processes' samples
_REMEDY = "Lower optim.lr, let ρ grow more slowly (more epochs, a smaller lift.rho_max), or set on_nonfinite to rewind"


class DivergedError(ProtoSeamError, FloatingPointError):
    """A loss or gradient was not finite, and was not applied, or the weights have grown out of all bounds."""

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        self.run = run


class Run:
    """Everything one run owns. ``epoch`` counts the finished epochs."""

    def __init__(self, config: RunConfig, dataset: ArrayDataset, processes: Processes | None = None) -> None:
        self.config = config = resolved(config)
        self.processes = processes or Processes()
        self.device = self.processes.device or resolve_device(config.device)
        cuda = self.device.type == "cuda"
        triton = cuda and cuda_kernels(torch.empty(0, device=self.device)) is not None
        native = cuda and torch.cuda.get_device_capability(self.device) >= (8, 0)
        bf16 = config.precision == "bf16" or (config.precision == "auto" and native)
        # our own networks train on bf16 copies of float32 weights; others, and several processes, autocast
        fast = cuda and bf16 and self.processes.world == 1 and config.model in models.NAMES
        self.data = Resident(
            dataset,
            seed=config.seed,
            batch_size=config.batch_size,
            validation=config.validation,
            policy=Augmentation() if _augmented(config, dataset) else None,
            device=self.device,
            dtype=torch.bfloat16 if bf16 else torch.float32,
            compile=config.compile and triton,
            compile_at_once=config.deterministic,
            rank=self.processes.rank,
            world=self.processes.world,
        )
        torch.manual_seed(config.seed)  # initial weights: drawn on the CPU, the same on every device
        model = models.build(
            config.model, self.data.num_classes, self.data.sample_shape, **config.model_options
        )
        self._classifier = _classifier_of(model, self.data.num_classes)
        self.objective = build_objective(config, model, self.data.num_classes)
        self.objective.to(self.device)
        if not self.data.flat:
            self.objective.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if fast and triton:
            kernels.accelerate(self.objective, self.data.sample_shape)
        lr, decay = config.optim.resolved()
        kind = FlatAdamW if config.optim.name == "adamw" else FlatSGD
        self.optimizer = kind(
            self.objective.param_groups(lr, decay),
            momentum=config.optim.momentum,
            low=torch.bfloat16 if fast else None,
            keep=_float32_parameters(self.objective),
            clip=config.optim.clip or None,
        )
        self.first_size = self.optimizer.size()
        self.average = (
            None if config.average is None else Average(config.average, self.objective, self.optimizer)
        )
        mixes = config.mixup > 0 or config.cutmix > 0
        self.mixing = Mixing(self.data, mixup=config.mixup, cutmix=config.cutmix) if mixes else None
        self.generator = torch.Generator(self.device)
        if config.epochs * self.data.steps > _MOST_STEPS:
            raise ConfigError(
                f"{config.epochs:,} epochs of {self.data.steps:,} steps are {config.epochs * self.data.steps:,} steps; "
                f"a run has at most {_MOST_STEPS:,}: lower epochs, or raise batch_size"
            )
        rates = learning_rates(lr, config.epochs, self.data.steps, config.optim.warmup_epochs)
        self.rates = rates
        self.step = TrainStep(
            self.processes.wrap(self.objective),
            len(self.objective.terms),
            self.optimizer,
            self.data,
            rates,
            autocast=torch.bfloat16 if bf16 and not fast else None,
            generator=self.generator,
            graph=config.graph and self.processes.world == 1,
            keep_going=config.on_nonfinite == "skip",
            average=self.average,
            mixing=self.mixing,
        )
        self.epoch = 0
        self.rate_scale = 1.0
        self.seconds = 0.0
        self._initial: str | None = None

    def start(self) -> str | None:
        """Take over the network of ``init_from`` before the first epoch; returns a sentence about it, or None.

        The inputs are then normalised as that run's were, which is what its network is used to.
        """
        if self.config.init_from is None or self._initial is not None:
            return self._initial
        source = Path(self.config.init_from).expanduser()
        tensors = read_tensors(source)
        with self.optimizer.full_precision():
            self._initial = take_over(tensors, self.objective.deployed_tensors(), self._classifier, source)
        self.optimizer.synchronise()
        self.first_size = self.optimizer.size()
        theirs = RunData.read(source) if source.is_dir() else None
        if theirs is not None and len(theirs.mean) == len(self.data.mean):
            theirs.normalise(self.data)
        return self._initial

    # ------------------------------------------------------------------ an epoch, in three parts

    def begin_epoch(self) -> None:
        """Prepare the epoch's images and ρ; before the first, FSInit and the capture of the step."""
        self._clock = time.perf_counter()
        if self.epoch == 0:
            self.start()
        self.data.load_epoch(self.epoch)
        if self.epoch == 0:
            self.objective.begin(self._sweep)
            if self.average is not None:
                self.average.restart()
        if self.mixing is not None:
            self.mixing.begin_epoch(self.config.seed, self.epoch)
        self.objective.train()
        self.step.capture(self.state, self.load_state)
        self._seed(self.epoch)  # warming up and capturing drew numbers
        self.objective.begin_epoch(
            self.epoch, self.config.epochs, float(self.rates[self.epoch * self.data.steps])
        )
        self.step.begin_epoch()

    def end_epoch(self) -> dict[str, Any]:
        """Refresh Σ̂, validate, and return the epoch's metrics."""
        last = self.epoch + 1 == self.config.epochs
        skipped = int(self.step.bad)
        if skipped and not (self.step.keep_going and skipped < self.data.steps):
            raise DivergedError(self._diagnosis(), self)
        size = self.optimizer.size()
        if not size <= _LOST * self.first_size:
            raise DivergedError(
                f"the weights have grown to {size / self.first_size:.3g} times their size at the start by epoch "
                f"{self.epoch + 1}: training has diverged, though every number is still finite. {self._remedy()}",
                self,
            )
        self.processes.share_buffers(self.objective)
        self.objective.end_epoch(self._sweep)
        sums = self.processes.mean(self.step.sums / (self.data.steps - skipped)).tolist()
        terms = dict(zip(self.objective.terms, sums, strict=True))
        validate = last or (self.epoch + 1) % self.config.eval_every == 0
        accuracy = self.accuracy("validation") if validate else None
        every = self.config.audit_every
        audit = None
        if every and (last or (self.epoch + 1) % every == 0):
            with self.averaged():
                audit = quick_audit(self)
        seconds = time.perf_counter() - self._clock
        self.seconds += seconds
        self.epoch += 1
        return {
            "epoch": self.epoch,
            "loss": terms,
            "rho": self._rho(),
            "lr": float(self.rates[self.epoch * self.data.steps - 1]),
            "validation_accuracy": accuracy,
            "images_per_second": self.data.steps * self.data.batch_size / seconds,
            "seconds": seconds,
            "seam": self.objective.geometry(),
            **({} if audit is None else {"audit": audit}),
            **({"skipped_steps": skipped} if skipped else {}),
        }

    @torch.no_grad()
    def _diagnosis(self) -> str:
        """Step, term and class of the first loss or gradient that was not finite; the network is as it was then."""
        step = int(self.step.first_bad)
        rows = slice(
            (step % self.data.steps) * self.data.local_batch,
            (step % self.data.steps + 1) * self.data.local_batch,
        )
        x, y = self.data.x[rows], self.data.y[rows]
        self.objective.train()
        losses = self.step.losses(*self.step.batch(self.step.first_bad)).tolist()
        named = zip(self.objective.terms, losses, strict=True)
        terms = [name for name, value in named if not math.isfinite(value) and name != "total"]
        what = f"the {' and '.join(terms) or 'total'} loss" if not math.isfinite(losses[0]) else "a gradient"
        bad = ~torch.isfinite(self._cast(self.objective.logits, x)).all(1)
        classes = sorted({self.data.classes[c] for c in y[bad].tolist()})
        whose = f", with non-finite outputs for class {', '.join(classes[:8])}" if classes else ""
        return f"step {step} (epoch {self.epoch + 1}) was not applied: {what} was not finite{whose}. {self._remedy()}"

    def _remedy(self) -> str:
        n = self.data.num_classes
        if n < _MANY_CLASSES or self.config.variant != "protoseam" or self.config.lift.repulsion is not None:
            return _REMEDY
        pairs = f"With {n:,} classes the repulsion sums {n * (n - 1) // 2:,} pairs"
        return f"{pairs}: try lift.repulsion={1 / n:.0e}. {_REMEDY}"

    def slow_down(self, factor: float = 0.5) -> None:
        """Scale all remaining learning rates, after a divergence."""
        self.rate_scale *= factor
        self.step.rates.mul_(factor)
        self.rates = self.rates * factor

    def prepare_next(self) -> None:
        """The next epoch's images, while the device works off this epoch's steps."""
        if self.epoch + 1 < self.config.epochs:
            self.data.prepare(self.epoch + 1)

    # ------------------------------------------------------------------ evaluation: the deployed network

    @torch.no_grad()
    def accuracy(self, split: str) -> float | None:
        """Accuracy of N2∘N1 on the validation or test data; None if that split is empty."""
        self.objective.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        seen = 0
        with self.averaged():
            for x, y in self.data.batches(split):
                correct += (self._cast(self.objective.logits, x).argmax(1) == y).sum()
                seen += len(y)
        return int(correct) / seen if seen else None

    def averaged(self) -> AbstractContextManager[None]:
        """Within, the network has its averaged weights, if the run keeps an average."""
        return nullcontext() if self.average is None else self.average.applied()

    @torch.no_grad()
    def _sweep(self, embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings of the training data: the epoch's own augmented images, or the clean ones."""
        with as_deployed(self.objective):
            if self.config.lift.clean_pass:
                pairs = [(self._cast(embed, x).float(), y) for x, y in self.data.clean()]
                return torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs])
            rows = list(self.data.x.split(self._sweep_rows()))
            # a normalisation without statistics cannot take them from one image
            if len(rows) > 1 and len(rows[-1]) == 1:
                rows[-2:] = [self.data.x[-1 - len(rows[-2]) :]]
            return torch.cat([self._cast(embed, x).float() for x in rows]), self.data.y

    def _sweep_rows(self) -> int:
        """Images in one batch of a sweep: many enough to fill the device, few enough to stay small beside it."""
        return min(4096, max(64, 2**21 // math.prod(self.data.sample_shape[-2:]) // 64 * 64))

    def _cast(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.step.autocast is None:
            return function(x)
        with torch.autocast(self.device.type, self.step.autocast):
            return function(x)

    def deployed(self) -> nn.Module:
        """The plain network, with float32 weights; averaged ones, if the run keeps an average."""
        with self.averaged(), self.optimizer.full_precision():
            return kernels.unaccelerate(self.objective.deploy())

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: tensors and plain numbers."""
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
        self._settle()
        self.optimizer.load_state_dict(state["optimizer"])
        with self.optimizer.full_precision():
            self.objective.load_state_dict(state["objective"])
        self.optimizer.synchronise()
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step.counter.fill_(state["counter"])
        self.epoch, self.seconds = state["epoch"], state["seconds"]
        self.slow_down(state["rate_scale"] / self.rate_scale)

    def _settle(self) -> None:
        """Whatever comes now on the current stream comes after all that the run still has to do."""
        if self.step.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.step.stream)

    def _seed(self, epoch: int) -> None:
        """Samples and dropout of an epoch depend on (seed, epoch) alone, so a resumed run draws the same."""
        samples, dropout = 1 + self.processes.rank, _DROPOUT + self.processes.rank
        self.generator.manual_seed(epoch_seed(self.config.seed, epoch, purpose=samples))
        torch.manual_seed(epoch_seed(self.config.seed, epoch, purpose=dropout))

    def _rho(self) -> float | None:
        net = getattr(self.objective, "net", None)
        return None if net is None else float(net.rho)


def _classifier_of(model: nn.Module, num_classes: int) -> str | None:
    try:
        return find_classifier(model, num_classes)
    except ValueError:  # one that is no Linear
        return None


def _augmented(config: RunConfig, dataset: ArrayDataset) -> bool:
    if config.augment == "auto":
        shape = dataset.sample_shape
        return len(shape) == 3 and shape[2] == 3 and min(shape[:2]) >= 32
    return config.augment == "paper"


def _float32_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that no low-precision copy may replace: normalisation layers and prototypes."""
    kept: set[nn.Parameter] = set()
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            kept.update(m.parameters(recurse=False))
        kept.update(p for name, p in m.named_parameters(recurse=False) if name == "prototypes")
    return kept
