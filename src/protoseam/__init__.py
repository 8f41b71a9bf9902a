"""ProtoSeam: lift a classifier at one seam, train with Gaussian prototypes, deploy the plain net.

Names are imported on first use: torch takes a second to load, and ``protoseam --help`` should not wait for it.
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protoseam import core
    from protoseam.core.schedules import ConstantRho, SineAnneal
    from protoseam.seam.covariance import (
        AbstractCovariance,
        ExactCovariance,
        IsotropicCovariance,
        RunningCovariance,
        SwitchCovariance,
    )
    from protoseam.seam.guards import SeamError, SeamWarning
    from protoseam.seam.lift import lift
    from protoseam.seam.lifted import Lifted, Terms
    from protoseam.seam.split import SplitError, split

__version__ = "0.1.0"

__all__ = [
    "AbstractCovariance",
    "ConstantRho",
    "ExactCovariance",
    "IsotropicCovariance",
    "Lifted",
    "RunningCovariance",
    "SeamError",
    "SeamWarning",
    "SineAnneal",
    "SplitError",
    "SwitchCovariance",
    "Terms",
    "__version__",
    "core",
    "lift",
    "load",
    "split",
]

_HOME = {
    "ConstantRho": "core.schedules",
    "SineAnneal": "core.schedules",
    "AbstractCovariance": "seam.covariance",
    "ExactCovariance": "seam.covariance",
    "IsotropicCovariance": "seam.covariance",
    "RunningCovariance": "seam.covariance",
    "SwitchCovariance": "seam.covariance",
    "SeamError": "seam.guards",
    "SeamWarning": "seam.guards",
    "lift": "seam.lift",
    "Lifted": "seam.lifted",
    "Terms": "seam.lifted",
    "SplitError": "seam.split",
    "split": "seam.split",
}


def load(path: "str | os.PathLike[str]", *, device: str = "cpu") -> Any:
    """Load the deployed network of a finished run of ``protoseam train``. Needs the extra ``lab``.

    Args:
        path: the run's directory.
        device: where the network goes.

    Returns:
        A module with ``classes`` (their names), ``transform`` (an image of any size to an input), ``predict`` (answers
        for images or paths) and a ``forward`` from inputs to logits: `protoseam.lab.engine.deployed.Deployed`.

    Raises:
        ProtoSeamError: if there is no finished run, or one of its files is damaged.

    Example:
        >>> net = ps.load("runs/photos")  # doctest: +SKIP
        >>> net.predict(["cat.jpg"])[0].label  # doctest: +SKIP
    """
    # by name: the library itself never imports the lab
    deployed = importlib.import_module("protoseam.lab.engine.deployed")
    return deployed.load(Path(path).expanduser(), device=device)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"protoseam.{_HOME[name]}"), name)
    elif name in ("core", "theory"):
        value = importlib.import_module(f"protoseam.{name}")
    else:
        raise AttributeError(f"module 'protoseam' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
