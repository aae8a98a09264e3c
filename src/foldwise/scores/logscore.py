"""The log score from what the chains recorded: estimates, Monte Carlo errors, effective draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.scores import bridge
from foldwise.scores.diagnostics import ACCEPTANCE_LIMIT, block_means, score_constant
from foldwise.scores.evidence import (
    Estimate,
    Evidence,
    RowScores,
    Standing,
    fold_variance,
)
from foldwise.scores.rungs import Climbed, Level, Way, join
from foldwise.scores.sums import RowSums, RunningSums

ESTIMATORS = ("auto", "mean", "bridge")
# Stored draws that are worked on at once.
_STORED_VALUES = 2**20
# Densities of full-data draws, times constants of the bridge, that are held at once.
_BRIDGE_VALUES = 2**22
# A relative variance that is no more than rounding.
_ROUNDING = 1e-10


def estimate(evidence: Evidence, name: str, estimator: str) -> Estimate:
    """Score ``name`` of every fold: joint (``log``) or summed over rows (``log_pointwise``)."""
    if name == "log_pointwise" and evidence.sums.rows is not None:
        found = _by_row(evidence, evidence.sums.rows)
    else:
        found = _joint(evidence, name, estimator)
    return _without_rounding(evidence, found)


def _without_rounding(evidence: Evidence, found: Estimate) -> Estimate:
    """No error for scores that are the same at every draw; what is found is that of rounding."""
    same = score_constant(evidence.sums) & np.isfinite(found.variance) & (found.spread < _ROUNDING)
    variance, spread, noise = (
        np.where(same, 0.0, part) for part in (found.variance, found.spread, found.noise)
    )
    return replace(found, variance=variance, spread=spread, noise=noise)


# ---------------------------------------------------------------- joint score


@dataclass
class _Side:
    """Averages over one sampler's draws at some bridge constants.

    ``blocks`` are block means relative to the mean, so their mean is one.
    """

    log_mean: Float[np.ndarray, "fold node"]
    blocks: Float[np.ndarray, "fold node chain block"]
    overlap: Float[np.ndarray, "fold node"]
    spread: Float[np.ndarray, "fold node"]


def _joint(evidence: Evidence, name: str, estimator: str) -> Estimate:
    """log p(test rows | training rows) of each fold, by the plain mean or the bridge."""
    now, full = evidence.standing, evidence.full
    folds, side = now.folds, _mean_side(evidence.sums, now)
    log_r, own = side.log_mean[:, 0], side.blocks[:, 0]
    spread, lap = side.spread[:, 0], np.full(folds, np.nan)
    own_variance = evidence.variance_of(own)
    partner_variance = np.zeros(folds)
    bridged = (evidence.partner >= 0) & (estimator != "mean") & ~now.undefined
    bridged &= np.isfinite(full.joint).all(axis=1)
    passed = np.zeros_like(own)  # influence of each fold's draws on the score of the previous one
    full_influence = np.zeros((folds, full.joint.shape[1] if bridged.any() else 0))
    if bridged.any():
        result = _bridge(evidence, np.flatnonzero(bridged))
        members = result.members
        bridged = np.isin(np.arange(folds), members)
        log_r[members], own[members], spread[members] = result.log_r, result.own, result.spread
        lap[members], partner_variance[members] = result.overlap, result.partner_variance
        own_variance[members] = evidence.variance_of(result.own, members)
        passed, full_influence = result.passed, result.full_influence
    # second-order bias of log means: one on top, one below
    correction = 0.5 * own_variance - 0.5 * partner_variance
    rung_variance = np.zeros(folds)
    noise = own_variance * now.count
    stranded, unsettled = np.isin(np.arange(folds), evidence.ladder.stranded), np.zeros(folds, bool)
    for way in climbed(evidence):
        k = way.fold
        log_r[k], correction[k], lap[k], bridged[k] = way.log_r, way.correction, way.overlap, True
        own[k] = 1.0 if way.own is None else way.own
        own_variance[k] = evidence.variance_of(own[[k]], np.array([k]))[0]
        spread[k], noise[k], rung_variance[k] = way.spread, way.noise, way.rung_variance
        full_influence[k] = way.full_influence(full.joint[k])
        partner_variance[k] = full.variance(full_influence[k])
        if not way.settled or stranded[k]:
            rung_variance[k] = np.inf  # nobody knows how far off
        unsettled[k] = not way.settled or way.acceptance < ACCEPTANCE_LIMIT
    elpd = log_r + correction
    elpd = np.where(now.undefined, np.nan, elpd)
    weight = np.where(np.isfinite(elpd), evidence.folds.fold_weight, 0.0)
    shared = weight @ full_influence
    return Estimate(
        name=name,
        score=elpd,
        variance=own_variance + rung_variance + partner_variance,
        own_variance=fold_variance(evidence, weight, own, passed)
        + float(weight[weight > 0] ** 2 @ rung_variance[weight > 0]),
        full_influence=shared,
        full_variance=float(full.variance(shared)) if shared.size else 0.0,
        spread=spread,
        noise=noise,
        overlap=lap,
        bridged=bridged,
        full_score=evidence.full.score,
        weight=weight,
        stranded=stranded,
        unsettled=unsettled,
    )


def climbed(evidence: Evidence) -> list[Climbed]:
    """Scores of the folds that needed rungs."""
    if evidence.draws is None:
        return evidence.ladder.climbed
    members = np.concatenate([np.zeros(0, int), *(rung.members for rung in evidence.ladder.rungs)])
    return [_from_stored(evidence, evidence.draws, int(fold)) for fold in np.unique(members)]


def _from_stored(
    evidence: Evidence, draws: Float[np.ndarray, "fold chain draw target"], fold: int
) -> Climbed:
    way = Way(fold, Level(0.0, draws[fold, ..., 0]), evidence.sums.batch, True)
    for rung in evidence.ladder.rungs:
        for k in np.flatnonzero(rung.members == fold):
            above = Level(float(rung.temper[k]), rung.scores[k], float(rung.acceptance[k]))
            way.take(join(way.level, above), above)
    return way.finish(evidence.full.level(fold))


def _mean_side(sums: RunningSums, now: Standing) -> _Side:
    """The plain mean of the test rows' likelihood over a fold's draws."""
    log_mean = scipy.special.logsumexp(sums.log_sum, axis=(1, 2)) - np.log(now.count)
    with np.errstate(invalid="ignore", over="ignore"):
        relative = sums.log_sum[..., : now.full_blocks] - log_mean[:, None, None]
        blocks = np.exp(relative) / now.length
        second = np.exp(
            scipy.special.logsumexp(sums.log_square, axis=1) - np.log(now.count) - 2 * log_mean
        )
    blocks = np.where(np.isfinite(log_mean)[:, None, None], blocks, 1.0)
    empty = np.full((len(log_mean), 1), np.nan)
    return _Side(log_mean[:, None], blocks[:, None], empty, _unbiased(second, now.count))


def _unbiased(second: np.ndarray, draws: int) -> np.ndarray:
    """Variance of a quantity with mean one from its mean square."""
    return np.maximum(second - 1.0, 0.0)[:, None] * draws / (draws - 1)


@dataclass
class _Bridged:
    """Bridge estimates of the folds ``members`` and what each sampler's draws did to them."""

    members: Int[np.ndarray, " member"]
    log_r: Float[np.ndarray, " member"]
    own: Float[np.ndarray, "member chain block"]
    spread: Float[np.ndarray, " member"]
    overlap: Float[np.ndarray, " member"]
    partner_variance: Float[np.ndarray, " member"]
    passed: Float[np.ndarray, "fold chain block"]
    full_influence: Float[np.ndarray, "fold draw"]


def _bridge(evidence: Evidence, members: Int[np.ndarray, " member"]) -> _Bridged:
    """Bridge estimates, of a few folds at a time."""
    now, count = evidence.standing, evidence.full.joint.shape[1]
    nodes = 1 if evidence.sums.grid is None else evidence.sums.grid.nodes.shape[-1]
    step = max(1, _BRIDGE_VALUES // (nodes * count))
    passed = np.zeros((now.folds, now.chains, now.full_blocks))
    influence = np.zeros((now.folds, count))
    parts = [
        _bridge_some(evidence, members[first : first + step], passed, influence)
        for first in range(0, len(members), step)
    ]
    chosen, log_r, own, spread, lap, variance = map(np.concatenate, zip(*parts, strict=True))
    return _Bridged(chosen, log_r, own, spread, lap, variance, passed, influence)


def _bridge_some(
    evidence: Evidence,
    members: Int[np.ndarray, " member"],
    passed: Float[np.ndarray, "fold chain block"],
    full_influence: Float[np.ndarray, "fold draw"],
) -> tuple[np.ndarray, ...]:
    """The first fields of ``_Bridged`` for some folds; fills in what is theirs of the last two."""
    sums, now, full = evidence.sums, evidence.standing, evidence.full
    folds = now.folds
    with_full = evidence.partner[members] == folds
    log_odds = np.where(with_full, log_draw_odds(evidence, members), 0.0)
    if sums.grid is not None:
        nodes = sums.grid.nodes[members, 0]
    else:
        nodes = _stored_nodes(evidence, _stored(evidence), members, log_odds)
    own = _fold_side(evidence, members, 0, nodes)
    log_b, b_overlap = np.zeros_like(nodes), np.zeros_like(nodes)
    other_folds = np.flatnonzero(~with_full)
    from_folds = evidence.partner[members[other_folds]]
    if other_folds.size:
        theirs = _fold_side(evidence, from_folds, 1, nodes[other_folds])
        log_b[other_folds], b_overlap[other_folds] = theirs.log_mean, theirs.overlap
    log_terms = _full_terms(evidence, members[with_full], nodes[with_full])
    for node, terms in enumerate(log_terms):
        log_b[with_full, node] = scipy.special.logsumexp(terms, axis=1) - np.log(terms.shape[1])
        b_overlap[with_full, node] = bridge.overlap(terms)

    mix, inside = _node_weights(nodes, own.log_mean + log_odds[:, None] - log_b)
    mix = mix * inside[:, None]
    partner_variance = np.zeros(len(members))
    if other_folds.size:
        blocks = np.einsum("kg,kglb->klb", mix[other_folds], theirs.blocks)
        passed[from_folds] = blocks
        partner_variance[other_folds] = evidence.variance_of(blocks, from_folds)
    for node, terms in enumerate(log_terms):
        relative = np.exp(terms - log_b[with_full, node, None]) - 1.0
        # their mean is the denominator: a draw that raises it lowers the score
        full_influence[members[with_full]] -= mix[with_full, node, None] * relative
    if with_full.any():
        partner_variance[with_full] = full.variance(full_influence[members[with_full]])

    def at_root(values: np.ndarray) -> np.ndarray:
        return np.einsum("kg,kg...->k...", mix, values)

    keep = np.flatnonzero(inside)
    return (
        members[keep],
        at_root(nodes + own.log_mean - log_b)[keep],
        at_root(own.blocks)[keep],
        at_root(own.spread)[keep],
        at_root(np.minimum(own.overlap, b_overlap))[keep],
        partner_variance[keep],
    )


def log_draw_odds(
    evidence: Evidence, members: Int[np.ndarray, " member"]
) -> Float[np.ndarray, " member"]:
    """log(n0 / n1) of each fold in effective draws: how its draws weigh against the full data's.

    Autocorrelation times are those of the log score, by batch means; rough, but the bridge's
    error is flat around the optimum.
    """
    sums, now, full = evidence.sums, evidence.standing, evidence.full.joint[members]
    used = -(-now.draws // now.length)
    total, square = sums.total[members][..., :used], sums.square[members][..., :used]
    draws, full_draws = now.count, full.shape[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = square.sum(axis=(1, 2)) / draws - (total.sum(axis=(1, 2)) / draws) ** 2
        blocks = total[..., : now.full_blocks] / now.length
        own = evidence.variance_of(blocks, members) * draws / spread
        theirs = evidence.full.variance(full) * full_draws / full.var(axis=1)
    own, theirs = (np.clip(np.nan_to_num(t, nan=1.0), 0.5, 20.0) for t in (own, theirs))
    return np.log(draws / own) - np.log(full_draws / theirs)


def _stored(evidence: Evidence) -> Float[np.ndarray, "fold chain draw target"]:
    """The stored draws, which a bridge without a grid of constants needs."""
    if evidence.draws is None:
        raise ValueError("a bridge needs stored draws or a grid of constants, but has neither")
    return evidence.draws


def _stored_nodes(
    evidence: Evidence,
    draws: Float[np.ndarray, "fold chain draw target"],
    members: Int[np.ndarray, " member"],
    log_odds: Float[np.ndarray, " member"],
) -> Float[np.ndarray, "member 1"]:
    """The optimal bridge constant of each fold, from stored draws."""
    nodes = np.empty((len(members), 1))
    full = evidence.partner[members] == evidence.standing.folds
    for every in (np.flatnonzero(full), np.flatnonzero(~full)):
        for group in _some(every, draws):
            own = draws[members[group], ..., 0].reshape(len(group), -1)
            if full[group[0]]:
                theirs = evidence.full.joint[members[group]]
            else:
                partner = evidence.partner[members[group]]
                theirs = draws[partner, ..., 1].reshape(len(group), -1)
            nodes[group, 0] = bridge.solve(own, theirs, log_odds[group])
    return nodes


def _some(
    every: Int[np.ndarray, " member"], draws: Float[np.ndarray, "fold chain draw target"]
) -> Iterator[Int[np.ndarray, " member"]]:
    """Positions of folds, a few at a time: what is worked on is a small part of what is stored."""
    step = max(1, _STORED_VALUES // (draws.shape[1] * draws.shape[2]))
    for first in range(0, len(every), step):
        yield every[first : first + step]


def _fold_side(
    evidence: Evidence,
    members: Int[np.ndarray, " member"],
    target: int,
    nodes: Float[np.ndarray, "member node"],
) -> _Side:
    """Averages of expit(log l - node), or of expit(node - log l) for target 1, over fold draws."""
    sums, now, count = evidence.sums, evidence.standing, evidence.standing.count
    if sums.grid is not None:
        grid = np.moveaxis(sums.grid.total[members, target], -1, 1)  # fold node chain block
        mean = grid.sum(axis=(2, 3)) / count
        square = sums.grid.square[members, target].sum(axis=1)
        blocks = grid[..., : now.full_blocks] / now.length
    else:
        sign, stored, parts = 1.0 if target == 0 else -1.0, _stored(evidence), []
        for some in _some(np.arange(len(members)), stored):
            own = stored[members[some], ..., target]
            value = np.exp(scipy.special.log_expit(sign * (own - nodes[some][..., None])))
            sums_of = value.mean(axis=(1, 2)), (value**2).sum(axis=(1, 2))
            parts.append((*sums_of, block_means(value, now.length)))
        mean, square, blocks = (np.concatenate(part)[:, None] for part in zip(*parts, strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(mean[..., None, None] > 0, blocks / mean[..., None, None], 1.0)
        lap = np.where(square > 0, bridge.effective(mean * count, square), 0.0)
        spread = np.where(mean > 0, square / count / mean**2 - 1.0, 0.0) * count / (count - 1)
        return _Side(np.log(mean), relative, lap, np.maximum(spread, 0.0))


def _full_terms(
    evidence: Evidence, members: Int[np.ndarray, " member"], nodes: Float[np.ndarray, "member node"]
) -> list[Float[np.ndarray, "member draw"]]:
    """log expit(node - log l) at the full-data draws, for each node."""
    if not members.size:
        return []
    return [
        scipy.special.log_expit(nodes[:, [g]] - evidence.full.joint[members])
        for g in range(nodes.shape[1])
    ]


def _node_weights(
    nodes: Float[np.ndarray, "member node"], gap: Float[np.ndarray, "member node"]
) -> tuple[Float[np.ndarray, "member node"], Bool[np.ndarray, " member"]]:
    """Weights of the two nodes around the root of ``gap``, which falls along the nodes.

    Each node gives a consistent estimate, so their average does too; it is close to the optimal
    one. Folds whose root lies outside the nodes are marked False.
    """
    if nodes.shape[1] == 1:
        return np.ones_like(nodes), np.isfinite(gap[:, 0])
    after = np.argmax(gap <= 0, axis=1)
    inside = (gap[:, 0] > 0) & (gap[:, -1] <= 0) & np.isfinite(gap).all(axis=1)
    after = np.clip(after, 1, nodes.shape[1] - 1)
    member = np.arange(len(nodes))
    high, low = gap[member, after - 1], gap[member, after]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip(np.nan_to_num(high / (high - low), nan=0.5), 0.0, 1.0)
    mix = np.zeros_like(nodes)
    mix[member, after - 1], mix[member, after] = 1.0 - share, share
    return mix, inside


# ---------------------------------------------------------------- score by row


def _by_row(evidence: Evidence, by_row: RowSums) -> Estimate:
    """Sum over a fold's test rows of log p(row | training rows), by the plain mean.

    Rows of a fold share their draws, so the fold's Monte Carlo variance is that of the sum of
    the rows' influences l_i / mean(l_i).
    """
    now, folds, count = evidence.standing, evidence.folds, evidence.standing.count
    log_mean = scipy.special.logsumexp(by_row.log_sum, axis=(1, 2)) - np.log(count)
    bad = ~np.isfinite(log_mean)
    with np.errstate(invalid="ignore", over="ignore"):
        blocks = np.exp(by_row.log_sum[..., : now.full_blocks] - log_mean[:, None, None])
        blocks = np.where(bad[:, None, None], 1.0, blocks / now.length)
        second = np.exp(
            scipy.special.logsumexp(by_row.log_square, axis=1) - np.log(count) - 2.0 * log_mean
        )
    row_fold = np.repeat(np.arange(now.folds), folds.n_test)
    row_variance = evidence.variance_of(blocks, row_fold)
    rows = log_mean + 0.5 * row_variance
    row_spread = np.where(bad, 0.0, np.maximum(second - 1.0, 0.0) * count / (count - 1))

    start = folds.test_start[:-1]
    elpd = np.add.reduceat(rows, start)
    elpd = np.where(now.undefined, np.nan, elpd)
    usable = np.repeat(np.isfinite(elpd), folds.n_test)
    row_weight = np.where(usable, folds.test_weight, 0.0)
    plain = evidence.variance_of(np.add.reduceat(blocks, start))
    weighted = np.add.reduceat(row_weight[:, None, None] * blocks, start)
    return Estimate(
        name="log_pointwise",
        score=elpd,
        variance=plain,
        own_variance=float(evidence.variance_of(weighted).sum()),
        full_influence=np.zeros(0),
        full_variance=0.0,
        spread=np.add.reduceat(row_spread, start),
        noise=np.add.reduceat(row_variance, start) * count,
        overlap=np.full(now.folds, np.nan),
        bridged=np.zeros(now.folds, bool),
        full_score=np.add.reduceat(evidence.full.rows, start),
        weight=np.where(np.isfinite(elpd), folds.fold_weight, 0.0),
        stranded=np.zeros(now.folds, bool),
        unsettled=np.zeros(now.folds, bool),
        rows=RowScores(rows, row_variance, row_spread),
    )
