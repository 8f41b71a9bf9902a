"""What goes wrong in lifted training, and the words for it.

Checks that read tensor values run on the CPU at once; on an accelerator reading would stall every step, so there
they wait for the epoch's end (``set_progress``, ``refresh``), which the label and finiteness sweeps share.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from protoseam.errors import ArgumentError, ArgumentTypeError, SeamError, SeamWarning
from protoseam.seam.calling import call, eagerly, may_be_compiled, takes_one

# Steps without the prototypes before the guard speaks: alternating optimizers may skip a few.
_PATIENCE = 8


def warn(message: str, level: int = 4) -> None:
    """Warn ``level`` calls above, where the user called the network; 1 is the caller of this function."""
    warnings.warn(message, SeamWarning, stacklevel=level + 1)


def check_labels(y_B: Tensor, num_classes: int, *, values: bool = True) -> None:
    """Labels must be integers in 0…n−1; without ``values`` only what can be seen without a sync is checked."""
    if not isinstance(y_B, Tensor):
        raise ArgumentTypeError(
            f"labels must be a tensor of class indices, got {type(y_B).__name__}: torch.as_tensor(y)"
        )
    if y_B.dtype not in (torch.int64, torch.int32) or y_B.ndim != 1:
        raise ArgumentError(
            f"labels must be a vector of class indices (int64), got {y_B.dtype} of shape {tuple(y_B.shape)}: "
            f"{_as_indices(y_B)}"
        )
    if not values or not len(y_B):
        return
    low, high = (int(v) for v in torch.aminmax(y_B))
    if low < 0 or high >= num_classes:
        hint = "check num_classes"
        if low == 1 and high == num_classes:
            hint = "they seem to start from 1: subtract 1"
        elif low < 0:
            hint = "negative ones usually mark samples without a label: drop those"
        raise ArgumentError(f"labels must lie in 0…{num_classes - 1}, but reach from {low} to {high}; {hint}")


def check_soft_targets(q_BC: Tensor, num_classes: int, *, values: bool = True) -> None:
    """Soft targets must be probabilities ``(B, n)``; without ``values`` only their shape is checked."""
    if q_BC.ndim != 2 or q_BC.shape[1] != num_classes:
        raise ArgumentError(
            f"targets must be class indices (batch,) as int64 or probabilities (batch, {num_classes}) as float, got "
            f"{q_BC.dtype} of shape {tuple(q_BC.shape)}: {_as_indices(q_BC)}"
        )
    if values and len(q_BC):
        low, sums_B = float(q_BC.min()), q_BC.sum(1)
        worst = float(sums_B[(sums_B - 1).abs().argmax()])
        if not low >= 0 or not abs(worst - 1) <= 1e-2:
            raise ArgumentError(
                f"each row of soft targets must be probabilities that sum to 1, but the smallest is {low:.3g} and one "
                f"row sums to {worst:.3g}: pass softmax(1) of scores, or y.long() of labels"
            )


def hard_labels(q_BC: Tensor) -> Tensor | None:
    """The labels of one-hot targets ``(B, C)``; None if some row is mixed."""
    one_hot = ((q_BC == 0) | (q_BC == 1)).all() & (q_BC.sum(1) == 1).all()
    return q_BC.argmax(1) if bool(one_hot) else None


def check_batch(z_BK: Tensor, y_B: Tensor, dim: int, num_classes: int, *, values: bool) -> None:
    """Check embeddings and targets of one batch; without ``values`` only what needs no sync."""
    if z_BK.ndim != 2 or z_BK.shape[1] != dim:
        raise SeamError(
            f"N1 returned shape {tuple(z_BK.shape)} where (batch, {dim}) was expected: the seam must be {dim} wide and "
            "nothing may follow the layer it lies behind"
        )
    if isinstance(y_B, Tensor) and y_B.is_floating_point() and y_B.ndim == 2:
        check_soft_targets(y_B, num_classes, values=values)
    else:
        check_labels(y_B, num_classes, values=values)
    if not len(z_BK):
        raise ArgumentError("the batch is empty, and the consensus term is a mean over it: leave it out")


def _as_indices(y_B: Tensor) -> str:
    if y_B.ndim < 2:
        return "pass y.long()" if y_B.ndim else "give one label per sample"
    if y_B.shape[1:].numel() == 1:  # argmax would make them all 0
        return "pass y.flatten().long()"
    return "if they are one-hot, pass y.argmax(1), or y.float() for soft targets"


def length_of(loader: Any) -> int | None:
    """How many batches a loader has; None if it does not say."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_not_empty(loader: Any, what: str) -> None:
    """Refuse a loader that says it has no batch."""
    if length_of(loader) == 0:
        samples = length_of(getattr(loader, "dataset", None))
        raise ArgumentError(
            f"{what} got an empty loader: it has no batch{f' of its {samples} samples' if samples else ''}, so nothing "
            "would be trained. With drop_last=True a DataLoader leaves out a last batch smaller than batch_size: take "
            "a smaller batch_size, or drop_last=False"
        )


def check_output(model: nn.Module, output: object) -> None:
    """Refuse an output that is not a tensor."""
    if not isinstance(output, Tensor | fx.Proxy):  # a proxy: the model is being traced
        mode = ", when training," if model.training else ""
        raise SeamError(
            f"{type(model).__name__} returns{mode} a {type(output).__name__}, not a tensor of logits: wrap it in a "
            "module whose forward returns the logits, and lift that"
        )


def refuse_sharded(net: nn.Module) -> None:
    """Training needs whole parameters: FSDP2 would let each process have prototypes of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
    if fsdp is None:
        return
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = [name or "net" for name, module in net.named_modules() if isinstance(module, kinds)]
    if sharded:
        raise SeamError(
            f"the parameters of {sharded[0]} are sharded over the processes, but lifted training needs them whole: "
            "leave fully_shard (or FSDP) out and wrap the network in DistributedDataParallel"
        )


def check_terms(terms: dict[str, Tensor], z_BK: Tensor, y_B: Tensor, more: str) -> None:
    """Name the term that is not finite and, where embeddings are to blame, their class; ``more`` ends the sentence."""
    bad = [name for name, value in terms.items() if not torch.isfinite(value)]
    if bad:
        check_embeddings(z_BK, y_B, f"the {' and '.join(bad)} term", more)
        raise SeamError(
            f"the {' and '.join(bad)} term is not finite although the embeddings are: prototypes or head have "
            f"diverged. Lower the learning rate, or let ρ grow more slowly{more}"
        )


def check_embeddings(z_NK: Tensor, y_N: Tensor, where: str, more: str = "") -> None:
    """Refuse embeddings that are not finite, and name their classes."""
    # a sum shows any NaN or infinity among its terms, and needs no mask as large as the embeddings
    bad_N = ~z_NK.sum(1, dtype=torch.float64).isfinite()
    if bool(bad_N.any()):
        classes = (y_N if y_N.ndim == 1 else y_N.argmax(1))[bad_N].unique().tolist()
        raise SeamError(
            f"N1 returned non-finite embeddings in {where}: {int(bad_N.sum())} of {len(z_NK)} samples, "
            f"class {name_some(classes)}. Look for NaN in their inputs first, and drop or fill those. If there is "
            "none, training diverges (the consensus curvature grows with lr·ρ·‖features‖²): lower the learning rate, "
            f"clip gradients, or let ρ grow more slowly (a longer schedule, a smaller rho_max){more}"
        )


def warn_about_data(z_NK: Tensor, count_C: Tensor, dim: int, structure: str, floor: float | str) -> None:
    """Say what only the data can tell: one-sided embeddings (§design), and classes with too few samples."""
    if len(z_NK) > 1 and bool((z_NK >= 0).all()):
        warn(
            "no embedding has a negative coordinate: N1 seems to end in a ReLU-like activation, and a Gaussian "
            "cannot surround a prototype on the boundary of that orthant. Put the seam before the activation"
        )
    count = count_C.tolist()
    empty = [c for c, n in enumerate(count) if n == 0]
    if empty:
        warn(
            f"class {name_some(empty)} has no sample: its prototype is trained by repulsion and sampling alone. "
            "Lower num_classes or complete the data"
        )
    few = [c for c, n in enumerate(count) if 0 < n <= dim]  # min_i |D_i| > k, else Σ̂ is singular (§dimension)
    if few and structure == "full":
        warn(
            f"class {few[0]} has {int(count[few[0]])} samples but k={dim}"
            f"{f' ({len(few)} classes like it)' if len(few) > 1 else ''}: Σ̂ is singular; raise the floor, lower "
            "dim, or take a diagonal or shared covariance: covariance=ps.RunningCovariance(structure='diagonal'), or "
            "--lift.structure diagonal for the command"
        )
    few = [c for c, n in enumerate(count) if 0 < n < 4]  # a half of one sample has no spread
    if few and floor == "auto":
        warn(
            f"class {name_some(few)} has fewer than 4 samples, and floor='auto' compares two halves of each class: it "
            "sees no error in these and comes out too small. Give the floor as a number"
        )


def warn_other_labels(batch: Any) -> None:
    """The batches have further parts, and one of them looks like class labels as much as the second does."""
    if not isinstance(batch, list | tuple) or len(batch) < 3 or not isinstance(batch[1], Tensor):
        return
    most = int(batch[1].max()) if batch[1].ndim == 1 and len(batch[1]) else -1
    for place, part in enumerate(batch[2:], 3):
        whole = isinstance(part, Tensor) and part.dtype in (torch.int64, torch.int32) and part.ndim == 1
        if whole and len(part) == len(batch[1]) and 0 < int(part.max()) <= most and int(part.min()) >= 0:
            warn(
                f"the batches have {len(batch)} parts, and not only the second but also part {place} looks like class "
                "labels. The sweeps of net.epochs take the second: if that is something else, yield "
                "(inputs, labels, …) in this order"
            )


def without_bounds(net: Any) -> str:
    """A sentence about limits of the gradients that are not in force, or nothing."""
    if net._bounds is None:
        return ". Nothing bounds the gradients: build the optimizer from net.param_groups(lr=…), which does"
    if not net._bounds.used:
        alone = "the limits act in the backward of net.objective(…).total alone"
        whole = ", and not in a step that is compiled as a whole: compile the half inside instead, net.n1.compile()"
        return f". Nothing bounds the gradients: {alone}{whole * may_be_compiled()}"
    return ""


def report_floors(floor: Tensor, floor_used: Tensor, hint: str) -> str | None:
    """Name the classes whose covariance could not be factored with the floor asked for; a hint follows."""
    damaged = floor_used.isnan().nonzero().flatten().tolist()
    if damaged:
        raise SeamError(
            f"the running covariance of class {name_some(damaged)} is not finite: N1 returned non-finite embeddings "
            "during the epoch. Go back to a checkpoint, and lower the learning rate, clip gradients, or let ρ "
            f"grow more slowly{hint}"
        )
    raised = (floor_used > floor * (1 + 1e-9)).nonzero().flatten().tolist()
    if raised:
        return (
            f"the covariance of class {name_some(raised)} is too large for the floor {float(floor):.3g}, which was "
            f"raised to up to {float(floor_used[raised].max()):.3g}: embeddings are growing. Lower the learning "
            f"rate, or add weight decay{hint}"
        )
    return None


def first_output(n1: nn.Module, name: str, dim: int, x: Any, names: frozenset[str] | None) -> Tensor:
    """N1(x), which must be the output of its layer ``name`` (see :func:`is_output_of`)."""
    seen: list[Tensor] = []
    watched = n1.get_submodule(name).register_forward_hook(lambda _m, _i, out: seen.append(out))
    try:
        with watched, eagerly():
            z: Tensor = call(n1, x, names)
    except (TypeError, AttributeError) as error:
        if seen or (isinstance(x, Tensor) and takes_one(n1)):
            raise
        keys = f" with the keys {', '.join(map(repr, x))}" if isinstance(x, Mapping) else ""
        change = "rename the keys" if keys else "give it a dict instead"
        raise ArgumentTypeError(
            f"{type(n1).__name__} cannot be called with a {type(x).__name__}{keys} ({error}). A dict is passed by name "
            f"if the forward has arguments of these names, all else as one argument: {change}, or wrap the model "
            "in a module whose forward(self, inputs) calls it. Of a batch, the first part is the inputs and the second "
            "the labels"
        ) from error
    except RuntimeError as error:
        if not seen:
            raise  # the seam was not reached: it is the input, or a layer before
        raise SeamError(
            f"{type(n1).__name__} fails once its layer {name!r} is {dim} wide ({error}): its forward uses that layer's "
            "output further, as models with two heads do. Cut elsewhere: ps.lift((n1, n2), …)"
        ) from error
    check_output(n1, z)
    if len(seen) != 1 or not is_output_of(seen[0], z):
        raise SeamError(
            f"the output of {type(n1).__name__} is not the output of its layer {name!r}"
            f"{' (which was not called)' if not seen else ''}: something follows it, a softmax for instance. "
            "Remove that (the loss wants logits), name the classifier if it is another layer (at=…), or cut "
            "elsewhere: ps.lift((n1, n2), …)"
        )
    return z


def is_output_of(layer: Tensor, z: Tensor) -> bool:
    """Whether ``z`` is what a Linear returned, or per sample one of its positions, or the mean over them.

    To pick a token, as decoders do, or to average is the same before a Linear and behind it.
    """
    if z is layer or z.shape == layer.shape:
        return z is layer or torch.equal(z, layer)
    if z.ndim != 2 or layer.ndim < 3 or layer.shape[-1] != z.shape[1]:
        return False
    for axis, size in enumerate(layer.shape[:-1]):
        if size == len(z):  # that of the samples: the first, or the second of a recurrent layer's
            z_BTK, eps = layer.movedim(axis, 0).flatten(1, -2).to(z.dtype), 8 * torch.finfo(layer.dtype).eps
            picked_BT = torch.isclose(z_BTK, z[:, None], rtol=0, atol=0, equal_nan=True).all(2)
            if bool(picked_BT.any(1).all()) or torch.allclose(z_BTK.mean(1), z, eps, eps, equal_nan=True):
                return True
    return False


def name_some(classes: list[int]) -> str:
    """Return the first eight classes, in words."""
    return ", ".join(map(str, classes[:8])) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")


class StepGuard:
    """Notices optimizer steps that leave the prototypes out, from version counters alone: no sync, no hook.

    Every in-place update bumps a tensor's version. If the head's weights get new versions, step after step,
    while the prototypes hold a gradient and keep theirs, some optimizer has the one but not the other.
    Fused kernels and updates through ``.data`` bump nothing, so versions only raise the suspicion; values,
    read once the suspicion has lasted, decide.
    """

    def __init__(self) -> None:
        self.versions: tuple[int, int] | None = None
        self.left_out = 0
        self.suspected: Tensor | None = None
        self.snapshot: tuple[Tensor, Tensor] | None = None
        self.steps = 0  # since the last look between epochs
        self.moved = False  # the prototypes, in any epoch so far
        self.still = False  # the last epoch moved neither them nor the head
        self.idle = False  # although it had steps

    def step(self, prototypes: nn.Parameter, other: Tensor | None) -> None:
        """Called before each objective in training."""
        if other is None or not prototypes.requires_grad:
            return
        self.steps += 1
        now = prototypes._version, other._version
        if self.versions is None or now[0] != self.versions[0]:
            self.left_out = 0
        elif now[1] != self.versions[1] and prototypes.grad is not None:
            if not self.left_out:
                self.suspected = prototypes.detach().clone()
            self.left_out += 1
        self.versions = now
        if self.left_out < _PATIENCE:
            return
        steps, self.left_out = self.left_out, 0
        if self.suspected is not None and torch.equal(self.suspected, prototypes):
            raise SeamError(
                f"{steps} optimizer steps changed the network but not the prototypes: they are in no "
                "optimizer. Build it from the lifted module: torch.optim.SGD(net.param_groups(lr=…), …)"
            )

    def epoch(self, prototypes: nn.Parameter, other: Tensor | None) -> None:
        """Called between epochs: prototypes that never move although the head does, or neither."""
        if other is None or not prototypes.requires_grad:
            return
        steps, self.steps = self.steps, 0
        before, self.snapshot = self.snapshot, (prototypes.detach().clone(), other.detach().clone())
        if before is None or before[0].device != prototypes.device:
            return
        self.still = self.idle = False
        if not torch.equal(before[0], prototypes):
            self.moved = True
            return
        if torch.equal(before[1], other):
            self.still = True
            if steps >= _PATIENCE:
                self.idle = True
                warn(
                    f"{steps} batches of this epoch moved neither the head nor the prototypes. ps.lift copies the "
                    "model, so an optimizer on the original one trains nothing: give it net.param_groups(lr=…). If it "
                    "has them, no step was taken or the learning rate was 0"
                )
            return
        if self.moved:  # at the end of a schedule steps are too small for a few numbers to change
            return
        why = "their learning rate is 0 or they are in no optimizer"
        if not steps:
            why = f"net.objective was not called, and a loss on net(x) trains no seam (in a compiled loop: {why})"
        raise SeamError(
            f"the head moved during the epoch but the prototypes did not: {why}. "
            "Take net.objective(x, y).total for the loss and give the optimizer net.param_groups(lr=…); to freeze them "
            "on purpose, net.prototypes.requires_grad_(False)"
        )
