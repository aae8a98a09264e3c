"""NumPyro's normal distributions of all rows together, some rows unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from foldwise.models.normal_rows import masked_normal, normal_given_rows


def is_normal(distribution: Any) -> bool:
    """Whether it is a normal distribution whose mean and covariance are known."""
    import numpyro.distributions as dist

    kind = type(_inside(distribution))
    # by name: older versions of NumPyro do not have all of them
    return kind.__name__ in _COVARIANCE and getattr(dist, kind.__name__, None) is kind


def joint_log_density(
    distribution: Any, y: np.ndarray, rows: Bool[Array, " row"], axis: int
) -> Float[Array, ""]:
    """Log density of the rows marked of y, along an event axis, the others integrated out."""
    mean, covariance, values, marked = _vectors(distribution, y, rows, axis)
    return jax.vmap(masked_normal, (0, 0, 0, None))(values, mean, covariance, marked).sum()


def joint_draw(
    key: Array, distribution: Any, y: np.ndarray, rows: Bool[Array, " row"], axis: int
) -> Array:
    """A draw of all of y given its rows that are marked."""
    mean, covariance, values, marked = _vectors(distribution, y, rows, axis)
    keys = jax.random.split(key, len(values))
    draw = jax.vmap(normal_given_rows, (0, 0, 0, 0, None))
    return draw(keys, values, mean, covariance, marked).reshape(y.shape)


def _vectors(
    distribution: Any, y: np.ndarray, rows: Bool[Array, " row"], axis: int
) -> tuple[Array, Array, Array, Bool[Array, " entry"]]:
    """Means, covariances and values, one vector for each of a batch, and which entries are seen.

    Entries are those of an event, several for each row where events are matrices.
    """
    shape = tuple(distribution.event_shape)
    size = int(np.prod(shape))
    axis -= y.ndim - len(shape)
    along = [length if k == axis else 1 for k, length in enumerate(shape)]
    marked = jnp.broadcast_to(rows.reshape(along), shape).reshape(size)
    one = _inside(distribution)
    covariance = jnp.asarray(_COVARIANCE[type(one).__name__](one))
    covariance = jnp.broadcast_to(covariance, (*distribution.batch_shape, size, size))
    mean = jnp.broadcast_to(one.mean, y.shape)
    return (
        mean.reshape(-1, size),
        covariance.reshape(-1, size, size),
        jnp.asarray(y).reshape(-1, size),
        marked,
    )


def _inside(distribution: Any) -> Any:
    """What was expanded to more batches, all alike."""
    import numpyro.distributions as dist

    while isinstance(distribution, dist.ExpandedDistribution):
        distribution = distribution.base_dist
    return distribution


def _of_random_walk(walk: Any) -> Array:
    """That of two steps is the variance of the earlier one."""
    step = jnp.arange(1, walk.num_steps + 1)
    return jnp.square(jnp.asarray(walk.scale))[..., None, None] * jnp.minimum(step[:, None], step)


def _of_states(states: Any) -> Array:
    """That of z_t = A z_(t-1) + e_t, all steps and components of z: sums over the noise e."""
    steps, size = states.event_shape

    def further(root: Array, _: None) -> tuple[Array, Array]:
        return states.transition_matrix @ root, root

    _, roots = jax.lax.scan(further, jnp.asarray(states.scale_tril), None, length=steps)
    lag = np.arange(steps)[:, None] - np.arange(steps)
    # what the noise of step k moves at step t: A^(t-k) times its root
    moved = jnp.where((lag >= 0)[:, :, None, None], roots[np.maximum(lag, 0)], 0.0)
    return jnp.einsum("tkai,skbi->tasb", moved, moved).reshape(steps * size, steps * size)


def _of_matrix(matrix: Any) -> Array:
    """That of its entries row after row."""
    roots = matrix.scale_tril_row, matrix.scale_tril_column
    row, column = (root @ jnp.swapaxes(root, -1, -2) for root in roots)
    size = int(np.prod(matrix.event_shape))
    both = jnp.einsum("...ij,...kl->...ikjl", row, column)
    return both.reshape(*both.shape[:-4], size, size)


_COVARIANCE: dict[str, Callable[[Any], Array]] = {
    "MultivariateNormal": lambda normal: normal.covariance_matrix,
    "LowRankMultivariateNormal": lambda normal: normal.covariance_matrix,
    "CirculantNormal": lambda normal: normal.covariance_matrix,
    "CAR": lambda normal: jnp.linalg.inv(normal.precision_matrix),
    "GaussianRandomWalk": _of_random_walk,
    "GaussianStateSpace": _of_states,
    "MatrixNormal": _of_matrix,
}
