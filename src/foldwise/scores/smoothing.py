"""Weights of full-data draws for a fold: their smoothed tail, and what they are worth.

The largest M of S weights are replaced by what is expected of them, with a generalised Pareto
density of shape k and scale sigma above the next largest weight c (Vehtari et al. 2024): the i-th
smallest of them by the mean of the quantile function over its share,

    M * integral from (i - 1) / M to i / M of Q(p) dp,   Q(p) = c + sigma ((1 - p)^-k - 1) / k,

so that their sum is that of the density, c M + sigma M / (1 - k). The usual choice, Q in the middle
of each share and never more than the largest weight seen, makes the sum too small: Q bends upwards,
and the largest weights are those that have not been seen. Scores are then too high, in each fold by
little, in all of them with the same sign. The shape that is shown, as arviz-stats does, is shrunk
towards 0.5; that of the density is not, since with the scale of another fit its mean is too large:
scores by weights of light tails (k = 0.2) were too low by a tenth of their error in every fold.

Whether weights are even enough to be used must not be asked of these largest weights: where they
are missing by chance, weights look even and the score is too high. What weights are worth is
expected from quantiles of their logs in the bulk of the draws. Moments of the logs are moved by the
largest weights too: of folds on the border, half of which are used, scores of those used would be
too high by several times as much (tests/scores/test_smoothing.py).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy
from jaxtyping import Bool, Float

from foldwise.scores.diagnostics import PARETO_LIMIT
from foldwise.support.runtime import in_threads

# The share of draws that weights must be worth as equal ones; and where a refit takes no integrals:
# posteriors of a few parameters may have tails far heavier than normal ones, which chains rarely
# visit, and that tails are missing by chance no weights tell.
EVEN, EVEN_WHERE_CHEAP = 0.4, 0.7
# What they are worth counts instead of what is expected, where it is less than this share of it.
_AS_EXPECTED = 0.5
# What moments of all log weights let expect counts likewise: of normal parameters they agree with
# quantiles to a tenth, of others whose tails are heavier they are far less.
_AS_EXPECTED_OF_ALL = 0.75
# Beyond this leverage, weights have no variance: they are worth nothing.
_MOST_LEVERAGE = 0.4999
# Shapes this close to zero are taken as this.
_LEAST_K = 1e-6
# Folds whose tails are fitted side by side: as many as the cache has room for.
_FOLDS_AT_ONCE = 16


def k_limit(draws: int) -> float:
    """Pareto k up to which so many draws give a usable mean (Vehtari et al. 2024)."""
    return min(PARETO_LIMIT, 1.0 - 1.0 / np.log10(draws))


def uneven(
    k: Float[np.ndarray, " fold"],
    weight_ess: Float[np.ndarray, " fold"],
    draws: int,
    least: float = EVEN,
) -> Bool[np.ndarray, " fold"]:
    """Folds whose weights are too uneven to be relied on.

    Those with a Pareto k over its limit, and those whose weights are worth less than ``least`` of
    the draws (:func:`worth`). k alone is not enough: it is itself uncertain, and where it comes out
    small by chance, the largest weights are missing and the score is too high, by several of its
    errors.
    """
    return ~((k <= k_limit(draws)) & (weight_ess >= least * draws))


def smoothed(
    log_ratio: Float[np.ndarray, "fold draw"],
) -> tuple[Float[np.ndarray, "fold draw"], Float[np.ndarray, " fold"]]:
    """Pareto-smoothed log weights, summing to one, and the Pareto k of each fold.

    ``log_ratio`` is m: weights before smoothing are exp(-m). A fold with values that are no number
    has none, and one whose weights are all equal has k = -inf.
    """
    weights = np.full_like(log_ratio, np.nan)
    k = np.full(len(log_ratio), np.nan)
    good = np.isfinite(log_ratio).all(axis=1)
    flat = good & (np.ptp(log_ratio, axis=1) < 1e-12)
    weights[flat], k[flat] = -np.log(log_ratio.shape[1]), -np.inf
    some = good & ~flat
    if some.any():
        found, k[some] = _with_tails(-log_ratio[some])
        weights[some] = found - scipy.special.logsumexp(found, axis=1)[:, None]
    return weights, k


def tail_length(draws: int) -> int:
    """How many of so many weights are the tail."""
    return int(3 * np.sqrt(draws)) if draws > 225 else draws // 5


def _with_tails(
    raw: Float[np.ndarray, "fold draw"],
) -> tuple[Float[np.ndarray, "fold draw"], Float[np.ndarray, " fold"]]:
    """Log weights up to a constant, the largest as a Pareto density expects them, and its shape."""
    count = raw.shape[1]
    tail = tail_length(count)
    largest = np.argpartition(raw, count - tail - 1, axis=1)[:, -tail - 1 :]
    values = np.take_along_axis(raw, largest, axis=1)
    order = np.argsort(values, axis=1, kind="stable")
    largest, values = (np.take_along_axis(a, order, axis=1) for a in (largest, values))
    new, density = raw - values[:, -1:], np.exp(values - values[:, -1:])
    cutoff = density[:, :1]
    shape, scale = pareto_fit(density[:, 1:] - cutoff)
    k = _shrunk(shape, tail)
    with np.errstate(invalid="ignore", divide="ignore"):
        # beyond the limit the density's mean is a guess; what is shown then is flagged
        mean = (k <= k_limit(count))[:, None]
        above = np.where(mean, _means(shape[:, None], tail), _middles(k[:, None], tail))
        expected = np.log(cutoff + scale[:, None] * above)
    expected = np.where(mean, expected, np.minimum(expected, 0.0))
    usable = np.isfinite(expected).all(axis=1)[:, None]
    kept = np.take_along_axis(new, largest[:, 1:], axis=1)
    np.put_along_axis(new, largest[:, 1:], np.where(usable, expected, kept), axis=1)
    return new, k


def _means(k: Float[np.ndarray, "fold 1"], tail: int) -> Float[np.ndarray, "fold tail"]:
    """Mean of ((1 - p)^-k - 1) / k over each of the ``tail`` equal shares of p."""
    left, k = 1.0 - np.arange(tail + 1) / tail, _not_zero(k)
    return (-np.diff(left ** (1.0 - k), axis=1) * tail / (1.0 - k) - 1.0) / k


def _middles(k: Float[np.ndarray, "fold 1"], tail: int) -> Float[np.ndarray, "fold tail"]:
    """The same in the middle of each share."""
    k = _not_zero(k)
    return np.expm1(-k * np.log1p(-(np.arange(tail) + 0.5) / tail)) / k


def _not_zero(k: Float[np.ndarray, "fold 1"]) -> Float[np.ndarray, "fold 1"]:
    return np.where(np.abs(k) < _LEAST_K, _LEAST_K, k)


def _shrunk(k: Float[np.ndarray, " fold"], tail: int) -> Float[np.ndarray, " fold"]:
    """Shapes shrunk towards 0.5 as by ten more values (Vehtari et al. 2024), which are shown."""
    return (tail * k + 10.0 * 0.5) / (tail + 10.0)


def pareto_fit(
    excess: Float[np.ndarray, "fold tail"],
) -> tuple[Float[np.ndarray, " fold"], Float[np.ndarray, " fold"]]:
    """Shape k and scale sigma of a generalised Pareto density, from ascending values above zero.

    The fit of Zhang and Stephens (2009): b = -k / sigma has a prior on a grid, and

        k(b) = mean log(1 - b x),   posterior of b ~ exp(n [log(-b / k(b)) - k(b) - 1]);

    k at the posterior mean of b. What arviz-stats does for one fold before it shrinks the shape,
    here for all at once, in a third of the time.
    """
    parts = np.array_split(excess, -(-len(excess) // _FOLDS_AT_ONCE))
    k, sigma = (np.concatenate(part) for part in zip(*in_threads(_fitted, parts), strict=True))
    return k, sigma


@np.errstate(invalid="ignore", divide="ignore")  # of tails that are flat; threads have their own
def _fitted(x: Float[np.ndarray, "fold tail"]) -> tuple[np.ndarray, np.ndarray]:
    n = x.shape[1]
    points = 30 + int(np.sqrt(n))
    grid = 1.0 - np.sqrt(points / (np.arange(points) + 0.5))
    b = grid / (3.0 * x[:, int(n / 4 + 0.5) - 1, None]) + 1.0 / x[:, -1:]
    k = np.log1p(-b[:, :, None] * x[:, None, :]).mean(axis=2)
    log_posterior = n * (np.log(-b / k) - k - 1.0)
    weight = np.exp(log_posterior - log_posterior.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    weight = np.where(weight >= 10.0 * np.finfo(float).eps, weight, 0.0)
    b_mean = (b * weight).sum(axis=1) / weight.sum(axis=1)
    k_mean = np.log1p(-b_mean[:, None] * x).mean(axis=1)
    return k_mean, -k_mean / b_mean


def worth(
    weights: Float[np.ndarray, "fold draw"], log_ratio: Float[np.ndarray, "fold draw"] | None
) -> Float[np.ndarray, " fold"]:
    """How many equal weights are worth as much as those of each fold, as ``log_ratio`` lets expect.

    That is S E[w]^2 / E[w^2]. Where the parameters are normal, log w is a z + h z^2 / 2 for a
    standard normal z in its worst direction: h is the leverage of what is left out, and the Pareto
    k of the weights. Quantiles of log w (:func:`_quadratic`) give both a and h, and

        E[w]^2 / E[w^2] = sqrt(1 - 2 h) / (1 - h) exp(a^2 / (1 - h) - 2 a^2 / (1 - 2 h)).

    So do moments (:func:`_quadratic_of_moments`), which see tails that are heavier than those of
    such a quadratic: where they let expect less than three quarters of that, they count.

    ``weights`` are smoothed log weights that sum to one: where they are worth less than half of
    that, or nothing is expected, what they are worth counts.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        found = 1.0 / (np.exp(weights) ** 2).sum(axis=1)
        if log_ratio is None:
            return found
        expected = weights.shape[1] * _expected_share(log_ratio)
    return np.where(found < _AS_EXPECTED * expected, found, np.fmin(expected, weights.shape[1]))


def _expected_share(log_ratio: Float[np.ndarray, "fold draw"]) -> Float[np.ndarray, " fold"]:
    """Share of the draws that weights exp(-log_ratio) are worth, expected from their logs."""
    share, of_all = _share(*_quadratic(log_ratio)), _share(*_quadratic_of_moments(log_ratio))
    return np.where(of_all < _AS_EXPECTED_OF_ALL * share, of_all, share)


def _share(a: Float[np.ndarray, " fold"], h: Float[np.ndarray, " fold"]) -> np.ndarray:
    """E[w]^2 / E[w^2] where log w is a z + h z^2 / 2."""
    leverage, a2 = np.minimum(h, _MOST_LEVERAGE), a**2
    even = np.sqrt(1.0 - 2.0 * leverage) / (1.0 - leverage)
    share = even * np.exp(a2 / (1.0 - leverage) - 2.0 * a2 / (1.0 - 2.0 * leverage))
    return np.where(h > _MOST_LEVERAGE, 0.0, share)


def _quadratic(
    log_ratio: Float[np.ndarray, "fold draw"],
) -> tuple[Float[np.ndarray, " fold"], Float[np.ndarray, " fold"]]:
    """a and h for which a z + h z^2 / 2, z standard normal, has the quantiles of -log_ratio.

    Of the quantiles q at the probabilities that z is below -1, 0 and 1, the distance
    d = (q_1 - q_-1) / 2 and the bend b = q_1 + q_-1 - 2 q_0 count. They are a and h where the
    quadratic rises all the way, else their ratio tells a / |h| by a table.
    """
    count = log_ratio.shape[1]
    places = np.round(scipy.special.ndtr([1.0, 0.0, -1.0]) * (count - 1)).astype(int)
    parts = np.array_split(log_ratio, -(-len(log_ratio) // _FOLDS_AT_ONCE))

    def at_places(part: Float[np.ndarray, "fold draw"]) -> Float[np.ndarray, "fold place"]:
        return np.partition(part, places, axis=1)[:, places]

    low, middle, high = -np.concatenate(in_threads(at_places, parts)).T
    distance, bend = 0.5 * (high - low), high + low - 2.0 * middle
    of_quadratics, steepness, distances = _quadratics()
    with np.errstate(invalid="ignore", divide="ignore"):  # of weights most of which are equal
        ratio = np.abs(bend) / distance
        flat = ratio > of_quadratics[0]
        a_over_h = np.where(flat, np.interp(ratio, of_quadratics, steepness), 1.0 / ratio)
        own = np.where(flat, np.interp(a_over_h, steepness[::-1], distances[::-1]), a_over_h)
        h = distance / own
        a = np.where(flat, a_over_h * h, distance)
    known = distance > 0.0
    return np.where(known, a, 0.0), np.where(known, np.copysign(h, bend), 0.0)


def _quadratic_of_moments(
    log_ratio: Float[np.ndarray, "fold draw"],
) -> tuple[Float[np.ndarray, " fold"], Float[np.ndarray, " fold"]]:
    """a and h with which a z + h z^2 / 2 has the variance and third central moment of -log_ratio.

    These are a^2 + h^2 / 2 and 3 a^2 h + h^3.
    """
    away = log_ratio.mean(axis=1, keepdims=True) - log_ratio
    square = away * away
    variance, third = square.mean(axis=1), (square * away).mean(axis=1)
    # with b = h / 2: third = 6 b variance - 4 b^3, whose left side rises up to b^2 = variance / 2
    most = np.sqrt(variance / 2.0)
    wanted = np.clip(third, -4.0 * variance * most, 4.0 * variance * most)
    with np.errstate(invalid="ignore", divide="ignore"):
        b = 2.0 * most * np.sin(np.arcsin(wanted / (4.0 * variance * most)) / 3.0)
    b = np.where(variance > 0, b, 0.0)
    return np.sqrt(np.maximum(variance - 2.0 * b**2, 0.0)), 2.0 * b


@lru_cache
def _quadratics() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bend over distance of z^2 / 2 + s z, ascending, with s and the distance of each.

    From s = 4 on, where it rises up to z = -4, the ratio is 1 / s. (z + s)^2 is below x^2 where
    z + s is between -x and x.
    """
    steepness = np.linspace(4.0, 0.0, 81)
    wanted = scipy.special.ndtr([-1.0, 0.0, 1.0])
    low, high = np.zeros((81, 3)), np.full((81, 3), 8.0)
    s = steepness[:, None]
    for _ in range(50):
        x = 0.5 * (low + high)
        below = scipy.special.ndtr(x - s) - scipy.special.ndtr(-x - s) < wanted
        low, high = np.where(below, x, low), np.where(below, high, x)
    q = 0.5 * (0.5 * (low + high)) ** 2
    distance = 0.5 * (q[:, 2] - q[:, 0])
    return (q[:, 2] + q[:, 0] - 2.0 * q[:, 1]) / distance, steepness, distance
