"""Differences of models' scores, paired over folds or rows: their errors and probabilities."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from foldwise.results.comparable import few
from foldwise.results.result import FoldWarning, Score
from foldwise.results.totals import (
    combined_error,
    standard_error,
    total_units,
    unit_noise,
    unit_repeats,
)
from foldwise.scores.rules import column, find_rule

# Replicates of the Bayesian bootstrap: a probability of one half is then known to 0.008.
REPLICATES = 4000
# Bootstrap weights held at once, 8 MB, so that 20,000 units do not take 640 MB.
_CHUNK = 2**20
_BOOTSTRAP_SEED = 0


# ---------------------------------------------------------------- paired units


def known(score: Score) -> Bool[np.ndarray, " fold"]:
    """Which folds have a finite score whose Monte Carlo error is not infinite."""
    table = score.folds
    return np.isfinite(table[column(score.name)].values) & ~np.isinf(table["mcse"].values)


def finite_in_all(chosen: dict[str, Score]) -> Bool[np.ndarray, " fold"]:
    """Which folds have a known score in every model; the others are left out, with a warning."""
    finite = {name: known(score) for name, score in chosen.items()}
    used = np.logical_and.reduce(list(finite.values()))
    if used.all():
        return used
    missing = ", ".join(f"{(~f).sum()} in {name}" for name, f in finite.items() if not f.all())
    if not used.any():
        raise ValueError(
            "a comparison needs at least one fold whose score is finite in every model, but of "
            f"{len(used)} folds none is (not finite: {missing}); look at each result's status"
        )
    table = next(iter(chosen.values())).folds
    warnings.warn(
        f"{(~used).sum()} of {len(used)} folds left out of the comparison, "
        f"{few(table['fold'].values[~used])}, because a score or its error is not finite there "
        f"({missing}); there is no verdict while they are missing",
        FoldWarning,
        stacklevel=3,
    )
    return used


class Paired(NamedTuple):
    """What units contribute to the totals of several models, higher being better.

    ``mcse`` are the Monte Carlo errors of the totals, ``noise`` the sums of the units' own Monte
    Carlo variances; ``repeats`` how often the units test each row; ``unit`` what they are, "fold"
    or "row", and ``fold`` the fold that each is, or the last that tests it.
    """

    units: Float[np.ndarray, "unit model"]
    mcse: Float[np.ndarray, " model"]
    noise: Float[np.ndarray, " model"]
    repeats: float
    unit: str
    fold: Int[np.ndarray, " unit"]

    def against(self, first: int, second: int) -> Difference:
        """Total of one model minus that of another."""
        return difference(self.delta(first, second), *self.noise_of(first, second), self.repeats)

    def delta(self, first: int, second: int) -> Float[np.ndarray, " unit"]:
        """Differences of two models by unit."""
        return self.units[:, first] - self.units[:, second]

    def noise_of(self, first: int, second: int) -> tuple[float, float]:
        """Monte Carlo error of a difference, and the sum of its units' variances."""
        mcse = float(np.hypot(self.mcse[first], self.mcse[second]))
        return mcse, float(self.noise[first] + self.noise[second])


def paired_units(score: str, chosen: dict[str, Score], used: Bool[np.ndarray, " fold"]) -> Paired:
    """What each unit of the ``used`` folds contributes to the models' totals."""
    scores, unit = list(chosen.values()), paired_unit(chosen)
    by_row = all(each.rows is not None for each in scores)
    parts, slopes = zip(
        *(total_units(score, s.folds, s.rows if by_row else None, used, unit) for s in scores),
        strict=True,
    )
    each = list(zip(scores, slopes, strict=True))
    table, rows = scores[0].folds, scores[0].rows
    fold = np.flatnonzero(used)
    if unit == "row" and rows is not None:
        keep = np.repeat(used, table["n_test"].values)
        _, at = np.unique(rows["row"].values[keep], return_inverse=True)
        fold = np.zeros(at.max() + 1, int)
        fold[at] = np.repeat(np.arange(len(used)), table["n_test"].values)[keep]
    return Paired(
        find_rule(score).sign * np.column_stack(parts),
        np.array([_mcse(s, used, slope) for s, slope in each]),
        np.array([unit_noise(s, used, unit, slope) for s, slope in each]),
        unit_repeats(table, unit, used),
        unit,
        fold,
    )


def paired_unit(chosen: dict[str, Score]) -> str:
    """What differences are paired over: rows, where the error of every model's score is."""
    return "row" if all(score.unit == "row" for score in chosen.values()) else "fold"


def _mcse(score: Score, used: Bool[np.ndarray, " fold"], slope: float) -> float:
    """Monte Carlo error of a model's total over the ``used`` folds.

    ``slope`` is that of the total by the sum of what its folds' rows contribute. Where some of the
    model's own folds are left out, the error of that sum shrinks in proportion to the root of the
    sum of their squared errors.
    """
    table = score.folds
    size = table["n_test"].values if find_rule(score.name).aggregate is not None else 1.0
    variance = (table["weight"].values * size * table["mcse"].values) ** 2
    whole = np.nansum(variance[np.isfinite(table[column(score.name)].values)])
    kept = np.nansum(variance[used])
    error = abs(slope) * float(np.sqrt(score.own_variance + score.full_variance))
    return error * float(np.sqrt(kept / whole)) if whole > 0 else error


# ---------------------------------------------------------------- differences


class Difference(NamedTuple):
    """A difference of two totals, first minus second, with its errors.

    ``se`` is its standard error over data, ``mcse`` its Monte Carlo error, ``error`` both, each
    counted once; ``freedom`` the degrees of freedom of ``se``; ``prob`` the probability that the
    first predicts better.
    """

    diff: float
    se: float
    mcse: float
    error: float
    freedom: float
    prob: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval, by Student's t, Monte Carlo error included."""
        half = float(scipy.special.stdtrit(self.freedom, 0.975)) * self.error
        return self.diff - half, self.diff + half


def difference(
    delta: Float[np.ndarray, " unit"], mcse: float, noise: float, repeats: float = 1.0
) -> Difference:
    """Sum of K paired differences, its errors, and the probability that it is positive.

    SE = sqrt(K repeats) sd(delta, ddof=1), NaN for a single unit; ``noise`` is the sum of the
    units' Monte Carlo variances, ``mcse`` the error of their sum. The spread has K / repeats - 1
    degrees of freedom; what is known of Monte Carlo errors adds to them, as (error / SE)^4
    (Satterthwaite 1946).
    """
    diff, se = float(delta.sum()), standard_error(delta, repeats)
    error = combined_error(se, mcse, noise, len(delta), repeats)
    freedom = max(len(delta) / repeats - 1.0, 1.0)
    if error > se > 0.0:
        freedom *= (error / se) ** 4
    return Difference(diff, se, mcse, error, freedom, probability(diff, error, freedom))


def probability(diff: float, error: float, freedom: float) -> float:
    """Probability that the first model predicts better, T(diff / error), by Student's t.

    Its degrees of ``freedom`` are K - 1 or more, since the spread of K differences is estimated:
    for many folds it is the normal approximation of the parallel cross-validation paper. ``error``
    counts the Monte Carlo error too. One half for models that never differ.
    """
    if diff == 0.0 and error == 0.0:
        return 0.5
    with np.errstate(divide="ignore"):
        return float(scipy.special.stdtr(freedom, np.divide(diff, error)))


def bayesian_bootstrap(
    values: Float[np.ndarray, "unit column"], repeats: float = 1.0
) -> Float[np.ndarray, "replicate column"]:
    """Weighted means of ``values`` over its units, weights Dirichlet(1, ..., 1) (Rubin 1981).

    The same 4000 weightings are drawn for every call with the same number of units. Normalised
    Gamma(a) variates are Dirichlet(a, ..., a); they are drawn some replicates at a time, with
    a = 1 / ``repeats``, which spreads means as widely as that many times fewer units would.
    """
    rng = np.random.default_rng(_BOOTSTRAP_SEED)
    count = len(values)
    step = max(_CHUNK // count, 1)
    means = np.empty((REPLICATES, values.shape[1]))
    for start in range(0, REPLICATES, step):
        weight = rng.standard_gamma(1.0 / repeats, (min(step, REPLICATES - start), count))
        means[start : start + step] = weight @ values / weight.sum(axis=1, keepdims=True)
    return means


def share_positive(values: Float[np.ndarray, " replicate"], error: float = 0.0) -> float:
    """Share of values above zero, each moved by a normal error of this size.

    Without one, values equal to zero count half, so that shares add to one.
    """
    if error > 0.0:
        return float(scipy.special.ndtr(values / error).mean())
    return float(np.mean(values > 0) + 0.5 * np.mean(values == 0))


def bootstrap_probability(
    replicates: Float[np.ndarray, " replicate"], count: int, found: Difference
) -> float:
    """Probability that the first predicts better, from bootstrap means of ``count`` differences.

    What Monte Carlo error adds to the spread of the differences is added to the replicates.
    """
    more = max(found.error**2 - found.se**2, 0.0)
    return share_positive(count * replicates, float(np.sqrt(more)))
