"""The folds' draws, kept and handed to ArviZ."""

import numpy as np
import pytest

import foldwise as fw


@pytest.fixture(scope="module")
def kept(prepared, seed):
    problem, model, fit = prepared("five_fold")
    return fw.cross_validate(
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
    plain = fw.cross_validate(model, problem.folds, fit, seed=seed, progress=False)
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
    found = fw.cross_validate(model, fw.k_fold(12, 3), keep="position", seed=seed, progress=False)
    posterior = found.to_datatree()["posterior"]
    assert set(posterior.data_vars) == {"mu", "s"} and (posterior["s"] > 0).all()
    assert "posterior_predictive" not in found.to_datatree()


def test_refusals(prepared):
    problem, model, fit = prepared("five_fold")

    def run(**arguments):
        return fw.cross_validate(model, problem.folds, fit, progress=False, seed=1, **arguments)

    with pytest.raises(ValueError, match=r'keep must be one of "position", "predictive"; got'):
        run(keep=("draws",))
    with pytest.raises(ValueError, match='stores draws, but memory="online" keeps none'):
        run(keep="position", memory="online")
    with pytest.raises(ValueError, match=r"kept no draws.*keep=\(\"position\", \"predictive\"\)"):
        run().to_datatree()
