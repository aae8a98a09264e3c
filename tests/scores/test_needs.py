"""Scores of rows of several numbers, which test sets take as one vector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import foldwise as fw

N, K = 8, 2
S = np.array([[1.0, 0.6], [0.6, 2.0]])
PRIOR = 4.0
Y = np.random.default_rng(4).multivariate_normal([1.0, -1.0], S, size=N)
PAIRS = fw.leave_group_out(np.arange(N) // 2)
ROOT, INVERSE = np.linalg.cholesky(S), np.linalg.inv(S)
SIZE = 0.5 * np.log(np.linalg.det(2 * np.pi * S))


def vectors(y=Y):
    """y_i ~ N(mu, S) in two dimensions, mu ~ N(0, 4)."""

    def density(mu, y):
        away = y - mu
        return -0.5 * jnp.einsum("ij,jk,ik->i", away, INVERSE, away) - SIZE

    return fw.Model(
        log_prior=lambda mu: -0.5 * jnp.sum(mu**2) / PRIOR,
        log_likelihood=None,
        init=np.zeros(K),
        n_obs=len(y),
        simulate=lambda key, mu: mu + jax.random.normal(key, y.shape) @ ROOT.T,
        row_log_density=density,
        y=y,
    )


def predictive(train, test):
    """Mean and covariance of the numbers of the test rows, row after row."""
    variance = np.linalg.inv(np.eye(K) / PRIOR + len(train) * INVERSE)
    mean = variance @ INVERSE @ Y[train].sum(axis=0)
    ones = np.ones((len(test), 1))
    return (ones * mean).ravel(), np.kron(np.eye(len(test)), S) + np.kron(ones @ ones.T, variance)


def exact(name, train, test):
    mean, covariance = predictive(train, test)
    normal, y = stats.multivariate_normal(mean, covariance), Y[test].ravel()
    if name == "log":
        return normal.logpdf(y)
    if name == "dss":
        return 2 * normal.logpdf(y) + len(y) * np.log(2 * np.pi)
    draws = normal.rvs(400000, random_state=1)
    one, two = draws[::2], draws[1::2]
    spread = np.linalg.norm(one - two, axis=1).mean()
    return 0.5 * spread - np.linalg.norm(draws - y, axis=1).mean()


@pytest.mark.parametrize("method", ["importance", "mcmc"])
def test_scores_of_vectors(method, tmp_path):
    scores = ("log", "energy", "dss")
    keep = ("predictive",) if method == "mcmc" else ()
    result = fw.cross_validate(
        vectors(), PAIRS, scores=scores, method=method, keep=keep, seed=1, progress=False
    )
    for name in scores:
        table = result.score(name).folds
        truth = np.array([exact(name, train, test) for train, test in PAIRS])
        z = (table["elpd" if name == "log" else "score"].values - truth) / table["mcse"].values
        assert np.abs(z).max() < 4, (name, z)
    if keep:
        tree = result.to_datatree()
        assert tree["posterior_predictive"]["y"].dims == ("chain", "draw", "test_row", "number")
        np.testing.assert_array_equal(tree["observed_data"]["y"], Y[PAIRS.test_rows])
        result.save(tmp_path / "vectors.nc")
        again = fw.load(tmp_path / "vectors.nc")
        assert again.score("energy").total == result.score("energy").total


def test_one_row_of_several_numbers_has_an_energy_score():
    folds = fw.leave_one_out(N)[:3]
    result = fw.cross_validate(vectors(), folds, scores="energy", seed=2, progress=False)
    truth = np.array([exact("energy", train, test) for train, test in folds])
    z = (result.folds["score"].values - truth) / result.folds["mcse"].values
    assert np.abs(z).max() < 4


def test_what_rows_of_several_numbers_do_not_have():
    with pytest.raises(ValueError, match="one number per row.*use energy or dss"):
        fw.cross_validate(vectors(), PAIRS, scores="crps", progress=False)
    with pytest.raises(ValueError, match="at most 20 numbers .* but there are 24; use energy"):
        fw.cross_validate(
            vectors(np.tile(Y, (3, 1))),
            fw.leave_group_out(np.arange(24) // 12),
            scores="dss",
            progress=False,
        )
