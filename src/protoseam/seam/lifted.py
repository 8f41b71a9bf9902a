"""The class users hold: a lifted network, with the calls of a training loop and the way out of it.

Legend: N samples, B batch, C classes, K seam width.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from protoseam.core.covariance import check_one_label_each, class_moments
from protoseam.core.schedules import rho_at
from protoseam.errors import ArgumentError, SeamWarning
from protoseam.seam import heads
from protoseam.seam.bounding import GradientBounds
from protoseam.seam.classifier import deploy_at, deploy_halves, last_linear
from protoseam.seam.groups import FollowedGroups, layer_of, names_without_decay, parameter_groups
from protoseam.seam.guards import (
    check_embeddings,
    check_labels,
    length_of,
    refuse_sharded,
)
from protoseam.seam.last_step import FeatureReader, can_fit, embedded, fit_classifier
from protoseam.seam.loop import each_epoch
from protoseam.seam.network import LiftedNetwork
from protoseam.seam.passes import collect_embeddings
from protoseam.seam.processes import all_reduce, broadcast

__all__ = ["Lifted"]


class Lifted(LiftedNetwork):
    """N2∘N1 with one Gaussian prototype per class at the seam. :func:`protoseam.lift` makes it.

    Attributes:
        n1: the half before the seam.
        n2: the half behind it.
        prototypes: S, ``(n, k)``, trained.
        covariance: the estimator of Σ̂, with the factors that samples are drawn with.
        num_classes: n.
        dim: k, the seam's width.
        rho: the penalty ρ now.
        class_count: training samples per class, once counted.
        progress: ``[epoch, epochs]`` of the last :meth:`set_progress`.
    """

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
        """Return groups for any torch optimizer: N1 at your rate, N2 and the prototypes faster.

        Args:
            lr: N1's learning rate, what you would take for cross-entropy.
            weight_decay: of N1; N2 and the prototypes get as much less as their rate is higher, so that a step shrinks
                all weights by the same share. None: the optimizer's applies to N1, and the seam has none.
            seam_lr: rate of N2 and the prototypes; None: 30·lr (measured on the first-try panel).
            body_lr: rate of N1 without the seam's own Linear, for fine-tuning; 0 freezes the body
                (``requires_grad`` becomes False). None: ``lr``.
            prototype_lr: rate of the prototypes; None: ``seam_lr``.
            prototype_weight_decay: of the prototypes; None: N2's.
            bounded: keep each backward's gradients within the limits of :mod:`protoseam.core.bounds`, which follow from
                the rates, these or higher ones that a scheduler sets; N1's only for SGD and its kin, since Adam's steps
                do not grow with a gradient. False leaves all gradients as they are (the paper's recipes).

        Returns:
            Dicts with ``name``, ``params``, ``lr`` and, where given, ``weight_decay``.

        Raises:
            ArgumentError: ``body_lr`` is given, but N1 does not end in a Linear.
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
        self._groups = FollowedGroups(groups)
        self._bounds = GradientBounds(self._groups) if bounded else None
        return groups

    def epochs(
        self, loader: Iterable[Any], epochs: int, start: int = 0, *, sweep: Iterable[Any] | None = None
    ) -> Iterator[int]:
        """Return the epochs of a training loop, with what each needs: ``for epoch in net.epochs(loader, 40):``.

        Before the first it looks at the data (:meth:`initialize`), unless the state of a checkpoint was loaded. Each
        epoch begins with its ρ(t) (:meth:`set_progress`) and ends with new factors of Σ̃ (:meth:`refresh`). A loop
        that is left by ``break`` or an exception just ends: continue with ``start``.

        Args:
            loader: the training data, in batches ``(inputs, labels, …)`` or dicts with ``labels``; anything that can be
                iterated more than once. Sweeps read a DataLoader's data set themselves: each sample once.
            epochs: number of epochs in total, including the finished ones.
            start: the first epoch to train; after a checkpoint the number of finished epochs.
            sweep: another loader for the sweeps, where ``loader`` yields mixed targets; None: ``loader``.

        Returns:
            An iterator over the numbers of the epochs, from ``start`` to ``epochs`` − 1.

        Raises:
            ArgumentError: not 0 ≤ start ≤ epochs, or no epoch.
            ArgumentTypeError: the loader can be read only once.
        """
        return each_epoch(self, loader, epochs, start, loader if sweep is None else sweep)

    def initialize(
        self, loader: Iterable[Any] | None = None, *, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Look at the data once: FSInit (if asked for), class counts, and the checks that need all labels.

        Args:
            loader: the training data, as for :meth:`epochs`.
            embeddings: ``(N1(x), y)`` of the data instead, for callers who have swept it themselves.

        Raises:
            ArgumentError: there is no data, or a label is outside 0…n−1.
            SeamError: an embedding is not finite, or the parameters are sharded.
        """
        refuse_sharded(self)
        z_NK, y_N = self._swept(loader, embeddings, "initialize")
        count_C, mean_CK, _ = class_moments(
            z_NK, y_N, self.num_classes, structure="diagonal", reduce=all_reduce()
        )
        self.class_count.copy_(count_C)
        if self.init == "fsinit":
            if self._checks.ready:
                warnings.warn(
                    "the prototypes had values already, from a checkpoint or from training, and are put back on the "
                    "class means. To continue from a checkpoint, do not call net.initialize",
                    SeamWarning,
                    stacklevel=2,
                )
            with torch.no_grad():
                self.prototypes.copy_(self._checks.class_means(count_C, mean_CK))
        broadcast(self.prototypes.data)
        self._checks.look(self, z_NK, count_C)
        self.ready.fill_(True)
        self._checks.ready = True
        self._checks.counted_now(self)

    def set_progress(self, epoch: int, epochs: int, *, lr: float | None = None) -> None:
        """Start an epoch: set ρ(t) and what depends on it.

        Args:
            epoch: number of the epoch, from 0.
            epochs: number of epochs in total.
            lr: the learning rate now, for ``SwitchCovariance``.

        Raises:
            ArgumentError: the schedule gives a ρ that is not positive and finite.
            SeamError: the prototypes did not move in the epoch before, or the objective was not finite.
        """
        refuse_sharded(self)
        self._checks.between_epochs(self)
        if epoch > 0:  # a compiled step has not asked
            self._checks.must_be_ready()
        rho, before = (rho_at(self.schedule, at, epochs) for at in (epoch, max(epoch - 1, 0)))
        self._checks.progressed(rho, before, epoch, epochs, self._bounds is not None)
        if epoch > 0 and self._groups is not None:
            self._checks.rates(self._groups.given, self._groups.now)
        self.rho.fill_(rho)
        self.progress.copy_(torch.tensor([epoch, epochs]))
        self.covariance.progress(rho, lr)

    def refresh(
        self, loader: Iterable[Any] | None = None, *, embeddings: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """End an epoch: new factors of Σ̃. Sweeps the loader only if the estimator needs the data.

        After the last epoch that :meth:`set_progress` announced it also fits the two Linears around the seam as one
        classifier on N1's features where that is worth it (the option ``refit``). That takes a sweep of its own.

        Args:
            loader: the training data, as for :meth:`epochs`.
            embeddings: ``(N1(x), y)`` of the data instead; the classifier then stays as it was trained.

        Raises:
            ArgumentError: the estimator needs the data, and there is none.
            SeamError: an embedding or a covariance is not finite.
        """
        self._checks.between_epochs(self)
        self._checks.must_be_ready()
        only_mixed = self.covariance.from_batches and self._checks.trained_on == {"mixed"}
        self._checks.trained_on.clear()
        fitted = False
        if embeddings is None and self.refits_now and self._has_end(loader):
            try:
                fitted, *swept = self._fit(loader, "refresh")
                if fitted or self.covariance.needs_pass:
                    embeddings = swept[0], swept[1]
            except ArgumentError as error:  # training is over, and it was training that counted
                warnings.warn(f"N2 stays as it was trained: {error}", SeamWarning, stacklevel=2)
        if embeddings is not None or self.covariance.needs_pass or only_mixed:
            embeddings = self._swept(loader, embeddings, "refresh")
        z_NK, y_N = embeddings or (None, None)
        found = self.covariance.refresh(z_NK, y_N, all_reduce())
        if found is not None:
            if found.count_C is not None:
                self.class_count.copy_(found.count_C)
                self._checks.counted = True
            self._checks.floors(self, found)
        if z_NK is not None and self._checks.counted:
            self._checks.look(self, z_NK, self.class_count)
        self._checks.refreshed(self, fitted)

    # ------------------------------------------------------------------ N2 in closed form, and the way out

    @property
    def refits_now(self) -> bool:
        """Whether the next :meth:`refresh` ends the last epoch and, given data, may fit the classifier."""
        epoch, epochs = self.progress.tolist()
        return bool(self.refit and epoch + 1 == epochs and can_fit(self))

    def refit_head(self, loader: Iterable[Any] | None = None) -> None:
        """Fit the classifier now; N2 must be one Linear with a bias.

        With the training data that is the step that :meth:`refresh` may take after the last epoch: N2 and the Linear
        that ends N1 become one classifier on N1's features, and prototypes and Σ̃ follow. It is not compared with the
        trained one: with few samples keep what is better on held-out data. Without data N2 alone becomes
        the linear discriminant of the prototypes and the pooled Σ̃ as now estimated: for a head that has had too few
        steps.

        Args:
            loader: the training data, or None.

        Raises:
            SeamError: N2 is not one Linear with a bias, the prototypes have no values yet, or without data the counts
                that ``class_weights="frequency"`` needs are missing.
            ArgumentError: a class has no sample in the data.
        """
        self._checks.must_have_values(self)
        heads.check_head(self.n2, "refit_head")
        if loader is None:
            self._checks.must_be_counted(self)
            heads.refit(self)
            return
        self._take_last_step(loader, "refit_head", always=True)

    @torch.no_grad()
    def calibrate(self, loader: Iterable[Any]) -> float:
        """Fit one temperature by likelihood and fold it into N2, so that probabilities match frequencies.

        The arg max of the logits stays as it is, and ``deploy`` carries the result. Further training undoes it step by
        step, so calibrate last.

        Args:
            loader: held-out ``(inputs, labels)`` batches, not the training data, on which every network is too sure.

        Returns:
            The temperature; above 1 the network was too confident.

        Raises:
            SeamError: N2 does not end in a plain Linear.
        """
        logits_NC, y_N = collect_embeddings(
            self, lambda x: self.head(self.embed(x)), loader, self.prototypes.device, "calibrate"
        )
        check_labels(y_N, self.num_classes)
        temperature = heads.temperature_of(logits_NC, y_N)
        heads.scale_logits(self.n2, 1 / temperature)
        return temperature

    @torch.no_grad()
    def deploy(self, *, fold: bool = False) -> nn.Module:
        """Return the plain network, in eval mode: a copy that holds nothing of this library.

        Args:
            fold: multiply the two Linears around the seam into one. That gives the architecture as it was before
                lifting, equal up to rounding.

        Raises:
            ArgumentError: ``fold`` is asked for, but the seam does not lie between two Linears.
        """
        n1, n2 = copy.deepcopy(self.n1), copy.deepcopy(self.n2)
        if self.seam_layer is not None:
            return deploy_at(n1, self.seam_layer, n2, fold=fold).eval()
        return deploy_halves(n1, n2, fold=fold).eval()

    # ------------------------------------------------------------------ what hosts ask for, and housekeeping

    @property
    def is_initialized(self) -> bool:
        """Whether the prototypes have values and the classes were counted: by ``initialize`` or a checkpoint."""
        return self._checks.ready and self._checks.counted

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the lifted model wants without weight decay, as timm asks for them."""
        return names_without_decay(n1=self.n1, n2=self.n2)

    @property
    def group_matcher(self) -> Callable[..., Callable[[str], tuple[float, ...]]]:
        """The parameters' order by depth, for timm's ``layer_decay``; N2 and the prototypes come last.

        There is none if the lifted model has none.
        """
        matcher: Any = self.n1.group_matcher
        return lambda coarse=False: layer_of(matcher(coarse=coarse))

    @property
    def _rate(self) -> float | None:
        """N1's learning rate now, as far as the optimizer works on the groups it was given."""
        return None if self._groups is None else float(self._groups.now[0]["lr"])

    def _fit(
        self, loader: Iterable[Any] | None, what: str, *, always: bool = False
    ) -> tuple[bool, Tensor, Tensor]:
        """Fit the classifier where that is worth it, or always; was it, and the embeddings and labels by now."""
        reader = FeatureReader(self)
        h_ND, y_N = self._swept(loader, None, what, reader)
        return fit_classifier(self, reader.last, h_ND, y_N, always=always), embedded(reader.last, h_ND), y_N

    def _take_last_step(self, loader: Iterable[Any], what: str = "refresh", *, always: bool = False) -> None:
        """Fit the classifier, and if it is another one now, make new factors of Σ̃."""
        fitted, z_NK, y_N = self._fit(loader, what, always=always)
        if fitted:
            self.covariance.refresh(z_NK, y_N, all_reduce())

    def _has_end(self, loader: Any) -> bool:
        """Whether there is data to sweep: it has a length, or was swept before."""
        length = length_of(loader)
        return loader is not None and (self._checks.samples if length is None else length) > 0

    def _swept(
        self,
        loader: Iterable[Any] | None,
        embeddings: tuple[Tensor, Tensor] | None,
        what: str,
        read: Callable[[Any], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if embeddings is None:
            if loader is None:
                raise ArgumentError(
                    f"net.{what} needs the data: net.{what}(loader) with the training loader"
                    + (", or lift with covariance=ps.RunningCovariance()" if what == "refresh" else "")
                )
            embeddings = collect_embeddings(self, read or self.embed, loader, self.prototypes.device, what)
        z_NK, y_N = embeddings
        check_labels(y_N, self.num_classes)
        check_one_label_each(z_NK, y_N)
        check_embeddings(z_NK, y_N, what)
        self._checks.collapsed(self, z_NK)
        return z_NK, y_N
