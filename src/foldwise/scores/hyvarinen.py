"""The Hyvarinen score: what draws contribute, its bridge, and its error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.folds.ragged import concatenated_ranges
from foldwise.models.evaluate import derivatives_at
from foldwise.models.model import Model
from foldwise.scores import logscore
from foldwise.scores.bridge import guess
from foldwise.scores.evidence import (
    PASSED,
    Estimate,
    Evidence,
    FullCurvature,
    Ladder,
    Outcomes,
)
from foldwise.scores.rule import (
    Context,
    Contribution,
    Drawn,
    Features,
    Means,
    Sample,
)
from foldwise.scores.rungs import LEAST_OVERLAP
from foldwise.scores.units import FullSide, assembled, sample_of, unpadded


def _curvature(drawn: Drawn) -> Features:
    """1, d and d^2 + dd, with d and dd the derivatives of the row's log density by its value."""
    d, dd = drawn.recorded["first"], drawn.recorded["second"]
    return np.stack([np.ones_like(d), d, d**2 + dd], axis=-1)


CURVATURE = Contribution("curvature", "row_log_density", _curvature, weights="joint")
ROW_CURVATURE = Contribution("row_curvature", "row_log_density", _curvature, weights="row")


def hyvarinen(means: Means, _: Context) -> np.ndarray:
    """-(2 E[w (dd + d^2)] - E[w d]^2), from weighted means of 1, d and d^2 + dd."""
    with np.errstate(invalid="ignore", divide="ignore"):
        first, second = means[..., 1] / means[..., 0], means[..., 2] / means[..., 0]
    return first**2 - 2.0 * second


def log_weight_of(
    outcomes: Outcomes,
    partner: Int[np.ndarray, " fold"],
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw"],
) -> Float[np.ndarray, "fold chain draw"]:
    """Log weight of each draw: log l, or with a partner log of l / (exp(node) + l)."""
    node = outcomes.curvature().node[members][:, None, None]
    bridged = (partner[members] >= 0)[:, None, None]
    return np.where(bridged, scipy.special.log_expit(joint - node), joint)


def record_passed(
    evidence: Evidence,
    outcomes: Outcomes,
    members: Int[np.ndarray, " fold"],
    joint: Float[np.ndarray, "fold chain draw target"],
    extras: dict[str, Float[np.ndarray, "fold chain draw target slot"]],
) -> None:
    """What these folds' draws say of the test rows of the folds whose partner they are."""
    serving = np.flatnonzero(evidence.previous[members] >= 0)
    if not serving.size:
        return
    served = evidence.previous[members[serving]]
    counts = evidence.folds.n_test[served]
    d, dd = (unpadded(extras[name][serving, :, :, 1], counts) for name in ("first", "second"))
    node = outcomes.curvature().node[served][:, None, None]
    away = np.repeat(scipy.special.expit(node - joint[serving, ..., 1]), counts, axis=0)
    values = partner_features(away, d, dd)
    outcomes.contributions[PASSED].update(served, values)


def partner_features(away: np.ndarray, d: np.ndarray, dd: np.ndarray) -> np.ndarray:
    """v, w d and w (d^2 + dd), with v = exp(node) / (exp(node) + l) and w = 1 - v."""
    return np.stack([away, (1.0 - away) * d, (1.0 - away) * (d**2 + dd)], axis=-1)


def full_curvature(
    evidence: Evidence, model: Model, positions: Float[np.ndarray, "draw d"], own_draws: int
) -> FullCurvature:
    """The side of the Hyvarinen score of the full-data draws, which are at ``positions``."""
    folds, full, count = evidence.folds, evidence.full, len(positions)
    node = guess(full.joint, evidence.partner, own_draws)
    draws, length = count // full.chains, full.length
    blocks = -(-draws // length)
    served = np.flatnonzero(evidence.partner == len(folds))
    total = np.zeros((len(folds.test_rows), full.chains, blocks, 5))
    if not served.size:
        return FullCurvature(node, total[:, :, :0], length, draws)
    entries = concatenated_ranges(folds.test_start, served)
    rows, counts = folds.test_rows[entries], folds.n_test[served]
    done = 0
    for d, dd in derivatives_at(model, positions):
        away = scipy.special.expit(node[served, None] - full.joint[served, done : done + len(d)])
        d, dd = d[:, rows].T, dd[:, rows].T
        values = partner_features(np.repeat(away, counts, axis=0), d, dd)
        values = np.concatenate([values, np.stack([d, d**2 + dd], axis=-1)], axis=-1)
        chain, draw = np.divmod(np.arange(done, done + values.shape[1]), draws)
        place = chain * blocks + draw // length
        first = np.flatnonzero(np.diff(place, prepend=-1))
        parts = np.add.reduceat(values, first, axis=1)
        total[entries[:, None], chain[first], place[first] % blocks] += parts
        done += values.shape[1]
    return FullCurvature(node, total, length, draws)


def bridged_curvature(evidence: Evidence, outcomes: Outcomes, name: str) -> Estimate:
    """Hyvarinen score of each fold's test rows, pooled with the draws of its bridge partner.

    The predictive density of the test rows is q = E[l] over the fold's posterior. Derivatives of
    log q by an observed value are averages of d and d^2 + dd over the fold's draws weighed by l,
    and over those of the partner as they are. With w = l / (exp(node) + l) and v = 1 - w,

        E[g] = mean_partner(v) mean_fold(w g) / mean_fold(w) + mean_partner(w g)

    holds for any node; without a partner w = l and v = 1. Where the two posteriors hardly overlap,
    the partner's draws alone serve: v = 0 and w = 1.
    """
    folds, now, full = evidence.folds, evidence.standing, outcomes.curvature()
    nothing = Context(np.zeros(0), np.zeros(0, int), np.zeros(0))
    own = sample_of(evidence, outcomes, CURVATURE)
    partner = np.repeat(evidence.partner, folds.n_test)
    with_full, with_fold = partner == len(folds), (partner >= 0) & (partner < len(folds))
    other = np.tile([1.0, 0.0, 0.0], (len(partner), 1))
    # rungs have no part in this, whether the log score needed them or not
    alone = replace(evidence, ladder=Ladder())
    overlap = logscore.estimate(alone, "log", "auto").overlap
    far = ~(overlap >= LEAST_OVERLAP) & (evidence.partner == len(folds))
    theirs = Sample(
        _full_side(full, np.repeat(far, folds.n_test))[with_full],
        full.length,
        full.draws,
        full.draws // full.length,
    )
    passed = Sample(np.zeros((0, 1, 1, 3)), 1, 1, 1)
    if with_full.any():
        other[with_full] = theirs.mean
    if with_fold.any():
        kept = outcomes.contributions[PASSED].total[with_fold]
        passed = Sample(kept, now.length, now.draws, now.full_blocks)
        other[with_fold] = passed.mean

    def pooled(own_means: np.ndarray, other_means: np.ndarray) -> np.ndarray:
        return hyvarinen(_pooled_means(own_means, other_means), nothing)

    mean = own.mean
    value = pooled(mean, other)
    influence = own.influence(value, pooled(own.without, other[:, None, None]))
    corrected = value + influence.mean(axis=(1, 2))
    from_full = np.zeros((len(partner), theirs.total.shape[1], theirs.full_blocks))
    from_folds = np.zeros_like(influence)
    for sample, where, target in ((theirs, with_full, from_full), (passed, with_fold, from_folds)):
        if where.any():
            left_out = pooled(mean[where][:, None, None], sample.without)
            target[where] = sample.influence(value[where], left_out)
            corrected[where] += target[where].mean(axis=(1, 2))
    weight = np.repeat(folds.fold_weight, folds.n_test)
    full_side = FullSide(from_full, full)
    found = assembled(evidence, name, corrected, influence, True, from_folds, full_side, weight)
    overlap = np.where(far, np.nan, overlap)
    found = replace(found, overlap=overlap, bridged=evidence.partner >= 0)
    if name == "hyvarinen_pointwise":
        return found
    # the score is of whole test sets, so its units are folds
    return replace(found, rows=None)


def _pooled_means(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1, E[d] and E[d^2 + dd] from the means of the fold's draws and of its partner's."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = own[..., 1:] / own[..., :1]
    own_part = np.where(other[..., :1] > 0, other[..., :1] * ratio, 0.0)
    average = own_part + other[..., 1:]
    return np.concatenate([np.ones_like(average[..., :1]), average], axis=-1)


def _full_side(
    full: FullCurvature, far: Bool[np.ndarray, " row"]
) -> Float[np.ndarray, "row chain block feature"]:
    """Sums over full-data draws; unweighted for rows of folds that overlap little."""
    alone = far[:, None, None, None]
    unweighted = np.concatenate([np.zeros_like(full.total[..., :1]), full.total[..., 3:]], axis=-1)
    return np.where(alone, unweighted, full.total[..., :3])
