"""Audit a run: rebuild its network from the last checkpoint, sweep held-out and training data, check the theory.

Prototypes and covariances are in checkpoints only, because the deployed network has none. Both are those of the
checkpoint's epoch; Σ̃ was estimated at its end.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protoseam.core.covariance import class_moments
from protoseam.lab import models
from protoseam.lab.audit import (
    CONFIDENCE,
    FULL,
    Audit,
    AuditSettings,
    ClassMoments,
    SeamClasses,
    Totals,
    TrainingSide,
    audit_seam,
    audited_head,
    collapse_if_defined,
)
from protoseam.lab.data.names import for_terminal
from protoseam.lab.engine import checkpoint
from protoseam.lab.engine.config import ConfigError, RunConfig
from protoseam.lab.engine.objectives import Lifting, build_objective
from protoseam.lab.engine.run import resolve_device
from protoseam.lab.engine.rundata import load_again
from protoseam.lab.engine.rundir import RunDirectory, go_on
from protoseam.lab.pipeline.resident import Resident
from protoseam.theory import epsilon_from_halves, error_probability_bound, optimal_floor

# Field of the report → attribute of a bound.
_BOUND = {name: name for name in ("name", "source", "terms", "gap", "tightness", "slack", "holds")}
_BOUND |= {"bound": "value", "bound_over_risk": "over_risk"}
# what a look during training must have for the figure over the epochs
_DRAWN = ("risk", "sampled_loss", "mean_mismatch", "covariance_mismatch", "non_gaussianity")


def audit_run(
    path: Path,
    *,
    split: str = "validation",
    device: str = "auto",
    seed: int = 0,
    settings: AuditSettings = FULL,
) -> dict[str, Any]:
    """Return the audit of the run in ``path`` as plain data for JSON; docs/theory.md explains its fields."""
    directory = RunDirectory(path)
    config = directory.read_config()
    epoch, net, data = rebuild(path, config, resolve_device(device))
    held_out = _embed(net, data.batches(split))
    if held_out is None:
        raise ConfigError(
            f"{path} was trained with validation={config.validation}: there is no {split} data to audit; use "
            f"--split {'test' if split == 'validation' else 'validation'}"
        )
    seen = _embed(net, data.clean())
    assert seen is not None  # a run has training data
    training = ClassMoments(*class_moments(*seen, data.num_classes))
    head = audited_head(net.n2)
    try:
        audit = audit_seam(
            *held_out,
            net.prototypes,
            net.covariance.factors,
            head,
            rho=float(net.rho),
            floor=None if config.lift.floor == "auto" else config.lift.floor,
            generator=torch.Generator().manual_seed(seed),
            training=training,
            settings=settings,
        )
        prediction_N = head.deployed(*seen, slopes=False)[1]
        weight_CK = None if head.weight_CK is None else head.weight_CK.to(seen[0].device)
        collapse = collapse_if_defined(*training, weight_CK, seen[0], prediction_N)
    except ValueError as error:
        raise ConfigError(f"{path}, epoch {epoch}: {error}") from error
    report = {
        "run": for_terminal(path.resolve().name),
        "data": config.data if "/" not in config.data else Path(config.data).name,
        "model": config.model,
        "epoch": epoch,
        "epochs": config.epochs,
        "split": split,
        "samples": len(held_out[1]),
        "training_samples": len(seen[1]),
        "seed": seed,
        "settings": dataclasses.asdict(settings),
        "confidence": CONFIDENCE,
        "covariance": config.lift.covariance,
        "structure": config.lift.structure if config.lift.covariance != "isotropic" else "isotropic",
        **_report(audit, data.classes),
    }
    report["collapse"]["training"] = dataclasses.asdict(collapse)
    report["estimation"] |= _halves(*seen, data.num_classes)
    report["history"] = [
        {"epoch": row["epoch"], **row["audit"]}
        for row in directory.read_metrics()
        if all(term in row.get("audit", {}) for term in _DRAWN)
    ]
    return _plain(report)


# ------------------------------------------------------------------------------------------ the network


def rebuild(path: Path, config: RunConfig, device: torch.device) -> tuple[int, Any, Resident]:
    """Return the epoch, the lifted network in eval mode and its data, in float32 on ``device``."""
    if config.variant != "protoseam":
        raise ConfigError(
            f"{path} is a run of variant={config.variant}: it has no prototypes and no sampled loss, so there is no "
            "seam to audit. Only runs of variant=protoseam can be audited"
        )
    found = checkpoint.latest(RunDirectory(path).checkpoints)
    if found is None:
        raise ConfigError(
            f"{path} has no checkpoint, and the prototypes and covariances are kept nowhere else. One is written "
            f"every {config.checkpoint_every} epochs and at the end: {go_on(path)}"
        )
    epoch, state = found
    data = load_again(path, config, device)
    model = models.build(config.model, data.num_classes, data.sample_shape, **config.model_options)
    objective = build_objective(config, model, data.num_classes)
    assert isinstance(objective, Lifting)
    try:
        averages = state["average"]["tensors"] if config.average is not None else {}
        objective.load_state_dict(state["objective"] | averages)  # the deployed weights are the averaged ones
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(
            f"the checkpoint of epoch {epoch} in {path} does not fit its config.yaml: {str(error).splitlines()[0]}"
        ) from error
    return epoch, objective.to(device).eval().net, data


@torch.no_grad()
def _embed(net: Any, batches: Any) -> tuple[Tensor, Tensor] | None:
    pairs = [(net.embed(x).float(), y) for x, y in batches]
    return (torch.cat([z for z, _ in pairs]), torch.cat([y for _, y in pairs])) if pairs else None


# ------------------------------------------------------------------------------------------ plain data


def _report(audit: Audit, names: tuple[str, ...]) -> dict[str, Any]:
    classes = audit.classes
    rows = _class_rows(audit, names)
    error = float(classes.estimation_error_P.mean())
    return {
        "classes": audit.num_classes,
        "classes_audited": len(rows),
        "dim": audit.dim,
        "rho": audit.rho,
        "floor": audit.floor,
        "lipschitz": {
            "paper": audit.lipschitz,
            "largest": float(classes.lipschitz_P.max()),
            "mean": float(classes.lipschitz_P.mean()),
            "mean_slope": float(classes.slope_P.mean()),
        },
        "totals": {
            "balanced": _totals(audit.balanced, audit.rho),
            "as_sampled": _totals(audit.as_sampled, audit.rho),
        },
        "all_bounds_hold": audit.balanced.all_hold and audit.as_sampled.all_hold,
        "classes_within_bound": int(classes.holds_P().sum()),
        "non_gaussianity": {
            "upper": float(classes.non_gaussianity_P.mean()),
            "lower": float(classes.non_gaussianity_lower_P.mean()),
            "null": float(classes.non_gaussianity_null_P.mean()),
        },
        "mismatch": {
            "mean": float(classes.mean_mismatch_P.mean()),
            "covariance": float(classes.covariance_mismatch_P.mean()),
            "floor_bias": float(classes.floor_bias_P.mean()),
            **{f"training_{name}": float(v_P.mean()) for name, v_P in _columns(audit.training).items()},
        },
        # ε̄ = mean ‖Σ̂_i − Σ_i‖_F with the held-out Σ_i, and σ0* for it
        "estimation": {
            "error": error,
            "optimal_floor": math.nan if math.isnan(error) else optimal_floor(error, audit.dim),
        },
        "smoothing": dataclasses.asdict(audit.smoothing),
        "collapse": {"held_out": dataclasses.asdict(audit.collapse)},
        "spectra": {
            name: {"eigenvalues": found.pop("eigenvalue_K").tolist(), **found}
            for name, found in ((name, dataclasses.asdict(s)) for name, s in audit.spectra.items())
        },
        "per_class": rows,
        "worst_by_risk": [r["name"] for r in sorted(rows, key=lambda r: -r["risk"])],
        "worst_by_bound": [r["name"] for r in sorted(rows, key=lambda r: -r["bound"])],
    }


def _totals(total: Totals, rho: float) -> dict[str, Any]:
    return {
        "risk": total.risk,
        "accuracy": total.accuracy,
        "error_bound": error_probability_bound(total.risk),
        "sampled_loss": total.sampled_loss,
        "sampled_error": total.sampled_error,
        "rms_distance": total.rms,
        "consensus": rho / 2 * total.rms**2,
        "bounds": [{name: getattr(b, attribute) for name, attribute in _BOUND.items()} for b in total.bounds],
    }


def _class_rows(audit: Audit, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return one row per class: the measured numbers, and G_i·(terms), whose sum is the class's bound."""
    classes = audit.classes
    transfer = classes.transfer(torch.ones_like(classes.risk_P))
    columns = {name: value_P.tolist() for name, value_P in _columns(classes).items()}
    columns["smoothing_gap"] = classes.jensen_gap_P.tolist()
    columns["gap"] = transfer.gap_C.tolist()
    columns["bound"] = (classes.sampled_loss_P + transfer.gap_C).tolist()
    columns["holds"] = classes.holds_P().tolist()
    columns |= {f"training_{name}": value_P.tolist() for name, value_P in _columns(audit.training).items()}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    shares = {name: share_P.tolist() for name, share_P in transfer.shares_C().items()}
    for i, row in enumerate(rows):
        row["terms"] = {name: share[i] for name, share in shares.items()}
    return [{"name": names[row["index"]], **row} for row in rows]


def _columns(parts: SeamClasses | TrainingSide | None) -> dict[str, Tensor]:
    """Return the numbers of each class by their names without the suffix; {} without any."""
    found = {} if parts is None else vars(parts)
    return {name.removesuffix("_P"): value_P for name, value_P in found.items()}


def _halves(z_NK: Tensor, y_N: Tensor, num_classes: int) -> dict[str, float]:
    """Return ε̄ of the training covariances from two halves, and σ0* for it; {} if a class has one sample."""
    order_N = y_N.argsort(stable=True)
    halves = [class_moments(z_NK[rows], y_N[rows], num_classes) for rows in (order_N[0::2], order_N[1::2])]
    counts = halves[0][0], halves[1][0]
    if bool((torch.minimum(*counts) < 1).any()):
        return {}
    error = float(epsilon_from_halves(halves[0][2], halves[1][2], counts).mean())
    return {"error_from_halves": error, "optimal_floor_from_halves": optimal_floor(error, z_NK.shape[1])}


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
