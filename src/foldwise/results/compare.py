"""Comparison of models cross-validated on the same folds: differences, probabilities, weights."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from foldwise.results import methods
from foldwise.results.identity import folds_of_scheme, same_scheme
from foldwise.results.result import CVResult, FoldWarning, Score
from foldwise.results.totals import standard_error, total_units, unit_repeats
from foldwise.scores.diagnostics import ADVICE
from foldwise.scores.rules import LOG_SCORES, column, find_rule
from foldwise.support.special import normal_cdf, softmax

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

# Replicates of the Bayesian bootstrap: a probability of one half is then known to 0.008.
REPLICATES = 4000
# Bootstrap weights held at once, 8 MB, so that 20,000 units do not take 640 MB.
_CHUNK = 2**20
_BOOTSTRAP_SEED = 0
STACKING_GAP = 1e-6
_STACKING_STEPS = 100_000
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

    ``se`` is the epistemic standard error of ``diff``, ``mcse`` its Monte Carlo standard error,
    ``prob`` the probability that the first model predicts better by the normal approximation, and
    ``prob_bootstrap`` the same by the Bayesian bootstrap; both NaN while a fold is missing.
    """

    diff: float
    se: float
    mcse: float
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
    - ``prob_worse``: probability that the best model predicts better than this one, by the normal
      approximation; ``prob_worse_bootstrap``: the same by the Bayesian bootstrap;
    - ``stacking``, ``pseudo_bma``, ``pseudo_bma_plus``: model weights (Yao et al. 2018);
    - ``rank``, ``elpd``, ``p``, ``se``, ``mcse``: as in each model's result.

    For other scores than log scores, ``score`` and ``score_diff`` take the place of ``elpd`` and
    ``elpd_diff``, and there are no weights and no ``p``.

    Everything is over the folds whose score and its error are finite in all models; ``left_out``
    counts the others, and ``missing`` names them. While there are any there is no verdict: a fold
    fails most easily where a model predicts badly, so leaving it out favours the model that
    failed. Ranks, probabilities and weights are then NaN, and the table is in the order given, with
    differences to the first model. ``scheme_folds`` is the number of folds of the whole scheme, of
    which the results may hold a part; ``remarks`` say what is wrong with models' folds and fits.

    ``units`` are the contributions to the totals that differences are paired over, each a
    ``unit``: a fold or a row; folds of ``repeats``-fold repeated cross-validation count as that
    many times fewer. ``ess``, ``rhat_max`` and ``rhat_benchmark`` are over all models.
    With exactly two models ``diff``, ``se``, ``mcse``, ``prob`` and ``prob_bootstrap`` are those
    of the first given minus the second given; ``pair(a, b)`` gives them for any two.
    """

    score: str
    table: pd.DataFrame
    folds: xr.Dataset
    units: Float[np.ndarray, "unit model"]
    repeats: float
    model_mcse: Float[np.ndarray, " model"]
    unit: str
    left_out: int
    scheme_folds: int
    remarks: list[str]
    ess: float
    rhat_max: float
    rhat_benchmark: Float[np.ndarray, " replicate"]

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
        delta = self.units[:, first] - self.units[:, second]
        diff, se = paired_difference(delta, self.repeats)
        prob = prob_bootstrap = np.nan
        if not self.left_out:
            prob = probability(diff, se)
            replicates = bayesian_bootstrap(delta[:, None], self.repeats)[:, 0]
            prob_bootstrap = _share_positive(replicates)
        mcse = float(np.hypot(self.model_mcse[first], self.model_mcse[second]))
        return Pair(diff, se, mcse, prob, prob_bootstrap)

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
        """Epistemic standard error of ``diff``."""
        return self._of_pair("se")

    @property
    def mcse(self) -> float:
        """Monte Carlo standard error of ``diff``."""
        return self._of_pair("mcse")

    @property
    def prob(self) -> float:
        """Probability that the first model predicts better, by the normal approximation."""
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


def compare(
    results: dict[str, CVResult] | list[CVResult] | tuple[CVResult, ...],
    score: str | None = None,
) -> Comparison:
    """Differences between models' cross-validation scores, paired over folds or rows.

    delta_k = score of unit k under one model minus under the other; their sum is the difference,
    positive when the first predicts better, and sqrt(K) sd(delta) its standard error. Monte Carlo
    errors of two models are independent, so their squares add.

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
    named = _named(results)
    score = _common_score(named, score)
    _check_comparable(named)
    _warn_of_seeds(named)
    chosen = {name: result.score(score) for name, result in named.items()}
    used = _finite_in_all(chosen)
    contributions, mcse, repeats = paired_units(score, chosen, used)
    return Comparison(
        score=score,
        table=_table(score, chosen, contributions, repeats, mcse, used),
        folds=_by_fold(score, chosen),
        units=contributions,
        repeats=repeats,
        model_mcse=mcse,
        unit="row" if _by_row(chosen) else "fold",
        left_out=int((~used).sum()),
        scheme_folds=max(folds_of_scheme(r.info, len(used)) for r in named.values()),
        remarks=_remarks(named, chosen),
        ess=_ess(named, score, used),
        rhat_max=_rhat_max(named),
        rhat_benchmark=_benchmark(named),
    )


def paired_units(
    score: str, chosen: dict[str, Score], used: Bool[np.ndarray, " fold"]
) -> tuple[Float[np.ndarray, "unit model"], Float[np.ndarray, " model"], float]:
    """What each unit of the ``used`` folds contributes to the models' totals, higher being better.

    With the Monte Carlo errors of those totals, and how often the units test each row.
    """
    by_row = _by_row(chosen)
    parts, slopes = zip(
        *(total_units(score, s.folds, s.rows if by_row else None, used) for s in chosen.values()),
        strict=True,
    )
    contributions = find_rule(score).sign * np.column_stack(parts)
    mcse = np.array([_mcse(s, used, b) for s, b in zip(chosen.values(), slopes, strict=True)])
    first = next(iter(chosen.values()))
    return contributions, mcse, unit_repeats(first.folds, first.rows if by_row else None, used)


def _by_row(chosen: dict[str, Score]) -> bool:
    return all(score.rows is not None for score in chosen.values())


# ---------------------------------------------------------------- what can be compared


def _named(results: Any) -> dict[str, CVResult]:
    """The results by name, after checking that there are two or more and nothing else."""
    if isinstance(results, dict):
        names, values = [str(name) for name in results], list(results.values())
    elif isinstance(results, (list, tuple)):
        names, values = [], list(results)
    else:
        raise TypeError(
            "results must be a dict of names to CVResult, or a list of CVResult, got "
            f'{type(results).__name__}; use compare({{"A": result_a, "B": result_b}})'
        )
    for value in values:
        if not isinstance(value, CVResult):
            raise TypeError(
                f"every result must be a CVResult, got {type(value).__name__}; pass what "
                "cross_validate returned"
            )
    if len(values) < 2:
        raise ValueError(f"a comparison needs at least two results, got {len(values)}; add another")
    names = names or _model_names(values)
    if len(set(names)) < len(names):
        raise ValueError(f"names must be distinct, got {', '.join(names)}; rename one of them")
    return dict(zip(names, values, strict=True))


def _model_names(results: list[CVResult]) -> list[str]:
    """Names of the models; a letter by position for those that are empty or not distinct."""
    letters = [chr(65 + i) if i < 26 else f"model {i + 1}" for i in range(len(results))]
    names = [str(result.info.get("model") or "") for result in results]
    count = Counter(names)
    named = [
        name if name and count[name] == 1 else letter
        for name, letter in zip(names, letters, strict=True)
    ]
    return named if len(set(named)) == len(named) else letters


def _common_score(named: dict[str, CVResult], score: str | None) -> str:
    """The score to compare by, after checking that every result has it."""
    if score is None:
        score = next(iter(next(iter(named.values())).scores))
    for name, result in named.items():
        if score not in result.scores:
            shared = set.intersection(*(set(other.scores) for other in named.values()))
            hint = f"; all have {', '.join(sorted(shared))}" if shared else ""
            raise ValueError(
                f"every result must have the score {score!r}, but {name} has "
                f"{', '.join(result.scores)}{hint}; choose score= among those that all have, or "
                f'run cross_validate(..., scores=("{score}",))'
            )
    return score


def _check_comparable(named: dict[str, CVResult]) -> None:
    """Raise unless all results test the same rows of the same data in the same folds."""
    (first_name, first), *others = named.items()
    for name, other in others:
        _check_same_size(first_name, first, name, other)
        _check_same_part(first_name, first, name, other)
        _check_same_count(first_name, first, name, other)
        _check_same_test_rows(first_name, first, name, other)
        _check_same_labels(first_name, first, name, other)
        _check_same_y(first_name, first.test.get("y"), name, other.test.get("y"))


def _check_same_size(first_name: str, first: CVResult, name: str, other: CVResult) -> None:
    n, m = first.info.get("n_obs"), other.info.get("n_obs")
    if n is not None and m is not None and n != m:
        raise ValueError(
            f"compared models must have the same rows of data, but {first_name} has n_obs={n} and "
            f"{name} has n_obs={m}; fit both to the same data"
        )


def _check_same_part(first_name: str, first: CVResult, name: str, other: CVResult) -> None:
    """Of one scheme, the same folds."""
    one, two = first.test["index"], other.test["index"]
    if not same_scheme(first.info, other.info) or set(one) == set(two):
        return
    lacks = [
        f"{each_name} lacks {_few(fold[~np.isin(index, others)])}"
        for each_name, index, others, fold in (
            (name, one, two, first.folds["fold"].values),
            (first_name, two, one, other.folds["fold"].values),
        )
        if not np.isin(index, others).all()
    ]
    raise ValueError(
        f"compared results must have the same folds of their scheme, but {' and '.join(lacks)}; "
        "cross-validate these folds too and merge the parts"
    )


def _check_same_count(first_name: str, first: CVResult, name: str, other: CVResult) -> None:
    k, j = len(first.test["start"]) - 1, len(other.test["start"]) - 1
    if k != j:
        raise ValueError(
            f"compared results must have the same folds, but {first_name} has {k} and {name} has "
            f"{j}; cross-validate both with the same Folds"
        )


def _check_same_test_rows(first_name: str, first: CVResult, name: str, other: CVResult) -> None:
    one, two = _test_rows(first), _test_rows(other)
    for fold, (rows, others) in enumerate(zip(one, two, strict=True)):
        if not np.array_equal(rows, others):
            raise ValueError(
                f"compared results must test the same rows in the same folds, but fold number "
                f"{fold} tests rows {_few(rows)} in {first_name} and {_few(others)} in {name}; "
                "cross-validate both with the same Folds"
            )
    if not np.array_equal(first.test["index"], other.test["index"]):
        fold = int(np.flatnonzero(first.test["index"] != other.test["index"])[0])
        raise ValueError(
            f"compared results must hold the same folds of their scheme, but fold number {fold} is "
            f"its fold {first.test['index'][fold]} in {first_name} and {other.test['index'][fold]} "
            f"in {name}; cross-validate both with the same Folds"
        )


def _test_rows(result: CVResult) -> list[np.ndarray]:
    return np.split(result.test["rows"], result.test["start"][1:-1])


def _few(values: np.ndarray) -> str:
    """The first values of an array, for a message."""
    shown = ", ".join(str(value) for value in values[:5])
    return f"[{shown}, ...]" if len(values) > 5 else f"[{shown}]"


def _check_same_labels(first_name: str, first: CVResult, name: str, other: CVResult) -> None:
    """Names and weights of the folds."""
    one, two = ([str(f) for f in r.folds["fold"].values] for r in (first, other))
    if one != two:
        fold = next(k for k, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
        raise ValueError(
            f"compared results must name their folds alike, but fold number {fold} is "
            f"{one[fold]!r} in {first_name} and {two[fold]!r} in {name}; cross-validate both with "
            "the same Folds"
        )
    weight, others = first.folds["weight"].values, other.folds["weight"].values
    if not np.allclose(weight, others):
        fold = int(np.flatnonzero(~np.isclose(weight, others))[0])
        raise ValueError(
            f"compared results must weigh their folds alike, but fold {one[fold]} weighs "
            f"{weight[fold]:g} in {first_name} and {others[fold]:g} in {name}; cross-validate both "
            "with the same Folds"
        )


def _check_same_y(first_name: str, y: Any, name: str, other: Any) -> None:
    if y is None or other is None:
        return
    y, other = np.asarray(y), np.asarray(other)
    if y.shape != other.shape:
        raise ValueError(
            f"compared models must have the same observations, but y has shape {y.shape} in "
            f"{first_name} and {other.shape} in {name}; fit both to the same data"
        )
    if y.dtype.kind == other.dtype.kind == "f":  # one of them may be rounded to float32
        coarse = min(y.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        y, other = y.astype(coarse), other.astype(coarse)
    same = (y == other) | ((y != y) & (other != other))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise ValueError(
            f"compared models must have the same observations, but row {at[0]} of y is {y[at]} in "
            f"{first_name} and {other[at]} in {name}; densities of transformed or rescaled data "
            "cannot be compared, so model the same y (with a Jacobian where it is transformed)"
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


def _known(score: Score) -> Bool[np.ndarray, " fold"]:
    """Which folds have a finite score whose Monte Carlo error is not infinite."""
    table = score.folds
    return np.isfinite(table[column(score.name)].values) & ~np.isinf(table["mcse"].values)


def _finite_in_all(chosen: dict[str, Score]) -> Bool[np.ndarray, " fold"]:
    """Which folds have a known score in every model; the others are left out, with a warning."""
    finite = {name: _known(score) for name, score in chosen.items()}
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
        f"{_few(table['fold'].values[~used])}, because a score or its error is not finite there "
        f"({missing}); there is no verdict while they are missing",
        FoldWarning,
        stacklevel=3,
    )
    return used


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
        return float(normal_cdf(np.divide(diff, se)))


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


def _share_positive(values: Float[np.ndarray, " replicate"]) -> float:
    """Share of values above zero; those equal to zero count half, so that shares add to one."""
    return float(np.mean(values > 0) + 0.5 * np.mean(values == 0))


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


def _table(
    score: str,
    chosen: dict[str, Score],
    contributions: Float[np.ndarray, "unit model"],
    repeats: float,
    mcse: Float[np.ndarray, " model"],
    used: Bool[np.ndarray, " fold"],
) -> pd.DataFrame:
    """One line per model, best first; while a fold is missing, in the order given."""
    import pandas as pd

    total = contributions.sum(axis=0)
    verdict = bool(used.all())
    order = np.argsort(-total, kind="stable") if verdict else np.arange(len(total))
    best = order[0]
    delta = contributions - contributions[:, [best]]
    replicates = bayesian_bootstrap(delta, repeats)
    differences = [paired_difference(column, repeats) for column in delta.T]
    name = column(score)
    columns = {
        name: find_rule(score).sign * total,
        f"{name}_diff": [diff for diff, _ in differences],
        "se_diff": [se for _, se in differences],
        "mcse_diff": np.hypot(mcse, mcse[best]),
        "prob_worse": [probability(-diff, se) for diff, se in differences],
        "prob_worse_bootstrap": [_share_positive(-column) for column in replicates.T],
    }
    if score in LOG_SCORES:
        tables = [s.folds.isel(fold=used) for s in chosen.values()]
        columns |= {
            "stacking": stacking_weights(contributions),
            "pseudo_bma": softmax(total),
            "pseudo_bma_plus": softmax(len(delta) * replicates, axis=1).mean(axis=0),
            "p": [float((t["weight"] * t["p"]).sum(skipna=False)) for t in tables],
        }
    columns |= {"se": [standard_error(part, repeats) for part in contributions.T], "mcse": mcse}
    table = pd.DataFrame(columns, index=pd.Index(list(chosen), name="model"))
    winner = table.index[best]
    table.loc[winner, [f"{name}_diff", "se_diff", "mcse_diff"]] = 0.0
    table.loc[winner, ["prob_worse", "prob_worse_bootstrap"]] = np.nan
    table = table.iloc[order]
    table.insert(0, "rank", np.arange(1, len(table) + 1))
    if not verdict:
        table[[name for name in _VERDICT if name in table]] = np.nan
    return table


def _by_fold(score: str, chosen: dict[str, Score]) -> xr.Dataset:
    """Scores by model and fold; for a pair also the difference, first minus second, by fold.

    Errors are negated in the difference, so that it favours the first model where positive.
    """
    import xarray as xr

    tables, name = [s.folds for s in chosen.values()], column(score)
    values = np.stack([np.where(_known(s), s.folds[name].values, np.nan) for s in chosen.values()])
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


# ---------------------------------------------------------------- weights


def stacking_weights(log_density: Float[np.ndarray, "unit model"]) -> Float[np.ndarray, " model"]:
    """Weights w of the mixture of models that predicts best (stacking, Yao et al. 2018).

    Maximises mean_i log sum_m w_m exp(log_density_im) over the simplex, by EM:
    w_m <- w_m g_m with g_m = mean_i exp(log_density_im) / mixture_i. Each unit's largest log
    density is subtracted first, which changes nothing and keeps all from underflowing. Steps are
    lengthened, w_m g_m^step, for as long as the objective rises. At the end max_m g_m - 1, a bound
    on how far the objective is from its maximum, is at most 1e-6.
    """
    density = np.exp(log_density - log_density.max(axis=1, keepdims=True))
    count, models = density.shape
    weight, step = np.full(models, 1.0 / models), 1.0
    mixture = density @ weight
    for _ in range(_STACKING_STEPS):
        gain = (1.0 / mixture) @ density / count
        if gain.max() - 1.0 <= STACKING_GAP:
            break
        # in logs, as long steps overflow; and no weight becomes zero, which it could not leave
        exponent = np.log(weight) + step * np.log(np.maximum(gain, 1e-300))
        trial = np.maximum(np.exp(exponent - exponent.max()), 1e-15)
        trial /= trial.sum()
        trial_mixture = density @ trial
        if step > 1.0 and np.log(trial_mixture / mixture).sum() < 0.0:
            step = 1.0  # the plain EM step never falls
            continue
        weight, mixture, step = trial, trial_mixture, 1.5 * step
    return weight


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
    maximum over all.
    """
    arrays = [np.asarray(result.rhat_benchmark) for result in named.values()]
    length = min(len(array) for array in arrays)
    return np.fmax.reduce([array[:length] for array in arrays])
