"""One operation of RandAugment on each image, as `augment` applies it: geometry, then levels."""

from __future__ import annotations

from torch import Tensor

from protoseam.lab.pipeline.randaugment import RandAugment, photometric, warp


def apply_op(
    images_BCHW: Tensor, op_B: Tensor, negative_B: Tensor, *, policy: RandAugment | None = None
) -> Tensor:
    """Operation number `op_B[b]` of `OPS` on each uint8 image, at the policy's magnitude, negated where asked."""
    policy = RandAugment() if policy is None else policy
    moved_BCHW = warp(images_BCHW, op_B, negative_B, policy=policy)
    return photometric(moved_BCHW, op_B, negative_B, policy=policy)
