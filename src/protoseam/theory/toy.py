"""The one-dimensional instance with a closed form: prop:toy-noise-selection and its numerical check.

Legend: G noise levels, R seeds, N samples.

Labels Y = ±1, embeddings Z = Y + ε with ε ∼ N(0, σ²), heads g_a(z) = z + a(z³ − z). Every g_a fits both
prototypes, so only sampling around them can choose a. The loss is (g_a(Z) − Y)², without the ½ that the paper
announces (a factor that moves no minimiser).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protoseam.errors import ArgumentError

__all__ = [
    "LIMITING_HEAD", "SIGMAS", "ToySimulation", "accuracy", "golden_section", "head", "optimal_a", "perturbation_loss",
    "sampled_loss", "sensitivity", "simulate",
]  # fmt: skip

# [0.02, 1] as in the paper; the levels its figures name (.1, .2, .3, .5, .7) are among them
SIGMAS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LIMITING_HEAD = -0.5  # a*(σ) as σ ↓ 0
_GOLDEN = (math.sqrt(5) - 1) / 2


# -- closed forms ---------------------------------------------------------------------------------------------


def head(z: Tensor, a: float | Tensor) -> Tensor:
    """g_a(z) = z + a(z³ − z) (eq:toy-head).

    Args:
        z: inputs.
        a: shape a of the head.
    """
    return z + a * (z * z * z - z)


def sampled_loss(a: float, sigma: float) -> float:
    """L_sample(a) (eq:toy-sampled-expanded).

    Args:
        a: shape a of the head.
        sigma: noise level σ.
    """
    q = sigma * sigma
    return q + 2 * a * (2 * q + 3 * q**2) + a * a * (4 * q + 39 * q**2 + 15 * q**3)


def optimal_a(sigma: float) -> float:
    """a*(σ) = −(2 + 3σ²)/(4 + 39σ² + 15σ⁴) (eq:toy-optimal-a).

    Args:
        sigma: noise level σ.
    """
    q = sigma * sigma
    return -(2 + 3 * q) / (4 + 39 * q + 15 * q * q)


def sensitivity(sigma: float) -> float:
    """g'_{a*}(±1) = 1 + 2a* (eq:toy-flatness), rising from 0 to 1; in this form without cancellation.

    Args:
        sigma: noise level σ.
    """
    q = sigma * sigma
    return (33 * q + 15 * q * q) / (4 + 39 * q + 15 * q * q)


def accuracy(a: float, sigma: float) -> float:
    """P(g_a(Z) has the sign of Y), for any a.

    g_a(z) = z·(1 + a(z² − 1)) has the wrong sign beyond |z| = r = √(1 − 1/a) if a < 0, and within it if a > 1
    (rem:toy-monotonicity). A sample on the wrong side of 0 is then put right.

    Args:
        a: shape a of the head.
        sigma: noise level σ.
    """
    plain = _phi(1 / sigma)
    if 0 <= a <= 1:
        return plain
    r = math.sqrt(1 - 1 / a)
    # conditioned on Y = 1; P(Z > r) and P(Z < −r) swap sides
    lost, regained = _phi((1 - r) / sigma), _phi((-1 - r) / sigma)
    if a < 0:
        return plain - lost + regained
    return lost + (1 - plain) - regained


def perturbation_loss(a: float | Tensor, delta: Tensor) -> Tensor:
    """E_Y[(g_a(Y + δ) − Y)²] = ((1 + 2a)δ + aδ³)² + 9a²δ⁴ (eq:toy-local-error, averaged over Y).

    Args:
        a: shape a of the head.
        delta: the perturbation δ.
    """
    return ((1 + 2 * a) * delta + a * delta**3) ** 2 + 9 * a * a * delta**4


# -- simulation -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToySimulation:
    """Raw results, float64: one row a noise level, one column a seed.

    Attributes:
        sigmas: noise levels (G).
        a_hat_GR: fitted a per level and seed (eq:toy-empirical-minimizer).
        loss_GR: held-out loss of the fitted head.
        accuracy_identity_GR: held-out accuracy of the identity head.
        accuracy_matched_GR: that of the fitted head.
        accuracy_limit_GR: that of the limiting head.
        line_search_gap_G: gap between golden-section search and the closed form of â, for the first seed.
    """

    sigmas: tuple[float, ...]
    a_hat_GR: Tensor
    loss_GR: Tensor
    accuracy_identity_GR: Tensor
    accuracy_matched_GR: Tensor
    accuracy_limit_GR: Tensor
    line_search_gap_G: Tensor

    def rows(self) -> list[dict[str, float]]:
        """One row a σ: means (and standard deviations) over seeds beside the closed forms."""
        a_GR, several = self.a_hat_GR, self.a_hat_GR.shape[1] > 1
        columns = {
            "sigma": self.sigmas,
            "a_hat_mean": a_GR.mean(1),
            "a_hat_std": [a_R.std(correction=1) if several else math.nan for a_R in a_GR],
            "a_star": self._closed_G(optimal_a),
            "slope_mean": (1 + 2 * a_GR).abs().mean(1),
            "slope": self._closed_G(sensitivity),
            "loss": self.loss_GR.mean(1),
            "loss_closed_form": self._closed_G(_least_loss),
            "accuracy_identity": self.accuracy_identity_GR.mean(1),
            "accuracy_matched": self.accuracy_matched_GR.mean(1),
            "accuracy_limit": self.accuracy_limit_GR.mean(1),
        }
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, map(float, row), strict=True)) for row in rows]

    def deviation_G(self) -> Tensor:
        """(mean of â − a*)/(standard deviation over seeds). Beyond ±1 the paper's statement fails.

        The mean of R seeds has deviation 1/√R of one seed's, so ±1 is √R standard errors: a weak test.
        """
        return (self.a_hat_GR.mean(1) - self._closed_G(optimal_a)) / self.a_hat_GR.std(1, correction=1)

    def seeds_outside_G(self) -> Tensor:
        """How many single seeds lie more than one seed deviation from a*; about 32 % are expected to."""
        off_GR = (self.a_hat_GR - self._closed_G(optimal_a)[:, None]).abs()
        return (off_GR > self.a_hat_GR.std(1, correction=1, keepdim=True)).sum(1)

    def loss_deviation_G(self) -> Tensor:
        """(mean held-out loss − L_sample(a*)) in standard errors of that mean."""
        error_G = self.loss_GR.std(1, correction=1) / math.sqrt(self.loss_GR.shape[1])
        return (self.loss_GR.mean(1) - self._closed_G(_least_loss)) / error_G

    def _closed_G(self, form: Callable[[float], float]) -> Tensor:
        return torch.tensor([form(sigma) for sigma in self.sigmas], dtype=torch.float64)


def simulate(
    sigmas: Sequence[float] = SIGMAS,
    *,
    samples: int = 200_000,  # paper, §toy-numerics
    seeds: int = 25,  # paper
    seed: int = 0,
) -> ToySimulation:
    """Fit a by least squares on ``samples`` draws, and measure on as many held-out ones, for each σ and seed.

    Seed r is the stream of ``seed + r``; every σ gets draws of its own. About 6 s on one core.

    Args:
        sigmas: noise levels.
        samples: samples per fit.
        seeds: number of fits per level.
        seed: first seed.
    """
    if samples < 2 or seeds < 1:
        raise ArgumentError(f"toy simulation needs samples ≥ 2 and seeds ≥ 1, got {samples} and {seeds}")
    if not sigmas or min(sigmas) <= 0:
        raise ArgumentError(
            f"toy simulation needs noise levels σ > 0 (at 0 every head is optimal), got {tuple(sigmas)}"
        )
    results_GRV = torch.empty(len(sigmas), seeds, 5, dtype=torch.float64)
    gap_G = torch.empty(len(sigmas), dtype=torch.float64)
    for r in range(seeds):
        generator = torch.Generator().manual_seed(seed + r)
        for g, sigma in enumerate(sigmas):
            y_N, z_N = _draw(sigma, samples, generator)
            cubic_N = z_N * z_N * z_N - z_N
            residual_N = z_N - y_N
            a_hat = -float(residual_N @ cubic_N) / float(cubic_N @ cubic_N)  # eq:toy-empirical-minimizer
            if r == 0:
                gap_G[g] = abs(_line_search(residual_N, cubic_N) - a_hat)
            y_N, z_N = _draw(sigma, samples, generator)  # held out
            fitted_N = head(z_N, a_hat)
            shares = (_share_correct(x_N, y_N) for x_N in (z_N, fitted_N, head(z_N, LIMITING_HEAD)))
            values = a_hat, float((fitted_N - y_N).square().mean()), *shares
            results_GRV[g, r] = torch.tensor(values, dtype=torch.float64)
    a_hat_GR, loss_GR, identity_GR, matched_GR, limit_GR = results_GRV.unbind(-1)
    return ToySimulation(tuple(sigmas), a_hat_GR, loss_GR, identity_GR, matched_GR, limit_GR, gap_G)


def golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimiser of a unimodal function on [low, high] from values alone.

    Values near a minimum differ by rounding once |x − x*| ≈ √ε, so about 10⁻⁸ of the scale is all there is.

    Args:
        function: a function with one minimum.
        low: lower end of the interval.
        high: upper end of the interval.
    """
    x1, x2 = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    f1, f2 = function(x1), function(x2)
    while high - low > 1e-8:
        if f1 <= f2:
            high, x2, f2 = x2, x1, f1
            x1 = high - _GOLDEN * (high - low)
            f1 = function(x1)
        else:
            low, x1, f1 = x1, x2, f2
            x2 = low + _GOLDEN * (high - low)
            f2 = function(x2)
    return (low + high) / 2


def _least_loss(sigma: float) -> float:
    return sampled_loss(optimal_a(sigma), sigma)


def _draw(sigma: float, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(Y, Z) of eq:toy-embedding."""
    y_N = torch.randint(0, 2, (samples,), generator=generator).double() * 2 - 1
    return y_N, y_N + sigma * torch.randn(samples, generator=generator, dtype=torch.float64)


def _line_search(residual_N: Tensor, cubic_N: Tensor) -> float:
    return golden_section(lambda a: float((residual_N + a * cubic_N).square().mean()), -2.0, 1.0)


def _share_correct(output_N: Tensor, y_N: Tensor) -> float:
    return float((output_N * y_N > 0).double().mean())


def _phi(x: float) -> float:
    """Standard normal distribution function, accurate in the lower tail."""
    return math.erfc(-x / math.sqrt(2)) / 2
