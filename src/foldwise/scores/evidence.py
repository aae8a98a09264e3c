"""What sampling has recorded, and what an estimate of a score is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.scores.diagnostics import (
    batch_means_variance,
    draws_needed,
    drifting,
    joined_blocks,
    series_variance,
    slow_limit,
    slowest_time,
)
from foldwise.scores.rungs import Climbed, Level, Rung
from foldwise.scores.sums import BlockSums, RunningSums, Watch


@dataclass(frozen=True)
class FullData:
    """The full-data draws as the folds see them.

    ``joint`` is the log density of each fold's test rows at each draw, ``held_out`` that of all
    rows outside its training set, ``rows`` the log mean density of each test row. ``positions``
    are the draws, ``chains`` chains one after another, in batches of ``length`` draws for errors.
    """

    positions: Float[np.ndarray, "draw d"]
    chains: int
    length: int
    joint: Float[np.ndarray, "fold draw"]
    held_out: Float[np.ndarray, "fold draw"]
    rows: Float[np.ndarray, " row"]


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
class Evidence:
    """What sampling has recorded.

    ``partner`` and ``previous`` are positions of folds: whose draws bridge this fold's score (the
    number of folds stands for the full data, -1 for none), and whose score this fold's draws
    bridge. ``full`` is the joint log density of each fold's test rows at the full-data draws,
    ``full_chains`` chains after one another, ``full_rows`` the log of its mean for each test row.
    ``rungs`` are those of folds that overlap too little with the full data, ``climbed`` what became
    of them where draws are not stored, ``stranded`` the folds that rungs did not take to the full
    data. For other rules than the log score, ``contributions`` are block sums of what each draw
    contributes, ``replicate`` the stored predictive draws of each test row, ``observed`` its
    observed value, ``classes`` those that may occur. ``position`` are the folds' draws, where they
    are kept. ``watch`` sees how slowly the chains move, and ``time`` is the longest autocorrelation
    time of each fold, in draws, which the lengths of batches follow; ``full_length`` is that of
    batches of full-data draws. ``improper`` marks folds that have no posterior.
    """

    folds: Folds
    partner: Int[np.ndarray, " fold"]
    previous: Int[np.ndarray, " fold"]
    sums: RunningSums
    draws: Float[np.ndarray, "fold chain draw target"] | None
    full: Float[np.ndarray, "fold draw"]
    full_chains: int
    full_rows: Float[np.ndarray, " row"]
    rungs: list[Rung] = field(default_factory=list)
    climbed: list[Climbed] = field(default_factory=list)
    stranded: list[int] = field(default_factory=list)
    contributions: dict[str, BlockSums] = field(default_factory=dict)
    replicate: Float[np.ndarray, "row chain draw"] | None = None
    position: Float[np.ndarray, "fold chain draw d"] | None = None
    observed: Float[np.ndarray, " row"] | None = None
    classes: Float[np.ndarray, " class"] | None = None
    full_curvature: FullCurvature | None = None
    watch: Watch | None = None
    time: Float[np.ndarray, " fold"] | None = None
    full_length: int | None = None
    improper: Bool[np.ndarray, " fold"] | None = None

    @property
    def undefined(self) -> Bool[np.ndarray, " fold"]:
        """Folds whose score is not a number: of densities that are none, or of no posterior."""
        found = self.sums.undefined > 0
        return found if self.improper is None else found | self.improper

    def measure(self) -> None:
        """Find out how slowly the chains move."""
        if self.watch is not None:
            self.time = slowest_time(self.sums, self.watch)

    def forget(self, members: Int[np.ndarray, " fold"]) -> None:
        """Forget all draws of the folds ``members``, which are then made anew."""
        served = self.previous[members]
        for name, kept in self.contributions.items():
            kept.forget(served[served >= 0] if name == PASSED else members)
        self.sums.forget(members)
        if self.watch is not None:
            self.watch.forget(members)

    @property
    def joined(self) -> Int[np.ndarray, " fold"]:
        """Blocks of draws in a batch of each fold: more where its chains are slow."""
        if self.time is None:
            return np.ones(len(self.folds), np.int64)
        return joined_blocks(self.time, self.sums.length, self.sums.full_blocks)

    @property
    def slowest_ess(self) -> Float[np.ndarray, " fold"]:
        """Effective draws of each fold in the direction in which its chains are slowest."""
        if self.time is None:
            return np.full(len(self.folds), np.nan)
        return self.chains * self.n_draws / np.maximum(self.time, 1.0)

    @property
    def slow(self) -> Bool[np.ndarray, " fold"]:
        """Folds whose chains are too slow for their length, of those that have a posterior."""
        slow = self.slowest_ess < slow_limit(self.chains * self.n_draws)
        return slow if self.improper is None else slow & ~self.improper

    @property
    def draws_needed(self) -> int:
        """Draws of each chain at which no fold's chains would be too slow, by their times now."""
        return draws_needed(self.slowest_ess, self.chains, self.n_draws)

    @property
    def drifting(self) -> Bool[np.ndarray, " fold"]:
        """Folds whose chains were still on their way together."""
        nothing = np.zeros(len(self.folds), bool)
        return nothing if self.watch is None else drifting(self.watch)

    def variance_of(
        self,
        blocks: Float[np.ndarray, "member chain block"],
        members: Int[np.ndarray, " member"] | None = None,
    ) -> Float[np.ndarray, " member"]:
        """Monte Carlo variance of means over the draws of folds, from those of their full blocks.

        ``members`` are the folds whose draws they are; None: each fold in turn.
        """
        joined = self.joined if members is None else self.joined[members]
        return batch_means_variance(blocks, self.sums.length, self.n_draws, joined)

    @property
    def chains(self) -> int:
        """Chains of each fold."""
        return self.sums.log_sum.shape[1]

    @property
    def n_draws(self) -> int:
        """Draws of each chain."""
        return int(self.sums.draws[0])

    def full_level(self, fold: int) -> Level:
        """The full data as the last level on a fold's way."""
        return Level(1.0, self.full[fold].reshape(self.full_chains, -1))

    def first(self, draws: int, blocks: bool) -> Evidence:
        """What the first ``draws`` draws of every chain recorded, from stored draws.

        ``blocks`` asks for the sums by row and the contributions too, which are only kept by block
        of ``sums.length`` draws: ``draws`` must then end a block, and blocks keep their length.
        What is kept over whole chains (rows' squares and largest values) becomes unknown. Without
        ``blocks`` there are none of these, and blocks have the length of a run of ``draws``.
        """
        if self.draws is None:
            raise ValueError("the first draws of a run need stored draws, but this one kept sums")
        length, chains = self.sums.length, self.chains
        stored = self.draws[:, :, :draws]
        sums = RunningSums.empty(len(self.folds), chains, length if blocks else self.sums.batch)
        sums.update(np.arange(len(self.folds)), stored)
        count, contributions = -(-draws // length), {}
        if blocks:
            if self.sums.rows is not None:
                sums.rows = self.sums.rows.first(count)
            contributions = {
                name: replace(kept, total=kept.total[:, :, :count])
                for name, kept in self.contributions.items()
            }
        return replace(
            self,
            sums=sums,
            draws=stored,
            rungs=[replace(rung, scores=rung.scores[..., :draws]) for rung in self.rungs],
            contributions=contributions,
            replicate=None if self.replicate is None else self.replicate[..., :draws],
            position=None,
        )


@dataclass(frozen=True)
class Estimate:
    """A score of every fold, and of every test row where it is a sum over rows.

    ``variance`` is the Monte Carlo variance of each fold's score. That of their weighted sum has
    two parts: ``own_variance`` from the folds' draws and ``full_variance`` from the full-data
    draws that all folds share, whose influences on the sum are ``full_influence``. ``spread`` is
    the variance of the fold's averaged quantity over draws, ``noise`` that of its mean times the
    number of draws: their ratio gives effective draws.
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
    rows: Float[np.ndarray, " row"] | None = None
    row_variance: Float[np.ndarray, " row"] | None = None
    row_spread: Float[np.ndarray, " row"] | None = None
    weighted: bool = True
    stranded: Bool[np.ndarray, " fold"] | None = None
    unsettled: Bool[np.ndarray, " fold"] | None = None


def full_variance(
    evidence: Evidence, influence: Float[np.ndarray, "... draw"]
) -> Float[np.ndarray, " ..."]:
    """Monte Carlo variance of a mean over the full-data draws."""
    by_chain = influence.reshape(*influence.shape[:-1], evidence.full_chains, -1)
    return series_variance(by_chain, evidence.full_length)


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
