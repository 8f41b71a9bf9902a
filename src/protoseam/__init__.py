"""ProtoSeam: lift a classifier at one seam, train with Gaussian prototypes, deploy the plain net.

Names are imported on first use: torch takes a second to load, and ``protoseam --help`` should not wait for it.
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AbstractCovariance",
    "ArgumentError",
    "ArgumentTypeError",
    "ConstantRho",
    "ExactCovariance",
    "IsotropicCovariance",
    "Lifted",
    "MissingDependencyError",
    "ProtoSeamError",
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
    "theory",
]

if TYPE_CHECKING:  # a type checker sees these names and no others: __getattr__ below would allow any
    from protoseam import core, theory
    from protoseam.core.schedules import ConstantRho, SineAnneal
    from protoseam.errors import (
        ArgumentError,
        ArgumentTypeError,
        MissingDependencyError,
        ProtoSeamError,
        SeamError,
        SeamWarning,
        SplitError,
    )
    from protoseam.seam.covariance import (
        AbstractCovariance,
        ExactCovariance,
        IsotropicCovariance,
        RunningCovariance,
        SwitchCovariance,
    )
    from protoseam.seam.lift import lift
    from protoseam.seam.lifted import Lifted
    from protoseam.seam.split import split
    from protoseam.seam.terms import Terms
else:
    _HOMES = {
        "core.schedules": ("ConstantRho", "SineAnneal"),
        "errors": tuple(name for name in __all__ if name.endswith(("Error", "Warning"))),
        "seam.covariance": tuple(name for name in __all__ if name.endswith("Covariance")),
        "seam.lift": ("lift",),
        "seam.lifted": ("Lifted",),
        "seam.split": ("split",),
        "seam.terms": ("Terms",),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(f"protoseam.{_HOME[name]}"), name)
        elif name in ("core", "theory"):
            value = importlib.import_module(f"protoseam.{name}")
        else:
            raise AttributeError(f"module 'protoseam' has no attribute {name!r}")
        globals()[name] = value
        return value


def load(path: "str | os.PathLike[str]", *, device: str = "cpu", trust: bool = False) -> Any:
    """Load the deployed network of a finished run of ``protoseam train``. Needs the extra ``lab``.

    Args:
        path: the run's directory; or an export of it, a ``.onnx``, ``.pt2`` or ``.safetensors`` file or a hub folder.
        device: where the network goes; that of a ``.onnx`` or ``.pt2`` file stays on the CPU.
        trust: load a ``.pt2`` file. PyTorch's loader can run code that such a file holds, so give it for files of your
            own only.

    Returns:
        A module with ``classes`` (their names), ``transform`` (an image of any size to an input), ``predict`` (answers
        for images or paths) and a ``forward`` from inputs to logits: `protoseam.lab.engine.deployed.Deployed`.

    Raises:
        ProtoSeamError: if there is no finished run, a file is damaged, or the export cannot be used.

    Example:
        >>> net = ps.load("runs/photos")  # doctest: +SKIP
        >>> net.predict(["cat.jpg"])[0].label  # doctest: +SKIP
    """
    # by name: the library itself never imports the lab
    deployed = importlib.import_module("protoseam.lab.engine.deployed")
    return deployed.load(Path(path).expanduser(), device=device, trust=trust)


def __dir__() -> list[str]:
    return sorted(__all__)
