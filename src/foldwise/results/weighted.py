"""Results of folds whose scores come from the full-data draws alone, and of both kinds together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.folds.folds import Folds
from foldwise.folds.ragged import concatenated_ranges, starts
from foldwise.models.model import Model
from foldwise.results.identity import identity
from foldwise.results.merge import join_calibrations, join_tables, merge_full, rows_of
from foldwise.results.result import CVResult, Score
from foldwise.results.totals import finish_score
from foldwise.sampling.fit import Fit
from foldwise.sampling.run import Settings
from foldwise.scores import diagnostics
from foldwise.scores.importance import Importance
from foldwise.scores.rule import Rule
from foldwise.scores.rules import JOINT_RESIDUALS, LOG_SCORES, find_rule
from foldwise.scores.smoothing import uneven
from foldwise.scores.weighing import Scored

if TYPE_CHECKING:
    import xarray as xr


def weighted_result(
    model: Model,
    folds: Folds,
    fit: Fit,
    settings: Settings,
    draws: int,
    found: Importance,
    seconds: dict[str, float],
) -> CVResult:
    """The result of the folds that ``found`` has used.

    ``settings`` and ``draws`` are those of the chains that other folds may have.
    """
    chosen = np.flatnonzero(found.used)
    part = folds[chosen]
    unknown = np.full(len(part), np.nan)
    mixing = diagnostics.Mixing(unknown, np.zeros(0), draws)
    scores = {
        name: _score(folds, fit, found, name, chosen, settings.chains * draws)
        for name in found.folds
    }
    test = {"start": part.test_start, "rows": part.test_rows, "index": part.index}
    if model.y is not None:
        test["y"] = np.asarray(model.y)
    info = {
        "model": model.name or "",
        "scheme": folds.scheme,
        "identity": identity(model, folds),
        "n_obs": model.n_obs,
        "parameters": model.dimension,
        "chains": settings.chains,
        "draws": draws,
        "warmup": settings.warmup,
        "estimator": settings.estimator,
        "memory": settings.memory,
        "precision": "float64",
        "seed": settings.seed,
        "fit_seed": fit.seed,
        "fit_made_elsewhere": fit.made_elsewhere,
        "fit_draws": len(found.draws.positions),
        "fit_chains": found.draws.chains,
        "fit_batch": found.draws.length,
        "fit_problems": "; ".join(fit.problems()),
        "structure": str(found.structure),
        "why_chains": why_chains(found),
        "gradients": 0,
        "fit_gradients": fit.gradients,
        "seconds": dict(seconds),
    }
    return CVResult(scores, mixing, test, info, calibration=_calibration(folds, found, chosen))


def _calibration(folds: Folds, found: Importance, chosen: np.ndarray) -> xr.Dataset | None:
    if found.calibration is None:
        return None
    entries = concatenated_ranges(folds.test_start, chosen)
    columns = {name: values[entries] for name, values in found.calibration.items()}
    return _table_by_row(columns, folds[chosen])


def _score(
    folds: Folds, fit: Fit, found: Importance, name: str, chosen: np.ndarray, draws: int
) -> Score:
    """A score of the folds ``chosen`` with its tables; ``draws`` are those of chains of others."""
    part, rule = folds[chosen], find_rule(name)
    of_folds, of_rows = found.folds[name].of(chosen), found.rows.get(name)
    variance, unknown = of_folds.variance, np.full(len(part), np.nan)
    effective = diagnostics.effective_draws(of_folds.spread, variance, len(found.draws.positions))
    entries = concatenated_ranges(folds.test_start, chosen)
    size = part.n_test if rule.aggregate is not None else 1.0
    rows, full = None, found.full_folds[chosen] if name in LOG_SCORES else unknown
    if of_rows is not None:
        rows = _row_table(found, name, of_rows.of(entries), entries, part)
        full = np.add.reduceat(found.full_rows[entries], part.test_start[:-1])
    columns: dict[str, Any] = {
        rule.column: of_folds.value / size,
        "mcse": np.sqrt(variance) / size,
        "ess": effective,
        "rhat": unknown,
        "slowest_ess": unknown,
        "pareto_k": found.pareto_k[chosen],
        "overlap": unknown,
        "optimism": full - of_folds.value if name in LOG_SCORES else unknown,
        "acceptance": unknown,
        "divergences": np.zeros(len(part), np.int64),
        "n_train": part.n_train,
        "n_test": part.n_test,
        "weight": part.fold_weight,
        "spread": of_folds.spread,
        "noise": variance * draws if name in LOG_SCORES else unknown,
        "estimator": np.full(len(part), "weights"),
        "method": np.where(found.own[chosen], "refit", "importance"),
        "status": _status(fit, found, rule, of_folds.value, effective, chosen),
    }
    influence = found.influence[name]
    return finish_score(
        name,
        _table(columns, part),
        rows,
        draws,
        found.own_variance[name],
        influence,
        float(found.draws.variance(influence)),
        folds.pointwise,
    )


def _table(columns: dict[str, Any], folds: Folds) -> xr.Dataset:
    import xarray as xr

    found = {name: ("fold", values) for name, values in columns.items()}
    return xr.Dataset(found, coords={"fold": folds.names})


def _row_table(
    found: Importance, name: str, scored: Scored, entries: np.ndarray, folds: Folds
) -> xr.Dataset:
    columns = {find_rule(name).column: scored.value, "mcse": np.sqrt(scored.variance)}
    if name in LOG_SCORES:
        columns["optimism"] = found.full_rows[entries] - scored.value
    else:
        columns["observed"] = found.observed[entries]
    return _table_by_row(columns, folds)


def _table_by_row(columns: dict[str, np.ndarray], folds: Folds) -> xr.Dataset:
    import xarray as xr

    columns |= {"weight": folds.test_weight, "fold": np.repeat(folds.names, folds.n_test)}
    found = {name: ("test_row", values) for name, values in columns.items()}
    return xr.Dataset(found, coords={"row": ("test_row", folds.test_rows)})


def _status(
    fit: Fit,
    found: Importance,
    rule: Rule,
    value: np.ndarray,
    effective: np.ndarray,
    chosen: np.ndarray,
) -> np.ndarray:
    # a score that is not a number where the weights are: the predictions are degenerate
    predicted = rule.contribution is not None and rule.contribution.needs == "simulate"
    degenerate = ~np.isfinite(value) & np.isfinite(found.weight_ess[chosen]) & predicted
    joint = rule.contribution is JOINT_RESIDUALS
    draws, few = len(found.draws.positions), np.fmin(effective, found.weight_ess[chosen])
    conditions = {
        "not finite": ~np.isfinite(value) & ~degenerate,
        "singular covariance": degenerate & joint,
        "no spread": degenerate & (not joint),
        "cut off": found.cut_off[chosen],
        "integrals not settled": found.unsettled[chosen],
        "uneven weights": (uneven(found.pareto_k, found.weight_ess, draws) & ~found.own)[chosen],
        "few effective draws": few < diagnostics.ESS_LIMIT,
        "fit not settled": np.full(len(chosen), not fit.settled),
    }
    return diagnostics.fold_status(conditions).astype(object)


# ---------------------------------------------------------------- both kinds of folds


def why_chains(found: Importance) -> str:
    """Why folds could not be scored from the full-data draws, each by what comes first."""
    left, parts = ~found.used, []
    for words, where in (
        ("cut off by a row of density zero", found.cut_off),
        ("whose integrals over a group's parameters did not settle", found.unsettled),
        ("whose weights are too uneven", np.ones(len(left), bool)),
    ):
        if count := int((left & where).sum()):
            parts.append(f"{count} {words}")
        left = left & ~where
    return ", ".join(parts)


def all_chains(chains: CVResult, found: Importance, seconds: dict[str, float]) -> CVResult:
    """The result of chains for every fold, and why they were needed."""
    spent = {**seconds, **chains.info["seconds"]}
    why = {"structure": str(found.structure), "why_chains": why_chains(found), "seconds": spent}
    return replace(chains, info={**chains.info, **why})


def with_chains(weighted: CVResult, chains: CVResult) -> CVResult:
    """The result of folds by importance sampling and others by chains, from one full-data fit.

    It holds the first as ``weighted`` and can be taken further: its chains are.
    """
    parts = [weighted, chains]
    order = np.argsort(np.concatenate([part.test["index"] for part in parts]), kind="stable")
    counts = np.concatenate([np.diff(part.test["start"]) for part in parts])
    entries = concatenated_ranges(starts(counts), order)
    rhat = np.concatenate([part.mixing.rhat for part in parts])[order]
    test = {
        **chains.test,
        "start": starts(counts[order]),
        "rows": np.concatenate([part.test["rows"] for part in parts])[entries],
        "index": np.concatenate([part.test["index"] for part in parts])[order],
    }
    seconds = {**weighted.info["seconds"]}
    for phase, spent in chains.info["seconds"].items():
        seconds[phase] = seconds.get(phase, 0.0) + spent
    kept = {name: weighted.info[name] for name in ("structure", "why_chains")}
    info = {**chains.info, **kept, "seconds": seconds}
    return CVResult(
        {name: _joined(parts, name, order, entries) for name in chains.scores},
        replace(chains.mixing, rhat=rhat),
        test,
        info,
        chains.draws,
        join_calibrations(parts, entries),
        chains.run,
        weighted,
    )


def _joined(parts: list[CVResult], name: str, order: np.ndarray, entries: np.ndarray) -> Score:
    """One score of both parts, which share the full-data draws and so their error."""
    scores = [part.score(name) for part in parts]
    draws = parts[1].info["chains"] * parts[1].info["draws"]
    before = parts[0].info["chains"] * parts[0].info["draws"]
    # noise is the variance of a mean times a number of draws, the same for all folds of a table
    first = scores[0].folds.assign(noise=scores[0].folds["noise"] * draws / before)
    table = join_tables([first, scores[1].folds], "fold", order)
    rows, by_row = None, [score.rows for score in scores if score.rows is not None]
    if by_row:
        each = [rows_of(part, part.score(name), list(by_row[0].data_vars)) for part in parts]
        rows = join_tables(each, "test_row", entries)
    own = float(sum(score.own_variance for score in scores))
    full, pointwise = merge_full(parts, scores), scores[0].pointwise
    return finish_score(name, table, rows, draws, own, *full, pointwise)


def chains_alone(result: CVResult) -> CVResult:
    """The part of a result whose folds have chains, for what shows chains; raises if none has."""
    table = result.folds
    if "method" not in table or (table["method"].values == "mcmc").all():
        return result
    if result.weighted is None:
        raise ValueError(
            "this shows chains, but no fold has any: all scores come from the full-data draws; run "
            'cross_validate(..., method="mcmc")'
        )
    chosen = np.flatnonzero(table["method"].values == "mcmc")
    start = result.test["start"]
    entries = concatenated_ranges(start, chosen)
    return replace(
        result,
        scores={name: _score_alone(result, name, chosen, entries) for name in result.scores},
        mixing=replace(result.mixing, rhat=result.mixing.rhat[chosen]),
        test={
            **result.test,
            "start": starts(np.diff(start)[chosen]),
            "rows": result.test["rows"][entries],
            "index": result.test["index"][chosen],
        },
        calibration=None
        if result.calibration is None
        else result.calibration.isel(test_row=entries),
        weighted=None,
    )


def _score_alone(result: CVResult, name: str, chosen: np.ndarray, entries: np.ndarray) -> Score:
    both, info = result.score(name), result.info
    without = result if result.weighted is None else result.weighted
    influence, variance = both.full_influence, both.full_variance
    if influence.size:
        influence = influence - without.score(name).full_influence
        variance = float(
            diagnostics.shared_variance(influence, info["fit_chains"], info["fit_batch"])
        )
    return finish_score(
        name,
        both.folds.isel(fold=chosen),
        None if both.rows is None else both.rows.isel(test_row=entries),
        info["chains"] * info["draws"],
        both.own_variance,
        influence,
        variance,
        both.pointwise,
    )
