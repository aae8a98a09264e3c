"""Rungs between a fold's posterior and the full data's, where the two hardly overlap.

A bridge is only as good as the overlap of the two posteriors it joins. A rung is the posterior
with the fold's test rows weighed by t between 0 and 1; with l the likelihood of the test rows,
neighbours at t < u differ by the factor l^(u - t), so

    log r = sum over neighbours of log (Z_u / Z_t),

each term a bridge of its own. Rungs are chosen from below: the next t is the one at which the
draws at hand, weighed by l^(u - t), still have ``STEP_SHARE`` of their number in effective draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from foldwise import bridge
from foldwise.diagnostics import block_means, series_variance
from foldwise.sampler import run_together
from foldwise.special import expit
from foldwise.tuning import rung_metric, start_positions

if TYPE_CHECKING:
    from foldwise.crossval import Run
    from foldwise.evidence import Evidence
    from foldwise.progress import Progress
    from foldwise.sampler import Sampler

# Folds with less overlap than this get rungs: twice the level below which errors are off.
LEAST_OVERLAP = 20.0
STEP_SHARE = 0.15
MOST_RUNGS = 10
# Rungs keep their draws whatever the memory, so online they are no more than this many a chain.
MOST_ONLINE_DRAWS = 1000


@dataclass(frozen=True)
class Rung:
    """Log scores of the test rows at one rung of some folds."""

    members: Int[np.ndarray, " member"]
    temper: Float[np.ndarray, " member"]
    scores: Float[np.ndarray, "member chain draw"]


@dataclass
class _Ascent:
    """Folds of one run on their way up: where they are, and their log scores there."""

    run: Run
    members: Int[np.ndarray, " member"]
    temper: Float[np.ndarray, " member"]
    scores: Float[np.ndarray, "member chain draw"]

    def next_rung(self) -> bool:
        """Keep the folds that are far from the full data still, and choose their next tempers."""
        overlap = _overlap_with_full(self.run.evidence, self.members, self.temper, self.scores)
        far = (overlap < LEAST_OVERLAP) & np.isfinite(self.scores).any(axis=(1, 2))
        self.members, self.scores = self.members[far], self.scores[far]
        steps = zip(self.temper[far], self.scores, strict=True)
        self.temper = np.array([_next(t, ll) for t, ll in steps])
        return bool(far.any())


def climb(far: list[tuple[Run, Int[np.ndarray, " member"]]], bar: Progress) -> None:
    """Sample the rungs of folds that overlap too little with the full data, of all runs at once."""
    ascents = []
    for run, members in far:
        if members.size:
            stored, bottom = run.evidence.draws, np.zeros(len(members))
            scores = np.empty(0) if stored is None else stored[members, ..., 0]
            ascents.append(_Ascent(run, members, bottom, scores))
    if not ascents:
        return
    bar.start(f"rungs for {sum(len(ascent.members) for ascent in ascents)} folds")
    if ascents[0].run.evidence.draws is None:
        _sample_rungs(ascents, 0)
    for number in range(1, MOST_RUNGS + 1):
        ascents = [ascent for ascent in ascents if ascent.next_rung()]
        if not ascents:
            return
        _sample_rungs(ascents, number)


def _sample_rungs(ascents: list[_Ascent], number: int) -> None:
    """Log scores of chains at the folds' tempers; numbered, for randomness of their own."""
    first = ascents[0].run
    draws = first.evidence.n_draws
    if first.settings.memory == "online":
        draws = min(draws, MOST_ONLINE_DRAWS)
    samplers = [_rung_sampler(ascent, number + 1) for ascent in ascents]
    owner = {id(s): ascent for s, ascent in zip(samplers, ascents, strict=True)}
    for ascent in ascents:
        ascent.scores = np.empty((len(ascent.members), first.settings.chains, draws))
    done = {id(s): np.zeros(len(s.folds), int) for s in samplers}
    for sampler, block, record, count in run_together(samplers, draws):
        if count > 0:
            values = record.scores[:, :, :, 0]
            joint = values.sum(axis=-1) if sampler.emit.by_row else values
            at = done[id(sampler)][block[0]]
            owner[id(sampler)].scores[block, :, at : at + count] = joint
            done[id(sampler)][block] += count
    for ascent in ascents:
        rung = Rung(ascent.members, ascent.temper, ascent.scores)
        ascent.run.evidence.rungs.append(rung)


def _rung_sampler(ascent: _Ascent, rung: int) -> Sampler:
    run, members, temper = ascent.run, ascent.members, ascent.temper
    held_out = (1.0 - temper)[:, None] * run.evidence.full[members]
    chains, seed = run.settings.chains, run.settings.seed
    start = start_positions(run.full_positions, held_out, run.folds[members], chains, seed, rung)
    metric = rung_metric(run.fit, run.locals, run.sampler.metric, members, temper)
    return run.sampler.tempered(members, temper, metric, start, rung)


def _overlap_with_full(
    evidence: Evidence,
    members: Int[np.ndarray, " member"],
    temper: Float[np.ndarray, " member"],
    scores: Float[np.ndarray, "member chain draw"],
) -> Float[np.ndarray, " member"]:
    """Overlap of each rung with the full-data posterior."""
    step = (1.0 - temper)[:, None]
    low = step * scores.reshape(len(members), -1)
    high = step * evidence.full[members]
    eta = bridge.solve(low, high, float(np.log(low.shape[1] / high.shape[1])))[:, None]
    return np.minimum(_carried(expit(low - eta)), _carried(expit(eta - high)))


def _carried(terms: Float[np.ndarray, "member draw"]) -> Float[np.ndarray, " member"]:
    """Number of draws that carry an average: (sum f)^2 / sum f^2."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(terms.sum(axis=1) ** 2 / (terms**2).sum(axis=1))


def _next(temper: float, scores: Float[np.ndarray, "chain draw"]) -> float:
    """The temper at which the draws, weighed up to it, keep ``STEP_SHARE`` effective draws."""
    ll = scores.ravel() - np.max(scores[np.isfinite(scores)])
    wanted = STEP_SHARE * ll.size
    low, high = 0.0, 1.0 - temper
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _carried(np.exp(middle * ll)[None])[0] > wanted:
            low = middle
        else:
            high = middle
    return min(temper + max(low, 1e-6), 0.999)


@dataclass
class Climbed:
    """A fold's score by way of its rungs.

    ``own`` are the relative block means of the fold's stored draws, None online, where the fold's
    draws are a rung like the others. ``rung_variance`` is what the rungs' draws add to the Monte
    Carlo variance, ``correction`` the second-order bias, to be added. ``full_influence`` is what
    each full-data draw did, to be subtracted. ``spread`` and ``noise`` are those of the lowest
    level.
    """

    log_r: float
    correction: float
    own: Float[np.ndarray, "chain block"] | None
    rung_variance: float
    full_influence: Float[np.ndarray, " draw"]
    overlap: float
    spread: float
    noise: float


def climbed(evidence: Evidence, fold: int) -> Climbed:
    """Score of a fold from its rungs."""
    levels = _levels(evidence, fold)
    length = evidence.sums.length
    full_length = max(int(np.sqrt(levels[-1][1].shape[1])), 1)
    lengths = [length] * (len(levels) - 1) + [full_length]
    influence = [np.zeros_like(scores) for _, scores in levels]
    log_r, correction, lap = 0.0, 0.0, np.inf
    for i, ((t, below), (u, above)) in enumerate(pairwise(levels)):
        low, high = (u - t) * below, (u - t) * above
        odds = float(np.log(low.size / high.size))
        eta = bridge.solve(low.reshape(1, -1), high.reshape(1, -1), odds)[0]
        f0, f1 = expit(low - eta), expit(eta - high)
        log_r += eta + np.log(f0.mean()) - np.log(f1.mean())
        lap = min(lap, _carried(f0.reshape(1, -1))[0], _carried(f1.reshape(1, -1))[0])
        up, down = f0 / f0.mean() - 1.0, f1 / f1.mean() - 1.0
        influence[i] += up
        influence[i + 1] -= down
        correction += 0.5 * float(series_variance(up, lengths[i])) - 0.5 * float(
            series_variance(down, lengths[i + 1])
        )
    stored = evidence.draws is not None
    rungs = [float(series_variance(series, length)) for series in influence[int(stored) : -1]]
    return Climbed(
        log_r=float(log_r),
        correction=correction,
        own=1.0 + block_means(influence[0], length) if stored else None,
        rung_variance=sum(rungs),
        full_influence=-influence[-1].ravel(),
        overlap=float(lap),
        spread=float(influence[0].var(ddof=1)),
        noise=float(series_variance(influence[0], length)) * influence[0].size,
    )


def _levels(evidence: Evidence, fold: int) -> list[tuple[float, Float[np.ndarray, "chain draw"]]]:
    """Temper and log scores of the fold, its rungs and the full data, in this order."""
    levels = [] if evidence.draws is None else [(0.0, evidence.draws[fold, ..., 0])]
    for rung in evidence.rungs:
        where = np.flatnonzero(rung.members == fold)
        if where.size:
            levels.append((float(rung.temper[where[0]]), rung.scores[where[0]]))
    return [*levels, (1.0, evidence.full[fold].reshape(evidence.full_chains, -1))]
