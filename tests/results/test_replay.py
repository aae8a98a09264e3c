"""Results over the first draws of a run are those of a shorter run."""

import numpy as np
import problems
import pytest

import foldwise as fw
from foldwise.results.extend import extend
from foldwise.results.replay import first_draws, recorded


def data(line):
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def same(one, two, tolerance=1e-8):
    for name in ("total", "se", "mcse", "ess", "optimism"):
        value, other = getattr(one, name), getattr(two, name)
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance, err_msg=name)
    for name in one.folds:
        if one.folds[name].dtype.kind == "f":
            np.testing.assert_allclose(
                one.folds[name], two.folds[name], rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.mark.parametrize("score", ["log", "crps", "mse"])
def test_all_draws_give_the_result_itself(pair, score):
    found = first_draws(pair[0], 160, score)
    assert set(found.folds) < set(pair[0].score(score).folds)
    assert list(found.scores) == [score]
    same(found.score(score), pair[0].score(score))


@pytest.mark.parametrize("name", ["five_fold", "autoregression"])
def test_first_draws_are_those_of_a_shorter_run(run, name, seed):
    short, long = (run(name, draws, seed) for draws in (60, 130))
    (score,) = long.scores
    found, expected = first_draws(long, 60).score(score), short.score(score)
    for part in ("total", "se", "mcse"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=1e-8), part
    np.testing.assert_allclose(found.folds["mcse"], expected.folds["mcse"], rtol=1e-7)
    np.testing.assert_allclose(found.folds["rhat"], expected.folds["rhat"], rtol=1e-10)
    assert abs(found.total - long.score(score).total) > 1e-6
    whole = first_draws(long, 130).score(score)
    assert whole.total == pytest.approx(long.score(score).total, rel=1e-9)


def test_first_draws_of_an_extended_run(run, seed):
    short = run("normal_mean", 60, seed, scores="hyvarinen")
    long = extend(short.run, 70, progress=False)
    found = first_draws(long, 60).score("hyvarinen")
    assert found.total == pytest.approx(short.score("hyvarinen").total, rel=1e-9)
    assert found.mcse == pytest.approx(short.score("hyvarinen").mcse, rel=1e-7)


def test_first_draws_use_the_rungs(run, seed):
    result = run("hierarchical", 60, seed)
    assert recorded(result).ladder.rungs
    found = first_draws(result, 60).score("log")
    same(found, result.score("log"))
    half = first_draws(result, 30)
    assert (half.folds["estimator"] == "bridge").all()
    exact = problems.hierarchical().joint().sum()
    assert abs(half.elpd - exact) < 6 * half.mcse


def test_first_draws_of_a_loaded_result(pair, tmp_path):
    pair[0].save(tmp_path / "a.nc")
    loaded = fw.load(tmp_path / "a.nc")
    for score in ("log", "crps"):
        one, two = (first_draws(result, 80, score).score(score) for result in (pair[0], loaded))
        assert one.total == two.total and one.mcse == two.mcse
    drawn = [fw.plot_progress(result, pair[1]).axes[0].lines[0] for result in (pair[0], loaded)]
    np.testing.assert_array_equal(data(drawn[0])[1], data(drawn[1])[1])


def test_first_draws_say_what_they_need(pair, online):
    with pytest.raises(ValueError, match='memory="draws"'):
        first_draws(online, 50)
    with pytest.raises(ValueError, match="at most the 160"):
        first_draws(pair[0], 161)
    with pytest.raises(ValueError, match="a multiple of 10"):
        first_draws(pair[0], 55, "crps")
    with pytest.raises(ValueError, match="whole number"):
        first_draws(pair[0], 0)
    with pytest.raises(ValueError, match="brier"):
        first_draws(pair[0], 50, "brier")
