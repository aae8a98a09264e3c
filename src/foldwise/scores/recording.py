"""What rules keep of the draws: running sums of contributions, predictive draws, positions."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from foldwise.folds.ragged import concatenated_ranges
from foldwise.models.model import Model
from foldwise.scores.evidence import (
    PASSED,
    Evidence,
)
from foldwise.scores.hyvarinen import CURVATURE, log_weight_of, record_passed
from foldwise.scores.needs import contributions_of
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
    names: tuple[str, ...],
    keep: tuple[str, ...],
    classes: Float[np.ndarray, " class"],
    chains: int,
    batch: int,
) -> None:
    """Prepare ``evidence`` for what the scores ``names`` need, and for what is kept."""
    folds = evidence.folds
    needed = contributions_of(names, folds)
    if "position" in keep:
        evidence.position = np.empty((len(folds), chains, 0, model.dimension))
    if "predictive" in keep:
        evidence.replicate = np.empty((len(folds.test_rows), chains, 0))
    if not needed and "predictive" not in keep:
        return
    evidence.observed = np.asarray(model.y)[folds.test_rows].astype(float)
    evidence.classes = classes
    for contribution in needed:
        if contribution.stored:
            if evidence.replicate is None:
                evidence.replicate = np.empty((len(folds.test_rows), chains, 0))
            continue
        start = folds.test_start if contribution.by_row else np.arange(len(folds) + 1)
        evidence.contributions[contribution.name] = BlockSums.empty(start, chains, batch)
    if CURVATURE in needed and (evidence.previous >= 0).any():
        evidence.contributions[PASSED] = BlockSums.empty(folds.test_start, chains, batch)


def make_room(evidence: Evidence, draws: int) -> None:
    """Room for ``draws`` more stored predictive draws and positions."""
    if evidence.position is not None:
        more = np.empty((*evidence.position.shape[:2], draws, evidence.position.shape[3]))
        evidence.position = np.concatenate([evidence.position, more], axis=2)
    if evidence.replicate is not None:
        room = np.empty((*evidence.replicate.shape[:2], draws))
        evidence.replicate = np.concatenate([evidence.replicate, room], axis=2)


def record(
    evidence: Evidence,
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw target"],
    rows: Float[np.ndarray, "row chain draw"] | None,
    extras: dict[str, Float[np.ndarray, "fold chain draw ..."]],
) -> None:
    """Add consecutive draws of the folds ``members`` to what the rules keep.

    Call it before the draws are added to ``evidence.sums``, whose count says where they go.
    """
    folds, first = evidence.folds, int(evidence.sums.draws[members[0]])
    part = slice(first, first + joint.shape[2])
    if evidence.position is not None:
        evidence.position[members, :, part] = extras["position"]
    extras = {name: values for name, values in extras.items() if name != "position"}
    if not extras:
        return
    entries = concatenated_ranges(folds.test_start, members)
    by_row = {name: _by_row(name, values, folds.n_test[members]) for name, values in extras.items()}
    drawn = drawn_of(evidence, members, by_row)
    if evidence.replicate is not None:
        evidence.replicate[entries, :, part] = by_row["replicate"]
    for contribution in _online(evidence):
        log_weight = None
        if contribution.weights == "row":
            log_weight = joint[..., 0] if rows is None else rows  # one row is the test set
        elif contribution.weights == "joint":
            log_weight = np.repeat(
                log_weight_of(evidence, members, joint[..., 0]), drawn.counts, axis=0
            )
        sums = evidence.contributions[contribution.name]
        sums.update(members, contribution.features(drawn), log_weight)
    if PASSED in evidence.contributions:
        record_passed(evidence, members, joint, extras)


def _online(evidence: Evidence) -> list[Contribution]:
    """Contributions that are kept as running sums."""
    known = {r.contribution.name: r.contribution for r in RULES.values() if r.contribution}
    known[BELOW.name] = BELOW
    return [known[name] for name in evidence.contributions if name != PASSED]


def _by_row(name: str, values: np.ndarray, counts: Int[np.ndarray, " fold"]) -> np.ndarray:
    """What was recorded of each test row: of the fold's own rows, classes on the last axis."""
    if name == "probability":
        return np.stack([unpadded(part, counts) for part in np.moveaxis(values, 3, 0)], axis=-1)
    return unpadded(values if name == "replicate" else values[:, :, :, 0], counts)
