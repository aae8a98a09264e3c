"""Results of disjoint folds of one scheme, run apart, joined into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.folds.ragged import concatenated_ranges, starts
from foldwise.results.identity import check_one_identity
from foldwise.results.result import CVResult, Score
from foldwise.results.totals import finish_score
from foldwise.scores import diagnostics
from foldwise.scores.diagnostics import shared_variance
from foldwise.scores.rules import LOG_SCORES

if TYPE_CHECKING:
    import xarray as xr


def merge(results: Iterable[CVResult]) -> CVResult:
    """The result of several runs of one model over disjoint folds of one scheme.

    Runs over ``folds[:25]`` and ``folds[25:]``, perhaps on two machines, become one result, its
    folds in the scheme's order. Scores add up, and so do Monte Carlo variances, except that runs
    which share a full-data fit share its error: their influences are added draw by draw before
    taking the variance. The R-hat-max benchmark is the maximum over the parts, replicate by
    replicate. Merge all parts at once: what is still missing of the scheme is said in the printed
    result ("20 of 30 folds"). In leave-future-out the last fold of each part has no
    partner there, so its score is a plain mean. A merged result cannot be extended; its parts can.
    """
    parts = list(results)
    _check_parts(parts)
    order = np.argsort(np.concatenate([part.test["index"] for part in parts]), kind="stable")
    counts = np.concatenate([np.diff(part.test["start"]) for part in parts])
    entries = concatenated_ranges(starts(counts), order)
    benchmarks = [part.mixing.benchmark for part in parts if part.mixing.benchmark.size]
    mixing = replace(
        parts[0].mixing,
        rhat=np.concatenate([part.mixing.rhat for part in parts])[order],
        benchmark=np.fmax.reduce(benchmarks or [np.zeros(0)]),
    )
    names = list(parts[0].scores)
    scores = {name: _merge_score(parts, name, order, entries, mixing.limit) for name in names}
    test = {
        "start": starts(counts[order]),
        "rows": np.concatenate([part.test["rows"] for part in parts])[entries],
        "index": np.concatenate([part.test["index"] for part in parts])[order],
    }
    observed = [part.test["y"] for part in parts if "y" in part.test]
    if observed:
        test["y"] = observed[0]
    fold_names = scores[names[0]].folds["fold"].values
    calibration = join_calibrations(parts, entries)
    draws = _merge_draws(parts, order, fold_names)
    return CVResult(scores, mixing, test, _merge_info(parts), draws, calibration)


def join_calibrations(parts: list[CVResult], entries: np.ndarray) -> xr.Dataset | None:
    """The calibration of the test rows ``entries`` of all parts; None where some part has none."""
    tables = [part.calibration for part in parts if part.calibration is not None]
    return join_tables(tables, "test_row", entries) if len(tables) == len(parts) else None


def _check_parts(parts: list[CVResult]) -> None:
    for part in parts:
        if not isinstance(part, CVResult):
            raise TypeError(
                f"results must be a list of CVResult, but it holds a {type(part).__name__}"
            )
    if len(parts) < 2:
        raise ValueError(f"merging needs at least two results, got {len(parts)}")
    advice = {
        "scheme": "give every run folds of one scheme, such as folds[:25] and folds[25:]",
        "n_obs": "run them on the same data",
        "estimator": "run them with the same estimator",
        "chains": "run them with the same number of chains",
        "draws": "extend the shorter ones first",
    }
    for key, what in advice.items():
        _check_same([part.info[key] for part in parts], key, what)
    run_alike = "run them with the same scores"
    _check_same([", ".join(sorted(part.scores)) for part in parts], "scores", run_alike)
    named = [part.info["model"] for part in parts if part.info["model"]]
    if named:
        _check_same(named, "model", "merge the results of one model; use compare for several")
    observed = [part.test["y"] for part in parts if "y" in part.test]
    if any(not np.array_equal(observed[0], y) for y in observed[1:]):
        raise ValueError(
            "merged results must have the same observations, but their y differ; run them on "
            "the same data in the same order"
        )
    check_one_identity([part.info for part in parts])
    _check_disjoint(parts)


def _check_same(values: list[Any], what: str, advice: str) -> None:
    for value in values[1:]:
        if value != values[0]:
            raise ValueError(
                f"merged results must have the same {what}, but they have {values[0]!r} and "
                f"{value!r}; {advice}"
            )


def _check_disjoint(parts: list[CVResult]) -> None:
    index = np.concatenate([part.test["index"] for part in parts])
    names = np.concatenate([part.folds["fold"].values for part in parts])
    _, first, times = np.unique(index, return_index=True, return_counts=True)
    twice = first[times > 1]
    if twice.size:
        shown = ", ".join(str(names[k]) for k in twice[:5])
        more = f" and {twice.size - 5} more" if twice.size > 5 else ""
        raise ValueError(
            f"merged results must have no fold in common, but {twice.size} are in several: "
            f"{shown}{more}; leave one of the results out, or run other folds"
        )


def _merge_score(
    parts: list[CVResult], name: str, order: np.ndarray, entries: np.ndarray, limit: float
) -> Score:
    scores = [part.score(name) for part in parts]
    table = join_tables([score.folds for score in scores], "fold", order)
    table["status"] = ("fold", _status(table, limit))
    rows, by_row = None, [score.rows for score in scores if score.rows is not None]
    if 0 < len(by_row) < len(parts) and name not in LOG_SCORES:
        raise ValueError(
            f"merged results must score their folds alike, but {name} is joint in some parts and "
            f"by row in others, whose test sets are large; run them with {name}_pointwise"
        )
    if by_row:
        each = [rows_of(part, part.score(name), list(by_row[0].data_vars)) for part in parts]
        rows = join_tables(each, "test_row", entries)
    draws = parts[0].info["chains"] * parts[0].info["draws"]
    own = float(sum(score.own_variance for score in scores))
    full, pointwise = merge_full(parts, scores), scores[0].pointwise
    return finish_score(name, table, rows, draws, own, *full, pointwise)


def join_tables(tables: list[xr.Dataset], dim: str, order: np.ndarray) -> xr.Dataset:
    """One table of several, its entries in ``order``, of the columns that all of them have."""
    import xarray as xr

    columns = [n for n in tables[0].data_vars if all(n in table for table in tables[1:])]

    def joined(names: Iterable[Any]) -> dict[Any, tuple[str, np.ndarray]]:
        return {
            name: (dim, np.concatenate([table[name].values for table in tables])[order])
            for name in names
        }

    return xr.Dataset(joined(columns), joined(tables[0].coords))


def rows_of(part: CVResult, score: Score, columns: list[Any]) -> xr.Dataset:
    """Table by row; where all folds of a part test one row, that is its table by fold."""
    import xarray as xr

    if score.rows is not None:
        return score.rows
    values = {name: ("test_row", score.folds[name].values) for name in columns}
    return xr.Dataset(values, {"row": ("test_row", part.test["rows"])})


def _status(table: xr.Dataset, limit: float) -> np.ndarray:
    """Status of each fold by the merged R-hat limit, which is never below that of its part."""
    was = table["status"].values
    conditions = {name: was == name for name in diagnostics.ADVICE}
    conditions["chains disagree"] = table["rhat"].values > limit
    numbers = (table[name].values for name in ("overlap", "pareto_k", "ess", "acceptance"))
    by_number = diagnostics.doubtful(table["estimator"].values != "mean", *numbers)
    weighted = table["estimator"].values == "weights"
    for name, holds in by_number.items():
        conditions[name] = np.where(weighted, conditions[name], holds)
    return diagnostics.fold_status(conditions).astype(object)


def merge_full(parts: list[CVResult], scores: list[Score]) -> tuple[np.ndarray, float]:
    """Influences of the full-data draws on the total, and the variance they bring.

    Parts that share a fit add draw by draw; different fits are independent. With several fits
    there is no common vector of influences, and an empty one is returned.
    """
    shared: dict[tuple[Any, ...], list[int]] = {}
    for k, (part, score) in enumerate(zip(parts, scores, strict=True)):
        size = len(score.full_influence)
        fit = (part.info["fit_seed"], part.info["model"], size) if size else (k,)
        shared.setdefault(fit, []).append(k)
    variance, influence = 0.0, np.zeros(0)
    for members in shared.values():
        if len(members) == 1:
            variance += scores[members[0]].full_variance
            continue
        influence = np.sum([scores[k].full_influence for k in members], axis=0)
        info = parts[members[0]].info
        variance += float(shared_variance(influence, info["fit_chains"], info.get("fit_batch")))
    return (influence if len(shared) == 1 else np.zeros(0)), variance


def _merge_info(parts: list[CVResult]) -> dict[str, Any]:
    info = {key: value for key, value in parts[0].info.items() if key != "state"}
    seconds: dict[str, float] = {}
    for part in parts:
        for phase, spent in part.info["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    stored = all(part.draws is not None or not part.mixing.benchmark.size for part in parts)
    problems = [part.info.get("fit_problems", "") for part in parts]
    return {
        **info,
        "memory": "draws" if stored else "online",
        "seconds": seconds,
        "gradients": sum(part.info["gradients"] for part in parts),
        "fit_problems": "; ".join(dict.fromkeys(filter(None, problems))),
        "merged": len(parts),
    }


def _merge_draws(
    parts: list[CVResult], order: np.ndarray, names: np.ndarray
) -> xr.DataArray | None:
    import xarray as xr

    kept = [part.draws.values for part in parts if part.draws is not None]
    # where folds are scored from full-data draws there are draws of the other folds only
    if sum(len(draws) for draws in kept) < len(order):
        return None
    dims = ("fold", "chain", "draw")
    return xr.DataArray(np.concatenate(kept)[order], {"fold": names}, dims, name="log_score")
