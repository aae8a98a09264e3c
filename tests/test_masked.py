"""Rows whose density does not depend on the parameters: their folds are fine, and have no error."""

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
import scipy

import foldwise as fw

mpl.use("agg")

N, MASKED = 16, np.arange(16) % 2 == 1
Y = np.random.default_rng(3).normal(0.5, 1.0, N)


def normal_mean(constant):
    """y ~ N(m, 1) with m ~ N(0, 2^2); masked rows have the log density ``constant``."""

    def rows(m):
        density = -0.5 * (Y - m) ** 2 - 0.5 * np.log(2 * np.pi)
        return jnp.where(MASKED, constant, density)

    return fw.Model(lambda m: -0.125 * m**2, rows, 0.0, N, y=Y, name=f"constant {constant}")


def exact(constant):
    """Scores of leave-one-out: the others' posterior of m is normal."""
    seen = np.flatnonzero(~MASKED)
    found = np.full(N, float(constant))
    for i in seen:
        others = np.setdiff1d(seen, i)
        variance = 1.0 / (0.25 + len(others))
        mean = variance * Y[others].sum()
        found[i] = scipy.stats.norm.logpdf(Y[i], mean, np.sqrt(1.0 + variance))
    return found


@pytest.fixture(scope="module", params=["mcmc", "auto"])
def result(request):
    model = normal_mean(-1.3)
    return fw.cross_validate(
        model, fw.leave_one_out(N), method=request.param, seed=1, progress=False
    )


def test_masked_rows_are_fine_and_have_no_error(result):
    table = result.folds
    assert (table["status"].values == "fine").all()
    np.testing.assert_allclose(table["elpd"].values[MASKED], -1.3, rtol=1e-12)
    assert (table["mcse"].values[MASKED] == 0.0).all()
    mcmc = (table["method"].values == "mcmc").all()
    draws = 400 if mcmc else result.info["fit_draws"]
    assert (table["ess"].values[MASKED] == draws).all()
    if mcmc:
        assert (table["rhat"].values[MASKED] == 1.0).all()
        assert np.isfinite(result.rhat_benchmark).all() and result.rhat_max > 1.0
    assert np.isfinite([result.se, result.mcse, result.ess]).all()
    seen = (table["elpd"].values - exact(-1.3))[~MASKED] / table["mcse"].values[~MASKED]
    assert np.abs(seen).max() < 4.5 and abs(result.elpd - exact(-1.3).sum()) < 4.5 * result.mcse


def test_masked_rows_are_shown_compared_and_kept(result, tmp_path):
    again = fw.cross_validate(
        normal_mean(-1.4), fw.leave_one_out(N), method="mcmc", seed=2, progress=False
    )
    pair = fw.compare({"one": result, "two": again})
    assert abs(abs(pair.diff) - 0.8) < 4.5 * pair.mcse
    result.save(tmp_path / "masked.nc")
    loaded = fw.load(tmp_path / "masked.nc")
    assert loaded.elpd == result.elpd and loaded.flagged.sizes["fold"] == 0
    np.testing.assert_array_equal(loaded.folds["ess"].values, result.folds["ess"].values)
    figures = [fw.plot_diagnostics(result), fw.plot_pareto_k(result), fw.plot_chains(again, 1)]
    figures += [plot(again) for plot in (fw.plot_progress, fw.plot_ess, fw.plot_rhat_max)]
    assert all(figure.axes for figure in figures)
    assert result.report(tmp_path / "masked.html").exists()


def test_scores_by_row_of_masked_folds():
    folds = fw.from_labels(np.arange(N) % 4)  # two of the four folds have masked rows alone
    result = fw.cross_validate(
        normal_mean(0.0), folds, scores="log_pointwise", method="mcmc", seed=1, progress=False
    )
    table, masked = result.folds, np.array([False, True, False, True])
    assert (table["status"].values == "fine").all()
    np.testing.assert_allclose(table["elpd"].values[masked], 0.0, atol=1e-12)
    assert (table["mcse"].values[masked] == 0.0).all()
    assert (table["mcse"].values[~masked] > 0.0).all()


def test_nothing_but_masked_rows_scored():
    folds = fw.leave_one_out(N)[np.flatnonzero(MASKED)]
    result = fw.cross_validate(normal_mean(-2.0), folds, method="mcmc", seed=1, progress=False)
    assert result.elpd == pytest.approx(-2.0 * MASKED.sum())
    assert result.ess == 400 and result.mcse < 1e-12 and result.rhat_max == 1.0
    assert result.flagged.sizes["fold"] == 0 and str(result)
