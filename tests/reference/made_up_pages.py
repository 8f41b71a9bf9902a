"""Runs that were never trained, as a page needs them: clusters that drift apart over the epochs."""

from __future__ import annotations

from typing import Any

import torch

from protoseam.lab.engine.config import LiftConfig, RunConfig, to_dict
from protoseam.lab.engine.latents import POINTS, Latents, complete, evenly
from protoseam.lab.engine.seamfile import Seam
from protoseam.lab.report.gather import Gathered


def metrics(epochs: int, *, lifted: bool = True, offset: float = 0.0) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, epochs + 1):
        done = epoch / epochs
        terms = {"consensus": 1.5 - done, "classification": 2 - 1.8 * done, "repulsion": 1 - 0.5 * done}
        rows.append(
            {
                "epoch": epoch,
                "loss": {"total": sum(terms.values()), **(terms if lifted else {})},
                "validation_accuracy": 0.1 + 0.8 * done + offset,
                "rho": 1 + 15 * done if lifted else None,
                "lr": 0.1 * (1 - done),
                "seconds": 1.0,
                "images_per_second": 1000.0,
                "seam": {"prototype_gap_min": 2 + done, "prototype_gap_mean": 3 + done} if lifted else {},
            }
        )
    return rows


def made_up_run(
    *,
    classes: int = 10,
    dim: int = 2,
    images: int = 400,
    epochs: int = 12,
    side: int = 8,
    channels: int = 1,
    scatter: float = 1.0,
) -> Gathered:
    """A finished ProtoSeam run whose embeddings were drawn, with noise for test images."""
    generator = torch.Generator().manual_seed(0)
    centre = 4 * torch.randn(classes, dim, generator=generator)
    noise = scatter * torch.randn(images, dim, generator=generator)
    label = torch.arange(images) % classes
    weight, bias = centre / 4, -centre.square().sum(1) / 8
    last = torch.nn.Linear(dim, classes)
    with torch.no_grad():
        last.weight.copy_(weight)
        last.bias.copy_(bias)
    factors = 0.8 * torch.eye(dim).repeat(classes, 1, 1)
    latents = Latents(epochs)
    rows = evenly(images, POINTS)
    for epoch in sorted(latents.wanted):
        done = epoch / epochs
        seam = Seam(done * centre, factors)
        latents.add(epoch, (done * centre[label] + noise)[rows], last, seam)
    z = centre[label] + noise
    pictures = torch.randint(0, 256, (images, channels, side, side), generator=generator, dtype=torch.uint8)
    bound = {
        "risk": 0.3, "bound": 1.5, "sampled_loss": 0.4, "mean_mismatch": 0.3, "covariance_mismatch": 0.2,
        "non_gaussianity": 0.6,
    }  # fmt: skip
    with torch.no_grad():
        complete(latents, z, last(z), label, Seam(centre, factors), pictures, bound)
    correct = float((latents.rest["first"] == latents.rest["label"]).double().mean())
    names = [f"class {c}" for c in range(classes)]
    names[1] = "<img src=x onerror=alert(1)>&\"'"
    return Gathered(
        name="made up",
        config=to_dict(RunConfig(epochs=epochs, lift=LiftConfig(dim=dim))),
        metrics=metrics(epochs),
        summary={
            "test_accuracy": correct,
            "validation_accuracy": 0.9,
            "seconds": 75.0,
            "parameters": 12345,
            "epochs": epochs,
        },
        environment={"protoseam": "0.1.0", "torch": "2.13.0", "device": "a computer"},
        classes=names,
        latents=latents.tensors(),
        bound=bound,
    )


def several() -> list[Gathered]:
    """Baseline and ProtoSeam over three seeds."""
    runs = []
    for variant, offset in (("baseline", 0.0), ("protoseam", 0.02)):
        for seed in (1, 2, 3):
            config = to_dict(RunConfig(variant=variant, seed=seed, epochs=5))  # type: ignore[arg-type]
            accuracy = 0.9 + offset + 0.001 * seed * (1 + offset * 20)
            runs.append(
                Gathered(
                    name=f"{variant}-{seed}",
                    config=config,
                    metrics=metrics(5, lifted=variant == "protoseam", offset=offset),
                    summary={"test_accuracy": accuracy, "validation_accuracy": accuracy, "seconds": 10.0},
                )
            )
    return runs
