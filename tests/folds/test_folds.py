"""Folds: properties of every scheme, definitions against brute force, and errors."""

import copy
import datetime
import doctest
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest

from foldwise.folds import schemes, time_and_space
from foldwise.folds.folds import Folds, make_folds
from foldwise.folds.schemes import (
    from_labels,
    from_splits,
    from_splitter,
    group_k_fold,
    k_fold,
    leave_group_out,
    leave_one_out,
    stratified_k_fold,
)
from foldwise.folds.time_and_space import h_block, hv_block, leave_future_out, spatial_block

pytestmark = pytest.mark.fast

SEED = int(os.environ.get("FOLDWISE_TEST_SEED", "0"))
RNG = np.random.default_rng(SEED)
GROUPS = np.array(["c", "a", "b", "a", "c", "c", "d", "a", "d", "b", "c", "a", "e"])
LABELS = np.array([3, 1, 7, 1, 3, 3, 7, 1, 7, 1, 3, 1, 3])
POINTS = RNG.uniform(size=(40, 2))

# Every scheme, small enough for brute force, and whether each row is tested exactly once.
SCHEMES = {
    "leave_one_out": (lambda: leave_one_out(9), True),
    "k_fold": (lambda: k_fold(23, 4, seed=SEED), True),
    "stratified_k_fold": (lambda: stratified_k_fold(GROUPS, 3, seed=SEED), True),
    "from_labels": (lambda: from_labels(LABELS), True),
    "leave_group_out": (lambda: leave_group_out(GROUPS), True),
    "group_k_fold": (lambda: group_k_fold(GROUPS, 3, seed=SEED), True),
    "leave_future_out": (lambda: leave_future_out(20, 6, 2, 3, window=5, gap=1), False),
    "h_block": (lambda: h_block(15, 2), True),
    "hv_block": (lambda: hv_block(17, 2, 1), False),
    "spatial_block": (lambda: spatial_block(POINTS, 4, seed=SEED), True),
    "spatial_block, buffer": (lambda: spatial_block(POINTS, 4, 0.25, seed=SEED), True),
    "from_splits": (lambda: from_splits(random_pairs(30, 7), 30), False),
}


def random_pairs(n, k):
    """Random disjoint pairs, unsorted, where rows may be in neither set."""
    rng = np.random.default_rng(SEED)
    for _ in range(k):
        rows = rng.permutation(n)
        a, b = sorted(rng.choice(np.arange(1, n), size=2, replace=False))
        yield rows[:a], rows[a:b]


def sets(folds):
    return [(set(train.tolist()), set(test.tolist())) for train, test in folds]


def arrays(folds):
    return [value for value in vars(folds).values() if isinstance(value, np.ndarray)]


@pytest.fixture(params=list(SCHEMES))
def folds(request):
    return SCHEMES[request.param][0]()


# Every scheme


def test_train_and_test_are_disjoint_not_empty_and_in_range(folds):
    for train, test in sets(folds):
        assert train and test
        assert not train & test
        assert train | test <= set(range(folds.n))


def test_rows_are_ascending_and_counted(folds):
    for k, (train, test) in enumerate(folds):
        assert np.all(np.diff(train) > 0) and np.all(np.diff(test) > 0)
        assert len(train) == folds.n_train[k] and len(test) == folds.n_test[k]
    assert k == len(folds) - 1
    assert len(folds.n_train) == len(folds.n_test) == len(folds)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_complete_schemes_test_every_row_once(name):
    make, complete = SCHEMES[name]
    folds = make()
    times = np.zeros(folds.n, dtype=int)
    for _, test in folds:
        times[test] += 1
    assert np.all(times == 1) == complete
    assert folds.complete == complete
    assert folds.pointwise == (name in ("k_fold", "stratified_k_fold"))


def test_stored_layout(folds):
    assert folds.test_start[-1] == len(folds.test_rows) == len(folds.test_weight)
    assert folds.dropped_start[-1] == len(folds.dropped_rows)
    for k, (_, test) in enumerate(sets(folds)):
        interval = set(range(folds.train_start[k], folds.train_stop[k]))
        dropped = folds.dropped_rows[folds.dropped_start[k] : folds.dropped_start[k + 1]]
        assert set(dropped.tolist()) <= interval
        assert test & interval <= set(dropped.tolist())
    for rows in (folds.test_rows, folds.dropped_rows, folds.train_start, folds.train_stop):
        assert rows.dtype == np.int32


def test_arrays_cannot_be_changed(folds):
    for array in arrays(folds):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = array[:1]


def test_index_numbers_the_folds(folds):
    assert folds.index.dtype == np.int64
    np.testing.assert_array_equal(folds.index, np.arange(len(folds)))


def test_subsets_keep_index_names_and_rows(folds):
    whole = sets(folds)
    mask = np.arange(len(folds)) % 2 == 0
    keys = [
        slice(1, None),
        slice(None, None, -2),
        [2, 0],
        np.array([1]),
        mask,
        mask.tolist(),
        1,
        -1,
    ]
    for key in keys:
        chosen = np.atleast_1d(np.arange(len(folds))[key])
        subset = folds[key]
        assert isinstance(subset, Folds) and len(subset) == len(chosen)
        np.testing.assert_array_equal(subset.index, chosen)
        np.testing.assert_array_equal(subset.names, folds.names[chosen])
        np.testing.assert_allclose(subset.fold_weight, folds.fold_weight[chosen])
        assert sets(subset) == [whole[k] for k in chosen]
        assert (subset.n, subset.scheme, subset.pointwise) == (
            folds.n,
            folds.scheme,
            folds.pointwise,
        )


def test_subset_of_subset(folds):
    inner = folds[1:][[1, 0]]
    np.testing.assert_array_equal(inner.index, [2, 1])
    assert sets(inner) == [sets(folds)[2], sets(folds)[1]]


def test_sample(folds):
    m = len(folds) - 1
    drawn = folds.sample(m, SEED)
    assert len(drawn) == m
    assert np.all(np.diff(drawn.index) > 0)
    assert sets(drawn) == [sets(folds)[k] for k in drawn.index]
    np.testing.assert_array_equal(drawn.index, folds.sample(m, SEED).index)
    assert len({tuple(folds.sample(1, seed).index) for seed in range(40)}) > 1


def test_subsets_know_the_scheme_they_come_from(folds):
    assert folds.total == len(folds)
    subsets = [folds[1:], folds[::-1], folds[0], folds.sample(2, SEED), folds[1:][[1, 0]]]
    for subset in (*subsets, pickle.loads(pickle.dumps(folds[1:]))):
        assert (subset.total, subset.digest) == (folds.total, folds.digest)


def test_digest_is_of_rows_and_weights():
    folds = leave_group_out(list("aabbc"))
    assert folds.digest == leave_group_out(list("xxyyz")).digest
    other = leave_group_out(list("abbac"))
    assert folds.scheme == other.scheme and folds.digest != other.digest
    assert k_fold(20, 4, seed=1).digest != k_fold(20, 4, seed=2).digest
    assert h_block(9, 1).digest != leave_one_out(9).digest  # the same test rows
    assert replace(folds, test_weight=0.5 * folds.test_weight).digest != folds.digest
    wider = replace(folds, test_rows=folds.test_rows.astype(np.int64))
    assert wider.digest == folds.digest
    # on any machine: blake2b of the counts, then of the lists as little-endian 64-bit numbers
    assert leave_one_out(3).digest == "6bef88888c8c8436b2715a71bb54deec"


def test_train_mask_equals_the_sets(folds):
    positions = [2, 0, 2]  # repeats are allowed, for padding a block of folds
    mask = folds.train_mask(positions)
    assert mask.shape == (3, folds.n) and mask.dtype == bool
    for row, k in zip(mask, positions, strict=True):
        assert set(np.flatnonzero(row).tolist()) == sets(folds)[k][0]
    assert folds.train_mask([]).shape == (0, folds.n)
    assert folds.train_mask(np.arange(len(folds))).sum() == folds.n_train.sum()


@pytest.mark.parametrize("part", [slice(None), [2, 0], slice(1, 2)])
def test_left_out_is_what_does_not_train(folds, part):
    some = folds[part]
    start, rows = some.left_out
    assert len(start) == len(some) + 1 and start[-1] == len(rows)
    mask = some.train_mask(np.arange(len(some)))
    for k in range(len(some)):
        left_out = np.sort(rows[start[k] : start[k + 1]])
        np.testing.assert_array_equal(left_out, np.flatnonzero(~mask[k]))


def test_padded_test_equals_the_sets(folds):
    width = int(folds.n_test.max()) + 2
    positions = [1, 2, 0]
    rows, valid = folds.padded_test(positions, width)
    assert rows.shape == valid.shape == (3, width)
    assert np.all(rows[~valid] == 0) and not valid[:, -2:].any()
    for k, row, real in zip(positions, rows, valid, strict=True):
        np.testing.assert_array_equal(row[real], folds.test(k))
        assert np.all(real[: len(folds.test(k))])


def test_partner_is_the_training_set_it_claims(folds):
    everything = set(range(folds.n))
    partner = folds.partner
    assert partner.shape == (len(folds),)
    for k, (train, test) in enumerate(sets(folds)):
        assert (partner[k] == len(folds)) == (train | test == everything)
        if 0 <= partner[k] < len(folds):
            assert sets(folds)[partner[k]][0] == train | test
    inside = partner[(partner >= 0) & (partner < len(folds))]
    assert len(np.unique(inside)) == len(inside)


def test_round_trip_through_from_splits(folds):
    again = from_splits(folds, folds.n)
    assert sets(again) == sets(folds)
    times = np.bincount(folds.test_rows, minlength=folds.n)
    np.testing.assert_allclose(again.test_weight, 1 / times[again.test_rows])


def test_pickle(folds):
    for again in (pickle.loads(pickle.dumps(folds)), copy.deepcopy(folds)):
        assert sets(again) == sets(folds) and again.scheme == folds.scheme
        np.testing.assert_array_equal(again.names, folds.names)
        assert not any(array.flags.writeable for array in arrays(again))


def test_repr_is_two_short_lines(folds):
    first, second = repr(folds).split("\n")
    assert folds.scheme in first
    assert f"{len(folds)} folds of {folds.n} rows" in second
    assert str(folds.n_train.max()) in second and str(folds.n_test.min()) in second


def test_repr_states_ranges():
    folds = leave_group_out(["a", "a", "b", "b", "b", "c"])
    assert repr(folds) == (
        "Folds(leave_group_out, 3 groups)\n  3 folds of 6 rows: train 3-5, test 1-3"
    )
    assert repr(folds[0]).endswith("1 fold of 6 rows: train 4, test 2")


@pytest.mark.parametrize("module, least", [(schemes, 12), (time_and_space, 4)])
def test_docstring_examples(module, least):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= least


# Exchangeable rows


def test_leave_one_out():
    folds = leave_one_out(9)
    everything = set(range(9))
    assert sets(folds) == [(everything - {i}, {i}) for i in range(9)]
    np.testing.assert_array_equal(folds.names, np.arange(9))


@pytest.mark.parametrize(("n", "k"), [(10, 3), (10, 10), (11, 2), (100, 7)])
def test_k_fold_sizes(n, k):
    folds = k_fold(n, k, seed=SEED)
    assert len(folds) == k
    assert set(folds.n_test.tolist()) <= {n // k, -(-n // k)}
    np.testing.assert_array_equal(folds.names, np.arange(k))


def test_k_fold_is_random_and_repeatable():
    first, again, other = k_fold(50, 5, seed=1), k_fold(50, 5, seed=1), k_fold(50, 5, seed=2)
    assert sets(first) == sets(again)
    assert sets(first) != sets(other)


@pytest.mark.parametrize("k", [2, 3, 5, 13])
def test_stratified_k_fold_spreads_every_label(k):
    for seed in range(10):
        folds = stratified_k_fold(GROUPS, k, seed=seed)
        assert len(folds) == k
        assert np.ptp(folds.n_test) <= 1
        for label in np.unique(GROUPS):
            counts = [np.sum(GROUPS[test] == label) for _, test in folds]
            assert np.ptp(counts) <= 1


def test_stratified_k_fold_is_random_even_if_all_labels_differ():
    tests = {tuple(stratified_k_fold(np.arange(12), 3, seed=seed).test(0)) for seed in range(10)}
    assert len(tests) > 5


def test_stratified_k_fold_shuffles_within_a_label():
    tests = {tuple(stratified_k_fold(["a"] * 12, 3, seed=seed).test(0)) for seed in range(10)}
    assert len(tests) > 5


def test_from_labels():
    folds = from_labels(LABELS)
    np.testing.assert_array_equal(folds.names, [1, 3, 7])
    for name, (train, test) in zip(folds.names, folds, strict=True):
        assert np.all(LABELS[test] == name) and not np.any(LABELS[train] == name)


# Groups


def test_leave_group_out_names_and_rows():
    folds = leave_group_out(GROUPS, n=13)
    assert folds.names.tolist() == ["a", "b", "c", "d", "e"]
    for name, (train, test) in zip(folds.names, folds, strict=True):
        assert set(test.tolist()) == set(np.flatnonzero(GROUPS == name).tolist())
        assert set(train.tolist()) == set(np.flatnonzero(GROUPS != name).tolist())


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_group_k_fold_keeps_groups_whole(k):
    folds = group_k_fold(GROUPS, k, seed=SEED)
    assert len(folds) == k
    for train, test in folds:
        assert not set(GROUPS[train]) & set(GROUPS[test])


def test_group_k_fold_balances_rows():
    groups = np.repeat(np.arange(7), [9, 7, 6, 5, 4, 3, 2])
    # Greedy by hand, largest first: 9 | 7 | 6, then 6+5, 7+4, 9+3, and 2 to an 11.
    assert sorted(group_k_fold(groups, 3, seed=SEED).n_test) == [11, 12, 13]
    many = RNG.permutation(np.repeat(np.arange(300), RNG.integers(1, 9, size=300)))
    assert np.ptp(group_k_fold(many, 10, seed=SEED).n_test) <= 1


def test_group_k_fold_breaks_ties_by_seed():
    groups = np.repeat(np.arange(6), 2)
    partitions = set()
    for seed in range(20):
        partitions.add(
            frozenset(frozenset(test) for _, test in sets(group_k_fold(groups, 3, seed)))
        )
    assert len(partitions) > 3
    assert any({0, 1, 2, 3} in partition for partition in partitions)
    assert sets(group_k_fold(groups, 3, 5)) == sets(group_k_fold(groups, 3, 5))


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([10, 2, 10], [2, 10]),
        (("b", "a", "b"), ["a", "b"]),
        ([2.5, 1, 2.5], [1.0, 2.5]),
        ([True, False, True], [False, True]),
        (np.array(["b", "a", "b"], dtype=object), ["a", "b"]),
        (
            np.array(["2020-02-01", "2020-01-01", "2020-02-01"], dtype="datetime64[D]"),
            [datetime.date(2020, 1, 1), datetime.date(2020, 2, 1)],
        ),
        (
            [datetime.date(2020, 2, 1), datetime.date(2020, 1, 1), datetime.date(2020, 2, 1)],
            [datetime.date(2020, 1, 1), datetime.date(2020, 2, 1)],
        ),
    ],
)
def test_names_are_the_users_labels(groups, names):
    folds = leave_group_out(groups)
    assert folds.names.tolist() == names
    assert sets(folds) == [({0, 2}, {1}), ({1}, {0, 2})]


def test_text_labels_in_object_arrays_become_plain_text():
    assert leave_group_out(np.array(["b", "a"], dtype=object)).names.dtype.kind == "U"
    assert leave_group_out(np.array([3, 2], dtype=object)).names.dtype.kind == "i"


def test_pandas_columns():
    import pandas as pd

    column = pd.Series(["b", "a", "b"], index=[7, 8, 9])
    for labels in (column, column.astype("category"), column.astype("string")):
        folds = leave_group_out(labels)
        assert folds.names.tolist() == ["a", "b"]
        assert sets(folds) == [({0, 2}, {1}), ({1}, {0, 2})]
    assert from_labels(pd.Series([2, 1, 2], dtype="Int64")).names.tolist() == [1, 2]
    pairs = pd.Series([("x", 2), ("x", 1), ("x", 2)])
    assert leave_group_out(pairs).names.tolist() == [("x", 1), ("x", 2)]
    for missing in (None, pd.NA, pd.NaT, np.nan):
        with pytest.raises(ValueError, match="no missing values, but row 1 has one"):
            leave_group_out(pd.Series(["b", missing, "b"], dtype=object))
    with pytest.raises(ValueError, match="no missing values, but row 2 has one"):
        from_labels(pd.Series([2, 1, None], dtype="Int64"))


def test_polars_columns():
    import polars as pl

    folds = leave_group_out(pl.Series(["b", "a", "b"]))
    assert folds.names.tolist() == ["a", "b"]
    assert sets(folds) == [({0, 2}, {1}), ({1}, {0, 2})]
    assert from_labels(pl.Series([2, 1, 2])).names.tolist() == [1, 2]
    assert len(stratified_k_fold(pl.Series([0, 1] * 4), 2)) == 2
    with pytest.raises(ValueError, match="no missing values, but row 1 has one"):
        leave_group_out(pl.Series(["b", None, "b"]))
    frame = pl.DataFrame({"x": [0.0, 1.0, 8.0, 9.0], "y": [0.0, 0.0, 1.0, 1.0]})
    assert sets(spatial_block(frame, 2)) == sets(spatial_block(frame.to_numpy(), 2))
    days = pl.Series(["2024-01-01", "2024-01-02", "2024-01-03"]).str.to_date()
    names = leave_future_out(days, 1).names
    assert [str(name)[:10] for name in names] == ["2024-01-02", "2024-01-03"]


@pytest.mark.parametrize("kind", [list, np.array, "pandas"])
def test_rows_named_by_time(kind):
    import pandas as pd

    times = [f"2024-{month:02}" for month in range(1, 8)]
    column = pd.Series(times) if kind == "pandas" else kind(times)
    for scheme, arguments in (
        (leave_future_out, (3, 2)),
        (h_block, (1,)),
        (hv_block, (1, 1)),
        (leave_one_out, ()),
    ):
        named, numbered = scheme(column, *arguments), scheme(7, *arguments)
        assert sets(named) == sets(numbered) and named.scheme == numbered.scheme
        assert named.names.tolist() == [times[k] for k in numbered.names]
    with pytest.raises(ValueError, match="order of time, but row 1 has 3 and row 2 2; sort"):
        leave_future_out([1, 3, 2, 4], 1)
    with pytest.raises(ValueError, match="distinct, but 3 rows have 2; use leave_group_out"):
        leave_one_out(["a", "b", "a"])


def test_dates_name_folds_in_tables():
    days = np.arange("2024-01-01", "2024-01-09", dtype="datetime64[D]")
    folds = leave_future_out(days, 5)
    assert folds.names.dtype.kind == "M" and str(folds.names[0]) == "2024-01-06"


# Time


@pytest.mark.parametrize("start", [1, 4])
@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("gap", [0, 2])
def test_leave_future_out_definition(start, horizon, step, window, gap):
    n = 14
    expected, names = [], []
    for t in range(start, n, step):
        if t + gap + horizon <= n:
            earliest = 0 if window is None else max(0, t - window)
            expected.append((set(range(earliest, t)), set(range(t + gap, t + gap + horizon))))
            names.append(t)
    folds = leave_future_out(n, start, horizon, step, window, gap)
    assert sets(folds) == expected
    assert folds.names.tolist() == names


@pytest.mark.parametrize(("n", "h"), [(12, 0), (12, 1), (12, 3), (12, 5), (13, 5)])
def test_h_block_definition(n, h):
    folds = h_block(n, h)
    assert sets(folds) == [({j for j in range(n) if abs(j - i) > h}, {i}) for i in range(n)]
    assert folds.names.tolist() == list(range(n))


@pytest.mark.parametrize(
    ("n", "h", "v"), [(14, 0, 0), (14, 2, 0), (14, 0, 2), (14, 3, 2), (14, 3, 3)]
)
def test_hv_block_definition(n, h, v):
    expected = []
    for i in range(v, n - v):
        train = {j for j in range(n) if abs(j - i) > h + v}
        expected.append((train, {j for j in range(n) if abs(j - i) <= v}))
    folds = hv_block(n, h, v)
    assert len(folds) == n - 2 * v
    assert sets(folds) == expected
    assert folds.names.tolist() == list(range(v, n - v))


# Space


@pytest.mark.parametrize("buffer", [0.0, 0.1, 0.3])
def test_spatial_buffer_definition(buffer):
    folds = spatial_block(POINTS, 4, buffer, seed=SEED)
    distance = np.linalg.norm(POINTS[:, None] - POINTS[None], axis=-1)
    for train, test in folds:
        tested = np.isin(np.arange(len(POINTS)), test)
        expected = np.flatnonzero(~tested & (distance[:, test].min(axis=1) >= buffer))
        np.testing.assert_array_equal(train, expected)
    if buffer == 0.3:
        assert np.any(folds.n_train + folds.n_test < folds.n)


def test_spatial_buffer_keeps_rows_at_exactly_the_buffer():
    line = np.array([0.0, 1.0, 2.0, 10.0, 12.0, 15.0])[:, None]
    left, right = {0, 1, 2}, {3, 4, 5}
    expected = {
        8.0: [(right, left), (left, right)],
        8.5: [({4, 5}, left), ({0, 1}, right)],
        9.0: [({4, 5}, left), ({0, 1}, right)],
        9.5: [({4, 5}, left), ({0}, right)],
    }
    for buffer, pairs in expected.items():
        found = sets(spatial_block(line, 2, buffer, seed=SEED))
        assert sorted(found, key=lambda pair: min(pair[1])) == pairs


def test_spatial_blocks_are_the_clusters():
    corners = np.array([[0, 0], [0, 100], [100, 0], [100, 100]])
    block = RNG.permutation(np.repeat(np.arange(4), 10))
    points = corners[block] + RNG.normal(size=(40, 2)) + 1e6
    for seed in range(5):
        found = {frozenset(test) for _, test in sets(spatial_block(points, 4, seed=seed))}
        if found == {frozenset(np.flatnonzero(block == b).tolist()) for b in range(4)}:
            break
    else:
        pytest.fail("no seed found the four separate clusters")
    first, again = spatial_block(POINTS, 5, seed=3), spatial_block(POINTS, 5, seed=3)
    assert sets(first) == sets(again)


def test_spatial_block_with_as_many_blocks_as_places():
    grid = np.repeat(np.arange(5.0), 3)[:, None]
    folds = spatial_block(grid, 5, seed=SEED)
    assert folds.n_test.tolist() == [3] * 5
    assert all(len(set(grid[test, 0])) == 1 for _, test in folds)


def test_spatial_block_retries_when_a_block_is_empty(monkeypatch):
    from scipy.cluster import vq

    calls = []

    def unlucky(*args, **kwargs):
        calls.append(kwargs["rng"].random())
        if len(calls) < 3:
            raise vq.ClusterError("a cluster is empty")
        return kmeans2(*args, **kwargs)

    def hopeless(*args, **kwargs):
        raise vq.ClusterError("a cluster is empty")

    kmeans2 = vq.kmeans2
    monkeypatch.setattr(vq, "kmeans2", unlucky)
    assert len(spatial_block(POINTS, 4)) == 4
    assert len(calls) == 3 and len(set(calls)) == 3
    monkeypatch.setattr(vq, "kmeans2", hopeless)
    with pytest.raises(ValueError, match="left one of k=4 blocks empty in 20 attempts"):
        spatial_block(POINTS, 4)


# Folds from elsewhere


def test_from_splits_weighs_rows_by_times_tested():
    folds = from_splits([([0, 1], [3, 2]), ([0], [2]), ([5, 0], [4, 2])], 6)
    assert sets(folds) == [({0, 1}, {2, 3}), ({0}, {2}), ({0, 5}, {2, 4})]
    np.testing.assert_allclose(folds.test_weight, [1 / 3, 1, 1 / 3, 1 / 3, 1])
    np.testing.assert_allclose(folds.fold_weight, [2 / 3, 1 / 3, 2 / 3])
    np.testing.assert_allclose(folds[[2]].test_weight, [1 / 3, 1])
    assert folds.train_start.tolist() == [0, 0, 0] and folds.train_stop.tolist() == [2, 1, 6]
    assert folds.dropped_rows.tolist() == [1, 2, 3, 4]


def test_other_schemes_weigh_every_test_row_one():
    for folds in (hv_block(17, 2, 1), leave_future_out(9, 3, horizon=3), leave_one_out(4)):
        assert np.all(folds.test_weight == 1)
        assert np.all(folds.fold_weight == 1)


def test_from_splits_takes_masks_generators_and_unsigned_integers():
    train = np.array([True, False, True, False])
    pairs = [
        (train, ~train),
        (train.tolist(), [3]),
        (np.array([1], dtype=np.uint64), np.uint8([0])),
    ]
    folds = from_splits((pair for pair in pairs), 4)
    assert sets(folds) == [({0, 2}, {1, 3}), ({0, 2}, {3}), ({1}, {0})]


@pytest.mark.parametrize("as_list", [False, True])
def test_from_splitter_agrees_with_scikit_learn(as_list):
    from sklearn import model_selection as selection

    X = RNG.normal(size=(13, 2))
    X = X.tolist() if as_list else X
    splitters = [
        (selection.KFold(4, shuffle=True, random_state=SEED), {}),
        (selection.TimeSeriesSplit(3, gap=1), {}),
        (selection.LeaveOneGroupOut(), {"groups": GROUPS}),
        (selection.StratifiedKFold(2), {"y": LABELS}),
        (selection.StratifiedGroupKFold(2), {"y": LABELS, "groups": GROUPS}),
        (selection.LeavePGroupsOut(2), {"groups": GROUPS}),
        (selection.RepeatedKFold(n_splits=3, n_repeats=2, random_state=SEED), {}),
    ]
    for splitter, inputs in splitters:
        folds = from_splitter(splitter, X, **inputs)
        pairs = list(splitter.split(X, **inputs))
        assert len(folds) == len(pairs) and folds.n == 13
        for (train, test), (want_train, want_test) in zip(folds, pairs, strict=True):
            np.testing.assert_array_equal(train, want_train)
            np.testing.assert_array_equal(test, want_test)
        assert type(splitter).__name__ in folds.scheme
    assert np.all(folds.test_weight == 0.5)  # the repeated splitter tests every row twice


def test_own_schemes_agree_with_scikit_learn():
    from sklearn import model_selection as selection

    X = np.zeros((13, 1))
    groups = from_splitter(selection.LeaveOneGroupOut(), X, groups=GROUPS)
    assert sets(leave_group_out(GROUPS)) == sets(groups)
    assert sets(leave_one_out(13)) == sets(from_splitter(selection.LeaveOneOut(), X))
    series = selection.TimeSeriesSplit(4, test_size=2, gap=1, max_train_size=3)
    own = leave_future_out(13, 4, horizon=2, step=2, window=3, gap=1)
    assert sets(own) == sets(from_splitter(series, X))
    predefined = from_splitter(selection.PredefinedSplit(LABELS), X)
    assert sets(from_labels(LABELS)) == sets(predefined)


# Partners


@pytest.mark.parametrize(
    "name",
    [
        "leave_one_out",
        "k_fold",
        "stratified_k_fold",
        "from_labels",
        "leave_group_out",
        "group_k_fold",
        "spatial_block",
    ],
)
def test_partner_is_the_full_data_where_nothing_is_left_over(name):
    folds = SCHEMES[name][0]()
    np.testing.assert_array_equal(folds.partner, len(folds))
    np.testing.assert_array_equal(folds[1:].partner, len(folds) - 1)


def test_partner_in_leave_future_out():
    assert leave_future_out(8, 3).partner.tolist() == [1, 2, 3, 4, 5]
    assert leave_future_out(8, 3, horizon=2).partner.tolist() == [2, 3, -1, 4]
    assert leave_future_out(9, 3, horizon=2, step=2).partner.tolist() == [1, 2, 3]
    assert leave_future_out(10, 3, horizon=2, step=2).partner.tolist() == [1, 2, -1]
    assert leave_future_out(8, 3, gap=1).partner.tolist() == [-1] * 4
    assert leave_future_out(8, 3, window=2).partner.tolist() == [-1] * 5
    # A window that is not full at first: [0, 2) and row 2 are [0, 3), then it starts to slide.
    assert leave_future_out(8, 2, window=4).partner.tolist() == [1, 2, -1, -1, -1, -1]


def test_partner_follows_positions_in_subsets():
    folds = leave_future_out(8, 3)
    assert folds[[2, 1, 0]].partner.tolist() == [-1, 0, 1]
    assert folds[[0, 2, 4]].partner.tolist() == [-1, -1, 3]


def test_partner_in_block_schemes():
    assert np.all(h_block(15, 2).partner == -1)
    assert np.all(hv_block(17, 2, 1).partner == -1)
    assert np.all(h_block(15, 0).partner == 15)
    assert np.all(hv_block(15, 0, 2).partner == 11)


@pytest.mark.parametrize(
    ("pairs", "partner"),
    [
        ([("012", "34"), ("01234", "5")], [1, -1]),
        ([("012", "34"), ("0123", "4"), ("01234", "5")], [2, -1, -1]),  # shared: only the first
        ([("012", "34"), ("01234", "5"), ("01234", "6")], [1, -1, -1]),  # two candidates: the first
        ([("012", "4"), ("01234", "5")], [-1, -1]),  # a gap
        ([("01", "24"), ("01234", "5")], [-1, -1]),  # the test rows are not a run
        ([("02", "34"), ("01234", "5")], [-1, -1]),  # this fold has a dropped row
        ([("012", "34"), ("0124", "5")], [-1, -1]),  # the other fold has a dropped row
        ([("12", "34"), ("01234", "5")], [-1, -1]),  # starts elsewhere
    ],
)
def test_partner_needs_plain_intervals(pairs, partner):
    pairs = [([int(i) for i in train], [int(i) for i in test]) for train, test in pairs]
    assert from_splits(pairs, 10).partner.tolist() == partner


# Size


@pytest.mark.parametrize(
    "make", [lambda: leave_one_out(20_000), lambda: leave_future_out(20_000, 100)]
)
def test_large_schemes_are_small_and_fast(make):
    start = time.perf_counter()
    folds = make()
    assert len(folds.partner) == len(folds) == 2 * len(folds[::2])
    assert time.perf_counter() - start < 1.0
    assert len(folds) >= 19_900
    assert sum(array.nbytes for array in arrays(folds)) < 10e6


def test_large_numbers_of_rows_take_wide_integers():
    folds = leave_future_out(3_000_000_000, 2_999_999_990, window=5)
    assert folds.test_rows.dtype == folds.train_start.dtype == np.int64
    assert folds.test(-1).tolist() == [2_999_999_999]
    assert folds.train(0).tolist() == list(range(2_999_999_985, 2_999_999_990))


# Errors

NAN_GROUPS = np.array([1.0, np.nan, 2.0])
BAD_CALLS = [
    (lambda: leave_one_out(1), ValueError, r"n must be a whole number of at least 2, got 1"),
    (
        lambda: leave_one_out(3.0),
        TypeError,
        r"n must be a whole number of at least 2, got 3.0 \(float\)",
    ),
    (lambda: leave_one_out(True), TypeError, r"n must be a whole number .* \(bool\)"),
    (lambda: k_fold(10, 12), ValueError, r"k=12 folds need at least 12 rows, but n=10; .* k <= 10"),
    (lambda: k_fold(10, 1), ValueError, r"k must be a whole number of at least 2, got 1"),
    (
        lambda: k_fold(10, 2, seed=None),
        TypeError,
        r"seed must be a whole number of at least 0, got None",
    ),
    (
        lambda: k_fold(10, 2, seed=-1),
        ValueError,
        r"seed must be a whole number of at least 0, got -1",
    ),
    (lambda: stratified_k_fold([1, 2, 1], 4), ValueError, r"k=4 folds need .* n=3; choose k <= 3"),
    (lambda: stratified_k_fold([], 2), ValueError, r"labels must cover at least 2 rows, got 0"),
    (lambda: from_labels([0.0, 1.0]), TypeError, r"labels must be integers, .* got float64"),
    (lambda: from_labels([True, False]), TypeError, r"labels must be integers, .* got bool"),
    (lambda: from_labels([4, 4, 4]), ValueError, r"at least 2 distinct values.* all 3 rows have 4"),
    (lambda: leave_group_out(["a", "a"]), ValueError, r"groups .* all 2 rows have a"),
    (lambda: leave_group_out(GROUPS, n=14), ValueError, r"got 13 labels, but n=14"),
    (lambda: leave_group_out(GROUPS, n=12), ValueError, r"got 13 labels, but n=12"),
    (lambda: leave_group_out("abc"), ValueError, r"groups must be 1-D.* got shape \(\)"),
    (lambda: leave_group_out([[1, 2], [3, 4]]), ValueError, r"must be 1-D.* shape \(2, 2\)"),
    (
        lambda: leave_group_out(NAN_GROUPS),
        ValueError,
        r"no missing values, but row 1 has one \(1 in",
    ),
    (lambda: leave_group_out(["a", np.nan, "b"]), ValueError, r"missing values, but row 1 has"),
    (lambda: leave_group_out([1, 2, None, None]), ValueError, r"row 2 has one \(2 in total\)"),
    (
        lambda: leave_group_out(np.array(["2020-01-01", "NaT"], dtype="datetime64[D]")),
        ValueError,
        r"no missing values, but row 1",
    ),
    (
        lambda: leave_group_out(np.ma.masked_equal([1, 2, 9], 9)),
        ValueError,
        r"no missing values, but row 2",
    ),
    (lambda: leave_group_out(["1", 1]), TypeError, r"one kind that can be sorted, got int, str"),
    (lambda: group_k_fold(GROUPS, 6), ValueError, r"at least 6 groups, but there are 5; .* k <= 5"),
    (
        lambda: leave_future_out(9, 0),
        ValueError,
        r"start must be a whole number of at least 1, got 0",
    ),
    (
        lambda: leave_future_out(9, 1, horizon=0),
        ValueError,
        r"horizon must be a whole number of at least 1",
    ),
    (
        lambda: leave_future_out(9, 1, step=0),
        ValueError,
        r"step must be a whole number of at least 1",
    ),
    (
        lambda: leave_future_out(9, 1, window=0),
        ValueError,
        r"window must be a whole number of at least 1",
    ),
    (
        lambda: leave_future_out(9, 1, gap=-1),
        ValueError,
        r"gap must be a whole number of at least 0",
    ),
    (
        lambda: leave_future_out(9, 6, 2, gap=2),
        ValueError,
        r"gap=2 and horizon=2 add .* 10 and n=9",
    ),
    (lambda: h_block(9, -1), ValueError, r"h must be a whole number of at least 0, got -1"),
    (lambda: h_block(9, 4), ValueError, r"up to 9 rows, so at least 10 .* n=9; choose h \+ v <= 3"),
    (lambda: hv_block(9, 2, 2), ValueError, r"up to 9 rows.* but n=9"),
    (lambda: hv_block(9, 2, -1), ValueError, r"v must be a whole number of at least 0, got -1"),
    (lambda: spatial_block(POINTS, 41), ValueError, r"k=41 folds need at least 41 rows, but n=40"),
    (lambda: spatial_block(POINTS[:, 0], 2), ValueError, r"coordinates must be \(n, p\).*\(40,\)"),
    (lambda: spatial_block(POINTS[:1], 2), ValueError, r"coordinates must cover at least 2 rows"),
    (lambda: spatial_block([[0.0], [np.inf]], 2), ValueError, r"must be finite, but row 1 is"),
    (lambda: spatial_block(np.zeros((5, 2)), 2), ValueError, r"k=2 blocks .* coordinates has 1"),
    (lambda: spatial_block(POINTS, 3, -1.0), ValueError, r"buffer must be a finite .* got -1.0"),
    (lambda: spatial_block(POINTS, 3, np.nan), ValueError, r"buffer must be a finite .* got nan"),
    (lambda: spatial_block(POINTS, 3, "1"), TypeError, r"buffer must be a number, got '1'"),
    (lambda: spatial_block(POINTS, 3, 1e9), ValueError, r"fold 0 \(named 0\) has no training rows"),
    (lambda: from_splits([], 5), ValueError, r"at least one split, got none"),
    (lambda: from_splits([([0], [1]), ([0, 1], [1])], 3), ValueError, r"row 1 does in fold 1"),
    (lambda: from_splits([([0], [])], 3), ValueError, r"fold 0 \(named 0\) has no test rows"),
    (lambda: from_splits([([0], [1]), ([], [1])], 3), ValueError, r"fold 1 .* no training rows"),
    (lambda: from_splits([([0], [3])], 3), ValueError, r"test rows of fold 0 .* = 2, but row 3"),
    (lambda: from_splits([([-1], [0])], 3), ValueError, r"train rows of fold 0 .* but row -1"),
    (lambda: from_splits([([0, 0], [1])], 3), ValueError, r"train .* row 0 occurs 2 times"),
    (lambda: from_splits([([0], [1, 1])], 3), ValueError, r"test rows .* row 1 occurs 2 times"),
    (lambda: from_splits([([0.5], [1])], 3), TypeError, r"train rows of fold 0 .* got float64"),
    (lambda: from_splits([([True], [1])], 3), ValueError, r"mask must have length n=3, got 1"),
    (lambda: from_splits([([[0]], [1])], 3), ValueError, r"must be 1-D, got shape \(1, 1\)"),
    (lambda: from_splits([([0], [1], [2])], 3), TypeError, r"split 0 is a tuple that does not"),
    (lambda: from_splits([7], 3), TypeError, r"pair \(train, test\), but split 0 is a int"),
    (lambda: from_splitter([([0], [1])], [0, 1]), TypeError, r"but list has none; use from_splits"),
    (lambda: leave_one_out(4).sample(5, 0), ValueError, r"m=5 distinct .* choose m <= 4"),
    (
        lambda: leave_one_out(4).sample(0, 0),
        ValueError,
        r"m must be a whole number of at least 1, got 0",
    ),
    (lambda: leave_one_out(4)[4], IndexError, r"fold position 4 is out of range for 4 folds"),
    (lambda: leave_one_out(4)[[0, -5]], IndexError, r"fold position -5 is out of range"),
    (lambda: leave_one_out(4)[4:], ValueError, r"must keep at least one fold.* none of 4"),
    (lambda: leave_one_out(4)[[]], ValueError, r"must keep at least one fold"),
    (lambda: leave_one_out(4)[[1, -3]], ValueError, r"2 positions name only 1 distinct"),
    (lambda: leave_one_out(4)[[True]], IndexError, r"got 1 entries for 4 folds"),
    (lambda: leave_one_out(4)[["a"]], TypeError, r"must be integers or booleans.*np.isin"),
    (lambda: leave_one_out(4)["a"], TypeError, r"must be a 1-D list, got shape \(\)"),
    (lambda: leave_one_out(4)[True], TypeError, r"must be a 1-D list, got shape \(\)"),
    (lambda: leave_one_out(4).train(4), IndexError, r"out of range for 4 folds"),
    (lambda: leave_one_out(4).test(1.0), TypeError, r"must be integers"),
    (lambda: k_fold(9, 3).padded_test([0, 1], 2), ValueError, r"width=2 .* choose width >= 3"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS, ids=[m for _, _, m in BAD_CALLS])
def test_bad_inputs(call, error, message):
    with pytest.raises(error, match=message):
        call()


GOOD = {
    "n": 6,
    "names": np.array(["a", "b"]),
    "test": (np.array([0, 1, 3]), np.array([0, 1, 5])),
    "train_interval": (np.array([0, 2]), np.array([3, 5])),
    "dropped": (np.array([0, 1, 1]), np.array([0])),
    "scheme": "by hand",
}
BAD_PARTS = [
    ({"names": np.array([])}, ValueError, r"by hand: there must be at least one fold"),
    (
        {"test": (np.array([0, 1, 3]), np.array([0, 1, 6]))},
        ValueError,
        r"b\) .* \[0, 6\), but row 6",
    ),
    ({"test": (np.array([0, 1, 3]), np.array([-1, 1, 5]))}, ValueError, r"a\) .* but row -1"),
    (
        {"test": (np.array([0, 1, 3]), np.array([0, 5, 5]))},
        ValueError,
        r"unique .* 5 follows row 5",
    ),
    ({"test": (np.array([0, 1, 3]), np.array([0, 5, 1]))}, ValueError, r"ascending, but row 1"),
    (
        {"test": (np.array([0, 1, 3]), np.array([0.0, 1, 5]))},
        TypeError,
        r"test rows must be integers",
    ),
    (
        {"test": (np.array([0, 0, 2]), np.array([1, 5]))},
        ValueError,
        r"\(named a\) has no test rows",
    ),
    ({"test": (np.array([0, 1, 3]), np.array([1, 1, 5]))}, ValueError, r"row 1 does in fold 0"),
    ({"test": (np.array([0, 1, 3]), np.array([0, 1, 4]))}, ValueError, r"row 4 does in fold 1"),
    (
        {"dropped": (np.array([0, 1, 2]), np.array([0, 5]))},
        ValueError,
        r"dropped .* \[2, 5\), but row 5",
    ),
    (
        {"dropped": (np.array([0, 3, 3]), np.array([0, 1, 2]))},
        ValueError,
        r"a\) has no training rows",
    ),
    (
        {"dropped": (np.array([0, 1, 1]), np.array([0.0]))},
        TypeError,
        r"dropped rows must be integers",
    ),
    ({"train_interval": (np.array([0, 2]), np.array([3, 7]))}, ValueError, r"b\) has \[2, 7\)"),
    ({"train_interval": (np.array([0, 5]), np.array([3, 4]))}, ValueError, r"b\) has \[5, 4\)"),
    ({"train_interval": (np.array([-1, 2]), np.array([3, 5]))}, ValueError, r"a\) has \[-1, 3\)"),
    (
        {"train_interval": (np.array([0.0, 2]), np.array([3, 5]))},
        TypeError,
        r"train start must be integers, got float64",
    ),
]


def test_make_accepts_sound_parts():
    assert sets(make_folds(**GOOD)) == [({1, 2}, {0}), ({2, 3, 4}, {1, 5})]


@pytest.mark.parametrize(("parts", "error", "message"), BAD_PARTS, ids=[m for _, _, m in BAD_PARTS])
def test_make_refuses_unsound_parts(parts, error, message):
    with pytest.raises(error, match=message):
        make_folds(**(GOOD | parts))


# leave_group_out over 6 rows: fold a tests 0 and 3, b tests 1 and 4, c tests 2 and 5
THREE = leave_group_out(["a", "b", "c", "a", "b", "c"])
BY_HAND = [
    ({"test_weight": -THREE.test_weight}, ValueError, r"and finite, but row 0 .* -1.0 \(6"),
    ({"test_weight": np.zeros(6)}, ValueError, r"weights of test rows must be positive"),
    ({"test_weight": [1, 1, 1, 1, np.nan, 1]}, ValueError, r"row 2 of fold 2 \(named c\) has nan"),
    ({"test_weight": [1, 1, 1, 1, 1, np.inf]}, ValueError, r"row 5 .* has inf \(1 such"),
    ({"test_weight": np.full(6, True)}, TypeError, r"test_weight must be numbers, got bool"),
    ({"test_weight": np.ones(5)}, ValueError, r"test_weight must have length 6 .* but has 5"),
    ({"test_weight": np.ones((6, 1))}, ValueError, r"test_weight must have one axis.*\(6, 1\)"),
    ({"test_rows": [1, 3, 1, 4, 2, 5]}, ValueError, r"both train and test .* row 1 does in fold 0"),
    ({"test_rows": [0, 3, 1, 4, 2, 6]}, ValueError, r"c\) must lie in \[0, 6\), but row 6 does"),
    ({"test_rows": [-1, 3, 1, 4, 2, 5]}, ValueError, r"must lie in \[0, 6\), but row -1 does"),
    ({"test_rows": [3, 0, 1, 4, 2, 5]}, ValueError, r"ascending, but row 0 follows row 3"),
    ({"test_rows": [0, 0, 1, 4, 2, 5]}, ValueError, r"ascending, but row 0 follows row 0"),
    ({"test_rows": [0.0, 3, 1, 4, 2, 5]}, TypeError, r"test rows must be integers, got float64"),
    ({"test_rows": np.uint64([0, 2**63, 1, 4, 2, 5])}, ValueError, r"must be below 2\*\*63"),
    (
        {"test_start": [0, 2, 2, 4], "test_rows": [0, 3, 2, 5], "test_weight": np.ones(4)},
        ValueError,
        r"fold 1 \(named b\) has no test rows",
    ),
    ({"test_start": [0, 4, 2, 6]}, ValueError, r"must rise from 0 .* falling in between"),
    ({"test_start": [0, 2, 4, 5]}, ValueError, r"to the 6 entries .* goes from 0 to 5"),
    ({"test_start": [1, 2, 4, 6]}, ValueError, r"to the 6 entries .* goes from 1 to 6"),
    ({"test_start": [0, 2, 6]}, ValueError, r"test_start must have length 4 .* but has 3"),
    ({"dropped_start": [0, 2, 4, 4]}, ValueError, r"dropped_start must rise from 0 to the 6"),
    ({"dropped_rows": [0, 2, 1, 4, 2, 5]}, ValueError, r"row 3 does in fold 0 \(named a\)"),
    ({"dropped_rows": [0, 3, 1, 4, 2, 9]}, ValueError, r"dropped rows .* but row 9 does not"),
    ({"train_start": [0, 0, 5], "train_stop": [6, 6, 6]}, ValueError, r"dropped rows .* row 2"),
    ({"train_stop": [6, 6, 7]}, ValueError, r"train intervals must lie within .* has \[0, 7\)"),
    ({"train_start": [0, 0]}, ValueError, r"train_start must have length 3 .* but has 2"),
    ({"n": 5}, ValueError, r"train intervals must lie within the rows 0 to 4"),
    ({"n": 6.0}, TypeError, r"n must be a whole number"),
    ({"names": np.array(["a", "b"])}, ValueError, r"index must have length 2 .* but has 3"),
    ({"index": [0, 1, 1]}, ValueError, r"3 folds have 2 numbers"),
    ({"index": [0, 1, -1]}, ValueError, r"index must give each fold a number.* the least -1"),
    ({"index": [0, 1, 0.5]}, TypeError, r"index must be integers"),
    ({"largest_test": 1}, ValueError, r"largest_test must be at least .* 2, but is 1"),
    ({"pointwise": "no"}, TypeError, r"pointwise must be True or False, got 'no'"),
    ({"scheme": None}, TypeError, r"scheme must be text"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BY_HAND, ids=[m for _, _, m in BY_HAND])
def test_folds_by_hand_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        replace(THREE, **changes)


def test_folds_by_hand_take_lists_and_small_integers():
    changes = {"test_rows": [0, 3, 1, 4, 2, 5], "train_stop": np.uint8([6, 6, 6])}
    again = replace(THREE, **changes, largest_test=0, test_weight=[1, 2, 1, 2, 1, 2])
    assert sets(again) == sets(THREE) and again.largest_test == 2
    assert again.train_stop.dtype == np.int32 and again.test_weight.dtype == np.float64


def test_folds_keep_no_array_that_others_can_write_to():
    weight = np.ones(6)
    folds = replace(THREE, test_weight=weight)
    weight[0] = -1.0
    assert folds.test_weight[0] == 1.0
