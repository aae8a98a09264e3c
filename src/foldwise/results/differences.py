"""Differences of models' scores, paired over folds or rows: their errors and probabilities."""

from __future__ import annotations

import warnings

import numpy as np
import scipy
from jaxtyping import Bool, Float

from foldwise.results.comparable import few
from foldwise.results.result import FoldWarning, Score
from foldwise.results.totals import standard_error, total_units, unit_repeats
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


def paired_units(
    score: str, chosen: dict[str, Score], used: Bool[np.ndarray, " fold"]
) -> tuple[Float[np.ndarray, "unit model"], Float[np.ndarray, " model"], float]:
    """What each unit of the ``used`` folds contributes to the models' totals, higher being better.

    With the Monte Carlo errors of those totals, and how often the units test each row.
    """
    by_row = paired_by_row(chosen)
    parts, slopes = zip(
        *(total_units(score, s.folds, s.rows if by_row else None, used) for s in chosen.values()),
        strict=True,
    )
    contributions = find_rule(score).sign * np.column_stack(parts)
    mcse = np.array([_mcse(s, used, b) for s, b in zip(chosen.values(), slopes, strict=True)])
    first = next(iter(chosen.values()))
    return contributions, mcse, unit_repeats(first.folds, first.rows if by_row else None, used)


def paired_by_row(chosen: dict[str, Score]) -> bool:
    """Whether all models have a score by row, so that rows are paired and not folds."""
    return all(score.rows is not None for score in chosen.values())


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


def paired_difference(
    delta: Float[np.ndarray, " unit"], repeats: float = 1.0
) -> tuple[float, float]:
    """Sum of K paired differences and its standard error, sqrt(K repeats) sd(delta, ddof=1).

    The sign is that of ``delta``. The error is NaN for a single unit.
    """
    return float(delta.sum()), standard_error(delta, repeats)


def probability(diff: float, se: float) -> float:
    """Probability that the first model predicts better, Phi(diff / se), by normal approximation.

    se^2 = K sigma^2 with sigma^2 the sample variance (ddof=1) of the K differences (the normal
    approximation of the parallel cross-validation paper). One half for models that never differ.
    """
    if diff == 0.0 and se == 0.0:
        return 0.5
    with np.errstate(divide="ignore"):
        return float(scipy.special.ndtr(np.divide(diff, se)))


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


def share_positive(values: Float[np.ndarray, " replicate"]) -> float:
    """Share of values above zero; those equal to zero count half, so that shares add to one."""
    return float(np.mean(values > 0) + 0.5 * np.mean(values == 0))
