"""Totals of scores over folds or rows, and their standard errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foldwise.results.result import Score
from foldwise.scores.rules import find_rule

if TYPE_CHECKING:
    import xarray as xr


def units(
    table: xr.Dataset, rows: xr.Dataset | None, used: np.ndarray, name: str = "elpd"
) -> np.ndarray:
    """Contributions to a total that its epistemic error is taken over: folds, or rows.

    A row tested several times contributes the weighted sum of its values once.
    """
    if rows is None:
        return (table["weight"] * table[name]).values[used]
    keep = np.repeat(used, table["n_test"].values)
    value = (rows["weight"] * rows[name]).values[keep]
    _, inverse = np.unique(rows["row"].values[keep], return_inverse=True)
    return np.bincount(inverse, weights=value)


def total_units(
    name: str, table: xr.Dataset, rows: xr.Dataset | None, used: np.ndarray
) -> tuple[np.ndarray, float]:
    """Contributions that add up to the total of a score, and its slope by their plain sum.

    Where the total is a function T(m, v) of the mean m of n rows, and perhaps of the variance v of
    their observed values, a row with value x and observed value y contributes, to first order,

        T / n + dT/dm (x - m) / n + dT/dv ((y - mean y)^2 - v) / n

    times its weight. The spread of contributions gives the total's standard error, and those of
    two models are paired.
    """
    rule = find_rule(name)
    parts, aggregate = units(table, rows, used, rule.column), rule.aggregate
    if aggregate is None or rows is None or not len(parts):
        return parts, 1.0
    keep = np.repeat(used, table["n_test"].values)
    _, first, inverse = np.unique(rows["row"].values[keep], return_index=True, return_inverse=True)
    weight = np.bincount(inverse, weights=rows["weight"].values[keep])
    y = rows["observed"].values[keep][first]
    deviation = (y - np.average(y, weights=weight)) ** 2
    mean, v = parts.sum() / weight.sum(), float(np.average(deviation, weights=weight))
    total, slope = aggregate.of_mean(mean, v), float(aggregate.slope(mean, v))
    spread = slope * (parts - mean * weight)
    spread += aggregate.slope_v(mean, v) * weight * (deviation - v)
    return (total * weight + spread) / weight.sum(), slope / float(weight.sum())


def _sum_of_known(values: np.ndarray) -> float:
    """Sum of the values that are numbers; NaN when none is."""
    return float(np.nansum(values)) if np.isfinite(values).any() else np.nan


def unit_repeats(table: xr.Dataset, rows: xr.Dataset | None, used: np.ndarray) -> float:
    """How often the folds that are units test each row; a unit that is a row counts once."""
    if rows is not None or not used.any():
        return 1.0
    return float(1.0 / table["weight"].values[used].mean())


def standard_error(parts: np.ndarray, repeats: float) -> float:
    """Epistemic standard error of the sum of K parts: sqrt(K repeats) sd(parts, ddof=1).

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
) -> Score:
    """Totals of a table by fold. Folds that are not a number stay in the table, not in the sum."""
    used = np.isfinite(table[find_rule(name).column].values)
    parts, slope = total_units(name, table, rows, used)
    with np.errstate(invalid="ignore", divide="ignore"):
        ess = draws * table["spread"].values[used].sum() / table["noise"].values[used].sum()
    by_row = rows if rows is not None and "p" in rows else None
    return Score(
        name=name,
        total=float(parts.sum()) if used.any() else np.nan,
        se=standard_error(parts, unit_repeats(table, rows, used)),
        mcse=abs(slope) * float(np.sqrt(own_variance + full_variance)) if used.any() else np.nan,
        ess=float(ess),
        p=_sum_of_known(units(table, by_row, used, "p")),
        left_out=int((~used).sum()),
        folds=table,
        rows=rows,
        own_variance=own_variance,
        full_influence=full_influence,
        full_variance=full_variance,
    )
