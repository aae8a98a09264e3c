"""Jointly normal rows, some unseen: densities and draws against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

from foldwise.models.normal_rows import masked_normal, normal_given_rows
from foldwise.support.runtime import precision_context

RNG = np.random.default_rng(3)
N = 6
ROOT = RNG.normal(size=(N, N))
C = ROOT @ ROOT.T + 0.3 * np.eye(N)
MEAN, Y = RNG.normal(size=N), RNG.normal(size=N)


@pytest.fixture(autouse=True)
def double():
    with precision_context("float64"):
        yield


@pytest.mark.parametrize("seen", [[], [2], [0, 3, 5], list(range(N))])
def test_density_of_the_rows_marked(seen):
    rows = np.isin(np.arange(N), seen)
    found = masked_normal(Y, MEAN, jnp.asarray(C), jnp.asarray(rows))
    exact = 0.0
    if seen:
        marginal = scipy.stats.multivariate_normal(MEAN[rows], C[np.ix_(rows, rows)])
        exact = marginal.logpdf(Y[rows])
    assert found == pytest.approx(exact, abs=1e-10)


def test_unseen_values_do_not_count():
    rows = jnp.arange(N) < 4
    grad = jax.grad(masked_normal)(jnp.asarray(Y), MEAN, jnp.asarray(C), rows)
    assert np.all(np.asarray(grad[4:]) == 0) and np.all(np.asarray(grad[:4]) != 0)


@pytest.mark.parametrize("seen", [[], [0, 3, 5]])
def test_draws_given_the_rows_marked(seen):
    rows, draws = np.isin(np.arange(N), seen), 20000
    keys = jax.random.split(jax.random.key(1), draws)
    one = jax.vmap(lambda key: normal_given_rows(key, Y, MEAN, jnp.asarray(C), jnp.asarray(rows)))
    x = np.asarray(one(keys))
    np.testing.assert_allclose(x[:, rows], np.broadcast_to(Y[rows], (draws, len(seen))), atol=1e-8)
    gain = C[np.ix_(~rows, rows)] @ np.linalg.inv(C[np.ix_(rows, rows)])
    mean = MEAN[~rows] + gain @ (Y - MEAN)[rows]
    covariance = C[np.ix_(~rows, ~rows)] - gain @ C[np.ix_(rows, ~rows)]
    sd = np.sqrt(np.diagonal(covariance))
    assert np.abs((x[:, ~rows].mean(axis=0) - mean) / sd).max() < 4 / np.sqrt(draws)
    # an entry of a covariance of draws has the variance (C_ij^2 + C_ii C_jj) / draws
    error = np.sqrt((covariance**2 + np.outer(sd, sd) ** 2) / draws)
    assert np.abs((np.cov(x[:, ~rows].T) - covariance) / error).max() < 4
