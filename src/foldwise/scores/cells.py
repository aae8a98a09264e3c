"""The parameters of cells integrated out: log Z of sets of a cell's rows at full-data draws.

Given the globals theta, the rows R of a cell with coordinates u have the density

    Z(R) = integral of p(u | theta) prod_{i in R} p(y_i | u, theta) du

up to the constant that the conditional prior may lack, the same for all R. Cells do not see each
other, so the coordinates of all of them move together: one evaluation of all rows serves every
cell. Newton steps find the mode of every integrand, and a product of Gauss-Hermite rules, placed
there and scaled by the curvature, does the rest:

    Z = |A|^(-1/2) (2 pi)^(D/2) sum_k w_k exp(g(mode + L^-T x_k) + |x_k|^2 / 2),  A = L L^T,

with g the log integrand, A its negative Hessian at the mode, and x_k, w_k the nodes and weights of
the rule for the standard normal. The log prior of one cell is not at hand, only that of all. But
its gradient by u is, so that its change is a quadratic form around the prior's own mode where the
gradient is linear (a normal conditional prior, which is checked), else the integral of the gradient
along a line from the draw's own u.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.moving import Moving
from foldwise.scores.nodes import Rule
from foldwise.scores.small_matrices import (
    Factor,
    cholesky,
    log_volume,
    solve_lower,
    solve_upper,
)
from foldwise.support.noise import log_uniforms, normals, random_words, uniforms

# Newton steps at most, and the squared length of a step, in posterior sds, that ends them.
NEWTON_STEPS, _NEWTON_DONE = 30, 1e-12
# The same after which a mode counts as found: nodes need not be exactly there.
_NEWTON_FOUND = 1e-4
# Metropolis steps by which the coordinates of cells are drawn, and where conditionals are normal,
# or nearly so.
STEPS, NORMAL_STEPS = 12, 5
# The gradient of a prior that is not normal is integrated from node to node, at this many points.
# To the first node the way goes over the mode, in steps that are even before it, and after it short
# at first, as nodes are.
LINE_POINTS = 6
_EVEN, _FINE_FIRST = np.linspace(0.0, 1.0, 17), np.sinh(np.linspace(0.0, 5.0, 49)) / np.sinh(5.0)
# Relative departure of the prior's gradient from linear that is still rounding.
_LINEAR = 1e-7


class Derived(NamedTuple):
    """Sets of rows that are integrated with the nodes of another set of their cell.

    Set s of cell ``cell[s]`` has the rows of the host set and, as ``sign`` is 1 or -1, the rows
    ``row`` besides or not, those whose ``owner`` is s.
    """

    cell: Int[Any, " set"]
    row: Int[Any, " entry"]
    owner: Int[Any, " entry"]
    sign: Float[Any, " entry"]


NOTHING = Derived(*(np.zeros(0, np.int32),) * 3, np.zeros(0))


class Integrals(NamedTuple):
    """log Z at draws.

    ``own`` of the rows that were kept in each cell, ``empty`` of no rows by the formula for normal
    priors, ``derived`` of the derived sets; ``failed`` says where no mode was found, ``bent`` where
    the prior's gradient is not linear, so that ``empty`` is wrong. ``prior`` is the log prior of
    all parameters where the cells are at the places that the constants of their priors are of.
    """

    own: Float[Any, "cell draw"]
    empty: Float[Any, "cell draw"]
    derived: Float[Any, "set draw"]
    failed: Bool[Any, "cell draw"]
    bent: Bool[Any, "cell draw"]
    prior: Float[Any, " draw"]

    def density(self) -> Float[np.ndarray, " draw"]:
        """Log density of the globals given the rows that were kept; -inf where one is lost."""
        with np.errstate(invalid="ignore"):  # infinite where lost
            value = self.own.sum(axis=0) + self.prior
        return np.where((self.failed | self.bent).any(axis=0), -np.inf, value)


class Slope(NamedTuple):
    """Gradient and Hessian block of every cell."""

    gradient: Float[Array, "cell a draw"]
    hessian: Float[Array, "cell a b draw"]


@dataclass(frozen=True)
class _Prior:
    """The log prior of every cell, from a place of its own.

    ``far`` gives it anywhere; ``step``, where it has to be integrated, its change between two
    neighbours.
    """

    far: Callable[[Array], Array]
    step: Callable[[Array, Array], Array] | None = None

    def at(self, u: Array, before: tuple[Array, Array]) -> Array:
        """The log prior at a node, given that of its neighbour."""
        return self.far(u) if self.step is None else before[1] + self.step(before[0], u)


class Place(NamedTuple):
    """Where the integrands of all cells are: their modes and curvatures, and the prior's slope."""

    mode: Float[Array, "cell a draw"]
    factor: Factor
    slope: Slope

    def at(self, x: Array) -> Array:
        """Coordinates that are ``x`` sds from the modes."""
        return self.mode + solve_upper(self.factor, x)


class Cells:
    """All cells of a model at a few draws side by side; the last axis of all arrays is the draw."""

    def __init__(self, model: Model, structure: Structure, keep: Array, bent: bool):
        self.model, self.keep, self.bent = model, keep, bent
        count, dimensions = len(structure), int(structure.sizes.max())
        coordinates = structure.coordinates[:, :dimensions]
        self.count, self.dimensions = count, dimensions
        self.real = coordinates >= 0
        self.coordinates = np.maximum(coordinates, 0)
        self.source = np.full(model.dimension, -1)
        self.source[coordinates[self.real]] = np.flatnonzero(self.real.ravel())
        self.moving = Moving(model, self.coordinates, self.real)
        # rows in no cell add to one more, which nobody looks at
        self.row_cell = np.where(structure.row_cell < 0, count, structure.row_cell)

    @property
    def _kept(self) -> Array:
        """The rows that are kept: the same at all draws, or each draw's own."""
        return self.keep if self.keep.ndim == 2 else self.keep[:, None]

    # ------------------------------------------------ the model as cells see it

    def each(self, function: Callable[..., Any], *given: Array) -> Any:
        """What ``function`` gives at every draw."""
        return jax.vmap(function, -1, -1)(*given)

    def place(self, q: Array, u: Array) -> Array:
        """Positions with the coordinates of all cells at ``u``."""
        flat = u.reshape(self.count * self.dimensions, -1)
        inside = (self.source >= 0)[:, None]
        return jnp.where(inside, flat[np.maximum(self.source, 0)], q)

    def take(self, vector: Array) -> Array:
        """The cells' coordinates of vectors over all parameters."""
        return jnp.where(self.real[..., None], vector[self.coordinates], 0.0)

    def rows(self, q: Array) -> Array:
        """Log density of every row."""
        return self.each(self.model.flat_log_likelihood, q)

    def prior(self, q: Array) -> tuple[Array, Array]:
        """Log prior, and its gradient by the cells' coordinates."""

        def one(flat: Array) -> tuple[Array, Array]:
            log_prior, moving = self.moving.of(self.model.log_prior_at, flat)
            value, gradient = jax.value_and_grad(log_prior)(moving)
            return value, self.moving.taken(gradient)

        value, gradient = self.each(one, q)
        return value, self._of_cells(gradient)

    def slopes(self, q: Array) -> tuple[Slope, Slope]:
        """Gradient and Hessian blocks of the log prior, and of it with the rows that are kept.

        A row depends on the coordinates of its own cell alone, so that derivatives of all rows
        along one coordinate of all cells at once are those of each row, which add up by cell.
        """

        def of_rows(flat: Array) -> tuple[Array, Array]:
            rows, moving = self.moving.of(self.model.log_likelihood_at, flat)

            def first(moving: Any) -> Array:
                return jax.vmap(lambda v: jax.jvp(rows, (moving,), (v,))[1])(self.moving.along)

            along = jax.vmap(lambda v: jax.jvp(first, (moving,), (v,)), out_axes=(None, 0))
            return along(self.moving.along)

        prior = self._prior_slope(q)
        return prior, jax.tree.map(jnp.add, prior, self._by_cell(*self.each(of_rows, q)))

    def _prior_slope(self, q: Array) -> Slope:
        """Gradient and Hessian blocks of the log prior."""

        def of_prior(flat: Array) -> tuple[Array, Array]:
            log_prior, moving = self.moving.of(self.model.log_prior_at, flat)
            gradient, change = jax.linearize(jax.grad(log_prior), moving)
            changes = jax.vmap(change)(self.moving.along)
            return self.moving.taken(gradient), jax.vmap(self.moving.taken)(changes)

        gradient, change = self.each(of_prior, q)
        columns = [self._of_cells(change[a]) for a in range(self.dimensions)]
        return Slope(self._of_cells(gradient), jnp.stack(columns, axis=2))

    def _by_cell(self, first: Array, second: Array) -> Slope:
        """Sums over the rows of every cell that are kept."""
        size = self.dimensions
        every = jnp.concatenate([first, second.reshape(size**2, *second.shape[2:])])
        kept = jnp.moveaxis(jnp.where(self._kept, every, 0.0), 0, 1)
        sums = by_known_owner(kept, self.row_cell, self.count)
        return Slope(sums[:, :size], sums[:, size:].reshape(self.count, size, size, -1))

    def _of_cells(self, vector: Array) -> Array:
        """The cells' coordinates of vectors over those that move."""
        return jnp.where(self.real[..., None], vector[self.moving.coordinates], 0.0)

    # ------------------------------------------------ integrals

    def at(self, q: Array, nodes: Rule, derived: Derived) -> tuple[Place, Integrals]:
        """Places of the integrands, and their integrals by a rule, which may have no nodes."""
        place, found = self._place(q)
        q, height, prior, empty, bent = self._prior(q, place)
        own, theirs, invalid = self._sums(q, place, prior, nodes, derived)
        volume = log_volume(place.factor)
        theirs = theirs + volume[derived.cell]
        return place, Integrals(own + volume, empty, theirs, invalid | ~found, bent, height)

    def kept_rows(self, q: Array, u: Array) -> tuple[Array, Array]:
        """Sums over the rows of every cell that are kept, at its coordinates ``u``; all rows."""
        rows = self.rows(self.place(q, u))
        kept = jnp.where(self._kept, rows, 0.0)
        return by_known_owner(kept, self.row_cell, self.count), rows

    def _sums(
        self, q: Array, place: Place, prior: _Prior, nodes: Rule, derived: Derived
    ) -> tuple[Array, Array, Array]:
        """Log sums over the nodes, of what is kept and of derived sets, and where they are none."""
        many = (len(derived.cell), place.mode.shape[-1])

        def add(k: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            sums, before = state
            x, u = nodes.nodes[k], place.at(nodes.nodes[k][None, :, None])
            height = prior.at(u, before)
            value, rows = self.kept_rows(q, u)
            value += height + nodes.log_weight[k] + 0.5 * (x**2).sum()
            sign = derived.sign[:, None]
            changes = jnp.where(sign == 0.0, 0.0, sign * rows[derived.row])
            theirs = value[derived.cell] + by_owner(changes, derived.owner, many[0])
            # a row of density zero cannot be taken away again
            invalid = sums[2] | jnp.isnan(value), sums[3] | jnp.isnan(theirs)
            added = log_add(sums[0], value), log_add(sums[1], theirs), *invalid
            return added, (u, height)

        nothing = jnp.full((self.count, place.mode.shape[-1]), -jnp.inf)
        begin = (nothing, jnp.full(many, -jnp.inf), nothing > 0, jnp.zeros(many, bool))
        first = place.at(nodes.nodes[0][None, :, None])
        state = begin, (first, prior.far(first))
        (own, theirs, invalid, lost), _ = jax.lax.fori_loop(0, nodes.real, add, state)
        invalid |= by_owner(jnp.where(lost, 1.0, 0.0), derived.cell, self.count) > 0
        return own, theirs, invalid

    # ------------------------------------------------ coordinates

    def packed(self, place: Place) -> list[Array]:
        """The numbers of a place, below each other: modes by coordinate, and entries of factors."""
        columns = (place.mode[:, a] for a in range(self.dimensions))
        return [*columns, *(entry for line in place.factor for entry in line)]

    def drawn_at(
        self, q: Array, keys: Array, numbers: Array, steps: Array
    ) -> tuple[Array, Float[Array, "1 draw"]]:
        """Positions with the cells drawn given the globals, and 1 where one cell cannot be."""
        numbers = numbers.reshape(-1, self.count, numbers.shape[-1])
        columns, factor = parts_of_places(numbers, self.dimensions)
        mode = jnp.stack([*columns], axis=1)
        slope = self._prior_slope(self.place(q, mode))

        def log_prior(u: Array) -> Array:
            if self.bent:
                return self._way(q, mode, u, _FINE_FIRST) + self._extra(u)
            away = jnp.where(self.real[..., None], u - mode, 0.0)
            return self._quadratic(slope, away) + self._extra(u)

        u, nowhere = self.drawn_given(q, Place(mode, factor, slope), log_prior, keys, steps)
        return self.place(q, u), nowhere.any(axis=0)[None] * 1.0

    def drawn_given(
        self,
        q: Array,
        place: Place,
        log_prior: Callable[[Array], Array],
        keys: Array,
        steps: int | Array = STEPS,
    ) -> tuple[Array, Array]:
        """Coordinates after Metropolis steps from t densities at the modes, and where none is."""
        tails = 0.5 * (4.0 + self.dimensions)

        def move(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            x, log_uniform = self._noise(keys, step)
            u = place.at(x)
            value = self.kept_rows(q, u)[0] + log_prior(u)
            ratio = value + tails * jnp.log1p((x**2).sum(axis=1) / 4.0)
            accepted = log_uniform < ratio - state[1]
            return _choose(accepted, u, state[0]), jnp.where(accepted, ratio, state[1])

        nowhere = jnp.full(place.mode[:, 0].shape, -jnp.inf)
        u, ratio = jax.lax.fori_loop(0, steps, move, (place.mode, nowhere))
        return u, ~jnp.isfinite(ratio)

    def _noise(self, keys: Array, step: Array) -> tuple[Array, Array]:
        """Standard t vectors with 4 degrees of freedom, and logs of uniform numbers.

        Twice the sum of two exponential numbers is chi-square with 4 degrees of freedom.
        """
        size = self.dimensions + 3

        def of_draw(key: Array) -> Array:
            return random_words(key, step, self.count * size).reshape(size, self.count)

        uniform = uniforms(jax.vmap(of_draw, -1, -1)(keys))
        normal, rest = normals(uniform[:-3]), log_uniforms(uniform[-3:])
        t = normal * jnp.sqrt(-2.0 / (rest[0] + rest[1]))
        return jnp.moveaxis(t, 0, 1), rest[2]

    # ------------------------------------------------ modes and priors

    def _place(self, q: Array) -> tuple[Place, Array]:
        """Mode of every cell's integrand by Newton steps, its curvature there, and where it is one.

        They begin from the cells' coordinates of positions. A step is taken where the slope
        along it at its end is no steeper downhill than it was uphill at its beginning, so that a
        concave log density has not fallen; else a third of it is tried. Over the top to where the
        log density is not concave, as in the tails of a t density, no step is taken, and every step
        from there to where it is.
        """

        def at(u: Array) -> tuple[Array, Factor, Array, Slope]:
            prior, whole = self.slopes(self.place(q, u))
            return whole.gradient, *cholesky(self._padded(-whole.hessian)), prior

        def step_from(here: tuple[Any, ...]) -> tuple[Array, Array]:
            step = solve_upper(here[1], solve_lower(here[1], here[0]))
            return step, (here[0] * step).sum(axis=1)

        def move(state: tuple[Any, ...]) -> tuple[Any, ...]:
            count, u, share, here = state
            step, uphill = step_from(here)
            end = u + share[:, None] * step
            there = at(end)
            slope = (there[0] * step).sum(axis=1)
            good = slope >= -jnp.maximum(uphill, _NEWTON_DONE)
            # heavy tails are flat: the slope there does not tell that the density has fallen
            good = (good & ((slope >= 0.0) | there[2])) | (there[2] & ~here[2])
            # a draw whose cells are all done stays, so that it does not matter which are beside it
            good &= ~(uphill <= _NEWTON_DONE).all(axis=0)
            good |= count == 0
            here = jax.tree.map(lambda old, new: _choose(good, new, old), here, there)
            share = jnp.where(good, jnp.minimum(3.0 * share, 1.0), share / 3.0)
            return count + 1, _choose(good, end, u), share, here

        def unfinished(state: tuple[Any, ...]) -> Array:
            done = (step_from(state[3])[1] <= _NEWTON_DONE).all()
            return (state[0] < NEWTON_STEPS) & ((state[0] == 0) | ~done)

        # nothing is known before the first step, which goes nowhere
        start = self.take(q)
        one, flat = jnp.ones(start[:, 0].shape), jnp.zeros_like(start)
        factor = tuple(tuple(one for _ in range(a + 1)) for a in range(self.dimensions))
        slope = Slope(flat, jnp.repeat(flat[:, :, None], self.dimensions, axis=2))
        begin = (0, start, one, (flat, factor, one > 0, slope))
        _, u, _, here = jax.lax.while_loop(unfinished, move, begin)
        return Place(u, here[1], here[3]), here[2] & (step_from(here)[1] < _NEWTON_FOUND)

    def _padded(self, blocks: Array) -> Array:
        """Blocks with ones on the diagonal where a cell has fewer coordinates than others."""
        extra = np.eye(self.dimensions) * ~self.real[:, :, None]
        return blocks + extra[..., None]

    def _extra(self, u: Array) -> Array:
        """Standard normal prior of the coordinates that a cell does not have."""
        return -0.5 * jnp.where(self.real[..., None], 0.0, u**2).sum(axis=1)

    @staticmethod
    def _quadratic(slope: Slope, away: Array) -> Array:
        """Change of a quadratic form that has this slope."""
        bend = (slope.hessian * away[:, None]).sum(axis=2)
        return (away * (slope.gradient + 0.5 * bend)).sum(axis=1)

    def _prior(self, q: Array, place: Place) -> tuple[Array, Array, _Prior, Array, Array]:
        """Positions, the log prior there, every cell's change from there, log Z of no rows, bent.

        The cells of the positions are at the modes of their priors: far from them changes are large
        numbers that cancel. Its integral is that of a normal density, where its gradient is linear:
        the slope at the mode then tells its curvature everywhere.
        """
        mode, factor, slope = place
        missing, extra = ~self.real[..., None], self._extra
        drawn, start = q, self.take(q)
        if self.bent:
            unknown = jnp.full(mode[:, 0].shape, jnp.nan)
            to_mode = self._way(q, start, mode, _EVEN)
            # of all cells together the change up to their modes is known: what long ways lose does
            # not count in the density of the globals
            height = self.prior(self.place(q, mode))[0] - to_mode.sum(axis=0)
            steps = _Prior(
                lambda u: to_mode + self._way(q, mode, u, _FINE_FIRST) + extra(u),
                lambda u, v: self._line(q, u, v) + extra(v) - extra(u),
            )
            return q, height, steps, unknown, unknown > 0
        hessian = slope.hessian
        own, definite = cholesky(self._padded(-hessian))
        centre = mode + solve_upper(own, solve_lower(own, slope.gradient))
        start = jnp.where((definite[:, None] & ~missing), centre, start)
        q = self.place(q, start)
        # two more places, beside the mode and the draw's own, in the same evaluation
        aside = mode + solve_upper(factor, jnp.full((1, self.dimensions, 1), 1.7))
        places = [start, aside, self.take(drawn)]
        everywhere = jnp.concatenate([self.place(q, u) for u in places], axis=-1)
        heights, gradients = (jnp.split(v, len(places), axis=-1) for v in self.prior(everywhere))
        gradient = gradients[0]

        def change(u: Array) -> Array:
            away = jnp.where(missing, 0.0, u - start)
            return self._quadratic(Slope(gradient, hessian), away) + extra(u)

        def linear(u: Array, there: Array) -> Array:
            """Whether the gradient at ``u`` is what curvature and gradient tell."""
            away = jnp.where(missing, 0.0, u - start)[:, None]
            size = jnp.abs(gradient) + jnp.abs(hessian * away).sum(axis=2)
            off = jnp.abs(there - gradient - (hessian * away).sum(axis=2))
            return (off <= _LINEAR * jnp.maximum(size, 1e-3)).all(axis=1)

        bent = ~(linear(aside, gradients[1]) & linear(places[2], gradients[2]))
        half = solve_lower(own, gradient)
        empty = 0.5 * (half**2).sum(axis=1) + log_volume(own)
        return q, heights[0], _Prior(change), jnp.where(definite, empty, jnp.nan), bent

    def _way(self, q: Array, start: Array, end: Array, shares: np.ndarray) -> Array:
        """Change of every cell's log prior over a long way, which ``shares`` divide."""
        ends, away = jnp.asarray(shares), end - start

        def add(k: Array, total: Array) -> Array:
            return total + self._line(q, start + ends[k] * away, start + ends[k + 1] * away)

        return jax.lax.fori_loop(0, len(shares) - 1, add, jnp.zeros(start[:, 0].shape))

    def _line(self, q: Array, start: Array, end: Array) -> Array:
        """Change of every cell's log prior along a line: its gradient, by Gauss-Legendre."""
        x, w = np.polynomial.legendre.leggauss(LINE_POINTS)
        away = jnp.where(self.real[..., None], end - start, 0.0)

        def add(total: Array, point: tuple[Array, Array]) -> tuple[Array, None]:
            gradient = self.prior(self.place(q, start + point[0] * away))[1]
            return total + point[1] * (gradient * away).sum(axis=1), None

        points = (jnp.asarray(0.5 + 0.5 * x), jnp.asarray(0.5 * w))
        return jax.lax.scan(add, jnp.zeros(start[:, 0].shape), points)[0]


# ---------------------------------------------------------------- by cell and draw


def parts_of_places(numbers: Any, dimensions: int) -> tuple[Any, Factor]:
    """Modes by coordinate, and factors of the curvature there, of the numbers of places."""
    entries = iter(numbers[dimensions:])
    factor = tuple(tuple(next(entries) for _ in range(a + 1)) for a in range(dimensions))
    return numbers[:dimensions], factor


def _choose(which: Bool[Array, "cell draw"], one: Array, two: Array) -> Array:
    between = tuple(range(1, one.ndim - 1))
    return jnp.where(jnp.expand_dims(which, between), one, two)


def by_owner(values: Float[Array, "entry draw"], owner: Any, count: int) -> Array:
    """Sums of the values of each owner."""
    # owners that are known only when the program runs
    return jax.ops.segment_sum(values, owner, count)


def by_known_owner(
    values: Float[Array, "entry ..."], owner: Int[np.ndarray, " entry"], count: int
) -> Array:
    """The same sums, of owners that are known when the program is made; others are ``count``.

    A scatter is a loop over the entries, which costs XLA microseconds each. Here a few entries of
    an owner are gathered side by side and added, then what these gave, until all are added up.
    """
    order = np.argsort(owner, kind="stable")[: np.count_nonzero(owner < count)]
    owner = owner[order]
    while True:
        sizes = np.bincount(owner, minlength=count)
        width = _width(sizes)
        pieces = np.ones(count, int) if width >= sizes.max(initial=1) else -(-sizes // width)
        begin = np.cumsum(sizes) - sizes
        rank = np.arange(len(owner)) - begin[owner]
        piece = (np.cumsum(pieces) - pieces)[owner] + rank // width
        index, real = (np.zeros((pieces.sum(), width), kind) for kind in (np.int32, bool))
        index[piece, rank % width], real[piece, rank % width] = order, True
        beside = values[index]
        if not real.all():
            beside = jnp.where(real.reshape(*real.shape, *(1,) * (values.ndim - 1)), beside, 0.0)
        values = beside.sum(axis=1)
        if len(values) == count and pieces.max(initial=1) == 1:
            return values
        owner, order = np.repeat(np.arange(count), pieces), np.arange(pieces.sum())


def _width(sizes: Int[np.ndarray, " owner"]) -> int:
    """How many entries of an owner to add up at a time: what takes the least work in all."""
    most = max(int(sizes.max(initial=1)), 1)
    widths = [2**k for k in range(1, 7) if 2**k < most]
    work = [(-(-sizes // width)).sum() * (width + 4) for width in widths] + [len(sizes) * most]
    return [*widths, most][int(np.argmin(work))]


def log_add(total: Array, value: Array) -> Array:
    """log(exp(total) + exp(value)); values that are no number count nothing."""
    value = jnp.where(jnp.isnan(value), -jnp.inf, value)
    top = jnp.maximum(total, value)
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    return jnp.log(jnp.exp(total - safe) + jnp.exp(value - safe)) + safe
