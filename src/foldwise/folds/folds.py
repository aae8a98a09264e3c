"""Folds: which rows train and which rows test in each fold.

A fold's training rows are an interval of rows minus a list of dropped rows, and its test rows are
a list. So leave-one-out and leave-future-out over n rows take O(n) memory, and no fold-by-row
array is stored. A row may be in neither set (a buffer), never in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from foldwise.folds.inputs import generator
from foldwise.folds.ragged import (
    RowLists,
    gather,
    lists_by_code,
    owners,
    ranges,
    row_type,
    starts,
)
from foldwise.support.checks import check_count, is_integer
from foldwise.support.words import counted


@dataclass(frozen=True, eq=False, repr=False)
class Folds:
    """Which rows train and which rows test in each of K folds over n rows.

    The schemes make it. ``folds[2:5]``, ``folds[[0, 7]]`` and
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
            object.__setattr__(self, name, _owned(getattr(self, name), row_type(self.n)))
        for name in (*_COUNT_FIELDS, "names", "test_weight"):
            object.__setattr__(self, name, _owned(getattr(self, name)))
        if self.largest_test == 0:
            object.__setattr__(self, "largest_test", int(self.n_test.max()))
        if self.total and np.array_equal(self.index, np.arange(self.total)):  # the whole scheme
            object.__setattr__(self, "digest", _digest(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({field.name: state[field.name] for field in fields(self)})
        self.__post_init__()  # copies and pickles come with arrays that can be written to

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Any) -> Folds:
        """Subset of the folds, by an integer, a slice, a list of positions or a boolean mask."""
        if isinstance(key, slice):
            positions = np.arange(len(self))[key]
        else:
            positions = self._positions([key] if is_integer(key) else key)
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
        return (
            f"Folds({self.scheme})\n"
            f"  {counted(len(self), 'fold')} of {self.n} rows: "
            f"train {_span(self.n_train)}, test {_span(self.n_test)}"
        )

    def sample(self, m: int, seed: int = 0) -> Folds:
        """Random subset of m distinct folds, in ascending order."""
        m = check_count("m", m, 1)
        if m > len(self):
            raise ValueError(
                f"m={m} distinct folds cannot be drawn from {len(self)}; choose m <= {len(self)}"
            )
        rng = generator(seed)
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

    @cached_property
    def n_test(self) -> np.ndarray:
        """Number of test rows of each fold, (K,)."""
        return _owned(np.diff(self.test_start))

    @cached_property
    def n_train(self) -> np.ndarray:
        """Number of training rows of each fold, (K,)."""
        interval = self.train_stop.astype(np.int64) - self.train_start
        return _owned(interval - np.diff(self.dropped_start))

    @property
    def left_out(self) -> RowLists:
        """Rows that do not train in each fold, in no order: where lists start, and their rows."""
        before = ranges(np.zeros(len(self), np.int64), self.train_start.astype(np.int64))
        after = ranges(self.train_stop.astype(np.int64), np.full(len(self), self.n))
        parts = (before, (self.dropped_start, self.dropped_rows), after)
        fold = np.concatenate([owners(start) for start, _ in parts])
        rows = np.concatenate([rows for _, rows in parts])
        order = np.argsort(fold, kind="stable")
        return starts(np.bincount(fold, minlength=len(self))), rows[order]

    @cached_property
    def fold_weight(self) -> np.ndarray:
        """Mean weight of each fold's test rows, (K,)."""
        return _owned(np.add.reduceat(self.test_weight, self.test_start[:-1]) / self.n_test)

    @property
    def complete(self) -> bool:
        """Whether every row is tested exactly once."""
        return bool(np.all(np.bincount(self.test_rows, minlength=self.n) == 1))

    @cached_property
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
        return _owned(partner)

    def train_mask(self, positions: ArrayLike) -> np.ndarray:
        """Whether each row trains in the folds at these positions: bool, (len(positions), n)."""
        chosen = self._positions(positions)
        rows = np.arange(self.n, dtype=self.test_rows.dtype)
        mask = rows >= self.train_start[chosen, None]
        mask &= rows < self.train_stop[chosen, None]
        start, entries = gather(self.dropped_start, chosen)
        mask[owners(start), self.dropped_rows[entries]] = False
        return mask

    def padded_test(self, positions: ArrayLike, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Test rows of the folds at these positions, padded with row 0 to a common width.

        Returns the rows and whether each entry is a test row, both (len(positions), width).
        """
        chosen = self._positions(positions)
        width = check_count("width", width, 1)
        start, entries = gather(self.test_start, chosen)
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
        test_start, test_entries = gather(self.test_start, positions)
        dropped_start, dropped_entries = gather(self.dropped_start, positions)
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


# How schemes are built


def make_folds(
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


def partition(codes: np.ndarray, names: np.ndarray, scheme: str, pointwise: bool = False) -> Folds:
    """Folds that test the rows of each code 0..K-1 in turn and train on all others."""
    test = lists_by_code(codes, len(names))
    interval = np.zeros(len(names), dtype=np.int64), np.full(len(names), len(codes))
    return make_folds(len(codes), names, test, interval, test, scheme, pointwise=pointwise)


def named_by(folds: Folds, labels: np.ndarray | None) -> Folds:
    """Folds that are named by numbers of rows, named by the rows' labels where there are any."""
    return folds if labels is None else replace(folds, names=labels[folds.names])


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
    found = given | {"n": check_count("n", given["n"], 2), "pointwise": bool(given["pointwise"])}
    found["largest_test"] = check_count("largest_test", given["largest_test"], 0)
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
    test_owner, dropped_owner = owners(folds.test_start), owners(folds.dropped_start)
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


# Words


def _fold_name(names: np.ndarray, k: int) -> str:
    return f"fold {k} (named {names[k]})"


def _span(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low}-{high}"
