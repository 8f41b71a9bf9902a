"""A lifted network as a training task of timm.

``LiftedTask`` stands where timm's ``ClassificationTask`` does: it has EMA, DDP, checkpoints and gradient clipping from
``TrainingTask``. ``examples/timm_train.py`` is a whole training script.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protoseam.seam.lifted import Lifted


class LiftedTask(TrainingTask):
    """Trains a lifted network by its objective; validation sees the deployed network's logits.

    Args:
        net: the lifted network, e.g. ``ps.lift(timm.create_model("resnet50"), num_classes=10)``.
        device: where the task's tensors are; the network's device unless given.
        dtype: of the task's tensors; torch's default unless given.
        verbose: part of timm's signature; this task logs nothing.
    """

    multi_label = False  # what timm's task of independent labels has; each image here has one class

    def __init__(
        self,
        net: Lifted,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(device=device or net.prototypes.device, dtype=dtype, verbose=verbose)
        self.trainable_module: nn.Module = net

    @property
    def net(self) -> Lifted:
        """The lifted network itself, without DDP around it."""
        net: Lifted = unwrap_model(self.trainable_module)
        return net

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The objective of a batch.

        Args:
            input: images ``(B, C, H, W)``.
            target: labels ``(B,)``, or soft targets ``(B, n)`` as timm's Mixup yields them.

        Returns:
            ``loss``, the one to minimise, and its terms ``consensus``, ``classification`` and ``repulsion``.
        """
        terms = self.trainable_module(input, target)
        parts = {name: value.detach() for name, value in terms._asdict().items() if name != "total"}
        return {"loss": terms.total, **parts}

    def prepare_distributed(self, device_ids: list[int] | None = None, **ddp_kwargs: Any) -> LiftedTask:
        """Wrap the network in DistributedDataParallel; call it after ``setup_ema``.

        Args:
            device_ids: this process's device, e.g. ``[local_rank]``; None on a CPU.
            **ddp_kwargs: further arguments of DistributedDataParallel.
        """
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **compile_kwargs: Any) -> nn.Module:
        """Compile N1 in place, where the time goes; the seam's own step stays as it is.

        Args:
            backend: of ``torch.compile``.
            mode: of ``torch.compile``.
            **compile_kwargs: further arguments of ``torch.compile``.
        """
        self.net.n1.compile(backend=backend, mode=mode, **compile_kwargs)
        return self.trainable_module

    def deploy(self, *, ema: bool = False, fold: bool = True) -> nn.Module:
        """The plain network, which ``timm.models.save_for_hf`` and any other tool of timm's takes.

        Args:
            ema: take the averaged weights; ``setup_ema`` must have been called.
            fold: multiply the two Linears around the seam into one, so that the architecture is timm's own.
        """
        module = self.trainable_module_ema.module if ema else self.net
        plain: nn.Module = unwrap_model(module).deploy(fold=fold)
        return plain
