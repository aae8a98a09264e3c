"""Full-data draws from many short chains: right where they are used, refused where they fail."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import by_chains

import foldwise as fw
from foldwise.sampling import full_data as fitting
from foldwise.sampling import pooled
from foldwise.sampling.fit import FitWarning
from foldwise.support.progress import Progress


def made(model, seed):
    """The fit that cross-validation makes, and whether NUTS was needed."""
    with mock.patch.object(fitting, "draw_nuts", wraps=fitting.draw_nuts) as nuts:
        model.check()
        fit = fitting.full_data_fit(model, seed, Progress(False))
    return fit, nuts.call_count == 1


def posterior(problem):
    precision = problem.X.T @ problem.X / problem.noise**2 + np.diag(1 / problem.prior**2)
    covariance = np.linalg.inv(precision)
    return covariance @ problem.X.T @ problem.y / problem.noise**2, covariance


@pytest.mark.parametrize("name", ["normal_mean", "regression", "hierarchical", "autoregression"])
def test_draws_have_the_posterior_mean_and_covariance(name, seed):
    problem = getattr(problems, name)()
    mean, covariance = posterior(problem)
    model, z, spread = problem.model(), [], []
    for k in range(6):
        fit, by_nuts = made(model, 50 * seed + k)
        assert not by_nuts and fit.positions.shape == (8, 500, len(mean)) and fit.gradients > 0
        sd = np.sqrt(np.diag(covariance))
        z.append((fit.flat.mean(axis=0) - mean) / sd * np.sqrt(fit.ess))
        spread.append(fit.flat.var(axis=0) / sd**2)
    # errors of the mean are what the effective sample size says, up to the noise of all of them
    count = np.size(z)
    assert np.abs(np.mean(np.square(z)) - 1.0) < 5.0 * np.sqrt(2.0 / count) + 0.2
    assert np.abs(np.mean(spread, axis=0) - 1.0).max() < 0.12


def scaled_model(scale):
    """A normal posterior with sds from 1 to ``scale``, that starts at its edge."""
    sd = np.geomspace(1.0, scale, 6)

    def log_likelihood(x):
        return jnp.repeat(-0.5 * (x / sd) ** 2, 2) / 2.0

    return fw.Model(lambda x: 0.0 * x.sum(), log_likelihood, 3.0 * sd, 12, name="scaled"), sd


def test_parameters_of_very_different_scales(seed):
    model, sd = scaled_model(1e4)
    fit, by_nuts = made(model, seed)
    assert not by_nuts
    np.testing.assert_allclose(fit.flat.std(axis=0), sd, rtol=0.1)
    assert np.all(np.abs(fit.flat.mean(axis=0)) < 5.0 * sd / np.sqrt(fit.ess))


def funnel(tied=0.7):
    """Neal's funnel in 10 dimensions: its neck needs steps that its mouth does not.

    Each coordinate is tied to the one before, so that they do not fall apart given the first.
    """

    def log_prior(x):
        rest = x[1:] - tied * jnp.append(0.0, x[1:-1])
        return -0.5 * (x[0] / 3.0) ** 2 - 0.5 * jnp.sum(rest**2) * jnp.exp(-x[0]) - 4.5 * x[0]

    return fw.Model(log_prior, lambda x: 0.0 * x[:3], np.zeros(10), 3, name="funnel")


def two_modes(dimension=16):
    """Modes 80 sds apart, in more dimensions than a mixture can be fitted in, or fewer."""

    def log_prior(x):
        either = jnp.logaddexp(-0.5 * (x[0] - 40.0) ** 2, -0.5 * (x[0] + 40.0) ** 2)
        return either - 0.5 * jnp.sum(x[1:] ** 2)

    def init(key):
        return jnp.zeros(dimension).at[0].set(40.0 * (2.0 * jax.random.bernoulli(key) - 1.0))

    return fw.Model(log_prior, lambda x: 0.0 * x[0] * np.ones(3), init, 3, name="two modes")


@pytest.mark.parametrize("build", [funnel, two_modes])
def test_where_they_fail_nuts_is_next(build):
    with pytest.warns(FitWarning, match=f"full-data fit of {build().name}"):
        _, by_nuts = made(build(), 1)
    assert by_nuts


def test_a_funnel_that_falls_apart_is_proposed_in_layers(seed):
    fit, by_nuts = made(funnel(tied=0.0), seed)
    assert not by_nuts and fit.settled
    top, error = fit.flat[:, 0], 3.0 / np.sqrt(fit.ess.min())
    assert abs(top.mean()) < 4 * error and abs(top.std() - 3.0) < 4 * error


def test_a_few_parameters_with_two_modes_get_a_mixture(seed):
    fit, by_nuts = made(two_modes(2), seed)
    assert not by_nuts and fit.settled
    right = (fit.flat[:, 0] > 0).mean()
    assert abs(right - 0.5) < 4 * 0.5 / np.sqrt(fit.ess.min())
    assert abs(np.abs(fit.flat[:, 0]).mean() - 40.0) < 0.2


def test_the_warning_points_at_the_caller():
    with pytest.warns(FitWarning, match="two modes") as record:
        by_chains(two_modes(), fw.leave_one_out(3), seed=1, progress=False)
    assert record[0].filename == __file__


def test_chains_that_cannot_move_are_refused():
    """A posterior far narrower than any step that is tried, and one start for all chains."""
    model = fw.Model(
        lambda x: -0.5 * jnp.sum((x / 1e-14) ** 2), lambda x: 0.0 * x, lambda key: jnp.zeros(3), 3
    )
    runs = list(pooled.draw_pooled(model, 1, Progress(False)))
    assert len(runs) == 3 and all(np.ptp(run.positions) == 0.0 for run in runs)
    with (
        mock.patch.object(fitting, "draw_nuts", side_effect=RuntimeError("NUTS is next")),
        pytest.raises(RuntimeError, match="NUTS is next"),
    ):
        fitting.full_data_fit(model, 1, Progress(False))


def test_draws_that_still_drift_are_refused():
    """Chains of all starts on the same way: only early and late draws tell."""
    rng = np.random.default_rng(0)
    still = rng.normal(size=(pooled.DRAWS, pooled.STARTS * pooled.COPIES, 2))
    drift = np.linspace(0.0, 0.5, pooled.DRAWS)[:, None, None]
    for moves, fine in ((0.0, True), (drift, False)):
        fit = fw.Fit(pooled._long_chains(still + moves), (0.0, 0.0), np.ones(8), 0, 1)
        assert (not fit.problems()) == fine


def test_the_fit_does_not_depend_on_the_folds(seed):
    problem = problems.regression()
    model = problem.model()
    some, others = (
        by_chains(model, folds, seed=seed, progress=False).run.fit
        for folds in (problem.folds[:3], problem.folds[5:30])
    )
    np.testing.assert_array_equal(some.positions, others.positions)


def test_large_models_go_to_nuts_at_once():
    many = fw.Model(lambda x: -0.5 * jnp.sum(x**2), lambda x: 0.0 * x[:3], np.zeros(101), 3)
    assert not pooled.suits(many) and pooled.suits(problems.regression().model())
