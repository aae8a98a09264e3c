"""From what was recorded by row or fold to scores by fold and their variances."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import concatenated_ranges
from foldwise.scores.diagnostics import batch_means_variance
from foldwise.scores.evidence import (
    Estimate,
    Evidence,
    FullCurvature,
    Outcomes,
    RowScores,
    Standing,
    fold_variance,
)
from foldwise.scores.rule import (
    Contribution,
    Drawn,
    Sample,
    by_number,
)

# Values of stored predictive draws that are worked on at once: about 32 MB an array.
_CHUNK = 2**22


def drawn_of(
    folds: Folds,
    outcomes: Outcomes,
    members: Int[np.ndarray, " fold"],
    by_row: dict[str, np.ndarray],
    batch: int,
) -> Drawn:
    """What was recorded of the test rows of the folds ``members``, as contributions take it."""
    entries = concatenated_ranges(folds.test_start, members)
    drawn = Drawn(
        counts=folds.n_test[members],
        observed=outcomes.observed[entries],
        recorded=by_row,
        width=int(folds.n_test.max()),
        classes=outcomes.classes,
        batch=batch,
    )
    return by_number(drawn)


def unpadded(
    values: Float[np.ndarray, "fold chain draw slot"], counts: Int[np.ndarray, " fold"]
) -> Float[np.ndarray, "row chain draw"]:
    """Rows of all folds one after the other, without the slots that pad them."""
    valid = np.arange(values.shape[-1]) < counts[:, None]
    return np.moveaxis(values, -1, 1)[valid]


def sample_of(evidence: Evidence, outcomes: Outcomes, contribution: Contribution) -> Sample:
    """Block sums of a contribution over all draws so far."""
    now = evidence.standing
    total = (
        _stored_total(evidence.folds, now, outcomes, contribution)
        if contribution.stored
        else outcomes.contributions[contribution.name].total
    )
    sizes = evidence.folds.n_test if contribution.by_row else 1
    joined = np.repeat(now.joined, sizes)
    return Sample(total, now.length, now.draws, now.full_blocks, joined)


def _stored_total(
    folds: Folds, now: Standing, outcomes: Outcomes, contribution: Contribution
) -> Float[np.ndarray, "unit chain block feature"]:
    """Block sums from stored predictive draws, some folds at a time."""
    stored, found, first = outcomes.stored(), [], 0
    step = max(1, _CHUNK // (now.count * outcomes.numbers_in_row))
    edges = np.arange(0, now.draws, now.length)
    while first < len(folds):
        last = int(np.searchsorted(folds.test_start, folds.test_start[first] + step, "right")) - 1
        members = np.arange(first, max(last, first + 1))
        entries = concatenated_ranges(folds.test_start, members)
        drawn = drawn_of(folds, outcomes, members, {"replicate": stored[entries]}, now.length)
        features = contribution.features(drawn)
        found.append(np.add.reduceat(features, edges, axis=2))
        first = int(members[-1]) + 1
    return np.concatenate(found)


class FullSide(NamedTuple):
    """Influences of blocks of full-data draws on the rows, and the sums that they are of."""

    influence: Float[np.ndarray, "row chain block"]
    sums: FullCurvature


def assembled(
    evidence: Evidence,
    name: str,
    value: Float[np.ndarray, " unit"],
    influence: Float[np.ndarray, "unit chain block"],
    by_row: bool,
    from_folds: Float[np.ndarray, "row chain block"] | None = None,
    from_full: FullSide | None = None,
    unit_weight: Float[np.ndarray, " unit"] | None = None,
) -> Estimate:
    """Scores by fold and their variances, from those of their rows or their own.

    ``from_folds`` and ``from_full`` are influences of the draws of partners, folds or the full
    data; ``unit_weight`` the weights in the total, if not those of the rows or folds.
    """
    folds, k = evidence.folds, len(evidence.folds)
    sizes = folds.n_test if by_row else np.ones(k, int)
    start = folds.test_start[:-1] if by_row else np.arange(k)
    finite = np.isfinite(np.add.reduceat(value, start)) & ~evidence.standing.undefined
    score = np.where(finite, np.add.reduceat(value, start), np.nan)
    if unit_weight is None:
        unit_weight = folds.test_weight if by_row else folds.fold_weight
    unit_weight = np.where(np.repeat(finite, sizes), unit_weight, 0.0)
    of_fold = partial(_of_fold, start)
    passed = np.zeros((k, *influence.shape[1:]))
    fold, other = np.arange(k), _other_fold(evidence)
    variance = evidence.variance_of(of_fold(influence))
    row_variance = evidence.variance_of(influence, np.repeat(fold, sizes))
    if from_folds is not None:
        variance += evidence.variance_of(of_fold(from_folds), other)
        row_variance += evidence.variance_of(from_folds, np.repeat(other, sizes))
        passed = _moved(evidence, -of_fold(from_folds, unit_weight))
    shared, full_part = np.zeros(0), 0.0
    if from_full is not None and (evidence.partner == k).any():
        full = from_full.sums
        total = of_fold(from_full.influence, unit_weight).sum(axis=0)
        of_full = partial(batch_means_variance, length=full.length, draws=full.draws)
        variance += of_full(of_fold(from_full.influence))
        row_variance += of_full(from_full.influence)
        full_part, shared = float(of_full(total)), _by_draw(total, full)
    # weights are in the influences already; a fold whose score is left out still serves another
    weighted = of_fold(influence, unit_weight)
    return Estimate(
        name=name,
        score=score,
        variance=variance,
        own_variance=fold_variance(evidence, np.ones(k), weighted, passed),
        full_influence=shared,
        full_variance=full_part,
        spread=np.full(k, np.nan),
        noise=np.full(k, np.nan),
        overlap=np.full(k, np.nan),
        bridged=np.zeros(k, bool),
        full_score=np.full(k, np.nan),
        weight=np.where(finite, folds.fold_weight, 0.0),
        stranded=np.zeros(k, bool),
        unsettled=np.zeros(k, bool),
        rows=RowScores(value, row_variance, row_variance) if by_row else None,
        weighted=from_folds is not None,
    )


def _of_fold(
    start: Int[np.ndarray, " fold"], blocks: np.ndarray, weight: np.ndarray | float = 1.0
) -> np.ndarray:
    """Influences on the weighted sums of each fold's units, whose first are at ``start``."""
    blocks = np.where(np.isfinite(blocks), blocks, 0.0)
    return np.add.reduceat(np.reshape(weight, (-1, 1, 1)) * blocks, start)


def _by_draw(
    blocks: Float[np.ndarray, "chain block"], full: FullCurvature
) -> Float[np.ndarray, " draw"]:
    """Influences of blocks of full-data draws as those of each draw, chain after chain."""
    found = np.zeros((len(blocks), full.draws))
    found[:, : blocks.shape[1] * full.length] = np.repeat(blocks, full.length, axis=1)
    return found.ravel()


def _other_fold(evidence: Evidence) -> Int[np.ndarray, " fold"]:
    """The fold that is each fold's partner; the fold itself where its partner is no fold."""
    other = evidence.partner
    from_fold = (other >= 0) & (other < len(other))
    return np.where(from_fold, other, np.arange(len(other)))


def _moved(
    evidence: Evidence, influence: Float[np.ndarray, "fold chain block"]
) -> Float[np.ndarray, "fold chain block"]:
    """Influences on each fold's score, moved to the folds whose draws they are of."""
    moved = np.zeros_like(influence)
    serves = evidence.previous >= 0
    moved[serves] = influence[evidence.previous[serves]]
    return moved
