"""A cross-validation under way: how it is done, and all that is needed to take it further."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.folds.folds import Folds
from foldwise.models.evaluate import values_held
from foldwise.models.model import Model
from foldwise.sampling.blocks import (
    FINEST,
    Sampler,
    Segment,
)
from foldwise.sampling.fit import Fit
from foldwise.sampling.metric import MetricShape
from foldwise.sampling.program import FoldProgram, block_size
from foldwise.sampling.tuning import (
    WATCHED,
    Locals,
)
from foldwise.scores.diagnostics import DIVERGENT_LIMIT
from foldwise.scores.estimate import estimate
from foldwise.scores.evidence import Evidence
from foldwise.scores.needs import Emit
from foldwise.scores.recording import record
from foldwise.scores.rungs import LEAST_OVERLAP


@dataclass(frozen=True)
class Settings:
    """How a run is done."""

    scores: tuple[str, ...]
    estimator: str
    memory: str
    keep: tuple[str, ...]
    chains: int
    warmup: int
    batch: int
    precision: str
    seed: int


@dataclass
class Run:
    """A cross-validation under way: all that is needed to take it further."""

    model: Model
    folds: Folds
    fit: Fit
    settings: Settings
    full_positions: Float[np.ndarray, "draw d"]
    locals: Locals
    sampler: Sampler
    evidence: Evidence
    acceptance: Float[np.ndarray, " fold"]
    divergences: Int[np.ndarray, " fold"]
    moves: Int[np.ndarray, "fold chain"]
    tries: Int[np.ndarray, " fold"]
    seconds: dict[str, float] = field(default_factory=dict)

    def copy(self) -> Run:
        """A run that goes on from here and leaves this one as it is."""
        was, outcomes = self.evidence, self.evidence.outcomes
        if outcomes is not None:
            outcomes = replace(outcomes, contributions=deepcopy(outcomes.contributions))
        sums, pace = deepcopy(was.sums), deepcopy(was.pace)
        evidence = replace(was, sums=sums, pace=pace, outcomes=outcomes)
        return replace(
            self,
            sampler=self.sampler.copy(),
            evidence=evidence,
            acceptance=self.acceptance.copy(),
            divergences=self.divergences.copy(),
            moves=self.moves.copy(),
            tries=self.tries.copy(),
            seconds=dict(self.seconds),
        )

    def far_folds(self) -> Int[np.ndarray, " fold"]:
        """Folds that overlap too little with the full data for a bridge without rungs.

        None where no score asked for is that of whole test sets: the log score by row is a plain
        mean, and Hyvarinen scores of such folds come from the full-data draws alone.
        """
        evidence = self.evidence
        by_row = self.sampler.program.emit.by_row
        joint_scores = {"log"} if by_row else {"log", "log_pointwise"}
        if self.settings.estimator == "mean" or not joint_scores & set(self.settings.scores):
            return np.zeros(0, int)
        joint = estimate(evidence, "log", self.settings.estimator)
        possible = np.isfinite(evidence.sums.log_sum).any(axis=(1, 2))
        far = ~(joint.overlap >= LEAST_OVERLAP) & ~evidence.standing.undefined & possible
        return np.flatnonzero(far & (evidence.partner == evidence.standing.folds))

    def record(self, members: Int[np.ndarray, " fold"], segment: Segment) -> None:
        """Add what a segment recorded of the folds ``members``."""
        record(self.evidence, members, segment.scores, segment.watched, segment.extras)
        self.acceptance[members] += segment.acceptance
        self.divergences[members] += segment.divergences
        self.moves[members] += segment.moves

    @property
    def divergent(self) -> Bool[np.ndarray, " fold"]:
        """Folds with more divergent transitions than may be."""
        most = DIVERGENT_LIMIT * self.evidence.standing.count
        return self.divergences > most

    def try_again(self) -> Int[np.ndarray, " fold"]:
        """Folds whose chains are too slow or diverge; all their draws are forgotten.

        The draws become warm-up: the chains go on from where they are, with a metric from there,
        and with the finest steps where they diverge. These cost so much that they are tried once.
        """
        slow, divergent = self.evidence.standing.slow, self.divergent
        members = np.flatnonzero((slow | divergent) & (self.sampler.finer < FINEST))
        self.sampler.finer[members] = np.where(divergent[members], FINEST, 0)
        self.sampler.far |= slow
        self.evidence.forget(members)
        for counts in (self.acceptance, self.divergences, self.moves):
            counts[members] = 0
        self.tries[members] += 1
        return members


def fold_program(
    model: Model,
    folds: Folds,
    settings: Settings,
    emit: Emit,
    metric: MetricShape,
    together: int = 1,
) -> FoldProgram:
    """The program of the folds of ``together`` such models, which fill blocks side by side."""
    bridged = settings.estimator != "mean" and bool(
        ((folds.partner >= 0) & (folds.partner < len(folds))).any()
    )
    return FoldProgram(
        model,
        emit,
        block_size(values_held(model), together * len(folds), settings.chains),
        settings.chains,
        2 if bridged else 1,
        int(folds.n_test.max()),
        min(model.dimension, WATCHED),
        metric,
        settings.precision,
        tempered=model.joint_log_likelihood is None,
    )
