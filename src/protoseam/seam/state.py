"""Tensors that a module saves, loads and moves like buffers, but that no host averages or broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class KeepsState(nn.Module):
    """A module with state that is neither a parameter nor a buffer.

    torch's ``AveragedModel`` and timm's ``ModelEmaV3`` average buffers, and DistributedDataParallel overwrites them
    with those of the first process. The average of two counts, or of two values of ρ, means nothing, and each process
    sums samples of its own. State of that kind is kept as plain attributes. Their names in ``state_dict()`` are those
    that buffers would have; the values there are copies, because ``ModelEmaV3`` averages every value in place.
    """

    _kept: tuple[str, ...] = ()

    def keep(self, **tensors: Tensor) -> None:
        """Keep tensors as attributes that are saved, loaded and moved with the module.

        Args:
            **tensors: the attributes' names and first values.
        """
        for name, value in tensors.items():
            setattr(self, name, value)
        self._kept = (*self._kept, *tensors)

    def kept(self) -> list[Tensor]:
        """Return the kept tensors themselves, not copies."""
        return [getattr(self, name) for name in self._kept]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in self._kept:
            setattr(self, name, fn(getattr(self, name)))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._kept:
            destination[prefix + name] = getattr(self, name).detach().clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *more)
        missing_keys, unexpected_keys, error_msgs = more[2:]  # after the metadata and ``strict``
        mine = {prefix + name: getattr(self, name) for name in self._kept}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in mine]
        for key, own in mine.items():
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != own.shape:
                shapes = f"{tuple(state_dict[key].shape)} in the checkpoint, {tuple(own.shape)} here"
                error_msgs.append(f"size mismatch for {key}: {shapes}")
            else:
                own.copy_(state_dict[key])
