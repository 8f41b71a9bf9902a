"""Gradients kept in bounds: the limits of :mod:`protoseam.core.bounds`, applied at the end of every backward.

Data in: a batch's consensus term and the gradients the backward left; data out: the same gradients, scaled. It owns
what was applied to gradients so far, while they accumulate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from protoseam.core.bounds import batch_share, consensus_factors, head_factor, prototype_factors
from protoseam.seam.classifier import last_linear
from protoseam.seam.groups import FollowedGroups
from protoseam.seam.processes import all_reduce, world_size

if TYPE_CHECKING:
    from protoseam.seam.network import LiftedNetwork

__all__ = ["GradientBounds", "Rates", "bounded"]

_LEAST = 1e-12  # a factor that is undone when gradients accumulate must not be 0
_MOST_COPIED = 2**26  # parameters of N1; the steps of larger networks do not wait for the host


class Rates(NamedTuple):
    """What limits depend on besides the gradients: the rates of N1 and of the seam, and :func:`batch_share`."""

    lr: float | Tensor
    seam_lr: float | Tensor
    share: float | Tensor


class _Parts(NamedTuple):
    """The parameters of N1 without its last Linear, of that layer, and of N2."""

    body: list[nn.Parameter]
    last: list[nn.Parameter]
    n2: list[nn.Parameter]


class _Objectives(NamedTuple):
    """What gradients are of: the mean consensus term, the sum of the weights (1, a loss scale, …), and the samples."""

    loss: Tensor
    weight: Tensor
    batch: Tensor | float

    def plus(self, other: _Objectives) -> _Objectives:
        weight = self.weight + other.weight
        loss = (other.weight * other.loss + self.weight * self.loss) / weight
        return _Objectives(loss, weight, self.batch + other.batch)


class GradientBounds:
    """Scales the gradients of N1, of its last Linear, of N2 and of the prototypes in place, each by its own limit.

    Args:
        groups: the parameter groups of a torch optimizer, which leaves its settings in them. The limits follow from
            their rates: the highest of those given and those of now.
    """

    def __init__(self, groups: FollowedGroups) -> None:
        self.groups = groups
        self.used = False
        # since the gradients were zeroed: what they are of, and what was applied to those of each part
        self._of: _Objectives | None = None
        self._applied: tuple[Tensor | float, ...] | None = None
        self._backward: int | None = None  # autograd's number of the one that goes on
        self._undone: tuple[_Objectives, list[Tensor], list[tuple[int, int]]] | None = None
        # To walk through a network's modules costs as much as all the arithmetic here: once is enough.
        self._parts = _Parts([], [], [])
        self._firsts: list[nn.Parameter | None] = [None, None]
        self._copies = False  # whether N1's gradients are few enough, and dense

    @property
    def leaves_n1(self) -> bool:
        """Whether N1's gradients need no limit: the optimizer divides them by their size, as Adam does.

        Its settings in the groups say so. Limits would not shorten such steps, and small gradients can fall below the
        optimizer's ε: Adadelta then hardly moves.
        """
        settings = self.groups.now[0]
        like_sgd = "dampening" in settings
        return not like_sgd and ("eps" in settings or "betas" in settings)

    @torch.no_grad()
    def begin(self, net: LiftedNetwork, loss: Tensor, weight: Tensor, batch: int) -> bool:
        """Hear of ``weight`` times an objective whose backward starts; undo what was done to gradients it adds to.

        Returns:
            Whether it is the first objective of this backward. The others, of a sum of several, count with it.
        """
        # what other losses alone leave in the gradients is not divided by 0
        now = _Objectives(loss, torch.where(weight == 0, 1.0, weight), batch)
        before, self._backward = self._backward, torch._C._current_graph_task_id()
        if self._backward == before and self._of is not None:
            self._of = self._of.plus(now)
            return False
        parts = self._parameters(net)
        # Gradients are left from before if both N1 and the prototypes have some, which another loss alone does not
        # give them; where one of them is frozen, the other shows it.
        n1 = [p for p in (*parts.body, *parts.last) if p.requires_grad]
        shown = [part for part in (n1, [net.prototypes]) if part and part[0].requires_grad] or [parts.n2]
        self._undone = None
        if self._of is None or self._applied is None or not all(map(_gradients, shown)):
            self._of = now
            return True
        # After zero_grad(set_to_none=False) nothing is left, and what was applied before, NaN perhaps, must not count.
        left = (_squares(*shown)[0] > 0).all()
        factors = [torch.where(left, factor, 1.0) for factor in self._applied]
        past_batch = self._of.batch  # a number that is filled in on the device, where a copy would wait
        if not isinstance(past_batch, Tensor):
            past_batch = torch.full((), float(past_batch), device=left.device)
        past = (self._of.loss, self._of.weight, past_batch)
        of = _Objectives(*(torch.where(left, value, 0.0) for value in past))
        self._add_decay(of.weight, 1 - factors[0], 1 - factors[1])
        for part, factor in zip(parts, factors, strict=True):
            if gradients := _gradients(part):
                torch._foreach_div_(gradients, factor)
        self._undone = self._of, factors, _marks(net)
        self._of = of.plus(now)
        return True

    def apply(self, net: LiftedNetwork, loss: Tensor, batch: int, rates: Rates | None = None) -> None:
        """Bound the gradients of one batch, for a caller who has computed them without :func:`bounded`."""
        self._of, self._undone = _Objectives(loss, torch.ones_like(loss), batch), None
        self.end(net, rates)

    @property
    def past(self) -> tuple[Any, ...]:
        """What was applied to the gradients of the last batch, and what they were: for a step that is replayed."""
        return self._of, self._applied

    @past.setter
    def past(self, past: tuple[Any, ...]) -> None:
        self._of, self._applied = past
        self._undone, self.used = None, True

    @torch.no_grad()
    def end(self, net: LiftedNetwork, rates: Rates | None = None) -> None:
        """All gradients are there: bring them within their limits, which follow from the rates of now."""
        self._backward = None
        assert self._of is not None
        if self._undone is not None and self._undone[2] == _marks(net):
            self._redo(net)
            return
        loss, weight, batch = self._of
        if (add := all_reduce()) is not None:  # the gradients are the processes' mean by now
            add(loss := loss / world_size())
        parts = self._parameters(net)
        lr, seam_lr, share = rates = self.rates(batch) if rates is None else rates
        body: Tensor | float = 1.0
        last: Tensor | float = 1.0
        head: Tensor | float = 1.0
        if self._limits_n1(rates) and _gradients([*parts.body, *parts.last]):
            gradient_P, weight_P = _squares(parts.body, parts.last)
            gradient_P = gradient_P / weight.square()
            body, last = consensus_factors(loss, gradient_P, weight_P, lr, share).clamp_(min=_LEAST).unbind()
        if _positive(seam_lr):
            if isinstance(net.n2, nn.Linear):
                head = head_factor(net.prototypes, net.covariance.factors, seam_lr).to(loss.dtype)
            if (s_CK := net.prototypes.grad) is not None:
                s_CK.mul_(prototype_factors(s_CK / weight, net.alpha, seam_lr))
        for part, factor in zip(parts, (body, last, head), strict=True):
            if isinstance(factor, Tensor) and (gradients := _gradients(part)):
                torch._foreach_mul_(gradients, factor)
        if isinstance(body, Tensor):
            self._add_decay(weight, body - 1, last - 1)
        self._applied = body, last, head
        # torch.autograd.grad returns gradients, and leaves none here to bound
        self.used = self.used or any(p.grad is not None for part in ([net.prototypes], *parts) for p in part)

    def rates(self, batch: float | Tensor) -> Rates:
        """The rates that the limits follow from now, for a gradient of so many samples in each process."""
        share = batch_share(batch * world_size(), float(self.groups.now[0].get("momentum", 0.0)))
        return Rates(self.groups.rate("n1", "body"), self.groups.rate("n2", "prototypes"), share)

    def _limits_n1(self, rates: Rates) -> bool:
        return _positive(rates.lr) and not self.leaves_n1

    def limited(self, net: LiftedNetwork, rates: Rates) -> list[nn.Parameter]:
        """N1's parameters whose gradients have a limit at these rates."""
        body, last, _ = self._parameters(net)
        return [p for p in (*body, *last) if p.grad is not None] if self._limits_n1(rates) else []

    def can_copy(self, net: LiftedNetwork) -> bool:
        """Whether N1's gradients, if they have limits, are few enough for a copy, and dense."""
        self._parameters(net)
        return self._copies or self.leaves_n1

    def _redo(self, net: LiftedNetwork) -> None:
        """Put back what :meth:`begin` undid: ``torch.autograd.grad`` added nothing to the gradients."""
        assert self._undone is not None
        self._of, factors, _ = self._undone
        for part, factor in zip(self._parameters(net), factors, strict=True):
            if gradients := _gradients(part):
                torch._foreach_mul_(gradients, factor)
        self._add_decay(self._of.weight, factors[0] - 1, factors[1] - 1)

    def _parameters(self, net: LiftedNetwork) -> _Parts:
        """The parameters that have limits of their own, listed again if they are other ones than before."""
        firsts = [next(half.parameters(), None) for half in (net.n1, net.n2)]
        if any(now is not before for now, before in zip(firsts, self._firsts, strict=True)):
            layer = last_linear(net.n1, net.seam_layer)
            self._firsts, last = firsts, [] if layer is None else list(layer.parameters())
            of_last = {id(p) for p in last}
            body = [p for p in net.n1.parameters() if id(p) not in of_last]
            self._parts = _Parts(body, last, list(net.n2.parameters()))
            numbers = sum(p.numel() for p in (*body, *last))
            sparse = any(getattr(m, "sparse", False) for m in net.n1.modules())
            self._copies = numbers <= _MOST_COPIED and not sparse
        return self._parts

    def _add_decay(self, weight: Tensor, body: Tensor | float, last: Tensor | float) -> None:
        """Add shares of SGD's weight decay to N1's gradients.

        SGD steps along g + λp. A gradient of s·g − (1 − s)·λp makes that s·(g + λp): a smaller step, with decay and
        gradient in the proportion that λ says. Adam's steps do not shrink with the gradient, so its decay is left as
        it is.
        """
        for group in {id(group): group for group in self.groups.now}.values():
            decay = group.get("weight_decay", 0.0)
            if not decay or "dampening" not in group:
                continue  # dampening: SGD alone has it
            own = {id(p) for p in group["params"]}
            for share, part in ((body, self._parts.body), (last, self._parts.last)):
                params: list[Any] = [p for p in part if id(p) in own]
                if params := [p for p in params if p.grad is not None and not p.grad.is_sparse]:
                    gradients = [p.grad for p in params]
                    torch._foreach_add_(gradients, torch._foreach_mul(params, share * weight * decay))


def bounded(net: LiftedNetwork, total: Tensor, loss: Tensor, batch: int, bounds: GradientBounds) -> Tensor:
    """``total``, whose backward ends with ``bounds`` applied to the gradients of ``net``."""
    out: Tensor = _Bounded.apply(total, loss.detach(), batch, net, bounds)
    return out


class _Bounded(torch.autograd.Function):
    """The identity; its backward is the first of the objective's, and asks to be called again after the last."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, loss: Tensor, batch: int, net: LiftedNetwork, bounds: GradientBounds
    ) -> Tensor:
        ctx.loss, ctx.batch, ctx.net, ctx.bounds = loss, batch, net, bounds
        return total.detach()  # a view could not be divided in place, as loops that accumulate do

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = grad_outputs
        net, bounds = ctx.net, ctx.bounds
        if bounds.begin(net, ctx.loss, weight, ctx.batch):
            engine = torch.autograd.Variable._execution_engine
            # twice: DistributedDataParallel queues its own, which hands out the mean gradients, during the backward
            engine.queue_callback(lambda: engine.queue_callback(lambda: bounds.end(net)))
        return weight, None, None, None, None


def _positive(rate: float | Tensor) -> bool:
    return isinstance(rate, Tensor) or rate > 0


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients there are; of a sparse one its values, without repeated rows."""
    found = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse and not p.grad.is_coalesced():
            p.grad = p.grad.coalesce()
        if p.grad is not None:
            found.append(p.grad._values() if p.grad.is_sparse else p.grad)
    return found


def _marks(net: LiftedNetwork) -> list[tuple[int, int]]:
    """What changes when a backward adds to gradients: those of the prototypes and the first of each half."""
    s = net.prototypes
    firsts = (next((p for p in half.parameters() if p.grad is not None), s) for half in (net.n1, net.n2))
    return [(id(p.grad), p.grad._version) for p in (s, *firsts) if p.grad is not None]


def _squares(*parts: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """The squared norms of each part's gradients and of the weights behind them, never below float32."""
    trained = [[p for p in part if p.grad is not None] for part in parts]
    tensors = [*_gradients([p for part in trained for p in part]), *(p for part in trained for p in part)]
    dtype = torch.float32
    for other in {t.dtype for t in tensors}:
        dtype = torch.promote_types(dtype, other)
    squares_2N = torch.stack(torch._foreach_norm(tensors, 2, dtype)).unflatten(0, (2, -1)).square_()
    sums = [part.sum(1) for part in squares_2N.split([len(part) for part in trained], 1)]
    gradient_P, weight_P = torch.stack(sums, 1)
    return gradient_P, weight_P
