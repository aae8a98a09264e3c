"""Folds: which rows train and which rows test in each fold, and every scheme that makes them.

A fold's training rows are an interval of rows minus a list of dropped rows, and its test rows are
a list. So leave-one-out and leave-future-out over n rows take O(n) memory, and no fold-by-row
array is stored. A row may be in neither set (a buffer), never in both.
"""

from __future__ import annotations

import hashlib
import heapq
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# A list of rows per fold: fold k has rows[start[k]:start[k + 1]].
RowLists = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False, repr=False)
class Folds:
    """Which rows train and which rows test in each of K folds over n rows.

    The scheme functions of this module make it. ``folds[2:5]``, ``folds[[0, 7]]`` and
    ``folds.sample(m, seed)`` are subsets of the folds; looping over it gives (train, test) pairs
    of row indices, as a scikit-learn splitter does. However it is made, all that is said below is
    checked, and its arrays cannot be changed.

    Attributes
    ----------
    n
        Number of rows of the data.
    names
        (K,) name of each fold: the user's labels, or a number.
    index
        (K,) number of each fold in the scheme it came from; subsets keep it.
    test_start
        (K + 1,) where each fold's test rows begin in ``test_rows``.
    test_rows
        Fold k tests ``test_rows[test_start[k]:test_start[k + 1]]``, ascending.
    test_weight
        Weight of each entry of ``test_rows``, positive: 1, or 1/m for a row tested m times in
        ``from_splits`` and ``from_splitter``.
    train_start
        (K,) first row of the interval that fold k trains on, but for its dropped rows.
    train_stop
        (K,) first row after that interval.
    dropped_start
        (K + 1,) where each fold's dropped rows begin in ``dropped_rows``.
    dropped_rows
        Fold k drops ``dropped_rows[dropped_start[k]:dropped_start[k + 1]]``. These lie in its
        interval, ascending, and include the test rows that lie in it.
    scheme
        The scheme and its arguments, for people.
    pointwise
        Whether the default score is by row (random and stratified K-fold) and not by fold.
    largest_test
        Number of test rows of the scheme's largest fold; subsets keep it. 0: of these folds.
    total
        Number of folds of the scheme; subsets keep it. 0 where it is not known.
    digest
        Digest of all rows of all folds of the scheme; subsets keep it. Empty where not known.
    """

    n: int
    names: np.ndarray
    index: np.ndarray
    test_start: np.ndarray
    test_rows: np.ndarray
    test_weight: np.ndarray
    train_start: np.ndarray
    train_stop: np.ndarray
    dropped_start: np.ndarray
    dropped_rows: np.ndarray
    scheme: str
    pointwise: bool = False
    largest_test: int = 0
    total: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in _plain_fields(given).items():
            object.__setattr__(self, name, value)
        _check_folds(self)
        # int32 where rows fit it, now that they are known to
        for name in _ROW_FIELDS:
            object.__setattr__(self, name, _owned(getattr(self, name), _row_type(self.n)))
        for name in (*_COUNT_FIELDS, "names", "test_weight"):
            object.__setattr__(self, name, _owned(getattr(self, name)))
        if self.largest_test == 0:
            object.__setattr__(self, "largest_test", int(self.n_test.max()))
        if self.total and np.array_equal(self.index, np.arange(self.total)):  # the whole scheme
            object.__setattr__(self, "digest", _digest(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # copies and pickles come with arrays that can be written to

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Any) -> Folds:
        """Subset of the folds, by an integer, a slice, a list of positions or a boolean mask."""
        if isinstance(key, slice):
            positions = np.arange(len(self))[key]
        else:
            positions = self._positions([key] if _is_integer(key) else key)
        if len(positions) == 0:
            raise ValueError(
                f"a subset must keep at least one fold, but {key!r} selects none of {len(self)}"
            )
        if len(np.unique(positions)) < len(positions):
            raise ValueError(
                f"a subset must name each fold once, but {len(positions)} positions name only "
                f"{len(np.unique(positions))} distinct folds; remove the repeats"
            )
        return self._subset(positions)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((self.train(k), self.test(k)) for k in range(len(self)))

    def __repr__(self) -> str:
        folds = "1 fold" if len(self) == 1 else f"{len(self)} folds"
        return (
            f"Folds({self.scheme})\n"
            f"  {folds} of {self.n} rows: train {_span(self.n_train)}, test {_span(self.n_test)}"
        )

    def sample(self, m: int, seed: int = 0) -> Folds:
        """Random subset of m distinct folds, in ascending order."""
        m = _integer(m, "m", 1)
        if m > len(self):
            raise ValueError(
                f"m={m} distinct folds cannot be drawn from {len(self)}; choose m <= {len(self)}"
            )
        rng = _generator(seed)
        return self._subset(np.sort(rng.choice(len(self), size=m, replace=False)))

    def test(self, k: int) -> np.ndarray:
        """Test rows of the fold at position k, ascending."""
        (k,) = self._positions([k])
        return self.test_rows[self.test_start[k] : self.test_start[k + 1]]

    def train(self, k: int) -> np.ndarray:
        """Training rows of the fold at position k, ascending."""
        (k,) = self._positions([k])
        start, stop = self.train_start[k], self.train_stop[k]
        keep = np.ones(stop - start, dtype=bool)
        keep[self.dropped_rows[self.dropped_start[k] : self.dropped_start[k + 1]] - start] = False
        return np.arange(start, stop, dtype=self.test_rows.dtype)[keep]

    @property
    def n_test(self) -> np.ndarray:
        """Number of test rows of each fold, (K,)."""
        return np.diff(self.test_start)

    @property
    def n_train(self) -> np.ndarray:
        """Number of training rows of each fold, (K,)."""
        interval = self.train_stop.astype(np.int64) - self.train_start
        return interval - np.diff(self.dropped_start)

    @property
    def fold_weight(self) -> np.ndarray:
        """Mean weight of each fold's test rows, (K,)."""
        return np.add.reduceat(self.test_weight, self.test_start[:-1]) / self.n_test

    @property
    def complete(self) -> bool:
        """Whether every row is tested exactly once."""
        return bool(np.all(np.bincount(self.test_rows, minlength=self.n) == 1))

    @property
    def partner(self) -> np.ndarray:
        """Position of the fold that trains on the training and test rows of each fold, (K,).

        ``len(self)`` stands for the full data (training and test rows together are all n rows),
        -1 for none. Other folds are looked for only where both sets are plain intervals, as in
        leave-future-out. A fold is the partner of one other fold at most: the first.
        """
        partner = np.full(len(self), -1)
        whole = self.n_train + self.n_test == self.n
        partner[whole] = len(self)
        first = self.test_rows[self.test_start[:-1]]
        last = self.test_rows[self.test_start[1:] - 1]
        plain = np.diff(self.dropped_start) == 0
        follows = plain & ~whole & (first == self.train_stop) & (last - first + 1 == self.n_test)
        interval = list(zip(self.train_start.tolist(), self.train_stop.tolist(), strict=True))
        position: dict[tuple[int, int], int] = {}
        for k in np.flatnonzero(plain).tolist():
            position.setdefault(interval[k], k)
        for k in np.flatnonzero(follows).tolist():
            partner[k] = position.pop((interval[k][0], int(last[k]) + 1), -1)
        return partner

    def train_mask(self, positions: ArrayLike) -> np.ndarray:
        """Whether each row trains in the folds at these positions: bool, (len(positions), n)."""
        chosen = self._positions(positions)
        rows = np.arange(self.n, dtype=self.test_rows.dtype)
        mask = rows >= self.train_start[chosen, None]
        mask &= rows < self.train_stop[chosen, None]
        start, entries = _gather(self.dropped_start, chosen)
        mask[_owners(start), self.dropped_rows[entries]] = False
        return mask

    def padded_test(self, positions: ArrayLike, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Test rows of the folds at these positions, padded with row 0 to a common width.

        Returns the rows and whether each entry is a test row, both (len(positions), width).
        """
        chosen = self._positions(positions)
        width = _integer(width, "width", 1)
        start, entries = _gather(self.test_start, chosen)
        counts = np.diff(start)
        if np.any(counts > width):
            raise ValueError(
                f"width={width} must be at least the largest number of test rows, which is "
                f"{counts.max()}; choose width >= {counts.max()}"
            )
        valid = np.arange(width) < counts[:, None]
        rows = np.zeros((len(chosen), width), dtype=self.test_rows.dtype)
        rows[valid] = self.test_rows[entries]
        return rows, valid

    def _positions(self, positions: ArrayLike) -> np.ndarray:
        """Positions of folds as integers in 0..K-1, from integers or a boolean mask."""
        chosen = np.asarray(positions)
        if chosen.ndim != 1:
            raise TypeError(f"fold positions must be a 1-D list, got shape {chosen.shape}")
        if chosen.size == 0:
            return np.zeros(0, dtype=np.int64)
        if chosen.dtype == bool:
            if len(chosen) != len(self):
                raise IndexError(
                    f"a boolean mask over folds must have one entry per fold: "
                    f"got {len(chosen)} entries for {len(self)} folds"
                )
            return np.flatnonzero(chosen)
        if chosen.dtype.kind not in "iu":
            raise TypeError(
                f"fold positions must be integers or booleans, got {chosen.dtype}; "
                "to select by name, use folds[np.isin(folds.names, wanted)]"
            )
        outside = (chosen < -len(self)) | (chosen >= len(self))
        if outside.any():
            raise IndexError(
                f"fold position {chosen[outside][0]} is out of range for {len(self)} folds"
            )
        return np.where(chosen < 0, chosen + len(self), chosen).astype(np.int64)

    def _subset(self, positions: np.ndarray) -> Folds:
        test_start, test_entries = _gather(self.test_start, positions)
        dropped_start, dropped_entries = _gather(self.dropped_start, positions)
        return Folds(
            n=self.n,
            names=self.names[positions],
            index=self.index[positions],
            test_start=test_start,
            test_rows=self.test_rows[test_entries],
            test_weight=self.test_weight[test_entries],
            train_start=self.train_start[positions],
            train_stop=self.train_stop[positions],
            dropped_start=dropped_start,
            dropped_rows=self.dropped_rows[dropped_entries],
            scheme=self.scheme,
            pointwise=self.pointwise,
            largest_test=self.largest_test,
            total=self.total,
            digest=self.digest,
        )


# Schemes over exchangeable rows


def leave_one_out(n: int | ArrayLike) -> Folds:
    """Leave-one-out: fold i tests row i and trains on all other rows.

    For rows that are exchangeable given the model, when a new row of the same kind is to be
    predicted. There are n folds, named by the row, or by its label if the rows' labels are given
    instead of their number.

    Examples
    --------
    >>> for train, test in leave_one_out(3):
    ...     print(train, test)
    [1 2] [0]
    [0 2] [1]
    [0 1] [2]
    """
    n, labels = _rows(n, "n")
    if labels is not None and len(np.unique(labels)) < n:
        raise ValueError(
            f"labels of rows must be distinct, but {n} rows have {len(np.unique(labels))}; use "
            "leave_group_out for rows that belong together"
        )
    return _named(_partition(np.arange(n), np.arange(n), f"leave_one_out, n={n}"), labels)


def k_fold(n: int, k: int, seed: int = 0) -> Folds:
    """Random K-fold: the rows in random order, dealt out to k test sets.

    Sizes differ by at most one. For exchangeable rows, where leave-one-out costs too much. Folds
    are named 0 to k - 1; the default score is by row.

    Examples
    --------
    >>> folds = k_fold(10, 3)
    >>> print(folds)
    Folds(k_fold, n=10, k=3, seed=0)
      3 folds of 10 rows: train 6-7, test 3-4
    """
    n = _integer(n, "n", 2)
    k = _fold_count(k, n, "rows", f"n={n}")
    codes = np.empty(n, dtype=np.int64)
    codes[_generator(seed).permutation(n)] = np.arange(n) % k
    return _partition(codes, np.arange(k), f"k_fold, n={n}, k={k}, seed={seed}", pointwise=True)


def stratified_k_fold(labels: ArrayLike, k: int, seed: int = 0) -> Folds:
    """Stratified random K-fold: each label is spread evenly over the k test sets.

    Both the rows of each label and all rows differ in number by at most one between folds: rows
    are shuffled within labels, the labels laid end to end in random order, and the whole dealt
    out in turn. For exchangeable rows with a rare class or a strong known factor. Folds are named
    0 to k - 1; the default score is by row.

    Examples
    --------
    >>> label = np.array(["a", "a", "a", "b", "b", "b"])
    >>> for train, test in stratified_k_fold(label, 3):
    ...     print(label[test])
    ['a' 'b']
    ['a' 'b']
    ['a' 'b']
    """
    names, codes = _codes(labels, "labels")
    n = len(codes)
    k = _fold_count(k, n, "rows", f"n={n}")
    rng = _generator(seed)
    stratum = rng.permutation(len(names))[codes]
    order = np.lexsort((rng.random(n), stratum))
    fold = np.empty(n, dtype=np.int64)
    fold[order] = np.arange(n) % k
    scheme = f"stratified_k_fold, {len(names)} labels, k={k}, seed={seed}"
    return _partition(fold, np.arange(k), scheme, pointwise=True)


def from_labels(labels: ArrayLike) -> Folds:
    """Folds from one integer per row: fold f tests the rows labelled f and trains on the rest.

    For a partition that is fixed already, to share it with another program. Folds are named by
    the distinct labels in ascending order; every row is tested once, negative labels included.

    Examples
    --------
    >>> for train, test in from_labels([2, 1, 2, 1]):
    ...     print(train, test)
    [0 2] [1 3]
    [1 3] [0 2]
    """
    names, codes = _groups(labels, "labels")
    if names.dtype.kind not in "iu":
        raise TypeError(
            f"labels must be integers, one fold number per row, got {names.dtype}; "
            "convert them, or use leave_group_out for labels of any kind"
        )
    return _partition(codes, names, f"from_labels, {len(names)} labels")


# Schemes over groups


def leave_group_out(groups: ArrayLike, n: int | None = None) -> Folds:
    """Leave-group-out: each fold tests all rows of one group and trains on all other groups.

    For predicting a new group (a county, a patient, a study) in a hierarchical model. Folds are
    named by the group, in the sorted order of ``np.unique``. Give n, the number of rows of the
    data, to have the length of groups checked.

    Examples
    --------
    >>> folds = leave_group_out(["b", "a", "b", "c"])
    >>> for name, (train, test) in zip(folds.names, folds):
    ...     print(name, train, test)
    a [0 2 3] [1]
    b [1 3] [0 2]
    c [0 1 2] [3]
    """
    names, codes = _groups(groups, "groups")
    if n is not None and len(codes) != _integer(n, "n", 2):
        raise ValueError(
            f"groups must have one label per row of the data: got {len(codes)} labels, but n={n}"
        )
    return _partition(codes, names, f"leave_group_out, {len(names)} groups")


def group_k_fold(groups: ArrayLike, k: int, seed: int = 0) -> Folds:
    """Group K-fold: whole groups dealt out to k test sets of similar numbers of rows.

    The largest group goes first, each into the fold with the fewest rows so far; ties are broken
    at random. For predicting new groups where leave-group-out has too many folds. Folds are named
    0 to k - 1.

    Examples
    --------
    >>> folds = group_k_fold(["a", "a", "a", "b", "b", "c"], 2)
    >>> print(folds)
    Folds(group_k_fold, 3 groups, k=2, seed=0)
      2 folds of 6 rows: train 3, test 3
    """
    names, codes = _groups(groups, "groups")
    k = _fold_count(k, len(names), "groups", f"there are {len(names)}")
    rng = _generator(seed)
    sizes = np.bincount(codes)
    order = np.lexsort((rng.random(len(sizes)), -sizes))
    heap = [(0, tie, fold) for fold, tie in enumerate(rng.random(k))]
    heapq.heapify(heap)
    fold_of_group = np.empty(len(names), dtype=np.int64)
    for group, tie in zip(order, rng.random(len(sizes)), strict=True):
        rows, _, fold = heap[0]
        fold_of_group[group] = fold
        heapq.heapreplace(heap, (rows + int(sizes[group]), tie, fold))
    scheme = f"group_k_fold, {len(names)} groups, k={k}, seed={seed}"
    return _partition(fold_of_group[codes], np.arange(k), scheme)


# Schemes over time and space


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
    n, times = _rows(n, "n", in_order=True)
    start, horizon = _integer(start, "start", 1), _integer(horizon, "horizon", 1)
    step, gap = _integer(step, "step", 1), _integer(gap, "gap", 0)
    if start + gap + horizon > n:
        raise ValueError(
            f"the first fold needs start + gap + horizon <= n, but start={start}, gap={gap} and "
            f"horizon={horizon} add up to {start + gap + horizon} and n={n}; reduce one of them"
        )
    origins = np.arange(start, n - gap - horizon + 1, step)
    earliest = np.zeros_like(origins)
    if window is not None:
        earliest = np.maximum(origins - _integer(window, "window", 1), 0)
    scheme = f"leave_future_out, n={n}, start={start}, horizon={horizon}, step={step}"
    scheme += f", window={window}, gap={gap}"
    nothing = np.zeros(len(origins) + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    test = _ranges(origins + gap, origins + gap + horizon)
    return _named(_make(n, origins, test, (earliest, origins), nothing, scheme), times)


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
    (n, times), h = _rows(n, "n", in_order=True), _integer(h, "h", 0)
    return _named(_blocks(n, h, 0, f"h_block, n={n}, h={h}"), times)


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
    n, times = _rows(n, "n", in_order=True)
    h, v = _integer(h, "h", 0), _integer(v, "v", 0)
    return _named(_blocks(n, h, v, f"hv_block, n={n}, h={h}, v={v}"), times)


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
    points = _coordinates(coordinates)
    k = _fold_count(k, len(points), "rows", f"n={len(points)}")
    buffer = _distance(buffer, "buffer")
    codes = _cluster(points, k, seed)
    scheme = f"spatial_block, n={len(points)}, k={k}, buffer={buffer}, seed={seed}"
    if buffer == 0:
        return _partition(codes, np.arange(k), scheme)
    dropped = [_near(points, codes == block, buffer) for block in range(k)]
    interval = np.zeros(k, dtype=np.int64), np.full(k, len(points))
    return _make(
        len(points), np.arange(k), _lists_by_code(codes, k), interval, _flat(dropped), scheme
    )


# Folds from elsewhere


def from_splits(pairs: Iterable[tuple[ArrayLike, ArrayLike]], n: int) -> Folds:
    """Folds from (train, test) pairs of row indices or boolean masks over n rows.

    For any scheme of the user's own. A row tested in m folds weighs 1/m in each. Rows may be in
    neither set. Folds are named 0, 1, ... in the order of the pairs.

    Examples
    --------
    >>> folds = from_splits([([0, 1], [2]), ([0, 3], [1, 2])], n=4)
    >>> for train, test in folds:
    ...     print(train, test)
    [0 1] [2]
    [0 3] [1 2]
    >>> print(folds.test_weight)
    [0.5 1.  0.5]
    """
    return _from_pairs(pairs, _integer(n, "n", 2), "from_splits")


def from_splitter(splitter: Any, X: Any, y: Any = None, groups: Any = None) -> Folds:
    """Folds from a scikit-learn splitter: the pairs of ``splitter.split(X, y, groups)``.

    For any scheme of scikit-learn, or any object with its ``split`` method. A row tested in m
    folds weighs 1/m in each. Folds are named 0, 1, ... in the splitter's order.

    Examples
    --------
    >>> from sklearn.model_selection import TimeSeriesSplit
    >>> for train, test in from_splitter(TimeSeriesSplit(2), np.zeros((6, 1))):
    ...     print(train, test)
    [0 1] [2 3]
    [0 1 2 3] [4 5]
    """
    if not callable(getattr(splitter, "split", None)):
        raise TypeError(
            "splitter must have a method split(X, y, groups), as scikit-learn's splitters do, "
            f"but {type(splitter).__name__} has none; use from_splits for a list of pairs"
        )
    shape = getattr(X, "shape", None)
    n = _integer(shape[0] if shape else len(X), "the number of rows of X", 2)
    described = " ".join(repr(splitter).split())
    return _from_pairs(splitter.split(X, y, groups), n, f"from_splitter, {described}")


# How schemes are built


def _make(
    n: int,
    names: np.ndarray,
    test: RowLists,
    train_interval: tuple[np.ndarray, np.ndarray],
    dropped: RowLists,
    scheme: str,
    test_weight: np.ndarray | None = None,
    pointwise: bool = False,
) -> Folds:
    """Folds of a whole scheme; every scheme ends here."""
    return Folds(
        n=n,
        names=names,
        index=np.arange(len(names)),
        test_start=test[0],
        test_rows=test[1],
        test_weight=np.ones(len(test[1])) if test_weight is None else test_weight,
        train_start=train_interval[0],
        train_stop=train_interval[1],
        dropped_start=dropped[0],
        dropped_rows=dropped[1],
        scheme=scheme,
        pointwise=pointwise,
        total=len(names),
    )


# What must hold of folds, in O(rows + entries of the lists)

_ROW_FIELDS = ("test_rows", "train_start", "train_stop", "dropped_rows")
_COUNT_FIELDS = ("index", "test_start", "dropped_start")


def _plain_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``Folds`` in their types: arrays with one axis, of integers where they count."""
    scheme = given["scheme"]
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be text that describes the folds, got {scheme!r}")
    if not isinstance(given["pointwise"], bool | np.bool_):
        raise TypeError(f"{scheme}: pointwise must be True or False, got {given['pointwise']!r}")
    found = given | {"n": _integer(given["n"], "n", 2), "pointwise": bool(given["pointwise"])}
    found["largest_test"] = _integer(given["largest_test"], "largest_test", 0)
    for name in (*_ROW_FIELDS, *_COUNT_FIELDS, "names", "test_weight"):
        array = found[name] = np.asarray(given[name])
        if array.ndim != 1:
            raise ValueError(f"{scheme}: {name} must have one axis, got shape {array.shape}")
        if name in ("names", "test_weight"):
            continue
        if array.dtype.kind not in "iu":
            what = name.replace("_", " ")
            raise TypeError(f"{scheme}: {what} must be integers, got {array.dtype}")
        if array.dtype.kind == "u" or name in _COUNT_FIELDS:
            found[name] = _int64(array, f"{scheme}: {name}")
    weight = found["test_weight"]
    if weight.dtype.kind not in "fiu":
        raise TypeError(f"{scheme}: test_weight must be numbers, got {weight.dtype}")
    found["test_weight"] = weight.astype(np.float64, copy=False)
    return found


def _owned(values: np.ndarray, dtype: Any = None) -> np.ndarray:
    """The array, read-only; a copy if its maker could still write to it."""
    own = values.astype(dtype or values.dtype, copy=values.flags.writeable)
    own.setflags(write=False)
    return own


def _int64(values: np.ndarray, what: str) -> np.ndarray:
    """Integers with a sign, in which differences and products are what they should be."""
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{what} must be below 2**63, got {values.max()}")
    return values.astype(np.int64, copy=False)


def _check_folds(folds: Folds) -> None:
    """Raise unless the folds are what the docstring of ``Folds`` says."""
    scheme, names, n = folds.scheme, folds.names, folds.n
    if len(names) == 0:
        raise ValueError(f"{scheme}: there must be at least one fold, got none")
    _check_lengths(folds)
    _check_interval(folds.train_start, folds.train_stop, n, names, scheme)
    test_owner, dropped_owner = _owners(folds.test_start), _owners(folds.dropped_start)
    _check_rows(folds.test_rows, test_owner, 0, n, names, f"{scheme}: test rows")
    lowest, stop = folds.train_start[dropped_owner], folds.train_stop[dropped_owner]
    _check_rows(folds.dropped_rows, dropped_owner, lowest, stop, names, f"{scheme}: dropped rows")
    _check_not_empty(folds)
    _check_disjoint(folds, test_owner, dropped_owner)
    weight = folds.test_weight
    # not (0 < weight < inf), so that NaN is found too
    bad = np.flatnonzero(~((weight > 0) & (weight < np.inf)))
    if len(bad):
        raise ValueError(
            f"{scheme}: weights of test rows must be positive and finite, but row "
            f"{folds.test_rows[bad[0]]} of {_fold_name(names, test_owner[bad[0]])} has "
            f"{weight[bad[0]]} ({len(bad)} such rows); leave rows that should not count out of "
            "the test sets"
        )
    _check_index(folds)


def _check_lengths(folds: Folds) -> None:
    """Raise unless arrays are as long as each other and lists begin and end where they should."""
    k, scheme = len(folds.names), folds.scheme
    lengths = {
        **dict.fromkeys(("index", "train_start", "train_stop"), k),
        **dict.fromkeys(("test_start", "dropped_start"), k + 1),
        "test_weight": len(folds.test_rows),
    }
    for name, length in lengths.items():
        if len(getattr(folds, name)) != length:
            raise ValueError(
                f"{scheme}: {name} must have length {length} ({k} folds, {len(folds.test_rows)} "
                f"test rows), but has {len(getattr(folds, name))}; make the arrays together, or "
                "use from_splits"
            )
    for what in ("test", "dropped"):
        start, rows = getattr(folds, f"{what}_start"), getattr(folds, f"{what}_rows")
        if start[0] != 0 or start[-1] != len(rows) or (start[1:] < start[:-1]).any():
            raise ValueError(
                f"{scheme}: {what}_start must rise from 0 to the {len(rows)} entries of "
                f"{what}_rows, but goes from {start[0]} to {start[-1]}"
                f"{', falling in between' if (start[1:] < start[:-1]).any() else ''}; make the "
                "two together, or use from_splits"
            )


def _check_index(folds: Folds) -> None:
    index, largest = folds.index, int(folds.n_test.max())
    # sorting only where numbers do not ascend by themselves
    repeated = (index[1:] <= index[:-1]).any() and len(np.unique(index)) < len(index)
    if repeated or (index < 0).any():
        raise ValueError(
            f"{folds.scheme}: index must give each fold a number of its own in the scheme, at "
            f"least 0, but {len(index)} folds have {len(np.unique(index))} numbers, the least "
            f"{index.min()}; use numpy.arange({len(index)})"
        )
    if 0 < folds.largest_test < largest:
        raise ValueError(
            f"{folds.scheme}: largest_test must be at least the largest number of test rows, "
            f"{largest}, but is {folds.largest_test}; leave it out"
        )


def _digest(folds: Folds) -> str:
    """Digest of which rows train and test in each fold, and their weights, on any machine alike."""
    digest = hashlib.blake2b(f"{folds.n} {len(folds)}".encode(), digest_size=16)
    tests = folds.test_start, folds.test_rows
    trains = folds.train_start, folds.train_stop, folds.dropped_start, folds.dropped_rows
    for rows in (*tests, *trains):
        digest.update(rows.astype("<i8").tobytes())
    digest.update(folds.test_weight.astype("<f8").tobytes())
    return digest.hexdigest()


def _check_interval(
    start: np.ndarray, stop: np.ndarray, n: int, names: np.ndarray, scheme: str
) -> None:
    bad = np.flatnonzero((start < 0) | (start > stop) | (stop > n))
    if len(bad):
        k = bad[0]
        raise ValueError(
            f"{scheme}: train intervals must lie within the rows 0 to {n - 1}, but "
            f"{_fold_name(names, k)} has [{start[k]}, {stop[k]})"
        )


def _check_rows(
    rows: np.ndarray,
    owner: np.ndarray,
    lowest: np.ndarray | int,
    stop: np.ndarray | int,
    names: np.ndarray,
    what: str,
) -> None:
    """Check that the rows of each fold, ``owner``, are ascending and in [lowest, stop)."""
    bad = np.flatnonzero((rows < lowest) | (rows >= stop))
    if len(bad):
        first, last = (np.broadcast_to(end, rows.shape)[bad[0]] for end in (lowest, stop))
        raise ValueError(
            f"{what} of {_fold_name(names, owner[bad[0]])} must lie in [{first}, {last}), "
            f"but row {rows[bad[0]]} does not"
        )
    bad = np.flatnonzero((rows[1:] <= rows[:-1]) & (owner[1:] == owner[:-1]))
    if len(bad):
        raise ValueError(
            f"{what} of {_fold_name(names, owner[bad[0]])} must be unique and ascending, "
            f"but row {rows[bad[0] + 1]} follows row {rows[bad[0]]}"
        )


def _check_not_empty(folds: Folds) -> None:
    for what, counts in (("training", folds.n_train), ("test", folds.n_test)):
        empty = np.flatnonzero(counts == 0)
        if len(empty):
            raise ValueError(
                f"{folds.scheme}: every fold needs training rows and test rows, but "
                f"{_fold_name(folds.names, empty[0])} has no {what} rows ({len(empty)} such "
                "folds); make the buffer or the test set smaller, or leave the fold out"
            )


def _check_disjoint(folds: Folds, test_owner: np.ndarray, dropped_owner: np.ndarray) -> None:
    """Check that each test row inside a fold's train interval is among its dropped rows."""
    rows = folds.test_rows
    inside = (rows >= folds.train_start[test_owner]) & (rows < folds.train_stop[test_owner])
    wanted = (test_owner * folds.n + rows)[inside]
    present = dropped_owner * folds.n + folds.dropped_rows
    # both ascend, with no row twice: each is found where it would be inserted, or is not there
    place = np.searchsorted(present, wanted)
    found = place < len(present)
    found[found] = present[place[found]] == wanted[found]
    if not found.all():
        k, row = divmod(int(wanted[~found][0]), folds.n)
        raise ValueError(
            f"{folds.scheme}: no row may both train and test in one fold, but row {row} does in "
            f"{_fold_name(folds.names, k)}; remove it from one of the two"
        )


def _partition(codes: np.ndarray, names: np.ndarray, scheme: str, pointwise: bool = False) -> Folds:
    """Folds that test the rows of each code 0..K-1 in turn and train on all others."""
    test = _lists_by_code(codes, len(names))
    interval = np.zeros(len(names), dtype=np.int64), np.full(len(names), len(codes))
    return _make(len(codes), names, test, interval, test, scheme, pointwise=pointwise)


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
    test = _ranges(centres - v, centres + v + 1)
    dropped = _ranges(np.maximum(centres - reach, 0), np.minimum(centres + reach + 1, n))
    return _make(
        n, centres, test, (np.zeros_like(centres), np.full_like(centres, n)), dropped, scheme
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
    rng = _generator(seed)
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


def _from_pairs(pairs: Iterable[Any], n: int, scheme: str) -> Folds:
    tests, dropped, intervals = [], [], []
    for k, pair in enumerate(pairs):
        try:
            train, test = pair
        except (TypeError, ValueError):
            raise TypeError(
                f"each split must be a pair (train, test), but split {k} is a "
                f"{type(pair).__name__} that does not unpack into two"
            ) from None
        train_rows = _as_rows(train, n, f"train rows of fold {k}")
        start, stop = (train_rows[0], train_rows[-1] + 1) if len(train_rows) else (0, 0)
        absent = np.ones(stop - start, dtype=bool)
        absent[train_rows - start] = False
        intervals.append((start, stop))
        dropped.append((np.flatnonzero(absent) + start).astype(_row_type(n)))
        tests.append(_as_rows(test, n, f"test rows of fold {k}").astype(_row_type(n)))
    if not tests:
        raise ValueError(f"{scheme}: there must be at least one split, got none")
    test_lists = _flat(tests)
    starts, stops = np.array(intervals, dtype=np.int64).T
    times_tested = np.bincount(test_lists[1], minlength=n)
    return _make(
        n,
        np.arange(len(tests)),
        test_lists,
        (starts, stops),
        _flat(dropped),
        f"{scheme}, n={n}, {len(tests)} splits",
        test_weight=1.0 / times_tested[test_lists[1]],
    )


# Lists of rows


def _row_type(n: int) -> type[np.signedinteger]:
    return np.int32 if n <= np.iinfo(np.int32).max else np.int64


def _flat(lists: list[np.ndarray]) -> RowLists:
    start = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(rows) for rows in lists], out=start[1:])
    return start, np.concatenate(lists)


def _ranges(first: np.ndarray, stop: np.ndarray) -> RowLists:
    """Lists of the integers from first[k] up to, not including, stop[k]."""
    start = np.zeros(len(first) + 1, dtype=np.int64)
    np.cumsum(stop - first, out=start[1:])
    return start, np.arange(start[-1]) + np.repeat(first - start[:-1], stop - first)


def _lists_by_code(codes: np.ndarray, k: int) -> RowLists:
    """Rows of each code 0..k-1, ascending."""
    start = np.zeros(k + 1, dtype=np.int64)
    np.cumsum(np.bincount(codes, minlength=k), out=start[1:])
    return start, np.argsort(codes, kind="stable").astype(_row_type(len(codes)))


def _owners(start: np.ndarray) -> np.ndarray:
    """Fold of each entry of flat lists."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def _gather(start: np.ndarray, positions: np.ndarray) -> RowLists:
    """Start of each chosen list in their concatenation, and the entries to concatenate."""
    return _ranges(start[positions], start[positions + 1])


# Inputs


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _integer(value: Any, name: str, minimum: int) -> int:
    if not _is_integer(value):
        raise TypeError(
            f"{name} must be an integer >= {minimum}, got {value!r} ({type(value).__name__})"
        )
    if operator.index(value) < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value}")
    return operator.index(value)


def _generator(seed: Any) -> np.random.Generator:
    """Random generator of an integer seed, so that the description of a scheme repeats it."""
    return np.random.default_rng(_integer(seed, "seed", 0))


def _distance(value: Any, name: str) -> float:
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < np.inf:
        raise ValueError(f"{name} must be a finite distance >= 0, got {value}")
    return float(value)


def _fold_count(k: Any, available: int, unit: str, found: str) -> int:
    k = _integer(k, "k", 2)
    if k > available:
        raise ValueError(
            f"k={k} folds need at least {k} {unit}, but {found}; choose k <= {available}"
        )
    return k


def _codes(values: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray]:
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


def _groups(values: ArrayLike, what: str) -> tuple[np.ndarray, np.ndarray]:
    """As _codes, with at least two distinct labels."""
    names, codes = _codes(values, what)
    if len(names) < 2:
        raise ValueError(
            f"{what} must have at least 2 distinct values, so that every fold has rows to train "
            f"on, but all {len(codes)} rows have {names[0]}"
        )
    return names, codes


def _named(folds: Folds, labels: np.ndarray | None) -> Folds:
    """Folds that are named by numbers of rows, named by the rows' labels where there are any."""
    return folds if labels is None else replace(folds, names=labels[folds.names])


def _rows(n: Any, what: str, in_order: bool = False) -> tuple[int, np.ndarray | None]:
    """Number of rows, and their labels if these are given instead."""
    if np.ndim(n) == 0:
        return _integer(n, what, 2), None
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


def _coordinates(coordinates: ArrayLike) -> np.ndarray:
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


def _as_rows(rows: ArrayLike, n: int, what: str) -> np.ndarray:
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


# Words


def _fold_name(names: np.ndarray, k: int) -> str:
    return f"fold {k} (named {names[k]})"


def _span(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low}-{high}"
