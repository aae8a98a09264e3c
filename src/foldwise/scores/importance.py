"""Scores of folds from the full-data draws alone: importance sampling, cells integrated out.

With m and t of ``cell_sets.py``, the posterior of a fold has the weights w = exp(-m) at the
full-data draws, which Pareto smoothing (``smoothing.py``) makes w', and

    log p(test rows | training rows) = log A / B,  A = mean of w' exp(t), B = mean of w'.

Its Monte Carlo error is that of the draws, which all folds share: draw s has the influence
w'_s exp(t_s) / A - w'_s / B. Influences are added over folds before their variance is taken by
batch means. The log of a mean is too low by half of the mean's relative variance, so half of that
of A is added and half of that of B taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import in_pieces, owners
from foldwise.models.evaluate import rows_at
from foldwise.models.model import Model
from foldwise.models.structure import Structure
from foldwise.scores.at_draws import Asked, Evaluated, evaluated, nothing_known
from foldwise.scores.diagnostics import ESS_LIMIT
from foldwise.scores.needs import classes_of, emitted
from foldwise.scores.rules import LOG_SCORES
from foldwise.scores.smoothing import EVEN, smoothed, uneven, worth
from foldwise.scores.weighing import (
    FullSample,
    Scored,
    Weighed,
    Weights,
    arrays_held,
    calibration,
    weighed,
)
from foldwise.support.keeping import Finished, Keeper, keeper
from foldwise.support.memory import most_values
from foldwise.support.workers import Job, Members, Workers, halved, in_turn

_NO_DRAWS = FullSample(np.zeros((0, 0)), 1, 1)
# Folds, and test rows where scores are by row, times draws that are held at once (8 bytes each), if
# the draws themselves have no more numbers, and the share of a limit of memory that they may take.
VALUES, VALUES_SHARE = 2**25, 0.06
# The same of what is smoothed at once, in several arrays that should stay in the cache.
_BLOCK_VALUES = 2**20
# Relative differences that are no more than rounding.
_ROUNDING = 1e-13
# How much farther than the draws, and from how many of them, rows of density zero are looked for.
_WIDER, _WIDER_DRAWS = 2.0, 200


@dataclass(frozen=True)
class Importance:
    """Scores of folds by importance sampling.

    ``pareto_k`` is the shape of the tail of each fold's weights, ``weight_ess`` how many equal
    weights are expected to be worth as much. ``cut_off`` says that a left-out row has density zero
    close to the draws, ``unsettled`` that integrals of the fold cannot be relied on.
    ``used`` are the folds that the scores are for: all, or those that are reliable, and ``own``
    those of them that have draws of their own (``sampling/refits.py``). ``folds`` has the scores by
    name, ``rows`` those that are by row. ``influence`` is, by score, what each draw
    adds to the weighted sum over the folds used, and ``own_variance`` the variance of that sum that
    own draws add. ``observed`` are the test rows' values, where
    scores need them, and ``calibration`` is theirs, where they were simulated. ``full_folds`` and
    ``full_rows`` are the log densities of the same folds and rows by the full-data posterior
    itself.
    """

    draws: FullSample
    structure: Structure
    pareto_k: Float[np.ndarray, " fold"]
    weight_ess: Float[np.ndarray, " fold"]
    cut_off: Bool[np.ndarray, " fold"]
    unsettled: Bool[np.ndarray, " fold"]
    used: Bool[np.ndarray, " fold"]
    own: Bool[np.ndarray, " fold"]
    folds: dict[str, Scored]
    rows: dict[str, Scored]
    influence: dict[str, Float[np.ndarray, " draw"]]
    own_variance: dict[str, float]
    observed: Float[np.ndarray, " row"]
    calibration: dict[str, np.ndarray] | None
    full_folds: Float[np.ndarray, " fold"]
    full_rows: Float[np.ndarray, " row"]


def by_importance(
    model: Model,
    structure: Structure,
    folds: Folds,
    draws: FullSample,
    scores: tuple[str, ...],
    everything: bool,
    seed: int = 0,
    least: float = EVEN,
    advance: Callable[[int], None] = lambda values: None,
) -> Importance:
    """Scores of the folds from full-data draws; other than log scores only without cells.

    ``everything`` asks for all folds; else only those are used for which the weights and integrals
    can be relied on, weights that are worth at least the share ``least`` of the draws. ``seed`` is
    that of simulated values. ``advance`` is told how many numbers are known of all folds times all
    draws.
    """
    positions = draws.positions
    classes = classes_of(model, scores, positions)
    emit = emitted(scores, (), folds, model, classes)
    impossible = _impossible_rows(model, draws)
    held = emit.by_row + arrays_held(emit)
    sizes = 1 + (held * folds.n_test if held else np.zeros(len(folds), np.int64))

    def scored(piece: Int[np.ndarray, " fold"], stages: list[Finished]) -> list[Importance]:
        """Records of some folds, block by block, without the draws, which all share."""
        some = folds[piece]
        asked = Asked.of(model, structure, some, positions, emit, seed, draws.proposed is None)
        if asked.hopeless and not everything:
            found = nothing_known(asked, len(positions))  # all get chains
        else:
            found = evaluated(asked, classes, draws, impossible, stages[0], advance)
        none = draws._replace(positions=positions[:, :0])
        how = _How(none, structure, scores, everything, least, some)
        return _blocks(how, found, sizes[piece], stages[1])

    parts, keeps = list[Importance](), keeper() if draws.proposed is None else Keeper()
    for piece in in_pieces(sizes, held_at_once(*positions.shape) // len(positions)):
        stages = [Finished(keeps, "integrals"), Finished(keeps, "smoothed")]
        parts += keeps.made("weights", partial(scored, piece, stages))
        for stage in stages:
            stage.forget()
    return replace(_joined(parts), draws=draws)


def held_at_once(draws: int, dimension: int) -> int:
    """How many numbers of folds at draws are held at once.

    A piece of the folds needs the integrals of all cells: no more pieces than memory asks for.
    """
    return most_values(max(VALUES, draws * dimension), VALUES_SHARE)


class _How(NamedTuple):
    """How folds are scored from what was evaluated of them; of the draws their number counts."""

    draws: FullSample
    structure: Structure
    scores: tuple[str, ...]
    everything: bool
    least: float
    folds: Folds


def _blocks(
    how: _How, found: Evaluated, sizes: Int[np.ndarray, " fold"], finished: Finished
) -> list[Importance]:
    """Records of blocks of consecutive folds, in order, which ``finished`` keeps."""
    most = _BLOCK_VALUES // len(how.draws.positions)

    def cut(left: Members, by: Workers | None) -> list[Members]:
        limit = most if by is None else min(most, by.size(int(sizes.sum())))
        gaps = np.flatnonzero(np.diff(left) > 1) + 1
        return [
            some[block] for some in np.split(left, gaps) for block in in_pieces(sizes[some], limit)
        ]

    def parcel(block: Members) -> tuple[Members, Evaluated]:
        return block, found.of(block, how.folds)

    job = Job(_block, how, parcel, halved, lambda block: f"{len(block)} folds")
    records: dict[int, Importance] = {}
    for block, record in in_turn(job, np.arange(len(how.folds)), cut, finished):
        if record is None:
            lost = found.of(block, how.folds)
            lost.left_out[:] = np.nan
            record = _block(how, (block, lost))
        records[int(block[0])] = record
    return [records[first] for first in sorted(records)]


def _block(how: _How, block: tuple[Members, Evaluated]) -> Importance:
    """Scores of some folds from what was evaluated for them."""
    (members, found), (draws, structure, scores, everything, least, every) = block, how
    folds = every[members]
    weight, k = smoothed(found.left_out)
    # weights of other draws than the full data's are bounded, and far from log-normal
    expected = found.left_out if draws.proposed is None else None
    weight_ess = worth(weight, expected)
    joint, influence = _ratio(weight, found.tested, draws)
    finite = np.isfinite(joint.value)
    used = np.ones(len(folds), bool)
    if not everything:
        even = ~uneven(k, weight_ess, len(draws.positions), least)
        used = finite & even & (weight_ess >= ESS_LIMIT)
        used &= ~found.cut_off & ~found.unsettled
    weights, counted = Weights(weight, found.tested, found.rows), used & finite
    scored = {}
    for name in scores:
        if name not in LOG_SCORES and found.predictions is not None:
            scored[name] = weighed(name, found.predictions, folds, draws, weights, counted)
        elif name == "log_pointwise" and found.rows is not None:
            scored[name] = _by_row(weight, found.rows, folds, draws, counted)
        else:
            scored[name] = Weighed(joint, None, folds.fold_weight[counted] @ influence[counted])
    given = found.predictions
    return Importance(
        _NO_DRAWS,
        structure,
        k,
        weight_ess,
        found.cut_off,
        found.unsettled,
        used,
        np.zeros(len(folds), bool),
        {name: score.folds for name, score in scored.items()},
        {name: score.rows for name, score in scored.items() if score.rows is not None},
        {name: score.influence for name, score in scored.items()},
        dict.fromkeys(scored, 0.0),
        np.zeros(0) if given is None else given.observed,
        None if given is None else calibration(given, folds, draws, weights),
        found.full_folds,
        found.full_rows,
    )


def _impossible_rows(model: Model, draws: FullSample) -> Bool[np.ndarray, " row"]:
    """Rows whose density is zero, or no number, close to the draws.

    Looked at where draws would be if they scattered ``_WIDER`` times as far from their mean. The
    posterior without such a row may be where no draw of the posterior with it can ever be.
    """
    some = np.linspace(0, len(draws.positions) - 1, _WIDER_DRAWS).astype(int)
    centre = draws.positions.mean(axis=0)
    wider = centre + _WIDER * (draws.positions[np.unique(some)] - centre)
    found = np.zeros(model.n_obs, bool)
    for _, rows in rows_at(model, wider):
        found |= ~np.isfinite(rows).all(axis=0)
    return found


def _ratio(
    weight: Float[np.ndarray, "unit draw"], t: Float[np.ndarray, "unit draw"], draws: FullSample
) -> tuple[Scored, Float[np.ndarray, "unit draw"]]:
    """log of sum w exp(t) / sum w for log weights that sum to one, and the draws' influences."""
    count = weight.shape[1]
    with np.errstate(invalid="ignore"):
        value = scipy.special.logsumexp(weight + t, axis=1)
        above = np.exp(weight + t - value[:, None]) * count
        below = np.exp(weight) * count
        correction = 0.5 * (draws.variance(above) - draws.variance(below))
        above -= below
        # the same at every draw: what is left is rounding
        above[np.ptp(t, axis=1) <= _ROUNDING * np.abs(t[:, 0])] = 0.0
        found = Scored(value + correction, draws.variance(above), above.var(axis=1, ddof=1))
    return found, above


def _by_row(
    weight: Float[np.ndarray, "fold draw"],
    rows: Float[np.ndarray, "row draw"],
    folds: Folds,
    draws: FullSample,
    used: Bool[np.ndarray, " fold"],
) -> Weighed:
    """Sums over each fold's test rows, the test rows, and the total's influences.

    Rows of a fold share its weights, so their influences are added before variances are taken.
    """
    fold = owners(folds.test_start)
    of_rows, influence = _ratio(weight[fold], rows, draws)
    value = np.add.reduceat(of_rows.value, folds.test_start[:-1])
    summed = np.add.reduceat(influence, folds.test_start[:-1], axis=0)
    of_folds = Scored(value, draws.variance(summed), summed.var(axis=1, ddof=1))
    keep = used[fold]
    return Weighed(of_folds, of_rows, folds.test_weight[keep] @ influence[keep])


def _joined(parts: list[Importance]) -> Importance:
    """One record of the folds of all parts, which have the same draws."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    def scored(name: str) -> dict[str, Scored]:
        by_part = [getattr(part, name) for part in parts]
        return {key: _end_to_end([found[key] for found in by_part]) for key in by_part[0]}

    first = parts[0]
    calibrations = [part.calibration for part in parts if part.calibration is not None]
    return Importance(
        first.draws,
        first.structure,
        joined("pareto_k"),
        joined("weight_ess"),
        joined("cut_off"),
        joined("unsettled"),
        joined("used"),
        joined("own"),
        scored("folds"),
        scored("rows"),
        {key: np.sum([part.influence[key] for part in parts], axis=0) for key in first.influence},
        dict.fromkeys(first.influence, 0.0),
        joined("observed"),
        {key: np.concatenate([one[key] for one in calibrations]) for key in calibrations[0]}
        if calibrations
        else None,
        joined("full_folds"),
        joined("full_rows"),
    )


def _end_to_end(parts: list[Scored]) -> Scored:
    names = ("value", "variance", "spread")
    return Scored(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
