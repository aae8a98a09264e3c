"""The bridge estimator of a fold's predictive density.

If the training rows of fold k and its test rows together are the training rows of another
posterior that has been sampled too, its partner (mostly the full data), the predictive density
r = p(test | train) is the ratio of the two posteriors' normalising constants. With l the
likelihood of the test rows, n0 draws of the fold and n1 of the partner, and any number eta,

    log r = eta + log mean over fold draws of    expit(log l - eta)
                - log mean over partner draws of expit(eta - log l)

which is the optimal bridge of Meng and Wong (1996), Bennett's acceptance ratio, when
eta = log r + log(n0 / n1); it solves a(eta) + log(n0 / n1) = b(eta) for the two log means a, b.
To first order the error of log r is the mean over fold draws of f0 / mean(f0) - 1 minus the mean
over partner draws of f1 / mean(f1) - 1, for f0, f1 the two averaged terms; to second order its
bias is -v0 / 2 + v1 / 2, for v0, v1 the Monte Carlo variances of these two means.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
from jaxtyping import Float, Int

# Solve for this many values at a time, to bound memory.
_CHUNK = 2**22


def solve(
    own: Float[np.ndarray, "fold n0"],
    partner: Float[np.ndarray, "fold n1"],
    log_odds: Float[np.ndarray, " fold"] | float,
) -> Float[np.ndarray, " fold"]:
    """The eta of the optimal bridge of each fold, where a(eta) + log_odds = b(eta).

    a falls and b rises in eta, so there is one root: Newton steps, bisection where one would
    leave the bracket. ``log_odds`` is log(n0 / n1), in effective draws.
    """
    step = max(1, _CHUNK // (own.shape[1] + partner.shape[1]))
    odds = np.broadcast_to(log_odds, len(own))
    parts = [
        _solve_chunk(own[i : i + step], partner[i : i + step], odds[i : i + step])
        for i in range(0, len(own), step)
    ]
    return np.concatenate(parts)


def _solve_chunk(own: np.ndarray, partner: np.ndarray, log_odds: np.ndarray) -> np.ndarray:
    both = np.concatenate([own, partner], axis=1)
    finite = np.where(np.isfinite(both), both, np.nan)
    low = np.nanmin(finite, axis=1) - np.abs(log_odds) - 10.0
    high = np.nanmax(finite, axis=1) + np.abs(log_odds) + 10.0
    eta = np.nanmedian(finite, axis=1)
    open_ = np.arange(len(own))  # folds that still move: some need many bisections, most do not
    for _ in range(100):
        here = eta[open_]
        a, a_slope = _log_mean(own[open_] - here[:, None])
        b, b_slope = _log_mean(here[:, None] - partner[open_])
        gap = a + log_odds[open_] - b
        low[open_] = np.where(gap > 0, here, low[open_])
        high[open_] = np.where(gap > 0, high[open_], here)
        newton = here + gap / np.maximum(a_slope + b_slope, 1e-12)
        inside = (newton > low[open_]) & (newton < high[open_])
        eta[open_] = np.where(inside, newton, 0.5 * (low[open_] + high[open_]))
        open_ = open_[np.abs(eta[open_] - here) >= 1e-9]
        if not len(open_):
            break
    return eta


def _log_mean(x: Float[np.ndarray, "fold draw"]) -> tuple[np.ndarray, np.ndarray]:
    """log mean(expit(x)) over draws, and its derivative mean(e (1 - e)) / mean(e)."""
    e = scipy.special.expit(np.clip(x, -700.0, 700.0))  # clipped: no mean underflows to zero
    mean = e.mean(axis=1)
    return np.log(mean), (e * (1.0 - e)).mean(axis=1) / mean


def log_mean_exp(
    values: Float[np.ndarray, "fold draw"], sign: float = 1.0
) -> Float[np.ndarray, " fold"]:
    """Log of the mean over draws of exp(sign values), of a few folds at a time."""
    count = values.shape[1]
    step = max(1, _CHUNK // max(count, 1))
    found = [
        scipy.special.logsumexp(sign * values[first : first + step], axis=1)
        for first in range(0, len(values), step)
    ]
    return np.concatenate(found) - np.log(count)


def effective(total: Any, square: Any) -> Any:
    """Number of equal terms that would carry a sum as these do: (sum f)^2 / sum f^2."""
    return total**2 / square


def overlap(log_terms: Float[np.ndarray, "fold draw"]) -> Float[np.ndarray, " fold"]:
    """Number of draws that carry the average of exp(log_terms), in logs: no sum underflows."""
    return np.exp(
        2.0 * scipy.special.logsumexp(log_terms, axis=1)
        - scipy.special.logsumexp(2.0 * log_terms, axis=1)
    )


def guess(
    joint: Float[np.ndarray, "fold draw"], partner: Int[np.ndarray, " fold"], own_draws: int
) -> Float[np.ndarray, " fold"]:
    """The full-data draws' guess of the optimal bridge constant of each fold.

    Importance sampling gives log r as -log mean(1 / l) over full-data draws; the constant is
    log r plus the log of the draws of the fold over those of the partner.
    """
    count = joint.shape[1]
    guess = -log_mean_exp(joint, -1.0)
    guess = np.where(np.isfinite(guess), guess, 0.0)
    return guess + np.where(partner == len(partner), np.log(own_draws / count), 0.0)
