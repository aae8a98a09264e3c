"""What the folds take from the full-data fit: partner draws, starting points, metrics."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.special import logsumexp

from foldwise.fit import Fit, evaluate_rows
from foldwise.folds import Folds
from foldwise.metric import (
    FOLD_METRIC_DIMENSION,
    FoldMetric,
    LocalCoordinates,
    Metric,
    SharedMetric,
    fold_metric,
    shared_metric,
    tempered_metric,
)
from foldwise.model import Model
from foldwise.runtime import compiled, lanes

# Folds times full-data draws kept for the bridge (8 bytes each); beyond it draws are thinned.
_FULL_VALUES = 2**27
# Folds times dimension^2 for a metric of each fold's own (8 bytes each, three arrays).
_METRIC_VALUES = 2**26
# Draws at which a coordinate must have no gradient to count as local.
_LOCAL_DRAWS = 3
# Folds whose curvature is computed in one call.
_AT_ONCE = 32


@dataclass(frozen=True)
class FullData:
    """The full-data draws as the folds see them.

    ``joint`` is the log density of each fold's test rows at each draw, ``held_out`` that of all
    rows outside its training set, ``rows`` the log mean density of each test row. ``positions``
    are the draws, ``chains`` chains one after another.
    """

    positions: Float[np.ndarray, "draw d"]
    chains: int
    joint: Float[np.ndarray, "fold draw"]
    held_out: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, " row"]


def full_data(model: Model, folds: Folds, fit: Fit) -> FullData:
    """Evaluate every fold's left-out rows at the full-data draws."""
    chains, draws, d = fit.positions.shape
    thin = max(1, -(-chains * draws * len(folds) // _FULL_VALUES))
    positions = fit.positions[:, ::thin].reshape(-1, d)
    joint = np.empty((len(folds), len(positions)))
    complete = bool(np.all(folds.n_train + folds.n_test == folds.n))
    held_out = joint if complete else np.empty_like(joint)
    log_sum = np.full(model.n_obs, -np.inf)
    done = 0
    for _, rows in evaluate_rows(model, positions):
        part = slice(done, done + len(rows))
        joint[:, part] = np.add.reduceat(rows[:, folds.test_rows], folds.test_start[:-1], axis=1).T
        if not complete:
            held_out[:, part] = _outside_training(rows, folds).T
        log_sum = np.logaddexp(log_sum, logsumexp(rows, axis=0))
        done += len(rows)
    log_mean = log_sum - np.log(len(positions))
    return FullData(positions, chains, joint, held_out, log_mean[folds.test_rows])


def _outside_training(rows: Float[np.ndarray, "draw row"], folds: Folds) -> np.ndarray:
    def running(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)

    upto, dropped = running(rows), running(rows[:, folds.dropped_rows])
    inside = upto[:, folds.train_stop] - upto[:, folds.train_start]
    gone = dropped[:, folds.dropped_start[1:]] - dropped[:, folds.dropped_start[:-1]]
    return upto[:, -1:] - inside + gone


def start_positions(
    positions: Float[np.ndarray, "draw d"],
    held_out: Float[np.ndarray, "fold draw"],
    folds: Folds,
    chains: int,
    seed: int,
) -> Float[np.ndarray, "fold chain d"]:
    """Distinct full-data draws near each fold's posterior.

    Drawn with weights exp(-held_out), ``held_out`` the log density of the rows left out, capped at
    1 / (5 chains), which keeps starts dispersed enough for R-hat to mean something. (Smoothing
    the weights' tail first would only change weights that the cap levels.)
    """
    chosen = np.empty((len(folds), chains), np.int64)
    for k, (number, log_density) in enumerate(zip(folds.index, held_out, strict=True)):
        log_weight = -np.where(np.isfinite(log_density), log_density, np.inf)
        log_weight -= logsumexp(log_weight)
        log_weight = np.maximum(np.minimum(log_weight, -np.log(5 * chains)), -700.0)
        rng = np.random.default_rng([seed, 4, int(number)])
        ranked = log_weight + rng.gumbel(size=len(log_weight))
        chosen[k] = np.argpartition(-ranked, chains)[:chains]
    return positions[chosen]


def pilot_positions(
    full: FullData, pilots: int, chains: int, seed: int
) -> Float[np.ndarray, "pilot chain d"]:
    """Full-data draws for the pilots."""
    rng = np.random.default_rng([seed, 2])
    return full.positions[rng.choice(len(full.positions), (pilots, chains))]


def metrics(model: Model, folds: Folds, fit: Fit, pilots: int) -> tuple[Metric, Metric]:
    """The metric of every fold, and that of the full data repeated for the pilots."""
    d = model.dimension
    if d <= FOLD_METRIC_DIMENSION and len(folds) * d * d <= _METRIC_VALUES:
        full_hessian, hessians = _curvatures(model, folds, np.zeros(len(folds)), fit.centre())
        own = fold_metric(fit.covariance, full_hessian, hessians)
        pilot = fold_metric(fit.covariance, full_hessian, full_hessian[None])
        return own, FoldMetric(*(np.repeat(part, pilots, axis=0) for part in pilot))
    local, curvature = _local_coordinates(model, folds, fit)
    shared = shared_metric(fit.covariance, local, curvature)
    regression = np.zeros((pilots, *shared.folds.regression.shape[1:]))
    nothing = LocalCoordinates(
        np.zeros((pilots, d), bool),
        np.ones((pilots, d)),
        np.zeros((pilots, regression.shape[2]), np.int32),
        regression,
    )
    return shared, SharedMetric(shared.covariance, shared.factor, nothing)


def rung_metric(
    model: Model,
    folds: Folds,
    fit: Fit,
    metric: Metric,
    members: Int[np.ndarray, " member"],
    temper: Float[np.ndarray, " member"],
) -> Metric:
    """The metric of rungs of the folds ``members``, whose test rows weigh ``temper``."""
    if isinstance(metric, SharedMetric):
        return tempered_metric(metric, members, temper)
    full_hessian, hessians = _curvatures(model, folds[members], temper, fit.centre())
    return fold_metric(fit.covariance, full_hessian, hessians)


def _curvatures(
    model: Model,
    folds: Folds,
    temper: Float[np.ndarray, " fold"],
    point: Float[np.ndarray, " d"],
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "fold d d"]]:
    """Minus the Hessian of the log density at ``point``: of the full data, and of each fold."""

    def curvature(weight: Float[Array, "fold row"], point: Array) -> Array:
        def of_fold(weight: Array) -> Array:
            def log_density(q: Array) -> Array:
                rows = jnp.where(weight > 0, weight * model.flat_log_likelihood(q), 0.0)
                return model.flat_log_prior(q) + rows.sum()

            return -jax.hessian(log_density)(point)

        return jax.lax.map(of_fold, weight)

    full = _for_weights(model, curvature, np.ones((1, model.n_obs)), point)[0]
    found = _for_folds(model, curvature, folds, temper, point)
    finite = np.isfinite(found).all(axis=(1, 2))
    found = np.where(finite[:, None, None], found, full)
    symmetric = 0.5 * (found + np.swapaxes(found, 1, 2))
    return 0.5 * (full + full.T), symmetric


def _local_coordinates(
    model: Model, folds: Folds, fit: Fit
) -> tuple[Bool[np.ndarray, "fold d"], Float[np.ndarray, " d"]]:
    """Coordinates without training information by fold, and the curvature of the log prior.

    A coordinate is local to a fold if the gradient of the training rows' log likelihood in it is
    exactly zero at a few draws.
    """

    def silent(weight: Float[Array, "fold row"], points: Array) -> Array:
        def of_fold(weight: Array) -> Array:
            def log_likelihood(q: Array) -> Array:
                return jnp.where(weight > 0, model.flat_log_likelihood(q), 0.0).sum()

            return jnp.all(jax.vmap(jax.grad(log_likelihood))(points) == 0.0, axis=0)

        return jax.lax.map(of_fold, weight)

    def prior_curvature(directions: Array, point: Array) -> Array:
        gradient = jax.grad(model.flat_log_prior)
        second = lambda e: -jnp.vdot(e, jax.jvp(gradient, (point,), (e,))[1])  # noqa: E731
        return jax.lax.map(second, directions)

    spread = np.linspace(0, len(fit.flat) - 1, _LOCAL_DRAWS).astype(int)
    local = _for_folds(model, silent, folds, np.zeros(len(folds)), fit.flat[spread])
    d, point = model.dimension, fit.centre()
    directions = np.resize(np.eye(d), (-(-d // lanes()) * lanes(), d))
    curvature = compiled(model, prior_curvature, directions, point)(directions, point)[:d]
    return local, np.where(np.isfinite(curvature), curvature, 0.0)


def _for_folds(
    model: Model,
    function: Any,
    folds: Folds,
    temper: Float[np.ndarray, " fold"],
    shared: np.ndarray,
) -> np.ndarray:
    """``function(row weights, shared)`` for all folds, some at a time."""
    found = []
    for first in range(0, len(folds), _AT_ONCE):
        members = np.arange(first, min(first + _AT_ONCE, len(folds)))
        weight = folds.train_mask(members).astype(float)
        for row, k in enumerate(members):
            weight[row, folds.test(k)] = temper[k]
        found.append(_for_weights(model, function, weight, shared))
    return np.concatenate(found)


def _for_weights(
    model: Model, function: Any, weight: Float[np.ndarray, "fold row"], shared: np.ndarray
) -> np.ndarray:
    padded = np.resize(weight, (-(-_AT_ONCE // lanes()) * lanes(), model.n_obs))
    return compiled(model, function, padded, shared)(padded, shared)[: len(weight)]
