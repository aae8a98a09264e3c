"""Observed variables of PyMC whose rows depend on each other given the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from foldwise.models.normal_rows import masked_normal, normal_given_rows
from foldwise.models.pymc_graphs import Values, given_values, jaxified


class Form(NamedTuple):
    """A normal distribution of all rows, by functions of its parameters, whose graphs are kept.

    ``moments(n, *parameters)``: mean and covariance of n rows. ``density(y, rows, *parameters)``:
    log density of the rows marked, where that takes no matrix of all rows.
    """

    graphs: list[Any]
    moments: Callable[..., tuple[Array, Array]]
    density: Callable[..., Float[Array, ""]] | None = None


class Joint(NamedTuple):
    """What ``Model`` needs of rows that depend on each other, and the graphs it is of."""

    log_likelihood: Callable[..., Float[Array, ""]]
    simulate: Callable[..., Array]
    graphs: list[Any]


def joint_rows(model: Any, rv: Any, y: np.ndarray, values: Values) -> Joint | None:
    """Joint log density of rows and draws of them given others; None for other variables.

    Of one normal vector (``MvNormal``, ``gp.Marginal``, ``CAR``), a Gaussian random walk or an
    autoregression over all rows.
    """
    find = _FORMS.get(type(rv.owner.op).__name__)
    if find is None or y.ndim != 1:
        return None
    form = find(rv.name, given_values(model, rv).owner)
    function, n = jaxified(model, list(model.value_vars), form.graphs), len(y)

    def parameters(position: Mapping[str, Array]) -> list[Array]:
        # constants of PyMC may be whole or in single precision
        return [jnp.asarray(v, float) for v in function(*values(position))]

    def log_likelihood(
        position: Mapping[str, Array], rows: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        at = parameters(position)
        if form.density is not None:
            return form.density(jnp.asarray(y, float), rows, *at)
        return masked_normal(y, *form.moments(n, *at), rows)

    def simulate(
        key: Array, position: Mapping[str, Array], rows: Bool[Array, " row"]
    ) -> Float[Array, " row"]:
        return normal_given_rows(key, y, *form.moments(n, *parameters(position)), rows)

    return Joint(log_likelihood, simulate, form.graphs)


# ---------------------------------------------------------------- normal vectors


def _normal(name: str, node: Any) -> Form:
    mean, covariance = node.op.dist_params(node)
    return Form([mean, covariance], lambda n, mean, covariance: (mean, covariance))


def _conditional_autoregression(name: str, node: Any) -> Form:
    """``CAR``: the precision is tau (D - alpha W), D the numbers of neighbours."""
    import pytensor.tensor as pt

    mean, neighbours, alpha, tau = node.op.dist_params(node)[:4]
    if hasattr(neighbours.type, "format"):  # of a sparse matrix
        neighbours = pt.constant(neighbours.data.toarray())
    alone = np.flatnonzero(np.sum(getattr(neighbours, "data", np.ones((1, 1))), axis=1) == 0)
    if alone.size:
        raise ValueError(
            f"every location of the observed variable {name!r} must have a neighbour, but location "
            f"{alone[0]} has none ({alone.size} in all), and so no finite variance; join it to "
            "another, or observe it in a variable of its own"
        )

    def moments(n: int, mean: Array, w: Array, alpha: Array, tau: Array) -> tuple[Array, Array]:
        precision = jnp.squeeze(tau) * (jnp.diag(w.sum(axis=1)) - jnp.squeeze(alpha) * w)
        return mean, jnp.linalg.inv(precision)

    return Form([mean, neighbours, alpha, tau], moments)


# ---------------------------------------------------------------- time series


def _random_walk(name: str, node: Any) -> Form:
    first, steps = node.inputs[:2]
    _check_normal(name, "init_dist", first)
    _check_normal(name, "innovation_dist", steps)

    def walk(n: int, mean: Array, drift: Array, sd: Array) -> tuple[Array, Array]:
        """Mean of each row, and variance of the steps up to it."""
        drift, sd = jnp.broadcast_to(drift, (n - 1,)), jnp.broadcast_to(sd, (n - 1,))
        walked = jnp.concatenate([jnp.zeros(1), jnp.cumsum(sd**2)])
        return jnp.cumsum(jnp.concatenate([jnp.reshape(mean, (1,)), drift])), walked

    def density(y: Array, rows: Array, mean: Array, scale: Array, drift: Array, sd: Array) -> Array:
        means, walked = walk(len(y), mean, drift, sd)
        return _seen_walk(y - means, walked, jnp.squeeze(scale) ** 2, rows)

    def moments(n: int, mean: Array, scale: Array, drift: Array, sd: Array) -> tuple[Array, Array]:
        means, walked = walk(n, mean, drift, sd)
        return means, jnp.squeeze(scale) ** 2 + jnp.minimum(walked[:, None], walked)

    return Form([*_parameters(first), *_parameters(steps)], moments, density)


def _seen_walk(
    away: Float[Array, " row"],
    walked: Float[Array, " row"],
    variance: Float[Array, ""],
    rows: Bool[Array, " row"],
) -> Float[Array, ""]:
    """Log density of the rows marked of a walk about zero, each given the last one before it.

    ``walked`` is the variance of the steps up to a row, ``variance`` that of the first value.
    """
    every = jnp.arange(len(away))
    last = jax.lax.cummax(jnp.where(rows, every, -1))
    last = jnp.concatenate([jnp.full(1, -1), last[:-1]])
    first, last = last < 0, jnp.maximum(last, 0)
    spread = jnp.where(first, variance + walked, walked - walked[last])
    # between a row and itself, where no row is before it: not zero
    spread = jnp.where(rows, spread, 1.0)
    moved = away - jnp.where(first, 0.0, away[last])
    density = -0.5 * (moved**2 / spread + jnp.log(2 * jnp.pi * spread))
    return jnp.sum(jnp.where(rows, density, 0.0))


def _autoregression(name: str, node: Any) -> Form:
    weights, sd, first = node.inputs[:3]
    _check_normal(name, "init_dist", first)
    order, constant = node.op.ar_order, node.op.constant_term

    def process(w: Array, sd: Array) -> tuple[Array, Array, Array]:
        w = jnp.broadcast_to(w, (order + constant,))
        level, lags = (w[0], w[1:]) if constant else (jnp.zeros(()), w)
        return level, lags, jnp.squeeze(sd) ** 2

    def density(y: Array, rows: Array, w: Array, sd: Array, mean: Array, scale: Array) -> Array:
        mean, scale = jnp.broadcast_to(mean, (order,)), jnp.broadcast_to(scale, (order,))
        return _seen_autoregression(y, rows, process(w, sd), mean, scale**2)

    def moments(n: int, w: Array, sd: Array, mean: Array, scale: Array) -> tuple[Array, Array]:
        level, lags, noise = process(w, sd)
        # what is left of y once lags are taken off it is independent: (I - lags) y = e
        lagged = sum(lag * jnp.eye(n, k=-k - 1) for k, lag in enumerate(lags))
        later = jnp.arange(n) >= order
        whiten = jnp.eye(n) - jnp.where(later[:, None], lagged, 0.0)
        whole = jax.scipy.linalg.solve_triangular(whiten, jnp.eye(n), lower=True)
        start, spread = (jnp.resize(jnp.broadcast_to(v, (order,)), (n,)) for v in (mean, scale**2))
        means, variances = jnp.where(later, level, start), jnp.where(later, noise, spread)
        return whole @ means, (whole * variances) @ whole.T

    return Form([weights, sd, *_parameters(first)], moments, density)


def _seen_autoregression(
    y: Float[Array, " row"],
    rows: Bool[Array, " row"],
    process: tuple[Float[Array, ""], Float[Array, " lag"], Float[Array, ""]],
    mean: Float[Array, " lag"],
    variance: Float[Array, " lag"],
) -> Float[Array, ""]:
    """Log density of the rows marked, by a Kalman filter whose state are the last values.

    ``process`` is the constant, the weights of the lags, nearest first, and the variance of a step;
    ``mean`` and ``variance`` are those of the first values, which are independent.
    """
    level, lags, noise = process
    order = len(lags)

    def density(away: Array, spread: Array, seen: Array) -> Array:
        found = -0.5 * (away**2 / spread + jnp.log(2 * jnp.pi * spread))
        return jnp.where(seen, found, 0.0)

    def step(state: tuple[Array, Array], row: tuple[Array, Array]) -> tuple[Any, Array]:
        (values, covariance), (y, seen) = state, row
        # the next value and its covariance with those before it
        expected, along = level + lags @ values, covariance @ lags
        spread = lags @ along + noise
        gain = jnp.where(seen, along[:-1] / spread, 0.0)
        away = y - expected
        values = jnp.concatenate([jnp.where(seen, y, expected)[None], values[:-1] + gain * away])
        rest = covariance[:-1, :-1] - jnp.outer(gain, along[:-1])
        side = jnp.where(seen, 0.0, along[:-1])
        corner = jnp.where(seen, 0.0, spread)[None, None]
        covariance = jnp.block([[corner, side[None]], [side[:, None], rest]])
        return (values, covariance), density(away, spread, seen)

    first, seen = y[:order], rows[:order]
    start = jnp.sum(density(first - mean, variance, seen))
    known = jnp.where(seen, first, mean)[::-1], jnp.diag(jnp.where(seen, 0.0, variance)[::-1])
    return start + jnp.sum(jax.lax.scan(step, known, (y[order:], rows[order:]))[1])


def _parameters(normal: Any) -> list[Any]:
    """Mean and standard deviation of a normal component."""
    return list(normal.owner.op.dist_params(normal.owner))


def _check_normal(name: str, what: str, component: Any) -> None:
    kind = type(component.owner.op).__name__.removesuffix("RV")
    if kind != "Normal":
        raise ValueError(
            f"the {what} of the observed variable {name!r} must be pm.Normal.dist, so that values "
            f"left out can be integrated out of the series, but it is {kind}; write rows given the "
            "values before them, pm.Normal(..., mu=rho * y[:-1], observed=y[1:])"
        )


_FORMS = {
    "MvNormalRV": _normal,
    "CARRV": _conditional_autoregression,
    "RandomWalkRV": _random_walk,
    "AutoRegressiveRV": _autoregression,
}
