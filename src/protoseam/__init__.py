"""ProtoSeam: lift a classifier at one seam, train with Gaussian prototypes, deploy the plain net."""

from protoseam import core
from protoseam.core import ConstantRho, SineAnneal
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
