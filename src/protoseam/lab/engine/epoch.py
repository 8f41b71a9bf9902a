"""One epoch of one run, in the order in which things happen: the only loop over training batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from protoseam.lab.engine.auditing import quick_audit
from protoseam.lab.engine.objectives import Embeddings
from protoseam.lab.engine.run import DivergedError, Run
from protoseam.lab.pipeline.resident import epoch_seed
from protoseam.seam.last_step import FeatureReader, embedded, fit_classifier
from protoseam.seam.lifted import Lifted
from protoseam.seam.passes import as_deployed

_LOST = 100.0  # a network this many times its first size has diverged; sound training stays below 10
_MANY_CLASSES = 1000
_DROPOUT = 2**16  # purpose of epoch_seed, above those of the processes' samples
_AUDIT = 2**20  # purpose of epoch_seed, above that of dropout
_GROWTH = ", let ρ grow more slowly (more epochs, a smaller lift.rho_max)"


def train_epoch(run: Run) -> dict[str, Any]:
    """Advance ``run`` by one epoch and return the epoch's metrics.

    Raises:
        DivergedError: a loss or gradient was not finite, or the weights have grown too large.
    """
    stream = run.step.stream  # None on a CPU
    if stream is not None:  # the caller may have loaded a state on its own stream
        stream.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(stream):
        started = time.perf_counter()
        begin_epoch(run)
        for _ in range(run.data.steps):
            run.step.run()
        if run.epoch + 1 < run.config.epochs:
            run.data.prepare(run.epoch + 1)  # while the device works off this epoch's steps
        return end_epoch(run, started)


def begin_epoch(run: Run) -> None:
    """Prepare the epoch's images and ρ; before the first epoch also FSInit, and before the first step its capture."""
    if run.epoch == 0:
        run.start()
    run.data.load_epoch(run.epoch)
    if run.epoch == 0:
        run.objective.begin(sweep(run) if run.objective.seam is not None else None)
        if run.average is not None:
            run.average.restart()
    if run.mixing is not None:
        run.mixing.begin_epoch(run.config.seed, run.epoch)
    run.objective.train()
    if run.step.awaits_capture:
        before = run.state()
        run.step.capture()  # its warm-up steps train
        run.load_state(before)
    _seed(run)
    lr = float(run.rates[run.epoch * run.data.steps])
    run.objective.begin_epoch(run.epoch, run.config.epochs, lr)
    run.step.begin_epoch()


def end_epoch(run: Run, started: float) -> dict[str, Any]:
    """Refresh Σ̂, validate, and return the metrics of the epoch that began at ``started`` (time.perf_counter)."""
    skipped = _check(run)
    run.processes.share_buffers(run.objective)
    embeddings: Embeddings | None = None
    if run.objective.seam is not None and run.objective.seam.refits_now:
        embeddings = last_step(run, run.objective.seam)
    elif run.objective.needs_embeddings:
        embeddings = sweep(run)
    run.objective.end_epoch(embeddings)
    sums = run.processes.mean(run.step.sums / (run.data.steps - skipped)).tolist()
    terms = dict(zip(run.objective.terms, sums, strict=True))
    accuracy = run.accuracy("validation") if _due(run, run.config.eval_every) else None
    found = audit(run) if _due(run, run.config.audit_every) else None
    seconds = time.perf_counter() - started
    run.seconds += seconds
    run.epoch += 1
    seam = run.objective.seam
    return {
        "epoch": run.epoch,
        "loss": terms,
        "rho": None if seam is None else float(seam.rho),
        "lr": float(run.rates[run.epoch * run.data.steps - 1]),
        "validation_accuracy": accuracy,
        "images_per_second": run.data.steps * run.data.batch_size / seconds,
        "seconds": seconds,
        "seam": run.objective.geometry(),
        **({} if found is None else {"audit": found}),
        **({"skipped_steps": skipped} if skipped else {}),
    }


@torch.no_grad()
def sweep(run: Run, read: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels of the training data: the epoch's augmented images, or the clean ones.

    ``read`` returns something else of a batch than its embeddings.
    """
    if run.config.lift.clean_pass:
        return _embedded(run, run.data.clean(), read)
    rows = list(run.data.x.split(_sweep_size(run)))
    # a normalisation without statistics cannot take them from one image
    if len(rows) > 1 and len(rows[-1]) == 1:
        rows[-2:] = [run.data.x[-1 - len(rows[-2]) :]]
    return _embedded(run, zip(rows, run.data.y.split([len(x) for x in rows]), strict=True), read)


def last_step(run: Run, net: Lifted) -> tuple[Tensor, Tensor] | None:
    """Fit the two Linears around the seam as one classifier where that is worth it: those that are deployed.

    Returns embeddings and labels of the training data if Σ̂ is to be taken from them.
    """
    reader = FeatureReader(net)
    with run.averaged():
        features, labels = sweep(run, reader)
        with run.optimizer.full_precision():  # they are set in the masters
            changed = fit_classifier(net, reader.last, features, labels)
            embeddings = embedded(reader.last, features), labels
        run.optimizer.synchronise()
        if changed and run.average is not None:
            run.average.adopt()
    return embeddings if changed or run.objective.needs_embeddings else None


def _sweep_size(run: Run) -> int:
    """Return the images in a batch of a sweep: enough to fill the device, few beside its memory."""
    return min(4096, max(64, 2**21 // math.prod(run.data.sample_shape[-2:]) // 64 * 64))


@torch.no_grad()
def audit(run: Run) -> dict[str, float] | None:
    """Return the theory's quick audit of a lifted run on its validation data; None without a seam or such data.

    The audit draws from a stream of its own, so the run goes on as if it had not been audited. The prototypes and Σ̃
    are those that the next epoch starts from.
    """
    if run.objective.seam is None or not len(run.data.validation[1]):
        return None
    with run.averaged():
        z, y = _embedded(run, run.data.batches("validation"))
        seed = epoch_seed(run.config.seed, run.epoch, _AUDIT)
        return quick_audit(run.objective.seam, z, y, run.config.lift.floor, seed, run.epoch + 1)


def _embedded(
    run: Run, batches: Any, read: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return float32 embeddings by the deployed N1, or what ``read`` returns, and labels, of all batches."""
    assert run.objective.seam is not None
    read = read or run.objective.seam.embed
    pairs = []
    with as_deployed(run.objective):
        for x, y in batches:
            with run.casting():
                z = read(x)
            pairs.append((z.float(), y))
    return torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs])


def _due(run: Run, every: int) -> bool:
    """Tell whether something that happens ``every`` so many epochs, and after the last, happens now; 0 is never."""
    now = run.epoch + 1
    return bool(every) and (now == run.config.epochs or now % every == 0)


def _seed(run: Run) -> None:
    """Seed samples and dropout by (seed, epoch, process), so that a resumed run draws the same."""
    rank = run.processes.rank
    run.generator.manual_seed(epoch_seed(run.config.seed, run.epoch, purpose=1 + rank))
    torch.manual_seed(epoch_seed(run.config.seed, run.epoch, purpose=_DROPOUT + rank))


def _check(run: Run) -> int:
    """Return how many steps of the epoch were skipped; raise DivergedError if the run cannot go on."""
    skipped = int(run.step.bad)
    if skipped and not (run.step.keep_going and skipped < run.data.steps):
        raise DivergedError(_diagnosis(run))
    size = run.optimizer.size()
    if not size <= _LOST * run.first_size:
        raise DivergedError(
            f"the weights have grown to {size / run.first_size:.3g} times their size at the start by epoch "
            f"{run.epoch + 1}: training has diverged, though every number is still finite. {_remedy(run)}"
        )
    return skipped


@torch.no_grad()
def _diagnosis(run: Run) -> str:
    """Name step, term and class of the first loss or gradient that was not finite; the network is as it was then."""
    step, batch = int(run.step.first_bad), run.data.local_batch
    first = step % run.data.steps * batch
    x, y = run.data.x[first : first + batch], run.data.y[first : first + batch]
    run.objective.train()
    losses = run.step.losses(*run.step.batch(run.step.first_bad)).tolist()
    named = zip(run.objective.terms, losses, strict=True)
    terms = [name for name, value in named if not math.isfinite(value) and name != "total"]
    what = f"the {' and '.join(terms) or 'total'} loss" if not math.isfinite(losses[0]) else "a gradient"
    with run.casting():
        bad = ~torch.isfinite(run.objective.logits(x)).all(1)
    classes = sorted({run.data.classes[c] for c in y[bad].tolist()})
    whose = f", with non-finite outputs for class {', '.join(classes[:8])}" if classes else ""
    return (
        f"step {step} (epoch {run.epoch + 1}) was not applied: {what} was not finite{whose}. {_remedy(run)}"
    )


def _remedy(run: Run) -> str:
    n, lifted = run.data.num_classes, run.config.variant == "protoseam"
    clip = "" if run.config.optim.clip else ", clip gradients (optim.clip=1)"
    rewind = "" if run.config.on_nonfinite == "rewind" else ", or set on_nonfinite to rewind"
    remedy = f"Lower optim.lr{clip}{_GROWTH if lifted else ''}{rewind}"
    if n < _MANY_CLASSES or not lifted or run.config.lift.repulsion is not None:
        return remedy
    pairs = f"With {n:,} classes the repulsion sums {n * (n - 1) // 2:,} pairs"
    return f"{pairs}: try lift.repulsion={1 / n:.0e}. {remedy}"
