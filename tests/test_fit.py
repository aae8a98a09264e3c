import numpy as np
import problems
import pytest

import foldwise as fw
from foldwise.fit import FitWarning


def test_draws_have_the_posterior_mean_and_covariance(prepared):
    problem, _, fit = prepared("regression")
    precision = problem.X.T @ problem.X / problem.noise**2 + np.diag(1 / problem.prior**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ problem.X.T @ problem.y / problem.noise**2
    error = np.sqrt(np.diag(covariance) / fit.ess)
    assert np.all(np.abs(fit.flat.mean(axis=0) - mean) < 4 * error)
    np.testing.assert_allclose(fit.covariance, covariance, atol=0.15 * covariance.max())


def test_reports_diagnostics(prepared):
    _, _, fit = prepared("regression")
    assert fit.rhat.shape == fit.ess.shape == (4,)
    assert fit.rhat.max() < 1.02 and fit.ess.min() > 500 and fit.divergences == 0
    assert "R-hat max" in repr(fit) and "ESS min" in repr(fit)
    assert fit.positions.shape == (4, 1000, 4)


@pytest.mark.parametrize(
    "change, divergences, settled",
    [
        (lambda x: x, 0, True),
        (lambda x: x, 20, True),
        (lambda x: x, 21, False),
        (lambda x: x + 0.3 * np.arange(4)[:, None, None], 0, False),  # chains disagree
        (lambda x: np.repeat(x[:, :20], 50, axis=1), 0, False),  # few effective draws
        (lambda x: x * np.array([1.0, 0.0]), 0, False),  # a parameter never moves
    ],
)
def test_settled(rng, change, divergences, settled):
    positions = change(rng.normal(size=(4, 1000, 2)))
    assert fw.Fit(positions, (0.0, 0.0), np.ones(4), divergences, 1).settled is settled


def test_same_seed_same_draws(prepared):
    _, model, _ = prepared("normal_mean")
    a, b = (fw.fit(model, draws=100, warmup=200, seed=5, progress=False) for _ in range(2))
    c = fw.fit(model, draws=100, warmup=200, seed=6, progress=False)
    np.testing.assert_array_equal(a.positions, b.positions)
    assert not np.array_equal(a.positions, c.positions)


def test_seed_is_drawn_and_recorded(prepared):
    _, model, _ = prepared("normal_mean")
    a, b = (fw.fit(model, draws=100, warmup=100, progress=False) for _ in range(2))
    assert a.seed != b.seed


def test_three_chains(prepared):
    _, model, _ = prepared("normal_mean")
    fit = fw.fit(model, chains=3, draws=300, warmup=130, seed=1, progress=False)
    assert fit.positions.shape == (3, 300, 1)
    assert np.unique(fit.positions[:, 0]).size == 3


def test_trouble_is_said():
    """Two far modes: chains disagree."""

    def log_prior(x):
        import jax.numpy as jnp

        return jnp.logaddexp(-0.5 * (x - 40.0) ** 2, -0.5 * (x + 40.0) ** 2)

    import jax

    model = fw.Model(
        log_prior,
        lambda x: 0.0 * x * np.ones(3),
        init=lambda key: 40.0 * (2.0 * jax.random.bernoulli(key) - 1.0),
        n_obs=3,
        name="two modes",
    )
    with pytest.warns(FitWarning, match="two modes: R-hat is up to"):
        fit = fw.fit(model, draws=200, warmup=200, seed=1, progress=False)
    assert "check the model first" in repr(fit)


def test_fit_of_another_model_is_refused(prepared):
    _, _, fit = prepared("regression")
    other = problems.LinearProblem(**{**vars(problems.regression()), "noise": 1.1, "name": "other"})
    with pytest.raises(ValueError, match="must be of the model that is cross-validated"):
        fw.cross_validate(other.model(), other.folds, fit=fit, progress=False)
    smaller = problems.normal_mean()
    with pytest.raises(ValueError, match="4 parameters and the model 1"):
        fw.cross_validate(smaller.model(), smaller.folds, fit=fit, progress=False)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"chains": 1}, "chains must be a whole number of at least 2, got 1"),
        ({"draws": 10}, "draws must be a whole number of at least 100"),
        ({"warmup": 1.5}, "warmup must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_bad_arguments(prepared, bad, message):
    _, model, _ = prepared("normal_mean")
    with pytest.raises(ValueError, match=message):
        fw.fit(model, progress=False, **bad)
