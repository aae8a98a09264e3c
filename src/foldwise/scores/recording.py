"""What is kept of the draws: running sums, log scores, contributions, predictions, positions."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from foldwise.folds.ragged import concatenated_ranges
from foldwise.models.model import Model
from foldwise.scores.evidence import (
    PASSED,
    Evidence,
    Ladder,
    Outcomes,
)
from foldwise.scores.hyvarinen import CURVATURE, full_curvature, log_weight_of, record_passed
from foldwise.scores.needs import contributions_of, observed_of
from foldwise.scores.rule import (
    Contribution,
)
from foldwise.scores.rules import (
    BELOW,
    RULES,
)
from foldwise.scores.sums import BlockSums
from foldwise.scores.units import drawn_of, unpadded


def begin(
    evidence: Evidence,
    model: Model,
    positions: Float[np.ndarray, "draw d"],
    names: tuple[str, ...],
    keep: tuple[str, ...],
    classes: Float[np.ndarray, " class"],
    draws: int,
) -> None:
    """Prepare ``evidence`` for what the scores ``names`` need, and for what is kept.

    ``positions`` are the full-data draws, ``draws`` how many are to be recorded of each chain.
    """
    folds, chains, batch = evidence.folds, evidence.standing.chains, evidence.sums.batch
    needed = contributions_of(names, folds)
    if "position" in keep:
        evidence.position = np.empty((len(folds), chains, 0, model.dimension))
    if not needed and "predictive" not in keep:
        return
    outcomes = Outcomes(observed_of(model, folds), classes)
    if outcomes.observed.ndim > 1:  # one number alone is below another
        needed = [contribution for contribution in needed if contribution is not BELOW]
    if "predictive" in keep or any(contribution.stored for contribution in needed):
        several = outcomes.observed.shape[1:]
        outcomes.replicate = np.empty((len(folds.test_rows), chains, 0, *several))
    for contribution in needed:
        if not contribution.stored:
            start = folds.test_start if contribution.by_row else np.arange(len(folds) + 1)
            outcomes.contributions[contribution.name] = BlockSums.empty(start, chains, batch)
    if CURVATURE in needed:
        outcomes.full_curvature = full_curvature(evidence, model, positions, chains * draws)
        if (evidence.previous >= 0).any():
            outcomes.contributions[PASSED] = BlockSums.empty(folds.test_start, chains, batch)
    evidence.outcomes = outcomes


def make_room(evidence: Evidence, draws: int) -> None:
    """Prepare to record ``draws`` more draws of every chain."""
    evidence.ladder, outcomes = Ladder(), evidence.outcomes
    if evidence.draws is not None:
        evidence.draws = _longer(evidence.draws, draws)
    if evidence.position is not None:
        evidence.position = _longer(evidence.position, draws)
    if outcomes is not None and outcomes.replicate is not None:
        outcomes.replicate = _longer(outcomes.replicate, draws)


def _longer(stored: np.ndarray, draws: int) -> np.ndarray:
    """Stored draws, on the third axis, with room for ``draws`` more."""
    room = np.empty((*stored.shape[:2], draws, *stored.shape[3:]))
    return np.concatenate([stored, room], axis=2)


def record(
    evidence: Evidence,
    members: Int[np.ndarray, " fold"],
    scores: Float[np.ndarray, "fold chain draw target ..."],
    watched: Float[np.ndarray, "fold chain draw direction"],
    extras: dict[str, Float[np.ndarray, "fold chain draw ..."]],
) -> None:
    """Add consecutive draws of the folds ``members``, all of which have as many so far.

    ``scores`` are log densities of the targets' test rows, their sums or row by row. ``watched``
    are the directions that are watched, ``extras`` what else the scores and ``keep`` asked for.
    """
    joint, rows = scores, None
    if scores.ndim == 5:
        rows = unpadded(scores[:, :, :, 0], evidence.folds.n_test[members])
        joint = scores.sum(axis=-1)
    first = int(evidence.sums.draws[members[0]])
    part = slice(first, first + joint.shape[2])
    if evidence.draws is not None:
        evidence.draws[members, :, part] = joint
    if evidence.position is not None:
        evidence.position[members, :, part] = extras["position"]
        extras = {name: values for name, values in extras.items() if name != "position"}
    if evidence.outcomes is not None:
        _record_outcomes(evidence, evidence.outcomes, members, part, joint, rows, extras)
    evidence.sums.update(members, joint, rows)
    evidence.pace.watch.update(members, watched)


def _record_outcomes(
    evidence: Evidence,
    outcomes: Outcomes,
    members: Int[np.ndarray, " fold"],
    part: slice,
    joint: Float[np.ndarray, "fold chain draw target"],
    rows: Float[np.ndarray, "row chain draw"] | None,
    extras: dict[str, Float[np.ndarray, "fold chain draw ..."]],
) -> None:
    """Add the draws ``part`` of the folds ``members`` to what rules keep."""
    folds = evidence.folds
    by_row = {name: _by_row(name, values, folds.n_test[members]) for name, values in extras.items()}
    drawn = drawn_of(folds, outcomes, members, by_row, evidence.sums.length)
    if outcomes.replicate is not None:
        entries = concatenated_ranges(folds.test_start, members)
        outcomes.replicate[entries, :, part] = by_row["replicate"]
    for contribution in _online(outcomes):
        log_weight = None
        if contribution.weights == "row":
            log_weight = joint[..., 0] if rows is None else rows  # one row is the test set
        elif contribution.weights == "joint":
            of_fold = log_weight_of(outcomes, evidence.partner, members, joint[..., 0])
            log_weight = np.repeat(of_fold, drawn.counts, axis=0)
        sums = outcomes.contributions[contribution.name]
        sums.update(members, contribution.features(drawn), log_weight)
    if PASSED in outcomes.contributions:
        record_passed(evidence, outcomes, members, joint, extras)


def _online(outcomes: Outcomes) -> list[Contribution]:
    """Contributions that are kept as running sums."""
    known = {r.contribution.name: r.contribution for r in RULES.values() if r.contribution}
    known[BELOW.name] = BELOW
    return [known[name] for name in outcomes.contributions if name != PASSED]


def _by_row(name: str, values: np.ndarray, counts: Int[np.ndarray, " fold"]) -> np.ndarray:
    """What was recorded of each test row: of the fold's own rows.

    Classes, or the numbers of a row where it has several, are the last axis.
    """
    if name == "probability":
        return np.stack([unpadded(part, counts) for part in np.moveaxis(values, 3, 0)], axis=-1)
    if name != "replicate":
        return unpadded(values[:, :, :, 0], counts)
    if values.ndim == 4:
        return unpadded(values, counts)
    return np.stack([unpadded(part, counts) for part in np.moveaxis(values, 4, 0)], axis=-1)
