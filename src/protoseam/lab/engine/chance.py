"""Sentences about whether a network has learned anything, and what to try if it has not."""

from __future__ import annotations

from collections.abc import Sequence

from protoseam.lab.engine.config import OptimConfig, RunConfig
from protoseam.lab.pipeline.resident import suitable_batch

FEW_STEPS = 10  # per epoch


def at_chance(right: Sequence[int], counts: Sequence[int], classes: Sequence[str], what: str) -> str | None:
    """Return a sentence if ``right`` of these ``counts`` of each class are no better than guessing; else None.

    Guessing gives 1/n in the mean over the classes, and so does one answer to everything. Up to half as much again (at
    most ten points) counts as chance too.
    """
    seen = [(r, count) for r, count in zip(right, counts, strict=True) if count]
    n = len(seen)
    if n < 2 or sum(r / count for r, count in seen) / n > min(1.5 / n, 1 / n + 0.1):
        return None
    most = max(range(len(counts)), key=lambda c: counts[c])
    return (
        f"{what} accuracy {100 * sum(right) / sum(counts):.2f} % is near chance: with {len(classes)} classes, always "
        f"answering {classes[most]!r} gives {100 * counts[most] / sum(counts):.2f} %."
    )


def what_to_try(config: RunConfig, samples: int, batch_size: int, world: int = 1) -> str:
    """Return what to change in a run that does not learn, as options of the command."""
    lr, _ = config.optim.resolved()
    better = suitable_batch(samples, world)
    options = [f"--epochs {2 * config.epochs}"]
    if better < batch_size and samples // batch_size < 2 * FEW_STEPS:
        options.insert(0, f"--batch_size {better}")
    usual, _ = OptimConfig(name=config.optim.name).resolved()
    if config.optim.name == "adamw":
        options.append(f"--optim.name adamw --optim.lr {usual if lr < usual / 2 else lr * 3:g}")
    else:
        other = usual if lr < usual / 2 else lr / 5
        options += [f"--optim.lr {other:g}", "--optim.name adamw with its own learning rate"]
    if config.optim.clip is None or config.optim.clip > 1:
        options.append("--optim.clip 1")
    check = " --variant baseline shows whether cross-entropy learns this data."
    return f"Try one of {', '.join(options)}.{check if config.variant != 'baseline' else ''}"


def optimizer_of(config: RunConfig, weight_decay: float) -> str:
    """Return a sentence: which optimizer trains, with which settings."""
    lr, _ = config.optim.resolved()
    name = "AdamW" if config.optim.name == "adamw" else "SGD"
    clip = f", gradients clipped at {config.optim.clip:g}" if config.optim.clip else ""
    high = (
        " This rate is high for AdamW: --optim.name sgd takes such rates."
        if name == "AdamW" and lr > 0.01
        else ""
    )
    return f"{name} with learning rate {lr:g} and weight decay {weight_decay:.3g}{clip}.{high}"


def epoch_of(samples: int, batch_size: int) -> str:
    """Return a sentence: how many steps an epoch has, and how many samples it leaves out."""
    steps, rest = divmod(samples, batch_size)
    told = f"{samples:,} training samples in batches of {batch_size}: {steps:,} steps per epoch"
    return f"{told}; {rest} samples, others in each epoch, are left to later epochs." if rest else f"{told}."


def few_steps(config: RunConfig, samples: int, batch_size: int, world: int = 1) -> str | None:
    """Return a sentence if an epoch has fewer than ten steps; else None."""
    steps = samples // batch_size
    if steps >= FEW_STEPS:
        return None
    smaller = suitable_batch(samples, world)
    remedy = (
        f"--batch_size {smaller} gives {samples // smaller}"
        if smaller < batch_size
        else f"--epochs {-(-FEW_STEPS * config.epochs // max(1, steps))} gives as many as {FEW_STEPS} per epoch would"
    )
    return (
        f"an epoch has only {steps} {'step' if steps == 1 else 'steps'} ({samples} samples in batches of "
        f"{batch_size}), so {config.epochs} epochs are {steps * config.epochs} updates: {remedy}."
    )
