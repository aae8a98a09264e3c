"""The leapfrog integrator, which HMC and the evaluation of models share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def leapfrog(
    start: tuple[Array, ...],
    step: Array,
    n_steps: Array,
    density: Callable[[Array], tuple[Array, Array, Array]],
    velocity: Callable[[Array], Array],
) -> tuple[Array, ...]:
    """Follow every chain for ``n_steps`` steps of the velocity Verlet integrator.

    ``start`` and what is returned are momentum, position, log density, gradient and scores, axes
    fold, chain and parameter. ``density`` gives the last three at a position, ``velocity`` that of
    a momentum. A fold that is done while others go on waits: it takes steps of length zero.
    """

    def body(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        p, q, gradient = carry[0], carry[1], carry[3]
        now = jnp.where(i < n_steps, step, 0.0)[:, None, None]
        p = p + 0.5 * now * gradient
        q = q + now * velocity(p)
        log_density, gradient, scores = density(q)
        return p + 0.5 * now * gradient, q, log_density, gradient, scores

    return jax.lax.fori_loop(0, n_steps.max(), body, start)
