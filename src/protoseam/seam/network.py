"""A classifier lifted at one seam, as a module: its two halves, its state, its logits and its loss terms.

``net(x)`` is always the deployed network's logits; ``net(x, y)`` the loss terms. No gradient crosses from N2 to N1.

Legend: B batch, C classes, K seam width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, Unpack, overload

import torch
from torch import Tensor, nn

from protoseam.core.distances import mahalanobis
from protoseam.core.objective import Loss, consensus
from protoseam.core.sampling import check_draws
from protoseam.core.schedules import Schedule, SineAnneal, rho_at
from protoseam.errors import ArgumentTypeError
from protoseam.seam.backward import backward
from protoseam.seam.bounding import GradientBounds, bounded
from protoseam.seam.calling import accepted_names, call
from protoseam.seam.checks import TrainingChecks
from protoseam.seam.covariance import AbstractCovariance, RunningCovariance
from protoseam.seam.graphs import Graphs
from protoseam.seam.groups import FollowedGroups
from protoseam.seam.guards import (
    check_output,
    first_output,
)
from protoseam.seam.options import OPTIONS, ClassWeights, Options, checked, takes_options
from protoseam.seam.prototypes import first_prototypes
from protoseam.seam.state import KeepsState
from protoseam.seam.terms import Terms, without_images

__all__ = ["LiftedNetwork"]


class LiftedNetwork(KeepsState):
    """Two halves with one Gaussian prototype per class between them; :class:`Lifted` adds the training loop's calls."""

    rho: Tensor
    progress: Tensor
    class_count: Tensor
    ready: Tensor

    @takes_options
    def __init__(
        self,
        n1: nn.Module,
        n2: nn.Module,
        *,
        num_classes: int,
        dim: int,
        seam_shape: tuple[int, ...] | None = None,
        seam_layer: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Put a seam between two halves; :func:`protoseam.lift` also finds the sizes.

        Args:
            n1: the half before the seam; taken, not copied.
            n2: the half behind it; taken, not copied.
            num_classes: number of classes.
            dim: numbers per sample at the seam.
            seam_shape: N1's output without its batch axis, if that is not a vector.
            seam_layer: the layer of N1 whose output is N1's, if N1 is a whole model; None for two halves.
            **options: the options of the seam, see ``protoseam.seam.options.Options``.

        Raises:
            ArgumentError: an option is out of bounds.
            ArgumentTypeError: the covariance is no estimator or the schedule cannot be called.
        """
        super().__init__()
        values = checked(options)
        covariance, schedule, init = values["covariance"], values["schedule"], values["init"]
        if covariance is not None and not isinstance(covariance, AbstractCovariance):
            raise ArgumentTypeError(
                f"covariance must be an estimator such as ps.ExactCovariance(floor=0.1), got {covariance!r}"
            )
        if not isinstance(init, str | Tensor):
            raise ArgumentTypeError(
                f"init must be {OPTIONS['init'].bounds} or a (classes, width) tensor, got a {type(init).__name__}"
            )
        if schedule is not None and (isinstance(schedule, type) or not callable(schedule)):
            raise ArgumentTypeError(
                f"schedule must be a schedule such as ps.SineAnneal(1, 16), got {schedule!r}"
            )
        for half in (n1, n2):
            if not half.training:  # as from_pretrained and deploy return it; a new module is in train mode
                half.train()
        self.n1, self.n2, self.num_classes, self.dim = n1, n2, num_classes, dim
        self.seam_shape, self.seam_layer = seam_shape or (dim,), seam_layer
        self.schedule: Schedule = SineAnneal() if schedule is None else schedule
        self.alpha, self.repulsion_scale = values["alpha"], values["repulsion_scale"]
        self.antithetic, draws = values["antithetic"], values["draws"]
        self.draws = _default_draws(num_classes, self.antithetic) if draws is None else draws
        check_draws(self.draws, self.antithetic)
        self.class_weights: ClassWeights = values["class_weights"]
        self.loss_fn: Loss | None = values["loss_fn"]
        self.label_smoothing, self.refit = values["label_smoothing"], values["refit"]
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
            progress=torch.tensor([0, 0], device=device),
            class_count=torch.zeros(num_classes, dtype=torch.int64, device=device),
            ready=torch.tensor(self.init != "fsinit", device=device),
        )
        self.register_load_state_dict_post_hook(_after_load)
        self._checks = TrainingChecks(ready=self.init != "fsinit")
        self._bounds: GradientBounds | None = None
        self._groups: FollowedGroups | None = None
        self._graphs = Graphs()
        self._proved, self._names = seam_layer is None, accepted_names(n1)

    def extra_repr(self) -> str:
        """Return the classes, the width and the schedule; the estimator is a child of its own."""
        return f"classes={self.num_classes}, width={self.dim}, schedule={self.schedule!r}, init={self.init!r}"

    # ------------------------------------------------------------------ the network

    @overload
    def forward(self, x: Any, y: None = None, *, generator: torch.Generator | None = None) -> Tensor: ...
    @overload
    def forward(self, x: Any, y: Tensor, *, generator: torch.Generator | None = None) -> Terms: ...
    def forward(
        self, x: Any, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor | Terms:
        """Return the deployed network's logits, or with labels the loss terms (so that DDP and others can wrap it).

        Args:
            x: inputs of N1: a tensor, or what N1 takes; a dict is passed by name where N1's forward has its keys.
            y: labels or soft targets, see :meth:`objective`; None for logits.
            generator: see :meth:`objective`.

        Returns:
            Logits ``(B, n)``, or ``Terms``.
        """
        if y is None:
            z = call(self.n1, x, self._names)
            check_output(self.n1, z)
            logits: Tensor = self.n2(z)
            return logits
        eager = not torch.compiler.is_compiling()
        if eager:
            self._checks.must_be_whole(self)
        z_BK = self.embed(x)
        if eager:
            y = self._checks.before_step(self, z_BK, y)
        found = self._terms(z_BK, y, generator)
        if eager:
            self._checks.after_step(self, found, z_BK, y)
        if self.training and not y.is_floating_point():
            self.covariance.observe(z_BK.detach(), y)
        return found

    def objective(self, x: Any, y: Tensor, *, generator: torch.Generator | None = None) -> Terms:
        """Return the loss terms of a batch: ``net(x, y)`` by another name.

        Args:
            x: inputs of N1.
            y: labels ``(B,)``, int64; or soft targets ``(B, n)``, float, as mixup and CutMix yield them. N1 is then
                pulled to Σ_c q_c s_c; one-hot rows count as labels.
            generator: of the samples that N2 learns from; torch's default one unless given.

        Returns:
            ``Terms``; ``.total`` is the one to minimise.

        Raises:
            SeamError: the prototypes have no values yet, or a term is not finite.
            ArgumentError: the targets do not fit the batch or the classes.
        """
        found: Terms = self(x, y, generator=generator)
        return found

    def backward(
        self,
        x: Any,
        y: Tensor,
        *,
        generator: torch.Generator | None = None,
        side: torch.cuda.Stream | None = None,
        casting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        capture: bool = True,
    ) -> Terms:
        """Compute what ``net.objective(x, y).total.backward()`` does, in less time.

        On CUDA the seam's work, about two hundred small operations, becomes one CUDA graph, so that lifting costs
        little where a step waits for the host. Gradients are set, not added, and lie in memory that the next call
        overwrites.

        Args:
            x: inputs of N1.
            y: labels ``(B,)`` or soft targets ``(B, n)``.
            generator: of the samples that N2 learns from; give the same one in every call.
            side: a CUDA stream for the work that no image enters; None does it in line.
            casting: opens the context of each forward pass: ``lambda: torch.autocast("cuda", torch.bfloat16)``.
            capture: replay the seam's work as a CUDA graph where it can be captured. Elsewhere, and where N2 is not one
                Linear, a loss or an estimator is the caller's, or SGD trains an N1 of more than 64 million parameters,
                it is launched piece by piece.

        Returns:
            ``Terms`` without a graph; the gradients are in ``p.grad``.

        Raises:
            SeamError: the prototypes have a gradient already, or no values yet; or there are several processes, whose
                gradients only DistributedDataParallel around the network averages.
            ArgumentError: the targets do not fit the batch or the classes.
        """
        return backward(self, x, y, generator=generator, side=side, casting=casting, capture=capture)

    def embed(self, x: Any) -> Tensor:
        """Return N1(x), as ``(B, k)``.

        Args:
            x: inputs of N1.
        """
        if not self._proved and not torch.compiler.is_compiling():
            z = first_output(self.n1, self.seam_layer or "", self.dim, x, self._names)
            self._proved = True
            return z
        z = call(self.n1, x, self._names)
        check_output(self.n1, z)
        return z if len(self.seam_shape) == 1 else z.flatten(1)

    def head(self, z_BK: Tensor) -> Tensor:
        """Return N2's logits ``(B, n)``, computed in the head's own dtype.

        Args:
            z_BK: embeddings ``(B, k)``.
        """
        parameter = next(self.n2.parameters(), None)
        z = z_BK if parameter is None else z_BK.to(parameter.dtype)
        logits: Tensor = self.n2(z if len(self.seam_shape) == 1 else z.unflatten(1, self.seam_shape))
        return logits

    def score_ood(self, x: Any) -> Tensor:
        """Score how unlike the training data inputs are: the squared Mahalanobis distance to the nearest prototype.

        min_c (z − s_c)ᵀ Σ̃_c⁻¹ (z − s_c) at z = N1(x), with the covariances as last refreshed. Use it in eval mode.

        Args:
            x: inputs of N1.

        Returns:
            ``(B,)``, float64; larger is less like the training data.

        Raises:
            SeamError: the prototypes have no values yet.
        """
        self._checks.must_have_values(self)
        return mahalanobis(self.embed(x), self.prototypes, self.covariance.factors).amin(1)

    def _terms(self, z_BK: Tensor, y_B: Tensor, generator: torch.Generator | None) -> Terms:
        pull = consensus(z_BK, y_B, self.prototypes, self.rho)
        classify, push = without_images(self, self.prototypes, generator)
        total = pull + classify + push
        if self._bounds is not None and total.requires_grad and not torch.compiler.is_compiling():
            total = bounded(self, total, pull, len(z_BK), self._bounds)
        return Terms(total, pull, classify, push)

    def _weights(self) -> Tensor | None:
        if self.class_weights == "uniform":
            return None
        return self.class_count.float() / self.class_count.sum()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``net.half()`` or ``net.bfloat16()`` convert the network; the seam never goes below float32."""

        def keep(t: Tensor, least: int = 4) -> Tensor:
            out = fn(t)
            narrower = out.is_floating_point() and out.dtype.itemsize < min(t.dtype.itemsize, least)
            return t.to(out.device) if narrower else out

        super()._apply(keep, recurse=False)
        if recurse:
            self.n1._apply(fn)
            self.n2._apply(fn)
            self.covariance._apply(lambda t: keep(t, least=8))  # float64 moments stay float64
        return self


# alg:lifted, line 5, draws one sample per class; with few classes N2 then sees too little per step. Four per class made
# short schedules with ten classes a point better on the first-try panel.
_LEAST_SAMPLES = 64


def _default_draws(num_classes: int, antithetic: bool) -> int:
    draws = max(1, -(-_LEAST_SAMPLES // num_classes)) if num_classes < _LEAST_SAMPLES else 1
    return draws + draws % 2 if antithetic else draws


def _after_load(module: nn.Module, incompatible: Any) -> None:
    assert isinstance(module, LiftedNetwork)
    module._checks.loaded(module)
