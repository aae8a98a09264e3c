"""Monte Carlo error, effective sample size, R-hat and its benchmark, tails, status by fold."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from foldwise.scores.sums import RunningSums, Watch
from foldwise.support.seeds import Stream, generator

# Blocks of each chain that the benchmark of R-hat-max shuffles, and how often. Replicates give its
# 99 % quantile to about 0.4 percentage points.
SHUFFLE_BLOCKS = 5
REPLICATES = 500
# Chains with a smaller R-hat agree (Vehtari et al. 2021).
LEAST_RHAT_LIMIT = 1.01
# Above this the mean of a Pareto-tailed quantity has no usable error (Vehtari et al. 2024).
PARETO_LIMIT = 0.7
# Below this many draws' worth of overlap the bridge's error is not to be trusted (method note:
# root mean square z of about 5).
OVERLAP_LIMIT = 10.0
# Of 50 effective draws a Monte Carlo error is known to a tenth (1 / sqrt(2 * 50)).
ESS_LIMIT = 50.0
# With fewer effective draws in some direction, no more than five in each of four chains, nobody
# knows whether the chains have arrived. In longer runs, whose errors are smaller, it must be more.
SLOWEST_ESS = 20.0
# Share of divergent transitions that leaves no more than a corner of the posterior unseen.
DIVERGENT_LIMIT = 0.005
# Share of folds whose chains are in trouble from which on none is called fine. How slow a chain is
# can not be told from a few effective draws, and chains that never enter the neck of a funnel look
# fast; but the folds of a model have similar posteriors.
MOST_IN_TROUBLE = 0.5
# About the 95 % quantile of Student's t for four chains.
DRIFT = 3.2
# Batch means of b draws miss a share of about t / (2 b) of the variance of chains whose
# autocorrelation dies out exponentially with integrated time t: an eighth at four times.
BATCH_TIMES = 4.0
# A variance from fewer batches in each of four chains is itself too uncertain.
LEAST_BATCHES = 4
# Share of a sum of squares that is no more than the rounding of some thousand terms.
_ROUNDING = 1e-13
# Far below the 0.8 that step sizes adapt to: they have not fitted the fold.
ACCEPTANCE_LIMIT = 0.5

# Worst first. What is wrong with a fold, and what to do about it.
ADVICE = {
    "improper": "no answer exists: the training rows say nothing about a parameter, and its prior "
    "is flat; give it a proper prior",
    "not finite": "log densities were NaN or infinite: check the likelihood at its extremes "
    "(overflow, log of zero, observations outside the support)",
    "singular covariance": "the predictive covariance of the test rows is singular, as when two "
    "rows are always predicted alike, or the counts of a row have a known sum: use dss_pointwise, "
    "energy for rows of several numbers, or leave such rows out",
    "no spread": "all predictive draws of a test row are equal, so the score is not defined: use "
    "crps or mse, or leave such rows out",
    "too far from its partner": "no number of rungs that was tried joins the fold's posterior to "
    "its partner's, so the error of the bridge is not known: check the test rows, give the model "
    "heavier tails, or score by row",
    "stuck chain": "a chain did not move: reparameterise the model, or run a longer warm-up",
    "chains disagree": "R-hat is above its limit: run a longer warm-up and more draws",
    "not settled": "the chains were still on their way together at the end of the run: run a "
    "longer warm-up, or reparameterise the model",
    "too slow": "in some direction the chains moved so slowly that the run holds too few effective "
    "draws of it (column slowest_ess): reparameterise the model, or run many more draws",
    "divergent": "more than 1 in 200 transitions diverged, however fine the steps: part of the "
    "posterior is too narrow, and the chains stay away from it: reparameterise the model",
    "partner in trouble": "the next fold, whose draws the bridge uses, has chains that are not "
    "finite, stuck, divergent, disagree or are too slow: mend that one first",
    "others in trouble": "the chains of most other folds disagree, diverge or are too slow, so "
    "that those of this fold may look better by luck alone: mend these first",
    "rungs not settled": "chains at the rungs between the fold's posterior and its partner's "
    "disagree, drift or hardly move: run a longer warm-up and more draws",
    "poor overlap": "the fold's posterior and its partner's hardly overlap, so the error of the "
    "bridge is not to be trusted: extend the run",
    "heavy tail": "the predictive density has a heavy tail (Pareto k over 0.7), so the plain "
    "mean and its error are not to be trusted: bridge joint scores where the fold has a partner, "
    "else score by row, or extend the run",
    "cut off": "a row that is left out has density zero close to the full-data draws, which "
    'therefore never go where the fold\'s posterior may be: use method="auto", which runs chains',
    "integrals not settled": "parameters of the fold's groups could not be integrated out: rules "
    'of different sizes disagree, or no mode was found; use method="auto", which runs chains there',
    "uneven weights": "the full-data draws are too far from the fold's posterior (Pareto k of the "
    'importance weights is over its limit): use method="auto", which runs chains there',
    "few effective draws": "fewer than 50 effective draws: extend the run",
    "low acceptance": "acceptance is under 0.5: run a longer warm-up",
    "fit not settled": "the full-data fit, from which the chains start, has not converged: mend "
    "that first",
}


# Statuses of folds whose chains move badly, or that lean on such folds.
HAMPERED = (
    "stuck chain",
    "chains disagree",
    "not settled",
    "too slow",
    "divergent",
    "partner in trouble",
    "others in trouble",
)
# What to say where most folds are hampered, and leave out the future of parameters in a chain.
RANDOM_WALK = (
    "most folds leave out the future, and the prior ties parameters of that future to each other, "
    "as in a random walk, which chains follow slowly: make the walk's innovations the parameters "
    "(the non-centred form), or integrate the walk out by a Kalman filter as joint_log_likelihood "
    "(docs/dependent.md)"
)


def batch_means_variance(
    blocks: Float[np.ndarray, "... chain block"],
    length: int,
    draws: int,
    joined: Int[np.ndarray, " unit"] | None = None,
) -> Float[np.ndarray, " ..."]:
    """Monte Carlo variance of the mean over chains and draws, by batch means.

    sigma^2 / (L N), sigma^2 = b / (L a - 1) sum over chains and batches of (batch mean - mean)^2,
    for L chains of N draws in a full batches of length b; deviations are from the mean over all
    chains (Jones et al. 2006; equation (9) of the parallel cross-validation paper).

    ``blocks`` are means of ``length`` consecutive draws, and a batch is one of them, or where
    ``joined`` is given that many of them, for each entry of the first axis.
    """
    if joined is not None and (joined > 1).any():
        found = np.empty(blocks.shape[:-2])
        for count in np.unique(joined):
            some, batches = joined == count, block_means(blocks[joined == count], int(count))
            found[some] = batch_means_variance(batches, length * int(count), draws)
        return found
    chains, count = blocks.shape[-2:]
    flat = blocks.reshape(*blocks.shape[:-2], chains * count)
    sigma2 = length * flat.var(axis=-1, ddof=1)
    return sigma2 / (chains * draws)


def autocorrelation_time(
    blocks: Float[np.ndarray, "fold chain block ..."],
    variance: Float[np.ndarray, "fold ..."],
    length: int,
) -> Float[np.ndarray, "fold ..."]:
    """Integrated autocorrelation time, in draws, of series of which block means are known.

    b (c_0 + 2 sum over t of c_t) / variance, c_t the covariance of the means of blocks t apart,
    of ``length`` b draws, about the mean over all chains, and ``variance`` that of single draws.
    The sum ends before the first pair c_t + c_{t+1} that is not positive (Geyer 1992). Chains that
    stay apart, and a common drift, count as autocorrelation: their blocks remain correlated over
    the whole run. Zero where nothing varies.
    """
    chains, count = blocks.shape[1:3]
    centred = blocks - blocks.mean(axis=(1, 2), keepdims=True)
    lags = [
        (centred[:, :, : count - t] * centred[:, :, t:]).sum(axis=(1, 2)) / (chains * count)
        for t in range(count)
    ]
    total, going_on = lags[0], np.ones(variance.shape, bool)
    for t in range(1, count, 2):
        pair = sum(lags[t : t + 2])
        going_on = going_on & (pair > 0)
        total = total + np.where(going_on, 2.0 * pair, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(variance > 0, length * total / variance, 0.0)


class _Filled(NamedTuple):
    """Blocks that hold draws: how many each, and sums of the log score and its square."""

    counts: Int[np.ndarray, " block"]
    total: Float[np.ndarray, "fold chain block"]
    square: Float[np.ndarray, "fold chain block"]


def _filled(sums: RunningSums) -> _Filled:
    counts = sums.block_draws
    return _Filled(counts, sums.total[..., : len(counts)], sums.square[..., : len(counts)])


def slowest_time(sums: RunningSums, watch: Watch) -> Float[np.ndarray, " fold"]:
    """Longest autocorrelation time of each fold: of its log score, or of a direction watched."""
    kept = _filled(sums)
    full, count = int(kept.counts[0]), int(kept.counts.sum()) * kept.total.shape[1]
    blocks = kept.total[..., kept.counts == full] / full
    with np.errstate(invalid="ignore"):
        mean = kept.total.sum(axis=(1, 2)) / count
        variance = np.nan_to_num(kept.square.sum(axis=(1, 2)) / count - mean**2)
        score = autocorrelation_time(blocks, variance, full)
    watched = _watched_time(watch)[1].max(axis=1)
    return np.fmax(np.fmax(np.nan_to_num(score), watched), _time_over_tries(watch))


def _watched_time(watch: Watch) -> tuple[np.ndarray, Float[np.ndarray, "fold direction"]]:
    """Block means of the directions that are watched, and their autocorrelation times."""
    means = watch.means
    return means, autocorrelation_time(means, watch.variance, watch.length)


def _time_over_tries(watch: Watch) -> Float[np.ndarray, " fold"]:
    """Longest autocorrelation time of folds tried again, over this try and the one before.

    Chains that are tried until they look well would be trusted just when they happen to stay away
    from where they were slow. So they must agree with where they were before. Zero for other folds.
    """
    found = np.zeros(len(watch.centre))
    if watch.earlier is None:
        return found
    again = np.isfinite(watch.earlier).all(axis=(1, 2, 3))
    before, now = watch.earlier[again], (watch.means + watch.centre[:, None, None])[again]
    if again.any() and before.shape == now.shape:
        both = np.concatenate([before, now], axis=2)
        time = autocorrelation_time(both, watch.variance[again], watch.length)
        found[again] = time.max(axis=1)
    return found


def drifting(watch: Watch) -> Bool[np.ndarray, " fold"]:
    """Folds whose chains all move one way from the first to the second half of the run.

    In the slowest direction: the mean over chains of the change of their means is more than
    ``DRIFT`` of its standard errors from zero, by the spread of the chains.
    """
    means, time = _watched_time(watch)
    slowest = np.take_along_axis(means, time.argmax(axis=1)[:, None, None, None], axis=3)[..., 0]
    half = slowest.shape[2] // 2
    change = slowest[..., -half:].mean(axis=2) - slowest[..., :half].mean(axis=2)
    error = change.std(axis=1, ddof=1) / np.sqrt(change.shape[1])
    return np.abs(change.mean(axis=1)) > DRIFT * error


def joined_blocks(
    time: Float[np.ndarray, " fold"], length: int, blocks: int
) -> Int[np.ndarray, " fold"]:
    """How many blocks of ``length`` draws make a batch that is longer than ``time`` by far.

    A power of two such that batches have at least ``BATCH_TIMES`` autocorrelation times, as long
    as ``LEAST_BATCHES`` of them fit into a chain of ``blocks`` blocks.
    """
    wanted = np.exp2(np.ceil(np.log2(np.maximum(BATCH_TIMES * time / length, 1.0))))
    most = 2 ** int(np.log2(max(blocks // LEAST_BATCHES, 1)))
    return np.minimum(wanted, most).astype(np.int64)


def effective_draws(
    spread: Float[np.ndarray, " ..."], variance: Float[np.ndarray, " ..."], draws: int
) -> Float[np.ndarray, " ..."]:
    """Draws that, were they independent, would give a mean this variance; all, if none varies.

    ``spread`` is the variance of one draw. NaN where the mean's variance alone is zero.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        found = spread / variance
    constant = (spread == 0) & (variance == 0)
    return np.where(variance > 0, found, np.where(constant, float(draws), np.nan))


def block_means(
    series: Float[np.ndarray, "... chain draw"], length: int
) -> Float[np.ndarray, "... chain block"]:
    """Means of consecutive blocks of draws; what is left at the end is dropped."""
    blocks = series.shape[-1] // length
    whole = series[..., : blocks * length]
    return whole.reshape(*whole.shape[:-1], blocks, length).mean(axis=-1)


def series_variance(
    series: Float[np.ndarray, "... chain draw"], length: int | None = None
) -> Float[np.ndarray, " ..."]:
    """Monte Carlo variance of the mean of stored series, by batches of sqrt(draws) unless given."""
    draws = series.shape[-1]
    length = length or max(int(np.sqrt(draws)), 1)
    return batch_means_variance(block_means(series, length), length, draws)


def shared_variance(
    influence: Float[np.ndarray, "... draw"], chains: int, length: int | None
) -> Float[np.ndarray, " ..."]:
    """Monte Carlo variance of a mean over draws of ``chains`` chains that follow one another."""
    by_chain = influence.reshape(*influence.shape[:-1], chains, -1)
    return series_variance(by_chain, length)


def rhat(
    total: Float[np.ndarray, "... chain"],
    square: Float[np.ndarray, "... chain"],
    draws: int,
) -> Float[np.ndarray, " ..."]:
    """Potential scale reduction of chains with sums ``total`` and sums of squares ``square``.

    sqrt((N - 1) / N + B / (N W)), W the mean of the chains' variances and B / N the variance of
    their means (Gelman and Rubin 1992; no splitting, no ranks, so that sums suffice). NaN when
    no chain moves.
    """
    means = total / draws
    with np.errstate(invalid="ignore", divide="ignore"):
        within = ((square - draws * means**2) / (draws - 1)).mean(axis=-1)
        between = means.var(axis=-1, ddof=1)
        ratio = np.where(within > 0, between / within, np.nan)
    return np.sqrt((draws - 1) / draws + ratio)


@dataclass(frozen=True)
class Mixing:
    """R-hat of each fold's log score, and what its maximum would be if all chains had mixed."""

    rhat: Float[np.ndarray, " fold"]
    benchmark: Float[np.ndarray, " replicate"]
    draws: int

    @property
    def rhat_max(self) -> float:
        """Largest R-hat of any fold."""
        return float(np.nanmax(self.rhat)) if np.isfinite(self.rhat).any() else np.nan

    @property
    def share_above(self) -> float:
        """Share of benchmark replicates at or above R-hat-max: small means not mixed."""
        if np.isnan(self.rhat_max):
            return np.nan
        return float(np.mean(self.benchmark >= self.rhat_max))

    @property
    def limit(self) -> float:
        """R-hat above which a fold's chains disagree: the 99 % quantile of the benchmark.

        At least 1.01: the benchmark of a few folds may be lower. Where chains mix so slowly that
        shuffled blocks still differ, the benchmark grows with them; so the limit is at most 1.1, or
        for short chains the R-hat of chain means that scatter as if only one in 20 draws counted.
        NaN without a benchmark.
        """
        if not self.benchmark.size:
            return np.nan
        most = max(1.1, float(np.sqrt(1.0 + 20.0 / self.draws)))
        return max(min(float(np.quantile(self.benchmark, 0.99)), most), LEAST_RHAT_LIMIT)


def fold_rhat(sums: RunningSums) -> Float[np.ndarray, " fold"]:
    """R-hat of each fold's log score, from block sums; one where it depends on no parameter."""
    kept = _filled(sums)
    found = rhat(kept.total.sum(axis=-1), kept.square.sum(axis=-1), int(kept.counts.sum()))
    return np.where(score_constant(sums), 1.0, found)


def mixing(sums: RunningSums, seed: int) -> Mixing:
    """R-hat by fold and the R-hat-max benchmark, from block sums.

    A replicate permutes the chains within each of 5 block positions, without replacement and
    independently for each fold, and takes the largest R-hat over the folds. (With replacement,
    as in the paper, between-chain variance shrinks by (L - 1) / L and healthy runs are flagged
    too often.)
    """
    counts, total, square = _filled(sums)
    draws, by_fold = int(counts.sum()), fold_rhat(sums)
    edges = np.unique(np.arange(SHUFFLE_BLOCKS) * len(counts) // SHUFFLE_BLOCKS)
    position_total = np.add.reduceat(total, edges, axis=-1)
    position_square = np.add.reduceat(square, edges, axis=-1).sum(axis=-1)
    usable = np.isfinite(by_fold) & ~score_constant(sums)
    benchmark = _shuffled_maxima(position_total[usable], position_square[usable], draws, seed)
    return Mixing(by_fold, benchmark, draws)


def _shuffled_maxima(
    total: Float[np.ndarray, "fold chain position"],
    square: Float[np.ndarray, "fold chain"],
    draws: int,
    seed: int,
) -> Float[np.ndarray, " replicate"]:
    """Largest R-hat over folds of each replicate.

    Permuting blocks leaves a fold's total sum of squares alone, so with S2 that sum and m the
    permuted chain means, W = (S2 - N sum m^2) / (L (N - 1)).
    """
    if not len(total):
        return np.full(REPLICATES, np.nan)
    rng = generator(seed, Stream.SHUFFLES)
    folds, chains, positions = total.shape
    per_fold = square.sum(axis=1)
    maxima = np.empty(REPLICATES)
    index = np.arange(positions)
    for replicate in range(REPLICATES):
        order = rng.random((folds, chains, positions)).argsort(axis=1)
        shuffled = total[np.arange(folds)[:, None, None], order, index].sum(axis=2)
        even = np.repeat(per_fold[:, None] / chains, chains, axis=1)
        maxima[replicate] = rhat(shuffled, even, draws).max()
    return maxima


def pareto_k(largest: Float[np.ndarray, "fold tail"], draws: int) -> Float[np.ndarray, " fold"]:
    """Shape k of the Pareto tail of each fold's predictive densities, from their largest logs.

    The fit and its tail length are those of Pareto smoothing in arviz-stats. Only the tail
    matters to it, so the values that were not kept are replaced by zeros. NaN where the tail is
    constant or not finite.
    """
    from arviz_stats.base import array_stats

    kept = largest.shape[1]
    pretend = min(draws, (kept - 1) ** 2 // 9)  # the most draws whose 3 sqrt(draws) were kept
    found = np.full(len(largest), np.nan)
    for fold, values in enumerate(largest):
        if draws < 25 or not np.isfinite(values.max()):
            continue
        density = np.zeros((1, pretend))
        tail = np.sort(np.exp(values - values.max()))[-min(kept, pretend) :]
        density[0, : len(tail)] = tail
        # a tail of equal values has no shape
        with suppress(ValueError), np.errstate(invalid="ignore", divide="ignore"):
            found[fold] = array_stats.pareto_khat(density, r_eff=1.0, tail="right")
    return found


def chain_stuck(watch: Watch, moves: Int[np.ndarray, "fold chain"]) -> np.ndarray:
    """Whether a fold has a chain whose position never moved.

    No proposal was accepted, or all blocks of draws have the same mean in every direction, to the
    rounding of a sum.
    """
    means = watch.means
    rounding = _ROUNDING * (np.abs(means) + np.sqrt(watch.variance)[:, None, None])
    still = (np.abs(means - means[:, :, :1]) <= rounding).all(axis=(2, 3)) & (means.shape[2] > 1)
    return ((moves == 0) | still).any(axis=1)


def score_constant(sums: RunningSums) -> Bool[np.ndarray, " fold"]:
    """Folds whose log score is the same at every draw, to rounding: it depends on no parameter."""
    kept = _filled(sums)
    total, square = kept.total.sum(axis=(1, 2)), kept.square.sum(axis=(1, 2))
    count = int(kept.counts.sum()) * kept.total.shape[1]
    with np.errstate(invalid="ignore"):
        return square - total**2 / count <= _ROUNDING * square


def fold_status(conditions: Mapping[str, np.ndarray]) -> np.ndarray:
    """Status of each fold: the worst of ``ADVICE`` that holds, or "fine".

    ``conditions`` says of every kind of trouble that they can be in which folds are in it.
    """
    if unknown := set(conditions) - set(ADVICE):
        raise ValueError(f"statuses must be those of ADVICE, but {sorted(unknown)} are not")
    possible = [name for name in ADVICE if name in conditions]
    return np.select([conditions[name] for name in possible], possible, default="fine")


def doubtful(
    bridged: np.ndarray,
    overlap: Float[np.ndarray, " fold"],
    tail: Float[np.ndarray, " fold"],
    ess: Float[np.ndarray, " fold"],
    acceptance: Float[np.ndarray, " fold"],
) -> dict[str, np.ndarray]:
    """Kinds of trouble that follow from the numbers of a fold, and which folds are in it."""
    return {
        "poor overlap": bridged & (overlap < OVERLAP_LIMIT),
        "heavy tail": ~bridged & (tail > PARETO_LIMIT),
        "few effective draws": ess < ESS_LIMIT,
        "low acceptance": acceptance < ACCEPTANCE_LIMIT,
    }


def slow_limit(draws: int) -> float:
    """Effective draws in its slowest direction below which a fold is too slow.

    The square root of all ``draws`` of its chains, and at least ``SLOWEST_ESS``: then batches, four
    in a chain, hold at least a time of autocorrelation, and more of them the longer the run.
    """
    return max(SLOWEST_ESS, float(np.sqrt(draws)))


def draws_needed(slowest_ess: Float[np.ndarray, " fold"], chains: int, draws: int) -> int:
    """Draws of each chain at which no fold would be too slow: half as many again as that takes.

    With t the longest autocorrelation time, n / t effective of n draws are sqrt(n) at n = t^2.
    """
    time = chains * draws / max(float(np.nanmin(slowest_ess, initial=np.inf)), 1.0)
    return int(np.ceil(1.5 * max(SLOWEST_ESS * time, time**2) / chains))


def advice(status: np.ndarray, names: np.ndarray, draws: int | None = None) -> list[str]:
    """One line for each kind of trouble: how many folds, which, and what to do.

    ``draws`` is how many draws a chain that is too slow needs, where that is known.
    """
    lines = []
    for kind, text in ADVICE.items():
        where = np.flatnonzero(status == kind)
        if where.size:
            shown = ", ".join(str(names[k]) for k in where[:5])
            more = f" and {where.size - 5} more" if where.size > 5 else ""
            if kind == "too slow" and draws is not None:
                text = text.replace("many more draws", f"about {draws:,} draws")
            lines.append(f"{kind}: {where.size} of {status.size} folds ({shown}{more}); {text}")
    return lines


def by_parameter(
    name: str, positions: Float[np.ndarray, "chain draw d"]
) -> Float[np.ndarray, " d"]:
    """A diagnostic of arviz-stats, ``"rhat"`` or ``"ess"``, of every parameter."""
    from arviz_stats.base import array_stats

    function = getattr(array_stats, name)
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN of a parameter that never moves
        return np.asarray(function(positions, chain_axis=0, draw_axis=1))
