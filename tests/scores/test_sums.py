"""Running sums agree with sums over stored draws, however the draws arrive."""

import numpy as np
import pytest
from scipy.special import expit, logsumexp

from foldwise.folds.ragged import concatenated_ranges
from foldwise.scores.sums import BLOCKS, GRID, TAIL, BlockSums, RunningSums, block_length

MEMBERS = np.arange(3)


def feed(sums, scores, pieces, rows=None):
    first = 0
    for size in pieces:
        part = slice(first, first + size)
        sums.update(MEMBERS, scores[:, :, part], None if rows is None else rows[:, :, part])
        first += size
    assert first == scores.shape[2]


@pytest.mark.parametrize("draws", [10, 95, 640, 641, 1300, 5000])
@pytest.mark.parametrize("piece", [7, 50, 640])
def test_block_sums(rng, draws, piece):
    scores = rng.normal(-300.0, 2.0, size=(3, 2, draws, 1))
    sums = RunningSums.empty(3, 2, batch=10)
    feed(sums, scores, [piece] * (draws // piece) + ([draws % piece] if draws % piece else []))
    length = block_length(draws, 10)
    assert sums.length == length and sums.full_blocks == draws // length <= BLOCKS
    assert sums.block_draws.sum() == draws
    own = scores[..., 0]
    for block in range(sums.full_blocks):
        inside = own[:, :, block * length : (block + 1) * length]
        np.testing.assert_allclose(sums.log_sum[:, :, block], logsumexp(inside, axis=2))
        centred = inside - sums.centre[:, None, None]
        np.testing.assert_allclose(sums.total[:, :, block], centred.sum(axis=2), atol=1e-9)
        np.testing.assert_allclose(sums.square[:, :, block], (centred**2).sum(axis=2))
    np.testing.assert_allclose(logsumexp(sums.log_sum, axis=2), logsumexp(own, axis=2))
    np.testing.assert_allclose(sums.log_square, logsumexp(2 * own, axis=2))
    largest = np.sort(own.reshape(3, -1), axis=1)[:, -min(TAIL, 2 * draws) :]
    np.testing.assert_array_equal(np.sort(sums.largest, axis=1)[:, -largest.shape[1] :], largest)


def test_block_length_doubles_when_blocks_are_full():
    assert block_length(640, 10) == 10
    assert block_length(641, 10) == 20
    assert block_length(1281, 10) == 40


def test_rows_and_grid(rng):
    draws = 1000
    scores = rng.normal(-5.0, 1.0, size=(3, 2, draws, 2))
    rows = rng.normal(-1.0, 1.0, size=(7, 2, draws))
    nodes = np.stack([-5.0 + GRID, -4.0 + GRID])[None].repeat(3, axis=0)
    sums = RunningSums.empty(3, 2, 10, row_start=np.array([0, 2, 3, 7]), nodes=nodes)
    feed(sums, scores, [50] * 20, rows)
    length = sums.length
    np.testing.assert_allclose(
        sums.row_log_sum[:, :, 3], logsumexp(rows[:, :, 3 * length : 4 * length], axis=2)
    )
    np.testing.assert_allclose(sums.row_log_square, logsumexp(2 * rows, axis=2))
    own = expit(scores[..., 0, None] - nodes[:, 0][:, None, None, :])
    other = expit(nodes[:, 1][:, None, None, :] - scores[..., 1, None])
    np.testing.assert_allclose(sums.grid[:, 0].sum(axis=2), own.sum(axis=2))
    np.testing.assert_allclose(sums.grid[:, 1].sum(axis=2), other.sum(axis=2))
    np.testing.assert_allclose(sums.grid_square[:, 1], (other**2).sum(axis=2))
    inside = own[:, :, 2 * length : 3 * length].sum(axis=2)
    np.testing.assert_allclose(sums.grid[:, 0, :, 2], inside)


def test_values_that_are_not_finite_are_counted(rng):
    scores = rng.normal(size=(3, 2, 50, 1))
    scores[0, 0, 3], scores[1, 1, 4], scores[1, 0, 0] = -np.inf, np.nan, np.inf
    sums = RunningSums.empty(3, 2, 10)
    sums.update(MEMBERS, scores)
    np.testing.assert_array_equal(sums.not_finite, [1, 2, 0])
    np.testing.assert_array_equal(sums.undefined, [0, 2, 0])
    # a density of zero is a number: it enters the sum as nothing
    assert np.isfinite(sums.log_sum[0, :, :5]).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("draws, piece", [(95, 7), (640, 640), (1300, 50)])
def test_sums_of_contributions(rng, draws, piece, weighted):
    # folds of 2, 1 and 3 units, the last two folds fed apart from the first
    start = np.array([0, 2, 3, 6])
    values = rng.normal(size=(6, 2, draws, 3))
    # weights far from one, and a largest that comes late
    log_weight = rng.normal(-2000.0, 30.0, size=(6, 2, draws)) if weighted else None
    sums = BlockSums.empty(start, 2, batch=10)
    for members in (np.array([0]), np.array([1, 2])):
        units = concatenated_ranges(start, members)
        for first in range(0, draws, piece):
            part = slice(first, first + piece)
            weight = None if log_weight is None else log_weight[units][:, :, part]
            sums.update(members, values[units][:, :, part], weight)
    assert (sums.draws == draws).all() and sums.total.shape[2] <= BLOCKS
    length = block_length(draws, 10)
    expected = values
    if log_weight is not None:
        largest = log_weight.max(axis=(1, 2), keepdims=True)
        np.testing.assert_allclose(sums.shift, largest[:, 0, 0])
        expected = values * np.exp(log_weight - largest)[..., None]
    for block in range(-(-draws // length)):
        inside = expected[:, :, block * length : (block + 1) * length].sum(axis=2)
        np.testing.assert_allclose(sums.total[:, :, block], inside, rtol=1e-9, atol=1e-12)


def test_weights_that_are_all_zero_stay_so():
    sums = BlockSums.empty(np.array([0, 1]), 2, batch=2)
    nothing = np.full((1, 2, 4), -np.inf)
    sums.update(np.array([0]), np.ones((1, 2, 4, 1)), nothing)
    assert (sums.total == 0).all()
    sums.update(np.array([0]), np.ones((1, 2, 2, 1)), np.zeros((1, 2, 2)))
    assert sums.total.sum() == 4 and sums.shift[0] == 0


def test_concatenated_ranges():
    start = np.array([0, 2, 2, 5])
    assert concatenated_ranges(start, np.array([2, 0])).tolist() == [2, 3, 4, 0, 1]
    assert concatenated_ranges(start, np.array([1])).tolist() == []
