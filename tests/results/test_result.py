"""What a result says of itself: its first score, its flags, calibration."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from by_hand import A, make

from foldwise.results.result import FoldWarning, flags, warn_of_flags


def test_attributes_are_those_of_the_first_score():
    result = make(A, more_scores=("log_pointwise",))
    first = result.score("log")
    other = replace(first, name="log_pointwise", total=0.0, se=0.5, mcse=0.2, optimism=9.0)
    result.scores["log_pointwise"] = replace(other, folds=first.folds.copy())
    for name, value in (
        ("elpd", "total"),
        ("se", "se"),
        ("mcse", "mcse"),
        ("optimism", "optimism"),
    ):
        assert getattr(result, name) == getattr(first, value)
    assert result.elpd == -10.0 and result.folds is first.folds and result.rows is None
    with pytest.raises(ValueError, match=r"has the scores log, log_pointwise, but 'crps' was"):
        result.score("crps")


def test_flagged_folds_are_those_that_are_not_fine():
    status = ["fine", "stuck chain", "fine", "too slow"]
    result = make(A, status=status, names=list("wxyz"))
    assert result.flagged["fold"].values.tolist() == ["x", "z"]
    count, lines = flags(result)
    assert count == 2 and [line.split(":")[0] for line in lines] == ["stuck chain", "too slow"]
    with pytest.warns(FoldWarning, match=r"2 of 4 folds flagged: stuck chain: 1 of 4 folds \(x\)"):
        warn_of_flags(result)


def test_slow_chains_of_a_random_walk_are_told_what_to_do():
    """Where most folds are hampered, and leave out the future of parameters in a chain."""
    bad = ["too slow", "chains disagree", "fine", "others in trouble"]
    few = ["too slow", "fine", "fine", "fine"]
    for status, share, said in ((bad, 1.0, True), (bad, 0.25, False), (few, 1.0, False)):
        result = make(A, status=status)
        lines = flags(replace(result, info={**result.info, "tied_future": share}))[1]
        assert any("non-centred form" in line for line in lines) == said
    assert not any("non-centred form" in line for line in flags(make(A, status=bad))[1])


def test_flags_of_other_scores_are_named_where_they_are_new():
    result = make(A, status=["fine", "stuck chain", "fine", "fine"], more_scores=("log_pointwise",))
    table = result.folds.copy(deep=True)
    table["status"].values[:] = ["no spread", "stuck chain", "fine", "fine"]
    other = replace(result.score("log_pointwise"), folds=table)
    count, lines = flags(replace(result, scores={**result.scores, "log_pointwise": other}))
    assert count == len(lines) == 2
    assert lines[1].startswith("log_pointwise, no spread: 1 of 4 folds (0)")


def calibrated(below, equal, mcse, weight, row):
    columns = {"below": below, "equal": equal, "mcse": mcse, "weight": weight}
    table = {name: ("test_row", np.asarray(values, float)) for name, values in columns.items()}
    return replace(make(A), calibration=xr.Dataset(table, coords={"row": ("test_row", row)}))


def test_pit_of_discrete_values_is_spread_over_their_probability():
    result = calibrated([0.1] * 2000, [0.4] * 2000, [0] * 2000, [1] * 2000, np.arange(2000))
    pit = result.pit(seed=1).values
    assert pit.min() > 0.1 and pit.max() < 0.5 and pit.mean() == pytest.approx(0.3, abs=0.01)
    np.testing.assert_array_equal(result.pit(seed=1).values, pit)
    assert not np.array_equal(result.pit(seed=2).values, pit)


def test_coverage_by_hand():
    """Five entries of four rows; row 3 is tested twice, each time with weight one half."""
    below, weight = [0.5, 0.2, 0.9, 0.4, 0.99], [1.0, 1.0, 1.0, 0.5, 0.5]
    result = calibrated(below, [0] * 5, [0.0, 0.0, 0.05, 0.0, 0.0], weight, [0, 1, 2, 3, 3])
    table = result.coverage(levels=(0.5, 0.8))
    assert table["covered"].tolist() == pytest.approx([1.5 / 4, 3.5 / 4])
    assert table["se"].tolist() == pytest.approx(
        [np.sqrt(c * (1 - c) / 4) for c in (1.5 / 4, 3.5 / 4)]
    )
    # 0.9 is at the very end of the central 80 %: it might as well be outside
    assert table["mcse"].iloc[1] == pytest.approx(np.sqrt(0.5) / 4, rel=1e-6)
    with pytest.raises(ValueError, match="between 0 and 1, got 80"):
        result.coverage(levels=(80,))


def test_calibration_needs_predictive_draws():
    for ask in (make(A).pit, make(A).coverage):
        with pytest.raises(ValueError, match='need predictive draws.*scores=\\("log", "crps"\\)'):
            ask()
