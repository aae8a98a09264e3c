"""Scores and the folds' draws, handed to ArviZ."""

from dataclasses import replace
from inspect import signature

import numpy as np
import problems
import pytest
from problems import by_chains
from stored import Case

import foldwise as fw
from foldwise.results import export

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def kept(prepared, seed):
    problem, model, fit = prepared("five_fold")
    return by_chains(
        model, problem.folds, fit, keep=("position", "predictive"), seed=seed, progress=False
    )


def test_draws_of_the_folds_by_name(prepared, kept, seed):
    problem, model, fit = prepared("five_fold")
    tree = kept.to_datatree()
    posterior, predictive = tree["posterior"].to_dataset(), tree["posterior_predictive"]
    assert dict(posterior.sizes) == {"fold": 5, "chain": 4, "draw": 100, "position_dim_0": 4}
    for k, (train, _) in enumerate(problem.folds):
        X = problem.X[train] / problem.noise
        covariance = np.linalg.inv(X.T @ X + np.diag(problem.prior**-2.0))
        mean = covariance @ X.T @ problem.y[train] / problem.noise
        found = posterior["position"].isel(fold=k).values.reshape(-1, 4)
        sd = np.sqrt(np.diag(covariance))
        # 400 draws with autocorrelation times of at most 4
        assert (np.abs(found.mean(axis=0) - mean) < 4 * sd / np.sqrt(100)).all()
    assert predictive["y"].dims == ("chain", "draw", "test_row")
    np.testing.assert_array_equal(predictive["row"], problem.folds.test_rows)
    np.testing.assert_array_equal(predictive["fold"], np.repeat(np.arange(5), 8))
    residual = predictive["y"].values - np.einsum(
        "cdrk,rk->cdr",
        np.repeat(posterior["position"].transpose("chain", "draw", ...).values, 8, axis=2),
        problem.X[problem.folds.test_rows],
    )
    assert residual.std() == pytest.approx(problem.noise, rel=0.02)
    np.testing.assert_array_equal(tree["observed_data"]["y"], problem.y[problem.folds.test_rows])
    # what is kept does not change what is computed
    plain = by_chains(model, problem.folds, fit, seed=seed, progress=False)
    assert plain.elpd == pytest.approx(kept.elpd, rel=1e-10)


def test_kept_draws_grow_and_are_saved(prepared, kept, tmp_path):
    model = prepared("five_fold")[1]
    kept.save(tmp_path / "kept.nc")
    loaded = fw.load(tmp_path / "kept.nc")
    with pytest.raises(ValueError, match=r"need its model again, result.to_datatree\(model=model"):
        loaded.to_datatree()
    again = loaded.to_datatree(model=model)
    assert again["posterior"].to_dataset().identical(kept.to_datatree()["posterior"].to_dataset())
    longer = loaded.extend(20, model=model, progress=False).to_datatree()
    assert longer["posterior"].sizes["draw"] == longer["posterior_predictive"].sizes["draw"] == 120
    assert np.isfinite(longer["posterior"]["position"]).all()


def test_parameters_are_constrained(seed):
    y = np.random.default_rng(1).normal(size=12)
    model = fw.Model(
        lambda q: -0.5 * q["mu"] ** 2 - 0.5 * q["log_s"] ** 2,
        lambda q: -0.5 * ((y - q["mu"]) / np.e ** q["log_s"]) ** 2 - q["log_s"],
        {"mu": 0.0, "log_s": 0.0},
        12,
        constrain=lambda q: {"mu": q["mu"], "s": np.e ** q["log_s"]},
    )
    found = by_chains(model, fw.k_fold(12, 3), keep="position", seed=seed, progress=False)
    posterior = found.to_datatree()["posterior"]
    assert set(posterior.data_vars) == {"mu", "s"} and (posterior["s"] > 0).all()
    assert "posterior_predictive" not in found.to_datatree()


def test_refusals(prepared):
    problem, model, fit = prepared("five_fold")

    def run(**arguments):
        return by_chains(model, problem.folds, fit, progress=False, seed=1, **arguments)

    with pytest.raises(ValueError, match=r'keep must be one of "position", "predictive"; got'):
        run(keep=("draws",))
    with pytest.raises(ValueError, match='stores draws, but memory="online" keeps none'):
        run(keep="position", memory="online")
    with pytest.raises(ValueError, match=r"kept no draws.*keep=\(\"position\", \"predictive\"\)"):
        run().to_datatree()


# ---------------------------------------------------------------- scores


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # arviz-stats 0.8 with pandas 3.1
def test_arviz_compares_two_results(regression, loo):
    import arviz_stats

    problem = regression.problem
    smaller = Case.of(replace(problem, X=problem.X[:, :2], prior=problem.prior[:2], name="small"))
    other = smaller.run(seed=6)
    # ArviZ 1.x rounds unless told not to, and its differences are negative where 0.8's are positive
    whole = {"round_to": "none"} if "round_to" in signature(arviz_stats.compare).parameters else {}
    table = arviz_stats.compare({"a": loo.to_arviz(), "b": other.to_arviz()}, **whole)
    assert list(table.index) == ["a", "b"]
    assert abs(table.loc["b", "elpd_diff"]) == pytest.approx(loo.elpd - other.elpd, rel=1e-12)
    assert loo.elpd - other.elpd > 5
    np.testing.assert_allclose(table["elpd"], [loo.elpd, other.elpd], rtol=1e-12)
    np.testing.assert_allclose(table["se"], [loo.se, other.se], rtol=1e-12)
    np.testing.assert_allclose(table["p"], [loo.optimism, other.optimism], rtol=1e-12)


def test_arviz_takes_folds_of_a_joint_score(loo):
    found = export.to_arviz(loo)
    assert found.kind == "loo_kfold"
    assert (found.n_samples, found.n_data_points, found.n_folds) == (240, 40, 40)
    assert (found.scale, found.good_k, found.warning) == ("log", 0.7, False)
    assert found.elpd_i.dims == found.pareto_k.dims == ("fold",)
    np.testing.assert_array_equal(found.elpd_i, loo.folds["elpd"])
    np.testing.assert_array_equal(found.elpd_i["fold"], loo.folds["fold"])
    np.testing.assert_array_equal(found.pareto_k, loo.folds["pareto_k"])
    assert "40-fold" in str(found)


def test_arviz_takes_rows_of_a_score_by_row(by_row):
    found = export.to_arviz(by_row)
    assert (found.n_data_points, found.n_folds) == (40, 5)
    assert found.elpd_i.dims == found.pareto_k.dims == ("row",)
    np.testing.assert_array_equal(found.elpd_i["row"], np.arange(40))
    order = np.argsort(by_row.rows["row"].values)
    np.testing.assert_array_equal(found.elpd_i, by_row.rows["elpd"].values[order])
    tail = np.repeat(by_row.folds["pareto_k"].values, by_row.folds["n_test"].values)[order]
    np.testing.assert_array_equal(found.pareto_k, tail)
    assert float(found.elpd_i.sum()) == pytest.approx(found.elpd, rel=1e-12)


def test_arviz_leaves_out_folds_that_are_not_numbers(loo):
    table = loo.folds.copy(deep=True)
    table["elpd"].values[2] = np.nan
    found = export.to_arviz(replace(loo, scores={"log": replace(loo.score("log"), folds=table)}))
    assert found.elpd_i["fold"].values.tolist() == [0, 1, *range(3, 40)]
    np.testing.assert_array_equal(found.elpd_i, np.delete(loo.folds["elpd"].values, 2))
    np.testing.assert_array_equal(found.pareto_k, np.delete(loo.folds["pareto_k"].values, 2))
    assert (found.n_data_points, found.n_folds) == (39, 39)


def test_arviz_leaves_out_rows_of_folds_that_are_not_numbers(by_row):
    score = by_row.score("log_pointwise")
    table = score.folds.copy(deep=True)
    table["elpd"].values[1] = np.nan
    table["status"].values[1] = "not finite"
    odd = replace(by_row, scores={"log_pointwise": replace(score, folds=table)})
    found = export.to_arviz(odd)
    left = np.setdiff1d(np.arange(40), problems.five_fold().folds.test(1))
    np.testing.assert_array_equal(found.elpd_i["row"], left)
    assert np.isfinite(found.elpd_i).all() and found.pareto_k.shape == found.elpd_i.shape
    assert (found.n_data_points, found.n_folds, found.warning) == (len(left), 4, True)


def test_arviz_counts_a_row_tested_twice_once(regression):
    rows = np.arange(40)
    splits = [(np.delete(rows, test), test) for test in ([0, 1], [1, 2])]
    result = regression.run(fw.from_splits(splits, 40), scores="log_pointwise")
    found, entries = export.to_arviz(result), result.rows["elpd"].values
    assert found.elpd_i["row"].values.tolist() == [0, 1, 2]
    expected = [entries[0], 0.5 * (entries[1] + entries[2]), entries[3]]
    np.testing.assert_allclose(found.elpd_i, expected, rtol=1e-12)
    tail = result.folds["pareto_k"].values
    np.testing.assert_array_equal(found.pareto_k, [tail[0], np.nanmax(tail), tail[1]])


def test_newer_arviz_has_a_class_for_folds(loo, monkeypatch):
    import arviz_stats.utils

    class ForFolds:
        def __init__(
            self,
            *,
            elpd,
            se,
            p,
            n_samples,
            n_data_points,
            scale,
            warning,
            good_k,
            elpd_i,
            pareto_k,
            n_folds,
        ):
            self.elpd, self.n_folds = elpd, n_folds

    monkeypatch.setattr(arviz_stats.utils, "ELPDDataLOOKFold", ForFolds, raising=False)
    found = export.to_arviz(loo)
    assert isinstance(found, ForFolds)
    assert (found.elpd, found.n_folds) == (loo.elpd, 40)
