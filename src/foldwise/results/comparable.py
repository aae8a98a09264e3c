"""Which results can be compared: the same folds of the same data, and a score that all have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from foldwise.results.identity import same_scheme
from foldwise.results.result import CVResult


def by_name(results: Any) -> dict[str, CVResult]:
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


def common_score(named: dict[str, CVResult], score: str | None) -> str:
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


def check_comparable(named: dict[str, CVResult]) -> None:
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
        f"{each_name} lacks {few(fold[~np.isin(index, others)])}"
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
                f"{fold} tests rows {few(rows)} in {first_name} and {few(others)} in {name}; "
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


def few(values: np.ndarray) -> str:
    """The first values of an array, for a message."""
    shown = ", ".join(str(value) for value in values[:5])
    return f"[{shown}, ...]" if len(values) > 5 else f"[{shown}]"
