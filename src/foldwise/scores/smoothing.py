"""Weights of full-data draws for a fold: their smoothed tail, and what they are worth.

The largest M of S weights are replaced by what is expected of them, with a generalised Pareto
density above the next largest weight c (Vehtari et al. 2024; shape k and scale sigma are those of
arviz-stats): the i-th smallest of them by the mean of the quantile function over its share,

    M * integral from (i - 1) / M to i / M of Q(p) dp,   Q(p) = c + sigma ((1 - p)^-k - 1) / k,

so that their sum is that of the density, c M + sigma M / (1 - k). The usual choice, Q in the middle
of each share and never more than the largest weight seen, makes the sum too small: Q bends upwards,
and the largest weights are those that have not been seen. Scores are then too high, in each fold by
little, in all of them with the same sign.

Whether weights are even enough to be used must not be asked of these largest weights: where they
are missing by chance, weights look even and the score is too high. What weights are worth is
expected from the moments of their logs, which the bulk of the draws decides.
"""

from __future__ import annotations

import numpy as np
import scipy
from jaxtyping import Bool, Float

from foldwise.scores.diagnostics import PARETO_LIMIT

# The share of draws that weights must be worth as equal ones.
_EVEN = 0.4
# What they are worth counts instead of what is expected, where it is less than this share of it.
_AS_EXPECTED = 0.5
# Beyond this leverage, weights have no variance: they are worth nothing.
_MOST_LEVERAGE = 0.4999
# Shapes this close to zero are taken as this.
_LEAST_K = 1e-6


def k_limit(draws: int) -> float:
    """Pareto k up to which so many draws give a usable mean (Vehtari et al. 2024)."""
    return min(PARETO_LIMIT, 1.0 - 1.0 / np.log10(draws))


def uneven(
    k: Float[np.ndarray, " fold"], weight_ess: Float[np.ndarray, " fold"], draws: int
) -> Bool[np.ndarray, " fold"]:
    """Folds whose weights are too uneven to be relied on.

    Those with a Pareto k over its limit, and those whose weights are worth less than ``_EVEN`` of
    the draws (:func:`worth`). k alone is not enough: it is itself uncertain, and where it comes out
    small by chance, the largest weights are missing and the score is too high, by several of its
    errors.
    """
    return ~((k <= k_limit(draws)) & (weight_ess >= _EVEN * draws))


def smoothed(
    log_ratio: Float[np.ndarray, "fold draw"],
) -> tuple[Float[np.ndarray, "fold draw"], Float[np.ndarray, " fold"]]:
    """Pareto-smoothed log weights, summing to one, and the Pareto k of each fold.

    ``log_ratio`` is m: weights before smoothing are exp(-m). A fold with values that are no number
    has none, and one whose weights are all equal has k = -inf.
    """
    from arviz_stats.base import array_stats

    weights = np.full_like(log_ratio, np.nan)
    k = np.full(len(log_ratio), np.nan)
    good = np.isfinite(log_ratio).all(axis=1)
    flat = good & (np.ptp(log_ratio, axis=1) < 1e-12)
    weights[flat], k[flat] = -np.log(log_ratio.shape[1]), -np.inf
    some = good & ~flat
    if some.any():
        found, shape = array_stats.psislw(log_ratio[some])
        # beyond the limit the density's mean is a guess; what is shown then is flagged
        mean = np.flatnonzero(shape <= k_limit(log_ratio.shape[1]))
        found[mean] = _expected_tail(-log_ratio[some][mean], found[mean], shape[mean])
        weights[some] = found - scipy.special.logsumexp(found, axis=1)[:, None]
        k[some] = shape
    return weights, k


def tail_length(draws: int) -> int:
    """How many of so many weights are the tail."""
    return int(3 * np.sqrt(draws)) if draws > 225 else draws // 5


def _expected_tail(
    raw: Float[np.ndarray, "fold draw"],
    found: Float[np.ndarray, "fold draw"],
    k: Float[np.ndarray, " fold"],
) -> Float[np.ndarray, "fold draw"]:
    """Log weights with the means of their largest ones in place of ``found``'s quantiles.

    ``found`` are ``raw`` smoothed, up to a constant. Their tail is Q at (i - 1/2) / M, cut off at
    the largest of ``raw``: its middle, which is not, tells the scale of the density.
    """
    count = raw.shape[1]
    tail = tail_length(count)
    largest = np.argpartition(raw, count - tail - 1, axis=1)[:, -tail - 1 :]
    values = np.take_along_axis(raw, largest, axis=1)
    order = np.argsort(values, axis=1, kind="stable")
    largest, values = (np.take_along_axis(a, order, axis=1) for a in (largest, values))
    top, least = values[:, -1:], raw.argmin(axis=1)[:, None]
    shift = np.take_along_axis(found, least, axis=1) - np.take_along_axis(raw, least, axis=1)
    cutoff = np.exp(values[:, :1] - top)
    middle = np.take_along_axis(found, largest[:, 1 + tail // 2, None], axis=1) - shift - top
    k = np.where(np.abs(k) < _LEAST_K, _LEAST_K, k)[:, None]
    p = (tail // 2 + 0.5) / tail
    scale = (np.exp(middle) - cutoff) / (np.expm1(-k * np.log1p(-p)) / k)
    left = 1.0 - np.arange(tail + 1) / tail
    means = -np.diff(left ** (1.0 - k), axis=1) * tail / (1.0 - k)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.log(cutoff + scale * (means - 1.0) / k) + top + shift
    new = found.copy()
    usable = np.isfinite(expected).all(axis=1) & (middle[:, 0] < 0.0)
    np.put_along_axis(new, largest[:, 1:], expected, axis=1)
    return np.where(usable[:, None], new, found)


def worth(
    weights: Float[np.ndarray, "fold draw"], log_ratio: Float[np.ndarray, "fold draw"] | None
) -> Float[np.ndarray, " fold"]:
    """How many equal weights are worth as much as those of each fold, as ``log_ratio`` lets expect.

    That is S E[w]^2 / E[w^2]. Where the parameters are normal, log w is a z + h z^2 / 2 for a
    standard normal z in its worst direction: h is the leverage of what is left out, and the Pareto
    k of the weights. Variance a^2 + h^2 / 2 and third central moment 3 a^2 h + h^3 of log w give
    both a and h, and

        E[w]^2 / E[w^2] = sqrt(1 - 2 h) / (1 - h) exp(a^2 / (1 - h) - 2 a^2 / (1 - 2 h)).

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
    """Share of the draws that weights exp(-log_ratio) are worth, from moments of their logs."""
    away = log_ratio.mean(axis=1, keepdims=True) - log_ratio
    square = away * away
    variance, third = square.mean(axis=1), (square * away).mean(axis=1)
    # with b = h / 2: third = 6 b variance - 4 b^3, whose left side rises up to b^2 = variance / 2
    most = np.sqrt(variance / 2.0)
    wanted = np.clip(third, -4.0 * variance * most, 4.0 * variance * most)
    with np.errstate(invalid="ignore", divide="ignore"):
        b = 2.0 * most * np.sin(np.arcsin(wanted / (4.0 * variance * most)) / 3.0)
    b = np.where(variance > 0, b, 0.0)
    h, a2 = np.minimum(2.0 * b, _MOST_LEVERAGE), variance - 2.0 * b**2
    share = np.sqrt(1.0 - 2.0 * h) / (1.0 - h) * np.exp(a2 / (1.0 - h) - 2.0 * a2 / (1.0 - 2.0 * h))
    return np.where(2.0 * b > _MOST_LEVERAGE, 0.0, share)
