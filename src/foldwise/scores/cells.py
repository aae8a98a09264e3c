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
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from foldwise.models.evaluate import in_batches, masked_log_density
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.support.runtime import compiled, lanes
from foldwise.support.seeds import Stream, generator

# Numbers of nodes along each coordinate that are tried in turn, by number of coordinates.
RULES = {1: (7, 11, 15, 21, 31, 45), 2: (7, 11, 15, 21), 3: (7, 9, 11, 15)}
# Newton steps at most, and the squared length of a step, in posterior sds, that ends them.
NEWTON_STEPS, _NEWTON_DONE = 30, 1e-12
# The same after which a mode counts as found: nodes need not be exactly there.
_NEWTON_FOUND = 1e-4
# Metropolis steps by which the coordinates of cells are drawn, and the tails of their proposals.
STEPS, _FREEDOM = 12, 7.0
# Points along a line at which the gradient of a prior that is not normal is integrated.
LINE_POINTS = 24
# Relative departure of the prior's gradient from linear that is still rounding.
_LINEAR = 1e-7
# Row values of the draws that are worked on side by side, and draws in one call.
_CACHE_VALUES, _CALL_DRAWS = 2**16, 32


class Rule(NamedTuple):
    """Nodes and log weights of a product rule, padded to the largest, and how many are real."""

    nodes: Float[Any, "node D"]
    log_weight: Float[Any, " node"]
    real: Int[Any, ""]


@lru_cache
def rule(size: int, dimensions: int) -> Rule:
    """Product of Gauss-Hermite rules of ``size`` nodes for the standard normal."""
    x, w = np.polynomial.hermite_e.hermegauss(size)
    nodes = np.array(list(product(x, repeat=dimensions)))
    weights = np.array(list(product(np.log(w / w.sum()), repeat=dimensions))).sum(axis=1)
    room = RULES[dimensions][-1] ** dimensions
    padded = np.zeros((room, dimensions)), np.zeros(room)
    padded[0][: len(nodes)], padded[1][: len(nodes)] = nodes, weights
    return Rule(padded[0], padded[1], np.int32(len(nodes)))


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

    own: Float[np.ndarray, "cell draw"]
    empty: Float[np.ndarray, "cell draw"]
    derived: Float[np.ndarray, "set draw"]
    failed: Bool[np.ndarray, "cell draw"]
    bent: Bool[np.ndarray, "cell draw"]
    prior: Float[np.ndarray, "1 draw"]


def log_integrals(
    model: Model,
    structure: Structure,
    draws: Float[np.ndarray, "draw d"],
    keep: Bool[np.ndarray, " row"],
    nodes: Rule,
    derived: Derived = NOTHING,
    bent: bool = False,
) -> Integrals:
    """log Z of the rows ``keep`` of every cell, and of ``derived`` sets, at each draw.

    ``bent`` says that the conditional prior is not normal.
    """
    program, batch = _program(model, structure, derived, bent)
    found = in_batches(program, batch, draws, (keep, nodes, derived))
    return Integrals(*(np.concatenate(parts).T for parts in zip(*found, strict=True)))


def begin_to_compile(model: Model, structure: Structure) -> None:
    """Let programs compile in the background: of sets with nodes of their own, of coordinates."""
    if len(structure):
        _program(model, structure, NOTHING, bent=False)
        _conditional_program(model, structure)


def conditional_draws(
    model: Model, structure: Structure, draws: Float[np.ndarray, "draw d"], seed: int
) -> tuple[Float[np.ndarray, "draw d"], Bool[np.ndarray, " draw"]]:
    """``draws`` with the coordinates of cells drawn given the globals, and where that has failed.

    ``STEPS`` independence Metropolis steps of every cell, from a t density with ``_FREEDOM``
    degrees of freedom at its mode with its curvature: for normal conditionals nine in ten are
    accepted, and where the ratio of the two densities is at most three times its mean, what is left
    of the first step is (2/3)^STEPS, under 1 %.
    """
    program, batch = _conditional_program(model, structure)
    rng = generator(seed, Stream.CELLS)
    drawn, failed = np.empty_like(draws), np.empty(len(draws), bool)
    for first in range(0, len(draws), batch):
        part = slice(first, min(first + batch, len(draws)))
        padded = np.resize(draws[part], (batch, model.dimension))
        found = program((padded, _noise(rng, batch, structure)), ())
        drawn[part], failed[part] = (values[: part.stop - first] for values in found)
    return drawn, failed


class Noise(NamedTuple):
    """Randomness of the steps of every cell: what is proposed, and whether it is taken."""

    t: Float[Any, "draw step cell a"]
    log_uniform: Float[Any, "draw step cell"]


def _noise(rng: np.random.Generator, draws: int, structure: Structure) -> Noise:
    """Standard t vectors and logs of uniform numbers."""
    shape, dimensions = (draws, STEPS, len(structure)), int(structure.sizes.max())
    scale = np.sqrt(_FREEDOM / rng.chisquare(_FREEDOM, shape))
    t = rng.normal(size=(*shape, dimensions)) * scale[..., None]
    return Noise(t, -rng.exponential(size=shape))


def _conditional_program(model: Model, structure: Structure) -> tuple[Any, int]:
    together, batch = _together(model), draws_of_a_call(model)

    def draw(given: tuple[Array, Noise], _: tuple[()]) -> tuple[Array, Array]:
        cells = _Cells(model, structure, jnp.ones(model.n_obs, bool), bent=False)
        chunks = jax.tree.map(lambda a: a.reshape(-1, together, *a.shape[1:]), given)

        def of_chunk(chunk: tuple[Array, Noise]) -> tuple[Array, Array]:
            q, noise = jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), chunk)
            drawn, failed = cells.conditional(q, noise)
            return drawn.T, failed.any(axis=0)

        drawn, failed = jax.lax.map(of_chunk, chunks)
        return drawn.reshape(-1, model.dimension), failed.ravel()

    shapes = (np.zeros((batch, model.dimension)), _noise_shapes(batch, structure))
    return compiled(model, ("conditional", structure.digest), draw, shapes, ()), batch


def _noise_shapes(draws: int, structure: Structure) -> Noise:
    shape, dimensions = (draws, STEPS, len(structure)), int(structure.sizes.max())
    return Noise(*(jax.ShapeDtypeStruct(s, float) for s in ((*shape, dimensions), shape)))


def draws_of_a_call(model: Model) -> int:
    """Draws that one call works through: fewer cost as much."""
    together = _together(model)
    return max(_CALL_DRAWS // together, 1) * together * lanes()


def _together(model: Model) -> int:
    """Draws that are worked on side by side, so that their rows stay in the cache of a core."""
    return int(np.clip(_CACHE_VALUES // model.n_obs, 1, _CALL_DRAWS))


def _program(model: Model, structure: Structure, derived: Derived, bent: bool) -> tuple[Any, int]:
    """The program of :func:`log_integrals`, and the number of draws of a call."""
    together, batch = _together(model), draws_of_a_call(model)
    dimensions = int(structure.sizes.max())

    def integrate(draws: Array, shared: tuple[Array, Rule, Derived]) -> tuple[Array, ...]:
        cells = _Cells(model, structure, shared[0], bent)
        chunks = draws.reshape(-1, together, draws.shape[1])
        parts = jax.lax.map(lambda chunk: cells.integrals(chunk.T, *shared[1:]), chunks)
        return tuple(jnp.moveaxis(part, -1, 1).reshape(len(draws), -1) for part in parts)

    what = ("cells", structure.digest, bent)
    shared = (np.zeros(model.n_obs, bool), rule(RULES[dimensions][0], dimensions), derived)
    return compiled(model, what, integrate, np.zeros((batch, model.dimension)), shared), batch


class _Cells:
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
        self.along = np.zeros((dimensions, model.dimension))
        for a in range(dimensions):
            self.along[a, coordinates[self.real[:, a], a]] = 1.0
        # rows in no cell add to one more, which nobody looks at
        self.row_cell = np.where(structure.row_cell < 0, count, structure.row_cell)

    # ------------------------------------------------ the model as cells see it

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
        return jax.vmap(self.model.flat_log_likelihood, -1, -1)(q)

    def prior_gradient(self, q: Array) -> Array:
        """Gradient of the log prior by the cells' coordinates."""
        return self.take(jax.vmap(jax.grad(self.model.flat_log_prior), -1, -1)(q))

    def prior_slope(self, q: Array) -> tuple[Array, Array]:
        """Gradient and Hessian blocks of the log prior."""
        return self._slope(q, self.model.flat_log_prior)

    def slope(self, q: Array) -> tuple[Array, Array]:
        """Gradient and Hessian blocks of the log prior and the rows that are kept."""
        return self._slope(q, lambda flat: masked_log_density(self.model, flat, self.keep)[0])

    def _slope(self, q: Array, density: Callable[[Array], Array]) -> tuple[Array, Array]:
        def one(flat: Array) -> tuple[Array, Array]:
            gradient, change = jax.linearize(jax.grad(density), flat)
            return gradient, jax.vmap(change)(jnp.asarray(self.along))

        gradient, change = jax.vmap(one, -1, -1)(q)
        columns = [self.take(change[a]) for a in range(self.dimensions)]
        return self.take(gradient), jnp.stack(columns, axis=2)

    # ------------------------------------------------ integrals

    def integrals(self, q: Array, nodes: Rule, derived: Derived) -> tuple[Array, ...]:
        """log Z of what is kept and of derived sets, and what may be wrong with them."""
        mode, factor, found = self._mode(q, self.take(q))
        q, prior, empty, bent = self._prior(q, mode, factor)
        height = jax.vmap(self.model.flat_log_prior, -1, -1)(q)[None]
        many = (len(derived.cell), q.shape[-1])

        def add(k: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            x = nodes.nodes[k]
            u = mode + _solve_upper(factor, x[None, :, None])
            rows = self.rows(self.place(q, u))
            kept = jnp.where(self.keep[:, None], rows, 0.0)
            value = _by_owner(kept, self.row_cell, self.count + 1)[:-1] + prior(u)
            value += nodes.log_weight[k] + 0.5 * (x**2).sum()
            sign = derived.sign[:, None]
            changes = jnp.where(sign == 0.0, 0.0, sign * rows[derived.row])
            theirs = value[derived.cell] + _by_owner(changes, derived.owner, many[0])
            # a row of density zero cannot be taken away again
            invalid = sums[2] | jnp.isnan(value), sums[3] | jnp.isnan(theirs)
            return _log_add(sums[0], value), _log_add(sums[1], theirs), *invalid

        nothing = jnp.full((self.count, q.shape[-1]), -jnp.inf)
        begin = (nothing, jnp.full(many, -jnp.inf), nothing > 0, jnp.zeros(many, bool))
        own, theirs, invalid, lost = jax.lax.fori_loop(0, nodes.real, add, begin)
        invalid |= _by_owner(jnp.where(lost, 1.0, 0.0), derived.cell, self.count) > 0
        volume = _log_volume(factor)
        derived_sums = theirs + volume[derived.cell]
        return own + volume, empty, derived_sums, invalid | ~found, bent, height

    def conditional(self, q: Array, noise: Noise) -> tuple[Array, Array]:
        """Positions with the cells drawn given the globals, and where no mode was found."""
        mode, factor, found = self._mode(q, self.take(q))
        q, prior, _, bent = self._prior(q, mode, factor)
        tails = 0.5 * (_FREEDOM + self.dimensions)

        def move(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            x = noise.t[step]
            u = mode + _solve_upper(factor, x)
            rows = jnp.where(self.keep[:, None], self.rows(self.place(q, u)), 0.0)
            target = _by_owner(rows, self.row_cell, self.count + 1)[:-1] + prior(u)
            ratio = target + tails * jnp.log1p((x**2).sum(axis=1) / _FREEDOM)
            accepted = noise.log_uniform[step] < ratio - state[1]
            return _choose(accepted, u, state[0]), jnp.where(accepted, ratio, state[1])

        nowhere = jnp.full(mode[:, 0].shape, -jnp.inf)
        u, ratio = jax.lax.fori_loop(0, STEPS, move, (mode, nowhere))
        failed = ~found | bent | ~jnp.isfinite(ratio)
        return self.place(q, u), failed

    def _mode(self, q: Array, start: Array) -> tuple[Array, _Factor, Array]:
        """Mode of every cell's integrand by Newton steps, the factor of its curvature there.

        A step is taken where the slope along it at its end is no steeper downhill than it was
        uphill at its beginning, so that the density has not fallen; else a third of it is tried.
        """

        def at(u: Array) -> tuple[Array, _Factor, Array]:
            gradient, hessian = self.slope(self.place(q, u))
            return gradient, *_cholesky(self._padded(-hessian))

        def step_from(here: tuple[Array, _Factor, Array]) -> tuple[Array, Array]:
            step = _solve_upper(here[1], _solve_lower(here[1], here[0]))
            return step, (here[0] * step).sum(axis=1)

        def move(state: tuple[Any, ...]) -> tuple[Any, ...]:
            count, u, share, here = state
            step, uphill = step_from(here)
            end = u + share[:, None] * step
            there = at(end)
            good = (there[0] * step).sum(axis=1) >= -jnp.maximum(uphill, _NEWTON_DONE)
            good |= count == 0
            here = jax.tree.map(lambda old, new: _choose(good, new, old), here, there)
            share = jnp.where(good, jnp.minimum(3.0 * share, 1.0), share / 3.0)
            return count + 1, _choose(good, end, u), share, here

        def unfinished(state: tuple[Any, ...]) -> Array:
            done = (step_from(state[3])[1] <= _NEWTON_DONE).all()
            return (state[0] < NEWTON_STEPS) & ((state[0] == 0) | ~done)

        # nothing is known before the first step, which goes nowhere
        one = jnp.ones(start[:, 0].shape)
        factor = tuple(tuple(one for _ in range(a + 1)) for a in range(self.dimensions))
        begin = (0, start, one, (jnp.zeros_like(start), factor, one > 0))
        _, u, _, here = jax.lax.while_loop(unfinished, move, begin)
        return u, here[1], here[2] & (step_from(here)[1] < _NEWTON_FOUND)

    def _padded(self, blocks: Array) -> Array:
        """Blocks with ones on the diagonal where a cell has fewer coordinates than others."""
        extra = np.eye(self.dimensions) * ~self.real[:, :, None]
        return blocks + extra[..., None]

    def _prior(
        self, q: Array, mode: Array, factor: _Factor
    ) -> tuple[Array, Callable[[Array], Array], Array, Array]:
        """Positions, the change of every cell's log prior from there, log Z of no rows, the bent.

        The cells of the positions are at the modes of their priors: far from them changes are large
        numbers that cancel. Its integral is that of a normal density, where its gradient is linear.
        """
        # a cell has no prior in the coordinates that it does not have but a standard normal one
        missing = ~self.real[..., None]

        def extra(u: Array) -> Array:
            return -0.5 * jnp.where(missing, u**2, 0.0).sum(axis=1)

        start = self.take(q)
        if self.bent:
            unknown = jnp.full(mode[:, 0].shape, jnp.nan)
            return q, lambda u: self._line(q, start, u) + extra(u), unknown, unknown > 0
        gradient, hessian = self.prior_slope(q)
        own, definite = _cholesky(self._padded(-hessian))
        centre = start + _solve_upper(own, _solve_lower(own, gradient))
        start = jnp.where((definite[:, None] & ~missing), centre, start)
        q = self.place(q, start)
        gradient = self.prior_gradient(q)

        def change(u: Array) -> Array:
            away = jnp.where(missing, 0.0, u - start)
            bend = (hessian * away[:, None]).sum(axis=2)
            return (away * (gradient + 0.5 * bend)).sum(axis=1) + extra(u)

        aside = mode + _solve_upper(factor, jnp.full((1, self.dimensions, 1), 1.7))
        away = jnp.where(missing, 0.0, aside - start)
        straight = gradient + (hessian * away[:, None]).sum(axis=2)
        size = jnp.abs(gradient) + jnp.abs(hessian * away[:, None]).sum(axis=2)
        off = jnp.abs(self.prior_gradient(self.place(q, aside)) - straight)
        bent = ~(off <= _LINEAR * jnp.maximum(size, 1e-3)).all(axis=1)
        half = _solve_lower(own, gradient)
        empty = 0.5 * (half**2).sum(axis=1) + _log_volume(own)
        return q, change, jnp.where(definite, empty, jnp.nan), bent

    def _line(self, q: Array, start: Array, end: Array) -> Array:
        """Change of every cell's log prior along a line: its gradient, by Gauss-Legendre."""
        x, w = np.polynomial.legendre.leggauss(LINE_POINTS)
        away = jnp.where(self.real[..., None], end - start, 0.0)

        def add(total: Array, point: tuple[Array, Array]) -> tuple[Array, None]:
            gradient = self.prior_gradient(self.place(q, start + point[0] * away))
            return total + point[1] * (gradient * away).sum(axis=1), None

        points = (jnp.asarray(0.5 + 0.5 * x), jnp.asarray(0.5 * w))
        return jax.lax.scan(add, jnp.zeros(start[:, 0].shape), points)[0]


# ---------------------------------------------------------------- small matrices, sums by owner

# Entries of a lower triangular matrix for every cell and draw, by hand: batched LAPACK is slow.
_Factor = tuple[tuple[Array, ...], ...]


def _cholesky(matrix: Float[Array, "cell D D draw"]) -> tuple[_Factor, Bool[Array, "cell draw"]]:
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


def _solve_lower(factor: _Factor, right: Array) -> Float[Array, "cell D draw"]:
    """Solution x of L x = right."""
    done: list[Array] = []
    for a, line in enumerate(factor):
        dot = sum(line[b] * done[b] for b in range(a))
        done.append((right[:, a] - dot) / line[a])
    return jnp.stack(done, axis=1)


def _solve_upper(factor: _Factor, right: Array) -> Float[Array, "cell D draw"]:
    """Solution x of L^T x = right."""
    size = len(factor)
    done: dict[int, Array] = {}
    for a in reversed(range(size)):
        dot = sum(factor[b][a] * done[b] for b in range(a + 1, size))
        done[a] = (right[:, a] - dot) / factor[a][a]
    return jnp.stack([done[a] for a in range(size)], axis=1)


def _log_volume(factor: _Factor) -> Float[Array, "cell draw"]:
    """Log integral of exp(-u^T L L^T u / 2)."""
    diagonal = [line[-1] for line in factor]
    return 0.5 * len(factor) * np.log(2 * np.pi) - sum(jnp.log(entry) for entry in diagonal)


def _choose(which: Bool[Array, "cell draw"], one: Array, two: Array) -> Array:
    if one.ndim > which.ndim:
        which = which[:, None]
    return jnp.where(which, one, two)


def _by_owner(values: Float[Array, "entry draw"], owner: Any, count: int) -> Array:
    # over contiguous draws a scatter is as fast as the memory
    return jax.ops.segment_sum(values, owner, count)


def _log_add(total: Array, value: Array) -> Array:
    """log(exp(total) + exp(value)); values that are no number count nothing."""
    value = jnp.where(jnp.isnan(value), -jnp.inf, value)
    top = jnp.maximum(total, value)
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    return jnp.log(jnp.exp(total - safe) + jnp.exp(value - safe)) + safe
