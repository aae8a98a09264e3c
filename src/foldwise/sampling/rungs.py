"""Rungs between a fold's posterior and the full data's, where the two hardly overlap: sampling.

Rungs (``scores/rungs.py``) are chosen from below: the next weight t of the test rows is the one at
which the draws at hand, weighed by the likelihood of the test rows to the power of the step, still
have ``STEP_SHARE`` of their number in effective draws. Its chains start where those of the rung
below ended. If the two turn out to overlap too little all the same, the step is halved; the last
rung is the one that overlaps with the full data.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from foldwise.sampling.blocks import Members, Sampler, Segment
from foldwise.sampling.elsewhere import run_chains
from foldwise.sampling.kept import Places, keeper_of_blocks
from foldwise.sampling.run import Run
from foldwise.sampling.tuning import rung_metric
from foldwise.scores.bridge import effective
from foldwise.scores.rungs import Level, Rung, Way, enough, join, most_rhat, near, rung_rhat
from foldwise.support.progress import Progress

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


def _effective(log_weight: Float[np.ndarray, " draw"]) -> float:
    """Effective number of draws with these log weights, the largest of which is zero."""
    weight = np.exp(log_weight)
    return float(effective(weight.sum(), (weight**2).sum()))


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


@dataclass
class _Climber:
    """A fold on its way up: where it is, where its chains are, and where it goes next."""

    run: Run
    fold: int
    way: Way | None
    position: Float[np.ndarray, "chain d"]
    log_step: float
    temper: float = 0.0
    tries: int = 0

    @classmethod
    def of(cls, run: Run, fold: int) -> _Climber:
        stored, sampler, way = run.evidence.draws, run.sampler, None
        if stored is not None:
            way = Way(fold, Level(0.0, stored[fold, ..., 0]), run.settings.batch, True)
        log_step = float(sampler.steps.log_step_average[fold])
        return cls(run, fold, way, sampler.position[fold], log_step)

    def arrived(self) -> bool:
        """Whether the level overlaps with the full data; if not, the next temper is chosen."""
        if self.way is None:
            return False
        level, full = self.way.level, self.run.evidence.full.level(self.fold)
        if near(level, full) and join(level, full).overlap >= enough(level, full):
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
        agree = rung_rhat(level.scores) <= most_rhat(level.scores.shape[1])
        if not agree and self.tries < MOST_TRIES:
            self.position, self.log_step = position, log_step
            return False
        if self.way is None:
            self.way = Way(self.fold, level, self.run.settings.batch, False)
        else:
            step = join(self.way.level, level)
            if not step.overlap >= enough(self.way.level, level):
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
        climber.run.evidence.ladder.stranded.append(climber.fold)
    for climber in everyone:
        evidence = climber.run.evidence
        if evidence.draws is None and climber.way is not None:
            evidence.ladder.climbed.append(climber.way.finish(evidence.full.level(climber.fold)))


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
        joint = values.sum(axis=-1) if self.sampler.program.emit.by_row else values
        first = self.done[block[0]]
        self.scores[block, :, first : first + joint.shape[2]] = joint
        self.acceptance[block] += record.acceptance / self.scores.shape[2]
        self.done[block] += joint.shape[2]

    def places(self, members: Members) -> Places:
        """What is recorded of climbers, beside the state of their chains."""
        for name in ("scores", "acceptance", "done"):
            yield name, getattr(self, name), members

    def more(self, members: Members) -> dict[str, Any]:
        """Nothing else is to be kept of them."""
        return {}

    def put_more(self, members: Members, kept: dict[str, Any]) -> None:
        """There is nothing else."""

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
            run.evidence.ladder.rungs.append(Rung(*(part[went] for part in kept)))


def _sample_rungs(climbers: list[_Climber], number: int) -> None:
    """Run chains at the climbers' tempers; numbered, for randomness of their own."""
    first = climbers[0].run
    draws = first.evidence.standing.draws
    if first.settings.memory == "online":
        draws = min(draws, MOST_ONLINE_DRAWS)
    by_run: dict[int, list[_Climber]] = {}
    for climber in climbers:
        by_run.setdefault(id(climber.run), []).append(climber)
    parties = [_Party.of(group, draws, number) for group in by_run.values()]
    owner = {id(party.sampler): party for party in parties}
    keeps = keeper_of_blocks("rung", parties)
    with closing(run_chains([p.sampler for p in parties], draws, None, keeps)) as segments:
        for sampler, block, record, count in segments:
            if count > 0:
                owner[id(sampler)].record(block, record)
    for party in parties:
        party.go_on()
