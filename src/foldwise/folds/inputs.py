"""What schemes are given: counts, labels, groups, coordinates and rows, checked."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from foldwise.support.checks import check_count


def generator(seed: Any) -> np.random.Generator:
    """Random generator of an integer seed, so that the description of a scheme repeats it."""
    return np.random.default_rng(check_count("seed", seed, 0))


def distance(value: Any, name: str) -> float:
    """A distance, finite and not negative."""
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < np.inf:
        raise ValueError(f"{name} must be a finite distance >= 0, got {value}")
    return float(value)


def fold_count(k: Any, available: int, unit: str, found: str) -> int:
    """Number of folds: at least two, and no more than there are units to deal out."""
    k = check_count("k", k, 2)
    if k > available:
        raise ValueError(
            f"k={k} folds need at least {k} {unit}, but {found}; choose k <= {available}"
        )
    return k


def codes_of(values: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Distinct labels in sorted order, and the number of each row's label among them."""
    labels = _labels(values, what)
    if len(labels) < 2:
        raise ValueError(f"{what} must cover at least 2 rows, got {len(labels)}")
    try:
        return np.unique(labels, return_inverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
        raise TypeError(
            f"{what} must be of one kind that can be sorted, got {kinds}; convert them first, "
            "for instance to strings"
        ) from None


def groups_of(values: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray]:
    """As ``codes_of``, with at least two distinct labels."""
    names, codes = codes_of(values, what)
    if len(names) < 2:
        raise ValueError(
            f"{what} must have at least 2 distinct values, so that every fold has rows to train "
            f"on, but all {len(codes)} rows have {names[0]}"
        )
    return names, codes


def rows_of(n: Any, what: str, in_order: bool = False) -> tuple[int, np.ndarray | None]:
    """Number of rows, and their labels if these are given instead."""
    if np.ndim(n) == 0:
        return check_count(what, n, 2), None
    labels = _labels(n, what)
    if len(labels) < 2:
        raise ValueError(f"there must be at least 2 rows, but {len(labels)} labels were given")
    if in_order and not (labels[:-1] <= labels[1:]).all():
        row = int(np.flatnonzero(~(labels[:-1] <= labels[1:]))[0])
        raise ValueError(
            f"rows must be in the order of time, but row {row} has {labels[row]} and row {row + 1} "
            f"{labels[row + 1]}; sort the data by time first"
        )
    return len(labels), labels


def _labels(values: ArrayLike, what: str) -> np.ndarray:
    """One-dimensional labels with none missing, in a plain NumPy type where there is one."""
    # A list goes through objects: np.asarray(["a", nan]) would turn the gap into the text "nan".
    labels = np.asarray(values, dtype=object if isinstance(values, list | tuple) else None)
    if labels.ndim != 1:
        raise ValueError(f"{what} must be 1-D, one label per row, got shape {labels.shape}")
    if labels.dtype.kind == "T":
        labels = labels.astype(object)
    missing = _missing(labels)
    if isinstance(values, np.ma.MaskedArray):
        missing |= np.ma.getmaskarray(values)
    if missing.any():
        raise ValueError(
            f"{what} must have no missing values, but row {np.flatnonzero(missing)[0]} has one "
            f"({missing.sum()} in total); label or remove these rows"
        )
    # Not for a mixture of text and numbers, in which NumPy would turn 1 into "1".
    for plain in (str, int | float | np.number | np.bool_ | np.datetime64):
        if labels.dtype == object and all(isinstance(label, plain) for label in labels):
            return np.asarray(labels.tolist())
    return labels


def _missing(labels: np.ndarray) -> np.ndarray:
    if labels.dtype.kind in "fc":
        return np.isnan(labels)
    if labels.dtype.kind in "mM":
        return np.isnat(labels)
    if labels.dtype.kind == "O":
        return np.fromiter((_is_missing(label) for label in labels), dtype=bool, count=len(labels))
    return np.zeros(len(labels), dtype=bool)


def _is_missing(label: Any) -> bool:
    """Whether a label is None, NaN, NaT or pandas.NA."""
    if label is None:
        return True
    try:
        return bool(operator.ne(label, label))
    except TypeError:  # pandas.NA != pandas.NA is pandas.NA, which has no truth value
        return True


def points_of(coordinates: ArrayLike) -> np.ndarray:
    """Coordinates of each row, finite, (n, p)."""
    points = np.asarray(coordinates, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] == 0:
        raise ValueError(
            f"coordinates must be (n, p), one row of p coordinates per row of the data, got "
            f"shape {points.shape}; for one coordinate, use coordinates[:, None]"
        )
    if len(points) < 2:
        raise ValueError(f"coordinates must cover at least 2 rows, got {len(points)}")
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(bad):
        raise ValueError(
            f"coordinates must be finite, but row {bad[0]} is {points[bad[0]]} ({len(bad)} such "
            "rows); fill in or remove these rows"
        )
    return points


def as_rows(rows: ArrayLike, n: int, what: str) -> np.ndarray:
    """Ascending row indices, from indices in any order or a boolean mask of length n."""
    given = np.asarray(rows)
    if given.ndim != 1:
        raise ValueError(f"{what} must be 1-D, got shape {given.shape}")
    if given.dtype == bool:
        if len(given) != n:
            raise ValueError(f"{what}: a boolean mask must have length n={n}, got {len(given)}")
        return np.flatnonzero(given)
    if len(given) == 0:
        return np.zeros(0, dtype=np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers or a boolean mask, got {given.dtype}")
    if given.min() < 0 or given.max() >= n:
        bad = given.min() if given.min() < 0 else given.max()
        raise ValueError(f"{what} must lie in 0 to n - 1 = {n - 1}, but row {bad} does not")
    times = np.bincount(given.astype(np.int64), minlength=n)
    if times.max() > 1:
        raise ValueError(
            f"{what} must be unique, but row {times.argmax()} occurs {times.max()} times; "
            "remove the repeats"
        )
    return np.flatnonzero(times)
