"""What scores of folds need of every full-data draw, in pieces of draws: here, or by workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import concatenated_ranges, owners
from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.cell_sets import Needs, Values, needs_of, row_sums
from foldwise.scores.dependent import given_training
from foldwise.scores.needs import Emit, observed_of
from foldwise.scores.weighing import FullSample, Predictions, arrays_held, recorded_at
from foldwise.support.keeping import Finished
from foldwise.support.workers import Job, Members, Workers, chunks, halved, in_turn

# Draws of a piece at least: programs take as many at once.
_LEAST_DRAWS = 64


class Evaluated(NamedTuple):
    """m and t of every fold, t of every test row, full-data scores, and folds in doubt.

    For draws of a proposal, m is relative to that.
    """

    left_out: Float[np.ndarray, "fold draw"]
    tested: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, "row draw"] | None
    full_folds: Float[np.ndarray, " fold"]
    full_rows: Float[np.ndarray, " row"]
    cut_off: Bool[np.ndarray, " fold"]
    unsettled: Bool[np.ndarray, " fold"]
    predictions: Predictions | None = None

    def of(self, block: Int[np.ndarray, " fold"], folds: Folds) -> Evaluated:
        """The same of some folds."""
        entries = concatenated_ranges(folds.test_start, block)
        return Evaluated(
            self.left_out[block],
            self.tested[block],
            None if self.rows is None else self.rows[entries],
            self.full_folds[block],
            self.full_rows[entries],
            self.cut_off[block],
            self.unsettled[block],
            None if self.predictions is None else self.predictions.of(entries),
        )


@dataclass(frozen=True)
class Asked:
    """What is evaluated for some folds; without ``values``, rows depend on each other.

    ``full`` says whether the draws are the full data's, whose own scores are wanted too.
    """

    model: Model
    folds: Folds
    emit: Emit
    seed: int
    full: bool
    values: Values | None

    @classmethod
    def of(
        cls,
        model: Model,
        structure: Structure,
        folds: Folds,
        positions: Float[np.ndarray, "draw d"],
        emit: Emit,
        seed: int,
        full: bool,
    ) -> Asked:
        """The integrals that the folds need, with rules that agree at some of the draws."""
        values = None
        if model.joint_log_likelihood is None:
            values = Values(model, structure, needs_of(structure, folds, emit.by_row), positions)
        return cls(model, folds, emit, seed, full, values)

    @property
    def hopeless(self) -> bool:
        """Whether all folds need integrals that cannot be relied on."""
        values = self.values
        return values is not None and bool(
            _touched(values.needs, values.unsettled, self.folds).all()
        )

    @property
    def alike(self) -> bool:
        """Whether m and t are the same: what is left out is what is tested."""
        needs = None if self.values is None else self.values.needs
        return needs is not None and (needs.left_out != needs.tested).nnz == 0


class _AtDraws(NamedTuple):
    """What is known of some draws.

    ``by_draw`` has numbers of folds or test rows at each of them; ``full_folds`` and ``full_rows``
    are logs of sums over them of densities; ``unsettled`` marks integrals in doubt.
    """

    by_draw: dict[str, Float[np.ndarray, "unit draw ..."]]
    full_folds: Float[np.ndarray, " fold"]
    full_rows: Float[np.ndarray, " row"]
    unsettled: Bool[np.ndarray, " column"]


def evaluated(
    asked: Asked,
    classes: Float[np.ndarray, " class"],
    draws: FullSample,
    impossible: Bool[np.ndarray, " row"],
    finished: Finished,
    advance: Callable[[int], None],
) -> Evaluated:
    """What is needed of some folds, at all draws, whose pieces ``finished`` keeps."""
    folds, count = asked.folds, len(draws.positions)
    found = _at_all(asked, draws.positions, finished, advance)
    m = found.by_draw.pop("left_out")
    t = found.by_draw.pop("tested", m)
    rows = found.by_draw.pop("rows", None)
    given = None
    if arrays_held(asked.emit):
        given = Predictions(observed_of(asked.model, folds), classes, found.by_draw)
    start, left_out = folds.left_out
    cut_off = np.bincount(owners(start), impossible[left_out], minlength=len(folds)) > 0
    unsettled = np.zeros(len(folds), bool)
    if asked.values is not None:
        unsettled = _touched(asked.values.needs, found.unsettled, folds)
    full_folds, full_rows = found.full_folds - np.log(count), found.full_rows - np.log(count)
    if draws.proposed is not None:
        m = m + draws.proposed - found.by_draw.pop("density")[0]
    return Evaluated(m, t, rows, full_folds, full_rows, cut_off, unsettled, given)


def nothing_known(asked: Asked, draws: int) -> Evaluated:
    """The record of folds none of whose integrals can be relied on: nothing is evaluated."""
    folds = asked.folds
    m, tests = np.full((len(folds), draws), np.nan), len(folds.test_rows)
    rows = np.full((tests, draws), np.nan) if asked.emit.by_row else None
    unknown, nothing = np.full(len(folds), np.nan), np.zeros(len(folds), bool)
    return Evaluated(m, m, rows, unknown, np.full(tests, np.nan), nothing, ~nothing)


def _at_all(
    asked: Asked,
    positions: Float[np.ndarray, "draw d"],
    finished: Finished,
    advance: Callable[[int], None],
) -> _AtDraws:
    """The pieces of draws put together; what was given up is no number."""
    folds, count = asked.folds, len(positions)

    def cut(left: Members, by: Workers | None) -> list[Members]:
        return chunks(left, count if by is None else max(by.size(len(left)), _LEAST_DRAWS))

    def name(some: Members) -> str:
        return f"{len(some)} draws of {len(folds)} folds"

    def parcel(some: Members) -> tuple[Float[np.ndarray, "draw d"], Members]:
        return positions if len(some) == count else positions[some], some

    job = Job(_at_draws, asked, parcel, halved, name)
    parts: dict[int, _AtDraws] = {}
    room: dict[str, np.ndarray] = {}
    lost = []
    for some, found in in_turn(job, np.arange(count), cut, finished):
        advance(len(folds) * len(some))
        if found is None:
            lost.append(some)
            continue
        if len(some) == count:
            return found
        for key, values in found.by_draw.items():
            shape = (len(values), count, *values.shape[2:])
            room.setdefault(key, np.full(shape, np.nan))[:, some] = values
        parts[int(some[0])] = found._replace(by_draw={})
    if not parts:
        raise RuntimeError(
            f"importance weights of {len(folds)} folds could not be had: no worker could do any "
            "piece of the draws, as the warnings say; mend that, or leave executor out"
        )
    # in the order of the draws, whoever came first
    ordered = [parts[first] for first in sorted(parts)]
    full_folds, full_rows = ordered[0][1:3]
    with np.errstate(invalid="ignore"):  # no numbers where rows are of no use
        for part in ordered[1:]:
            full_folds = np.logaddexp(full_folds, part.full_folds)
            full_rows = np.logaddexp(full_rows, part.full_rows)
    nothing = np.nan if lost else 0.0
    unsettled = np.any([part.unsettled for part in ordered], axis=0)
    return _AtDraws(room, full_folds + nothing, full_rows + nothing, unsettled)


# ---------------------------------------------------------------- some draws


def _at_draws(
    asked: Asked, some: tuple[Float[np.ndarray, "draw d"], Int[np.ndarray, " draw"]]
) -> _AtDraws:
    """What is asked for at draws with their numbers."""
    positions, numbers = some
    if asked.values is None:
        found = _jointly(asked, positions)
    else:
        found = _of_values(asked, asked.values, positions)
    if arrays_held(asked.emit):
        model, folds, emit = asked.model, asked.folds, asked.emit
        found.by_draw.update(recorded_at(model, emit, folds, positions, numbers, asked.seed))
    return found


def _of_values(asked: Asked, values: Values, positions: Float[np.ndarray, "draw d"]) -> _AtDraws:
    """Sums of integrals and of row densities."""
    folds, needs = asked.folds, values.needs
    named = {"left_out": needs.left_out, "tested": needs.tested, "rows": needs.by_row}
    if asked.alike:
        del named["tested"]
    wanted = {name: matrix for name, matrix in named.items() if matrix is not None}
    full = _FullScores(folds, asked.full, asked.full and needs.by_row is not None)
    look = full.add if asked.full else None
    density = None if asked.full else np.empty(len(positions))
    found = values.sums(list(wanted.values()), positions, look, density)
    by_draw = dict(zip(wanted, found, strict=True))
    by_draw |= {} if density is None else {"density": density[None]}
    return _AtDraws(by_draw, full.folds, full.rows[folds.test_rows], values.unsettled.copy())


class _FullScores:
    """Logs of sums over draws of densities of folds' test rows, and of each row; or no numbers."""

    def __init__(self, folds: Folds, known: bool, by_row: bool):
        entries = (np.ones(len(folds.test_rows)), folds.test_rows, folds.test_start)
        self.test = scipy.sparse.csr_array(entries, (len(folds), folds.n))
        self.folds = np.full(len(folds), -np.inf if known else np.nan)
        self.rows, self.by_row = np.full(folds.n, -np.inf if by_row else np.nan), by_row

    def add(self, density: Float[np.ndarray, "draw row"]) -> None:
        self.folds = np.logaddexp(self.folds, _log_sums(row_sums(self.test, density)))
        if self.by_row:  # of no use without scores by row
            self.rows = np.logaddexp(self.rows, _log_sums(density.T))


def _log_sums(values: Float[np.ndarray, "line draw"]) -> Float[np.ndarray, " line"]:
    """log of sum exp over draws, without SciPy's checks, which take most of its time here."""
    top = values.max(axis=1)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - safe[:, None]).sum(axis=1)) + safe


def _jointly(asked: Asked, positions: Float[np.ndarray, "draw d"]) -> _AtDraws:
    """The same where rows depend on each other; what the full data say of rows is not known."""
    found = given_training(asked.model, asked.folds, positions, asked.emit.by_row)
    by_draw = {"left_out": found.left_out, "tested": found.tested}
    by_draw |= {} if found.rows is None else {"rows": found.rows}
    if not asked.full and found.every_row is not None:
        prior = np.concatenate([prior for prior, _ in rows_at(asked.model, positions)])
        by_draw["density"] = (found.every_row + prior)[None]
    full = scipy.special.logsumexp(found.tested, axis=1)
    unknown = np.full(len(asked.folds.test_rows), np.nan)
    return _AtDraws(by_draw, full, unknown, np.zeros(0, bool))


def _touched(needs: Needs, unsettled: Bool[np.ndarray, " column"], folds: Folds) -> np.ndarray:
    """Folds that need an integral that is not settled."""
    marks = unsettled.astype(float)
    found = (abs(needs.left_out) @ marks > 0) | (abs(needs.tested) @ marks > 0)
    if needs.by_row is not None:
        of_row = abs(needs.by_row) @ marks > 0
        found |= np.logical_or.reduceat(of_row, folds.test_start[:-1])
    return found
