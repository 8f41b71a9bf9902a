"""A small vision transformer, pre-norm, with learned positions (Dosovitskiy et al. 2021)."""

# B batch, C channels, H height, W width, L tokens, D width of a token, A heads, E width of a head

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protoseam.errors import ArgumentError

Pool = Literal["mean", "cls"]
Stem = Literal["patch", "conv"]
Init = Literal["trunc_normal", "torch"]


class PatchStem(nn.Module):
    """Non-overlapping patches, each mapped linearly to a token."""

    def __init__(self, in_channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(in_channels * patch * patch, dim)

    def patches(self, x_BCHW: Tensor) -> Tensor:
        """The image cut up: (B, L, p·p·C)."""
        B, C, H, W = x_BCHW.shape
        p = self.patch
        # Channels run fastest, so that a channels_last image is read in rows of p·C neighbours.
        x = x_BCHW.permute(0, 2, 3, 1).reshape(B, H // p, p, W // p, p, C).transpose(2, 3)
        return x.reshape(B, (H // p) * (W // p), p * p * C)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.proj(self.patches(x_BCHW))


class ConvStem(nn.Module):
    """One 3×3 convolution, then one of stride 2 for each halving; BN and ReLU between them."""

    def __init__(self, in_channels: int, patch: int, dim: int) -> None:
        super().__init__()
        halvings = patch.bit_length() - 1
        if patch != 1 << halvings or dim % patch:
            raise ArgumentError(
                f"a convolutional stem halves the image: patch={patch} must be a power of two"
                f" that divides dim={dim}"
            )
        self.patch = patch
        width = dim >> halvings
        layers: list[nn.Module] = [nn.Conv2d(in_channels, width, 3, padding=1, bias=halvings == 0)]
        for step in range(halvings):
            last = step == halvings - 1
            layers += [nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=last))
            width *= 2
        self.layers = nn.Sequential(*layers)

    def products(self, x_BCHW: Tensor) -> Tensor:
        """The tokens without the last convolution's bias."""
        last = self.layers[-1]
        assert isinstance(last, nn.Conv2d)
        y = F.conv2d(self.layers[:-1](x_BCHW), last.weight, None, last.stride, last.padding)
        return y.flatten(2).transpose(1, 2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.layers(x_BCHW).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one matrix product."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ArgumentError(f"dim={dim} does not divide into heads={heads}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        qkv = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads)
        q_BALE, k_BALE, v_BALE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y_BALE = F.scaled_dot_product_attention(q_BALE, k_BALE, v_BALE)
        return self.drop(self.proj(y_BALE.transpose(1, 2).reshape(B, L, D)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); either branch may be dropped for a sample."""

    def __init__(self, dim: int, heads: int, mlp: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp, dim), nn.Dropout(dropout)
        )
        self.drop_path = drop_path

    def _keep(self, branch_BLD: Tensor) -> Tensor:
        # Stochastic depth (Huang et al. 2016): scaled by 1/(1-p), so that evaluation needs no factor.
        if not self.training or self.drop_path == 0.0:
            return branch_BLD
        shape = (branch_BLD.shape[0],) + (1,) * (branch_BLD.dim() - 1)
        kept = torch.rand(shape, device=branch_BLD.device) >= self.drop_path
        return branch_BLD * kept.to(branch_BLD.dtype) / (1.0 - self.drop_path)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self._keep(self.attention(self.norm1(x_BLD)))
        return x_BLD + self._keep(self.mlp(self.norm2(x_BLD)))


class VisionTransformer(nn.Module):
    """Stem, learned positions, pre-norm blocks, norm, pool, `head`: 4.8 M parameters for 100 classes.

    The paper calls its ViT-S custom and leaves the sizes unstated; these defaults are this project's.

    Parameters
    ----------
    patch: side of a patch; None is image_size // 8, so 64 tokens: 4 for 32×32 and 8 for 64×64 images.
    pool: "mean" over the tokens, or "cls", a learned token of its own.
    dropout: after the positions, the attention's projection and both layers of the MLP.
    drop_path: rate of stochastic depth at the last block; 0 at the first.
    stem: "patch" (linear) or "conv" (3×3 convolutions, stride 2 for each halving).
    init: "trunc_normal" (std .02, zero biases, in blocks and head) or "torch" (the framework's own).
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int = 32,
        patch: int | None = None,
        dim: int = 256,
        depth: int = 6,
        heads: int = 8,
        mlp: int = 1024,
        pool: Pool = "mean",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        stem: Stem = "patch",
        init: Init = "trunc_normal",
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        patch = max(image_size // 8, 1) if patch is None else patch
        for name, size in (("patch", patch), ("dim", dim), ("heads", heads), ("mlp", mlp)):
            if size < 1:
                raise ArgumentError(f"{name}={size} must be at least 1")
        if image_size % patch:
            raise ArgumentError(f"image_size={image_size} does not divide into patches of {patch}")
        for name, value, known in (
            ("pool", pool, ("mean", "cls")),
            ("stem", stem, ("patch", "conv")),
            ("init", init, ("trunc_normal", "torch")),
        ):
            if value not in known:
                raise ArgumentError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
        tokens = (image_size // patch) ** 2 + (pool == "cls")
        self.pool = pool
        self.stem = (PatchStem if stem == "patch" else ConvStem)(in_channels, patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "cls" else None
        self.positions = nn.Parameter(torch.empty(1, tokens, dim))
        self.drop = nn.Dropout(dropout)
        # The rate grows linearly with depth (Huang et al. 2016, §3).
        rates = [drop_path * index / max(depth - 1, 1) for index in range(depth)]
        self.blocks = nn.Sequential(*(Block(dim, heads, mlp, dropout, rate) for rate in rates))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self._initialize(init)

    def _initialize(self, init: Init) -> None:
        nn.init.trunc_normal_(self.positions, std=0.02)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        if init == "torch":
            return
        # As in BERT and the reference ViT code; the stem keeps PyTorch's fan-in rule, because .02 would
        # leave the image quieter than the positions.
        for part in (self.blocks, self.head):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    nn.init.zeros_(module.bias)

    # A faster way to compute `features`, set by `protoseam.lab.kernels.accelerate`.
    fused: Callable[[Tensor], Tensor] | None = None

    def features(self, x_BCHW: Tensor) -> Tensor:
        """What the classifier reads: (B, D)."""
        return self.plain_features(x_BCHW) if self.fused is None else self.fused(x_BCHW)

    def plain_features(self, x_BCHW: Tensor) -> Tensor:
        """`features`, layer by layer."""
        x_BLD = self.stem(x_BCHW)
        if self.cls_token is not None:
            first_B1D = self.cls_token.expand(x_BLD.shape[0], -1, -1).to(x_BLD.dtype)
            x_BLD = torch.cat([first_B1D, x_BLD], dim=1)
        x_BLD = self.norm(self.blocks(self.drop(x_BLD + self.positions)))
        return x_BLD[:, 0] if self.pool == "cls" else x_BLD.mean(dim=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.features(x_BCHW))


vit_s = VisionTransformer  # the name that `build` knows
