"""Evaluate a finished run: rebuild the plain network, load its weights, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from protoseam.core import calibration_error, negative_log_likelihood
from protoseam.lab import models
from protoseam.lab.engine.chance import at_chance, what_to_try
from protoseam.lab.engine.config import ConfigError
from protoseam.lab.engine.objectives import build_objective
from protoseam.lab.engine.run import resolve_device
from protoseam.lab.engine.rundata import RunData, load_again
from protoseam.lab.engine.rundir import RunDirectory, go_on
from protoseam.lab.pipeline.resident import Resident
from protoseam.seam.classifier import find_classifier, fold_linears

BINS = 15  # calibration error: Guo et al., On Calibration of Modern Neural Networks (2017)


def load_network(path: Path, data: RunData | Resident, *, fold: bool = False) -> torch.nn.Module:
    """The deployed network of the run on the CPU in float32, for the classes and the inputs of its data.

    ``fold=True`` multiplies the two Linears around the seam into one: the architecture as the config names it.
    """
    config = RunDirectory(path).read_config()
    weights = path / "model.safetensors"
    if not weights.exists():
        raise ConfigError(f"{path} has no model.safetensors: the run is not finished ({go_on(path)})")
    classes = len(data.classes)
    model = models.build(config.model, classes, tuple(data.sample_shape), **config.model_options)
    seam = find_classifier(model, classes) if fold and config.variant != "baseline" else None
    network = build_objective(config, model, classes).deploy()
    try:
        network.load_state_dict(load_file(weights))
    except (SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{weights} does not fit the run's config: {str(error).splitlines()[0]}") from error
    if seam is not None:
        first, second = network.get_submodule(seam).children()
        assert isinstance(first, torch.nn.Linear)
        assert isinstance(second, torch.nn.Linear)
        network.set_submodule(seam, fold_linears(first, second))
    return network.eval()


def load_deployed(path: Path, place: str | None = None) -> tuple[torch.nn.Module, Resident]:
    """The run's deployed network, and its data, from another ``place`` if it has moved."""
    data = load_again(path, RunDirectory(path).read_config(), place=place)
    return load_network(path, data), data


@torch.no_grad()
def evaluate(
    path: Path, *, split: str = "test", device: str = "auto", place: str | None = None
) -> dict[str, Any]:
    """Accuracy, NLL and ECE on a split, with the five worst classes by name.

    NLL is the mean of −log p(y|x) in nats, ECE the expected calibration error over 15 equal-width bins of confidence.
    ``place`` is where the run's data lies now, if it has moved; samples that are not the same are warned of.
    ``at_chance`` is a sentence if the accuracy is no better than guessing, else None.
    """
    config = RunDirectory(path).read_config()
    plain, data = load_deployed(path, place)
    target = resolve_device(device)
    plain.to(target)
    answers = [(plain(x.to(target)).cpu(), y) for x, y in data.batches(split)]
    if not answers:
        trained = f": it was trained with validation={config.validation:g}, so say --split test"
        raise ConfigError(f"{path} has no {split} data{trained if split == 'validation' else ''}")
    logits, y = (torch.cat(parts) for parts in zip(*answers, strict=True))
    seen = torch.bincount(y, minlength=data.num_classes)
    right = torch.bincount(y[logits.argmax(1) == y], minlength=data.num_classes)
    by_class = right / seen.clamp_min(1)
    worst = [c for c in by_class.argsort().tolist() if seen[c]][:5]
    accuracy = int(right.sum()) / int(seen.sum())
    told = at_chance(right.tolist(), seen.tolist(), data.classes, split)
    return {
        "split": split,
        "accuracy": accuracy,
        "nll": float(negative_log_likelihood(logits, y)),
        "ece": float(calibration_error(logits, y, BINS)),
        "at_chance": told and f"{told} {what_to_try(config, data.size, data.batch_size)}",
        "correct": int(right.sum()),
        "samples": int(seen.sum()),
        "worst_classes": [(data.classes[c], float(by_class[c])) for c in worst],
    }
