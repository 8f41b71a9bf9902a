"""What a step minimises, as interchangeable strategies: baseline, unlifted, protoseam.

An objective is a module whose call returns the loss terms of a batch as one vector, total first, so that DDP,
torch.compile and a CUDA graph can all wrap it. It owns every trained parameter.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protoseam as ps
from protoseam.errors import DataError
from protoseam.lab.engine.config import ConfigError, LiftConfig, RunConfig
from protoseam.lab.models.size import physical_memory
from protoseam.seam.covariance import AbstractCovariance

# Embeddings (N, K) of the training data, and their labels (N,).
Embeddings = tuple[Tensor, Tensor]


class Casting(NamedTuple):
    """The context of a forward pass, ``with casting():``: autocast to ``dtype``, or nothing if it is None."""

    device_type: str
    dtype: torch.dtype | None = None

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)


class AbstractObjective(nn.Module, ABC):
    """Terms of the loss, the deployed network's logits, and what happens between epochs.

    Targets ``y`` are labels (B,) or, for mixed images, probabilities (B, C).
    """

    terms: tuple[str, ...]

    @property
    def seam(self) -> ps.Lifted | None:
        """The lifted network, if the objective trains one."""
        return None

    @property
    def needs_embeddings(self) -> bool:
        """Whether :meth:`end_epoch` needs a pass over the training data."""
        return False

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the losses, ``(len(terms),)``; the first is the one to minimise."""

    def backward(
        self, x: Tensor, y: Tensor, generator: torch.Generator, side: torch.cuda.Stream, casting: Casting
    ) -> Tensor:
        """Return the losses and leave their gradients in ``p.grad``; what needs no image may run on ``side``."""
        with casting():
            losses: Tensor = self(x, y, generator)
        losses[0].backward()
        return losses.detach()

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Return what the deployed network answers."""

    @abstractmethod
    def deploy(self) -> nn.Module:
        """Return the plain network, a copy in eval mode."""

    def param_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return groups as torch.optim takes them; the first group's rate is the base rate."""
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": weight_decay}]

    @abstractmethod
    def deployed_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of :meth:`deploy`'s state by their names there; they are not copies."""

    def deployed_buffers(self) -> dict[str, Tensor]:
        """Return the deployed network's floating-point buffers by their names in this module's state."""
        deployed = {id(t) for t in self.deployed_tensors().values()}
        return {name: b for name, b in self.named_buffers() if id(b) in deployed and b.is_floating_point()}

    def begin(self, embeddings: Embeddings | None) -> None:
        """Start training, before the first epoch; ``embeddings`` are given if there is a seam."""

    def begin_epoch(self, epoch: int, epochs: int, lr: float) -> None:
        """Start epoch ``epoch`` (from 0) of ``epochs``, whose first learning rate is ``lr``."""

    def end_epoch(self, embeddings: Embeddings | None) -> None:
        """Finish an epoch; ``embeddings`` are given if :attr:`needs_embeddings`."""

    def geometry(self) -> dict[str, float]:
        """Return what the epoch's metrics say about the seam."""
        return {}


class EndToEnd(AbstractObjective):
    """Cross-entropy by ordinary backpropagation: Baseline, and Unlifted on the split architecture."""

    terms = ("total",)

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return F.cross_entropy(self.model(x).float(), y, label_smoothing=self.label_smoothing)[None]

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def deploy(self) -> nn.Module:
        return copy.deepcopy(self.model).eval()

    def deployed_tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict(keep_vars=True)


class Lifting(AbstractObjective):
    """The lifted objective, eq:combinedLoss."""

    terms = ("total", "consensus", "classification", "repulsion")

    def __init__(self, net: ps.Lifted, *, seam_speed: float = 1.0, bounded: bool = False) -> None:
        super().__init__()
        self.net, self.seam_speed, self.bounded = net, seam_speed, bounded
        net._checks.leave()  # the step looks at losses and gradients itself, and its optimizer has the prototypes

    @property
    def seam(self) -> ps.Lifted:
        return self.net

    @property
    def needs_embeddings(self) -> bool:
        return self.net.covariance.needs_pass

    def forward(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack(self.net(x, y, generator=generator))

    def backward(
        self, x: Tensor, y: Tensor, generator: torch.Generator, side: torch.cuda.Stream, casting: Casting
    ) -> Tensor:
        terms = self.net.backward(
            x, y, generator=generator, side=side, casting=casting.__call__, capture=False
        )
        return torch.stack(terms)

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def deploy(self) -> nn.Module:
        return self.net.deploy()

    def deployed_tensors(self) -> dict[str, Tensor]:
        n1, n2 = (half.state_dict(keep_vars=True) for half in (self.net.n1, self.net.n2))
        # deploy() puts Sequential(seam, N2) in the seam layer's place, or in the whole network's if there is none
        seam = f"{self.net.seam_layer}." if self.net.seam_layer else ""
        named = {
            f"{seam}0.{name.removeprefix(seam)}" if name.startswith(seam) else name: t
            for name, t in n1.items()
        }
        return named | {f"{seam}1.{name}": t for name, t in n2.items()}

    def param_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        return self.net.param_groups(lr, weight_decay, seam_lr=self.seam_speed * lr, bounded=self.bounded)

    def begin(self, embeddings: Embeddings | None) -> None:
        try:
            self.net.initialize(embeddings=embeddings)
        except ValueError as error:  # a class without a training sample
            raise DataError(f"training cannot begin: {error} (as a setting: lift.init)") from error

    def begin_epoch(self, epoch: int, epochs: int, lr: float) -> None:
        self.net.set_progress(epoch, epochs, lr=lr)

    def end_epoch(self, embeddings: Embeddings | None) -> None:
        self.net.refresh(embeddings=embeddings)

    @torch.no_grad()
    def geometry(self) -> dict[str, float]:
        s_CK, factors = self.net.prototypes.double(), self.net.covariance.factors.double()
        distances = torch.cdist(s_CK, s_CK)
        distances.fill_diagonal_(torch.inf)
        variance = factors.square().sum() if factors.ndim == 3 else factors.expand_as(s_CK).square().sum()
        count = len(factors) if factors.ndim == 3 else len(s_CK)
        values = torch.stack(
            [
                s_CK.norm(dim=1).mean(),
                distances.min(),
                distances.min(1).values.mean(),
                (variance / count).sqrt(),
            ]
        ).tolist()
        names = ("prototype_norm", "prototype_gap_min", "prototype_gap_mean", "sample_spread")
        return dict(zip(names, values, strict=True))


def build_objective(config: RunConfig, model: nn.Module, num_classes: int) -> AbstractObjective:
    """Return the objective of the config's variant on ``model``, which it takes over."""
    if config.variant == "baseline":
        return EndToEnd(model, label_smoothing=config.label_smoothing)
    if config.variant not in ("unlifted", "protoseam"):
        raise ConfigError(f"variant must be baseline, unlifted or protoseam, got {config.variant!r}")
    _refuse_too_large(config.lift, num_classes)
    try:
        net = ps.lift(
            model,
            num_classes=num_classes,
            dim=config.lift.dim,
            covariance=_covariance(config.lift),
            schedule=ps.SineAnneal(config.lift.rho_min, config.lift.rho_max),
            init=config.lift.init,
            alpha=config.lift.alpha,
            repulsion_scale=config.lift.repulsion,
            draws=config.lift.draws,
            antithetic=config.lift.antithetic,
            class_weights=config.lift.class_weights,
            label_smoothing=config.label_smoothing,
            refit=bool(config.lift.refit),
        )
    except ValueError as error:
        raise ConfigError(f"{config.model} cannot be lifted: {error}") from error
    # Unlifted is the same architecture with the same initial weights, trained end to end.
    if config.variant == "protoseam":
        speed = 1.0 if config.lift.seam_speed is None else config.lift.seam_speed
        return Lifting(net, seam_speed=speed, bounded=bool(config.lift.bounded))
    return EndToEnd(net.deploy().train(), label_smoothing=config.label_smoothing)


def _refuse_too_large(lift: LiftConfig, num_classes: int) -> None:
    """Refuse a seam whose covariances or samples, in float64 while they are made, exceed the memory."""
    entries = {"full": num_classes * lift.dim**2, "shared": lift.dim**2, "diagonal": num_classes * lift.dim}
    covariances = 0 if lift.covariance == "isotropic" else 16 * entries[lift.structure]
    samples = 16 * num_classes * (lift.draws or 1) * lift.dim
    if covariances + samples > physical_memory():
        raise ConfigError(
            f"lift.dim={lift.dim} and lift.draws={lift.draws} with {num_classes:,} classes take "
            f"{(covariances + samples) / 2**30:,.0f} GiB for covariances and samples; this machine has "
            f"{physical_memory() / 2**30:,.0f}: lower them, or choose lift.structure=diagonal"
        )


def _covariance(lift: LiftConfig) -> AbstractCovariance:
    if lift.covariance == "isotropic":
        assert lift.floor != "auto"  # RunConfig refuses it
        return ps.IsotropicCovariance(floor=lift.floor)
    kinds = {
        "exact": ps.ExactCovariance,
        "running": ps.RunningCovariance,
        "switch": ps.SwitchCovariance,
    }
    return kinds[lift.covariance](floor=lift.floor, structure=lift.structure)
