"""The class users hold: a classifier lifted at one seam.

It owns N1, N2, the prototypes S, the penalty ρ and a covariance estimator. ``net(x)`` is always the deployed
network's logits; ``net(x, y)`` the loss terms. No gradient crosses from N2 to N1.

Legend: B batch, C classes, K seam width.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from protoseam.core.covariance import check_one_label_each, class_moments
from protoseam.core.discriminant import pooled_covariance
from protoseam.core.distances import mahalanobis
from protoseam.core.initializers import forward_sweep
from protoseam.core.objective import Loss, consensus, repulsion, sampled_classification
from protoseam.core.sampling import check_draws
from protoseam.core.schedules import Schedule, SineAnneal, rho_at
from protoseam.seam.bounding import GradientBounds, bounded, watched_features
from protoseam.seam.calling import accepted_names, call
from protoseam.seam.classifier import deploy_at, deploy_halves, last_linear
from protoseam.seam.covariance import DEFAULT_FLOOR, AbstractCovariance, Refreshed, RunningCovariance
from protoseam.seam.groups import layer_of, names_without_decay, parameter_groups
from protoseam.seam.guards import (
    SeamError,
    SeamWarning,
    StepGuard,
    check_batch,
    check_embeddings,
    check_labels,
    check_output,
    check_terms,
    first_output,
    hard_labels,
    refuse_sharded,
    report_floors,
    warn_collapse,
    warn_counts,
    warn_halves,
    warn_one_sided,
)
from protoseam.seam.heads import refit_linear, scale_logits, temperature_of
from protoseam.seam.loop import LoopGuard, each_epoch
from protoseam.seam.passes import collect_embeddings
from protoseam.seam.processes import all_reduce, broadcast, world_size
from protoseam.seam.prototypes import Init, first_prototypes
from protoseam.seam.split import evaluating
from protoseam.seam.state import KeepsState

__all__ = ["Lifted", "Terms"]

ClassWeights = Literal["uniform", "frequency"]


class Terms(NamedTuple):
    """The lifted objective, eq:combinedLoss, each term with its weight; ``total`` is their sum."""

    total: Tensor
    consensus: Tensor
    classification: Tensor
    repulsion: Tensor


class Lifted(KeepsState):
    """N2∘N1 with one Gaussian prototype per class at the seam. Made by :func:`protoseam.lift`."""

    rho: Tensor
    progress: Tensor
    class_count: Tensor
    ready: Tensor

    def __init__(
        self,
        n1: nn.Module,
        n2: nn.Module,
        *,
        num_classes: int,
        dim: int,
        seam_shape: tuple[int, ...] | None = None,
        seam_layer: str | None = None,
        covariance: AbstractCovariance | None = None,
        schedule: Schedule | None = None,
        init: Init | Tensor = "fsinit",
        alpha: float = 2.0,  # paper, eq:penalty
        repulsion_scale: float | None = None,  # None: tied to ρ, the paper's remark (i)
        draws: int | None = None,
        antithetic: bool = False,
        class_weights: ClassWeights = "uniform",  # remark (ii)
        loss_fn: Loss | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if class_weights not in ("uniform", "frequency"):
            raise ValueError(f"class_weights must be 'uniform' or 'frequency', got {class_weights!r}")
        if covariance is not None and not isinstance(covariance, AbstractCovariance):
            raise TypeError(
                f"covariance must be an estimator such as ps.ExactCovariance(floor=0.1), got {covariance!r}"
            )
        if schedule is not None and (isinstance(schedule, type) or not callable(schedule)):
            raise TypeError(f"schedule must be a schedule such as ps.SineAnneal(1, 16), got {schedule!r}")
        draws = _default_draws(num_classes, antithetic) if draws is None else draws
        check_draws(draws, antithetic)
        if not 0 < alpha < math.inf:
            raise ValueError(
                f"alpha is the rate at which repulsion fades with distance: positive, got {alpha}"
            )
        if repulsion_scale is not None and not 0 <= repulsion_scale < math.inf:
            raise ValueError(f"repulsion_scale must be 0 or more, or None for ρ; got {repulsion_scale}")
        if not 0 <= label_smoothing < 1 or (label_smoothing and loss_fn is not None):
            raise ValueError(
                f"label_smoothing={label_smoothing}: it is a fraction in [0, 1) of N2's cross-entropy; with a loss_fn "
                "of your own, smooth there"
            )
        self.n1, self.n2 = n1, n2
        self.num_classes, self.dim = num_classes, dim
        self.seam_shape, self.seam_layer = seam_shape or (dim,), seam_layer
        self.schedule: Schedule = SineAnneal() if schedule is None else schedule
        self.alpha, self.repulsion_scale = alpha, repulsion_scale
        self.draws, self.antithetic, self.class_weights = draws, antithetic, class_weights
        self.loss_fn, self.label_smoothing = loss_fn, label_smoothing
        self.init = init if isinstance(init, str) else "given"
        device = next((p.device for p in n1.parameters()), torch.device("cpu"))
        self.prototypes = nn.Parameter(first_prototypes(init, num_classes, dim).to(device))
        self.covariance = RunningCovariance() if covariance is None else copy.deepcopy(covariance)
        self.covariance.bind(num_classes, dim)
        self.covariance.to(device)
        rho = rho_at(self.schedule, 1, 2)  # where it ends: a loop without set_progress has no ramp
        self.covariance.begin(rho)
        self.keep(
            rho=torch.tensor(rho, device=device),
            progress=torch.tensor([0, 1], device=device),
            class_count=torch.zeros(num_classes, dtype=torch.int64, device=device),
            ready=torch.tensor(self.init != "fsinit", device=device),
        )
        self._ready, self._counted, self._looked = bool(self.ready), False, False
        self._samples = 0  # of the training data, once counted
        self.register_load_state_dict_post_hook(_after_load)
        self._guard, self._loop = StepGuard(), LoopGuard()
        self._bounds: GradientBounds | None = None
        self._groups: list[dict[str, Any]] | None = None
        self._trained_on: set[str] = set()  # since the last refresh: "hard" or "mixed" targets
        self._proved, self._names = seam_layer is None, accepted_names(n1)
        self._whole = False  # whether the parameters were seen not to be sharded
        self._last_terms: Tensor | None = None

    # ------------------------------------------------------------------ the network

    @overload
    def forward(self, x: Tensor, y: None = None, *, generator: torch.Generator | None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Terms: ...
    def forward(
        self, x: Tensor, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor | Terms:
        """Logits of the deployed network, or with labels the loss terms (so that DDP and others can wrap it)."""
        if y is None:
            z = call(self.n1, x, self._names)
            check_output(self.n1, z)
            logits: Tensor = self.n2(z)
            return logits
        eager = not torch.compiler.is_compiling()
        if eager and not self._whole:
            refuse_sharded(self)
            self._whole = True
        if eager and self._bounds is not None and torch.is_grad_enabled():
            with watched_features(last_linear(self.n1, self.seam_layer)) as seen:
                z_BK = self.embed(x)
            self._bounds.feature_square = seen[-1] if seen else None
        else:
            z_BK = self.embed(x)
        if eager:
            y = self._before_step(z_BK, y)
        terms = self._terms(z_BK, y, generator)
        if eager:
            self._after_step(terms, z_BK, y)
        if self.training and not y.is_floating_point():
            self.covariance.observe(z_BK.detach(), y)
        return terms

    def objective(self, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Terms:
        """The loss terms of a batch: ``net(x, y)`` by another name.

        Args:
            x: inputs of N1.
            y: labels ``(B,)``, int64; or soft targets ``(B, n)``, float, as mixup and CutMix yield them. N1 is then
                pulled to Σ_c q_c s_c; one-hot rows count as labels.
            generator: of the samples that N2 learns from; torch's default one unless given.

        Returns:
            ``Terms``; ``.total`` is the one to minimise.
        """
        terms: Terms = self(x, y, generator=generator)
        return terms

    def embed(self, x: Tensor) -> Tensor:
        """N1(x), as ``(B, K)``."""
        if not self._proved and not torch.compiler.is_compiling():
            z = first_output(self.n1, self.seam_layer or "", self.dim, x, self._names)
            self._proved = True
            return z
        z = call(self.n1, x, self._names)
        check_output(self.n1, z)
        return z if len(self.seam_shape) == 1 else z.flatten(1)

    def head(self, z_BK: Tensor) -> Tensor:
        """N2 on embeddings ``(B, K)``, in the head's own dtype."""
        parameter = next(self.n2.parameters(), None)
        z = z_BK if parameter is None else z_BK.to(parameter.dtype)
        logits: Tensor = self.n2(z if len(self.seam_shape) == 1 else z.unflatten(1, self.seam_shape))
        return logits

    def score_ood(self, x: Tensor) -> Tensor:
        """Score how unlike the training data inputs are: the squared Mahalanobis distance to the nearest prototype.

        min_c (z − s_c)ᵀ Σ̃_c⁻¹ (z − s_c) at z = N1(x), with the covariances as last refreshed. Use it in eval mode.

        Args:
            x: inputs of N1.

        Returns:
            ``(B,)``, float64; larger is less like the training data.

        Raises:
            SeamError: if the prototypes have no values yet.
        """
        self._check_ready()
        return mahalanobis(self.embed(x), self.prototypes, self.covariance.factors).amin(1)

    def _terms(self, z_BK: Tensor, y_B: Tensor, generator: torch.Generator | None) -> Terms:
        pull = self.consensus(z_BK, y_B)
        classify, push = self.apart(self.prototypes, generator)
        total = pull + classify + push
        if self._bounds is not None and total.requires_grad and not torch.compiler.is_compiling():
            total = bounded(self, total, pull, self._bounds)
        return Terms(total, pull, classify, push)

    def consensus(self, z_BK: Tensor, y_B: Tensor) -> Tensor:
        """The one term that looks at the images, given their embeddings."""
        return consensus(z_BK, y_B, self.prototypes, self.rho)

    def apart(self, prototypes_CK: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sampled classification and repulsion: no image enters them, so they can be computed beside N1."""
        classify = sampled_classification(
            self.head,
            prototypes_CK,
            self.covariance.factors,
            draws=self.draws,
            antithetic=self.antithetic,
            generator=generator,
            loss_fn=self.loss_fn,
            class_weights=self._weights(),
            label_smoothing=self.label_smoothing,
        )
        weight = self.rho if self.repulsion_scale is None else self.repulsion_scale
        return classify, weight * repulsion(prototypes_CK, self.alpha)

    def _weights(self) -> Tensor | None:
        if self.class_weights == "uniform":
            return None
        return self.class_count.float() / self.class_count.sum()

    # ------------------------------------------------------------------ the training loop's calls

    def param_groups(
        self,
        lr: float,
        weight_decay: float | None = None,
        *,
        seam_lr: float | None = None,
        body_lr: float | None = None,
        prototype_lr: float | None = None,
        prototype_weight_decay: float | None = None,
        bounded: bool = True,
    ) -> list[dict[str, Any]]:
        """Groups for any torch optimizer: N1 at your rate, N2 and the prototypes faster.

        Args:
            lr: N1's learning rate, what you would take for cross-entropy.
            weight_decay: of N1; N2 and the prototypes get as much less as their rate is higher, so that a step shrinks
                all weights by the same share. Without it the optimizer's applies to N1, and the seam has none.
            seam_lr: rate of N2 and the prototypes; 30·lr unless given.
            body_lr: rate of N1 without the seam's own Linear, for fine-tuning; 0 freezes the body
                (``requires_grad`` becomes False). ``lr`` unless given.
            prototype_lr: rate of the prototypes, if it shall differ from ``seam_lr``.
            prototype_weight_decay: of the prototypes, if it shall differ from N2's.
            bounded: keep each backward's gradients within the limits of :mod:`protoseam.core.bounds`, which follow from
                these rates; False leaves the gradients as they are (the paper's recipes).

        Returns:
            Dicts with ``name``, ``params``, ``lr`` and, where told, ``weight_decay``.
        """
        groups = parameter_groups(
            self.n1,
            self.n2,
            self.prototypes,
            last_linear(self.n1, self.seam_layer),
            lr=lr,
            weight_decay=weight_decay,
            seam_lr=seam_lr,
            body_lr=body_lr,
            prototype_lr=prototype_lr,
            prototype_weight_decay=prototype_weight_decay,
        )
        rates = {group["name"]: group["lr"] for group in groups}
        seam = max(rates.get("n2", 0.0), rates["prototypes"])
        self._bounds = GradientBounds(max(lr, rates.get("body", 0.0)), seam, groups) if bounded else None
        self._groups = groups
        return groups

    def epochs(
        self, loader: Iterable[Any], epochs: int, start: int = 0, *, sweep: Iterable[Any] | None = None
    ) -> Iterator[int]:
        """The epochs of a training loop, with what each needs: ``for epoch in net.epochs(loader, 40):``.

        Before the first it looks at the data (:meth:`initialize`), unless the state of a checkpoint was loaded. Each
        epoch begins with its ρ(t) (:meth:`set_progress`) and ends with new factors of Σ̃ (:meth:`refresh`). A loop
        that is left by ``break`` or an exception just ends: go on with ``start``.

        Args:
            loader: the training data, ``(inputs, labels)`` pairs; anything that can be iterated more than once.
            epochs: how many there are in all, the finished ones included.
            start: the first to train; after a checkpoint the number of finished epochs.
            sweep: another loader for the looks at the data, where ``loader`` yields mixed targets.

        Yields:
            The number of each epoch, from ``start`` to ``epochs`` − 1.
        """
        return each_epoch(self, loader, epochs, start, loader if sweep is None else sweep)

    def initialize(
        self, loader: Iterable[Any] | None = None, *, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Look at the data once: FSInit (if asked for), class counts, and the checks that need all labels.

        ``embeddings``: ``(N1(x), y)`` of the data, for callers who have swept it themselves.
        """
        refuse_sharded(self)
        z_NK, y_N = self._swept(loader, embeddings, "initialize")
        count_C, mean_CK, _ = class_moments(
            z_NK, y_N, self.num_classes, structure="diagonal", reduce=all_reduce()
        )
        self.class_count.copy_(count_C)
        if self.init == "fsinit":
            if self._ready:
                warnings.warn(
                    "the prototypes had values already, from a checkpoint or from training, and are put back on the "
                    "class means. To go on from a checkpoint, leave net.initialize out",
                    SeamWarning,
                    stacklevel=2,
                )
            with torch.no_grad():
                self.prototypes.copy_(forward_sweep(count_C, mean_CK))
        broadcast(self.prototypes.data)
        self._look(z_NK, count_C)
        self._set_ready()

    def set_progress(self, epoch: int, epochs: int, *, lr: float | None = None) -> None:
        """Start epoch ``epoch`` (from 0) of ``epochs``: sets ρ(t) and whatever follows it."""
        refuse_sharded(self)
        self._between_epochs()
        if epoch > 0:  # a compiled step has not asked
            self._check_ready()
        rho, before = (rho_at(self.schedule, at, epochs) for at in (epoch, max(epoch - 1, 0)))
        if rho > 4 * before and self._bounds is None:
            warnings.warn(
                f"ρ jumps from {before:.3g} to {rho:.3g} between epochs {max(epoch - 1, 0)} and {epoch} of {epochs}. "
                "The consensus curvature scales with lr·ρ·‖features‖², so a short schedule can diverge: train "
                "longer, raise rho_min, or lower the learning rate",
                SeamWarning,
                stacklevel=2,
            )
        self._loop.progressed()
        self.rho.fill_(rho)
        self.progress.copy_(torch.tensor([epoch, epochs]))
        self.covariance.progress(rho, lr)

    def refresh(
        self, loader: Iterable[Any] | None = None, *, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """End an epoch: new factors of Σ̃. Sweeps the loader only if the estimator needs the data."""
        self._between_epochs()
        self._check_ready()
        z_NK = y_N = None
        only_mixed = self.covariance.from_batches and self._trained_on == {"mixed"}
        self._trained_on.clear()
        if self.covariance.needs_pass or only_mixed:
            z_NK, y_N = self._swept(loader, embeddings, "refresh")
        found = self.covariance.refresh(z_NK, y_N, all_reduce())
        if found is not None:
            self._report(found)
        if z_NK is not None and not self._looked:
            self._look(z_NK, self.class_count)
        self._loop.refreshed()
        epoch, epochs = self.progress.tolist()
        if self.check_steps and epochs > 1:
            # a look must leave dropout's draws and BatchNorm's statistics as they are
            with evaluating(self.n2):
                self._loop.judge(
                    self.head, self.prototypes, self.covariance.factors, self.alpha, int(epoch), int(epochs)
                )

    @torch.no_grad()
    def refit_head(self, loader: Iterable[Any] | None = None) -> None:
        """Set N2 in closed form, as a linear discriminant; N2 must be one Linear with a bias.

        For a head that has had too few steps. Without data it is the discriminant of the prototypes and the pooled Σ̃
        as now estimated: where N2 starts well. With the training data it is that of the embeddings' own class means and
        pooled covariance, which N1 may not have brought to the prototypes yet: after a schedule of a few epochs.

        Args:
            loader: the training data, or None.
        """
        self._check_ready()
        if loader is None:
            covariance_KK = pooled_covariance(self.covariance.factors, self.dim)
            refit_linear(self.n2, self.prototypes, covariance_KK, self._weights(), what="refit_head")
            return
        z_NK, y_N = self._swept(loader, None, "refit_head")
        count_C, mean_CK, (covariance_KK,) = class_moments(
            z_NK, y_N, self.num_classes, structure="shared", reduce=all_reduce()
        )
        floored_KK = covariance_KK + DEFAULT_FLOOR**2 * torch.eye(self.dim).to(covariance_KK)
        prior_C = count_C if self.class_weights == "frequency" else None
        refit_linear(self.n2, mean_CK, floored_KK, prior_C, what="refit_head")

    @torch.no_grad()
    def calibrate(self, loader: Iterable[Any]) -> float:
        """Make the probabilities mean what they say: one temperature, by likelihood, folded into N2.

        The arg max of the logits stays as it is, and ``deploy`` carries the result. Training on undoes it step by step,
        so calibrate last.

        Args:
            loader: held-out ``(inputs, labels)`` pairs, not the training data, on which every network looks too sure.

        Returns:
            The temperature; above 1 the network was too confident.
        """
        logits_NC, y_N = collect_embeddings(
            self, lambda x: self.head(self.embed(x)), loader, self.prototypes.device, "calibrate"
        )
        check_labels(y_N, self.num_classes)
        temperature = temperature_of(logits_NC, y_N)
        scale_logits(self.n2, 1 / temperature)
        return temperature

    @torch.no_grad()
    def deploy(self, *, fold: bool = False) -> nn.Module:
        """The plain network, in eval mode: a copy that holds nothing of this library.

        ``fold=True`` multiplies the two Linears around the seam into one: the architecture as it was before
        lifting, equal up to rounding.
        """
        n1, n2 = copy.deepcopy(self.n1), copy.deepcopy(self.n2)
        if self.seam_layer is not None:
            return deploy_at(n1, self.seam_layer, n2, fold=fold).eval()
        return deploy_halves(n1, n2, fold=fold).eval()

    def no_weight_decay(self) -> set[str]:
        """The parameters that the lifted model wants without weight decay, as timm asks for them."""
        return names_without_decay(n1=self.n1, n2=self.n2)

    @property
    def group_matcher(self) -> Callable[..., Callable[[str], tuple[float, ...]]]:
        """timm's grouping of parameters by depth, for its ``layer_decay``; N2 and the prototypes are in the last group.

        There is none if the lifted model has none.
        """
        matcher: Any = self.n1.group_matcher
        return lambda coarse=False: layer_of(matcher(coarse=coarse))

    @property
    def is_initialized(self) -> bool:
        """Whether the prototypes have values and the classes were counted: by ``initialize`` or a checkpoint."""
        return self._ready and self._counted

    @property
    def _rate(self) -> float | None:
        """N1's learning rate now, as far as the optimizer works on the groups it was given."""
        return None if self._groups is None else float(self._groups[0]["lr"])

    # ------------------------------------------------------------------ guards and housekeeping

    def _swept(
        self, loader: Iterable[Any] | None, embeddings: tuple[Tensor, Tensor] | None, what: str
    ) -> tuple[Tensor, Tensor]:
        if embeddings is None:
            if loader is None:
                raise ValueError(
                    f"net.{what} needs the data: net.{what}(loader) with the training loader"
                    + (", or lift with covariance=ps.RunningCovariance()" if what == "refresh" else "")
                )
            embeddings = collect_embeddings(self, self.embed, loader, self.prototypes.device, what)
        z_NK, y_N = embeddings
        check_labels(y_N, self.num_classes)
        check_one_label_each(z_NK, y_N)
        check_embeddings(z_NK, y_N, what)
        warn_collapse(z_NK)
        return z_NK, y_N

    def _look(self, z_NK: Tensor, count_C: Tensor) -> None:
        """What only the data can tell of §design and §dimension, said once."""
        self._looked = True
        warn_one_sided(z_NK)
        warn_counts(count_C, self.dim, getattr(self.covariance, "structure", None) == "full")
        if getattr(self.covariance, "floor", None) == "auto":
            warn_halves(count_C)

    def _check_ready(self) -> None:
        if not self._ready:
            raise SeamError(
                "the prototypes have no values yet: FSInit puts them on the class means, so call "
                "net.initialize(loader) before training, or lift with init='random'"
            )

    def _before_step(self, z_BK: Tensor, y: Tensor) -> Tensor:
        """Check what can go wrong before a step; the targets, as labels where they are."""
        self._check_ready()
        if self.class_weights == "frequency" and not self._counted:
            raise SeamError(
                "class_weights='frequency' needs the class counts |D_i|: call net.initialize(loader) before training"
            )
        check_batch(z_BK, y, self.dim, self.num_classes, values=self.prototypes.device.type == "cpu")
        if y.is_floating_point() and (labels := hard_labels(y)) is not None:
            y = labels
        if self.training and torch.is_grad_enabled():
            self._trained_on.add("mixed" if y.is_floating_point() else "hard")
            if self.check_steps:
                self._guard.step(self.prototypes, self._witness())
                self._loop.step(len(y) * world_size(), self._samples, self.covariance.refreshes)
        return y

    # A training engine that looks after non-finite steps, or has the prototypes in its optimizer for sure, switches the
    # seam's own checks of them off.
    check_finite: bool = True
    check_steps: bool = True

    def _after_step(self, terms: Terms, z_BK: Tensor, y_B: Tensor) -> None:
        if not self.check_finite:
            return
        if y_B.device.type == "cpu":
            check_terms({k: v for k, v in terms._asdict().items() if k != "total"}, z_BK, y_B)
        else:
            self._last_terms = terms.total.detach()

    def _between_epochs(self) -> None:
        if self.check_steps:
            self._guard.epoch(self.prototypes, self._witness())
        if self._last_terms is not None and not bool(torch.isfinite(self._last_terms)):
            raise SeamError(
                "the objective is not finite: training has diverged. Lower the learning rate, clip gradients, or let "
                "ρ grow more slowly (a longer schedule, a smaller rho_max)"
            )

    def _witness(self) -> Tensor | None:
        """A trainable tensor outside the seam, by which the guard sees that steps are taken."""
        return next((p for p in self.n2.parameters() if p.requires_grad), None)

    def _report(self, found: Refreshed) -> None:
        if found.count_C is not None:
            self.class_count.copy_(found.count_C)
            self._counted = True
        report_floors(found.floor, found.floor_used)

    def _set_ready(self) -> None:
        self.ready.fill_(True)
        self._ready = self._counted = True
        self._samples = int(self.class_count.sum())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Lifted:
        """``net.half()`` or ``net.bfloat16()`` convert the network; the seam never goes below float32."""

        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            narrower = out.is_floating_point() and out.dtype.itemsize < min(t.dtype.itemsize, 4)
            return t.to(out.device) if narrower else out

        def keep_exactly(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype.itemsize < t.dtype.itemsize else out

        super()._apply(keep, recurse=False)
        if recurse:
            self.n1._apply(fn)
            self.n2._apply(fn)
            self.covariance._apply(keep_exactly)  # float64 moments stay float64
        return self


# alg:lifted, line 5, draws one sample per class; with few classes N2 then sees too little per step. Four per class made
# short schedules with ten classes a point better on the first-try panel.
_LEAST_SAMPLES = 64


def _default_draws(num_classes: int, antithetic: bool) -> int:
    draws = max(1, -(-_LEAST_SAMPLES // num_classes)) if num_classes < _LEAST_SAMPLES else 1
    return draws + draws % 2 if antithetic else draws


def _after_load(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, Lifted)
    module._ready, module._counted = bool(module.ready), bool(module.class_count.any())
    module._guard, module._loop = StepGuard(), LoopGuard()
    module._samples = int(module.class_count.sum())
    module._guard.moved = int(module.progress[0]) > 0
    module._last_terms = None  # going back to a checkpoint ends a divergence
