"""Sentences about whether a network has learned anything, and what to try if it has not."""

from __future__ import annotations

from collections.abc import Sequence

from protoseam.lab.engine.config import OptimConfig, RunConfig
from protoseam.lab.pipeline.resident import suitable_batch

FEW_STEPS = 10  # per epoch


def at_chance(accuracy: float, counts: Sequence[int], classes: Sequence[str], what: str) -> str | None:
    """Return a sentence if ``accuracy`` is no better than guessing on samples with these class counts; else None.

    Guessing gives 1/n. Up to half as much again (at most ten points) counts as chance too, and so does what always
    answering the most frequent class would give.
    """
    n, total = len(classes), sum(counts)
    if not total or n < 2:
        return None
    most = max(range(n), key=lambda c: counts[c])
    majority = counts[most] / total
    if accuracy > max(min(1.5 / n, 1 / n + 0.1), majority):
        return None
    return (
        f"{what} accuracy {100 * accuracy:.2f} % is near chance: with {n} classes, always answering "
        f"{classes[most]!r} gives {100 * majority:.2f} %."
    )


def what_to_try(config: RunConfig, samples: int, batch_size: int) -> str:
    """Return what to change in a run that does not learn, as options of the command."""
    lr, _ = config.optim.resolved()
    better = suitable_batch(samples)
    options = [f"--epochs {2 * config.epochs}"]
    if better < batch_size and samples // batch_size < 2 * FEW_STEPS:
        options.insert(0, f"--batch_size {better}")
    if config.optim.name == "adamw":
        options.append(f"--optim.name adamw --optim.lr {lr * 3:g}")
    else:
        usual, _ = OptimConfig(name="sgd").resolved()
        other = usual if lr < usual / 2 else lr / 5
        options += [f"--optim.lr {other:g}", "--optim.name adamw with its own learning rate"]
    if config.optim.clip is None or config.optim.clip > 1:
        options.append("--optim.clip 1")
    check = " --variant baseline shows whether cross-entropy learns this data."
    return f"Try one of {', '.join(options)}.{check if config.variant != 'baseline' else ''}"


def optimizer_of(config: RunConfig) -> str:
    """Return a sentence: which optimizer trains, with which settings."""
    lr, decay = config.optim.resolved()
    name = "AdamW" if config.optim.name == "adamw" else "SGD"
    clip = f", gradients clipped at {config.optim.clip:g}" if config.optim.clip else ""
    return f"{name} with learning rate {lr:g} and weight decay {decay:g}{clip}."


def epoch_of(samples: int, batch_size: int) -> str:
    """Return a sentence: how many steps an epoch has, and how many samples it leaves out."""
    steps, rest = divmod(samples, batch_size)
    told = f"{samples:,} training samples in batches of {batch_size}: {steps:,} steps per epoch"
    return f"{told}; {rest} samples, others in each epoch, are left to later epochs." if rest else f"{told}."


def few_steps(config: RunConfig, samples: int, batch_size: int) -> str | None:
    """Return a sentence if an epoch has fewer than ten steps; else None."""
    steps = samples // batch_size
    if steps >= FEW_STEPS:
        return None
    smaller = suitable_batch(samples)
    remedy = (
        f"--batch_size {smaller} gives {samples // smaller}"
        if smaller < batch_size
        else f"--epochs {-(-FEW_STEPS * config.epochs // max(1, steps))} gives as many as {FEW_STEPS} per epoch would"
    )
    return (
        f"an epoch has only {steps} {'step' if steps == 1 else 'steps'} ({samples} samples in batches of "
        f"{batch_size}), so {config.epochs} epochs are {steps * config.epochs} updates: {remedy}."
    )
