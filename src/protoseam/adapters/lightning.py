"""A Lightning callback that gives a lifted network what each epoch needs; the user's LightningModule stays.

Data in: Lightning's hooks and its training loader; data out: calls of ``initialize``, ``set_progress`` and ``refresh``,
each at its time. It owns nothing but whether the factors of Σ̃ are older than the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from protoseam.errors import SeamError
from protoseam.seam.calling import inputs_and_labels
from protoseam.seam.last_step import can_fit
from protoseam.seam.lifted import Lifted
from protoseam.seam.loaders import swept
from protoseam.seam.processes import world_size

_RANDOM_STATES = "protoseam_random_states"  # in a checkpoint: one list per process
_TUNERS = (BatchSizeFinder, LearningRateFinder)  # they train in on_fit_start, without the other callbacks


class SeamCallback(Callback):
    """Prototypes, ρ and covariances of a LightningModule's lifted network: ``Trainer(callbacks=[SeamCallback()])``.

    - Before the sanity validation, or else before training, it looks at the training data (``net.initialize``), unless
      a checkpoint was loaded.
    - Each epoch starts with its ρ (``net.set_progress``). After its last batch, before validation and checkpoints, come
      new factors of Σ̃ (``net.refresh``). A fit that ``trainer.should_stop`` ends early gets its last step, the
      closed form of N2, when it ends.
    - A checkpoint holds torch's random state, too, so that resuming at the end of an epoch is exact.

    The looks at the data read the training set of ``trainer.train_dataloader``, each sample once over all processes,
    through the module's batch transfer hooks and in the trainer's precision. The network is in eval mode then, so a
    hook that augments can ask for ``self.net.training``. They read no more batches than the whole training does, unless
    it takes more to see each class once.

    Args:
        epochs: over how many ρ rises; the trainer's ``max_epochs`` or ``max_steps`` unless given. Needed where the
            trainer has neither (``max_epochs=-1``).
        sweep: another loader for the looks at the data, where the training loader yields mixed targets. It is read
            whole, except under ``fast_dev_run``.
    """

    def __init__(self, *, epochs: int | None = None, sweep: Iterable[Any] | None = None) -> None:
        if epochs is not None and epochs < 1:
            raise SeamError(f"SeamCallback(epochs={epochs}): ρ rises over at least one epoch")
        self.epochs, self.sweep = epochs, sweep
        self._stale = False  # whether a step was taken since the last refresh
        self._resumed: list[torch.Tensor] = []  # a checkpoint's random states, until the first batch after it

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if _tunes(trainer):
            trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _tunes(trainer):
            self.on_sanity_check_start(trainer, pl_module)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _lifted(pl_module).is_initialized:
            trainer.fit_loop.setup_data()  # Lightning would load the training data after the sanity check only
            self._initialize(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._total(trainer)  # fail before the first epoch
        self._initialize(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        _lifted(pl_module).set_progress(trainer.current_epoch, self._total(trainer), lr=rate)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stale, self._resumed = True, []
        if trainer.is_last_batch:  # on_train_epoch_end comes after validation, and after its checkpoint
            self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stale:  # an epoch that max_steps or a signal has ended before its last batch
            self._refresh(trainer, pl_module)
        # a checkpoint from after validation: the epoch ends again, and Lightning draws its order twice
        self._restore(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = _lifted(pl_module)
        epoch, epochs = net.progress.tolist()
        if trainer.should_stop and epoch + 1 < epochs and net.refit and can_fit(net):
            self._look(net._take_last_step, trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        device, own = trainer.strategy.root_device, [torch.get_rng_state()]
        if device.type == "cuda":
            own.append(torch.cuda.get_rng_state(device))
        every: list[Any] = [own]
        if world_size() > 1:  # Lightning saves what the first process has
            every = [None] * world_size()
            dist.all_gather_object(every, own)
        checkpoint[_RANDOM_STATES] = every

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        every = checkpoint.get(_RANDOM_STATES, [])
        if trainer.training and trainer.global_rank < len(every):
            self._resumed = every[trainer.global_rank]
            self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        if self._resumed:
            torch.set_rng_state(self._resumed[0].cpu())
        if len(self._resumed) > 1 and device.type == "cuda":
            torch.cuda.set_rng_state(self._resumed[1].cpu(), device)

    def _initialize(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (net := _lifted(pl_module)).is_initialized:
            self._look(net.initialize, trainer, pl_module)

    def _refresh(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(_lifted(pl_module).refresh, trainer, pl_module)
        self._stale = False

    def _look(self, look: Callable[[Any], object], trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader if self.sweep is None else self.sweep
        with trainer.precision_plugin.forward_context():
            look(_batches(trainer, pl_module, loader, self._most(trainer)))

    def _most(self, trainer: Any) -> float:
        """How many batches the whole training reads; under ``overfit_batches`` they are the same in each epoch."""
        if self.sweep is not None and not trainer.fast_dev_run:
            return math.inf
        batches = trainer.num_training_batches * (1 if trainer.overfit_batches else self._total(trainer))
        steps = trainer.max_steps if trainer.max_steps > 0 else math.inf
        return float(min(batches, steps * trainer.accumulate_grad_batches))

    def _total(self, trainer: Trainer) -> int:
        if self.epochs is not None:
            return self.epochs
        totals = [] if trainer.max_epochs in (None, -1) else [trainer.max_epochs]
        if trainer.max_steps > 0 and math.isfinite(trainer.num_training_batches):
            steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            totals.append(math.ceil(trainer.max_steps / steps))
        if not totals:
            raise SeamError(
                f"the trainer does not say how many epochs there will be (max_epochs={trainer.max_epochs}, "
                f"max_steps={trainer.max_steps}), but ρ rises from the first to the last: say it with "
                "SeamCallback(epochs=…)"
            )
        return max(1, min(totals))


def _tunes(trainer: Any) -> bool:
    return any(isinstance(callback, _TUNERS) for callback in trainer.callbacks)


def _lifted(pl_module: LightningModule) -> Lifted:
    found = [module for module in pl_module.modules() if isinstance(module, Lifted)]
    if len(found) != 1:
        raise SeamError(
            f"SeamCallback looks after the one lifted network of a LightningModule, but {type(pl_module).__name__} has "
            f"{len(found)}: set one in its __init__, as in self.net = ps.lift(model, num_classes=10)"
        )
    return found[0]


def _batches(trainer: Trainer, pl_module: LightningModule, loader: Any, most: float) -> Iterator[Any]:
    """Each sample once, in batches as ``training_step`` would get them; so many batches, or until each class was seen.

    A fresh prototype needs a sample of its class.
    """
    missing = set(range(_lifted(pl_module).num_classes))
    with swept(loader) as batches:
        for read, batch in enumerate(batches, 1):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            yield batch
            if missing:
                y = torch.as_tensor(inputs_and_labels(batch, "initialize")[1])
                missing -= set((y.argmax(1) if y.ndim > 1 else y).tolist())
            if read >= most and not missing:
                break
