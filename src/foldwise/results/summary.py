"""From what a run has recorded to its result: scores, diagnostics and status of every fold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.folds.folds import Folds
from foldwise.models.model import Model
from foldwise.results.identity import identity
from foldwise.results.result import CVResult, Score
from foldwise.results.totals import finish_score
from foldwise.sampling.run import Run
from foldwise.scores import diagnostics
from foldwise.scores.estimate import calibration, estimate
from foldwise.scores.evidence import Estimate, Evidence
from foldwise.scores.marginal_model import MarginalModel, base_of
from foldwise.scores.rule import Rule
from foldwise.scores.rules import JOINT_RESIDUALS, LOG_SCORES, find_rule

if TYPE_CHECKING:
    import xarray as xr


# Columns of the table by fold, after the score itself.
_COLUMNS = (
    "mcse",
    "ess",
    "rhat",
    "slowest_ess",
    "pareto_k",
    "overlap",
    "optimism",
    "acceptance",
    "divergences",
    "n_train",
    "n_test",
    "weight",
    "spread",
    "noise",
    "estimator",
    "method",
    "status",
)
# Rows of a fold whose tails are fitted for a score by row.
_TAIL_ROWS = 5


def summarise(run: Run) -> CVResult:
    """Scores, diagnostics and status of every fold from what a run has recorded."""
    import xarray as xr

    evidence, folds, settings = run.evidence, run.folds, run.settings
    mixing = diagnostics.mixing(evidence.sums, settings.seed)
    stuck = diagnostics.chain_stuck(evidence.pace.watch, run.moves)
    scores = {}
    for name in settings.scores:
        found, rule = estimate(evidence, name, settings.estimator), find_rule(name)
        joint = rule.contribution is JOINT_RESIDUALS
        columns = _diagnostics(run, found, mixing, _tails(run, found), stuck, joint)
        scores[name] = score_table(folds, evidence, found, rule, columns)
    draws = None
    if evidence.draws is not None:
        draws = xr.DataArray(
            evidence.draws[..., 0],
            dims=("fold", "chain", "draw"),
            coords={"fold": folds.names},
            name="log_score",
        )
    y = run.model.y
    test = {"start": folds.test_start, "rows": folds.test_rows, "index": folds.index}
    if y is not None:
        test["y"] = np.asarray(y)
    return CVResult(scores, mixing, test, _info(run), draws, _calibration_table(run), run)


def _calibration_table(run: Run) -> xr.Dataset | None:
    import xarray as xr

    found, folds = calibration(run.evidence), run.folds
    if found is None:
        return None
    columns: dict[str, Any] = {name: ("test_row", values) for name, values in found.items()}
    columns["weight"] = ("test_row", folds.test_weight)
    columns["fold"] = ("test_row", np.repeat(folds.names, folds.n_test))
    return xr.Dataset(columns, coords={"row": ("test_row", folds.test_rows)})


def _tails(run: Run, found: Estimate) -> np.ndarray:
    """Pareto k of each fold: of its joint density, or the largest of some of its rows'.

    For scores by row, the tails of the ``_TAIL_ROWS`` rows that vary most are fitted.
    """
    sums, folds = run.evidence.sums, run.folds
    draws = run.evidence.standing.count
    if not found.weighted:
        return np.full(len(folds), np.nan)
    if found.rows is None or sums.rows is None:
        return diagnostics.pareto_k(sums.largest, draws)
    fold = np.repeat(np.arange(len(folds)), folds.n_test)
    order = np.lexsort((-found.rows.spread, fold))
    rank = np.arange(len(fold)) - np.repeat(folds.test_start[:-1], folds.n_test)
    chosen = order[rank < _TAIL_ROWS]
    tails = np.full(len(folds), -np.inf)
    np.fmax.at(tails, fold[chosen], diagnostics.pareto_k(sums.rows.largest[chosen], draws))
    return np.where(np.isfinite(tails), tails, np.nan)


def _info(run: Run) -> dict[str, Any]:
    settings, now, full = run.settings, run.evidence.standing, run.evidence.full
    model = base_of(run.model)
    return {
        "model": model.name or "",
        "scheme": run.folds.scheme,
        "identity": identity(model, run.folds),
        "n_obs": model.n_obs,
        "parameters": model.dimension,
        **_integrated(run.model),
        "chains": settings.chains,
        "draws": now.draws,
        "warmup": settings.warmup,
        "batch": now.length,
        "estimator": settings.estimator,
        "memory": settings.memory,
        "precision": settings.precision,
        "seed": settings.seed,
        "fit_seed": run.fit.seed,
        "fit_made_elsewhere": run.fit.made_elsewhere,
        "fit_draws": full.joint.shape[1],
        "fit_chains": full.chains,
        "fit_batch": full.length,
        "fit_problems": "; ".join(run.fit.problems()),
        "tied_future": _tied_future(run),
        "step_size": run.sampler.step_size,
        "gradients": run.sampler.gradients,
        "fit_gradients": run.fit.gradients,
        "seconds": dict(run.seconds),
    }


def _tied_future(run: Run) -> float:
    """Share of the folds that leave out the future, and with it parameters that form a chain.

    No training row comes after a test row, and of the parameters that no training row informs the
    prior ties some to each other, as it does the steps of a random walk.
    """
    folds = run.folds
    future = np.minimum.reduceat(folds.test_rows, folds.test_start[:-1]) >= folds.train_stop
    return float((future & run.locals.tied).mean())


def _integrated(model: Model) -> dict[str, str]:
    """What was integrated out, where something was."""
    if not isinstance(model, MarginalModel):
        return {}
    return {"structure": str(model.structure), "sampled": model.sentence}


def _diagnostics(
    run: Run,
    found: Estimate,
    mixing: diagnostics.Mixing,
    tail: np.ndarray,
    stuck: np.ndarray,
    joint: bool,
) -> dict[str, np.ndarray]:
    """Columns of the table by fold that say how well it was sampled.

    ``joint``: the score takes the covariance of the test rows, which may be singular.
    """
    evidence, now = run.evidence, run.evidence.standing
    acceptance = run.acceptance / now.draws
    # a score that is not a number where the log densities are: the predictions are degenerate
    degenerate = ~np.isfinite(found.score) & ~now.undefined & (not found.weighted)
    disagree, not_finite = mixing.rhat > mixing.limit, evidence.sums.not_finite > 0
    other = evidence.partner
    from_fold = (other >= 0) & (other < len(other))
    slow, drifting = now.slow, diagnostics.drifting(evidence.pace.watch)
    divergent, nowhere = run.divergent, np.zeros(now.folds, bool)
    trouble = stuck | disagree | not_finite | slow | divergent
    mostly = trouble[~now.undefined].sum() >= diagnostics.MOST_IN_TROUBLE * len(other)
    conditions = {
        "improper": evidence.improper,
        "not finite": not_finite | (~np.isfinite(found.score) & ~degenerate),
        "singular covariance": degenerate & joint,
        "no spread": degenerate & (not joint),
        "too far from its partner": found.stranded,
        "stuck chain": stuck,
        "chains disagree": disagree,
        "not settled": slow & drifting,
        "too slow": slow,
        "divergent": divergent,
        "partner in trouble": found.bridged & from_fold & trouble[np.where(from_fold, other, 0)],
        "others in trouble": nowhere | mostly,
        "rungs not settled": found.unsettled,
        "fit not settled": nowhere | (not run.fit.settled),
        **diagnostics.doubtful(
            found.bridged, found.overlap, tail, _effective(evidence, found), acceptance
        ),
    }
    status = diagnostics.fold_status(conditions)
    return {
        "rhat": mixing.rhat,
        "slowest_ess": now.slowest_ess,
        "pareto_k": tail,
        "acceptance": acceptance,
        "divergences": run.divergences.copy(),
        "status": status.astype(object),
    }


def _effective(evidence: Evidence, found: Estimate) -> np.ndarray:
    """Effective number of draws of each fold: all of them, where nothing varies."""
    count = evidence.standing.count
    return diagnostics.effective_draws(found.spread, found.noise / count, count)


def score_table(
    folds: Folds, evidence: Evidence, found: Estimate, rule: Rule, more: dict[str, np.ndarray]
) -> Score:
    """A score with its tables, whose columns by fold are the estimate's and ``more``."""
    import xarray as xr

    name = rule.column
    size = folds.n_test if rule.aggregate is not None else 1.0
    columns: dict[str, Any] = {
        name: found.score / size,
        "mcse": np.sqrt(found.variance) / size,
        "ess": _effective(evidence, found),
        "overlap": found.overlap,
        "optimism": found.full_score - found.score,
        "n_train": folds.n_train,
        "n_test": folds.n_test,
        "weight": folds.fold_weight,
        "spread": found.spread,
        "noise": found.noise,
        "estimator": np.where(found.bridged, "bridge", "mean"),
        "method": np.full(len(folds), "mcmc"),
        **more,
    }
    table = xr.Dataset(
        {key: ("fold", columns[key]) for key in (name, *_COLUMNS) if key in columns},
        coords={"fold": folds.names},
    )
    rows = None
    if found.rows is not None:
        by_row = {
            name: ("test_row", found.rows.score),
            "mcse": ("test_row", np.sqrt(found.rows.variance)),
            "weight": ("test_row", folds.test_weight),
            "fold": ("test_row", np.repeat(folds.names, folds.n_test)),
        }
        if found.name in LOG_SCORES:
            by_row["optimism"] = ("test_row", evidence.full.rows - found.rows.score)
        else:
            by_row["observed"] = ("test_row", evidence.outcomes_for(found.name).observed)
        rows = xr.Dataset(by_row, coords={"row": ("test_row", folds.test_rows)})
    return finish_score(
        found.name,
        table,
        rows,
        evidence.standing.count,
        found.own_variance,
        found.full_influence,
        found.full_variance,
        folds.pointwise,
    )
