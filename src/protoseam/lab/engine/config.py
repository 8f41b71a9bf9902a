"""What a run is, as plain data: everything needed to train the same network again.

Config stops at the engine: models, seams and loaders get numbers and tensors, never a config.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from protoseam.errors import ProtoSeamError
from protoseam.seam.options import DEFAULT_DIM, OPTIONS, ClassWeights, Init

_MOST_EPOCHS, _MOST_LIFTED = 10**6, 2**16
_LARGEST = 1e300
Variant = Literal["baseline", "unlifted", "protoseam"]


class ConfigError(ProtoSeamError, ValueError):
    """A setting is unknown, of the wrong kind, or contradicts another one."""


# Settings on which a run's numbers do not depend: where it runs, and how often it is audited and saved.
BESIDE = ("data_root", "device", "audit_every", "checkpoint_every")
# Learning rate and weight decay by optimizer. adamw: torch.optim.AdamW's own.
_RATES = {"sgd": (0.02, 5e-4), "adamw": (1e-3, 1e-2)}
LIFTED_DECAY = 0.3  # adamw's for the user's own images; docs/own-data.md has the measurement
_OWN_CLIP = 1.0  # for the user's own data; docs/own-data.md has the measurement
_PAPER_SPEED = 1.0  # the paper trains N2 and S like the rest
CATALOGUED_BATCH = 128  # in the paper's recipes; the paper does not state it


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, with linear warm-up and cosine decay (paper, protocol).

    Args:
        lr: peak learning rate; null takes the optimizer's default, 0.02 for sgd and 0.001 for adamw.
        weight_decay: on every parameter, the prototypes included; null takes the optimizer's default, 5e-4 for sgd
            and 0.01 for adamw (torch's). protoseam with adamw takes 0.3 for your own images and 1/(10·lr·steps of an
            epoch) for your own tables, which N1 would otherwise fit too closely.
        momentum: Nesterov momentum, or adamw's first beta; the paper does not state it.
        warmup_epochs: length of the linear warm-up; the paper says "short".
        name: sgd (with Nesterov momentum; paper, protocol) or adamw (with decoupled weight decay). null: adamw for
            your own data, else sgd.
        clip: largest global norm of the gradients; longer ones are scaled down to it. null: none for a catalogued
            data set, else 1.0: small batches can otherwise end any rate's training at chance. 0: none.
    """

    lr: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.9
    warmup_epochs: float = 5.0
    name: Literal["sgd", "adamw"] | None = None
    clip: float | None = None

    def resolved(self) -> tuple[float, float]:
        """Return (learning rate, weight decay), with the optimizer's defaults where the config names none."""
        lr, decay = _RATES[self.name or "sgd"]
        return lr if self.lr is None else self.lr, decay if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True)
class LiftConfig:
    """The seam (unlifted uses ``dim`` only).

    Args:
        dim: seam width k (paper, protocol).
        rho_min: ρ at the first epoch; the paper does not state it.
        rho_max: ρ at the last epoch (paper, protocol).
        alpha: {alpha}.
        repulsion: {repulsion_scale}.
        covariance: estimator of each class's covariance Σ̂.
        structure: structure of the covariances.
        floor: σ0, or "auto" for σ0* of the bound; the paper does not state it.
        draws: {draws}. A catalogued data set takes 1 where none is given (paper).
        antithetic: {antithetic}.
        init: {init}.
        class_weights: {class_weights}.
        clean_pass: exact covariance from clean images instead of the epoch's augmented ones.
        seam_speed: learning rate of N2 and the prototypes, relative to N1's; null: 1 for a catalogued data set (the
            paper), 30 for data of one's own, where N2 and the prototypes would fall behind.
        bounded: keep gradients within the limits that follow from the objective, so that rates usual for
            cross-entropy rarely diverge; null: only for data of one's own (the paper does not).
        refit: {refit}. null: only for data of one's own (the paper does not).
    """

    dim: int = DEFAULT_DIM
    rho_min: float = 1.0
    rho_max: float = 16.0
    alpha: float = OPTIONS["alpha"].default
    repulsion: float | None = OPTIONS["repulsion_scale"].default
    covariance: Literal["exact", "running", "isotropic", "switch"] = "exact"
    structure: Literal["full", "diagonal", "shared"] = "full"
    floor: float | Literal["auto"] = 0.1
    draws: int | None = OPTIONS["draws"].default
    antithetic: bool = OPTIONS["antithetic"].default
    init: Init = OPTIONS["init"].default
    class_weights: ClassWeights = OPTIONS["class_weights"].default
    clean_pass: bool = False
    seam_speed: float | None = None
    bounded: bool | None = None
    refit: bool | None = None


LiftConfig.__doc__ = (LiftConfig.__doc__ or "").format(**{k: v.description for k, v in OPTIONS.items()})


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        data: a catalogued name (``protoseam data list``) or the path of an image folder or .npz.
        data_root: directory of the data sets; default $PROTOSEAM_DATA or the user's cache.
        model: resnet8, resnet18, vit_s, convnet, mlp, or any timm name.
        model_options: keyword arguments of the model.
        variant: baseline (the plain model), unlifted (its seam, end to end) or protoseam.
        seed: seed of the initial weights, the split, the order, the augmentation and the samples.
        epochs: number of epochs.
        batch_size: samples per step; the paper does not state it. null: 128 for a catalogued data set; for your
            own data the largest power of two from 8 to 128 with which an epoch has 20 steps.
        validation: fraction of the training data held out, stratified.
        augment: the paper's pipeline (crop, flip, RandAugment, erasing), none, or auto: the paper's for colour
            images of 32 pixels or more, none for digits and tables, which a flip turns into something else.
        image_size: resize images so that their shorter side has this many pixels, and crop the centre to a square;
            for image files of any sizes. null: images stay as they are and must have one size.
        mixup: mix pairs of images and their labels; α of the Beta distribution of the shares, e.g. 0.2. 0: never.
        cutmix: paste a rectangle of one image into another and mix their labels by area; α of the Beta distribution
            of the shares, e.g. 1.0. 0: never. With mixup as well, each batch takes one of the two at random.
        label_smoothing: share of a target spread evenly over all classes, e.g. 0.1.
        average: decay of an exponential moving average of the weights, e.g. 0.999; the average is then what is
            evaluated, saved and deployed. null: no average.
        calibrate: after the last epoch fit one temperature to the validation data and multiply it into the network's
            last layer, so that probabilities match frequencies; its answers stay as they are. Needs 50 validation
            samples. null: only for data of one's own.
        init_from: a finished run's directory, or a .safetensors file, whose network training starts from. A
            classifier of another shape is left out.
        optim: the optimizer.
        lift: the seam.
        device: auto, cpu, cuda or cuda:N.
        precision: auto (bf16 on CUDA, float32 on a CPU), bf16 or float32.
        compile: augment by kernels on CUDA: Triton's up to 64×64 pixels, torch.compile's beyond.
        graph: capture the whole training step in one CUDA graph.
        deterministic: bit-identical repeats, at some cost in speed.
        on_nonfinite: what to do when a loss or gradient is not finite. stop: end the run at the last good state;
            skip: leave that step out; rewind: go back an epoch and on with half the learning rate.
        checkpoint_every: epochs between checkpoints.
        eval_every: epochs between validation passes (the last epoch always has one).
        audit_every: epochs between theory audits on the validation data, and one after the last; 0: never.
        keep_embeddings: test images whose embeddings the summary keeps, in two dimensions, for a picture; 0: none.
    """

    data: str = "digits"
    data_root: str | None = None
    model: str = "convnet"
    model_options: dict[str, Any] = field(default_factory=dict)
    variant: Variant = "protoseam"
    seed: int = 42
    epochs: int = 200
    batch_size: int | None = None
    validation: float = 0.1
    augment: Literal["auto", "paper", "none"] = "auto"
    image_size: int | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    average: float | None = None
    calibrate: bool | None = None
    init_from: str | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    lift: LiftConfig = field(default_factory=LiftConfig)
    device: str = "auto"
    precision: Literal["auto", "bf16", "float32"] = "auto"
    compile: bool = True
    graph: bool = True
    deterministic: bool = False
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    checkpoint_every: int = 10
    eval_every: int = 1
    audit_every: int = 0
    keep_embeddings: int = 0

    def __post_init__(self) -> None:
        for name, fits, words in _RANGES:
            value = operator.attrgetter(name)(self)
            if value is not None and not fits(value):
                raise ConfigError(f"{name} {words}, got {value}")
        if not self.data:
            raise ConfigError("data is empty: name a data set, or a path")
        if self.audit_every < 0 or (self.audit_every and not self.validation):
            raise ConfigError(
                f"audit_every={self.audit_every} with validation={self.validation}: it is a number of epochs (0: "
                "never), and an audit needs validation data; set audit_every to 0 or hold some out"
            )
        lift = self.lift
        if lift.antithetic and lift.draws is not None and lift.draws % 2:
            raise ConfigError(f"lift.antithetic draws in pairs: lift.draws must be even, got {lift.draws}")
        OPTIONS["alpha"].check("lift.alpha", lift.alpha, ConfigError)
        OPTIONS["repulsion_scale"].check("lift.repulsion", lift.repulsion, ConfigError)
        if not 0 < lift.rho_min <= lift.rho_max:
            raise ConfigError(
                f"lift needs 0 < rho_min ≤ rho_max, got rho_min={lift.rho_min} and rho_max={lift.rho_max}"
            )
        if self.variant != "baseline" and lift.covariance == "isotropic" and lift.floor == "auto":
            raise ConfigError("lift.floor=auto needs an estimated covariance; isotropic estimates none")
        moving = lift.covariance in ("running", "switch")
        if (self.mixup or self.cutmix) and self.variant == "protoseam" and moving:
            raise ConfigError(
                f"lift.covariance={lift.covariance} estimates class covariances from the training batches, and "
                "a mixed image belongs to no single class: with mixup or cutmix set lift.covariance to exact (a pass "
                "over unmixed images after each epoch) or isotropic"
            )


# Each setting's range as a test and in words; NaN passes no test, null passes all.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("epochs", lambda v: v >= 1, "must be at least 1"),
    ("epochs", lambda v: v <= _MOST_EPOCHS, f"must be at most {_MOST_EPOCHS:,}"),
    ("batch_size", lambda v: v >= 1, "must be at least 1"),
    ("image_size", lambda v: v >= 4, "must be at least 4"),
    ("checkpoint_every", lambda v: v >= 1, "must be at least 1"),
    ("eval_every", lambda v: v >= 1, "must be at least 1"),
    ("seed", lambda v: 0 <= v < 2**63, "must be at least 0 and below 2**63"),
    ("validation", lambda v: 0 <= v < 1, "is a fraction in [0, 1)"),
    ("keep_embeddings", lambda v: v >= 0, "is a number of test images"),
    ("mixup", lambda v: 0 <= v < math.inf, "is α of a Beta distribution, 0 (never) or more"),
    ("cutmix", lambda v: 0 <= v < math.inf, "is α of a Beta distribution, 0 (never) or more"),
    ("label_smoothing", lambda v: 0 <= v < 1, "is a share in [0, 1)"),
    ("average", lambda v: 0 < v < 1, "is the decay of an average of weights, between 0 and 1 (e.g. 0.999)"),
    ("optim.warmup_epochs", lambda v: 0 <= v < _LARGEST, "must be a number from 0 on"),
    ("optim.lr", lambda v: v > 0, "must be positive"),
    ("optim.clip", lambda v: v >= 0, "is the largest norm of the gradients, 0 for no limit"),
    ("optim.momentum", lambda v: 0 <= v < 1, "must lie in [0, 1)"),
    ("optim.weight_decay", lambda v: v >= 0, "cannot be negative"),
    ("lift.dim", lambda v: v >= 1, "must be at least 1"),
    ("lift.dim", lambda v: v <= _MOST_LIFTED, f"must be at most {_MOST_LIFTED:,}"),
    ("lift.floor", lambda v: v == "auto" or v > 0, "must be positive, or auto"),
    ("lift.draws", lambda v: v >= 1, "must be at least 1"),
    ("lift.draws", lambda v: v <= _MOST_LIFTED, f"must be at most {_MOST_LIFTED:,}"),
    ("lift.seam_speed", lambda v: 0 < v < math.inf, "must be positive"),
)


def to_dict(config: RunConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def resolved(config: RunConfig) -> RunConfig:
    """Return the config with those defaults filled in that depend on other settings but not on the data.

    A run keeps this form, so that it resumes with the same numbers in a version with other defaults.
    """
    from protoseam.lab.data.loading import is_catalogued
    from protoseam.seam.groups import SEAM_SPEED

    def filled(section: Any, **usual: Any) -> Any:
        return dataclasses.replace(section, **{k: v for k, v in usual.items() if getattr(section, k) is None})

    own = not is_catalogued(config.data)
    optim = filled(config.optim, name="adamw" if own else "sgd")
    lr, decay = optim.resolved()
    if own and config.variant == "protoseam" and optim.name == "adamw":
        # a table's follows from its number of steps, and mlp alone takes tables
        decay = None if config.model == "mlp" else LIFTED_DECAY
    lift = filled(
        config.lift,
        seam_speed=SEAM_SPEED if own else _PAPER_SPEED,
        bounded=own,
        refit=own,
        draws=None if own or config.lift.antithetic else 1,
    )
    optim = filled(optim, lr=lr, weight_decay=decay, clip=_OWN_CLIP if own else None)
    config = filled(config, batch_size=None if own else CATALOGUED_BATCH, calibrate=own)
    return dataclasses.replace(config, optim=optim, lift=lift)


def as_begun(values: dict[str, Any]) -> dict[str, Any]:
    """Return a run's stored settings, where those that did not exist when it began get what was in force then."""
    from protoseam.lab.data.loading import is_catalogued

    if is_catalogued(str(values.get("data"))):
        return values
    before: dict[str, dict[str, Any]] = {
        "optim": {"clip": 0.0, "name": "sgd"},
        "lift": {"seam_speed": _PAPER_SPEED, "bounded": False, "refit": False},
    }
    filled = {k: {**old, **values[k]} for k, old in before.items() if isinstance(values.get(k), dict)}
    return {"calibrate": False, **values, **filled}


def unlike(there: RunConfig, here: RunConfig, *, but: Collection[str] = BESIDE) -> list[str]:
    """Return the settings in which two runs differ, as sentences, except those in ``but``."""
    from protoseam.lab.engine.settings import dotted

    theirs, ours = (dotted(to_dict(resolved(config))) for config in (there, here))
    return [f"{k}: {theirs[k]} there, {ours[k]} here" for k in ours if k not in but and theirs[k] != ours[k]]
