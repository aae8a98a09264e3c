"""All cells given the globals, inside programs: integrals and their gradients, draws.

Given the globals g and rows R, with u the coordinates of all cells,

    p(g) = integral of p(g, u) du,
    p(R | g) = prod_c Z_c(R) / Z_c(no rows) times prod of p(y_i | g) over rows in no cell,

with the integrals of ``cells.py``, here for normal conditional priors: a cell's prior given the
globals is a quadratic form, whose mode and curvature follow from one gradient and Hessian block.
Nodes are placed by Newton steps, and stay where they are while one differentiates: the gradient is
that of Fisher's identity,

    d/dg log p(g) p(R | g) = E[ d/dg log p(g, u) p(R | g, u) | g, R ],

with the expectation by the same nodes and weights. Rows weigh with their cell's weights; the prior,
of which only the sum over cells is known, is averaged over points that have the mean and covariance
of every cell at once, which is exact since it is quadratic. Both are as good as the integrals are.
HMC needs no more of a gradient than that it is a function of the position.

All arrays have the draws on the last axis, so that sums by cell run over contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.cells import Cells, Place, Slope, log_add
from foldwise.scores.nodes import rule
from foldwise.scores.small_matrices import Factor, cholesky, log_volume, solve_lower, solve_upper


class Prior(NamedTuple):
    """The cells' prior given the globals: positions at its mode, that mode, factor, log p(g)."""

    position: Float[Array, "d draw"]
    centre: Float[Array, "cell D draw"]
    factor: Factor
    log_density: Float[Array, " draw"]


class Placed(NamedTuple):
    """Nodes of every cell: where they are, values there, and whether its mode was found."""

    place: Place
    values: Float[Array, "node cell draw"]
    found: Bool[Array, "cell draw"]


class MarginalCells(Cells):
    """All cells at draws side by side, each with rows of its own; the last axis is the draw."""

    def __init__(self, model: Model, structure: Structure, rows: Array, selection: Any):
        super().__init__(model, structure, rows, bent=False)
        self.selection = selection

    def each(self, function: Callable[..., Any], *given: Array) -> Any:
        """What ``function`` of the model gives at every draw."""

        def of_draw(selection: Any, *own: Array) -> Any:
            with self.model.selected(selection):
                return function(*own)

        return jax.vmap(of_draw, -1, -1)(self.selection, *given)

    def normal_prior(self, q: Array, at: Array, slope: Slope) -> Prior:
        """What the cells' normal prior is, given the globals of positions, from its slope."""
        factor, definite = cholesky(self._padded(-slope.hessian))
        step = solve_upper(factor, solve_lower(factor, slope.gradient))
        centre = jnp.where(self.real[..., None], at + step, 0.0)
        q = self.place(q, centre)
        value = self.each(self.model.flat_log_prior, q) + log_volume(factor).sum(axis=0)
        return Prior(q, centre, factor, jnp.where(definite.all(axis=0), value, jnp.nan))

    def placed(self, q: Array, size: int) -> tuple[Prior, Placed]:
        """The prior, and nodes with the log integrand there, relative to the prior's height."""
        prior, place, found = self._found(q)
        values = jax.lax.map(
            lambda node: self._at_node(prior, place, node)[0], _nodes(size, self.dimensions)
        )
        return prior, Placed(place, values, found)

    def _found(self, q: Array) -> tuple[Prior, Place, Array]:
        place, found = self._place(q)
        return self.normal_prior(q, place.mode, place.slope), place, found

    def _at_node(
        self, prior: Prior, place: Place, node: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Log integrand of every cell at a node, with its weight, and the rows there."""
        x, log_weight = node
        u = place.at(x[None, :, None])
        value, rows = self.kept_rows(prior.position, u)
        value += _log_prior_change(prior, u)
        return value + log_weight + 0.5 * (x**2).sum(), rows

    def drawn(self, q: Array, keys: Array) -> Array:
        """Positions with the cells drawn given the globals and the rows that are kept."""
        prior, place, found = self._found(q)
        log_prior = partial(_log_prior_change, prior)
        u, nowhere = self.drawn_given(prior.position, place, log_prior, keys)
        u = jnp.where((found & ~nowhere)[:, None], u, jnp.nan)
        return self.place(prior.position, u)

    def derivatives(self, q: Array, size: int, by_row: bool) -> tuple[Array, Array]:
        """Derivatives of log densities given the globals by every row's value.

        With d and dd those of a row's log density given its cell too, they are E[d] and
        E[d^2 + dd] - E[d]^2, by the cell's distribution given the rows that are kept, weighed,
        ``by_row``, by the row's own density.
        """
        prior, place, found = self._found(q)

        def add(sums: tuple[Array, ...], node: tuple[Array, Array]) -> tuple[Any, None]:
            value, rows = self._at_node(prior, place, node)
            log_weight = jnp.concatenate([value, jnp.zeros_like(value[:1])])[self.row_cell]
            log_weight = log_weight + rows if by_row else log_weight
            top = jnp.maximum(sums[0], log_weight)
            safe = jnp.where(jnp.isfinite(top), top, 0.0)
            old, weight = jnp.exp(sums[0] - safe), jnp.exp(log_weight - safe)
            u = place.at(node[0][None, :, None])
            d, dd = self.each(self.model.flat_derivatives, self.place(prior.position, u))
            new = (jnp.ones_like(d), d, d**2 + dd)
            added = (jnp.where(weight > 0, weight * value, 0.0) for value in new)
            return (top, *(old * a + b for a, b in zip(sums[1:], added, strict=True))), None

        nothing = (jnp.full(self.keep.shape, -jnp.inf), *jnp.zeros((3, *self.keep.shape)))
        (_, weight, first, second), _ = jax.lax.scan(add, nothing, _nodes(size, self.dimensions))
        lost = jnp.concatenate([~found, jnp.zeros_like(found[:1])])[self.row_cell]
        first = jnp.where(lost, jnp.nan, first / weight)
        return first, second / weight - first**2

    def rows_given(self, q: Array, size: int) -> Array:
        """Log density of every row given the rows of its cell that are kept, by their nodes."""
        prior, place, found = self._found(q)

        def add(sums: tuple[Array, Array], node: tuple[Array, Array]) -> tuple[Any, None]:
            value, rows = self._at_node(prior, place, node)
            of_row = jnp.concatenate([value, jnp.zeros_like(value[:1])])[self.row_cell]
            return (log_add(sums[0], value), log_add(sums[1], of_row + rows)), None

        nothing = (
            jnp.full((self.count, place.mode.shape[2]), -jnp.inf),
            jnp.full(self.keep.shape, -jnp.inf),
        )
        (whole, rows), _ = jax.lax.scan(add, nothing, _nodes(size, self.dimensions))
        whole = jnp.where(found, whole, jnp.nan)
        given = rows - jnp.concatenate([whole, jnp.zeros_like(whole[:1])])[self.row_cell]
        alone = (self.row_cell == self.count)[:, None]
        return jnp.where(alone, self.rows(prior.position), given) if alone.any() else given

    def totals(self, prior: Prior, placed: Placed) -> Array:
        """log p(rows | g) of every cell, and of the rows in none."""
        own = jax.nn.logsumexp(placed.values, axis=0)
        own += log_volume(placed.place.factor) - log_volume(prior.factor)
        own = jnp.where(placed.found, own, jnp.nan)
        alone = self.row_cell == self.count
        if not alone.any():
            return jnp.concatenate([own, jnp.zeros_like(own[:1])])
        rows = jnp.where(self.keep & alone[:, None], self.rows(prior.position), 0.0)
        return jnp.concatenate([own, rows.sum(axis=0)[None]])

    def gradient(self, prior: Prior, placed: Placed, size: int) -> Array:
        """Gradient of log p(g) p(rows | g) by all coordinates at fixed nodes."""
        top = placed.values.max(axis=0)
        weights = jnp.exp(placed.values - top)
        weights /= weights.sum(axis=0)
        count, place, shape = len(weights), placed.place, placed.place.mode.shape

        def weighed(flat: Array, weight: Array) -> Array:
            # a row that weighs nothing counts nothing, even where its density is zero
            return jnp.where(weight > 0, weight * self.model.flat_log_likelihood(flat), 0.0).sum()

        def add(total: tuple[Array, ...], node: tuple[Array, ...]) -> tuple[Any, None]:
            x, weight, outside = node
            away = solve_upper(place.factor, x[None, :, None])
            of_cell = jnp.concatenate([weight, jnp.full((1, shape[2]), outside)])
            of_row = jnp.where(self.keep, of_cell[self.row_cell], 0.0)
            there = self.place(prior.position, place.mode + away)
            slope = total[0] + self.each(jax.grad(weighed), there, of_row)
            away = jnp.broadcast_to(away, shape)
            square = total[2] + weight[:, None, None] * away[:, :, None] * away[:, None]
            return (slope, total[1] + weight[:, None] * away, square), None

        nothing = (
            jnp.zeros_like(prior.position),
            jnp.zeros(shape),
            jnp.zeros((shape[0], *shape[1:2] * 2, shape[2])),
        )
        outside = np.eye(1, count)[0]  # rows in no cell count once
        steps = (_nodes(size, self.dimensions)[0], weights, outside)
        (slope, mean, square), _ = jax.lax.scan(add, nothing, steps)
        covariance = square - mean[:, :, None] * mean[:, None]
        factor, _ = cholesky(covariance)
        lower = jnp.stack([_column(factor, a) for a in range(self.dimensions)])
        return slope + self.mean_prior_gradient(prior.position, place.mode + mean, lower)

    def mean_prior_gradient(self, q: Array, mean: Array, columns: Array) -> Array:
        """Mean gradient of the log prior over cells with a mean and a covariance.

        The covariance is the sum of the products of its ``columns``. At the mean plus and minus
        each column times sqrt(D) a quadratic form has, on average, what it has in expectation.
        """
        away = jnp.sqrt(float(self.dimensions)) * columns
        points = jnp.concatenate([mean + away, mean - away])

        def add(total: Array, u: Array) -> tuple[Array, None]:
            return total + self.each(jax.grad(self.model.flat_log_prior), self.place(q, u)), None

        return jax.lax.scan(add, jnp.zeros_like(q), points)[0] / len(points)


# ---------------------------------------------------------------- small matrices


def _log_prior_change(prior: Prior, u: Array) -> Array:
    """Log prior of every cell at ``u``, relative to its mode."""
    return -0.5 * (_times_transpose(prior.factor, u - prior.centre) ** 2).sum(axis=1)


def _times_transpose(factor: Factor, x: Array) -> Array:
    """L^T x."""
    size = len(factor)
    return jnp.stack([sum(factor[b][a] * x[:, b] for b in range(a, size)) for a in range(size)], 1)


def _column(factor: Factor, a: int) -> Array:
    """Column a of L."""
    zero = jnp.zeros_like(factor[0][0])
    return jnp.stack([line[a] if a < len(line) else zero for line in factor], axis=1)


def inverse(factor: Factor) -> Array:
    """Columns of L^-T, whose products add up to the inverse of L L^T."""
    eye = np.eye(len(factor))
    columns = [solve_upper(factor, jnp.asarray(e)[None, :, None]) for e in eye]
    return jnp.stack(columns)


def _nodes(size: int, dimensions: int) -> tuple[Float[Array, "node D"], Float[Array, " node"]]:
    """Nodes and log weights of a rule."""
    found = rule(size, dimensions)
    real = slice(int(found.real))
    return jnp.asarray(found.nodes[real]), jnp.asarray(found.log_weight[real])
