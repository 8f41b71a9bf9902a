"""Counter-based random words: a pure function of (seed, epoch, index, draw number), on any device.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), written
with int64 tensor operations. There is no state to save: a resumed run, another batch composition or another
device sees the same numbers. Words are kept in int64 tensors and lie in [0, 2³²).
"""

# B images, N Philox blocks, D draws = 4·N words

from __future__ import annotations

import torch
from torch import Tensor

from protoseam.errors import ArgumentError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Salmon et al. 2011, table 2: philox4x32
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and √3 − 1: the key schedule of the same paper
_ROUNDS = 10  # the paper's choice with a safety margin; 7 already pass BigCrush


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low halves of the 64-bit product; the int64 product wraps, its bits are the unsigned ones."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on broadcastable int64 tensors of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _scalar(value: int | Tensor, name: str, device: torch.device) -> Tensor:
    """A 0-dim int64 tensor; an integer is filled in on the device, a tensor is never read by the host."""
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"random_words: {name} is a {tuple(value.shape)} {value.dtype} tensor; pass a 0-dim int64 one"
            )
        return value.to(torch.int64)
    if not 0 <= value < 2**63:
        raise ArgumentError(f"random_words: {name}={value} is outside [0, 2^63); pass a non-negative integer")
    return torch.full((), value, dtype=torch.int64, device=device)


def random_words(indices_B: Tensor, *, seed: int | Tensor, epoch: int | Tensor, count: int = 4) -> Tensor:
    """The first `count` draws of every index, as a (count, B) int64 tensor of 32-bit words.

    Key: the 64 bits of the seed. Counter: (index low, index high, epoch, draw number // 4), so that asking
    for more draws never changes those before. `seed` and `epoch` may be 0-dim tensors on the device: a
    compiled caller then serves every run and epoch with one graph.
    """
    if indices_B.ndim != 1 or indices_B.dtype != torch.int64:
        raise ArgumentError(
            f"random_words: indices are {tuple(indices_B.shape)} {indices_B.dtype}; pass (B,) int64 positions"
        )
    seed_word = _scalar(seed, "seed", indices_B.device)
    epoch_word = _scalar(epoch, "epoch", indices_B.device) & _MASK
    blocks = -(-count // 4)
    block_N1 = torch.arange(blocks, device=indices_B.device).unsqueeze(1)
    counter = (indices_B & _MASK, (indices_B >> 32) & _MASK, epoch_word, block_N1)
    words = philox4x32(counter, (seed_word & _MASK, (seed_word >> 32) & _MASK))
    shape = (blocks, indices_B.shape[0])
    words_DB = torch.stack([word.expand(shape) for word in words], dim=1).flatten(0, 1)
    return words_DB[:count]


def uniform(words: Tensor) -> Tensor:
    """Words to [0, 1) in float64; the conversion is exact, so every device gets the same number."""
    return words.to(torch.float64) * 2.0**-32


def uniform_integer(words: Tensor, bound: int | Tensor) -> Tensor:
    """Words to {0, …, bound − 1} by the high half of word·bound (Lemire 2019); bias below bound·2⁻³²."""
    return (words * bound) >> 32


def bernoulli(words: Tensor, probability: float) -> Tensor:
    """True with the given probability, to within 2⁻³²."""
    return words < round(probability * 2**32)
