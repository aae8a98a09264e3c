"""Comparison of models cross-validated on the same folds: differences, probabilities, weights."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from jaxtyping import Bool, Float

from foldwise.results import methods
from foldwise.results.comparable import by_name, check_comparable, common_score
from foldwise.results.differences import (
    Paired,
    bayesian_bootstrap,
    bootstrap_probability,
    finite_in_all,
    known,
    paired_units,
)
from foldwise.results.identity import folds_of_scheme, same_scheme
from foldwise.results.numbers import listed
from foldwise.results.result import CVResult, Score
from foldwise.results.totals import standard_error, units
from foldwise.results.verdict import Lead, Length, Verdict, flagged_folds, judge, troubles_of
from foldwise.results.weights import stacking_weights
from foldwise.scores.diagnostics import ADVICE
from foldwise.scores.rules import LOG_SCORES, column, find_rule
from foldwise.support.words import counted

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pandas as pd
    import xarray as xr

# Columns of the table that say which model is better.
_VERDICT = (
    "rank",
    "prob_worse",
    "prob_worse_bootstrap",
    "stacking",
    "pseudo_bma",
    "pseudo_bma_plus",
)


class SeedWarning(UserWarning):
    """Results that share a seed were compared as if their randomness were independent."""


@dataclass(frozen=True)
class Pair:
    """Difference of two models' scores, the first minus the second: positive favours the first.

    ``se`` is the standard error over data of ``diff``, ``mcse`` its Monte Carlo standard error,
    ``error`` both together, each counted once, and ``interval`` the 95 % interval that follows.
    ``prob`` is the probability that the first model predicts better, by Student's t with one
    degree of freedom less than there are units, and ``prob_bootstrap`` the same by the Bayesian
    bootstrap, Monte Carlo error included in both; NaN while a fold is missing.
    """

    diff: float
    se: float
    mcse: float
    error: float
    interval: tuple[float, float]
    prob: float
    prob_bootstrap: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Models compared by one score, paired over folds (or over rows, for a score by row).

    Differences are positively oriented, higher is better; errors such as ``rmse`` are negated for
    them. ``table`` has one line per model, best first:

    - ``elpd_diff``: model minus best, so zero for the best and negative for the others;
    - ``se_diff``: its standard error, sqrt(K) sd(ddof=1) of the K paired differences;
    - ``mcse_diff``: its Monte Carlo error, sqrt(mcse_model^2 + mcse_best^2);
    - ``error_diff``: its error over data and random numbers, each counted once;
    - ``prob_worse``: probability that this model predicts worse than the best, by Student's t with
      ``error_diff``; ``prob_worse_bootstrap``: the same by the Bayesian bootstrap;
    - ``stacking``, ``pseudo_bma``, ``pseudo_bma_plus``: model weights (Yao et al. 2018);
    - ``rank``, ``elpd``, ``optimism``, ``se``, ``mcse``: as in each model's result.

    For other scores than log scores, ``score`` and ``score_diff`` take the place of ``elpd`` and
    ``elpd_diff``, and there are no weights and no ``optimism``. ``verdict`` says what follows.

    Everything is over the folds whose score and its error are finite in all models; ``left_out``
    counts the others, and ``missing`` names them. While there are any there is no verdict: a fold
    fails most easily where a model predicts badly, so leaving it out favours the model that
    failed. Ranks, probabilities and weights are then NaN, and the table is in the order given, with
    differences to the first model. ``scheme_folds`` is the number of folds of the whole scheme, of
    which the results may hold a part; ``remarks`` say what is wrong with models' folds and fits.

    ``units`` are the contributions to the totals that differences are paired over, each a
    ``unit``: a fold, or a row where rows are left out one by one or at random. ``ess``,
    ``rhat_max`` and ``rhat_benchmark`` are over all ``results``.
    With exactly two models ``diff``, ``se``, ``mcse``, ``prob`` and ``prob_bootstrap`` are those
    of the first given minus the second given; ``pair(a, b)`` gives them for any two.
    """

    score: str
    table: pd.DataFrame
    folds: xr.Dataset
    paired: Paired
    left_out: int
    scheme_folds: int
    remarks: list[str]
    ess: float
    rhat_max: float
    rhat_benchmark: Float[np.ndarray, " replicate"]
    results: dict[str, CVResult]

    @property
    def units(self) -> Float[np.ndarray, "unit model"]:
        """What each unit contributes to the models' totals, higher being better."""
        return self.paired.units

    @property
    def unit(self) -> str:
        """What differences are paired over, "fold" or "row"."""
        return self.paired.unit

    @cached_property
    def verdict(self) -> Verdict:
        """Which model predicts better, or why that can not be said."""
        return _verdict(self)

    @property
    def missing(self) -> dict[str, list[Any]]:
        """Names of the folds whose score is not finite, by model, of models that have such."""
        finite = np.isfinite(self.folds[column(self.score)].values)
        fold = self.folds["fold"].values
        by_model = zip(self.names, finite, strict=True)
        return {name: fold[~known].tolist() for name, known in by_model if not known.all()}

    @property
    def names(self) -> list[str]:
        """Names of the models, in the order given."""
        return [str(name) for name in self.folds["model"].values]

    def pair(self, a: str, b: str) -> Pair:
        """Score of model ``a`` minus that of model ``b``, with errors and probabilities."""
        names = self.names
        for name in (a, b):
            if name not in names:
                raise ValueError(
                    f"pair needs two of the compared models, {', '.join(names)}; got {name!r}"
                )
        first, second = names.index(a), names.index(b)
        found, delta = self.paired.against(first, second), self.paired.delta(first, second)
        prob = prob_bootstrap = np.nan
        if not self.left_out:
            prob = found.prob
            replicates = bayesian_bootstrap(delta[:, None], self.paired.repeats)[:, 0]
            prob_bootstrap = bootstrap_probability(replicates, len(delta), found)
        return Pair(
            found.diff, found.se, found.mcse, found.error, found.interval, prob, prob_bootstrap
        )

    @cached_property
    def _only_pair(self) -> Pair:
        return self.pair(*self.names)

    def _of_pair(self, name: str) -> float:
        names = self.names
        if len(names) != 2:
            raise AttributeError(
                f".{name} is the first model minus the second, but {len(names)} models were "
                f'compared; use .table or .pair("{names[0]}", "{names[1]}").{name}'
            )
        return getattr(self._only_pair, name)

    @property
    def diff(self) -> float:
        """Total score of the first model given minus that of the second."""
        return self._of_pair("diff")

    @property
    def se(self) -> float:
        """Standard error, over data, of ``diff``."""
        return self._of_pair("se")

    @property
    def mcse(self) -> float:
        """Monte Carlo standard error of ``diff``."""
        return self._of_pair("mcse")

    @property
    def error(self) -> float:
        """Error of ``diff`` over data and random numbers, each counted once."""
        return self._of_pair("error")

    @property
    def prob(self) -> float:
        """Probability that the first model predicts better, Monte Carlo error included."""
        return self._of_pair("prob")

    @property
    def prob_bootstrap(self) -> float:
        """Probability that the first model predicts better, by the Bayesian bootstrap."""
        return self._of_pair("prob_bootstrap")

    @property
    def share_above(self) -> float:
        """Share of benchmark replicates at or above R-hat-max: small means not mixed."""
        if not np.isfinite(self.rhat_max):
            return np.nan
        return float(np.mean(self.rhat_benchmark >= self.rhat_max))

    def __str__(self) -> str:
        return methods.comparison_text(self)

    __repr__ = __str__

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report on the comparison and its models, one HTML file that needs no other."""
        return methods.comparison_report(self, path)

    def _repr_html_(self) -> str:
        return methods.comparison_html(self)

    def __rich__(self) -> Any:
        return methods.coloured(str(self))


def compare(
    results: dict[str, CVResult] | list[CVResult] | tuple[CVResult, ...],
    score: str | None = None,
) -> Comparison:
    """Differences between models' cross-validation scores, paired over folds or rows.

    delta_k = score of unit k under one model minus under the other; their sum is the difference,
    positive when the first predicts better, and sqrt(K) sd(delta) its standard error. Units are
    rows where these are left out one by one or at random, and folds where whole groups, blocks or
    times are. Monte Carlo errors of two models are independent, so their squares add; probabilities
    and intervals count them, without counting the folds' own noise twice.

    Parameters
    ----------
    results
        Two or more results by name. In a list they take their models' names, or "A", "B", ...
        where those are empty or not distinct. They must test the same rows in the same folds and,
        where both have it, the same ``y``; training rows may differ. All may hold the same part of
        a scheme, which is then said.
    score
        Which score to compare by; None means the first score of the first result.
    """
    named = by_name(results)
    score = common_score(named, score)
    check_comparable(named)
    _warn_of_seeds(named)
    chosen = {name: result.score(score) for name, result in named.items()}
    used = finite_in_all(chosen)
    paired = paired_units(score, chosen, used)
    return Comparison(
        score=score,
        table=_table(score, chosen, paired, used),
        folds=_by_fold(score, chosen),
        paired=paired,
        left_out=int((~used).sum()),
        scheme_folds=max(folds_of_scheme(r.info, len(used)) for r in named.values()),
        remarks=_remarks(named, chosen),
        ess=_ess(named, score, used),
        rhat_max=_rhat_max(named),
        rhat_benchmark=_benchmark(named),
        results={name: replace(result) for name, result in named.items()},  # as they are now
    )


def _warn_of_seeds(named: dict[str, CVResult]) -> None:
    """Warn when two results share a seed, which makes their Monte Carlo errors dependent."""
    for key in ("seed", "fit_seed"):
        for (a, one), (b, two) in combinations(named.items(), 2):
            shared = _seeds(one.info.get(key)) & _seeds(two.info.get(key))
            if shared:
                warnings.warn(
                    f"compared results should have different seeds, but {a} and {b} share "
                    f"{key} {min(shared)}: their Monte Carlo errors are then not independent, and "
                    "mcse_diff may be wrong; run one of them with another seed",
                    SeedWarning,
                    stacklevel=3,
                )
                return


def _seeds(value: Any) -> set[int]:
    """The seeds behind a result: none, one, or those of the parts it was merged from."""
    if value is None:
        return set()
    return {int(seed) for seed in np.atleast_1d(value).ravel() if seed is not None}


# ---------------------------------------------------------------- tables


def _table(
    score: str, chosen: dict[str, Score], paired: Paired, used: Bool[np.ndarray, " fold"]
) -> pd.DataFrame:
    """One line per model, best first; while a fold is missing, in the order given."""
    import pandas as pd

    parts, total = paired.units, paired.units.sum(axis=0)
    verdict = bool(used.all())
    order = np.argsort(-total, kind="stable") if verdict else np.arange(len(total))
    best = int(order[0])
    replicates = bayesian_bootstrap(parts - parts[:, [best]], paired.repeats)
    ahead = [paired.against(best, model) for model in range(len(total))]
    name = column(score)
    columns = {
        name: find_rule(score).sign * total,
        f"{name}_diff": [-found.diff for found in ahead],
        "se_diff": [found.se for found in ahead],
        "mcse_diff": [found.mcse for found in ahead],
        "error_diff": [found.error for found in ahead],
        "prob_worse": [found.prob for found in ahead],
        "prob_worse_bootstrap": [
            bootstrap_probability(-each, len(parts), found)
            for each, found in zip(replicates.T, ahead, strict=True)
        ],
    }
    if score in LOG_SCORES:
        columns |= _weights(chosen, paired, used, replicates)
    columns |= {
        "se": [standard_error(part, paired.repeats) for part in parts.T],
        "mcse": paired.mcse,
    }
    table = pd.DataFrame(columns, index=pd.Index(list(chosen), name="model"))
    winner = table.index[best]
    table.loc[winner, [f"{name}_diff", "se_diff", "mcse_diff", "error_diff"]] = 0.0
    table.loc[winner, ["prob_worse", "prob_worse_bootstrap"]] = np.nan
    table = table.iloc[order]
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    if not verdict:
        table[[name for name in _VERDICT if name in table]] = np.nan
    return table


def _weights(
    chosen: dict[str, Score],
    paired: Paired,
    used: Bool[np.ndarray, " fold"],
    replicates: Float[np.ndarray, "replicate model"],
) -> dict[str, Any]:
    """Weights of models by their log scores, and their optimism.

    Stacking is of the densities that are scored: of rows, for a score by row, whatever its error is
    taken over.
    """
    scores, parts = list(chosen.values()), paired.units
    if all(score.rows is not None for score in scores):
        parts = np.column_stack([units(s.folds, s.rows, used, unit="row") for s in scores])
    tables = [score.folds.isel(fold=used) for score in scores]
    return {
        "stacking": stacking_weights(parts),
        "pseudo_bma": scipy.special.softmax(paired.units.sum(axis=0)),
        "pseudo_bma_plus": scipy.special.softmax(len(paired.units) * replicates, axis=1).mean(
            axis=0
        ),
        "optimism": [float((t["weight"] * t["optimism"]).sum(skipna=False)) for t in tables],
    }


def _by_fold(score: str, chosen: dict[str, Score]) -> xr.Dataset:
    """Scores by model and fold; for a pair also the difference, first minus second, by fold.

    Errors are negated in the difference, so that it favours the first model where positive.
    """
    import xarray as xr

    tables, name = [s.folds for s in chosen.values()], column(score)
    values = np.stack([np.where(known(s), s.folds[name].values, np.nan) for s in chosen.values()])
    found = xr.Dataset(
        {name: (("model", "fold"), values)},
        coords={"model": list(chosen), "fold": tables[0]["fold"].values},
    )
    if len(tables) == 2:
        sign = -1.0 if find_rule(score).error else 1.0
        with np.errstate(invalid="ignore"):  # both minus infinity
            found["diff"] = ("fold", sign * (values[0] - values[1]))
        found["mcse"] = ("fold", np.hypot(tables[0]["mcse"].values, tables[1]["mcse"].values))
    return found


# ---------------------------------------------------------------- the verdict


def _verdict(comparison: Comparison) -> Verdict:
    """The best model against each of the others, closest first."""
    names, order = comparison.names, list(comparison.table.index)
    best = names.index(order[0])
    troubles, flagged = _troubles(comparison), {}
    for name, result in comparison.results.items():
        flagged[name] = flagged_folds(result.score(comparison.score).folds)
        troubles += troubles_of(name, result)
    leads = [_lead(comparison, flagged, best, names.index(other)) for other in order[1:]]
    if comparison.left_out:
        leads = sorted(leads, key=lambda lead: abs(lead.delta.sum()))
    fold = comparison.folds["fold"].values
    lines = [
        f"flagged folds of {name} could turn it ({listed(fold[which])})"
        for name, which in flagged.items()
        if which.any()
    ]
    held = comparison.folds.sizes["fold"]
    whole = comparison.scheme_folds
    part = f"{held} of {counted(whole, 'fold')}" if held < whole else ""
    return judge(leads, troubles, lines, part)


def _lead(
    comparison: Comparison, flagged: dict[str, Bool[np.ndarray, " fold"]], best: int, other: int
) -> Lead:
    """The best model against another; of folds that are missing, whichever is ahead."""
    paired, names = comparison.paired, comparison.names
    if paired.delta(best, other).sum() < 0:
        best, other = other, best
    one, two = names[best], names[other]
    return Lead(
        one,
        two,
        paired.delta(best, other),
        (flagged[one] | flagged[two])[paired.fold],
        *paired.noise_of(best, other),
        paired.repeats,
        tuple(Length.of(comparison.results[name], comparison.score) for name in (one, two)),
        comparison.score in LOG_SCORES,
    )


def _troubles(comparison: Comparison) -> list[str]:
    """Folds without a score."""
    if not comparison.left_out:
        return []
    where = "; ".join(f"{listed(names)} in {model}" for model, names in comparison.missing.items())
    verb = "has" if comparison.left_out == 1 else "have"
    count = counted(comparison.folds.sizes["fold"], "fold")
    return [
        f"{comparison.left_out} of {count} {verb} no finite score ({where}), and a fold fails most "
        "easily where a model predicts badly"
    ]


# ---------------------------------------------------------------- diagnostics over all models


def _remarks(named: dict[str, CVResult], chosen: dict[str, Score]) -> list[str]:
    """What the results say of themselves: flagged folds, problems of fits, other training rows."""
    remarks = []
    for name, score in chosen.items():
        count = Counter(score.folds["status"].values if "status" in score.folds else ())
        del count["fine"]
        kinds = [kind for kind in dict.fromkeys([*ADVICE, *count]) if count[kind]]
        if kinds:
            folds = f"{count.total()} of {score.folds.sizes['fold']} folds"
            by_kind = ", ".join(f"{kind} {count[kind]}" for kind in kinds)
            remarks.append(f"{name}: {folds} flagged: {by_kind}")
    for name, result in named.items():
        if result.info.get("fit_problems"):
            remarks.append(f"{name}: check the full-data fit first: {result.info['fit_problems']}")
    (first_name, first), *others = named.items()
    for name, other in others:
        if same_scheme(first.info, other.info) is False:
            schemes = "; ".join(dict.fromkeys(str(r.info["scheme"]) for r in (first, other)))
            remarks.append(
                f"{first_name} and {name} test the same rows, but their schemes differ, in "
                f"training rows or in folds that are not here: {schemes}"
            )
    return remarks


def _ess(named: dict[str, CVResult], score: str, used: Bool[np.ndarray, " fold"]) -> float:
    """Effective draws behind the comparison: sum of spread / sum of noise / draws, all models."""
    spread = variance = 0.0
    for result in named.values():
        table = result.score(score).folds
        draws = result.info.get("chains", np.nan) * result.info.get("draws", np.nan)
        spread += float(table["spread"].values[used].sum())
        variance += float(table["noise"].values[used].sum()) / draws
    return spread / variance if variance > 0 else np.nan


def _rhat_max(named: dict[str, CVResult]) -> float:
    """Largest R-hat of any fold of any model."""
    values = np.array([result.rhat_max for result in named.values()])
    return float(np.nanmax(values)) if np.isfinite(values).any() else np.nan


def _benchmark(named: dict[str, CVResult]) -> Float[np.ndarray, " replicate"]:
    """What R-hat-max over all models would be if their chains had mixed.

    The models' replicates are independent, so the largest of one from each is a replicate of the
    maximum over all. Empty where no model has chains.
    """
    arrays = [np.asarray(result.rhat_benchmark) for result in named.values()]
    arrays = [array for array in arrays if array.size] or [np.zeros(0)]
    length = min(len(array) for array in arrays)
    return np.fmax.reduce([array[:length] for array in arrays])
