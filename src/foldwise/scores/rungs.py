"""Rungs between a fold's posterior and the full data's, and the score by way of them.

A bridge is only as good as the overlap of the two posteriors it joins. A rung is the posterior
with the fold's test rows weighed by t between 0 and 1; with l the likelihood of the test rows,
neighbours at t < u differ by the factor l^(u - t), so

    log r = sum over neighbours of log (Z_u / Z_t),

each term a bridge of its own. ``sampling/rungs.py`` chooses and samples them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from jaxtyping import Float, Int

from foldwise.scores import bridge
from foldwise.scores.diagnostics import block_means, rhat, series_variance
from foldwise.scores.sums import block_length

# Folds with less overlap than this get rungs: twice the level below which errors are off.
LEAST_OVERLAP = 20.0
# Neighbours on a ladder overlap by twice that again: what each bridge's error misses adds up over
# the rungs (bench/rungs.py prints errors against exact answers).
RUNG_OVERLAP = 40.0
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
class Step:
    """The bridge between neighbours: influences of the draws below and above on its log ratio."""

    node: float
    log_ratio: float
    up: Float[np.ndarray, "chain draw"]
    down: Float[np.ndarray, "chain draw"]
    overlap: float


def join(below: Level, above: Level) -> Step:
    """log (Z_u / Z_t) of two neighbours by the optimal bridge, all in logs: no mean underflows."""
    low, high = ((above.temper - below.temper) * level.scores for level in (below, above))
    odds = float(np.log(low.size / high.size))
    node = float(bridge.solve(low.reshape(1, -1), high.reshape(1, -1), odds)[0])
    log_up, log_down = scipy.special.log_expit(low - node), scipy.special.log_expit(node - high)
    a, b = (float(scipy.special.logsumexp(part) - np.log(part.size)) for part in (log_up, log_down))
    carried = [float(bridge.overlap(part.reshape(1, -1))[0]) for part in (log_up, log_down)]
    # draws that might as well be the other side's: few if two tight clusters are far apart
    common = float(np.exp(a)) * low.size
    return Step(
        node,
        node + a - b,
        np.exp(log_up - a) - 1.0,
        np.exp(log_down - b) - 1.0,
        min(*carried, common),
    )


def enough(below: Level, above: Level) -> float:
    """Overlap that neighbours must have; less where there are few draws to begin with."""
    return min(RUNG_OVERLAP, 0.1 * min(below.scores.size, above.scores.size))


def near(below: Level, above: Level) -> bool:
    """Whether a bridge is worth a try: beyond 40 nats, exp(-20) of the draws are in common."""
    gap = np.min(above.scores) - np.max(below.scores)
    return bool((above.temper - below.temper) * gap < 40.0)


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

    def full_influence(self, full: Float[np.ndarray, " draw"]) -> Float[np.ndarray, " draw"]:
        """What each full-data draw adds to the score; ``full`` are their log scores."""
        terms = scipy.special.log_expit(self.node - (1.0 - self.temper) * full)
        return 1.0 - np.exp(terms - (scipy.special.logsumexp(terms) - np.log(terms.size)))

    @property
    def settled(self) -> bool:
        """Whether the rungs' chains agree and stay where they are."""
        return bool(self.rhat <= most_rhat(self.draws) and abs(self.drift) <= MOST_DRIFT)


class Way:
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
        self.rhat = 1.0 if stored else rung_rhat(bottom.scores)

    def take(self, step: Step, above: Level) -> None:
        """Go on to the level ``above`` by the bridge ``step``."""
        self._leave(step)
        self._check(above)
        self.correction -= 0.5 * self._variance(step.down)
        self.level, self.down = above, step.down

    def finish(self, full: Level) -> Climbed:
        """Bridge to the full data."""
        step, last = join(self.level, full), self.level
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

    def _leave(self, step: Step) -> None:
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
        self.rhat = max(self.rhat, rung_rhat(level.scores))
        self.acceptance = min(self.acceptance, level.acceptance)

    def _variance(self, series: Float[np.ndarray, "chain draw"]) -> float:
        """Monte Carlo variance of a mean; rungs add up, so a few long batches of each will do."""
        draws = series.shape[1]
        return float(series_variance(series, max(block_length(draws, self.batch), draws // 5)))


def rung_rhat(scores: Float[np.ndarray, "chain draw"]) -> float:
    """R-hat of a rung's log score; infinite if a chain never moved."""
    if not np.ptp(scores, axis=1).all():
        return np.inf
    centred = scores - scores.mean()
    return float(rhat(centred.sum(axis=1), (centred**2).sum(axis=1), scores.shape[1]))


def most_rhat(draws: int) -> float:
    """As for folds: the R-hat of chain means that scatter as if only one in 20 draws counted."""
    return max(1.1, float(np.sqrt(1.0 + 20.0 / draws)))
