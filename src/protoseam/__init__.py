"""ProtoSeam: lift a classifier at one seam, train with Gaussian prototypes, deploy the plain net.

Names are imported on first use: torch takes a second to load, and ``protoseam --help`` should not wait for it.
"""

import importlib
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
