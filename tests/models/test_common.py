"""Rows of several observed variables: stacked, joined by number, refused."""

import numpy as np
import pytest

from foldwise.models.common import row_numbers, sum_by_row

SIZES = {"events": 2, "censored": 3, "other": 4}


def test_rows_end_to_end():
    n_obs, numbers = row_numbers({"censored": None, "events": None}, SIZES)
    assert n_obs == 5
    assert {name: list(v) for name, v in numbers.items()} == {
        "censored": [0, 1, 2],
        "events": [3, 4],
    }
    entries = {"events": np.array([1.0, 2.0]), "censored": np.array([3.0, 4.0, 5.0])}
    assert sum_by_row(entries, numbers, n_obs).tolist() == [3.0, 4.0, 5.0, 1.0, 2.0]


def test_rows_joined_by_number():
    rows = {"events": [2, 0], "censored": np.array([1, 0, 0])}
    n_obs, numbers = row_numbers(rows, SIZES)
    assert n_obs == 3
    entries = {"events": np.array([1.0, 2.0]), "censored": np.array([3.0, 4.0, 5.0])}
    assert sum_by_row(entries, numbers, n_obs).tolist() == [11.0, 3.0, 1.0]


@pytest.mark.parametrize(
    "rows, error, match",
    [
        ({}, ValueError, "at least one observed variable"),
        ({"odd": None}, ValueError, "observed variables, events, censored, other; got 'odd'"),
        ({"events": [0, 1], "censored": None}, ValueError, "'censored' has none and others have"),
        ({"events": [0, 1, 2]}, ValueError, r"each of the 2 entries .* got shape \(3,\)"),
        ({"events": [0.0, 1.0]}, TypeError, "whole numbers, .* got float64"),
        ({"events": [0, -1]}, ValueError, "at least 0; got -1"),
        (
            {"events": [0, 3], "censored": [1, 1, 4]},
            ValueError,
            "each must occur .* but 2 does not",
        ),
    ],
)
def test_refused_row_numbers(rows, error, match):
    with pytest.raises(error, match=match):
        row_numbers(rows, SIZES)
