"""The paper's recipes compute what they always did, bit for bit on a CPU.

The loop below is a frozen copy of the engine's arithmetic: data order, seeds, schedule, update and the order of its
operations. Settings added since must not change a run that does not ask for them. It is compared on the machine that
runs the test, since floating-point results differ between CPU models.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protoseam as ps
from protoseam.lab import models
from protoseam.lab.data.dataset import ArrayDataset
from protoseam.lab.data.loading import load
from protoseam.lab.data.split import channel_statistics, stratified_split
from protoseam.lab.engine.config import RunConfig
from protoseam.lab.engine.epoch import train_epoch
from protoseam.lab.engine.run import Run
from protoseam.lab.experiments.recipes import recipe
from protoseam.lab.pipeline.augment import Augmentation, augment, normalise
from protoseam.seam.passes import as_deployed

EPOCHS = 2


def seed_of(seed: int, epoch: int, purpose: int) -> int:
    words = np.random.SeedSequence([seed, epoch, purpose]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def schedule(lr: float, total: int, warmup: int) -> list[float]:
    """Linear warm-up, then half a cosine, rounded to float32."""
    warmup = min(warmup, total // 2)
    rates = [lr * (t + 1) / warmup for t in range(warmup)]
    rest = total - warmup
    rates += [0.5 * lr * (1 + math.cos(math.pi * t / rest)) for t in range(rest)]
    return torch.tensor(rates, dtype=torch.float32).tolist()


class NesterovOnFlatBuffers:
    """All parameters in one padded buffer, as the engine lays them out: vectorised loops then round alike."""

    def __init__(self, params: list[nn.Parameter], momentum: float, decay: float) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay
        places, size = [], 0
        for p in params:
            places.append(size)
            size += -(-p.numel() // 128) * 128
        self.p, self.v, self.g = (torch.zeros(size) for _ in range(3))
        for p, place in zip(params, places, strict=True):
            view = torch.as_strided(self.p, p.shape, p.stride(), place)
            view.copy_(p.data)
            p.data = view
        self.g_views = [
            torch.as_strided(self.g, p.shape, p.stride(), at) for p, at in zip(params, places, strict=True)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, view in zip(self.params, self.g_views, strict=True):
            view.zero_() if p.grad is None else view.copy_(p.grad)
            p.grad = None
        g = self.g.float().add(self.p, alpha=self.decay)
        self.v.mul_(self.momentum).add_(g)
        g.add_(self.v, alpha=self.momentum)
        self.p.addcmul_(g, torch.tensor([lr]).expand_as(g), value=-1.0)


def reference(config: RunConfig, dataset: ArrayDataset, paper_augmentation: bool) -> dict[str, Tensor]:
    """The deployed weights after all epochs of ``config``."""
    train, _ = stratified_split(dataset.train_labels, config.validation, config.seed)
    mean, std = (
        torch.tensor(t, dtype=torch.float32) for t in channel_statistics(dataset.train_images, train)
    )
    images = torch.from_numpy(np.ascontiguousarray(dataset.train_images[train])).permute(0, 3, 1, 2)
    labels = torch.from_numpy(dataset.train_labels[train])
    size, batch = len(train), config.batch_size or 128
    steps = size // batch

    torch.manual_seed(config.seed)
    channels, height, width = images.shape[1:]
    model: nn.Module = models.build(config.model, dataset.num_classes, (channels, height, width))
    net: ps.Lifted | None = None
    if config.variant != "baseline":
        net = ps.lift(
            model,
            num_classes=dataset.num_classes,
            dim=32,
            schedule=ps.SineAnneal(1.0, 16.0),
            covariance=ps.ExactCovariance(floor=0.1),
            draws=1,
            refit=False,
        )
    if config.variant == "unlifted":
        assert net is not None
        model, net = net.deploy().train(), None
    trained: nn.Module = model if net is None else net
    trained.to(memory_format=torch.channels_last)
    lr = config.optim.lr
    assert lr is not None
    assert config.optim.weight_decay is not None
    optimizer = NesterovOnFlatBuffers(list(trained_parameters(trained, net)), 0.9, config.optim.weight_decay)
    rates = schedule(lr, EPOCHS * steps, round(config.optim.warmup_epochs * steps))
    generator = torch.Generator()

    for epoch in range(EPOCHS):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed_of(config.seed, epoch, 0)))
        if paper_augmentation:
            x_N = augment(
                images[order], order, policy=Augmentation(), seed=torch.tensor(config.seed),
                epoch=torch.tensor(epoch), mean=mean, std=std,
            )  # fmt: skip
        else:
            x_N = normalise(images[order], mean, std)
        x_N, y_N = x_N.contiguous(memory_format=torch.channels_last), labels[order]

        def sweep(x_N: Tensor = x_N, y_N: Tensor = y_N) -> tuple[Tensor, Tensor]:
            assert net is not None
            rows = min(4096, max(64, 2**21 // math.prod(x_N.shape[-2:]) // 64 * 64))
            with torch.no_grad(), as_deployed(trained):
                return torch.cat([net.embed(part) for part in x_N.split(rows)]), y_N

        if net is not None and epoch == 0:
            net.initialize(embeddings=sweep())
        trained.train()
        generator.manual_seed(seed_of(config.seed, epoch, 1))
        torch.manual_seed(seed_of(config.seed, epoch, 2**16))
        if net is not None:
            net.set_progress(epoch, EPOCHS, lr=rates[epoch * steps])
        for i in range(steps):
            x, y = x_N[i * batch : (i + 1) * batch], y_N[i * batch : (i + 1) * batch]
            if net is None:
                loss = F.cross_entropy(model(x).float(), y)
            else:
                loss = net(x, y, generator=generator).total
            loss.backward()
            optimizer.step(rates[epoch * steps + i])
        if net is not None:
            net.refresh(embeddings=sweep())
    deployed = copy.deepcopy(model) if net is None else net.deploy()
    return deployed.state_dict()


def trained_parameters(trained: nn.Module, net: ps.Lifted | None) -> list[nn.Parameter]:
    if net is None:
        return list(trained.parameters())
    return [*net.n1.parameters(), *net.n2.parameters(), net.prototypes]


def pictures() -> ArrayDataset:
    """Ten classes of noise around ten small colour pictures."""
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 256, (10, 8, 8, 3))

    def split(n: int) -> tuple[Any, Any]:
        labels = np.arange(n) % 10
        noisy = centres[labels] * 0.5 + rng.integers(0, 128, (n, 8, 8, 3))
        return noisy.clip(0, 255).astype(np.uint8), labels.astype(np.int64)

    return ArrayDataset("pictures", *split(290), *split(20), tuple("0123456789"))


CASES = [
    *(("digits-convnet-" + variant, False) for variant in ("baseline", "unlifted", "protoseam")),
    *(("cifar100-resnet8-" + variant, True) for variant in ("baseline", "unlifted", "protoseam")),
]


@pytest.mark.filterwarnings("ignore:.*:protoseam.seam.guards.SeamWarning")
@pytest.mark.parametrize(("name", "augmented"), CASES)
def test_a_recipe_is_bit_identical_to_the_frozen_loop(name: str, augmented: bool) -> None:
    config = dataclasses.replace(recipe(name), epochs=EPOCHS, device="cpu", audit_every=0)
    dataset = load("digits")
    if augmented:  # the recipe's settings on a few made-up images
        dataset = pictures()
        optim = dataclasses.replace(config.optim, lr=0.002)
        config = dataclasses.replace(config, augment="paper", optim=optim)
    run = Run(config, dataset)
    assert run.data.batch_size == (128 if augmented else 64)
    for _ in range(EPOCHS):
        train_epoch(run)
    expected = reference(config, dataset, augmented)
    found = run.deployed().state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
