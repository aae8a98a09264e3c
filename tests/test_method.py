"""cross_validate(method=...): weights of full-data draws, chains where they fail, and both."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from problems import FarScale, LinearProblem, autoregression, by_chains, hierarchical, regression

import foldwise as fw
from foldwise.models.structure import find_cells
from foldwise.results.result import FoldWarning
from foldwise.results.weighted import chains_alone
from foldwise.scores.smoothing import smoothed


@cache
def far():
    return FarScale(6.0, spare=14)


@cache
def far_model():
    return far().model()


def exact_fit(problem):
    """Independent draws of a linear problem's posterior, the same with every version of JAX.

    How near two estimates from the same draws are depends on the few largest weights among these.
    """
    model = problem.model()
    precision = problem.X.T @ problem.X / problem.noise**2 + np.diag(1 / problem.prior**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ (problem.X.T @ problem.y) / problem.noise**2
    normal = np.random.default_rng(3).normal(size=(4, 1000, len(mean)))
    positions = mean + normal @ np.linalg.cholesky(covariance).T
    with jax.enable_x64(True):
        prior = float(model.flat_log_prior(positions[0, 0]))
        rows = float(model.flat_log_likelihood(positions[0, 0]).sum())
    return model, fw.Fit(positions, (prior, rows), np.full(4, 0.1), 0, 3)


@cache
def both_kinds(seed=1):
    """One fold is far from the full data, and has chains."""
    return fw.cross_validate(
        far_model(), far().folds, method="auto", scores="log", seed=seed, progress=False
    )


@cache
def near():
    """Ten groups, none of them far from the others."""
    rng = np.random.default_rng(8)
    group = np.repeat(np.arange(10), 6)
    X = np.column_stack([np.ones(60), 1.0 * (group[:, None] == np.arange(10))])
    y = 0.3 + 0.5 * rng.normal(size=10)[group] + rng.normal(size=60)
    prior = np.concatenate([[2.0], np.ones(10)])
    return LinearProblem(X, y, 1.0, prior, fw.leave_group_out(group), "groups")


@cache
def weights_alone():
    problem = near()
    return problem, fw.cross_validate(
        problem.model(), problem.folds, method="auto", seed=5, progress=False
    )


def test_groups_need_no_chains():
    problem, result = weights_alone()
    exact = problem.joint()
    assert set(result.folds["method"].values) == {"importance"}
    assert result.run is None and result.draws is None
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse < 0.5
    assert result.folds["pareto_k"].max() < 0.7
    assert (result.folds["status"] == "fine").all()
    assert "10 folds: weights of 4,000 full-data draws\n" in str(result)
    assert "1 parameter shared by all rows; q[j] of 10 groups, integrated out\n" in str(result)
    assert "chains" not in str(result) and "R-hat" not in str(result)
    other = fw.cross_validate(
        problem.model(), problem.folds, method="importance", seed=6, progress=False
    )
    assert "R-hat" not in str(fw.compare({"one": result, "two": other}))


def test_a_fold_far_from_the_full_data_gets_chains():
    result, exact = both_kinds(), far().joint()
    assert result.folds["method"].values.tolist() == ["mcmc"] + 7 * ["importance"]
    z = (result.folds["elpd"].values - exact) / result.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse
    assert np.isfinite(result.folds["rhat"].values).tolist() == [True] + 7 * [False]
    said = str(result)
    assert "7 folds: weights of 4,000 full-data draws\n1 fold: 4 chains x " in said
    assert "; why chains: 1 whose weights are too uneven estimate" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


def test_errors_of_both_kinds_add_up():
    result = both_kinds()
    weighted, chains = result.weighted, chains_alone(result)
    score, parts = result.score("log"), [weighted.score("log"), chains.score("log")]
    assert result.elpd == pytest.approx(weighted.elpd + chains.elpd, abs=1e-12)
    assert score.own_variance == parts[1].own_variance > 0
    both = parts[0].full_influence + parts[1].full_influence
    np.testing.assert_allclose(score.full_influence, both, atol=1e-12)
    # the draws are shared, so their errors are not independent
    independent = parts[0].full_variance + parts[1].full_variance
    assert score.full_variance != pytest.approx(independent, rel=1e-3)
    assert result.mcse == pytest.approx(np.sqrt(score.own_variance + score.full_variance))


def test_full_data_draws_move_scores_of_both_kinds_alike():
    """Weights and bridges of the same folds: what a full-data draw adds has one sign."""
    problem = regression()
    model, fit = exact_fit(problem)
    folds, common = problem.folds[:6], {"fit": fit, "progress": False}
    weights = fw.cross_validate(model, folds, method="importance", seed=4, **common)
    chains = by_chains(model, folds, seed=5, **common)
    one, two = (result.score("log").full_influence for result in (weights, chains))
    assert np.corrcoef(one, two)[0, 1] > 0.9


def test_all_by_weights_is_flagged_where_it_is_not_reliable():
    with pytest.warns(FoldWarning, match="uneven weights"):
        result = fw.cross_validate(
            far_model(), far().folds, method="importance", seed=1, progress=False
        )
    assert result.folds["status"].values.tolist() == ["uneven weights"] + 7 * ["fine"]
    assert result.weighted is None and set(result.folds["method"].values) == {"importance"}


def test_a_row_that_cuts_off_the_posterior_has_chains():
    """Below a limit the first row has density one, above it zero: all weights are equal.

    Its score is log Pr(mu < limit) given the others, which the full-data draws know nothing of.
    """
    y = np.random.default_rng(2).normal(size=40)
    limit, first = float(y[1:].mean()), np.arange(40) == 0

    def log_likelihood(mu):
        rows = -0.5 * (y - mu) ** 2 - 0.5 * jnp.log(2 * jnp.pi)
        return jnp.where(first, jnp.where(mu < limit, 0.0, -jnp.inf), rows)

    model = fw.Model(lambda mu: -0.5 * mu**2 / 9, log_likelihood, limit - 1.0, n_obs=40)
    folds = fw.leave_one_out(40)
    with pytest.warns(FoldWarning, match="cut off: 1 of 40"):
        result = fw.cross_validate(model, folds, method="importance", seed=1, progress=False)
    assert result.folds["status"].values[0] == "cut off"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FoldWarning)  # flags are not what is tested
        result = fw.cross_validate(model, folds, method="auto", seed=1, progress=False)
    assert result.folds["method"].values[0] == "mcmc"
    assert result.folds["status"].values[0] != "fine"


def test_weights_and_refits_where_they_do_are_the_default():
    problem = regression()
    few = problem.folds[:5]
    arguments = {"draws": 50, "seed": 1, "progress": False}
    default = fw.cross_validate(problem.model(), few, **arguments)
    auto = fw.cross_validate(problem.model(), few, method="auto", **arguments)
    assert default.elpd == auto.elpd
    assert default.folds["method"].values.tolist() == ["importance", "refit"] + 3 * ["importance"]
    chains = fw.cross_validate(problem.model(), few, method="mcmc", **arguments)
    assert set(chains.folds["method"].values) == {"mcmc"}


def test_leave_future_out_keeps_its_chains():
    problem = autoregression()
    some = problem.folds[:6]
    result = fw.cross_validate(
        problem.model(), some, method="auto", draws=50, seed=1, progress=False
    )
    assert set(result.folds["method"].values) == {"mcmc"}


def test_a_regression_agrees_with_plain_psis():
    from arviz_stats.base import array_stats

    problem = regression()
    model, fit = exact_fit(problem)
    result = fw.cross_validate(
        model, problem.folds, fit=fit, method="importance", seed=3, progress=False
    )
    draws = fit.flat
    z = (problem.y - draws @ problem.X.T) / problem.noise
    rows = -0.5 * z**2 - np.log(problem.noise) - 0.5 * np.log(2 * np.pi)
    elpd, mcse = (result.folds[name].values for name in ("elpd", "mcse"))
    theirs, k = array_stats.psislw(rows.T)
    np.testing.assert_allclose(result.folds["pareto_k"], k, atol=1e-8)
    plain, own = (
        np.log((np.exp(weight) * np.exp(rows.T)).sum(axis=1) / np.exp(weight).sum(axis=1))
        for weight in (theirs, smoothed(rows.T)[0])
    )
    # half of a variance is the correction of the bias
    assert (np.abs(elpd - own) <= 1.5 * 0.5 * mcse**2 + 1e-8).all()
    # the tail of the weights has the mean of its density: a part of an error
    assert (np.abs(elpd - plain) <= 0.3 * mcse + 1e-8).all()
    assert abs(result.elpd - problem.joint().sum()) < 4 * result.mcse


def test_saved_and_extended(tmp_path):
    result = both_kinds()
    result.save(tmp_path / "both.nc")
    again = fw.load(tmp_path / "both.nc")
    assert (again.elpd, again.mcse) == (result.elpd, result.mcse)
    assert again.weighted.elpd == result.weighted.elpd
    assert str(again).splitlines()[:8] == str(result).splitlines()[:8]
    longer = fw.load(tmp_path / "both.nc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FoldWarning)  # flags are not what is tested
        longer.extend(100, model=far_model(), progress=False)
    assert longer.info["draws"] == 200
    assert longer.score("log").own_variance < result.score("log").own_variance
    changed = longer.folds["elpd"].values != result.folds["elpd"].values
    assert changed.tolist() == [True] + 7 * [False]
    assert abs(longer.elpd - far().joint().sum()) < 4 * longer.mcse


def test_weights_alone_have_nothing_to_extend(tmp_path):
    _, result = weights_alone()
    with pytest.raises(ValueError, match="pass a longer fit"):
        result.extend(100)
    result.save(tmp_path / "weights.nc")
    again = fw.load(tmp_path / "weights.nc")
    assert (again.elpd, again.mcse, str(again)) == (result.elpd, result.mcse, str(result))


def test_parts_merge():
    model, folds, whole = far_model(), far().folds, both_kinds()
    parts = [
        fw.cross_validate(model, some, method="auto", scores="log", seed=1, progress=False)
        for some in (folds[:4], folds[4:])
    ]
    merged = fw.merge(parts)
    assert merged.elpd == pytest.approx(whole.elpd, abs=1e-9)
    assert merged.mcse == pytest.approx(whole.mcse, abs=1e-9)
    assert merged.folds["status"].values.tolist() == whole.folds["status"].values.tolist()


def test_compared_exported_and_drawn():
    mixed = both_kinds()
    chains = by_chains(far_model(), far().folds, seed=9, progress=False)
    pair = fw.compare({"weights": mixed, "chains": chains})
    assert abs(pair.diff) < 4 * pair.mcse
    assert mixed.to_arviz().elpd == pytest.approx(mixed.elpd)
    for figure in (fw.plot_rhat, fw.plot_rhat_max, fw.plot_pareto_k, fw.plot_ess):
        figure(mixed)
    fw.plot_chains(mixed, 0)

    def words(figure):
        return " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))

    weights = weights_alone()[1]
    assert "0 of 10 folds scored by weights" in words(fw.plot_pareto_k(weights))
    assert "bridged" not in words(fw.plot_pareto_k(weights))
    assert "0 of 7 folds scored by weights" in words(fw.plot_pareto_k(mixed))
    assert "the 4,000 full-data draws" in words(fw.plot_ess(weights))
    with pytest.raises(ValueError, match="1"):
        fw.plot_chains(mixed, 1)
    with pytest.raises(ValueError, match="no fold has any"):
        fw.plot_rhat(weights_alone()[1])


def test_scores_by_row():
    problem = hierarchical()
    folds = fw.k_fold(problem.folds.n, 10, seed=1)
    problem = type(problem)(problem.X, problem.y, problem.noise, problem.prior, folds, "rows")
    result = fw.cross_validate(problem.model(), folds, method="auto", seed=2, progress=False)
    assert set(result.folds["method"].values) == {"importance"}
    assert result.rows.sizes["test_row"] == folds.n
    z = (result.folds["elpd"].values - problem.pointwise()) / result.folds["mcse"].values
    assert np.abs(z).max() < 4
    assert abs(result.elpd - problem.pointwise().sum()) < 4 * result.mcse


def test_a_target_makes_the_fit_longer():
    problem = near()
    model = problem.model()
    first = weights_alone()[1]
    target = 0.6 * first.mcse
    result = fw.cross_validate(
        model, problem.folds, method="auto", target_mcse=target, seed=5, progress=False
    )
    assert result.mcse <= target and result.info["fit_draws"] > 4000
    assert abs(result.elpd - problem.joint().sum()) < 4 * result.mcse
    fit = fw.fit(model, seed=5, progress=False)
    with pytest.warns(UserWarning, match="was not reached.*pass a longer fit"):
        fw.cross_validate(
            model,
            problem.folds,
            fit=fit,
            method="auto",
            target_mcse=0.1 * first.mcse,
            seed=5,
            progress=False,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "psis"}, "method must be"),
        ({"method": "importance", "keep": "position"}, "position.* was asked for"),
    ],
)
def test_what_cannot_be(arguments, message):
    problem = regression()
    with pytest.raises(ValueError, match=message):
        fw.cross_validate(problem.model(), problem.folds, progress=False, **arguments)


def test_structure_of_the_far_scale():
    structure = find_cells(far_model(), np.random.default_rng(1).normal(size=(3, 24)))
    assert len(structure) == 8 and structure.globals.tolist() == [0, 1, *range(10, 24)]
