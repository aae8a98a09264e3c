"""Results of cross-validation: scores with their errors and diagnostics; printed, saved, merged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.results.identity import identity
from foldwise.scores import diagnostics
from foldwise.scores.estimate import calibration, estimate
from foldwise.scores.evidence import Estimate, Evidence
from foldwise.scores.rules import JOINT_RESIDUALS, LOG_SCORES, column, find_rule
from foldwise.support.checks import check_count
from foldwise.support.special import normal_cdf

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    import xarray as xr

    from foldwise.folds.folds import Folds
    from foldwise.models.model import Model
    from foldwise.sampling.run import Run


# Rows of a fold whose tails are fitted for a score by row.
_TAIL_ROWS = 5
# Columns of the table by fold, after the score itself.
_COLUMNS = (
    "mcse",
    "ess",
    "rhat",
    "slowest_ess",
    "pareto_k",
    "overlap",
    "p",
    "acceptance",
    "divergences",
    "n_train",
    "n_test",
    "weight",
    "spread",
    "noise",
    "estimator",
    "status",
)


class FoldWarning(UserWarning):
    """Some folds' scores are not to be trusted."""


@dataclass(frozen=True, repr=False)
class Score:
    """A cross-validation score: total over folds, its errors, and the table by fold.

    ``total`` is the (weighted) sum over folds, higher is better; for ``accuracy``, ``brier`` and
    the errors ``mse``, ``rmse``, ``mae`` (lower is better) it is the mean over rows, for ``r2`` one
    minus the mean squared error over the variance of the observed values. ``se`` is its
    epistemic standard error, sqrt(K) times the standard deviation (ddof=1) over the K folds, or
    over the rows for a score by row; ``mcse`` its Monte Carlo standard error. For log scores,
    ``ess`` is the effective number of draws behind the total and ``p`` the effective number of
    parameters, the full-data score of the same rows minus ``total``. Folds whose score is not a
    number are left out and counted in ``left_out``.

    ``folds`` and, for a score by row, ``rows`` are the tables: ``elpd`` of log scores, ``score`` of
    others. By fold, rules whose total is a mean show the mean over the fold's rows; ``rmse`` and
    ``r2`` show mean squared errors there. The last three fields are parts of the Monte Carlo
    variance: of the folds' own draws, what each full-data draw adds, and the variance of these.
    """

    name: str
    total: float
    se: float
    mcse: float
    ess: float
    p: float
    left_out: int
    folds: xr.Dataset
    rows: xr.Dataset | None
    own_variance: float
    full_influence: np.ndarray
    full_variance: float

    def __str__(self) -> str:
        from foldwise.results.text import score_text

        return score_text(self)

    __repr__ = __str__


@dataclass
class CVResult:
    """Cross-validation of one model.

    The attributes ``elpd``, ``se``, ``mcse``, ``ess``, ``p``, ``folds`` and ``rows`` are those of
    the first score asked for; ``score(name)`` gives any of them.

    Attributes
    ----------
    scores
        Every score asked for, by name.
    mixing
        R-hat by fold and the benchmark of its maximum.
    test
        Which rows each fold tests, and the observed values where the model has them.
    info
        Name of the model, scheme, settings, seeds, the seconds of each phase, and what tells
        whether two results are of one model, data and scheme.
    draws
        Log score of every draw, by fold, chain and draw; None with ``memory="online"``.
    calibration
        Predictive probabilities behind ``pit`` and ``coverage``; None if nothing was simulated.
    run
        What ``extend`` goes on from; None if the result was loaded or merged.
    """

    scores: dict[str, Score]
    mixing: diagnostics.Mixing
    test: dict[str, np.ndarray]
    info: dict[str, Any]
    draws: xr.DataArray | None = None
    calibration: xr.Dataset | None = None
    run: Run | None = field(default=None, repr=False)

    def score(self, name: str) -> Score:
        """The score called ``name``."""
        if name not in self.scores:
            have = ", ".join(self.scores)
            raise ValueError(
                f"this result has the scores {have}, but {name!r} was asked for; run "
                f'cross_validate(..., scores=("{name}",))'
            )
        return self.scores[name]

    @property
    def _main(self) -> Score:
        return next(iter(self.scores.values()))

    @property
    def elpd(self) -> float:
        """Total log score over folds."""
        if self._main.name not in LOG_SCORES:
            have = ", ".join(self.scores)
            raise AttributeError(
                f"elpd is a log score, but the first score of this result is {self._main.name}; "
                f"use .score(name).total with one of {have}"
            )
        return self._main.total

    @property
    def se(self) -> float:
        """Epistemic standard error of the total."""
        return self._main.se

    @property
    def mcse(self) -> float:
        """Monte Carlo standard error of the total."""
        return self._main.mcse

    @property
    def ess(self) -> float:
        """Effective number of draws behind the total."""
        return self._main.ess

    @property
    def p(self) -> float:
        """Effective number of parameters."""
        return self._main.p

    @property
    def folds(self) -> xr.Dataset:
        """Table by fold."""
        return self._main.folds

    @property
    def rows(self) -> xr.Dataset | None:
        """Table by test row, for scores by row."""
        return self._main.rows

    @property
    def rhat_max(self) -> float:
        """Largest R-hat of any fold's log score."""
        return self.mixing.rhat_max

    @property
    def rhat_benchmark(self) -> np.ndarray:
        """R-hat-max of 500 shuffled replicates: what it would be if all chains had mixed."""
        return self.mixing.benchmark

    @property
    def divergences(self) -> int:
        """Divergent transitions over all folds."""
        return int(self.folds["divergences"].sum())

    @property
    def flagged(self) -> xr.Dataset:
        """Table of the folds whose status is not fine."""
        return self.folds.isel(fold=np.flatnonzero(self.folds["status"].values != "fine"))

    def pit(self, seed: int = 0) -> xr.DataArray:
        """Probability integral transform of each held-out value under its fold's predictive.

        P(x < y) + u P(x = y), x a predictive draw, with u uniform (which matters for discrete
        data only). Uniform over rows if predictions are calibrated.
        """
        table = self._calibration()
        uniform = np.random.default_rng(seed).random(table.sizes["test_row"])
        return (table["below"] + uniform * table["equal"]).rename("pit")

    def coverage(self, levels: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95)) -> pd.DataFrame:
        """Share of held-out values inside the central predictive interval of each level.

        ``se`` is its standard error over rows, sqrt(c (1 - c) / n). ``mcse`` is its Monte Carlo
        error: Phi(-|distance to the interval's end| / error) is the chance that more draws would
        move a value across, and such chances add up.
        """
        import pandas as pd

        table = self._calibration()
        for level in levels:
            if not 0.0 < level < 1.0:
                raise ValueError(f"levels must lie between 0 and 1, got {level!r}")
        pit, error = self.pit().values, table["mcse"].values
        _, row = np.unique(table["row"].values, return_inverse=True)
        weight = table["weight"].values / table["weight"].values.sum()
        lines = []
        for level in levels:
            inside = 0.5 * level - np.abs(pit - 0.5)
            covered = min(float(weight @ (inside >= 0)), 1.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                wrong = np.where(error > 0, normal_cdf(-np.abs(inside) / error), 0.0)
            se = np.sqrt(covered * (1.0 - covered) / (row.max() + 1))
            lines.append((covered, se, float(np.sqrt(weight**2 @ wrong))))
        index = pd.Index(levels, name="level")
        return pd.DataFrame(lines, index=index, columns=["covered", "se", "mcse"])

    def _calibration(self) -> xr.Dataset:
        if self.calibration is None:
            raise ValueError(
                "PIT and coverage need predictive draws, but this run made none; ask for a score "
                'that needs them, such as cross_validate(..., scores=("log", "crps"))'
            )
        return self.calibration

    def extend(self, draws: int, model: Model | None = None, progress: bool = True) -> CVResult:
        """Run every chain ``draws`` further; this result is updated, and returned.

        A result that was loaded from a file needs the ``model`` again. If the run is interrupted
        the result stays as it was.
        """
        from foldwise.crossval import extend

        if self.run is None:
            if "state" not in self.info:
                raise ValueError(
                    "only a result that holds the state of its chains can be extended, but this "
                    "one was merged from several; extend its parts and merge them again"
                )
            if model is None:
                raise ValueError(
                    "a result loaded from a file does not hold its model's functions; pass "
                    "result.extend(draws, model=model)"
                )
            from foldwise.results.files import restore_run

            self.run = restore_run(self, model)
        longer = extend(self.run, draws, progress)
        self.__dict__.update(longer.__dict__)
        return self

    def to_arviz(self) -> Any:
        """This result as arviz-stats' ELPDData, for ``arviz_stats.compare`` and its plots."""
        from foldwise.results.export import to_arviz

        return to_arviz(self)

    def to_datatree(self, model: Model | None = None) -> xr.DataTree:
        """The folds' draws that were kept, as a DataTree that ArviZ plots.

        Needs ``cross_validate(..., keep=...)``: ``"position"`` gives the group ``posterior``, every
        parameter by fold, chain and draw; ``"predictive"`` gives ``posterior_predictive`` and
        ``observed_data``, by test row. A result loaded from a file needs its ``model`` again.
        """
        from foldwise.results.export import to_datatree

        return to_datatree(self, model)

    def save(self, path: str | Path) -> None:
        """Write the result, and the state of its chains, to a netCDF file."""
        from foldwise.results.files import save

        save(self, path)

    def __str__(self) -> str:
        from foldwise.results.text import result_text

        return result_text(self)

    __repr__ = __str__


def summarise(run: Run) -> CVResult:
    """Scores, diagnostics and status of every fold from what a run has recorded."""
    import xarray as xr

    evidence, folds, settings = run.evidence, run.folds, run.settings
    mixing = diagnostics.mixing(evidence.sums, settings.seed)
    stuck = diagnostics.chain_stuck(evidence.sums, run.moves)
    scores = {}
    for name in settings.scores:
        found = estimate(evidence, name, settings.estimator)
        columns = _diagnostics(run, found, mixing, _tails(run, found), stuck)
        scores[name] = _score(folds, evidence, found, columns)
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
    result = CVResult(scores, mixing, test, _info(run), draws, _calibration_table(run), run)
    warn_of_flags(result, stacklevel=4)
    return result


def recorded(result: CVResult) -> Evidence:
    """What the run behind ``result`` has recorded, whether the result is fresh or loaded."""
    if result.run is not None:
        return result.run.evidence
    if "state" not in result.info:
        raise ValueError(
            "estimates from fewer draws need what a run recorded, but this result was merged "
            "from several runs, which keeps their scores only; use the parts it was merged from"
        )
    from foldwise.results.files import restore_evidence

    return restore_evidence(result)


def first_draws(
    result: CVResult,
    draws: int,
    score: str | None = None,
    evidence: Evidence | None = None,
) -> CVResult:
    """What ``result`` would be had every chain stopped after its first ``draws`` draws.

    Only the one ``score`` (the first, unless named) is estimated again, by the same estimators
    from the same full-data draws and rungs, and R-hat by fold. What is counted over whole chains
    (acceptance, divergences, Pareto k, status) and the R-hat-max benchmark are left out. Needs
    stored draws. Scores by row and others than log scores are recorded in blocks of
    ``info["batch"]`` draws, so ``draws`` must be a multiple of it, or all of them; Hyvarinen scores
    keep the bridge constants that were chosen for the whole run.

    ``evidence`` is what ``recorded(result)`` gives, for callers that ask for several lengths.
    """
    name = result.score(score or result._main.name).name
    evidence = recorded(result) if evidence is None else evidence
    if evidence.draws is None:
        raise ValueError(
            'estimates from fewer draws need stored draws, but memory="online" keeps none; run '
            'cross_validate(..., memory="draws")'
        )
    check_count("draws", draws, 1)
    blocks, length = in_blocks(evidence, name), evidence.sums.length
    if draws > evidence.n_draws or (blocks and draws % length and draws < evidence.n_draws):
        step = f"a multiple of {length}, " if blocks else ""
        raise ValueError(
            f"draws must be {step}at most the {evidence.n_draws} of each chain, got {draws}"
        )
    shorter = evidence.first(draws, blocks)
    by_fold = diagnostics.fold_rhat(shorter.sums)
    found = estimate(shorter, name, result.info["estimator"])
    return CVResult(
        {name: _score(shorter.folds, shorter, found, {"rhat": by_fold})},
        diagnostics.Mixing(by_fold, np.zeros(0), draws),
        result.test,
        {**result.info, "draws": draws, "batch": shorter.sums.length},
    )


def in_blocks(evidence: Evidence, name: str) -> bool:
    """Whether the score ``name`` comes from sums over blocks of draws, not from stored draws."""
    by_row = name == "log_pointwise" and evidence.sums.row_log_sum is not None
    return by_row or name not in LOG_SCORES


def _calibration_table(run: Run) -> xr.Dataset | None:
    import xarray as xr

    found, folds = calibration(run.evidence), run.folds
    if found is None:
        return None
    columns: dict[str, Any] = {name: ("test_row", values) for name, values in found.items()}
    columns["observed"] = ("test_row", run.evidence.observed)
    columns["weight"] = ("test_row", folds.test_weight)
    columns["fold"] = ("test_row", np.repeat(folds.names, folds.n_test))
    return xr.Dataset(columns, coords={"row": ("test_row", folds.test_rows)})


def _tails(run: Run, found: Estimate) -> np.ndarray:
    """Pareto k of each fold: of its joint density, or the largest of some of its rows'.

    For scores by row, the tails of the ``_TAIL_ROWS`` rows that vary most are fitted.
    """
    sums, folds = run.evidence.sums, run.folds
    draws = run.evidence.chains * run.evidence.n_draws
    if not found.weighted:
        return np.full(len(folds), np.nan)
    if found.rows is None or found.row_spread is None or sums.row_largest is None:
        return diagnostics.pareto_k(sums.largest, draws)
    fold = np.repeat(np.arange(len(folds)), folds.n_test)
    order = np.lexsort((-found.row_spread, fold))
    rank = np.arange(len(fold)) - np.repeat(folds.test_start[:-1], folds.n_test)
    chosen = order[rank < _TAIL_ROWS]
    tails = np.full(len(folds), -np.inf)
    np.fmax.at(tails, fold[chosen], diagnostics.pareto_k(sums.row_largest[chosen], draws))
    return np.where(np.isfinite(tails), tails, np.nan)


def _info(run: Run) -> dict[str, Any]:
    settings, evidence = run.settings, run.evidence
    return {
        "model": run.model.name or "",
        "scheme": run.folds.scheme,
        "identity": identity(run.model, run.folds),
        "n_obs": run.model.n_obs,
        "parameters": run.model.dimension,
        "chains": settings.chains,
        "draws": evidence.n_draws,
        "warmup": settings.warmup,
        "batch": evidence.sums.length,
        "estimator": settings.estimator,
        "memory": settings.memory,
        "precision": settings.precision,
        "seed": settings.seed,
        "fit_seed": run.fit.seed,
        "fit_draws": evidence.full.shape[1],
        "fit_chains": evidence.full_chains,
        "fit_batch": evidence.full_length or 0,
        "fit_problems": "; ".join(run.fit.problems()),
        "step_size": run.sampler.step_size,
        "gradients": run.sampler.gradients,
        "seconds": dict(run.seconds),
    }


def _diagnostics(
    run: Run,
    found: Estimate,
    mixing: diagnostics.Mixing,
    tail: np.ndarray,
    stuck: np.ndarray,
) -> dict[str, np.ndarray]:
    """Columns of the table by fold that say how well it was sampled."""
    evidence = run.evidence
    acceptance = run.acceptance / evidence.n_draws
    # a score that is not a number where the log densities are: the predictions are degenerate
    degenerate = ~np.isfinite(found.score) & ~evidence.undefined & (not found.weighted)
    joint = find_rule(found.name).contribution is JOINT_RESIDUALS
    disagree, not_finite = mixing.rhat > mixing.limit, evidence.sums.not_finite > 0
    other = evidence.partner
    from_fold = (other >= 0) & (other < len(other))
    slow, drifting = evidence.slow, evidence.drifting
    trouble, nowhere = (
        stuck | disagree | not_finite | slow | run.divergent,
        np.zeros(len(other), bool),
    )
    mostly = trouble[~evidence.undefined].sum() >= diagnostics.MOST_IN_TROUBLE * len(other)
    status = diagnostics.fold_status(
        improper=nowhere if evidence.improper is None else evidence.improper,
        not_finite=not_finite | (~np.isfinite(found.score) & ~degenerate),
        singular=degenerate & joint,
        flat=degenerate & (not joint),
        stranded=nowhere if found.stranded is None else found.stranded,
        stuck=stuck,
        disagree=disagree,
        drifting=slow & drifting,
        slow=slow,
        divergent=run.divergent,
        partner=from_fold & trouble[np.where(from_fold, other, 0)],
        others=mostly,
        unsettled=nowhere if found.unsettled is None else found.unsettled,
        overlap=found.overlap,
        tail=tail,
        bridged=found.bridged,
        ess=_effective(evidence, found),
        acceptance=acceptance,
        fit=not run.fit.settled,
    )
    return {
        "rhat": mixing.rhat,
        "slowest_ess": evidence.slowest_ess,
        "pareto_k": tail,
        "acceptance": acceptance,
        "divergences": run.divergences.copy(),
        "status": status.astype(object),
    }


def _effective(evidence: Evidence, found: Estimate) -> np.ndarray:
    """Effective number of draws of each fold."""
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = evidence.chains * evidence.n_draws * found.spread / found.noise
    return np.where(found.noise > 0, draws, np.nan)


def _score(folds: Folds, evidence: Evidence, found: Estimate, more: dict[str, np.ndarray]) -> Score:
    """A score with its tables, whose columns by fold are the estimate's and ``more``."""
    import xarray as xr

    name = column(found.name)
    size = folds.n_test if find_rule(found.name).aggregate is not None else 1.0
    columns: dict[str, Any] = {
        name: found.score / size,
        "mcse": np.sqrt(found.variance) / size,
        "ess": _effective(evidence, found),
        "overlap": found.overlap,
        "p": found.full_score - found.score,
        "n_train": folds.n_train,
        "n_test": folds.n_test,
        "weight": folds.fold_weight,
        "spread": found.spread,
        "noise": found.noise,
        "estimator": np.where(found.bridged, "bridge", "mean"),
        **more,
    }
    table = xr.Dataset(
        {key: ("fold", columns[key]) for key in (name, *_COLUMNS) if key in columns},
        coords={"fold": folds.names},
    )
    rows = None
    if found.rows is not None and found.row_variance is not None:
        by_row = {
            name: ("test_row", found.rows),
            "mcse": ("test_row", np.sqrt(found.row_variance)),
            "weight": ("test_row", folds.test_weight),
            "fold": ("test_row", np.repeat(folds.names, folds.n_test)),
        }
        if found.name in LOG_SCORES:
            by_row["p"] = ("test_row", evidence.full_rows - found.rows)
        else:
            by_row["observed"] = ("test_row", evidence.observed)
        rows = xr.Dataset(by_row, coords={"row": ("test_row", folds.test_rows)})
    return finish_score(
        found.name,
        table,
        rows,
        evidence.chains * evidence.n_draws,
        found.own_variance,
        found.full_influence,
        found.full_variance,
    )


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
    parts = units(table, rows, used, column(name))
    aggregate = find_rule(name).aggregate
    if aggregate is None or not len(parts):
        return parts, 1.0
    assert rows is not None
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
    used = np.isfinite(table[column(name)].values)
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


def flags(result: CVResult) -> tuple[int, list[str]]:
    """How many folds are flagged, and a line for each kind of trouble: what it is, what to do.

    Of scores after the first, trouble that the first does not share is named with the score.
    """
    main, *others = result.scores.values()
    status, names = main.folds["status"].values, main.folds["fold"].values
    draws = None
    if "slowest_ess" in main.folds:
        slowest, info = main.folds["slowest_ess"].values, result.info
        draws = diagnostics.draws_needed(slowest, info["chains"], info["draws"])
    flagged, lines = status != "fine", diagnostics.advice(status, names, draws)
    for score in others:
        more = np.where(flagged, "fine", score.folds["status"].values)
        lines += [f"{score.name}, {line}" for line in diagnostics.advice(more, names)]
        flagged = flagged | (more != "fine")
    return int(flagged.sum()), lines


def warn_of_flags(result: CVResult, stacklevel: int = 3) -> None:
    """Say once how many folds are flagged and why."""
    count, lines = flags(result)
    if lines:
        head = f"{count} of {result.folds.sizes['fold']} folds flagged: "
        warnings.warn(head + "\n  ".join(lines), FoldWarning, stacklevel=stacklevel)


def load(path: str | Path) -> CVResult:
    """Read a result that ``CVResult.save`` wrote."""
    from foldwise.results import files as storage

    return storage.load(path)


def merge(results: Iterable[CVResult]) -> CVResult:
    """Join results of disjoint folds of one scheme, run apart, into that of all their folds.

    They must be of one model and its data, one scheme and one run length, with the same scores and
    estimator; the joined result says how many folds of the scheme it has. It cannot be extended;
    extend its parts and merge them again.
    """
    from foldwise.results import files as storage

    return storage.merge(results)
