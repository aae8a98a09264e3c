"""Integrals over all cells, and draws of their coordinates, at many draws: the compiled programs.

What these evaluate side by side at a few draws is in ``cells.py``. Draws go through in chunks,
evenly over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from foldwise.models.evaluate import few_rows
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.cells import NOTHING, STEPS, Cells, Derived, Integrals, parts_of_places
from foldwise.scores.nodes import RULES, Rule, rule
from foldwise.scores.small_matrices import back_substituted
from foldwise.support.runtime import compiled, lanes
from foldwise.support.seeds import Stream, generator, words

# Row values of the draws that are worked on side by side, and how many these are at most: gathers
# and sums by cell take a row's draws as one piece, and long pieces are faster although their rows
# leave the cache. And draws that a lane has room for in a call, fewer where they would give more
# numbers than this.
_ROW_VALUES, _TOGETHER = 2**19, 32
_CALL_DRAWS, _CALL_VALUES = 512, 2**20
# What is added up to say that no mode was found, and that a prior is not normal.
_FAILED, _BENT = 1.0, 2.0


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
    program = _program(model, structure, derived, bent)
    calls = program.calls((draws,), (keep, nodes, derived))
    found = [_unpacked(packed, structure)[1] for packed in calls]
    return Integrals(*(np.concatenate(parts).T for parts in zip(*found, strict=True)))


def priors_bent(
    model: Model, structure: Structure, positions: Float[np.ndarray, "position d"]
) -> bool:
    """Whether the conditional prior of some cell is not normal, as seen from these positions."""
    if not len(structure):
        return False
    every = np.ones(model.n_obs, bool)
    found = log_integrals(model, structure, positions, every, _no_nodes(structure))
    return bool(found.bent.any())


def begin_to_compile(model: Model, structure: Structure) -> None:
    """Let the program of sets with nodes of their own compile meanwhile."""
    if len(structure):
        _program(model, structure, NOTHING, bent=False)


def begin_to_compile_draws(model: Model, structure: Structure, bent: bool) -> None:
    """Let the program of Metropolis steps compile meanwhile."""
    _drawing(model, structure, bent)


def conditional_draws(
    model: Model,
    structure: Structure,
    draws: Float[np.ndarray, "draw d"],
    seed: int,
    steps: int = STEPS,
    bent: bool = False,
) -> tuple[Float[np.ndarray, "draw d"], Bool[np.ndarray, " draw"]]:
    """``draws`` with the coordinates of cells drawn given the globals, and where that has failed.

    Independence Metropolis steps of every cell, from a t density with 4 degrees of freedom at its
    mode with its curvature. Where the ratio of the two densities is at most M times its mean, what
    is left of the first of n steps is (1 - 1/M)^n: under 1 % after ``STEPS`` with M = 3. For
    normal conditionals M is 1.13, 1.24 and 1.35 in one to three dimensions, and ``NORMAL_STEPS``
    leave 0.1 % at most. Without ``steps`` they are draws of the normal density with that mode and
    curvature. ``bent`` says that the conditional prior is not normal.
    """
    program, rng = _program(model, structure, NOTHING, bent), generator(seed, Stream.CELLS)
    keys = words(seed, Stream.CELLS, count=2 * len(draws)).reshape(-1, 2)
    every, first = np.ones(model.n_obs, bool), 0
    drawn, failed = [], []
    for packed in program.calls((draws,), (every, _no_nodes(structure), NOTHING)):
        here = slice(first, first + len(packed))
        (places, found), first = _unpacked(packed, structure), here.stop
        lost = (found.failed | found.bent).any(axis=1)
        if steps:
            given, calls = (draws[here], keys[here], places), _drawing(model, structure, bent).calls
            moved = np.concatenate([*calls(given, (np.int32(steps),))])
            drawn.append(moved[:, :-1])
            lost |= moved[:, -1] > 0
        else:
            drawn.append(_normal_draws(structure, draws[here], places, rng))
        failed.append(lost)
    return np.concatenate(drawn), np.concatenate(failed)


def _normal_draws(
    structure: Structure,
    draws: Float[np.ndarray, "draw d"],
    places: Float[np.ndarray, "draw number"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "draw d"]:
    """``draws`` with the coordinates of cells from normal densities at their places."""
    count, size = len(structure), int(structure.sizes.max())
    columns, factor = parts_of_places(
        np.moveaxis(places.reshape(len(draws), -1, count), 1, 0), size
    )
    # a draw has its numbers together, so that they are the same whatever a call has room for
    noise = rng.standard_normal((len(draws), size, count))
    drawn = draws.copy()
    for a, away in enumerate(back_substituted(factor, [*np.moveaxis(noise, 1, 0)])):
        real = structure.coordinates[:, a] >= 0
        drawn[:, structure.coordinates[real, a]] = (columns[a] + away)[:, real]
    return drawn


def _no_nodes(structure: Structure) -> Rule:
    dimensions = int(structure.sizes.max())
    return rule(RULES[dimensions][0], dimensions)._replace(real=np.int32(0))


class _Program(NamedTuple):
    """A compiled program of draws, with what they share, and how it takes them.

    A lane has room for ``chunks`` times ``together`` draws in a call, but works only through as
    many chunks as there are.
    """

    run: Any
    chunks: int
    together: int

    def calls(self, given: tuple[np.ndarray, ...], shared: tuple[Any, ...]) -> Iterator[np.ndarray]:
        """What the program gives at draws, a call at a time: the draws evenly over the lanes."""
        count, room, side = len(given[0]), self.chunks * self.together, lanes()
        for first in range(0, count, room * side):
            size = min(count - first, room * side)
            each = -(-size // side)
            own = np.minimum(np.arange(each * side), size - 1).reshape(side, each)
            place = first + own[:, np.arange(room) % each].ravel()
            chunks = np.int32(-(-each // self.together))
            found = self.run(tuple(part[place] for part in given), (*shared, chunks))
            by_lane = [found[first : first + each] for first in range(0, len(found), room)]
            yield np.concatenate(by_lane)[:size]


def _program(model: Model, structure: Structure, derived: Derived, bent: bool) -> _Program:
    """The program of integrals. It also tells places of draws, since finding them is most of it."""
    dimensions = int(structure.sizes.max())

    def integrate(given: tuple[Array, ...], shared: tuple[Any, ...]) -> list[Array]:
        cells = Cells(model, structure, shared[0], bent)
        place, integrals = cells.at(given[0], *shared[1:])
        status = jnp.where(integrals.failed, _FAILED, 0.0) + jnp.where(integrals.bent, _BENT, 0.0)
        numbers = (integrals.prior[None], integrals.own, integrals.empty, status, integrals.derived)
        return [*cells.packed(place), *numbers]

    shared = (np.zeros(model.n_obs, bool), rule(RULES[dimensions][0], dimensions), derived)
    what, given = ("cells", structure.digest, bent), (np.zeros(model.dimension),)
    return _in_chunks(model, what, integrate, given, shared, len(derived.cell))


def _drawing(model: Model, structure: Structure, bent: bool) -> _Program:
    """The program of coordinates, given the places that the program of integrals has found."""

    def draw(given: tuple[Array, ...], shared: tuple[Any, ...]) -> list[Array]:
        cells = Cells(model, structure, jnp.ones(model.n_obs, bool), bent)
        return [*cells.drawn_at(*given, *shared)]

    given = np.zeros(model.dimension), np.zeros(2, np.uint32), np.zeros(_places(structure))
    what = ("coordinates", structure.digest, bent)
    return _in_chunks(model, what, draw, given, (np.int32(0),))


def _in_chunks(
    model: Model,
    what: tuple[Any, ...],
    function: Callable[[Any, Any], list[Array]],
    given: tuple[np.ndarray, ...],
    shared: tuple[Any, ...],
    more: int = 0,
) -> _Program:
    """The program of a function of draws side by side, the last axis of all its arrays.

    ``given`` are arrays such as it takes of one draw; it returns arrays that are put below each
    other, since each would be work to compile: ``more`` numbers beside some for each parameter.
    """
    chunks, together = _sizes(model, more)

    def run(given: Any, shared: tuple[Any, ...]) -> Array:
        parts = [part.reshape(chunks, together, part.shape[1]) for part in given]

        @jax.jit  # which is traced once for the two uses of it
        def of_chunk(k: Array) -> Array:
            here = tuple(part[k].T for part in parts)
            return jnp.concatenate(function(here, shared[:-1])).T

        def add(k: Array, found: Array) -> Array:
            return found.at[k].set(of_chunk(k))

        shape = jax.eval_shape(of_chunk, jnp.int32(0))
        begin = jnp.zeros((chunks, *shape.shape))
        return jax.lax.fori_loop(0, shared[-1], add, begin).reshape(-1, shape.shape[1])

    room = chunks * together * lanes()
    given = tuple(np.zeros((room, len(part)), part.dtype) for part in given)
    shared = (*shared, np.int32(0))
    program = compiled(model, what, run, given, shared, quick=few_rows(model))
    return _Program(program, chunks, together)


def call_size(model: Model) -> int:
    """How many draws the program of integrals takes in a call."""
    chunks, together = _sizes(model)
    return chunks * together * lanes()


def _sizes(model: Model, more: int = 0) -> tuple[int, int]:
    """How many chunks a lane has room for, and how many draws a chunk has."""
    together = int(np.clip(_ROW_VALUES // model.n_obs, 1, _TOGETHER))
    chunks = min(_CALL_DRAWS, _CALL_VALUES // max(model.dimension, more, 1)) // together
    return max(chunks, 1), together


def _places(structure: Structure) -> int:
    """How many numbers tell the place of a draw."""
    dimensions = int(structure.sizes.max())
    return len(structure) * (dimensions + dimensions * (dimensions + 1) // 2)


def _unpacked(
    packed: Float[np.ndarray, "draw number"], structure: Structure
) -> tuple[Float[np.ndarray, "draw number"], Integrals]:
    """Numbers of places, and integrals, the draw first, from what the program returns."""
    count, first = len(structure), _places(structure)
    ends = first + np.array([0, 1, 1 + count, 1 + 2 * count, 1 + 3 * count])
    places, prior, own, empty, status, derived = np.split(packed, ends, axis=1)
    failed, bent = (status == _FAILED) | (status == _FAILED + _BENT), status >= _BENT
    return places, Integrals(own, empty, derived, failed, bent, prior[:, 0])
