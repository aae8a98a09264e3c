"""Schemes over rows in time or space, which drop rows near those that are tested."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from foldwise.folds.folds import Folds, make_folds, named_by, partition
from foldwise.folds.inputs import distance, fold_count, generator, points_of, rows_of
from foldwise.folds.ragged import end_to_end, lists_by_code, ranges
from foldwise.support.checks import check_count


def leave_future_out(
    n: int | ArrayLike,
    start: int,
    horizon: int = 1,
    step: int = 1,
    window: int | None = None,
    gap: int = 0,
) -> Folds:
    """Leave-future-out: train on the rows before an origin, test the rows that follow it.

    Origins are t = start, start + step, ...; the fold of origin t, named t, trains on rows
    [max(0, t - window), t) (from row 0 if window is None) and tests rows
    [t + gap, t + gap + horizon). Only complete folds are made: t + gap + horizon <= n. For
    forecasts of a time series whose rows are in time order. With the rows' times instead of their
    number, a fold is named by the time of its origin.

    References: Buerkner, Gabry and Vehtari (2020), Approximate leave-future-out cross-validation
    for Bayesian time series models.

    Examples
    --------
    >>> for train, test in leave_future_out(6, start=2, horizon=2):
    ...     print(train, test)
    [0 1] [2 3]
    [0 1 2] [3 4]
    [0 1 2 3] [4 5]
    """
    n, times = rows_of(n, "n", in_order=True)
    start, horizon = check_count("start", start, 1), check_count("horizon", horizon, 1)
    step, gap = check_count("step", step, 1), check_count("gap", gap, 0)
    if start + gap + horizon > n:
        raise ValueError(
            f"the first fold needs start + gap + horizon <= n, but start={start}, gap={gap} and "
            f"horizon={horizon} add up to {start + gap + horizon} and n={n}; reduce one of them"
        )
    origins = np.arange(start, n - gap - horizon + 1, step)
    earliest = np.zeros_like(origins)
    if window is not None:
        earliest = np.maximum(origins - check_count("window", window, 1), 0)
    scheme = f"leave_future_out, n={n}, start={start}, horizon={horizon}, step={step}"
    scheme += f", window={window}, gap={gap}"
    nothing = np.zeros(len(origins) + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    test = ranges(origins + gap, origins + gap + horizon)
    return named_by(make_folds(n, origins, test, (earliest, origins), nothing, scheme), times)


def h_block(n: int | ArrayLike, h: int) -> Folds:
    """h-block: fold i tests row i and drops the h rows on either side of it.

    Folds are named by the row, or by its time if the rows' times are given instead of their number.

    The buffer is clipped at the ends of the data. For a stationary time series with short
    memory. Masking a row does not remove it from the lags of later rows: if the model conditions
    on earlier rows, a training row up to its longest lag after the test row still sees the test
    value, so h must be at least as long as the longest lag. Memory is O(n h).

    References: Burman, Chow and Nolan (1994), A cross-validatory method for dependent data.

    Examples
    --------
    >>> for train, test in h_block(5, 1):
    ...     print(train, test)
    [2 3 4] [0]
    [3 4] [1]
    [0 4] [2]
    [0 1] [3]
    [0 1 2] [4]
    """
    (n, times), h = rows_of(n, "n", in_order=True), check_count("h", h, 0)
    return named_by(_blocks(n, h, 0, f"h_block, n={n}, h={h}"), times)


def hv_block(n: int | ArrayLike, h: int, v: int) -> Folds:
    """hv-block: test the rows i-v to i+v around each centre i, drop h more rows on either side.

    The centres are i = v, ..., n - v - 1, so there are n - 2v folds, named by the centre (or by its
    time, if the rows' times are given instead of their number); the
    buffer is clipped at the ends of the data. A row is tested in up to 2v + 1 folds, each with
    weight 1. For a stationary time series when models are compared (v > 0 makes the choice
    consistent). Masking a row does not remove it from the lags of later rows: if the model
    conditions on earlier rows, a training row up to its longest lag after the block still sees
    test values, so h must be at least as long as the longest lag. Memory is O(n (h + v)).

    References: Racine (2000), Consistent cross-validatory model-selection for dependent data:
    hv-block cross-validation.

    Examples
    --------
    >>> for train, test in hv_block(7, h=1, v=1):
    ...     print(train, test)
    [4 5 6] [0 1 2]
    [5 6] [1 2 3]
    [0 6] [2 3 4]
    [0 1] [3 4 5]
    [0 1 2] [4 5 6]
    """
    n, times = rows_of(n, "n", in_order=True)
    h, v = check_count("h", h, 0), check_count("v", v, 0)
    return named_by(_blocks(n, h, v, f"hv_block, n={n}, h={h}, v={v}"), times)


def _blocks(n: int, h: int, v: int, scheme: str) -> Folds:
    """Folds that test the rows within v of each centre and drop those within h + v."""
    reach = h + v
    if n < 2 * reach + 2:
        raise ValueError(
            f"{scheme}: a fold tests and drops up to {2 * reach + 1} rows, so at least "
            f"{2 * reach + 2} are needed to leave one to train on, but n={n}; "
            f"choose h + v <= {(n - 2) // 2}"
        )
    centres = np.arange(v, n - v)
    test = ranges(centres - v, centres + v + 1)
    dropped = ranges(np.maximum(centres - reach, 0), np.minimum(centres + reach + 1, n))
    return make_folds(
        n, centres, test, (np.zeros_like(centres), np.full_like(centres, n)), dropped, scheme
    )


def spatial_block(coordinates: ArrayLike, k: int, buffer: float = 0.0, seed: int = 0) -> Folds:
    """Spatial blocks: k-means clusters of the coordinates are the test sets.

    Training rows closer than buffer (Euclidean distance, strictly less) to any test row are
    dropped. For predicting places away from the data, when nearby rows are alike. coordinates is
    (n, p), in units where the Euclidean distance makes sense: project longitude and latitude
    first. Folds are named 0 to k - 1; their sizes may differ.

    References: Roberts et al. (2017), Cross-validation strategies for data with temporal,
    spatial, hierarchical, or phylogenetic structure.

    Examples
    --------
    >>> print(spatial_block([[0.0], [1.0], [2.0], [7.0], [8.0], [9.0]], 2, buffer=6.0))
    Folds(spatial_block, n=6, k=2, buffer=6.0, seed=0)
      2 folds of 6 rows: train 2, test 3
    """
    points = points_of(coordinates)
    k = fold_count(k, len(points), "rows", f"n={len(points)}")
    buffer = distance(buffer, "buffer")
    codes = _cluster(points, k, seed)
    scheme = f"spatial_block, n={len(points)}, k={k}, buffer={buffer}, seed={seed}"
    if buffer == 0:
        return partition(codes, np.arange(k), scheme)
    dropped = [_near(points, codes == block, buffer) for block in range(k)]
    interval = np.zeros(k, dtype=np.int64), np.full(k, len(points))
    return make_folds(
        len(points), np.arange(k), lists_by_code(codes, k), interval, end_to_end(dropped), scheme
    )


def _cluster(points: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Block of each point by k-means, no block empty."""
    from scipy.cluster.vq import ClusterError, kmeans2

    distinct = len(np.unique(points, axis=0))
    if k > distinct:
        raise ValueError(
            f"k={k} blocks need at least {k} distinct places, but coordinates has {distinct}; "
            f"choose k <= {distinct}"
        )
    rng = generator(seed)
    for _ in range(20):
        try:
            # kmeans2 has no stopping rule; 50 steps are far past its usual convergence.
            return kmeans2(points, k, iter=50, minit="++", missing="raise", rng=rng)[1]
        except ClusterError:
            continue
    raise ValueError(
        f"k-means left one of k={k} blocks empty in 20 attempts over {distinct} distinct places; "
        "choose a smaller k"
    )


def _near(points: np.ndarray, tested: np.ndarray, buffer: float) -> np.ndarray:
    """Rows that are tested, or closer than buffer to a tested row."""
    from scipy.spatial import cKDTree

    distance, _ = cKDTree(points[tested]).query(points)
    return np.flatnonzero(tested | (distance < buffer))
