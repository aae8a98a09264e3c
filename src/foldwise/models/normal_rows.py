"""Rows that are jointly normal given the parameters, some of them unseen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

_LOG_2PI = 1.8378770664093453


def masked_normal(
    y: ArrayLike,
    mean: ArrayLike,
    covariance: Float[Array, "row row"],
    rows: Bool[Array, " row"],
) -> Float[Array, ""]:
    """Log density of the rows marked of a normal vector, the others integrated out.

    Rows that are not marked become independent of the others, with variance one and residual
    zero, and count nothing: one factorisation of a fixed size does for every set of rows.
    """
    away = jnp.where(rows, jnp.asarray(y) - mean, 0.0)
    root = jnp.linalg.cholesky(_masked(covariance, rows))
    white = jax.scipy.linalg.solve_triangular(root, away, lower=True)
    size = jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * _LOG_2PI * jnp.sum(rows)
    return -0.5 * jnp.sum(white**2) - size


def normal_given_rows(
    key: Array,
    y: ArrayLike,
    mean: ArrayLike,
    covariance: Float[Array, "row row"],
    rows: Bool[Array, " row"],
) -> Float[Array, " row"]:
    """A draw of all rows of a normal vector given the values of those marked.

    Of an unconditional draw x, x + C[:, rows] C[rows, rows]^-1 (y - x)[rows] has the conditional
    distribution (Matheron's rule); at the rows marked it is y again.
    """
    y, noise = jnp.asarray(y), jax.random.normal(key, jnp.shape(y), covariance.dtype)
    drawn = mean + jnp.linalg.cholesky(covariance) @ noise
    away = jnp.where(rows, y - drawn, 0.0)
    root = jnp.linalg.cholesky(_masked(covariance, rows))
    weights = jax.scipy.linalg.cho_solve((root, True), away)
    return drawn + covariance @ weights


def _masked(
    covariance: Float[Array, "row row"], rows: Bool[Array, " row"]
) -> Float[Array, "row row"]:
    """The covariance of the rows marked, the identity elsewhere."""
    identity = jnp.eye(len(covariance), dtype=covariance.dtype)
    return jnp.where(rows[:, None] & rows, covariance, identity)
