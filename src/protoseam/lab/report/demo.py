"""The demo's page: its nine runs compared, and the run with a two-dimensional seam in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import protoseam as ps
from protoseam.lab.engine.auditing import quick_audit
from protoseam.lab.engine.config import LiftConfig, OptimConfig, RunConfig, to_dict
from protoseam.lab.engine.embeddings import through_last_layer
from protoseam.lab.engine.files import write_atomically
from protoseam.lab.engine.latents import Latents, complete
from protoseam.lab.engine.rundir import environment
from protoseam.lab.engine.seamfile import Seam
from protoseam.lab.experiments.demo import (
    DIM,
    PICTURE,
    PICTURE_FLOOR,
    RECIPES,
    Data,
    Variant,
    Watcher,
    run_name,
)
from protoseam.lab.report.gather import Gathered
from protoseam.lab.report.page import FILE, page


class DemoPage:
    """Watches the demo for its page, and lets another watcher see everything, too."""

    def __init__(self, watcher: Watcher, picture_epochs: int) -> None:
        self.watcher = watcher
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.latents = Latents(picture_epochs)

    def epoch(self, name: str, row: dict[str, Any], net: nn.Module, data: Data) -> None:
        self.rows.setdefault(name, []).append(row)
        if name == PICTURE and isinstance(net, ps.Lifted) and row["epoch"] in self.latents.wanted:
            self._look(row["epoch"], net, data)
        self.watcher.epoch(name, row, net, data)

    def end(self, name: str, test: float, seconds: float) -> None:
        self.watcher.end(name, test, seconds)

    def write(self, results: dict[str, Any], net: ps.Lifted, data: Data, folder: Path) -> Path:
        """Write the page of what `protoseam.lab.experiments.demo.run` returned beside the demo's other files."""
        runs = []
        for run in results["runs"]:
            name = run_name(run["variant"], run["seed"])
            config = _config(run["variant"], run["seed"], results["config"]["epochs"], DIM, 0.1)
            runs.append(Gathered(name, config, self.rows[name], _summary(run)))
        detail = self._picture(results, net, data)
        text = page(runs, title="Demo: handwritten digits", detail=detail, beside=folder)
        write_atomically(folder / FILE, text.encode())
        return folder / FILE

    @torch.no_grad()
    def _look(self, epoch: int, net: ps.Lifted, data: Data) -> None:
        z, _, last = through_last_layer(net.deploy(), 10, [data.test])
        assert z is not None
        self.latents.add(epoch, z, last, Seam.of(net))

    @torch.no_grad()
    def _picture(self, results: dict[str, Any], net: ps.Lifted, data: Data) -> Gathered:
        about, x, y = results["config"]["picture"], *data.test
        plain = net.deploy()
        self._look(about["epochs"], net, data)  # with the covariances of the last epoch's end
        z, logits, _ = through_last_layer(plain, 10, [(x, y)])
        levels = ((x - x.min()) / (x.max() - x.min()) * 255).round().to(torch.uint8)
        bound = quick_audit(net, net.embed(data.val[0]), data.val[1], PICTURE_FLOOR, 0, about["epochs"])
        complete(self.latents, z, logits, y, Seam.of(net), levels, bound)
        return Gathered(
            name="The same digits, a seam of two dimensions",
            config=_config("ProtoSeam", about["seed"], about["epochs"], 2, PICTURE_FLOOR),
            metrics=self.rows[PICTURE],
            summary=_summary(results["picture"]) | {"parameters": sum(p.numel() for p in plain.parameters())},
            environment=environment("cpu"),
            classes=[str(c) for c in range(10)],
            latents=self.latents.tensors(),
            bound=bound or {},
            command="protoseam demo",
        )


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    test, validation = run["test"] / 100, run["val"] / 100
    return {"test_accuracy": test, "validation_accuracy": validation, "seconds": run["seconds"]}


def _config(variant: Variant, seed: int, epochs: int, dim: int, floor: float) -> dict[str, Any]:
    """The demo's settings in the words of the engine, whose loop it does not use."""
    recipe = RECIPES[variant]
    warmup = recipe.warmup * epochs
    config = RunConfig(
        variant=variant.lower(),  # type: ignore[arg-type]
        seed=seed,
        epochs=epochs,
        batch_size=recipe.batch_size,
        validation=0.25,
        augment="none",
        optim=OptimConfig(recipe.lr, recipe.weight_decay, recipe.momentum, warmup, name="sgd"),
        lift=LiftConfig(dim=dim, floor=floor, draws=1, seam_speed=1.0, bounded=False, refit=False),
        device="cpu",
    )
    return to_dict(config)
