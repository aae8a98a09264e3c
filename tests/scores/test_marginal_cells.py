"""Cells given the globals: derivatives by the rows' values, and draws, against exact answers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effects import ROWS, Effects, Group
from problems import far_groups

from foldwise.models.structure import find_cells
from foldwise.scores.marginal_model import MarginalModel, Rules

KEYS = 4000


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def given_globals(problem, mu, train):
    """Mean and covariance of all rows given the mean of the groups and the rows ``train``."""
    X, noise = problem.X[:, 1:], problem.noise
    covariance = np.linalg.inv(X[train].T @ X[train] / noise**2 + np.eye(X.shape[1]))
    mean = covariance @ X[train].T @ (problem.y[train] - mu) / noise**2
    return mu + X @ mean, X @ covariance @ X.T + noise**2 * np.eye(len(X)), mean, covariance


@pytest.fixture(scope="module")
def normal():
    with jax.enable_x64(True):
        problem = far_groups(0.5, rows=4, groups=3)
        model = problem.model()
        structure = find_cells(model, model.probes())
        return problem, MarginalModel.of(model, structure, Rules(2, 7))


@pytest.mark.parametrize("by_row", [False, True])
def test_derivatives_are_those_of_the_density_of_the_rows_given_globals(normal, by_row):
    problem, model = normal
    train = np.ones(12, bool)
    train[[0, 1, 2, 5]] = False
    rows, valid = np.array([0, 1, 5, 0]), np.array([True, True, True, False])
    found = partial(model.flat_derivatives_given, by_row=by_row)
    first, second = jax.jit(found)(jnp.array([0.7]), rows, valid, train)
    mean, covariance, _, _ = given_globals(problem, 0.7, train)
    test = rows[valid]
    V = covariance[np.ix_(test, test)]
    precision = np.diag(1 / np.diag(V)) if by_row else np.linalg.inv(V)
    # 7 nodes of the training rows serve a row beside them to as many digits as log scores have
    digits = 1e-4 if by_row else 1e-9
    np.testing.assert_allclose(
        first[valid], -precision @ (problem.y[test] - mean[test]), rtol=digits
    )
    np.testing.assert_allclose(second[valid], -np.diag(precision), rtol=10 * digits)


def drawn(model, g, train):
    """Cells' coordinates at many keys."""
    keys = np.random.default_rng(0).integers(2**32, size=(KEYS, 2), dtype=np.uint32)
    found = jax.jit(jax.vmap(model.flat_drawn, in_axes=(None, 0, None)))(jnp.array(g), keys, train)
    np.testing.assert_array_equal(found[:, model.structure.globals], np.tile(g, (KEYS, 1)))
    return np.delete(np.asarray(found), model.structure.globals, axis=1)


def check_moments(values, mean, sd):
    """Means and sds within four Monte Carlo errors; that of an sd is for nearly normal values."""
    error = sd / np.sqrt(KEYS)
    assert (np.abs(values.mean(axis=0) - mean) < 4 * error).all()
    assert (np.abs(values.std(axis=0) - sd) < 4 * error).all()


def test_cells_of_normal_rows_have_their_normal_conditional(normal):
    problem, model = normal
    train = np.ones(12, bool)
    train[:4] = train[5] = False  # all of a group, one of another
    _, _, mean, covariance = given_globals(problem, 0.7, train)
    values = drawn(model, [0.7], train)
    check_moments(values, mean, np.sqrt(np.diag(covariance)))
    np.testing.assert_allclose(np.corrcoef(values.T), np.eye(3), atol=4 / np.sqrt(KEYS))
    # tails too: how many are beyond two sds
    beyond = (np.abs(values - mean) > 2 * np.sqrt(np.diag(covariance))).mean()
    assert abs(beyond - 0.0455) < 4 * np.sqrt(0.0455 / values.size)


def test_cells_of_counts_have_their_conditional_by_quadrature():
    kinds = ("Poisson", "binomial", "Bernoulli")
    effects = Effects([Group(1, kind) for kind in kinds])
    model = MarginalModel.of(effects.model, effects.structure, Rules(5, 7))
    train = np.ones(12, bool)
    train[[1, 4, 5, 8]] = False
    log_tau, mu = -0.2, 0.4
    values = drawn(model, [log_tau, mu], train)
    u = np.linspace(-8, 8, 4001)
    for j, kind in enumerate(kinds):
        own = train[effects.rows[j]]
        log = -0.7 * (u / np.exp(log_tau)) ** 2
        for y in effects.y[j][own]:
            log = log + np.asarray(ROWS[kind](y, mu + u))
        weight = np.exp(log - log.max())
        weight /= weight.sum()
        mean = weight @ u
        check_moments(values[:, j], mean, np.sqrt(weight @ (u - mean) ** 2))
