"""Observed values of a model: checked, and copied so that nobody else can change them."""

from __future__ import annotations

from typing import Any

import numpy as np


def observed(y: Any, n_obs: int) -> np.ndarray:
    """Observed values as an array, which shares the caller's memory where it can."""
    if np.ma.is_masked(y):
        first = int(np.argwhere(np.ma.getmaskarray(y))[0][0])
        raise ValueError(f"y must not be masked, but row {first} is; drop or impute such rows")
    values = np.asarray(y)
    if values.shape[:1] != (n_obs,):
        raise ValueError(
            f"the first axis of y must have length n_obs={n_obs}, but y has shape {values.shape}"
        )
    missing = _missing(values)
    if missing.any():
        first = int(np.argwhere(missing)[0][0])
        raise ValueError(f"y must not hold NaN, but row {first} does; drop or impute such rows")
    return values


def _missing(values: np.ndarray) -> np.ndarray:
    """Where values are NaN or, among objects, None."""
    if values.dtype.kind == "O":
        return np.array([v is None or v != v for v in values.ravel()]).reshape(values.shape)
    return np.isnan(values) if values.dtype.kind in "fc" else np.zeros(values.shape, bool)


def own_copy(y: np.ndarray) -> np.ndarray:
    """Values that nobody else can change; whole numbers wide, so that y + 1 does not overflow."""
    narrow = y.dtype.kind in "iu" and y.dtype.itemsize < 8
    if not narrow and y.flags.owndata and not y.flags.writeable:
        return y
    own = np.array(y, np.int64 if narrow else y.dtype)
    own.setflags(write=False)
    return own


def same(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether values are what they were."""
    return one is two or np.array_equal(one, two)
