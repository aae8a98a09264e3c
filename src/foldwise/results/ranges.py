"""What a result that was read must be: shapes that fit each other, and values in their range.

A checksum says that a file is as it was written, not who wrote it. Numbers that no run can give are
refused here, before anything is printed, compared or extended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from foldwise.results.result import CVResult, Score
from foldwise.scores.diagnostics import ADVICE
from foldwise.scores.logscore import ESTIMATORS
from foldwise.scores.needs import rules_of

if TYPE_CHECKING:
    import xarray as xr

# Least and largest value of columns by fold or by row; what is not a number is in every range.
# Shares are means over draws, with their rounding.
_SHARE = (0.0, 1.0 + 1e-6)
_ANY = (0.0, np.inf)
_COLUMNS = {
    "mcse": _ANY,
    "ess": _ANY,
    "rhat": _ANY,
    "slowest_ess": _ANY,
    "acceptance": _SHARE,
    "divergences": _ANY,
    "n_train": _ANY,
    "n_test": (1, np.inf),
    "weight": _ANY,
    "below": _SHARE,
    "equal": _SHARE,
}
_TEXTS = {
    "status": {"fine", *ADVICE},
    "method": {"mcmc", "importance", "refit"},
    "estimator": {"mean", "bridge", "weights"},
}
# Least values of whole numbers that describe a run.
_COUNTS = {
    "n_obs": 1,
    "parameters": 0,
    "chains": 1,
    "draws": 0,
    "warmup": 0,
    "fit_draws": 0,
    "fit_chains": 0,
    "gradients": 0,
    "fit_gradients": 0,
}
_SETTINGS = {
    "estimator": set(ESTIMATORS),
    "memory": {"draws", "online"},
    "precision": {"float64", "float32"},
}


class OutOfRange(ValueError):
    """A file holds what no result has."""


def check_ranges(result: CVResult) -> None:
    """Raise ``OutOfRange`` unless the result can be one."""
    if not result.scores:
        raise OutOfRange("it has no scores")
    folds = len(next(iter(result.scores.values())).folds["fold"])
    _check_info(result.info)
    rows = _check_test(result.test, folds, result.info.get("n_obs"))
    for name, score in result.scores.items():
        _check_score(name, score, folds, rows, result)
    _check_shape("R-hat", result.mixing.rhat, (folds,))
    _check_range("R-hat", result.mixing.rhat, _ANY)
    _check_range("R-hat of the benchmark", result.mixing.benchmark, _ANY)
    if result.draws is not None:
        known = result.draws.dims == ("fold", "chain", "draw")
        if not known or len(result.draws) > folds or result.draws.dtype.kind != "f":
            raise OutOfRange(f"draws are {result.draws.dims} of shape {result.draws.shape}")
    if result.calibration is not None:
        _check_table("calibration", result.calibration, "test_row", len(rows))
        _check_rows("calibration", result.calibration["row"].values, rows)
    if result.weighted is not None:
        check_ranges(result.weighted)


def _check_info(info: dict[str, Any]) -> None:
    for name, least in _COUNTS.items():
        value = info.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OutOfRange(f"{name} is {value!r}, not a whole number of at least {least}")
    for name, known in _SETTINGS.items():
        if name in info and info[name] not in known:
            raise OutOfRange(f"{name} is {info[name]!r}, not one of {', '.join(sorted(known))}")


def _check_test(test: dict[str, np.ndarray], folds: int, n: int | None) -> np.ndarray:
    """Rows that the folds test, of ``n``."""
    start, rows, index = (np.asarray(test[name]) for name in ("start", "rows", "index"))
    for name, values in (("start", start), ("rows", rows), ("index", index)):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise OutOfRange(f"{name} of the test rows is {values.dtype} of shape {values.shape}")
    _check_shape("start of the test rows", start, (folds + 1,))
    _check_shape("numbers of the folds", index, (folds,))
    if start[0] != 0 or start[-1] != len(rows) or (np.diff(start) < 1).any():
        raise OutOfRange("the test rows do not belong to folds, each of which has some")
    if (index < 0).any() or len(np.unique(index)) < folds:
        raise OutOfRange("the numbers of the folds are negative, or some are the same")
    most = np.inf if n is None else n - 1
    _check_range("test rows", rows, (0, most))
    if n is not None and "y" in test:
        _check_shape("observed values", test["y"], (n, *np.shape(test["y"])[1:]))
    return rows


def _check_score(name: str, score: Score, folds: int, rows: np.ndarray, result: CVResult) -> None:
    try:
        rules_of((name,))
    except ValueError as error:
        raise OutOfRange(f"{name} is the name of no score") from error
    if score.name != name:
        raise OutOfRange(f"the score {name} is called {score.name}")
    for part in ("se", "mcse", "ess", "own_variance", "full_variance"):
        _check_range(f"{part} of {name}", getattr(score, part), _ANY)
    _check_range(f"folds left out of {name}", score.left_out, (0, folds))
    for part in ("total", "optimism"):
        _check_range(f"{part} of {name}", getattr(score, part), (-np.inf, np.inf))
    _check_table(f"{name} by fold", score.folds, "fold", folds)
    if score.rows is not None:
        _check_table(f"{name} by row", score.rows, "test_row", len(rows))
        _check_rows(f"{name} by row", score.rows["row"].values, rows)
    draws = result.info.get("fit_draws")
    if score.full_influence.size and draws is not None:
        _check_shape(f"influences of {name}", score.full_influence, (draws,))


def _check_table(what: str, table: xr.Dataset, dimension: str, length: int) -> None:
    """Columns of a table: as many values as there are folds or rows, in their ranges."""
    for name, column in table.data_vars.items():
        where = f"{name} of {what}"
        _check_shape(where, column, (length,))
        if name in _COLUMNS:
            _check_range(where, column.values, _COLUMNS[str(name)])
        elif name in _TEXTS:
            unknown = set(map(str, column.values.tolist())) - _TEXTS[str(name)]
            if unknown:
                raise OutOfRange(f"{where} is {sorted(unknown)[0]!r}, which is none there is")
        elif name in ("elpd", "score", "optimism", "pareto_k", "overlap", "spread", "noise"):
            _check_range(where, column.values, (-np.inf, np.inf))


def _check_rows(what: str, own: np.ndarray, rows: np.ndarray) -> None:
    if not np.array_equal(own, rows):
        raise OutOfRange(f"the rows of {what} are not the test rows of the folds")


def _check_shape(what: str, values: Any, shape: tuple[int, ...]) -> None:
    if np.shape(values) != shape:
        raise OutOfRange(f"{what} has the shape {np.shape(values)}, not {shape}")


def _check_range(what: str, values: Any, limits: tuple[float, float]) -> None:
    found = np.asarray(values)
    if found.dtype.kind not in "fiu":
        raise OutOfRange(f"{what} is {found.dtype}, not a number")
    with np.errstate(invalid="ignore"):
        wrong = (found < limits[0]) | (found > limits[1])
    if wrong.any():
        worst = found[wrong].ravel()[0]
        raise OutOfRange(f"{what} is {worst:.6g}, outside {limits[0]:g} to {limits[1]:g}")
