"""A lifted network under the ``Trainer`` of Hugging Face's transformers.

model = AutoModelForSequenceClassification.from_pretrained(...)
lifted = LiftedForTrainer(ps.lift(model, num_classes=model.config.num_labels))
trainer = Trainer(
    lifted, args, train_dataset=..., eval_dataset=...,
    callbacks=[SeamCallback()], optimizers=lifted.optimizers(args),
)
trainer.train()
lifted.deploy().save_pretrained("out")  # AutoModelForSequenceClassification.from_pretrained("out")
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from protoseam.errors import SeamError, SeamWarning
from protoseam.seam.lifted import Lifted

# for gradient checkpointing (its second name is that from transformers 5.23 on), NEFTune, and the inputs in metrics
_ASKED = (
    "gradient_checkpointing_enable",
    "activation_checkpointing_enable",
    "get_input_embeddings",
    "main_input_name",
)


class LiftedForTrainer(nn.Module):
    """A lifted network with the call that the Trainer expects of a model: ``forward(labels=None, **inputs)``.

    In training mode the loss is the lifted objective; in eval mode it is the cross-entropy of the deployed network.

    Args:
        net: a lifted text or image classifier of transformers.
    """

    # The objective is a mean over the batch: the Trainer divides it by the number of accumulated batches itself.
    accepts_loss_kwargs = False
    finished: Tensor  # epochs whose refresh is done, to see after a resume whether one is missing

    def __new__(cls, net: Lifted | None = None) -> Self:
        # The Trainer drops the columns of a data set that forward does not name, and it looks for the names of the
        # labels in the class: so each network gets a subclass whose forward has the signature of the wrapped one.
        if net is not None:
            cls = type(cls.__name__, (cls,), {"forward": _with_signature_of(net.n1)})
        return super().__new__(cls)

    def __init__(self, net: Lifted) -> None:
        super().__init__()
        self.net = net
        self.config = getattr(net.n1, "config", None)
        self.register_buffer("finished", torch.zeros((), dtype=torch.int64))

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        """The loss of a batch, and in eval mode its logits.

        Args:
            labels: ``(B,)``; None to predict.
            **inputs: what the wrapped model takes, by name.

        Returns:
            ``loss`` if there are labels, and ``logits`` in eval mode.

        Raises:
            SeamError: if training asks for logits: a loss on them would send gradients from N2 to N1.
        """
        if self.training and torch.is_grad_enabled():
            if labels is None:
                raise SeamError(
                    "a training step came without labels: the Trainer computes another loss on the logits "
                    "(compute_loss_func or label_smoothing_factor). Give ps.lift a loss_fn or label_smoothing instead"
                )
            return {"loss": self.net(inputs, labels).total}
        logits = self.net(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}

    def optimizers(self, args: Any) -> tuple[torch.optim.Optimizer, None]:
        """What ``Trainer(optimizers=…)`` takes: AdamW with the seam's own rates, and the Trainer's own schedule.

        Args:
            args: the ``TrainingArguments``; learning rate, weight decay, betas and epsilon are theirs.
        """
        groups = self.net.param_groups(lr=args.learning_rate, weight_decay=args.weight_decay)
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon), None

    def __getattr__(self, name: str) -> Any:
        """What the Trainer asks of the model itself is the wrapped model's."""
        return getattr(self.net.n1, name) if name in _ASKED else super().__getattr__(name)

    def deploy(self, *, fold: bool = True) -> nn.Module:
        """The plain model of transformers, with ``save_pretrained``.

        Args:
            fold: multiply the two Linears around the seam into one: the architecture that its config describes.
        """
        return self.net.deploy(fold=fold)


def _with_signature_of(model: nn.Module) -> Any:
    def forward(self: LiftedForTrainer, **inputs: Any) -> dict[str, Tensor]:
        return LiftedForTrainer.forward(self, **inputs)

    own = inspect.signature(LiftedForTrainer.forward).parameters
    named = {
        name: p.replace(kind=p.KEYWORD_ONLY)
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    labels = own["labels"].replace(kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [own["self"], *{**named, "labels": labels}.values()]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


class SeamCallback(TrainerCallback):
    """Calls ``initialize``, ``set_progress`` and ``refresh`` of a ``LiftedForTrainer`` at their times."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the data, unless a checkpoint was loaded."""
        model, loader = _lifted(kwargs["model"]), kwargs["train_dataloader"]
        if args.label_smoothing_factor:
            raise SeamError(
                f"label_smoothing_factor={args.label_smoothing_factor} replaces the lifted objective by a loss on the "
                "logits: leave it out, and lift with label_smoothing instead"
            )
        if state.num_train_epochs == sys.maxsize:
            raise SeamError(
                "the training data has no length, so the Trainer does not know its epochs, which ρ and Σ̂ follow: "
                "give a data set with a length"
            )
        if model.net._groups is None:
            warnings.warn(
                "the optimizer has one learning rate for all, and N2 and the prototypes fall behind at N1's: pass "
                "optimizers=model.optimizers(args) to the Trainer. With model_init the Trainer takes no optimizers: "
                "write a subclass whose create_optimizer sets self.optimizer, _ = self.model.optimizers(self.args) and "
                "returns it",
                SeamWarning,
                stacklevel=2,
            )
        if not model.net.is_initialized:
            model.net.initialize(loader)
        elif int(model.finished) < int(state.epoch or 0):  # saved by a step that ended its epoch
            self._refresh(model, int(state.epoch), loader)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set ρ(t)."""
        model, rate = _lifted(kwargs["model"]), kwargs["optimizer"].param_groups[0]["lr"]
        model.net.set_progress(int(state.epoch or 0), state.num_train_epochs, lr=rate)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make new factors of Σ̃, before the Trainer saves or evaluates."""
        self._refresh(_lifted(kwargs["model"]), round(state.epoch), kwargs["train_dataloader"])

    def _refresh(self, model: LiftedForTrainer, epoch: int, loader: Any) -> None:
        model.net.refresh(loader)
        model.finished.fill_(epoch)


def _lifted(model: Any) -> LiftedForTrainer:
    if not isinstance(model, LiftedForTrainer):
        raise SeamError(
            f"SeamCallback found a {type(model).__name__} in the Trainer: give it LiftedForTrainer(ps.lift(model, …))"
        )
    return model
