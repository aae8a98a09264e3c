"""Rungs between a fold's posterior and the full data's, where the two hardly overlap.

A bridge is only as good as the overlap of the two posteriors it joins. A rung is the posterior
with the fold's test rows weighed by t between 0 and 1; with l the likelihood of the test rows,
neighbours at t < u differ by the factor l^(u - t), so

    log r = sum over neighbours of log (Z_u / Z_t),

each term a bridge of its own. Rungs are chosen from below: the next t is the one at which the
draws at hand, weighed by l^(u - t), still have ``STEP_SHARE`` of their number in effective draws.
Its chains start where those of the rung below ended. If the two turn out to overlap too little
all the same, the step is halved; the last rung is the one that overlaps with the full data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from foldwise.sampling.blocks import run_together
from foldwise.sampling.tuning import rung_metric
from foldwise.scores import bridge
from foldwise.scores.diagnostics import block_means, rhat, series_variance
from foldwise.scores.sums import block_length
from foldwise.support.special import log_expit, logsumexp

if TYPE_CHECKING:
    from foldwise.crossval import Run
    from foldwise.sampling.blocks import Sampler, Segment
    from foldwise.scores.evidence import Evidence
    from foldwise.support.progress import Progress

# Folds with less overlap than this get rungs: twice the level below which errors are off.
LEAST_OVERLAP = 20.0
# Neighbours on a ladder overlap by twice that again: what each bridge's error misses adds up over
# the rungs (bench/rungs.py prints errors against exact answers).
RUNG_OVERLAP = 40.0
STEP_SHARE = 0.15
# A step moves the mean of a normal posterior by sqrt(-log STEP_SHARE) = 1.4 of its sd. A group
# whose effect is D prior sds away has posteriors of 2 D sds in a row at most (the integral of
# dm / sd over t), 1.5 D rungs; so this reaches groups about 250 prior sds away.
MOST_RUNGS = 400
# Rungs keep their draws whatever the memory while their neighbours are sampled, so online they are
# no more than this many a chain.
MOST_ONLINE_DRAWS = 1000
# A rung whose chains disagree is sampled anew from where they are, this many times at most.
MOST_TRIES = 4
# Scores from the first and second halves of all rungs' draws differ by more of their errors than
# this only if chains were on their way still.
MOST_DRIFT = 4.0


@dataclass(frozen=True)
class Rung:
    """Log scores of the test rows at one rung of some folds, and its chains' acceptance."""

    members: Int[np.ndarray, " member"]
    temper: Float[np.ndarray, " member"]
    scores: Float[np.ndarray, "member chain draw"]
    acceptance: Float[np.ndarray, " member"]


@dataclass(frozen=True)
class Level:
    """One posterior on a fold's way up: the weight of its test rows, and their log scores."""

    temper: float
    scores: Float[np.ndarray, "chain draw"]
    acceptance: float = 1.0


@dataclass(frozen=True)
class _Step:
    """The bridge between neighbours: influences of the draws below and above on its log ratio."""

    node: float
    log_ratio: float
    up: Float[np.ndarray, "chain draw"]
    down: Float[np.ndarray, "chain draw"]
    overlap: float


def _step(below: Level, above: Level) -> _Step:
    """log (Z_u / Z_t) of two neighbours by the optimal bridge, all in logs: no mean underflows."""
    low, high = ((above.temper - below.temper) * level.scores for level in (below, above))
    odds = float(np.log(low.size / high.size))
    node = float(bridge.solve(low.reshape(1, -1), high.reshape(1, -1), odds)[0])
    log_up, log_down = log_expit(low - node), log_expit(node - high)
    a, b = (float(logsumexp(part) - np.log(part.size)) for part in (log_up, log_down))
    carried = [float(bridge.overlap(part.reshape(1, -1))[0]) for part in (log_up, log_down)]
    # draws that might as well be the other side's: few if two tight clusters are far apart
    common = float(np.exp(a)) * low.size
    return _Step(
        node,
        node + a - b,
        np.exp(log_up - a) - 1.0,
        np.exp(log_down - b) - 1.0,
        min(*carried, common),
    )


def _enough(below: Level, above: Level) -> float:
    """Overlap that neighbours must have; less where there are few draws to begin with."""
    return min(RUNG_OVERLAP, 0.1 * min(below.scores.size, above.scores.size))


def _near(below: Level, above: Level) -> bool:
    """Whether a bridge is worth a try: beyond 40 nats, exp(-20) of the draws are in common."""
    gap = np.min(above.scores) - np.max(below.scores)
    return bool((above.temper - below.temper) * gap < 40.0)


def _effective(log_weight: Float[np.ndarray, " draw"]) -> float:
    """Effective number of draws with these log weights, the largest of which is zero."""
    weight = np.exp(log_weight)
    return float(weight.sum() ** 2 / (weight**2).sum())


def _next(level: Level) -> float:
    """The temper at which the draws, weighed up to it, keep ``STEP_SHARE`` effective draws."""
    ll = level.scores[np.isfinite(level.scores)]
    ll, wanted = ll - ll.max(), STEP_SHARE * level.scores.size
    low, high = 0.0, 1.0 - level.temper
    if _effective(high * ll) > wanted:
        return 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _effective(middle * ll) > wanted:
            low = middle
        else:
            high = middle
    return level.temper + high


# ---------------------------------------------------------------- the score by way of the rungs


@dataclass(frozen=True)
class Climbed:
    """A fold's score by way of its rungs.

    ``own`` are the relative block means of the fold's stored draws, None online, where the fold's
    draws are a rung like the others. ``rung_variance`` is what the rungs' draws add to the Monte
    Carlo variance, ``correction`` the second-order bias, to be added. ``temper`` and ``node`` are
    those of the bridge from the last rung to the full data. ``spread`` and ``noise`` are sums over
    all levels. ``rhat`` is the largest of any rung, ``acceptance`` the smallest, and ``drift`` what
    the score from the first halves of all chains differs from that of the second, in errors.
    """

    fold: int
    log_r: float
    correction: float
    own: Float[np.ndarray, "chain block"] | None
    rung_variance: float
    temper: float
    node: float
    overlap: float
    spread: float
    noise: float
    rhat: float
    drift: float
    acceptance: float
    draws: int

    def full_influence(self, evidence: Evidence) -> Float[np.ndarray, " draw"]:
        """What each full-data draw did, to be subtracted."""
        terms = log_expit(self.node - (1.0 - self.temper) * evidence.full[self.fold])
        return np.exp(terms - (logsumexp(terms) - np.log(terms.size))) - 1.0

    @property
    def settled(self) -> bool:
        """Whether the rungs' chains agree and stay where they are."""
        return bool(self.rhat <= _most_rhat(self.draws) and abs(self.drift) <= MOST_DRIFT)


class _Way:
    """Sums over the levels that a fold has left behind, and the level it is at.

    With ``stored``, the lowest level is the fold's own draws, whose influence is kept in blocks.
    """

    def __init__(self, fold: int, bottom: Level, batch: int, stored: bool):
        self.fold, self.level, self.batch, self.stored = fold, bottom, batch, stored
        self.down = np.zeros_like(bottom.scores)
        self.own: np.ndarray | None = None
        self.log_r = self.correction = self.variance = self.own_variance = 0.0
        self.spread = self.noise = self.drift = 0.0
        self.overlap, self.acceptance = np.inf, 1.0
        self.rhat = 1.0 if stored else _rhat(bottom.scores)

    def take(self, step: _Step, above: Level) -> None:
        """Go on to the level ``above`` by the bridge ``step``."""
        self._leave(step)
        self._check(above)
        self.correction -= 0.5 * self._variance(step.down)
        self.level, self.down = above, step.down

    def finish(self, full: Level) -> Climbed:
        """Bridge to the full data."""
        step, last = _step(self.level, full), self.level
        full_variance = float(series_variance(step.down))
        self._leave(step)
        error = np.sqrt(4.0 * (self.variance + self.own_variance))
        return Climbed(
            fold=self.fold,
            log_r=self.log_r,
            correction=self.correction - 0.5 * full_variance,
            own=self.own,
            rung_variance=self.variance,
            temper=last.temper,
            node=step.node,
            overlap=self.overlap,
            spread=self.spread,
            noise=self.noise,
            rhat=self.rhat,
            drift=float(self.drift / error) if error > 0 else 0.0,
            acceptance=self.acceptance,
            draws=last.scores.shape[1],
        )

    def _leave(self, step: _Step) -> None:
        """Add up what the draws of the present level did to the bridges below and above it."""
        influence, half = step.up - self.down, self.down.shape[1] // 2
        variance = self._variance(influence)
        self.log_r += step.log_ratio
        self.correction += 0.5 * self._variance(step.up)
        self.overlap = min(self.overlap, step.overlap)
        self.spread += float(influence.var(ddof=1))
        self.noise += variance * influence.size
        self.drift += float(influence[:, :half].mean() - influence[:, half:].mean())
        if self.stored and self.own is None:
            length = block_length(influence.shape[1], self.batch)
            self.own, self.own_variance = 1.0 + block_means(influence, length), variance
        else:
            self.variance += variance

    def _check(self, level: Level) -> None:
        self.rhat = max(self.rhat, _rhat(level.scores))
        self.acceptance = min(self.acceptance, level.acceptance)

    def _variance(self, series: Float[np.ndarray, "chain draw"]) -> float:
        """Monte Carlo variance of a mean; rungs add up, so a few long batches of each will do."""
        draws = series.shape[1]
        return float(series_variance(series, max(block_length(draws, self.batch), draws // 5)))


def _rhat(scores: Float[np.ndarray, "chain draw"]) -> float:
    """R-hat of a rung's log score; infinite if a chain never moved."""
    if not np.ptp(scores, axis=1).all():
        return np.inf
    centred = scores - scores.mean()
    return float(rhat(centred.sum(axis=1), (centred**2).sum(axis=1), scores.shape[1]))


def _most_rhat(draws: int) -> float:
    """As for folds: the R-hat of chain means that scatter as if only one in 20 draws counted."""
    return max(1.1, float(np.sqrt(1.0 + 20.0 / draws)))


def climbed(evidence: Evidence) -> list[Climbed]:
    """Scores of the folds that needed rungs."""
    if evidence.draws is None:
        return evidence.climbed
    members = np.concatenate([np.zeros(0, int), *(rung.members for rung in evidence.rungs)])
    return [_from_stored(evidence, int(fold)) for fold in np.unique(members)]


def _from_stored(evidence: Evidence, fold: int) -> Climbed:
    assert evidence.draws is not None
    way = _Way(fold, Level(0.0, evidence.draws[fold, ..., 0]), evidence.sums.batch, True)
    for rung in evidence.rungs:
        for k in np.flatnonzero(rung.members == fold):
            above = Level(float(rung.temper[k]), rung.scores[k], float(rung.acceptance[k]))
            way.take(_step(way.level, above), above)
    return way.finish(_full(evidence, fold))


def _full(evidence: Evidence, fold: int) -> Level:
    return Level(1.0, evidence.full[fold].reshape(evidence.full_chains, -1))


# ---------------------------------------------------------------- sampling


@dataclass
class _Climber:
    """A fold on its way up: where it is, where its chains are, and where it goes next."""

    run: Run
    fold: int
    way: _Way | None
    position: Float[np.ndarray, "chain d"]
    log_step: float
    temper: float = 0.0
    tries: int = 0

    @classmethod
    def of(cls, run: Run, fold: int) -> _Climber:
        stored, sampler, way = run.evidence.draws, run.sampler, None
        if stored is not None:
            way = _Way(fold, Level(0.0, stored[fold, ..., 0]), run.settings.batch, True)
        log_step = float(sampler.steps.log_step_average[fold])
        return cls(run, fold, way, sampler.position[fold], log_step)

    def arrived(self) -> bool:
        """Whether the level overlaps with the full data; if not, the next temper is chosen."""
        if self.way is None:
            return False
        level, full = self.way.level, _full(self.run.evidence, self.fold)
        if _near(level, full) and _step(level, full).overlap >= _enough(level, full):
            return True
        if self.temper <= level.temper:
            self.temper = _next(level)
            if self.temper >= 1.0:  # the full-data draws are further than these draws can tell
                self.temper = 0.5 * (level.temper + 1.0)
        return False

    def consider(self, level: Level, position: np.ndarray, log_step: float) -> bool:
        """Go up to a level that has been sampled if it overlaps with this one, else half as far.

        If its chains do not agree yet, they go on.
        """
        self.tries += 1
        if not _rhat(level.scores) <= _most_rhat(level.scores.shape[1]) and self.tries < MOST_TRIES:
            self.position, self.log_step = position, log_step
            return False
        if self.way is None:
            self.way = _Way(self.fold, level, self.run.settings.batch, False)
        else:
            step = _step(self.way.level, level)
            if not step.overlap >= _enough(self.way.level, level):
                self.temper, self.tries = 0.5 * (self.way.level.temper + self.temper), 0
                return False
            self.way.take(step, level)
        self.position, self.log_step, self.tries = position, log_step, 0
        return True


def climb(far: list[tuple[Run, Int[np.ndarray, " member"]]], bar: Progress) -> None:
    """Sample the rungs of folds that overlap too little with the full data, of all runs at once."""
    everyone = [_Climber.of(run, int(fold)) for run, members in far for fold in members]
    if not everyone:
        return
    left = [climber for climber in everyone if not climber.arrived()]
    for number in range(1, MOST_RUNGS + 1):
        if not left:
            break
        bar.start(f"rung {number}, {len(left)} of {len(everyone)} far folds still climb")
        _sample_rungs(left, number)
        left = [climber for climber in left if not climber.arrived()]
    for climber in left:
        climber.run.evidence.stranded.append(climber.fold)
    for climber in everyone:
        evidence = climber.run.evidence
        if evidence.draws is None and climber.way is not None:
            evidence.climbed.append(climber.way.finish(_full(evidence, climber.fold)))


@dataclass
class _Party:
    """The climbers of one run, and what their chains record at the next rung."""

    climbers: list[_Climber]
    sampler: Sampler
    scores: Float[np.ndarray, "member chain draw"]
    acceptance: Float[np.ndarray, " member"]
    done: Int[np.ndarray, " member"]

    @classmethod
    def of(cls, climbers: list[_Climber], draws: int, number: int) -> _Party:
        run, size = climbers[0].run, len(climbers)
        members = np.array([climber.fold for climber in climbers])
        temper = np.array([climber.temper for climber in climbers])
        sampler = run.sampler.tempered(
            members,
            temper,
            rung_metric(run.fit, run.locals, run.sampler.metric, members, temper),
            np.stack([climber.position for climber in climbers]),
            np.array([climber.log_step for climber in climbers]),
            number,
        )
        scores = np.empty((size, run.settings.chains, draws))
        return cls(climbers, sampler, scores, np.zeros(size), np.zeros(size, int))

    def record(self, block: Int[np.ndarray, " fold"], record: Segment) -> None:
        """Add what a segment recorded of the climbers ``block``."""
        values = record.scores[:, :, :, 0]
        joint = values.sum(axis=-1) if self.sampler.emit.by_row else values
        first = self.done[block[0]]
        self.scores[block, :, first : first + joint.shape[2]] = joint
        self.acceptance[block] += record.acceptance / self.scores.shape[2]
        self.done[block] += joint.shape[2]

    def go_on(self) -> None:
        """Let the climbers go up where the rung overlaps with the one they are at."""
        run, sampler = self.climbers[0].run, self.sampler
        run.sampler.gradients += sampler.gradients
        went = np.zeros(len(self.climbers), bool)
        for k, climber in enumerate(self.climbers):
            level = Level(climber.temper, self.scores[k], float(self.acceptance[k]))
            log_step = float(sampler.steps.log_step_average[k])
            went[k] = climber.consider(level, sampler.position[k], log_step)
        if run.evidence.draws is not None and went.any():
            members = np.array([climber.fold for climber in self.climbers])
            kept = (members, sampler.temper, self.scores, self.acceptance)
            run.evidence.rungs.append(Rung(*(part[went] for part in kept)))


def _sample_rungs(climbers: list[_Climber], number: int) -> None:
    """Run chains at the climbers' tempers; numbered, for randomness of their own."""
    first = climbers[0].run
    draws = first.evidence.n_draws
    if first.settings.memory == "online":
        draws = min(draws, MOST_ONLINE_DRAWS)
    by_run: dict[int, list[_Climber]] = {}
    for climber in climbers:
        by_run.setdefault(id(climber.run), []).append(climber)
    parties = [_Party.of(group, draws, number) for group in by_run.values()]
    owner = {id(party.sampler): party for party in parties}
    for sampler, block, record, count in run_together([p.sampler for p in parties], draws):
        if count > 0:
            owner[id(sampler)].record(block, record)
    for party in parties:
        party.go_on()
