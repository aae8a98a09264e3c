"""Lists of different lengths, laid end to end.

List k has the entries from ``start[k]`` up to, not including, ``start[k + 1]`` of one flat array.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

# Where each list starts, and the rows of all lists.
RowLists = tuple[np.ndarray, np.ndarray]


def row_type(n: int) -> type[np.signedinteger]:
    """The integers that number n rows."""
    return np.int32 if n <= np.iinfo(np.int32).max else np.int64


def starts(counts: Int[np.ndarray, " list"] | list[int]) -> Int[np.ndarray, " list1"]:
    """Where each list starts, and the last one ends, from the lists' lengths."""
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    return start


def owners(start: Int[np.ndarray, " list1"]) -> Int[np.ndarray, " entry"]:
    """Which list each entry belongs to."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def end_to_end(lists: list[np.ndarray]) -> RowLists:
    """Separate lists, laid end to end."""
    return starts([len(rows) for rows in lists]), np.concatenate(lists)


def ranges(first: Int[np.ndarray, " list"], stop: Int[np.ndarray, " list"]) -> RowLists:
    """Lists of the integers from first[k] up to, not including, stop[k]."""
    counts = stop - first
    start = starts(counts)
    return start, np.arange(start[-1]) + np.repeat(first - start[:-1], counts)


def lists_by_code(codes: Int[np.ndarray, " row"], k: int) -> RowLists:
    """Rows of each code 0..k-1, ascending."""
    order = np.argsort(codes, kind="stable").astype(row_type(len(codes)))
    return starts(np.bincount(codes, minlength=k)), order


def gather(start: Int[np.ndarray, " list1"], chosen: Int[np.ndarray, " chosen"]) -> RowLists:
    """Start of each chosen list when these are laid end to end, and the entries to take."""
    return ranges(start[chosen], start[chosen + 1])


def concatenated_ranges(
    start: Int[np.ndarray, " list1"], chosen: Int[np.ndarray, " chosen"]
) -> Int[np.ndarray, " entry"]:
    """Positions of the entries of the chosen lists, one list after the other."""
    return gather(start, chosen)[1]


def in_pieces(sizes: Int[np.ndarray, " list"], most: int) -> list[Int[np.ndarray, " list"]]:
    """Numbers of lists in order, in pieces whose sizes add up to about ``most``."""
    number = (np.cumsum(sizes) - 1) // max(most, 1)
    return np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(number)) + 1)
