"""The method's maths: pure functions from tensors to tensors. Torch only; no modules, no IO, no globals."""

from protoseam.core.covariance import (
    ClassFactors,
    Moments,
    class_factors,
    class_moments,
    empty_moments,
    factorize,
    merge_batch_,
    merge_moments,
    optimal_floor,
    split_half_error,
)
from protoseam.core.initializers import forward_sweep, random_prototypes, unit_vectors
from protoseam.core.objective import (
    consensus,
    consensus_slope,
    repulsion,
    sampled_classification,
    squared_residuals,
)
from protoseam.core.precision import at_least_float32
from protoseam.core.sampling import sample
from protoseam.core.schedules import ConstantRho, Schedule, SineAnneal, sine_anneal

__all__ = [
    "ClassFactors",
    "ConstantRho",
    "Moments",
    "Schedule",
    "SineAnneal",
    "at_least_float32",
    "class_factors",
    "class_moments",
    "consensus",
    "consensus_slope",
    "empty_moments",
    "factorize",
    "forward_sweep",
    "merge_batch_",
    "merge_moments",
    "optimal_floor",
    "random_prototypes",
    "repulsion",
    "sample",
    "sampled_classification",
    "sine_anneal",
    "split_half_error",
    "squared_residuals",
    "unit_vectors",
]
