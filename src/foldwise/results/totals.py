"""Totals of scores over folds or rows, and their standard errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foldwise.results.result import Score
from foldwise.scores.diagnostics import effective_draws
from foldwise.scores.rules import find_rule

if TYPE_CHECKING:
    import xarray as xr


def unit_of(table: xr.Dataset, rows: xr.Dataset | None, pointwise: bool) -> str:
    """What a total's standard error is taken over: "row" or "fold".

    Rows, where there is a score by row and rows are left out one by one or at random
    (``pointwise``, random and stratified K-fold). Folds where whole groups, blocks or times are
    left out: rows of one such fold are predicted well or badly together. Rows that several folds
    test, as in repeated K-fold, count once each.
    """
    if rows is None:
        return "fold"
    alone = bool((table["n_test"].values == 1).all())
    repeated = bool((rows["weight"].values < 1.0).any())
    return "row" if pointwise or alone or repeated else "fold"


def units(
    table: xr.Dataset,
    rows: xr.Dataset | None,
    used: np.ndarray,
    name: str = "elpd",
    unit: str = "row",
) -> np.ndarray:
    """Contributions to a total that its standard error is taken over: folds, or rows.

    A row tested several times contributes the weighted sum of its values once.
    """
    if rows is None:
        return (table["weight"] * table[name]).values[used]
    keep = np.repeat(used, table["n_test"].values)
    return _by_unit((rows["weight"] * rows[name]).values[keep], table, rows, used, unit)


def _by_unit(
    value: np.ndarray, table: xr.Dataset, rows: xr.Dataset, used: np.ndarray, unit: str
) -> np.ndarray:
    """Sums of the test rows' values over the folds, or over rows that are tested several times."""
    count = table["n_test"].values[used]
    member = np.repeat(np.arange(len(count)), count)
    if unit == "row":
        keep = np.repeat(used, table["n_test"].values)
        _, member = np.unique(rows["row"].values[keep], return_inverse=True)
    return np.bincount(member, weights=value)


def total_units(
    name: str, table: xr.Dataset, rows: xr.Dataset | None, used: np.ndarray, unit: str = "row"
) -> tuple[np.ndarray, float]:
    """Contributions that add up to the total of a score, and its slope by their plain sum.

    Where the total is a function T(m, v) of the mean m of n rows, and perhaps of the variance v of
    their observed values, a row with value x and observed value y contributes, to first order,

        T / n + dT/dm (x - m) / n + dT/dv ((y - mean y)^2 - v) / n

    times its weight. The spread of contributions gives the total's standard error, and those of
    two models are paired. A fold contributes what its rows do.
    """
    rule = find_rule(name)
    aggregate = rule.aggregate
    if aggregate is None or rows is None or not used.any():
        return units(table, rows, used, rule.column, unit), 1.0
    keep = np.repeat(used, table["n_test"].values)
    weight, y = rows["weight"].values[keep], rows["observed"].values[keep]
    parts = weight * rows[rule.column].values[keep]
    deviation = (y - np.average(y, weights=weight)) ** 2
    mean, v = parts.sum() / weight.sum(), float(np.average(deviation, weights=weight))
    total, slope = aggregate.of_mean(mean, v), float(aggregate.slope(mean, v))
    spread = slope * (parts - mean * weight)
    spread += aggregate.slope_v(mean, v) * weight * (deviation - v)
    each = (total * weight + spread) / weight.sum()
    return _by_unit(each, table, rows, used, unit), slope / float(weight.sum())


def _sum_of_known(values: np.ndarray) -> float:
    """Sum of the values that are numbers; NaN when none is."""
    return float(np.nansum(values)) if np.isfinite(values).any() else np.nan


def unit_noise(score: Score, used: np.ndarray, unit: str, slope: float = 1.0) -> float:
    """Sum of the Monte Carlo variances of the units of the ``used`` folds, one by one.

    ``slope`` is that of the total by their plain sum. It is the Monte Carlo variance of the total
    where units' errors are independent; where they share draws, the two differ.
    """
    table = score.folds
    if unit == "row" and score.rows is not None:
        keep = np.repeat(used, table["n_test"].values)
        parts = (score.rows["weight"] * score.rows["mcse"]).values[keep]
    else:
        size = table["n_test"].values if find_rule(score.name).aggregate is not None else 1.0
        parts = (table["weight"].values * size * table["mcse"].values)[used]
    return float(slope**2 * np.nansum(parts**2))


def combined_error(se: float, mcse: float, noise: float, count: int, repeats: float = 1.0) -> float:
    """Error of a total over data and random numbers, s: both counted, and each once.

    The spread over K units has their own Monte Carlo errors in it already. With v_k the variances
    of these, ``noise`` their sum and V = mcse^2 the variance of the sum of the errors, the part of
    se^2 that is Monte Carlo noise has expectation (K noise - V) / (K - 1), so that

        s^2 = max(se^2 - repeats (K noise - V) / (K - 1), 0) + V.

    Independent errors (V = noise) leave s = se; an error that all units share is added in full.
    """
    if count < 2:
        return float("nan")
    inside = repeats * max(count * noise - mcse**2, 0.0) / (count - 1)
    return float(np.sqrt(max(se**2 - inside, 0.0) + mcse**2))


def unit_repeats(table: xr.Dataset, unit: str, used: np.ndarray) -> float:
    """How often the folds that are units test each row; a unit that is a row counts once."""
    if unit == "row" or not used.any():
        return 1.0
    return float(1.0 / table["weight"].values[used].mean())


def standard_error(parts: np.ndarray, repeats: float) -> float:
    """Standard error, over data, of the sum of K parts: sqrt(K repeats) sd(parts, ddof=1).

    Folds that weigh 1/repeats, because each row is tested that often, are no more independent
    information than K / repeats folds.
    """
    return float(np.sqrt(len(parts) * repeats) * parts.std(ddof=1)) if len(parts) > 1 else np.nan


def finish_score(
    name: str,
    table: xr.Dataset,
    rows: xr.Dataset | None,
    draws: int,
    own_variance: float,
    full_influence: np.ndarray,
    full_variance: float,
    pointwise: bool = True,
) -> Score:
    """Totals of a table by fold. Folds that are not a number stay in the table, not in the sum."""
    used = np.isfinite(table[find_rule(name).column].values)
    unit = unit_of(table, rows, pointwise)
    parts, slope = total_units(name, table, rows, used, unit)
    spread, noise = table["spread"].values[used].sum(), table["noise"].values[used].sum()
    by_row = rows if rows is not None and "optimism" in rows else None
    return Score(
        name=name,
        total=float(parts.sum()) if used.any() else np.nan,
        se=standard_error(parts, unit_repeats(table, unit, used)),
        mcse=abs(slope) * float(np.sqrt(own_variance + full_variance)) if used.any() else np.nan,
        ess=float(effective_draws(spread, noise / draws, draws)) if used.any() else np.nan,
        optimism=_sum_of_known(units(table, by_row, used, "optimism")),
        left_out=int((~used).sum()),
        folds=table,
        rows=rows,
        own_variance=own_variance,
        full_influence=full_influence,
        full_variance=full_variance,
        pointwise=pointwise,
    )


def score_error(score: Score) -> float:
    """Error of a score's total over data and random numbers, by :func:`combined_error`."""
    used = np.isfinite(score.folds[find_rule(score.name).column].values)
    parts, slope = total_units(score.name, score.folds, score.rows, used, score.unit)
    repeats = unit_repeats(score.folds, score.unit, used)
    noise = unit_noise(score, used, score.unit, slope)
    return combined_error(score.se, score.mcse, noise, len(parts), repeats)
