"""The paper's appendix as functions: what each term of the bounds is, for your own network. See docs/theory.md."""

from protoseam.theory import toy
from protoseam.theory.bounds import (
    ControlledBound,
    RiskTransfer,
    controlled_bound,
    controlled_bound_full,
    coupling_bound,
    epsilon_from_halves,
    error_probability_bound,
    estimation_cap,
    floor_bias,
    non_gaussianity_cap,
    optimal_floor,
    risk_transfer,
    rms_distance,
)
from protoseam.theory.bures import bures, psd_sqrt
from protoseam.theory.collapse import (
    Collapse,
    angle_deviation_floor,
    collapse_measures,
    max_cosine_floor,
    nc1,
    nc2,
    nc3,
    nc4,
)
from protoseam.theory.lipschitz import class_lipschitz, head_lipschitz
from protoseam.theory.smoothing import (
    MeanWithError,
    curvature_spread,
    floor_excess,
    floor_regularization,
    jensen_gap,
    loss_hessian,
    point_loss,
    remainder_bound,
    remainder_bound_fourth_order,
    sampled_loss,
    second_order_penalty,
    third_derivative_constant,
)
from protoseam.theory.wasserstein import (
    W1Estimate,
    W1Upper,
    discrete_w1,
    projection_constant,
    sliced_w1,
    w1_to_gaussian,
    w1_upper,
)

__all__ = [
    "Collapse", "ControlledBound", "MeanWithError", "RiskTransfer", "W1Estimate", "W1Upper",
    "angle_deviation_floor", "bures", "class_lipschitz", "collapse_measures", "controlled_bound",
    "controlled_bound_full", "coupling_bound", "curvature_spread", "discrete_w1",
    "epsilon_from_halves", "error_probability_bound", "estimation_cap", "floor_bias", "floor_excess",
    "floor_regularization", "head_lipschitz", "jensen_gap", "loss_hessian", "max_cosine_floor", "nc1", "nc2",
    "nc3", "nc4", "non_gaussianity_cap", "optimal_floor", "point_loss", "projection_constant", "psd_sqrt",
    "remainder_bound", "remainder_bound_fourth_order", "risk_transfer", "rms_distance", "sampled_loss",
    "second_order_penalty", "sliced_w1", "third_derivative_constant", "toy", "w1_to_gaussian", "w1_upper",
]  # fmt: skip
