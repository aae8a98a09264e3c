"""The density of the globals with the cells integrated out, and its gradient, inside programs.

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

All arrays have the draws on the last axis, so that sums by cell run over contiguous memory. The
functions here are of one draw; side by side, under ``vmap``, they become one call for all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.cells import Cells, Slope, by_owner, log_add
from foldwise.scores.nodes import rule
from foldwise.scores.small_matrices import Factor, cholesky, log_volume, solve_lower, solve_upper
from foldwise.support.runtime import Programs
from foldwise.support.words import counted


class Prior(NamedTuple):
    """The cells' prior given the globals: positions at its mode, that mode, factor, log p(g)."""

    position: Float[Array, "d draw"]
    centre: Float[Array, "cell D draw"]
    factor: Factor
    log_density: Float[Array, " draw"]


class Placed(NamedTuple):
    """Nodes of every cell: its mode and factor, values at the nodes, and whether one was found."""

    mode: Float[Array, "cell D draw"]
    factor: Factor
    values: Float[Array, "node cell draw"]
    found: Bool[Array, "cell draw"]


class MarginalDensity:
    """Log densities of the globals of ``model``, with ``size`` nodes along each coordinate.

    ``reference`` is a position; its globals are replaced.
    """

    def __init__(
        self, model: Model, structure: Structure, reference: Float[np.ndarray, " d"], size: int
    ):
        self.model, self.structure, self.reference, self.size = model, structure, reference, size

    def log_prior(self, g: Float[Array, " g"], selection: Any) -> Float[Array, ""]:
        """log p(g)."""
        nothing = jnp.zeros(self.model.n_obs, bool)
        return _with_gradient(self._prior, g, nothing, selection)

    def posterior(
        self, g: Float[Array, " g"], rows: Bool[Array, " row"], selection: Any
    ) -> Float[Array, ""]:
        """log p(g) p(rows | g)."""
        return _with_gradient(self._posterior, g, rows, selection)

    def by_cell(
        self, g: Float[Array, " g"], rows: Bool[Array, " row"], selection: Any
    ) -> Float[Array, " cell1"]:
        """log p(rows of the cell | g) of every cell, and of the rows in none; without gradient."""
        return _side_by_side(self._by_cell)(g, rows, selection)

    def by_row(
        self, g: Float[Array, " g"], rows: Bool[Array, " row"], selection: Any
    ) -> Float[Array, " row"]:
        """log p(row | g, those of the ``rows`` that are in its cell) of every row; the same way."""
        return _side_by_side(self._by_row)(g, rows, selection)

    # ------------------------------------------------ of draws side by side

    def _cells(self, g: Array, rows: Array, selection: Any) -> tuple[_Cells, Array]:
        """The cells, and positions with these globals."""
        q = jnp.broadcast_to(self.reference[:, None], (len(self.reference), g.shape[1]))
        q = q.at[self.structure.globals].set(g)
        return _Cells(self.model, self.structure, rows, selection), q

    def _prior(self, g: Array, rows: Array, selection: Any) -> tuple[Array, Array]:
        cells, q = self._cells(g, rows, selection)
        prior = cells.normal_prior(q, cells.take(q), cells.slopes(q)[0])
        slope = cells.mean_prior_gradient(q, prior.centre, _inverse(prior.factor))
        return prior.log_density, slope[self.structure.globals]

    def _posterior(self, g: Array, rows: Array, selection: Any) -> tuple[Array, Array]:
        cells, q = self._cells(g, rows, selection)
        prior, placed = cells.placed(q, self.size)
        value = prior.log_density + cells.totals(prior, placed).sum(axis=0)
        return value, cells.gradient(prior, placed, self.size)[self.structure.globals]

    def _by_cell(self, g: Array, rows: Array, selection: Any) -> Array:
        cells, q = self._cells(g, rows, selection)
        return cells.totals(*cells.placed(q, self.size))

    def _by_row(self, g: Array, rows: Array, selection: Any) -> Array:
        cells, q = self._cells(g, rows, selection)
        return cells.rows_given(q, self.size)


class _Cells(Cells):
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
        prior, mode, factor, found = self._found(q)
        values = jax.lax.map(
            lambda node: self._at_node(prior, mode, factor, node)[0], _nodes(size, self.dimensions)
        )
        return prior, Placed(mode, factor, values, found)

    def _found(self, q: Array) -> tuple[Prior, Array, Factor, Array]:
        mode, factor, found, slope = self._mode(q, self.take(q))
        return self.normal_prior(q, mode, slope), mode, factor, found

    def _at_node(
        self, prior: Prior, mode: Array, factor: Factor, node: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Log integrand of every cell at a node, with its weight, and the rows there."""
        x, log_weight = node
        u = mode + solve_upper(factor, x[None, :, None])
        rows = self.rows(self.place(prior.position, u))
        value = by_owner(jnp.where(self.keep, rows, 0.0), self.row_cell, self.count + 1)[:-1]
        value -= 0.5 * (_times_transpose(prior.factor, u - prior.centre) ** 2).sum(axis=1)
        return value + log_weight + 0.5 * (x**2).sum(), rows

    def rows_given(self, q: Array, size: int) -> Array:
        """Log density of every row given the rows of its cell that are kept, by their nodes."""
        prior, mode, factor, found = self._found(q)

        def add(sums: tuple[Array, Array], node: tuple[Array, Array]) -> tuple[Any, None]:
            value, rows = self._at_node(prior, mode, factor, node)
            of_row = jnp.concatenate([value, jnp.zeros_like(value[:1])])[self.row_cell]
            return (log_add(sums[0], value), log_add(sums[1], of_row + rows)), None

        nothing = (
            jnp.full((self.count, mode.shape[2]), -jnp.inf),
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
        own += log_volume(placed.factor) - log_volume(prior.factor)
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
        count, shape = len(weights), placed.mode.shape

        def weighed(flat: Array, weight: Array) -> Array:
            # a row that weighs nothing counts nothing, even where its density is zero
            return jnp.where(weight > 0, weight * self.model.flat_log_likelihood(flat), 0.0).sum()

        def add(total: tuple[Array, ...], node: tuple[Array, ...]) -> tuple[Any, None]:
            x, weight, outside = node
            away = solve_upper(placed.factor, x[None, :, None])
            of_cell = jnp.concatenate([weight, jnp.full((1, shape[2]), outside)])
            of_row = jnp.where(self.keep, of_cell[self.row_cell], 0.0)
            there = self.place(prior.position, placed.mode + away)
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
        return slope + self.mean_prior_gradient(prior.position, placed.mode + mean, lower)

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


# ---------------------------------------------------------------- a model of the globals


class Rules(NamedTuple):
    """Nodes along each coordinate of a cell: for the density, and for the scores of test rows."""

    density: int
    scores: int


class MarginalModel(Model):
    """The globals of a model: its rows depend on each other, since cells are integrated out.

    ``base`` is that model. A position is a flat vector.
    """

    base: Model
    structure: Structure
    rules: Rules

    @classmethod
    def of(cls, base: Model, structure: Structure, rules: Rules) -> MarginalModel:
        """The model of the globals of ``base``."""
        reference = base.probes()[0]
        model = cls(
            log_prior=lambda g: model.flat_log_prior(g),
            log_likelihood=None,
            init=reference[structure.globals],
            n_obs=base.n_obs,
            y=base.y,
            name=base.name,
            joint_log_likelihood=lambda g, rows: model.flat_joint(g, rows),
        )
        own = {"base": base, "structure": structure, "rules": rules, "_reference": reference}
        if "selection" in vars(base):
            own["selection"] = base.selection
        programs = vars(base).setdefault("_programs", Programs())
        vars(model).update(own, _programs=programs.of(("marginal", structure.digest, rules)))
        return model

    @property
    def sentence(self) -> str:
        """What is sampled, in words."""
        shared, out = len(self.structure.globals), int(self.structure.sizes.sum())
        return f"sampled {counted(shared, 'parameter')}; {out} integrated out"

    def selected(self, selection: Any) -> Any:
        """Within this, the functions of a member of a family take ``selection``."""
        return self.base.selected(selection)

    @property
    def _chosen(self) -> Any:
        return getattr(self.base, "chosen", ())

    def _density(self, size: int) -> MarginalDensity:
        return MarginalDensity(self.base, self.structure, vars(self)["_reference"], size)

    def placed(self, points: Float[np.ndarray, "point g"]) -> Float[np.ndarray, "point d"]:
        """Positions of all parameters with these globals; cells are anywhere."""
        positions = np.tile(vars(self)["_reference"], (len(points), 1))
        positions[:, self.structure.globals] = points
        return positions

    def flat_log_prior(self, flat: Float[Array, " g"]) -> Float[Array, ""]:
        """Log density of the globals."""
        return self._density(self.rules.density).log_prior(flat, self._chosen)

    def flat_joint(self, flat: Float[Array, " g"], rows: Bool[Array, " row"]) -> Float[Array, ""]:
        """Joint log density of the rows marked given the globals."""
        return self.flat_posterior(flat, rows) - self.flat_log_prior(flat)

    def flat_posterior(
        self, flat: Float[Array, " g"], rows: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        """The same with the log prior of the globals."""
        return self._density(self.rules.density).posterior(flat, rows, self._chosen)

    def flat_given(
        self, flat: Float[Array, " g"], rows: Bool[Array, " row"], train: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        """Log density of rows given the training rows that are not among them."""
        return self._changes(flat, rows, train).sum()

    def _changes(
        self, flat: Float[Array, " g"], rows: Bool[Array, " row"], train: Bool[Array, " row"]
    ) -> Float[Array, " cell1"]:
        """The same by cell, and last of the rows in none."""
        density, chosen = self._density(self.rules.scores), self._chosen
        sets = jnp.stack([train | rows, train & ~rows])
        both = jax.vmap(lambda own: density.by_cell(flat, own, chosen))(sets)
        return both[0] - both[1]

    def flat_rows_given(
        self,
        flat: Float[Array, " g"],
        rows: Int[Array, " slot"],
        valid: Bool[Array, " slot"],
        train: Bool[Array, " row"],
        trained: bool,
    ) -> Float[Array, " slot"]:
        """Log density of each of some rows given the training rows without it.

        Rows that do not train share the nodes of those that do. Of training rows, those of
        different cells are taken out together, those of one cell take turns.
        """
        if not trained:
            density = self._density(self.rules.scores)
            return jnp.where(valid, density.by_row(flat, train, self._chosen)[rows], 0.0)
        cell = jnp.asarray(self.structure.row_cell)[rows]
        same = (cell[:, None] == cell) & valid & (cell >= 0)
        turn = jnp.tril(same, -1).sum(axis=1)
        whole = jnp.asarray(vars(self)["_reference"]).at[self.structure.globals].set(flat)
        alone = self.base.flat_log_likelihood(whole)[rows]

        def take(k: Array, found: Array) -> Array:
            now = valid & (turn == k) & (cell >= 0)
            marked = jnp.zeros(self.n_obs, bool).at[rows].max(now)
            return jnp.where(now, self._changes(flat, marked, train)[cell], found)

        found = jnp.where(valid & (cell < 0), alone, 0.0)
        return jax.lax.fori_loop(0, jnp.where(valid, turn, 0).max() + 1, take, found)

    def check_shapes(self) -> None:
        """Raise unless the functions of ``base`` are what they were."""
        self.base.check_shapes()

    def check_same(self) -> None:
        """Raise unless the functions of ``base`` are what they were."""
        self.base.check_same()

    def check_gradient(self) -> None:
        """Nothing: it comes from integrals, which say themselves where there are none."""


# ---------------------------------------------------------------- small matrices


def _times_transpose(factor: Factor, x: Array) -> Array:
    """L^T x."""
    size = len(factor)
    return jnp.stack([sum(factor[b][a] * x[:, b] for b in range(a, size)) for a in range(size)], 1)


def _column(factor: Factor, a: int) -> Array:
    """Column a of L."""
    zero = jnp.zeros_like(factor[0][0])
    return jnp.stack([line[a] if a < len(line) else zero for line in factor], axis=1)


def _inverse(factor: Factor) -> Array:
    """Columns of L^-T, whose products add up to the inverse of L L^T."""
    eye = np.eye(len(factor))
    columns = [solve_upper(factor, jnp.asarray(e)[None, :, None]) for e in eye]
    return jnp.stack(columns)


def _nodes(size: int, dimensions: int) -> tuple[Float[Array, "node D"], Float[Array, " node"]]:
    """Nodes and log weights of a rule."""
    found = rule(size, dimensions)
    real = slice(int(found.real))
    return jnp.asarray(found.nodes[real]), jnp.asarray(found.log_weight[real])


# ---------------------------------------------------------------- one draw, or many at once


def _side_by_side(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of draws on the last axis as one of a single draw; ``vmap`` puts them together.

    However many ``vmap`` are around it, the draws of all of them become one axis.
    """

    @custom_vmap
    def many(*given: Any) -> Any:
        last = jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), given)
        return jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), function(*last))

    @many.def_vmap
    def flattened(size: int, batched: Any, *given: Any) -> Any:
        def whole(array: Array, is_batched: bool) -> Array:
            array = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        found = many(*jax.tree.map(whole, given, tuple(batched)))
        found = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    def one(*given: Any) -> Any:
        return jax.tree.map(lambda a: a[0], many(*jax.tree.map(lambda a: a[None], given)))

    return one


def _with_gradient(
    both: Callable[..., tuple[Array, Array]], g: Array, rows: Array, selection: Any
) -> Array:
    """The value of ``both`` at g, whose gradient is what it gives besides."""
    at = _side_by_side(both)

    @jax.custom_jvp
    def value(g: Array, rows: Array, selection: Any) -> Array:
        return at(g, rows, selection)[0]

    @value.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        found, gradient = at(*primals)
        return found, jnp.vdot(gradient, tangents[0])

    return value(g, rows, selection)
