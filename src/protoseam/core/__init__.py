"""The method's maths: pure functions from tensors to tensors. Torch only; no modules, no IO, no globals."""

from protoseam.core.bounds import batch_share, consensus_factors, head_factor, prototype_factors
from protoseam.core.calibration import calibration_error, fit_temperature, negative_log_likelihood
from protoseam.core.covariance import (
    ClassFactors,
    Moments,
    automatic_floor,
    class_factors,
    class_moments,
    empty_moments,
    factorize,
    split_half_error,
)
from protoseam.core.discriminant import linear_discriminant, pooled_covariance
from protoseam.core.distances import mahalanobis
from protoseam.core.initializers import forward_sweep, random_prototypes, unit_vectors
from protoseam.core.logistic import effective_dimension, logistic_regression
from protoseam.core.merging import merge_batch_, merge_moments
from protoseam.core.objective import (
    consensus,
    consensus_slope,
    prototype_gradient,
    pull_points,
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
    "automatic_floor",
    "batch_share",
    "calibration_error",
    "class_factors",
    "class_moments",
    "consensus",
    "consensus_factors",
    "consensus_slope",
    "effective_dimension",
    "empty_moments",
    "factorize",
    "fit_temperature",
    "forward_sweep",
    "head_factor",
    "linear_discriminant",
    "logistic_regression",
    "mahalanobis",
    "merge_batch_",
    "merge_moments",
    "negative_log_likelihood",
    "pooled_covariance",
    "prototype_factors",
    "prototype_gradient",
    "pull_points",
    "random_prototypes",
    "repulsion",
    "sample",
    "sampled_classification",
    "sine_anneal",
    "split_half_error",
    "squared_residuals",
    "unit_vectors",
]
