"""A model at many points: its rows, its gradients, and HMC trajectories through it.

Everything that needs the model outside the folds' program and NUTS comes from here, so that few
programs have to be compiled. A gradient is a trajectory of one step of length zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from foldwise.support.runtime import compiled, lanes
from foldwise.support.verlet import leapfrog

# Up to this many parameters trajectories have a dense metric.
DENSE_MOTION = 100
# Points in one call, fewer where there are more row values than this.
_POINTS, _ROW_VALUES = 100, 2**19
# Draws of a lane's batch at most, row values of these, and how many it works on at once.
_BATCH, _BATCH_VALUES, _SIDE_BY_SIDE = 256, 2**19, 8
# Draws and sets of rows of a call, where rows depend on each other.
_JOINT_DRAWS, _JOINT_SETS = 64, 16
# Points whose row values (8 bytes each) stay in the cache of a core are evaluated side by side.
_CACHE_VALUES = 2**18
# Matrices that the gradient of a factorisation holds at once. Four gradients with a factor of 133
# rows take 0.66 ms each side by side, 25 take 1.1 and 100 take 1.7.
_MATRICES = 4
# Rows up to which programs that evaluate a model at many points are compiled quickly: integrals of
# 150 rows take less time than compiling does, those of 12,573 rows would take 1.5 times theirs
# (bench/compiling.py).
FEW_ROWS = 2000


class Rows(Protocol):
    """What can be evaluated: a model, or what has these of one."""

    @property
    def n_obs(self) -> int:
        """Number of rows."""

    @property
    def dimension(self) -> int:
        """Number of parameters."""

    def flat_log_prior(self, flat: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior of a flat position."""

    def flat_log_likelihood(self, flat: Float[Array, " d"]) -> Float[Array, " row"]:
        """Log density of each row."""

    @property
    def joint_log_likelihood(self) -> Callable[..., Array] | None:
        """Joint log density of some rows, where rows depend on each other."""

    def flat_joint(self, flat: Float[Array, " d"], rows: Bool[Array, " row"]) -> Float[Array, ""]:
        """The same of a flat position."""

    def flat_posterior(
        self, flat: Float[Array, " d"], rows: Bool[Array, " row"]
    ) -> Float[Array, ""]:
        """The same with the log prior."""

    def flat_derivatives(self, flat: Float[Array, " d"]) -> tuple[Array, Array]:
        """First and second derivative of each row's log density by its observed value."""

    def selected(self, selection: Any) -> AbstractContextManager[None]:
        """Context in which the functions are those of the member ``selection`` of a family."""


def masked_log_density(
    model: Rows,
    flat: Float[Array, " d"],
    train: Bool[Array, " row"] | None = None,
    temper: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Float[Array, " row"]]:
    """Log density of the posterior given the rows ``train``, and the log density of every row.

    log prior + sum of rows that train + ``temper`` times the sum of those that do not. Without
    ``train`` all rows do. A row that does not train counts nothing, even where its density is zero.
    Where rows depend on each other, what tempers is the density of the others given those that
    train, and there are no densities of rows.
    """
    # what is traced first decides in which order gradients add up: NUTS shows the last bits of it
    if train is None:
        prior, rows = model.flat_log_prior(flat), model.flat_log_likelihood(flat)
        return prior + rows.sum(), rows
    if model.joint_log_likelihood is not None:
        value = model.flat_posterior(flat, train)
        if temper is not None:
            others = model.flat_posterior(flat, jnp.ones_like(train)) - value
            value += jnp.where(temper > 0, temper * others, 0.0)
        return value, jnp.zeros(model.n_obs, flat.dtype)
    rows = model.flat_log_likelihood(flat)
    prior = model.flat_log_prior(flat)
    # not zero times the score: a test row of density zero must not stop the chain
    rest = 0.0 if temper is None else jnp.where(temper > 0, temper * rows, 0.0)
    return prior + jnp.where(train, rows, rest).sum(), rows


class Points(NamedTuple):
    """Where trajectories start; ``train`` marks the rows whose posterior they are on."""

    position: Float[Any, "point d"]
    momentum: Float[Any, "point d"]
    gradient: Float[Any, "point d"]
    train: Bool[Any, "point row"]


class Motion(NamedTuple):
    """How all of them move."""

    step: Float[Any, ""]
    n_steps: Int[Any, ""]
    covariance: Float[Any, "d d"] | Float[Any, " d"]

    def velocity(self, p: Float[Array, "1 point d"]) -> Float[Array, "1 point d"]:
        """That of a momentum: the covariance times it."""
        return p @ self.covariance.T if self.covariance.ndim == 2 else p * self.covariance


class Ends(NamedTuple):
    """Where trajectories end, and the log density and gradient of the posterior there."""

    position: Float[np.ndarray, "point d"]
    momentum: Float[np.ndarray, "point d"]
    log_density: Float[np.ndarray, " point"]
    gradient: Float[np.ndarray, "point d"]


def trajectories(
    model: Rows,
    position: Float[np.ndarray, "point d"],
    momentum: Float[np.ndarray, "point d"],
    gradient: Float[np.ndarray, "point d"],
    train: Bool[np.ndarray, "point row"],
    motion: Motion,
) -> Ends:
    """Follow every point, with its momentum and gradient, along its HMC trajectory."""
    size, found = _call_size(model), []
    program = gradients_program(model)
    for first in range(0, len(position), size):
        chosen = np.arange(first, min(first + size, len(position)))
        padded = np.resize(chosen, size)
        points = Points(position[padded], momentum[padded], gradient[padded], train[padded])
        found.append([part[: len(chosen)] for part in program(points, motion)])
    return Ends(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def gradients(
    model: Rows,
    position: Float[np.ndarray, "point d"],
    train: Bool[np.ndarray, "point row"] | None = None,
) -> Ends:
    """Log densities and gradients at points, given the rows ``train``; None: given all."""
    nothing = np.zeros_like(position)
    if train is None:
        train = np.ones((1, model.n_obs), bool)
    train = np.broadcast_to(train, (len(position), model.n_obs))
    return trajectories(model, position, nothing, nothing, train, _standing(model))


def _standing(model: Rows) -> Motion:
    d = model.dimension
    dense = d <= DENSE_MOTION
    return Motion(np.float64(0.0), np.int32(1), np.zeros((d, d) if dense else d))


def gradients_program(model: Rows) -> Any:
    """The program of :func:`trajectories` and :func:`gradients`, which compiles meanwhile."""

    def follow(points: Points, motion: Motion) -> tuple[Array, ...]:
        return _follow(model, points, motion)

    size = _call_size(model)
    nothing = np.zeros((size, model.dimension))
    points = Points(nothing, nothing, nothing, np.zeros((size, model.n_obs), bool))
    return compiled(model, "trajectories", follow, points, _standing(model))


def _follow(model: Rows, points: Points, motion: Motion) -> tuple[Array, ...]:
    def of_point(point: tuple[Array, Array]) -> tuple[Array, Array]:
        position, train = point

        return jax.value_and_grad(lambda q: masked_log_density(model, q, train)[0])(position)

    count = len(points.position)
    together = _largest_divisor(count, max(1, _CACHE_VALUES // values_held(model)))

    def density(q: Array) -> tuple[Array, Array, Array]:
        here = (q[0], points.train)
        if together == count:
            value, gradient = jax.vmap(of_point)(here)
        else:
            value, gradient = jax.lax.map(of_point, here, batch_size=together)
        return value[None], gradient[None], value[None]

    start = (points.momentum, points.position, *jnp.zeros((1, count)), points.gradient)
    p, q, value, gradient, _ = leapfrog(
        tuple(part[None] for part in (*start, start[2])),
        motion.step[None],
        motion.n_steps[None],
        density,
        motion.velocity,
    )
    return q[0], p[0], value[0], gradient[0]


def values_held(model: Rows) -> int:
    """Numbers that a gradient has at hand: those of the rows, or of matrices it factorises.

    They should stay in the cache of a core for all gradients that are found side by side.
    """
    return max(model.n_obs, _MATRICES * vars(model).get("_factorised", 0))


def _largest_divisor(number: int, limit: int) -> int:
    return max(k for k in range(1, min(number, limit) + 1) if number % k == 0)


def _call_size(model: Rows) -> int:
    points = max(1, min(_POINTS, _ROW_VALUES // model.n_obs))
    return -(-points // lanes()) * lanes()


def rows_at(
    model: Rows, flat: Float[np.ndarray, "draw d"]
) -> Iterator[tuple[Float[np.ndarray, " draw"], Float[np.ndarray, "draw row"]]]:
    """Log prior and row log likelihoods at flat positions, a batch of them at a time."""
    yield from in_batches(*rows_program(model), flat)


def rows_program(model: Rows) -> tuple[Any, int]:
    """The program of :func:`rows_at`, which compiles meanwhile, and the size of its batches."""

    def prior_and_rows(q: Array) -> tuple[Array, Array]:
        return model.flat_log_prior(q), model.flat_log_likelihood(q)

    return batch_program(model, "rows", prior_and_rows)


def joints_at(
    model: Rows, flat: Float[np.ndarray, "draw d"], masks: Bool[np.ndarray, "set row"]
) -> Float[np.ndarray, "set draw"]:
    """Joint log density of each set of rows at flat positions, where rows depend on each other."""

    def densities(draws: Array, some: Array) -> Array:
        def of_draw(q: Array) -> Array:
            if together == len(some):
                return jax.vmap(lambda rows: model.flat_joint(q, rows))(some)
            return jax.lax.map(lambda rows: model.flat_joint(q, rows), some, batch_size=together)

        return jax.lax.map(of_draw, draws)

    batch, room = _JOINT_DRAWS * lanes(), min(_JOINT_SETS, len(masks))
    # side by side as many as have their matrices in the cache of a core
    together = _largest_divisor(room, max(1, _CACHE_VALUES // model.n_obs**2))
    shape = np.zeros((batch, model.dimension))
    program = compiled(model, "joints", densities, shape, np.zeros((room, model.n_obs), bool))
    found = np.empty((len(masks), len(flat)))
    for first in range(0, len(masks), room):
        some = masks[first : first + room]
        padded = np.resize(some, (room, model.n_obs))
        parts = [values for (values,) in in_batches(_alone(program), batch, flat, padded)]
        found[first : first + room] = np.concatenate(parts)[:, : len(some)].T
    return found


def _alone(program: Any) -> Callable[[Any, Any], tuple[Any]]:
    return lambda sharded, shared: (program(sharded, shared),)


def derivatives_at(
    model: Rows, flat: Float[np.ndarray, "draw d"]
) -> Iterator[tuple[Float[np.ndarray, "draw row"], Float[np.ndarray, "draw row"]]]:
    """First and second derivatives of row log densities by the observed values, likewise."""
    yield from in_batches(*batch_program(model, "derivatives", model.flat_derivatives), flat)


def replicates_at(
    model: Any,
    flat: Float[np.ndarray, "draw d"],
    seed: int,
    numbers: Int[np.ndarray, " draw"],
) -> Iterator[tuple[Float[np.ndarray, "draw row"]]]:
    """One simulated value of each row at flat positions, likewise; ``numbers`` are the draws'.

    Rows are the last axis; before it are the numbers of a row, where it has several.
    """

    def simulated(numbered: Array) -> tuple[Array]:
        key = jax.random.fold_in(jax.random.key(seed), numbered[-1].astype(jnp.uint32))
        return (_numbers_first(model.flat_simulate(key, numbered[:-1])).astype(flat.dtype),)

    program = batch_program(model, f"replicates {seed}", simulated, model.dimension + 1)
    yield from in_batches(*program, np.column_stack([flat, numbers]))


def joint_replicates_at(
    model: Any,
    flat: Float[np.ndarray, "draw d"],
    seed: int,
    numbers: Int[np.ndarray, " draw"],
    train: Bool[np.ndarray, " row"],
) -> Iterator[tuple[Float[np.ndarray, "draw ... row"]]]:
    """The same given the rows ``train``, where rows depend on each other.

    A draw has the same random numbers whatever the rows.
    """

    def simulated(draws: Array, train: Array) -> Array:
        def of_draw(numbered: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), numbered[-1].astype(jnp.uint32))
            found = model.flat_simulate(key, numbered[:-1], train)
            return _numbers_first(found).astype(flat.dtype)

        return jax.lax.map(of_draw, draws)

    batch = _JOINT_DRAWS * lanes()
    shape = np.zeros((batch, model.dimension + 1))
    program = compiled(model, f"joint replicates {seed}", simulated, shape, train)
    numbered = np.column_stack([flat, numbers])
    yield from in_batches(_alone(program), batch, numbered, train)


def _numbers_first(rows: Float[Array, "row ..."]) -> Float[Array, "... row"]:
    """Rows last, after the numbers of a row as one axis, where it has several."""
    return rows if rows.ndim == 1 else rows.reshape(len(rows), -1).T


def probabilities_at(
    model: Any, flat: Float[np.ndarray, "draw d"], classes: tuple[float, ...]
) -> Iterator[tuple[Float[np.ndarray, "draw class row"]]]:
    """Probability of each class for every row, likewise."""

    def probabilities(q: Array) -> tuple[Array]:
        return (model.flat_probabilities(q, classes),)

    yield from in_batches(*batch_program(model, f"probabilities {classes}", probabilities), flat)


def few_rows(model: Rows) -> bool:
    """Whether programs that evaluate a model at many points take longer to compile than to run."""
    return model.n_obs <= FEW_ROWS


def batch_program(
    model: Rows,
    what: str,
    function: Callable[[Array], tuple[Array, ...]],
    columns: int | None = None,
) -> tuple[Any, int]:
    """``function`` at flat positions, in batches of at most 4 MB of row values a lane.

    Larger ones leave the cache. ``columns`` numbers describe a point; None: its position alone.
    """

    def evaluate(draws: Array, _: tuple[()]) -> tuple[Array, ...]:
        return jax.lax.map(function, draws, batch_size=_SIDE_BY_SIDE)

    batch = max(1, min(_BATCH, _BATCH_VALUES // model.n_obs))
    # what is left over would be compiled apart
    batch = batch // _SIDE_BY_SIDE * _SIDE_BY_SIDE or batch
    batch *= lanes()
    shape = np.zeros((batch, columns or model.dimension))
    return compiled(model, what, evaluate, shape, (), quick=few_rows(model)), batch


def in_batches(program: Any, batch: int, flat: np.ndarray, shared: Any = ()) -> Iterator[Any]:
    """What ``program`` gives at flat positions, ``batch`` of them in a call."""
    for first in range(0, len(flat), batch):
        part = flat[first : first + batch]
        padded = np.resize(part, (batch, part.shape[1]))
        yield tuple(found[: len(part)] for found in program(padded, shared))
