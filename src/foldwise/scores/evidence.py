"""What sampling has recorded, and what an estimate of a score is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.scores.bridge import log_mean_exp
from foldwise.scores.diagnostics import (
    batch_means_variance,
    joined_blocks,
    shared_variance,
    slow_limit,
    slowest_time,
)
from foldwise.scores.rungs import Climbed, Level, Rung
from foldwise.scores.sums import BlockSums, RunningSums, Watch


@dataclass(frozen=True)
class FullData:
    """What the full-data draws say of the folds' test rows.

    ``joint`` is the log density of each fold's test rows at each draw, ``rows`` the log mean
    density of each test row. Draws are those of ``chains`` chains one after another, in batches of
    ``length`` draws for errors. ``given_all`` is the log mean density of each fold's test rows
    where ``joint`` is not their density but that given the training rows; else None.
    """

    joint: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, " row"]
    chains: int
    length: int
    given_all: Float[np.ndarray, " fold"] | None = None

    @property
    def score(self) -> Float[np.ndarray, " fold"]:
        """log p(test rows | all rows) of each fold: the full-data score of the same rows."""
        if self.given_all is not None:
            return self.given_all
        with np.errstate(invalid="ignore"):
            return log_mean_exp(self.joint)

    def level(self, fold: int) -> Level:
        """The full data as the last level on a fold's way."""
        return Level(1.0, self.joint[fold].reshape(self.chains, -1))

    def variance(self, influence: Float[np.ndarray, "... draw"]) -> Float[np.ndarray, " ..."]:
        """Monte Carlo variance of a mean over the full-data draws."""
        return shared_variance(influence, self.chains, self.length)


# What the draws of a fold contribute to the Hyvarinen score of the fold whose partner it is.
PASSED = "curvature_passed"


@dataclass(frozen=True)
class FullCurvature:
    """The full-data draws' side of the Hyvarinen score, for the test rows of every fold.

    ``node`` is each fold's bridge constant in nats. With l the density of the fold's test rows at a
    draw, v = expit(node - log l) and w = 1 - v, ``total`` sums v, w d and w (d^2 + dd), and then d
    and d^2 + dd without weights, over blocks of ``length`` draws of each chain of ``draws``, d and
    dd being the derivatives of a row's log density by its value; the last block of a chain may be
    shorter.
    """

    node: Float[np.ndarray, " fold"]
    total: Float[np.ndarray, "row chain block feature"]
    length: int
    draws: int


@dataclass
class Ladder:
    """What became of folds that overlap too little with the full data.

    ``rungs`` are those of such folds where draws are stored, ``climbed`` their scores where they
    are not, ``stranded`` the folds that rungs did not take to the full data.
    """

    rungs: list[Rung] = field(default_factory=list)
    climbed: list[Climbed] = field(default_factory=list)
    stranded: list[int] = field(default_factory=list)


@dataclass
class Pace:
    """How slowly the chains move: what ``watch`` sees of them, and what was measured by it.

    ``time`` is the longest autocorrelation time of each fold, in draws, which the lengths of
    batches follow; zero before it is measured.
    """

    watch: Watch
    time: Float[np.ndarray, " fold"]


@dataclass
class Outcomes:
    """What other rules than the log score know of the test rows.

    ``observed`` is the value of each test row, on a second axis the numbers of it where it has
    several, ``classes`` those that may occur. ``contributions``
    are block sums of what each draw contributes, ``replicate`` the stored predictive draws of each
    test row, ``full_curvature`` the full-data draws' side of the Hyvarinen score; the last two are
    None where no rule needs them.
    """

    observed: Float[np.ndarray, "row ..."]
    classes: Float[np.ndarray, " class"]
    contributions: dict[str, BlockSums] = field(default_factory=dict)
    replicate: Float[np.ndarray, "row chain draw ..."] | None = None
    full_curvature: FullCurvature | None = None

    @property
    def numbers_in_row(self) -> int:
        """How many numbers each row has."""
        return int(np.prod(self.observed.shape[1:]))

    def stored(self) -> Float[np.ndarray, "row chain draw ..."]:
        """The stored predictive draws."""
        if self.replicate is None:
            raise ValueError("this score needs stored predictive draws, but the run kept none")
        return self.replicate

    def curvature(self) -> FullCurvature:
        """The full-data draws' side of the Hyvarinen score."""
        if self.full_curvature is None:
            raise ValueError("a Hyvarinen score needs derivatives, but the run recorded none")
        return self.full_curvature


@dataclass(frozen=True)
class Standing:
    """How far the chains of the folds have come, as plain numbers.

    Each of ``folds`` folds has ``chains`` chains of ``draws`` draws, ``count`` draws in all. Draws
    are summed in blocks of ``length``, of which each chain has ``full_blocks`` full ones; a batch
    of a fold is ``joined`` of them, more where its chains are slow. ``slowest_ess`` are its
    effective draws in the direction in which its chains are slowest, and ``slow`` marks folds that
    have too few of them, of those that have a posterior. ``undefined`` marks folds whose score is
    not a number: of densities that are none, or of no posterior.
    """

    folds: int
    chains: int
    draws: int
    count: int
    length: int
    full_blocks: int
    joined: Int[np.ndarray, " fold"]
    slowest_ess: Float[np.ndarray, " fold"]
    slow: Bool[np.ndarray, " fold"]
    undefined: Bool[np.ndarray, " fold"]


def standing_of(
    sums: RunningSums, time: Float[np.ndarray, " fold"], improper: Bool[np.ndarray, " fold"]
) -> Standing:
    """How far chains have come whose longest autocorrelation times are ``time``."""
    folds, chains, draws = *sums.log_sum.shape[:2], int(sums.draws[0])
    length, full_blocks, count = sums.length, sums.full_blocks, chains * draws
    slowest_ess = count / np.maximum(time, 1.0)
    return Standing(
        folds,
        chains,
        draws,
        count,
        length,
        full_blocks,
        joined_blocks(time, length, full_blocks),
        slowest_ess,
        (slowest_ess < slow_limit(count)) & ~improper,
        (sums.undefined > 0) | improper,
    )


@dataclass
class Evidence:
    """What sampling has recorded.

    ``partner`` and ``previous`` are positions of folds: whose draws bridge this fold's score (the
    number of folds stands for the full data, -1 for none), and whose score this fold's draws
    bridge. ``improper`` marks folds that have no posterior. ``draws`` are the log scores of all
    draws, None where running sums are kept alone; ``position`` are the folds' draws, where they are
    kept. There are ``outcomes`` where a rule other than the log score needs them, or predictive
    draws are kept. ``standing`` follows from the rest, and is taken whenever the chains stop.
    """

    folds: Folds
    partner: Int[np.ndarray, " fold"]
    previous: Int[np.ndarray, " fold"]
    improper: Bool[np.ndarray, " fold"]
    full: FullData
    sums: RunningSums
    pace: Pace
    ladder: Ladder = field(default_factory=Ladder)
    draws: Float[np.ndarray, "fold chain draw target"] | None = None
    position: Float[np.ndarray, "fold chain draw d"] | None = None
    outcomes: Outcomes | None = None
    standing: Standing = field(init=False)

    def __post_init__(self) -> None:
        self.standing = standing_of(self.sums, self.pace.time, self.improper)

    def measure(self) -> None:
        """Find out how far the chains have come, and how slowly they move."""
        self.pace.time = slowest_time(self.sums, self.pace.watch)
        self.standing = standing_of(self.sums, self.pace.time, self.improper)

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``, which are then made anew."""
        served = self.previous[members]
        for name, kept in self.outcomes.contributions.items() if self.outcomes else ():
            kept.forget(served[served >= 0] if name == PASSED else members)
        self.sums.forget(members)
        self.pace.watch.forget(members)

    def outcomes_for(self, name: str) -> Outcomes:
        """What is known of the test rows, which the score ``name`` needs."""
        if self.outcomes is None:
            raise ValueError(f"{name} needs what it was not recorded for; run again with {name}")
        return self.outcomes

    def variance_of(
        self,
        blocks: Float[np.ndarray, "member chain block"],
        members: Int[np.ndarray, " member"] | None = None,
    ) -> Float[np.ndarray, " member"]:
        """Monte Carlo variance of means over the draws of folds, from those of their full blocks.

        ``members`` are the folds whose draws they are; None: each fold in turn.
        """
        now = self.standing
        joined = now.joined if members is None else now.joined[members]
        return batch_means_variance(blocks, now.length, now.draws, joined)

    def first(self, draws: int, blocks: bool) -> Evidence:
        """What the first ``draws`` draws of every chain recorded, from stored draws.

        ``blocks`` asks for the sums by row and the contributions too, which are only kept by block
        of ``standing.length`` draws: ``draws`` must then end a block, and blocks keep their length.
        What is kept over whole chains (rows' squares and largest values) becomes unknown. Without
        ``blocks`` there are none of these, and blocks have the length of a run of ``draws``.
        """
        if self.draws is None:
            raise ValueError("the first draws of a run need stored draws, but this one kept sums")
        length, chains, folds = self.standing.length, self.standing.chains, self.standing.folds
        stored, count = self.draws[:, :, :draws], -(-draws // length)
        sums = RunningSums.empty(folds, chains, length if blocks else self.sums.batch)
        sums.update(np.arange(folds), stored)
        if blocks and self.sums.rows is not None:
            sums.rows = self.sums.rows.first(count)
        rungs = [replace(rung, scores=rung.scores[..., :draws]) for rung in self.ladder.rungs]
        return replace(
            self,
            sums=sums,
            draws=stored,
            ladder=replace(self.ladder, rungs=rungs),
            outcomes=self.outcomes and _first_outcomes(self.outcomes, draws, count * blocks),
            position=None,
        )


def _first_outcomes(outcomes: Outcomes, draws: int, blocks: int) -> Outcomes:
    """What is left of ``outcomes`` after ``draws`` draws, or that many blocks; 0: no sums."""
    contributions = {
        name: replace(kept, total=kept.total[:, :, :blocks])
        for name, kept in outcomes.contributions.items()
        if blocks
    }
    kept = None if outcomes.replicate is None else outcomes.replicate[:, :, :draws]
    return replace(outcomes, contributions=contributions, replicate=kept)


@dataclass(frozen=True)
class RowScores:
    """Scores of all test rows and their Monte Carlo variances.

    ``spread`` is the variance of each row's averaged quantity over draws, where draws count by the
    row's density: the rows with the most of it have their tails fitted.
    """

    score: Float[np.ndarray, " row"]
    variance: Float[np.ndarray, " row"]
    spread: Float[np.ndarray, " row"]


@dataclass(frozen=True)
class Estimate:
    """A score of every fold, and of every test row where it is a sum over rows.

    ``variance`` is the Monte Carlo variance of each fold's score. That of their weighted sum has
    two parts: ``own_variance`` from the folds' draws and ``full_variance`` from the full-data
    draws that all folds share; ``full_influence`` is what each of these adds to the sum, so that it
    adds up with that of folds scored by weights. ``spread`` is the variance of the fold's averaged
    quantity over draws, ``noise`` that of its mean times the number of draws: their ratio gives
    effective draws.
    ``weighted`` says that draws count by the density of the test rows, whose tail then matters.
    ``weight`` is zero for folds whose score is not a number; they are left out of the total.
    ``stranded`` marks folds that rungs did not take to the full data, whose variance is infinite,
    and ``unsettled`` those with chains at rungs that disagree, drift or hardly move.
    """

    name: str
    score: Float[np.ndarray, " fold"]
    variance: Float[np.ndarray, " fold"]
    own_variance: float
    full_influence: Float[np.ndarray, " draw"]
    full_variance: float
    spread: Float[np.ndarray, " fold"]
    noise: Float[np.ndarray, " fold"]
    overlap: Float[np.ndarray, " fold"]
    bridged: Bool[np.ndarray, " fold"]
    full_score: Float[np.ndarray, " fold"]
    weight: Float[np.ndarray, " fold"]
    stranded: Bool[np.ndarray, " fold"]
    unsettled: Bool[np.ndarray, " fold"]
    rows: RowScores | None = None
    weighted: bool = True


def fold_variance(
    evidence: Evidence,
    weight: Float[np.ndarray, " fold"],
    own: Float[np.ndarray, "fold chain block"],
    passed: Float[np.ndarray, "fold chain block"],
) -> float:
    """Monte Carlo variance that the folds' draws give to the weighted sum of their scores.

    Chains of different folds are independent, but a fold's draws may serve two scores: its own
    and, as a partner, the previous fold's. Their influences are added before taking variances.
    """
    previous = evidence.previous
    passed_weight = np.where(previous >= 0, weight[np.maximum(previous, 0)], 0.0)
    influence = weight[:, None, None] * own - passed_weight[:, None, None] * passed
    used = (weight > 0) | (passed_weight > 0)
    return float(evidence.variance_of(influence[used], np.flatnonzero(used)).sum())
