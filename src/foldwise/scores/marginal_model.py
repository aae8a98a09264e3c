"""The density of the globals with the cells integrated out, as a function and as a model.

What is computed is in ``marginal_cells.py``, of draws on the last axis. The functions here are of
one draw; side by side, under ``vmap``, they become one call for all draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int, UInt32

from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.marginal_cells import MarginalCells, inverse
from foldwise.support.runtime import Programs
from foldwise.support.words import counted


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

    def derivatives(
        self, g: Float[Array, " g"], rows: Bool[Array, " row"], selection: Any, by_row: bool
    ) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
        """First and second derivatives by every row's value of log p(rows | g).

        ``by_row``: of log p(row | g, those of the ``rows`` that are in its cell) instead.
        """
        return _side_by_side(partial(self._derivatives, by_row=by_row))(g, rows, selection)

    def drawn(
        self,
        g: Float[Array, " g"],
        key: UInt32[Array, " 2"],
        rows: Bool[Array, " row"],
        selection: Any,
    ) -> Float[Array, " d"]:
        """A position with these globals, its cells drawn from p(u | g, rows)."""
        return _side_by_side(self._drawn)(g, key, rows, selection)

    # ------------------------------------------------ of draws side by side

    def _cells(self, g: Array, rows: Array, selection: Any) -> tuple[MarginalCells, Array]:
        """The cells, and positions with these globals."""
        q = jnp.broadcast_to(self.reference[:, None], (len(self.reference), g.shape[1]))
        q = q.at[self.structure.globals].set(g)
        return MarginalCells(self.model, self.structure, rows, selection), q

    def _prior(self, g: Array, rows: Array, selection: Any) -> tuple[Array, Array]:
        cells, q = self._cells(g, rows, selection)
        prior = cells.normal_prior(q, cells.take(q), cells.slopes(q)[0])
        slope = cells.mean_prior_gradient(q, prior.centre, inverse(prior.factor))
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

    def _derivatives(
        self, g: Array, rows: Array, selection: Any, by_row: bool
    ) -> tuple[Array, Array]:
        cells, q = self._cells(g, rows, selection)
        return cells.derivatives(q, self.size, by_row)

    def _drawn(self, g: Array, keys: Array, rows: Array, selection: Any) -> Array:
        cells, q = self._cells(g, rows, selection)
        return cells.drawn(q, keys)


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

    def flat_derivatives_given(
        self,
        flat: Float[Array, " g"],
        rows: Int[Array, " slot"],
        valid: Bool[Array, " slot"],
        train: Bool[Array, " row"],
        by_row: bool,
    ) -> tuple[Float[Array, " slot"], Float[Array, " slot"]]:
        """First and second derivatives, by the values of some rows, of their joint log density.

        Given the training rows without them; ``by_row``: of the log density of each by itself.
        """
        marked = jnp.zeros(self.n_obs, bool).at[rows].max(valid)
        density, known = self._density(self.rules.scores), train if by_row else train | marked
        found = density.derivatives(flat, known, self._chosen, by_row)
        return found[0][rows], found[1][rows]

    def flat_drawn(
        self, flat: Float[Array, " g"], key: UInt32[Array, " 2"], train: Bool[Array, " row"]
    ) -> Float[Array, " d"]:
        """A position of ``base``: cells drawn from their conditional given training rows."""
        return self._density(self.rules.density).drawn(flat, key, train, self._chosen)

    def check_shapes(self) -> None:
        """Raise unless the functions of ``base`` are what they were."""
        self.base.check_shapes()

    def check_same(self) -> None:
        """Raise unless the functions of ``base`` are what they were."""
        self.base.check_same()

    def check_gradient(self) -> None:
        """Nothing: it comes from integrals, which say themselves where there are none."""


def base_of(model: Model) -> Model:
    """The model of all parameters: the one of which ``model`` has the globals, or itself."""
    return model.base if isinstance(model, MarginalModel) else model


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
