"""Cholesky factors and triangular solves written in JAX, for programs that run on several lanes.

LAPACK's, which JAX calls on CPUs, have two faults here. A batched call takes a thread of XLA's pool
and waits there for others of the pool: with as many lanes as threads, for ever. And OpenBLAS, which
does the work, starts threads of its own that wait by spinning: a gradient with a factor of 133 rows
takes tens of milliseconds where other work has the cores, and 0.7 without these threads. What is
here takes as long as that, for one matrix or many (``bench/gp.py``), in any number of lanes.

Programs are lowered with :func:`lowering`, which puts it in the place of LAPACK's after all
derivatives have been taken and all batches made; so derivatives of any order are JAX's own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.lax.linalg import cholesky_p, triangular_solve_p
from jaxtyping import Array, Float

# Larger matrices stay LAPACK's: there its threads have something to do, and programs of unrolled
# blocks would take long to compile.
LARGEST = 512
# Columns that are found one after another; what is left of the columns before is matrix products.
_WIDTH = 64


def cholesky(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Lower Cholesky factors, not a number where a matrix is not positive definite.

    Left-looking, a panel of columns at a time; only the lower triangle is read.
    """
    n = matrix.shape[-1]
    before = jnp.zeros((*matrix.shape[:-1], 0), matrix.dtype)
    for start, stop in _panels(n):
        panel = matrix[..., start:, start:stop]
        if start:
            below = before[..., start:, :]
            panel = panel - below @ _transposed(below[..., : stop - start, :])
        found = _factor_panel(panel)
        above = jnp.zeros((*matrix.shape[:-2], start, stop - start), matrix.dtype)
        before = jnp.concatenate([before, jnp.concatenate([above, found], axis=-2)], axis=-1)
    positive = (jnp.diagonal(before, axis1=-2, axis2=-1) > 0).all(axis=-1)
    return jnp.where(positive[..., None, None], before, jnp.nan)


def _factor_panel(panel: Float[Array, "*batch m w"]) -> Float[Array, "*batch m w"]:
    """The first columns of a factor, one after another."""
    rows, width = panel.shape[-2:]

    def column(j: Array, panel: Array) -> Array:
        row = _at(panel, j, -2)
        row = jnp.where(jnp.arange(width) < j, row, 0.0)
        rest = _at(panel, j, -1) - jnp.einsum("...mw,...w->...m", panel, row)
        pivot = jax.lax.dynamic_index_in_dim(rest, j, -1)
        found = jnp.where(jnp.arange(rows) < j, 0.0, rest / jnp.sqrt(pivot))
        return jax.lax.dynamic_update_index_in_dim(panel, found, j, -1)

    return jax.lax.fori_loop(0, width, column, panel)


def triangular_solve(
    a: Float[Array, "*batch n n"],
    b: Float[Array, "*batch n m"],
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
) -> Float[Array, "*batch n m"]:
    """``x`` with a x = b, or x a = b where ``a`` is on the right; by blocks of rows."""
    if not left_side:  # x a = b where a' x' = b'
        found = triangular_solve(a, _transposed(b), True, lower, not transpose_a, unit_diagonal)
        return _transposed(found)
    n = a.shape[-1]
    if transpose_a:
        a, lower = _transposed(a), not lower
    panels = _panels(n) if lower else _panels(n)[::-1]
    known, x = slice(0, 0), jnp.zeros((*b.shape[:-2], 0, b.shape[-1]), b.dtype)
    for start, stop in panels:
        rest = b[..., start:stop, :]
        if x.shape[-2]:
            rest = rest - a[..., start:stop, known] @ x
        found = _solve_block(a[..., start:stop, start:stop], rest, lower, unit_diagonal)
        x = jnp.concatenate([x, found] if lower else [found, x], axis=-2)
        known = slice(0, stop) if lower else slice(start, n)
    return x


def _solve_block(
    a: Float[Array, "*batch w w"], b: Float[Array, "*batch w m"], lower: bool, unit: bool
) -> Float[Array, "*batch w m"]:
    """One block, row by row, from the first where ``a`` is lower triangular, else from the last."""
    width = a.shape[-1]

    def row(step: Array, x: Array) -> Array:
        i = step if lower else width - 1 - step
        own, places = _at(a, i, -2), jnp.arange(width)
        others = jnp.where((places < i) if lower else (places > i), own, 0.0)
        found = _at(x, i, -2) - jnp.einsum("...w,...wm->...m", others, x)
        if not unit:
            found = found / jax.lax.dynamic_index_in_dim(own, i, -1)
        return jax.lax.dynamic_update_index_in_dim(x, found, i, -2)

    return jax.lax.fori_loop(0, width, row, b)


def _panels(n: int) -> list[tuple[int, int]]:
    """First and last column of each panel, all about as wide."""
    count = -(-n // _WIDTH)
    edges = [n * k // count for k in range(count + 1)]
    return list(pairwise(edges))


def _at(array: Array, index: Array, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)


def _transposed(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def lowering() -> Any:
    """How to lower a program for CPUs: factorisations of this module in the place of LAPACK's."""
    rules: Any = (
        (cholesky_p, _lower_cholesky),
        (triangular_solve_p, _lower_triangular_solve),
    )
    return mlir.LoweringParameters(override_lowering_rules=rules)


def _is_ours(ctx: Any) -> bool:
    matrix = ctx.avals_in[0]
    return matrix.shape[-1] <= LARGEST and jnp.issubdtype(matrix.dtype, jnp.floating)


def _lower_cholesky(ctx: Any, matrix: Any) -> Any:
    if not _is_ours(ctx):
        return _of_jax(cholesky_p)(ctx, matrix)
    return mlir.lower_fun(cholesky, multiple_results=False)(ctx, matrix)


def _lower_triangular_solve(ctx: Any, a: Any, b: Any, **how: Any) -> Any:
    if not _is_ours(ctx):
        return _of_jax(triangular_solve_p)(ctx, a, b, **how)

    def solve(a: Array, b: Array) -> Array:
        return triangular_solve(
            a, b, how["left_side"], how["lower"], bool(how["transpose_a"]), how["unit_diagonal"]
        )

    return mlir.lower_fun(solve, multiple_results=False)(ctx, a, b)


def _of_jax(primitive: Any) -> Any:
    """JAX's own rule for CPUs."""
    return mlir._platform_specific_lowerings["cpu"][primitive].rule
