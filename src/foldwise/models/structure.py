"""Which parameters belong to a group of rows alone: cells, found from the densities themselves.

Given the parameters that all rows share, the globals, a hierarchical model falls apart: the effects
of one group meet those of another neither in a row nor in the prior. Such a piece of at most
``MOST_COORDINATES`` coordinates is a cell. Nobody has to name cells. A row depends on the
coordinates by which its derivative is not zero, and the prior couples those whose mixed second
derivative is not zero, at one of several draws at least; a zero by accident at one does not count.
What was found is then tried: rows must stay what they are when cells move that are not theirs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Bool, Float, Int

from foldwise.models.evaluate import few_rows, rows_at
from foldwise.models.model import Model
from foldwise.support.runtime import compiled, lanes
from foldwise.support.words import counted

# Coordinates of a cell at most: its integrals are products of one-dimensional rules.
MOST_COORDINATES = 3
# Globals of which it is asked whether they fall apart, at most.
MOST_APART = 60
# Draws at which derivatives are looked at.
DRAWS = 2
# Derivatives of rows and of the prior's gradient, in numbers, that probing may cost at one draw:
# seconds. Beyond it what is not yet told apart counts as coupled, so that no cell is wrong.
MOST_PROBED = 2 * 10**9
# Numbers that one call of the probing program returns.
_CALL_VALUES = 2**21
# Relative rounding of derivatives: ratios that are this near to what one coordinate gives.
_ROUNDING = 1e-10
# Of the coordinates that still hang together, those that meet at least this share of as many others
# as the most connected one are taken out at once.
_SIMILAR = 0.9
# Rounds of taking out; what then still hangs together has no cells.
_MOST_ROUNDS = 200
# Globals that a structure may have although its cells have fewer coordinates.
_FEW_GLOBALS = 30
# Cells without rows, for each with rows, that are integrated out like these.
_FEW_UNSEEN = 2
# Draws at which half of the cells are moved: any two cells are in different halves at one of them
# but for 1 in 10,000. And what a row or the prior may change by all the same: rounding.
_MOVED_DRAWS, _MOVED_ROUNDING = 32, 1e-9


@dataclass(frozen=True, eq=False)
class Structure:
    """Globals and cells of a model.

    Attributes
    ----------
    coordinates
        (cell, 3) positions in the flat vector of each cell's coordinates, -1 beyond its number.
    row_cell
        (row,) the cell on which each row depends, -1 for none.
    names
        (d,) name of each coordinate of the flat vector.
    unseen
        Number of coordinates in no cell that belong to groups without rows.
    apart
        Whether the globals may fall apart given some of them, with the cells integrated out; not
        asked of more than 60.
    """

    coordinates: Int[np.ndarray, "cell 3"]
    row_cell: Int[np.ndarray, " row"]
    names: tuple[str, ...]
    unseen: int = 0
    apart: bool = True

    @property
    def sizes(self) -> Int[np.ndarray, " cell"]:
        """Number of coordinates of each cell."""
        return (self.coordinates >= 0).sum(axis=1)

    @property
    def globals(self) -> Int[np.ndarray, " global"]:
        """Positions in the flat vector of the coordinates that are in no cell."""
        inside = self.coordinates[self.coordinates >= 0]
        return np.setdiff1d(np.arange(len(self.names)), inside)

    @property
    def mostly_shared(self) -> bool:
        """Whether fewer parameters belong to cells than to none."""
        return bool(self.sizes.sum() < len(self.globals))

    @cached_property
    def digest(self) -> str:
        """What tells two structures apart."""
        data = self.coordinates.tobytes() + self.row_cell.tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self.coordinates)

    def __str__(self) -> str:
        if not len(self):
            return "no parameter belongs to a group of rows alone"
        shared = counted(len(self.globals) - self.unseen, "parameter")
        words_for = _with_letters(self.names)
        seen = np.isin(np.arange(len(self)), self.row_cell)
        every = (", ".join(words_for[k] for k in cell if k >= 0) for cell in self.coordinates[seen])
        kinds = Counter(every).most_common()
        words = [f"{kind} of {counted(count, 'group')}" for kind, count in kinds[:5]]
        if len(kinds) > 5:
            words.append(f"those of {counted(sum(count for _, count in kinds[5:]), 'more group')}")
        words += [f"{counted(int((~seen).sum()), 'group')} without rows"] * bool((~seen).any())
        alone = int((self.row_cell < 0).sum())
        words += [f"{counted(alone, 'row')} in no group"] * bool(alone)
        unseen = f"{counted(self.unseen, 'parameter')} of groups without rows"
        words += [unseen] * bool(self.unseen)
        return "; ".join([f"{shared} shared by all rows", *words])

    __repr__ = __str__


def find_cells(model: Model, positions: Float[np.ndarray, "draw d"]) -> Structure:
    """Globals and cells of ``model``, from its derivatives at some of the draws ``positions``.

    Coordinates that share a row, or that the prior couples, hang together. Those that hang together
    with most others are taken out, in order, until pieces of at most three coordinates are left:
    what was taken out are the globals, the pieces that have rows are the cells, and so are pieces
    of the same kind without rows: groups that nobody has seen. There are none
    where they would hold less than half of the rows, or fewer coordinates than there are globals
    (30 of which are always allowed): then nothing is found that belongs to groups.
    """
    n, d = model.n_obs, model.dimension
    if model.joint_log_likelihood is not None:  # then all rows hang together
        return without_cells(model)
    chosen = np.linspace(0, len(positions) - 1, min(DRAWS, len(positions))).astype(int)
    rows, prior, unclear = _Pairs(n, d), _Pairs(d, d), np.zeros(d, bool)
    rng = np.random.default_rng(0)
    for position in np.asarray(positions)[chosen]:
        unclear[_probe(model, position, rows, prior, rng)] = True
    found = _structure(rows.matrix(), prior.matrix(), unclear, _names(model))
    if len(found) and not _stands(model, found, np.asarray(positions), rng):
        return _nothing(n, found.names)
    return found


def cells_at_start(model: Model) -> Structure:
    """Those that are found before there are draws, at the starting point; kept with the model."""
    kept = vars(model)
    if "_cells_at_start" not in kept:
        kept["_cells_at_start"] = find_cells(model, model.probes())
    return kept["_cells_at_start"]


def without_cells(model: Model) -> Structure:
    """The structure in which nothing is integrated out."""
    return _nothing(model.n_obs, _names(model))


# ---------------------------------------------------------------- which derivatives are not zero


class _Pairs:
    """Pairs of an output and a coordinate on which it depends."""

    def __init__(self, outputs: int, coordinates: int):
        self.shape = (outputs, coordinates)
        self.outputs: list[np.ndarray] = [np.zeros(0, np.int64)]
        self.coordinates: list[np.ndarray] = [np.zeros(0, np.int64)]

    def add(self, outputs: np.ndarray, coordinates: np.ndarray) -> None:
        self.outputs.append(outputs)
        self.coordinates.append(coordinates)

    def matrix(self) -> scipy.sparse.csr_array:
        """One where an output depends on a coordinate."""
        one, two = np.concatenate(self.outputs), np.concatenate(self.coordinates)
        found = scipy.sparse.csr_array((np.ones(len(one), np.int32), (one, two)), self.shape)
        found.data[:] = 1
        return found


class _Answer(NamedTuple):
    """What probing a set of coordinates told about the outputs.

    ``one`` and ``coordinate`` are outputs that depend on one coordinate of the set, and which;
    ``many`` are outputs that depend on more than one.
    """

    one: Int[np.ndarray, " output"]
    coordinate: Int[np.ndarray, " output"]
    many: Int[np.ndarray, " output"]


def _probe(
    model: Model,
    position: Float[np.ndarray, " d"],
    rows: _Pairs,
    prior: _Pairs,
    rng: np.random.Generator,
) -> Int[np.ndarray, " coordinate"]:
    """Add the pairs of rows, and of the prior's gradient, with coordinates at one draw.

    Derivatives along a random combination of a set of coordinates, and along the same combination
    times 1, 2, 3, ..., have the ratio k where an output depends on the k-th of them alone; a third
    random combination confirms it. Sets in which an output depends on several are divided. So the
    effects of thousands of groups take three derivatives if each row has one of them. Returns the
    coordinates that were not told apart within the budget: they can only be globals.
    """
    n, budget = model.n_obs, MOST_PROBED // (3 * (model.n_obs + model.dimension))
    sets, settled = _parts(model), []
    while sets:
        answers = list(_answers(model, position, sets, rng))
        budget -= len(sets)
        for answer in answers:
            of_row = answer.one < n
            rows.add(answer.one[of_row], answer.coordinate[of_row])
            prior.add(answer.one[~of_row] - n, answer.coordinate[~of_row])
        settled += list(zip(sets, [answer.many for answer in answers], strict=True))
        divide = _unclear(settled, n, model.dimension)
        sets = [part for k in divide for part in _divided(settled[k][0])]
        if len(sets) > max(budget, 0):
            return np.concatenate([part.ravel() for part in sets])
        settled = [pair for k, pair in enumerate(settled) if k not in divide]
    return np.zeros(0, np.int64)


def _parts(model: Model) -> list[Int[np.ndarray, ...]]:
    """The coordinates of each array of a position, in its shape."""
    shapes = [np.shape(leaf) or (1,) for leaf in jax.tree.leaves(model.unflatten(_zeros(model)))]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        np.arange(end - int(np.prod(shape)), end).reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
        if np.prod(shape)
    ]


def _zeros(model: Model) -> Any:
    return np.zeros(model.dimension)


def _divided(members: Int[np.ndarray, ...]) -> list[Int[np.ndarray, ...]]:
    """A set in parts: slices along its shortest axis, or halves where that is longer than four."""
    axis = min(
        (k for k in range(members.ndim) if members.shape[k] > 1), key=members.shape.__getitem__
    )
    pieces = members.shape[axis] if members.shape[axis] <= 4 else 2
    return np.array_split(members, pieces, axis=axis)


def _answers(
    model: Model,
    position: Float[np.ndarray, " d"],
    sets: list[Int[np.ndarray, ...]],
    rng: np.random.Generator,
) -> Iterator[_Answer]:
    program, batch = _program(model)
    size = batch // 3
    for first in range(0, len(sets), size):
        some = sets[first : first + size]
        along = np.zeros((batch, model.dimension))
        for k, members in enumerate(some):
            flat = members.ravel()
            along[3 * k, flat] = rng.uniform(1.0, 2.0, flat.size)
            along[3 * k + 1, flat] = along[3 * k, flat] * np.arange(1, flat.size + 1)
            along[3 * k + 2, flat] = rng.uniform(1.0, 2.0, flat.size)
        changes = program(along, position)
        for k, members in enumerate(some):
            yield _decoded(members.ravel(), along[3 * k : 3 * k + 3], changes[3 * k : 3 * k + 3])


def _decoded(
    members: Int[np.ndarray, " member"],
    along: Float[np.ndarray, "3 d"],
    changes: Float[np.ndarray, "3 output"],
) -> _Answer:
    """Which outputs depend on one of the ``members``, and which on several."""
    touched = np.flatnonzero(~(changes == 0.0).all(axis=0))
    if members.size == 1:
        return _Answer(touched, np.full(touched.size, members[0]), np.zeros(0, np.int64))
    first, counted_up, other = changes[:, touched]
    with np.errstate(all="ignore"):
        ratio = counted_up / first
        which = np.clip(np.nan_to_num(np.rint(ratio), nan=1.0), 1, members.size).astype(np.int64)
        coordinate = members[which - 1]
        expected = along[2, coordinate] / along[0, coordinate]
        same = np.abs(ratio - which) <= _ROUNDING * which
        same &= np.abs(other / first - expected) <= _ROUNDING * expected
    return _Answer(touched[same], coordinate[same], touched[~same])


def _unclear(settled: list[tuple[np.ndarray, np.ndarray]], n: int, d: int) -> set[int]:
    """Sets that must be divided.

    Those in which a row depends on several. The prior's second derivatives are symmetric, so what
    they are between coordinates i and j is known if i is clear about the set of j, or j about that
    of i: sets must be divided only where neither is.
    """
    divide = {k for k, (_, many) in enumerate(settled) if many.size and many[0] < n}
    owner = np.full(d, -1, np.int64)
    for k, (members, _) in enumerate(settled):
        owner[members.ravel()] = k
    count = len(settled)
    codes = [
        owner[many[many >= n] - n] * count + k for k, (_, many) in enumerate(settled) if many.size
    ]
    pairs = np.unique(np.concatenate([np.zeros(0, np.int64), *codes]))
    one, two = pairs // count, pairs % count
    both = np.isin(two * count + one, pairs)
    return divide | set(one[both].tolist()) | set(two[both].tolist())


def _program(model: Model) -> tuple[Any, int]:
    """Derivatives of the rows and of the prior's gradient along directions, and their number."""

    def changes(along: Float[Array, "direction d"], position: Float[Array, " d"]) -> Array:
        def outputs(q: Array) -> Array:
            return jnp.concatenate(
                [model.flat_log_likelihood(q), jax.grad(model.flat_log_prior)(q)]
            )

        return jax.vmap(lambda v: jax.jvp(outputs, (position,), (v,))[1])(along)

    step = 3 * lanes()
    wanted = min(96, _CALL_VALUES // (model.n_obs + model.dimension))
    batch = max(wanted // step, 1) * step
    shape = np.zeros((batch, model.dimension))
    program = compiled(model, "probe", changes, shape, _zeros(model), quick=few_rows(model))
    return program, batch


# ---------------------------------------------------------------- what falls apart


def _structure(
    rows: scipy.sparse.csr_array,
    prior: scipy.sparse.csr_array,
    unclear: Bool[np.ndarray, " d"],
    names: tuple[str, ...],
) -> Structure:
    n, d = rows.shape
    # a coordinate of most rows is no group's, and would make the graph dense
    common = np.asarray(rows.sum(axis=0)).ravel() > n / 2
    left = np.flatnonzero(~common & ~unclear)
    if not left.size:
        return _nothing(n, names)
    own, ties = rows[:, left], prior[left][:, left]
    apart = taken_apart(scipy.sparse.csr_array(own.T @ own + ties + ties.T))
    cells = [left[members] for members in apart]
    coordinates = np.full((len(cells), MOST_COORDINATES), -1)
    cell_of = np.full(d, -1)
    for c, members in enumerate(cells):
        coordinates[c, : len(members)] = members
        cell_of[members] = c
    entries = rows.tocoo()
    row_cell = np.full(n, -1)
    inside = cell_of[entries.col] >= 0
    row_cell[entries.row[inside]] = cell_of[entries.col[inside]]
    rows_of = np.bincount(row_cell[row_cell >= 0], minlength=len(cells))
    unseen = _unseen(coordinates, rows_of, names)
    # few of them are integrated out too; many would cost more than the cells that have rows
    few = unseen.sum() <= _FEW_UNSEEN * (rows_of > 0).sum()
    used = np.flatnonzero((rows_of > 0) | (unseen & few))
    aside = 0 if few else int((coordinates[unseen] >= 0).sum())
    number = np.full(len(cells) + 1, -1)
    number[used] = np.arange(len(used))
    coordinates, row_cell = coordinates[used], number[row_cell]
    held = int((coordinates >= 0).sum())
    shared = d - held - aside
    if (
        2 * (row_cell >= 0).sum() < n
        or shared > max(held, _FEW_GLOBALS)
        or rows_of.astype(bool).sum() < 2
    ):
        return _nothing(n, names)
    found = Structure(coordinates, row_cell, names, aside)
    return replace(found, apart=_globals_apart(found, rows, prior))


def _globals_apart(
    found: Structure, rows: scipy.sparse.csr_array, prior: scipy.sparse.csr_array
) -> bool:
    """Whether some globals that are left given others meet in no row, no cell, and no prior."""
    (n, d), chosen, cells = rows.shape, found.globals, len(found)
    if len(chosen) > MOST_APART:
        return True
    # what meets the same cell hangs together, as what meets the same row does
    alone = np.flatnonzero(found.row_cell < 0)
    place = found.row_cell.copy()
    place[alone] = cells + np.arange(len(alone))
    owner, k = np.nonzero(found.coordinates >= 0)
    places = np.concatenate([place, owner])
    shape = (cells + len(alone), n + d)
    columns = np.concatenate([np.arange(n), n + found.coordinates[owner, k]])
    gathered = scipy.sparse.csr_array((np.ones(len(places), np.int32), (places, columns)), shape)
    ties = scipy.sparse.csr_array(prior + prior.T)
    every = scipy.sparse.vstack([rows, ties], format="csr")[:, chosen].astype(np.int32)
    met = gathered @ every
    met.data[:] = 1  # whether, not how often: products of counts may overflow
    graph = met.T @ met + ties[chosen][:, chosen]
    return len(taken_apart(scipy.sparse.csr_array(graph))) > 1


def _unseen(
    coordinates: Int[np.ndarray, "cell 3"], rows: Int[np.ndarray, " cell"], names: tuple[str, ...]
) -> Bool[np.ndarray, " cell"]:
    """Pieces without rows whose coordinates are of kinds that cells with rows have."""
    words = np.array([*_with_letters(names), ""])
    seen = ["", *words[coordinates[rows > 0]].ravel()]
    return (rows == 0) & np.isin(words[coordinates], seen).all(axis=1)


def _nothing(n: int, names: tuple[str, ...]) -> Structure:
    """No cells: all coordinates are globals."""
    return Structure(np.full((0, MOST_COORDINATES), -1), np.full(n, -1), names)


def taken_apart(graph: scipy.sparse.csr_array) -> list[np.ndarray]:
    """Pieces of at most ``MOST_COORDINATES`` that are left when connected coordinates are out.

    ``graph`` is not zero where two coordinates hang together.
    """
    graph.setdiag(0)
    graph.eliminate_zeros()
    graph.data[:] = 1
    members, pieces = np.arange(graph.shape[0]), []
    for _ in range(_MOST_ROUNDS):
        count, label = scipy.sparse.csgraph.connected_components(graph, directed=False)
        size = np.bincount(label, minlength=count)
        small = size[label] <= MOST_COORDINATES
        order = np.argsort(label[small], kind="stable")
        ends = np.cumsum(size[size <= MOST_COORDINATES])[:-1]
        pieces += [part for part in np.split(members[small][order], ends) if part.size]
        if small.all():
            break
        keep = np.flatnonzero(~small)
        graph, members, label = graph[keep][:, keep], members[keep], label[keep]
        degree = np.diff(graph.indptr)
        most = np.zeros(count, degree.dtype)
        np.maximum.at(most, label, degree)
        stay = np.flatnonzero(degree < _SIMILAR * most[label])
        graph, members = graph[stay][:, stay], members[stay]
        if not members.size:
            break
    return pieces


# ---------------------------------------------------------------- whether it stands


def _stands(
    model: Model,
    found: Structure,
    positions: Float[np.ndarray, "draw d"],
    rng: np.random.Generator,
) -> bool:
    """Whether rows stay when other cells move, and the prior's changes add up.

    Derivatives tell of the neighbourhood of draws alone. The means of a mixture far apart have rows
    of their own there, but elsewhere they meet. So half of the cells get values that others have at
    other draws, then the other half, then both.
    """
    at = positions[rng.integers(len(positions), size=_MOVED_DRAWS)]
    moved = exchanged(found, positions, at, rng)
    half = rng.random((_MOVED_DRAWS, len(found))) < 0.5
    cell_of = np.full(model.dimension, -1)
    for coordinates in found.coordinates.T:
        cell_of[coordinates[coordinates >= 0]] = np.flatnonzero(coordinates >= 0)
    inside = cell_of >= 0
    first, second = half[:, cell_of] & inside, ~half[:, cell_of] & inside
    places = [at, *(np.where(which, moved, at) for which in (first, second, first | second))]
    parts = list(rows_at(model, np.concatenate(places)))
    prior = np.concatenate([part[0] for part in parts]).reshape(4, -1)
    rows = np.concatenate([part[1] for part in parts]).reshape(4, _MOVED_DRAWS, -1)
    in_first = half[:, found.row_cell]
    alone = found.row_cell < 0
    stay = _same(rows[0], rows[1], in_first & ~alone) & _same(rows[0], rows[2], ~in_first & ~alone)
    with np.errstate(invalid="ignore"):
        off = np.abs(prior[0] + prior[3] - prior[1] - prior[2])
        add_up = ~(off > _MOVED_ROUNDING * np.abs(prior).sum(axis=0))
    return bool(stay and add_up.all())


def exchanged(
    found: Structure,
    positions: Float[np.ndarray, "draw d"],
    at: Float[np.ndarray, "moved d"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "moved d"]:
    """The positions ``at`` with values for cells that others have, each at another draw."""
    moved = at.copy()
    for coordinates in found.coordinates.T:
        own = coordinates[coordinates >= 0]
        size = (len(at), len(own))
        moved[:, own] = positions[rng.integers(len(positions), size=size), rng.choice(own, size)]
    return moved


def _same(
    one: Float[np.ndarray, "draw row"],
    two: Float[np.ndarray, "draw row"],
    may_differ: Bool[np.ndarray, "draw row"],
) -> bool:
    """Whether rows are the same, but for those that may differ."""
    with np.errstate(invalid="ignore"):
        off = np.abs(one - two) <= _MOVED_ROUNDING * np.maximum(np.abs(one), 1.0)
    return bool((off | (one == two) | may_differ).all())


# ---------------------------------------------------------------- names


def _names(model: Model) -> tuple[str, ...]:
    """A name for every coordinate of the flat vector: ``alpha[3]``."""
    position = model.unflatten(_zeros(model))
    names: list[str] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(position)[0]:
        name = "_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) or "q"
        shape = np.shape(leaf)
        names += [
            f"{name}[{','.join(map(str, index))}]" if shape else name for index in np.ndindex(shape)
        ]
    return tuple(names)


def _with_letters(names: tuple[str, ...]) -> list[str]:
    """``alpha[3]`` as ``alpha[j]``, ``z[0,3]`` as ``z[0,j]``: a letter for the longest axis."""
    split = [(name, ()) if "[" not in name else _index(name) for name in names]
    longest: dict[str, np.ndarray] = {}
    for head, index in split:
        longest[head] = np.maximum(longest.get(head, 0), index)
    return [_with_letter(head, index, longest[head]) for head, index in split]


def _with_letter(head: str, index: tuple[int, ...], longest: np.ndarray) -> str:
    if not index:
        return head
    axis = int(np.argmax(longest))
    words = ["j" if k == axis else str(number) for k, number in enumerate(index)]
    return f"{head}[{','.join(words)}]"


def _index(name: str) -> tuple[str, tuple[int, ...]]:
    head, inside = name[:-1].rsplit("[", 1)
    return head, tuple(int(part) for part in inside.split(","))
