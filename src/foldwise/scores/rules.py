"""Scoring rules: what each draw contributes, and how contributions become a score and its error.

A rule is one entry of ``RULES``. Its *contribution* says what a draw adds to running sums, by test
row or by fold; sums over draws, chains and blocks of draws merge by adding. Its *value* turns the
means of these contributions into the score of a row or a fold. Monte Carlo errors follow from the
two, by a jackknife over batches of consecutive draws, which also removes the second-order bias
that would add up over folds. A new rule is a function of means, perhaps a contribution, and an
entry in the table at the end of this file.

All scores are positively oriented, higher is better, except those named errors (``mse``, ``rmse``,
``mae``), which :func:`foldwise.compare` negates.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float, Int

from foldwise.scores.hyvarinen import CURVATURE, ROW_CURVATURE, hyvarinen
from foldwise.scores.rule import (
    Aggregate,
    Context,
    Contribution,
    Drawn,
    Features,
    Means,
    Rule,
    Sample,
    jackknife,
)

# Test sets up to this size have a joint Dawid-Sebastiani score; its error grows with the square of
# the size, and so do the sums that are kept.
MOST_JOINT_ROWS = 20
MOST_CLASSES = 50
LOG_SCORES = ("log", "log_pointwise")
INTERVAL_LEVEL = 0.9
# Variances and eigenvalues smaller than this, relative to what they are differences of, are zero.
ROUNDING = 1e-10
# Draws times rows of stored predictive draws that are worked on at once, about 32 MB an array.
_CHUNK = 2**22


# ---------------------------------------------------------------- contributions


def _residual_moments(drawn: Drawn) -> Features:
    """Predictive draw minus observed value, and its square."""
    residual = drawn.recorded["replicate"] - drawn.observed[:, None, None]
    return np.stack([residual, residual**2], axis=-1)


def _joint_moments(drawn: Drawn) -> Features:
    """Residuals of the fold's rows, and the products of all pairs of them; rows padded by zeros."""
    residual = drawn.recorded["replicate"] - drawn.observed[:, None, None]
    padded = np.zeros((len(drawn.counts), drawn.width, *residual.shape[1:]))
    padded[np.arange(drawn.width) < drawn.counts[:, None]] = residual
    padded = np.moveaxis(padded, 1, -1)
    i, j = np.tril_indices(drawn.width)
    return np.concatenate([padded, padded[..., i] * padded[..., j]], axis=-1)


def _class_probabilities(drawn: Drawn) -> Features:
    """Probability of each class; where the density is not known, which one the draw is."""
    if "probability" in drawn.recorded:
        return drawn.recorded["probability"]
    return (drawn.recorded["replicate"][..., None] == drawn.classes).astype(float)


def _below(drawn: Drawn) -> Features:
    """Whether the predictive draw is below the observed value, and whether it equals it."""
    observed = drawn.observed[:, None, None]
    return np.stack(
        [drawn.recorded["replicate"] < observed, drawn.recorded["replicate"] == observed], axis=-1
    ).astype(float)


def _absolute_differences(drawn: Drawn) -> Features:
    """|x - y|, and what the draw x adds to the mean distance G of two independent draws.

    G averages |x - x'| over pairs from different batches (the fair estimator where a batch is one
    draw), so that draws close in time do not make it too small. With g the mean distance of x to
    the draws of other batches, x adds 2 g - G, whose mean is G and whose spread is G's error.
    Sorting makes this O(n log n).
    """
    x = drawn.recorded["replicate"]
    rows, weight = len(x), _weights(drawn)
    order = np.argsort(x.reshape(rows, -1), axis=1)
    ranked = np.take_along_axis(x.reshape(rows, -1), order, axis=1)
    own = np.take_along_axis(weight.reshape(len(weight), -1), order, axis=1)
    number, below = own.cumsum(axis=1), (own * ranked).cumsum(axis=1)
    distance = (2 * number - number[:, -1:]) * ranked - 2 * below + below[:, -1:]
    sums = np.empty_like(ranked)
    np.put_along_axis(sums, order, distance, axis=1)
    sums = sums.reshape(x.shape)
    for batch in _batches(x.shape[2], drawn.batch):
        part = x[:, :, batch]
        apart = np.abs(part[..., :, None] - part[..., None, :])
        sums[:, :, batch] -= (apart * weight[:, :, None, batch]).sum(axis=-1)
    return _with_mean_distance(np.abs(x - drawn.observed[:, None, None]), sums, weight, drawn.batch)


def _norms(drawn: Drawn) -> Features:
    """The same for whole test sets, with Euclidean distances."""
    from scipy.spatial.distance import cdist

    _, chains, draws = drawn.recorded["replicate"].shape
    found = []
    for x, y, weight in zip(
        *(_split(a, drawn.counts) for a in (drawn.recorded["replicate"], drawn.observed)),
        np.broadcast_to(_weights(drawn), (len(drawn.counts), chains, draws)),
        strict=True,
    ):
        points = x.reshape(len(x), -1).T
        parts = _batches(len(points), max(1, _CHUNK // len(points)))
        sums = np.concatenate([cdist(points[part], points) @ weight.ravel() for part in parts])
        sums = sums.reshape(chains, draws)
        for chain in range(chains):
            for batch in _batches(draws, drawn.batch):
                near = x[:, chain, batch].T
                sums[chain, batch] -= cdist(near, near) @ weight[chain, batch]
        far = np.sqrt(((x - y[:, None, None]) ** 2).sum(axis=0))
        found.append(_with_mean_distance(far[None], sums[None], weight[None], drawn.batch))
    return np.concatenate(found)


def _weights(drawn: Drawn) -> Float[np.ndarray, "unit chain draw"]:
    """Weights of the draws; ones, for all rows or folds alike, where they have none."""
    if drawn.weight is None:
        return np.ones((1, *drawn.recorded["replicate"].shape[1:]))
    return drawn.weight


def _with_mean_distance(
    away: Float[np.ndarray, "unit chain draw"],
    sums: Float[np.ndarray, "unit chain draw"],
    weight: Float[np.ndarray, "unit chain draw"],
    batch: int,
) -> Features:
    """``away``, and 2 g - G from the weighted sums of distances to the draws of other batches."""
    whole = weight.sum(axis=(1, 2))
    edges = [part.start for part in _batches(sums.shape[2], batch)]
    pairs = whole**2 - (np.add.reduceat(weight, edges, axis=2) ** 2).sum(axis=(1, 2))
    mean = ((weight * sums).sum(axis=(1, 2)) / pairs)[:, None, None]
    return np.stack([away, 2.0 * sums * (whole / pairs)[:, None, None] - mean], axis=-1)


def _interval_ends(drawn: Drawn, level: float) -> Features:
    """What each draw adds to the two ends of the row's central interval.

    Around the quantile q of probability p, a draw x adds q + (p - 1[x <= q]) / f, centred, where
    1 / f, the slope of the quantile function, is taken between p - h and p + h, h half of the
    smaller tail.
    """
    x, ends = drawn.recorded["replicate"], []
    for p in (0.5 - 0.5 * level, 0.5 + 0.5 * level):
        h = 0.5 * min(p, 1.0 - p)
        q, low, high = _quantiles(x, drawn.weight, [p, p - h, p + h])[..., None, None]
        inside = (x <= q).astype(float)
        share = np.average(inside, axis=(1, 2), weights=drawn.weight)[:, None, None]
        ends.append(q + (share - inside) * (high - low) / (2 * h))
    return np.stack(ends, axis=-1)


def _quantiles(
    x: Float[np.ndarray, "row chain draw"],
    weight: Float[np.ndarray, "row chain draw"] | None,
    probabilities: list[float],
) -> Float[np.ndarray, "probability row"]:
    """Quantiles of each row's draws, nearly unbiased for normal ones.

    Between sorted draws, of which the one with weight w and the weight C up to and with it stands
    for the probability (C - 3/8 w) / (1 + 1 / (4 n)), weights adding up to one: for equal weights
    the usual (k - 3/8) / (n + 1/4).
    """
    if weight is None:
        return np.quantile(x, probabilities, axis=(1, 2), method="normal_unbiased")
    flat, own = x.reshape(len(x), -1), weight.reshape(len(x), -1)
    order = np.argsort(flat, axis=1)
    flat, own = np.take_along_axis(flat, order, axis=1), np.take_along_axis(own, order, axis=1)
    own = own / own.sum(axis=1, keepdims=True)
    place = (own.cumsum(axis=1) - 0.375 * own) / (1.0 + 0.25 / own.shape[1])
    found = [np.interp(probabilities, at, values) for at, values in zip(place, flat, strict=True)]
    return np.stack(found, axis=1)


def _batches(draws: int, batch: int) -> list[slice]:
    """Slices of consecutive draws; the last may be shorter."""
    return [slice(k, min(k + batch, draws)) for k in range(0, draws, batch)]


def _split(array: np.ndarray, counts: Int[np.ndarray, " fold"]) -> list[np.ndarray]:
    return np.split(array, counts.cumsum()[:-1])


# ---------------------------------------------------------------- values


def _dawid_sebastiani_row(means: Means, _: Context) -> np.ndarray:
    """-log s^2 - (y - m)^2 / s^2, with m and s^2 the predictive mean and variance of the row."""
    variance = _variance(means[..., 0], means[..., 1])
    return -np.log(variance) - means[..., 0] ** 2 / variance


def _variance(mean: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Variance from first and second moments; NaN where there is none but for rounding."""
    variance = square - mean**2
    return np.where(variance > ROUNDING * square, variance, np.nan)


def _dawid_sebastiani(means: Means, context: Context) -> np.ndarray:
    """-log det S - (y - m)' S^-1 (y - m), with m and S the predictive mean and covariance.

    By the eigenvalues of the correlation matrix, in which rows that only pad the test set are
    independent of the others. NaN where S is singular but for rounding.
    """
    width = int(np.sqrt(2 * means.shape[-1] + 2.25) - 1.5)
    present = np.arange(width) < _shaped_like(means, context.counts)[..., None]
    i, j = np.tril_indices(width)
    residual, square = means[..., :width], means[..., width:]
    variance = _variance(residual, square[..., np.flatnonzero(i - j == 0)])
    sd = np.sqrt(np.where(present, variance, 1.0))
    covariance = np.empty((*means.shape[:-1], width, width))
    covariance[..., i, j] = covariance[..., j, i] = square - residual[..., i] * residual[..., j]
    correlation = covariance / (sd[..., :, None] * sd[..., None, :])
    padding = ~present[..., None] | ~present[..., None, :]
    correlation = np.where(padding, np.eye(width), correlation)
    usable: Any = np.isfinite(correlation).all(axis=(-2, -1))
    value, vector = np.linalg.eigh(np.where(usable[..., None, None], correlation, np.eye(width)))
    usable = usable & (value[..., 0] > ROUNDING)
    value = np.where(usable[..., None], value, 1.0)
    standard = np.einsum("...ij,...i->...j", vector, residual / sd)
    determinant = np.log(value).sum(axis=-1) + 2.0 * np.log(sd).sum(axis=-1)
    return np.where(usable, -determinant - (standard**2 / value).sum(axis=-1), np.nan)


def _brier(means: Means, context: Context) -> np.ndarray:
    """-sum over classes of (P(class) - 1[y = class])^2; half of it for two classes."""
    right = _shaped_like(means, context.observed)[..., None] == context.classes
    return -((means - right) ** 2).sum(axis=-1) * (0.5 if len(context.classes) == 2 else 1.0)


def _margin(means: Means, context: Context) -> np.ndarray:
    """Probability of the observed class minus that of the likeliest other."""
    right = _shaped_like(means, context.observed)[..., None] == context.classes
    own = (means * right).sum(axis=-1)
    return own - np.where(right, -np.inf, means).max(axis=-1)


def _ranked_probability(means: Means, _: Context) -> np.ndarray:
    """-(E|x - y| - E|x - x'| / 2): CRPS, and with norms of vectors the energy score, negated."""
    return 0.5 * means[..., 1] - means[..., 0]


def _scaled_ranked_probability(means: Means, _: Context) -> np.ndarray:
    """-E|x - y| / E|x - x'| - log(E|x - x'|) / 2 (Bolin and Wallin 2023)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return -means[..., 0] / means[..., 1] - 0.5 * np.log(means[..., 1])


def _shaped_like(means: Means, observed: np.ndarray) -> np.ndarray:
    """Observed values of the units with the axes of their means."""
    return observed.reshape(-1, *(1,) * (means.ndim - 2))


# ---------------------------------------------------------------- from means to scores


def _squared_error_finish(
    sample: Sample, context: Context
) -> tuple[np.ndarray, Float[np.ndarray, "unit chain block"]]:
    """Squared error of the predictive mean, which is flat where that mean is right.

    With e the mean residual and v its Monte Carlo variance, e^2 - v has variance 4 e^2 v + 2 v^2
    and not 4 e^2 v alone; estimated as max(4 e^2 - 2 v, 2 v) v.
    """
    mean, influence = jackknife(sample, lambda means: means[..., 0])
    v = sample.variance(influence)
    steep = np.sqrt(np.maximum(4.0 * mean**2 - 2.0 * v, 2.0 * v))
    return mean**2 - v, influence * (np.sign(mean) * steep)[:, None, None]


def _absolute_error_finish(
    sample: Sample, context: Context
) -> tuple[np.ndarray, Float[np.ndarray, "unit chain block"]]:
    """|E x - y|, of the predictive mean E x.

    At the kink a jackknife would overdo its correction. Noise of sd s, the Monte Carlo error of
    the mean residual e, makes |e| too large by about 2 s (phi(t) - t Phi(-t)), t = |e| / s.
    """
    mean, influence = jackknife(sample, lambda means: means[..., 0])
    error = np.sqrt(sample.variance(influence))
    with np.errstate(invalid="ignore", divide="ignore"):
        _, noisy, _ = _truncated(-np.abs(mean), error)  # s (phi(t) - t Phi(-t))
    excess = np.where(error > 0, 2.0 * noisy, 0.0)
    return np.abs(mean) - excess, influence * np.sign(mean)[:, None, None]


def _interval_finish(
    sample: Sample, context: Context, level: float
) -> tuple[np.ndarray, Float[np.ndarray, "unit chain block"]]:
    """-(u - l) - 2/a (l - y)+ - 2/a (y - u)+, l and u the ends of the central 1 - a interval.

    The score has a kink where an end passes y, steep on one side. So its error is not its slope
    times that of the end, but the standard deviation of the score when the end is normal with its
    Monte Carlo error s: with e = y - u and k = 2/a, that of e - k max(e, 0), whose variance is
    s^2 - 2 k s^2 P + k^2 V, P = Phi(e / s), V the variance of max(e, 0). The kink also makes
    max(e, 0) too large on average, by about as much as noise of sd s would make it larger again;
    that is taken off. Likewise for l.
    """
    value, influence = np.zeros(len(sample.total)), 0.0
    steep = 2.0 / (1.0 - level)
    for side, sign in ((0, -1.0), (1, 1.0)):
        end, moves = jackknife(sample, operator.itemgetter((..., side)))
        error = np.sqrt(sample.variance(moves))
        beyond = sign * (context.observed - end)
        excess = np.maximum(beyond, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            outside, noisy, variance = _truncated(beyond, error)
            spread = error**2 * (1.0 - 2.0 * steep * outside) + steep**2 * variance
            slope = np.sqrt(np.maximum(spread, 0.0)) / error
        excess -= np.where(error > 0, noisy - excess, 0.0)
        value -= sign * end + steep * excess
        slope = np.where(error > 0, slope, 0.0) * np.where(steep * outside > 1.0, sign, -sign)
        influence = influence + slope[:, None, None] * moves
    return value, np.asarray(influence)


def _truncated(mean: np.ndarray, sd: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P(z > 0), and the mean and variance of max(z, 0), for a normal z."""
    t = mean / sd
    above, density = scipy.special.ndtr(t), np.exp(-0.5 * t**2) / np.sqrt(2.0 * np.pi)
    first = mean * above + sd * density
    second = (mean**2 + sd**2) * above + mean * sd * density
    return above, first, np.maximum(second - first**2, 0.0)


def _accuracy_finish(
    sample: Sample, context: Context
) -> tuple[np.ndarray, Float[np.ndarray, "unit chain block"]]:
    """Whether the likeliest class is the observed one; ties count half.

    A step has no slope, so its error is the chance that more draws would turn the choice over:
    Phi(-|margin| / its Monte Carlo error), given to the margin's influences as their variance.
    """
    margin = _margin(sample.mean, context)
    _, influence = jackknife(sample, partial(_margin, context=context))
    error = np.sqrt(sample.variance(influence))
    with np.errstate(invalid="ignore", divide="ignore"):
        wrong = scipy.special.ndtr(-np.abs(margin) / error)
        scale = np.where(error > 0, np.sqrt(wrong) / error, 0.0)
    return 0.5 + 0.5 * np.sign(margin), influence * scale[:, None, None]


# ---------------------------------------------------------------- the rules


RESIDUALS = Contribution("residuals", "simulate", _residual_moments)
JOINT_RESIDUALS = Contribution("joint_residuals", "simulate", _joint_moments, by_row=False)
CLASSES = Contribution("classes", "classes", _class_probabilities)
BELOW = Contribution("below", "simulate", _below)
DIFFERENCES = Contribution("differences", "simulate", _absolute_differences, stored=True)
NORMS = Contribution("norms", "simulate", _norms, by_row=False, stored=True)


def _positive_root(m: float) -> float:
    """Root of a mean square; a mean square that is not positive has no slope, and no error."""
    return float(np.sqrt(m)) if m > 0 else np.nan


MEAN = Aggregate()
ROOT_MEAN = Aggregate(lambda m, v: np.sqrt(max(m, 0.0)), lambda m, v: 0.5 / _positive_root(m))
EXPLAINED = Aggregate(
    lambda m, v: 1.0 - m / (v or np.nan),
    lambda m, v: -1.0 / (v or np.nan),
    lambda m, v: m / (v or np.nan) ** 2,
    share=True,
)

RULES: dict[str, Rule] = {
    "log": Rule("joint log density", column="elpd"),
    "log_pointwise": Rule("log density by row", column="elpd"),
    "hyvarinen": Rule("Hyvarinen score, joint", CURVATURE, hyvarinen),
    "hyvarinen_pointwise": Rule("Hyvarinen score by row", ROW_CURVATURE, hyvarinen),
    "dss": Rule("Dawid-Sebastiani, joint", JOINT_RESIDUALS, _dawid_sebastiani),
    "dss_pointwise": Rule("Dawid-Sebastiani by row", RESIDUALS, _dawid_sebastiani_row),
    "mse": Rule("mean squared error", RESIDUALS, None, _squared_error_finish, MEAN, error=True),
    "rmse": Rule(
        "root mean squared error", RESIDUALS, None, _squared_error_finish, ROOT_MEAN, error=True
    ),
    "mae": Rule("mean absolute error", RESIDUALS, None, _absolute_error_finish, MEAN, error=True),
    "r2": Rule("variance explained", RESIDUALS, None, _squared_error_finish, EXPLAINED, error=True),
    "accuracy": Rule(
        "share classified right", CLASSES, None, _accuracy_finish, MEAN, discrete=True
    ),
    "brier": Rule("Brier score, negated", CLASSES, _brier, aggregate=MEAN, discrete=True),
    "crps": Rule("CRPS, negated", DIFFERENCES, _ranked_probability),
    "scrps": Rule("scaled CRPS", DIFFERENCES, _scaled_ranked_probability),
    "energy": Rule("energy score, negated", NORMS, _ranked_probability),
}


def column(name: str) -> str:
    """What tables call the values of a score: ``elpd`` for log scores, ``score`` for others."""
    return find_rule(name).column


def find_rule(name: str) -> Rule:
    """The rule called ``name``; ``interval_0.5`` is the interval score at level 0.5."""
    if name in RULES:
        return RULES[name]
    head, _, level = name.partition("_")
    if head != "interval":
        known = ", ".join(f'"{known}"' for known in (*RULES, "interval"))
        raise ValueError(f"scores must be among {known}; got {name!r}")
    try:
        chosen = float(level) if level else INTERVAL_LEVEL
    except ValueError:
        chosen = np.nan
    if not 0.0 < chosen < 1.0:
        raise ValueError(
            'the level of an interval score must lie between 0 and 1, as in "interval_0.8"; got '
            f"{name!r}"
        )
    ends = Contribution(
        f"ends_{chosen:g}", "simulate", partial(_interval_ends, level=chosen), stored=True
    )
    title = f"negated, at level {chosen:g}"
    return Rule(title, ends, finish=partial(_interval_finish, level=chosen))
