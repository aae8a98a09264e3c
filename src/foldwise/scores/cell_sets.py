"""Which integrals the scores of folds need, and all of them at the full-data draws.

With Z_c(R) the integral of cell c over its rows R, a fold that leaves out rows has, relative to the
full data, the density exp(-m) of the globals, and its test rows the density exp(t) given them,

    m = sum over cells c touched [log Z_c(all) - log Z_c(kept)] + sum of left-out rows in no cell,
    t = sum over cells c tested [log Z_c(kept and tested) - log Z_c(kept)] + test rows in no cell.

Both are sums, with signs, of integrals and of row log densities: sparse matrices, made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import gather, owners, starts
from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.models.structure import Structure, exchanged
from foldwise.scores.cells import NOTHING, Derived, Integrals
from foldwise.scores.integrals import call_size, log_integrals
from foldwise.scores.nodes import HERMITE, RULES, WIDE, rule

# Two rules that differ by less than this many nats at every draw looked at agree. Errors of many
# integrals may have one sign: all of them together must stay within the next.
TOLERANCE, TOTAL_TOLERANCE = 1e-4, 0.01
# Integrals that differ by more than this with where the search for the mode began have two modes.
_ANOTHER_MODE = 1e-3
# Sets of a cell that get nodes of their own without asking whether those of all rows would do.
_FEW_SETS = 3
# Draws at which rules are compared.
_LOOKED_AT = 64
# Integrals that are held at once at most, then at a multiple of so many draws, which programs work
# on side by side, and densities of rows that are added up at once: these are put in another order
# on the way, in the cache.
_VALUES, _MULTIPLE, _CACHED = 2**22, 64, 2**17


@dataclass(frozen=True)
class Needs:
    """What is integrated for some folds, and how their m and t are put together.

    Set s is of cell ``cell[s]``, all of its rows but ``removed[start[s]:start[s + 1]]``. Added set
    a has the rows of the set ``host[a]`` and the row ``row[a]``. Columns of the matrices are, in
    order: all rows of every cell, sets, added sets, and the rows' own log densities. ``by_row`` has
    a line for every test row, None where nobody asked.
    """

    cell: Int[np.ndarray, " set"]
    start: Int[np.ndarray, " set1"]
    removed: Int[np.ndarray, " entry"]
    host: Int[np.ndarray, " added"]
    row: Int[np.ndarray, " added"]
    left_out: scipy.sparse.csr_array
    tested: scipy.sparse.csr_array
    by_row: scipy.sparse.csr_array | None


def needs_of(structure: Structure, folds: Folds, by_row: bool) -> Needs:
    """The integrals that ``folds`` need; ``by_row`` for the test rows one by one too."""
    cells, n, k = len(structure), folds.n, len(folds)
    start, rows = folds.left_out
    fold, cell = owners(start), structure.row_cell[rows]
    test_fold = owners(folds.test_start)
    tested = np.isin(fold * n + rows, test_fold * n + folds.test_rows)
    inside = cell >= 0
    # the rows that a fold takes from a cell: a pair
    code, pair = np.unique(fold[inside] * cells + cell[inside], return_inverse=True)
    pair_fold, pair_cell = code // max(cells, 1), code % max(cells, 1)
    size, test_size = np.bincount(pair), np.bincount(pair, tested[inside])
    lists = _Lists(structure)
    kept = lists.add(pair_cell, rows[inside], pair, size)
    upper, some = pair_cell.copy(), (test_size > 0) & (test_size < size)
    if some.any():
        chosen = some[pair] & ~tested[inside]
        number = np.cumsum(some) - 1
        buffers = np.bincount(number[pair[chosen]], minlength=int(some.sum()))
        upper[some] = cells + lists.add(
            pair_cell[some], rows[inside][chosen], number[pair[chosen]], buffers
        )
    host, row = np.zeros(0, np.int64), np.zeros(0, np.int64)
    entries = None
    if by_row:
        entry_pair = _positions(test_fold * cells + structure.row_cell[folds.test_rows], code)
        entry_pair[structure.row_cell[folds.test_rows] < 0] = -1
        several = (entry_pair >= 0) & (size[entry_pair] > 1) if code.size else entry_pair >= 0
        host, row = kept[entry_pair[several]], folds.test_rows[several]
        entries = entry_pair, several
    sets = lists.count
    columns = cells + sets + len(host)
    alone = columns + rows[~inside]
    width = columns + n
    return Needs(
        *lists.arrays(),
        host,
        row,
        _matrix(
            (k, width),
            (pair_fold, pair_cell, 1.0),
            (pair_fold, cells + kept, -1.0),
            (fold[~inside], alone, 1.0),
        ),
        _matrix(
            (k, width),
            (pair_fold[test_size > 0], upper[test_size > 0], 1.0),
            (pair_fold[test_size > 0], cells + kept[test_size > 0], -1.0),
            (fold[~inside & tested], columns + rows[~inside & tested], 1.0),
        ),
        None if entries is None else _by_row(*entries, pair_cell, kept, cells, sets, folds, width),
    )


class _Lists:
    """Sets of a cell's rows by what they lack; those that lack all rows of a cell are one."""

    def __init__(self, structure: Structure):
        self.rows_of = np.bincount(
            structure.row_cell[structure.row_cell >= 0], minlength=len(structure)
        )
        self.empty = np.full(len(structure), -1)
        self.cell: list[np.ndarray] = [np.zeros(0, np.int64)]
        self.removed: list[np.ndarray] = [np.zeros(0, np.int64)]
        self.sizes: list[np.ndarray] = [np.zeros(0, np.int64)]
        self.count = 0

    def add(
        self,
        cell: Int[np.ndarray, " set"],
        rows: Int[np.ndarray, " entry"],
        owner: Int[np.ndarray, " entry"],
        size: Int[np.ndarray, " set"],
    ) -> Int[np.ndarray, " set"]:
        """Numbers of the sets that lack these ``rows``."""
        whole = size == self.rows_of[cell] if len(cell) else np.zeros(0, bool)
        _, first = np.unique(cell[whole], return_index=True)
        first = np.flatnonzero(whole)[first]
        first = first[self.empty[cell[first]] < 0]
        new = ~whole
        new[first] = True
        number = np.full(len(cell), -1)
        number[new] = self.count + np.arange(int(new.sum()))
        self.empty[cell[first]] = number[first]
        number[whole] = self.empty[cell[whole]]
        order = np.argsort(owner, kind="stable")
        _, entries = gather(starts(size), np.flatnonzero(new))
        self.cell.append(cell[new])
        self.removed.append(rows[order][entries])
        self.sizes.append(size[new])
        self.count += int(new.sum())
        return number

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.concatenate(self.cell),
            starts(np.concatenate(self.sizes)),
            np.concatenate(self.removed),
        )


def _by_row(
    entry_pair: Int[np.ndarray, " test_row"],
    several: Bool[np.ndarray, " test_row"],
    pair_cell: Int[np.ndarray, " pair"],
    kept: Int[np.ndarray, " pair"],
    cells: int,
    sets: int,
    folds: Folds,
    width: int,
) -> scipy.sparse.csr_array:
    """log p(row | globals, kept rows) of every test row."""
    entry = np.arange(len(entry_pair))
    paired, single = entry_pair >= 0, (entry_pair >= 0) & ~several
    added = cells + sets + np.cumsum(several) - 1
    return _matrix(
        (len(entry_pair), width),
        (entry[several], added[several], 1.0),
        (entry[single], pair_cell[entry_pair[single]], 1.0),
        (entry[paired], cells + kept[entry_pair[paired]], -1.0),
        (entry[~paired], width - folds.n + folds.test_rows[~paired], 1.0),
    )


def _positions(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Where values are in an ascending array that holds them."""
    return np.searchsorted(ordered, values)


def _matrix(
    shape: tuple[int, int], *parts: tuple[np.ndarray, np.ndarray, float]
) -> scipy.sparse.csr_array:
    line = np.concatenate([part[0] for part in parts])
    column = np.concatenate([part[1] for part in parts])
    value = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
    return scipy.sparse.csr_array((value, (line, column)), shape)


# ---------------------------------------------------------------- all of them at draws


@dataclass
class _Pass:
    """Sets that are integrated together, at most one of each cell: with nodes of their own.

    ``columns`` are theirs; ``derived_columns`` those of the derived sets ``used``, which are
    integrated with their nodes, and ``empty_columns`` those of no rows of the cells
    ``empty_cells``, which a formula gives.
    """

    keep: Bool[np.ndarray, " row"]
    cells: Int[np.ndarray, " set"]
    columns: Int[np.ndarray, " set"]
    derived: Derived = NOTHING
    used: Int[np.ndarray, " derived"] = field(default_factory=lambda: np.zeros(0, np.int64))
    derived_columns: Int[np.ndarray, " derived"] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    empty_cells: Int[np.ndarray, " set"] = field(default_factory=lambda: np.zeros(0, np.int64))
    empty_columns: Int[np.ndarray, " set"] = field(default_factory=lambda: np.zeros(0, np.int64))
    nodes: int = 0

    def spread(self, found: Integrals, values: np.ndarray) -> None:
        """Put integrals where they belong."""
        values[self.columns] = found.own[self.cells]
        values[self.empty_columns] = found.empty[self.empty_cells]
        values[self.derived_columns] = found.derived[self.used]


class Values:
    """All integrals and row densities that some folds need, at draws, a batch at a time.

    ``unsettled`` marks columns whose integrals no rule could be relied on for.
    """

    def __init__(
        self,
        model: Model,
        structure: Structure,
        needs: Needs,
        draws: Float[np.ndarray, "draw d"],
    ):
        self.model, self.structure, self.needs = model, structure, needs
        self.count = len(structure) + len(needs.cell) + len(needs.host)
        self.unsettled = np.zeros(self.count + model.n_obs, bool)
        self.tolerance = min(TOLERANCE, TOTAL_TOLERANCE / max(self.count, 1))
        self.bent, self.passes = False, list[_Pass]()
        if len(structure):
            some = np.linspace(0, len(draws) - 1, _LOOKED_AT).astype(int)
            self._settle(draws[np.unique(some)])

    def sums(
        self,
        matrices: Sequence[scipy.sparse.csr_array],
        draws: Float[np.ndarray, "draw d"],
        look: Callable[[Float[np.ndarray, "draw row"]], None] | None = None,
        density: Float[np.ndarray, " draw"] | None = None,
    ) -> list[Float[np.ndarray, "line draw"]]:
        """Products of matrices, whose columns are as in ``Needs``, with all values at the draws.

        ``look`` is shown the log densities of rows at all draws, a batch of these at a time;
        without it they are evaluated only if they are needed. ``density`` is room for the log
        posterior density of the globals given all rows, up to a constant.
        """
        found = [np.zeros((matrix.shape[0], len(draws))) for matrix in matrices]
        of_cells, of_rows = (
            [matrix[:, part] for matrix in matrices]
            for part in (slice(self.count), slice(self.count, None))
        )
        alone = self.structure.row_cell < 0
        with np.errstate(invalid="ignore"):  # no numbers where integrals are lost
            for part, values, of_globals in self.at(draws):
                for sums, matrix in zip(found, of_cells, strict=True):
                    sums[:, part] = matrix @ values
                if density is not None:
                    density[part] = of_globals
            needed = any(matrix.nnz for matrix in of_rows) or look is not None
            if not needed and (density is None or not alone.any()):
                return found
            for part, prior, rows in self._rows_at(draws):
                if look is not None:
                    look(rows)
                for sums, matrix in zip(found, of_rows, strict=True):
                    if matrix.nnz:
                        sums[:, part] += row_sums(matrix, rows)
                if density is not None:
                    before = density[part] if self.passes else prior
                    density[part] = before + rows[:, alone].sum(axis=1)
        return found

    def _rows_at(
        self, draws: Float[np.ndarray, "draw d"]
    ) -> Iterator[tuple[slice, Float[np.ndarray, " draw"], Float[np.ndarray, "draw row"]]]:
        """Log prior and log densities of rows, for one part of the draws after the other."""
        first = 0
        for prior, rows in rows_at(self.model, draws):
            yield slice(first, first + len(rows)), prior, rows
            first += len(rows)

    def at(
        self, draws: Float[np.ndarray, "draw d"]
    ) -> Iterator[tuple[slice, Float[np.ndarray, "column draw"], Float[np.ndarray, " draw"]]]:
        """All integrals, and the density of the globals given the rows of cells, part by part."""
        size = call_size(self.model)
        size = min(size, max(_VALUES // max(self.count, 1) // _MULTIPLE, 1) * _MULTIPLE)
        for first in range(0, len(draws) if self.passes else 0, size):
            part = draws[first : first + size]
            values, of_globals = np.empty((self.count, len(part))), np.empty(0)
            for step in self.passes:
                found = self._integrals(part, step, step.nodes)
                step.spread(found, values)
                if step is self.passes[0]:  # of all rows of every cell
                    of_globals = found.density()
                wrong = (found.failed | found.bent).any(axis=1)
                self.unsettled[step.columns] |= wrong[step.cells]
                self.unsettled[step.empty_columns] |= wrong[step.empty_cells]
                self.unsettled[step.derived_columns] |= wrong[step.derived.cell[step.used]]
            yield slice(first, first + len(part)), values, of_globals

    def _integrals(self, draws: np.ndarray, step: _Pass, size: int) -> Integrals:
        nodes = rule(size, int(self.structure.sizes.max()))
        return log_integrals(
            self.model, self.structure, draws, step.keep, nodes, step.derived, self.bent
        )

    # ------------------------------------------------ how each set is integrated

    def _settle(self, draws: Float[np.ndarray, "draw d"]) -> None:
        """Choose passes and their rules, by what agrees at some draws."""
        whole = self._whole()
        self.bent = bool(self._integrals(draws, whole, self._sizes[0]).bent.any())
        own_sets = np.arange(len(self.needs.cell))
        if not self.bent and not len(self.needs.host):
            empty = self._empty()
            whole.empty_cells, whole.empty_columns = self.needs.cell[empty], self._column(empty)
            own_sets = np.setdiff1d(own_sets, empty)
        own = self._own_passes(own_sets)
        if len(own) > _FEW_SETS and not len(self.needs.host):
            shared = self._share(draws, whole, own)
            own = self._own_passes(np.setdiff1d(own_sets, shared))
        self.passes = [whole, *own]
        for step in self.passes:
            self._choose_rule(draws, step)
        self._try_other_starts(draws)

    def _try_other_starts(self, draws: Float[np.ndarray, "draw d"]) -> None:
        """Mark sets whose integrals depend on where Newton steps began: there are several modes.

        They begin at the values that other cells have at other draws. What the constant of the
        prior is changes with the start, so integrals are taken relative to those of all rows.
        """
        rng = np.random.default_rng(0)
        found = []
        for start in (draws, exchanged(self.structure, draws, draws, rng)):
            values = np.full((self.count, len(draws)), np.nan)
            for step in self.passes:
                integrals = self._integrals(start, step, step.nodes)
                step.spread(integrals, values)
                values[step.columns[integrals.failed[step.cells].any(axis=1)]] = np.nan
            found.append(values)
        cells = len(self.structure)
        cell = np.concatenate([self.needs.cell, self.needs.cell[self.needs.host]])
        with np.errstate(invalid="ignore"):  # infinite where a rule fails
            one, two = (values[cells:] - values[cell] for values in found)
            several = (np.abs(one - two) > _ANOTHER_MODE).any(axis=1)
        self.unsettled[cells : self.count] |= several
        self.unsettled[cell[several]] = True

    def _empty(self) -> Int[np.ndarray, " set"]:
        """Sets that have no rows."""
        return np.flatnonzero(np.diff(self.needs.start) == self._rows_of()[self.needs.cell])

    def _rows_of(self) -> Int[np.ndarray, " cell"]:
        """Number of rows of each cell."""
        row_cell = self.structure.row_cell
        return np.bincount(row_cell[row_cell >= 0], minlength=len(self.structure))

    def _column(self, sets: Int[np.ndarray, " set"]) -> Int[np.ndarray, " set"]:
        return len(self.structure) + sets

    @property
    def _dimensions(self) -> int:
        return int(self.structure.sizes.max())

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Rules that are tried: one node is right where conditionals are normal."""
        return (1, *RULES[self._dimensions])

    def _whole(self) -> _Pass:
        """All rows of every cell."""
        cells = np.arange(len(self.structure))
        return _Pass(np.ones(self.model.n_obs, bool), cells, cells)

    def _own_passes(self, sets: Int[np.ndarray, " set"]) -> list[_Pass]:
        """The sets in as many passes as the cell with most of them has."""
        needs, cells = self.needs, len(self.structure)
        cell = needs.cell[sets]
        order = np.argsort(cell, kind="stable")
        first = np.searchsorted(cell[order], cell[order])
        turn = np.empty(len(sets), np.int64)
        turn[order] = np.arange(len(sets)) - first
        found = []
        room = self._added_room(sets, turn)
        for k in range(int(turn.max(initial=-1)) + 1):
            members = sets[turn == k]
            keep = np.ones(self.model.n_obs, bool)
            keep[needs.removed[gather(needs.start, members)[1]]] = False
            step = _Pass(keep, needs.cell[members], cells + members)
            found.append(self._with_added(step, members, room) if room else step)
        return found

    def _added_room(self, sets: np.ndarray, turn: np.ndarray) -> int:
        """The largest number of added sets of a pass: all passes get room for as many."""
        if not len(self.needs.host):
            return 0
        turn_of = np.zeros(len(self.needs.cell), np.int64)
        turn_of[sets] = turn
        return int(np.bincount(turn_of[self.needs.host]).max())

    def _with_added(self, step: _Pass, members: np.ndarray, room: int) -> _Pass:
        needs = self.needs
        added = np.flatnonzero(np.isin(needs.host, members))
        cell, row, owner = (np.zeros(room, np.int32) for _ in range(3))
        sign = np.zeros(room)
        cell[: len(added)], row[: len(added)] = needs.cell[needs.host[added]], needs.row[added]
        owner[:] = np.arange(room)
        sign[: len(added)] = 1.0
        step.derived, step.used = Derived(cell, row, owner, sign), np.arange(len(added))
        step.derived_columns = len(self.structure) + len(needs.cell) + added
        return step

    def _share(self, draws: np.ndarray, whole: _Pass, own: list[_Pass]) -> Int[np.ndarray, " set"]:
        """Let the nodes of all rows of a cell serve sets for which they do: shown at some draws."""
        needs = self.needs
        sets = np.flatnonzero(np.diff(needs.start) * 2 < self._rows_of()[needs.cell])
        if not len(sets):
            return sets
        start, entries = gather(needs.start, sets)
        row = needs.removed[entries].astype(np.int32)
        owner, sign = owners(start).astype(np.int32), np.full(len(row), -1.0)
        whole.derived = Derived(needs.cell[sets].astype(np.int32), row, owner, sign)
        whole.used, whole.derived_columns = np.arange(len(sets)), self._column(sets)
        theirs, values = (np.empty((self.count, len(draws))) for _ in range(2))
        sizes = RULES[self._dimensions]
        whole.spread(self._integrals(draws, whole, sizes[1]), theirs)
        for step in own:
            step.spread(self._integrals(draws, step, sizes[2]), values)
        off = np.abs(values[whole.derived_columns] - theirs[whole.derived_columns]).max(axis=1)
        whole.used = np.flatnonzero(off <= self.tolerance)
        whole.derived_columns = self._column(sets[whole.used])
        return sets[whole.used]

    def _alone(
        self,
        draws: np.ndarray,
        step: _Pass,
        values: np.ndarray,
        level: np.ndarray,
        columns: np.ndarray,
    ) -> bool:
        """Whether a wide rule finds no more than what was found: no second mode far away."""
        wide = WIDE[self._dimensions]
        if not wide:
            return True
        found = np.empty_like(values)
        step.spread(self._integrals(draws, step, wide[0]), found)
        with np.errstate(invalid="ignore"):
            more = (found[columns] - values[columns] > _ANOTHER_MODE).any(axis=1)
        level[columns[more]] = len(self._sizes)
        return not more.any()

    def _choose_rule(self, draws: np.ndarray, step: _Pass) -> None:
        """The smallest rule from which on larger ones agree, for all sets that can be settled."""
        sizes, narrow = self._sizes, 1 + len(HERMITE[self._dimensions])
        columns = np.concatenate([step.columns, step.derived_columns])
        before, values = np.empty((self.count, len(draws))), np.empty((self.count, len(draws)))
        step.spread(self._integrals(draws, step, sizes[0]), before)
        level = np.full(self.count, len(sizes))
        for k, size in enumerate(sizes[1:]):
            step.spread(self._integrals(draws, step, size), values)
            with np.errstate(invalid="ignore"):
                off = np.abs(values[columns] - before[columns])
            agree = (off <= self.tolerance) | (values[columns] == before[columns])
            level[columns] = np.where(agree.all(axis=1), np.minimum(level[columns], k), len(sizes))
            settled = (level[columns] < len(sizes)).all()
            if settled and (k + 1 >= narrow or self._alone(draws, step, values, level, columns)):
                break
            before[columns] = values[columns]
        settled = level[columns] < len(sizes)
        step.nodes = sizes[int(level[columns][settled].max(initial=0))]
        self.unsettled[columns[~settled]] = True


def row_sums(
    matrix: scipy.sparse.csr_array, density: Float[np.ndarray, "draw row"]
) -> Float[np.ndarray, "line draw"]:
    """The product of a matrix with the values of rows at draws, of which a draw's are together."""
    found = np.empty((matrix.shape[0], len(density)))
    size = max(_CACHED // density.shape[1], 8)
    for first in range(0, len(density), size):
        part = slice(first, first + size)
        found[:, part] = matrix @ density[part].T
    return found
