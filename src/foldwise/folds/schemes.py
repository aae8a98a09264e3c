"""Schemes over exchangeable rows and over groups, and folds from elsewhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from foldwise.folds.folds import Folds, make_folds, named_by, partition
from foldwise.folds.inputs import as_rows, codes_of, fold_count, generator, groups_of, rows_of
from foldwise.folds.ragged import end_to_end, row_type
from foldwise.support.checks import check_count

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
    n, labels = rows_of(n, "n")
    if labels is not None and len(np.unique(labels)) < n:
        raise ValueError(
            f"labels of rows must be distinct, but {n} rows have {len(np.unique(labels))}; use "
            "leave_group_out for rows that belong together"
        )
    return named_by(partition(np.arange(n), np.arange(n), f"leave_one_out, n={n}"), labels)


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
    n = check_count("n", n, 2)
    k = fold_count(k, n, "rows", f"n={n}")
    codes = np.empty(n, dtype=np.int64)
    codes[generator(seed).permutation(n)] = np.arange(n) % k
    return partition(codes, np.arange(k), f"k_fold, n={n}, k={k}, seed={seed}", pointwise=True)


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
    names, codes = codes_of(labels, "labels")
    n = len(codes)
    k = fold_count(k, n, "rows", f"n={n}")
    rng = generator(seed)
    stratum = rng.permutation(len(names))[codes]
    order = np.lexsort((rng.random(n), stratum))
    fold = np.empty(n, dtype=np.int64)
    fold[order] = np.arange(n) % k
    scheme = f"stratified_k_fold, {len(names)} labels, k={k}, seed={seed}"
    return partition(fold, np.arange(k), scheme, pointwise=True)


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
    names, codes = groups_of(labels, "labels")
    if names.dtype.kind not in "iu":
        raise TypeError(
            f"labels must be integers, one fold number per row, got {names.dtype}; "
            "convert them, or use leave_group_out for labels of any kind"
        )
    return partition(codes, names, f"from_labels, {len(names)} labels")


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
    names, codes = groups_of(groups, "groups")
    if n is not None and len(codes) != check_count("n", n, 2):
        raise ValueError(
            f"groups must have one label per row of the data: got {len(codes)} labels, but n={n}"
        )
    return partition(codes, names, f"leave_group_out, {len(names)} groups")


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
    names, codes = groups_of(groups, "groups")
    k = fold_count(k, len(names), "groups", f"there are {len(names)}")
    rng = generator(seed)
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
    return partition(fold_of_group[codes], np.arange(k), scheme)


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
    return _from_pairs(pairs, check_count("n", n, 2), "from_splits")


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
    n = check_count("the number of rows of X", shape[0] if shape else len(X), 2)
    described = " ".join(repr(splitter).split())
    return _from_pairs(splitter.split(X, y, groups), n, f"from_splitter, {described}")


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
        train_rows = as_rows(train, n, f"train rows of fold {k}")
        start, stop = (train_rows[0], train_rows[-1] + 1) if len(train_rows) else (0, 0)
        absent = np.ones(stop - start, dtype=bool)
        absent[train_rows - start] = False
        intervals.append((start, stop))
        dropped.append((np.flatnonzero(absent) + start).astype(row_type(n)))
        tests.append(as_rows(test, n, f"test rows of fold {k}").astype(row_type(n)))
    if not tests:
        raise ValueError(f"{scheme}: there must be at least one split, got none")
    test_lists = end_to_end(tests)
    starts, stops = np.array(intervals, dtype=np.int64).T
    times_tested = np.bincount(test_lists[1], minlength=n)
    return make_folds(
        n,
        np.arange(len(tests)),
        test_lists,
        (starts, stops),
        end_to_end(dropped),
        f"{scheme}, n={n}, {len(tests)} splits",
        test_weight=1.0 / times_tested[test_lists[1]],
    )
