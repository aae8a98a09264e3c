"""Files whose checksum holds, but whose values no result can have: refused, and why is said."""

from dataclasses import replace

import numpy as np
import pytest

from foldwise.results import files as storage
from foldwise.results.ranges import check_ranges

pytestmark = pytest.mark.fast


def with_column(result, name, value, table="folds"):
    """The result with one value of a column changed."""
    first = next(iter(result.scores))
    old = getattr(result.scores[first], table).copy(deep=True)
    old[name].values[1] = value
    return replace(result, scores={first: replace(result.scores[first], **{table: old})})


def with_score(result, **parts):
    first = next(iter(result.scores))
    return replace(result, scores={first: replace(result.scores[first], **parts)})


def with_test(result, name, value):
    changed = result.test[name].copy()
    changed[1] = value
    return replace(result, test={**result.test, name: changed})


WRONG = {
    "a negative error": (lambda r: with_score(r, mcse=-0.1), "mcse of log_pointwise is -0.1"),
    "of a fold": (lambda r: with_column(r, "mcse", -1.0), "mcse of log_pointwise by fold is -1"),
    "of a row": (lambda r: with_column(r, "mcse", -1.0, "rows"), "by row is -1, outside 0"),
    "acceptance": (lambda r: with_column(r, "acceptance", 1.5), "acceptance .* is 1.5, outside"),
    "no test rows": (lambda r: with_column(r, "n_test", 0), "n_test .* is 0, outside 1"),
    "status": (lambda r: with_column(r, "status", "good"), "status .* is 'good', which is none"),
    "method": (lambda r: with_column(r, "method", "best"), "method .* is 'best', which is none"),
    "text": (lambda r: with_score(r, se="much"), "se of log_pointwise is <U4, not a number"),
    "left out": (lambda r: with_score(r, left_out=6), "left out .* is 6, outside 0 to 5"),
    "influences": (
        lambda r: with_score(r, full_influence=np.zeros(3)),
        r"influences .* has the shape \(3,\)",
    ),
    "a row beyond": (lambda r: with_test(r, "rows", 40), "test rows is 40, outside 0 to 39"),
    "other rows": (lambda r: with_test(r, "rows", 39), "are not the test rows of the folds"),
    "an empty fold": (lambda r: with_test(r, "start", 0), "each of which has some"),
    "a fold beyond": (lambda r: with_test(r, "index", -1), "numbers of the folds are negative"),
    "a fold twice": (lambda r: with_test(r, "index", 0), "or some are the same"),
    "folds": (lambda r: replace(r, mixing=replace(r.mixing, rhat=np.ones(4))), "R-hat has the sh"),
    "R-hat": (lambda r: replace(r, mixing=replace(r.mixing, rhat=-np.ones(5))), "R-hat is -1"),
    "score": (lambda r: replace(r, scores={"luck": r.scores["log_pointwise"]}), "of no score"),
    "chains": (lambda r: replace(r, info={**r.info, "chains": -4}), "chains is -4, not a whole"),
    "estimator": (lambda r: replace(r, info={**r.info, "estimator": "x"}), "estimator is 'x', not"),
    "draws": (lambda r: replace(r, draws=r.draws.T), "draws are .'draw', 'chain', 'fold'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_result_can_have_is_refused(case, by_row, tmp_path):
    change, says = WRONG[case]
    path = storage.save(change(replace(by_row, run=None)), tmp_path / "r.nc")
    with pytest.raises(ValueError, match=rf"r\.nc must hold what a result can be, but .*{says}"):
        storage.load(path)


def test_what_results_have_is_not_refused(loo, by_row):
    for result in (loo, by_row):
        check_ranges(result)
        check_ranges(with_column(result, "mcse", np.nan))
        check_ranges(with_column(result, "ess", np.inf))
