"""Matrices of one to three coordinates for every cell and draw, entry by entry.

Batched LAPACK is slow for them, and has hung.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

# Entries of a lower triangular matrix for every cell and draw.
Factor = tuple[tuple[Array, ...], ...]


def cholesky(matrix: Float[Array, "cell D D draw"]) -> tuple[Factor, Bool[Array, "cell draw"]]:
    """Lower Cholesky factors, and whether the matrix was positive definite.

    Where it was not, the factor is that of the diagonal's absolute values, which Newton steps can
    go on with.
    """
    size = matrix.shape[1]
    factor: list[list[Array]] = [[] for _ in range(size)]
    definite = jnp.ones(matrix[:, 0, 0].shape, bool)
    for a in range(size):
        for b in range(a):
            dot = sum(factor[a][c] * factor[b][c] for c in range(b))
            factor[a].append((matrix[:, a, b] - dot) / factor[b][b])
        pivot = matrix[:, a, a] - sum(entry**2 for entry in factor[a])
        definite &= pivot > 1e-14 * jnp.abs(matrix[:, a, a])
        factor[a].append(jnp.sqrt(jnp.where(pivot > 0, pivot, 1.0)))
    plain = [jnp.sqrt(jnp.maximum(jnp.abs(matrix[:, a, a]), 1e-8)) for a in range(size)]
    chosen = tuple(
        tuple(
            jnp.where(definite, entry, plain[a] if a == b else 0.0)
            for b, entry in enumerate(factor[a])
        )
        for a in range(size)
    )
    return chosen, definite


def solve_lower(factor: Factor, right: Array) -> Float[Array, "cell D draw"]:
    """Solution x of L x = right."""
    done: list[Array] = []
    for a, line in enumerate(factor):
        dot = sum(line[b] * done[b] for b in range(a))
        done.append((right[:, a] - dot) / line[a])
    return jnp.stack(done, axis=1)


def solve_upper(factor: Factor, right: Array) -> Float[Array, "cell D draw"]:
    """Solution x of L^T x = right."""
    return jnp.stack(back_substituted(factor, [right[:, a] for a in range(len(factor))]), axis=1)


def back_substituted(factor: Factor, right: Sequence[Any]) -> list[Any]:
    """The same by coordinate, of arrays of JAX or of NumPy."""
    done: dict[int, Any] = {}
    for a in reversed(range(len(factor))):
        dot = sum(factor[b][a] * done[b] for b in range(a + 1, len(factor)))
        done[a] = (right[a] - dot) / factor[a][a]
    return [done[a] for a in range(len(factor))]


def log_volume(factor: Factor) -> Float[Array, "cell draw"]:
    """Log integral of exp(-u^T L L^T u / 2)."""
    diagonal = [line[-1] for line in factor]
    return 0.5 * len(factor) * np.log(2 * np.pi) - sum(jnp.log(entry) for entry in diagonal)
