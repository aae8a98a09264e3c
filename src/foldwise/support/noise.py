"""Random numbers inside compiled programs: a key and numbers make words, words make noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32


def random_words(
    key: UInt32[Array, " 2"], number: Int[Array, ""], size: int
) -> UInt32[Array, " size"]:
    """Words that belong to the key and the number.

    JAX's Threefry is a counter-based generator: under a key it turns each pair of numbers, here
    ``number`` and a running one, into two random words. One call of it, since it is a good part of
    a program to compile.
    """
    pairs = -(-size // 2)
    running = jnp.arange(pairs, dtype=jnp.uint32)
    first = jnp.full(pairs, number).astype(jnp.uint32)
    return threefry_2x32(key, jnp.concatenate([first, running]))[:size]


def uniforms(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Uniform numbers between -1 and 1, of the precision in use; neither end is reached.

    32 bits reach 6.3 standard deviations as normals; rounding must not reach an infinite one.
    """
    numbers = bits.astype(float)
    edge = 1.0 - jnp.finfo(numbers.dtype).eps
    return jnp.clip((numbers + 0.5) * 2.0**-31 - 1.0, -edge, edge)


def normals(uniform: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard normal numbers from uniform ones between -1 and 1."""
    return jnp.sqrt(2.0) * jax.lax.erf_inv(uniform)


def log_uniforms(uniform: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Logs of uniform numbers between 0 and 1 from those between -1 and 1."""
    return jnp.log(0.5 * (1.0 + uniform))
