"""A model at many points, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from scipy import stats

import foldwise as fw
from foldwise.models.evaluate import (
    Motion,
    batch_program,
    derivatives_at,
    gradients,
    masked_log_density,
    rows_at,
    trajectories,
    values_held,
)
from foldwise.support.runtime import precision_context


@pytest.fixture(scope="module")
def regression():
    problem = problems.regression()
    return problem, problem.model()


def residuals(problem, q):
    return (problem.y - q @ problem.X.T) / problem.noise


def test_gradients_given_some_rows(regression, rng):
    """More points than one call takes."""
    problem, model = regression
    q, train = rng.normal(size=(230, 4)), rng.random((230, 40)) < 0.5
    found, z = gradients(model, q, train), residuals(problem, q)
    rows = stats.norm.logpdf(z) - np.log(problem.noise)
    value = np.where(train, rows, 0.0).sum(axis=1) - 0.5 * np.sum((q / problem.prior) ** 2, axis=1)
    slope = np.where(train, z, 0.0) @ problem.X / problem.noise - q / problem.prior**2
    np.testing.assert_allclose(found.log_density, value, rtol=1e-12)
    np.testing.assert_allclose(found.gradient, slope, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(found.position, q)


def test_without_a_choice_all_rows_train(regression, rng):
    problem, model = regression
    q = rng.normal(size=(3, 4))
    slope = residuals(problem, q) @ problem.X / problem.noise - q / problem.prior**2
    np.testing.assert_allclose(gradients(model, q).gradient, slope, rtol=1e-10, atol=1e-10)


def test_rows_and_derivatives_in_several_batches(regression, rng):
    problem, model = regression
    q = rng.normal(size=(1100, 4))
    parts = list(rows_at(model, q))
    assert len(parts) > 1
    prior, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
    z = residuals(problem, q)
    np.testing.assert_allclose(prior, -0.5 * np.sum((q / problem.prior) ** 2, axis=1), rtol=1e-12)
    np.testing.assert_allclose(rows, stats.norm.logpdf(z) - np.log(problem.noise), rtol=1e-12)
    first, second = (np.concatenate(p) for p in zip(*derivatives_at(model, q), strict=True))
    np.testing.assert_allclose(first, -z / problem.noise, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(second, np.full(z.shape, -(problem.noise**-2)), rtol=1e-10)


def test_trajectories_keep_their_energy(regression, rng):
    """Kinetic energy is that of the covariance given; steps are of the length given."""
    problem, model = regression
    q, p = rng.normal(size=(2, 5, 4))
    covariance, train = 0.01 * (np.eye(4) + 0.5), np.ones((5, 40), bool)
    start, change = gradients(model, q), []
    for n in (50, 100):
        motion = Motion(np.float64(1.0 / n), np.int32(n), covariance)
        end = trajectories(model, q, p, start.gradient, train, motion)
        kinetic = [0.5 * np.einsum("ij,jk,ik->i", m, covariance, m) for m in (p, end.momentum)]
        assert np.abs(end.position - q).max(axis=1).min() > 0.05
        change.append(np.abs(kinetic[1] - kinetic[0] - end.log_density + start.log_density).max())
    assert change[1] < 0.01 and change[0] / change[1] == pytest.approx(4.0, rel=0.1)


def test_rows_that_do_not_train_count_nothing_even_where_impossible():
    rows = np.array([-1.0, -np.inf, -2.0])
    model = fw.Model(lambda q: -0.5 * q**2, lambda q: rows + 0.0 * q, 0.0, 3)
    train, q = jnp.array([True, False, False]), jnp.zeros(1)
    with precision_context("float64"):
        assert float(masked_log_density(model, q, train)[0]) == -1.0
        assert float(masked_log_density(model, q, train, jnp.array(0.0))[0]) == -1.0
        possible = jnp.array([True, True, True])
        assert float(masked_log_density(model, q, possible)[0]) == -np.inf


def test_rungs_weigh_the_rows_that_do_not_train(regression):
    problem, model = regression
    train, q = np.arange(40) < 30, np.ones(4)
    rows = stats.norm.logpdf(residuals(problem, q)) - np.log(problem.noise)
    prior = -0.5 * np.sum((q / problem.prior) ** 2)
    with precision_context("float64"):
        value, by_row = masked_log_density(model, jnp.asarray(q), train, jnp.array(0.25))
        assert float(value) == pytest.approx(prior + rows[:30].sum() + 0.25 * rows[30:].sum())
        np.testing.assert_allclose(by_row, rows, rtol=1e-12)


def test_matrices_are_counted_where_they_are_factorised():
    """So that as many gradients as a core's cache holds are found side by side, and no more."""

    def rows(q):
        root = jnp.linalg.cholesky(jnp.eye(40) * jnp.exp(q["s"]))
        return -0.5 * jax.lax.cond(q["s"] > 9, lambda: q["z"], lambda: root @ q["z"]) ** 2

    init = {"s": 0.0, "z": np.zeros(40)}
    with_matrix = fw.Model(lambda q: -0.5 * q["s"] ** 2, rows, init, 40)
    without = fw.Model(lambda q: -0.5 * q["s"] ** 2, lambda q: -0.5 * q["z"] ** 2, init, 40)
    for model, entries in ((with_matrix, 1600), (without, 0)):
        model.check_shapes()
        assert vars(model)["_factorised"] == entries
    assert values_held(with_matrix) == 4 * 1600
    assert values_held(without) == 40


@pytest.mark.parametrize("rows, quick", [(3, True), (100_000, False)])
def test_programs_of_few_rows_are_compiled_quickly(rows, quick):
    model = fw.Model(lambda q: -0.5 * q**2, lambda q: q * np.zeros(rows), 0.0, rows)
    program, _ = batch_program(model, "rows", lambda q: (model.flat_log_likelihood(q),))
    assert program._quick is quick
