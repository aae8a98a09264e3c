"""The leapfrog integrator: reversible, of second order, and waiting where a fold is done."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from foldwise.sampling.metric import FoldMetric, near_metric, shared_metric, velocity
from foldwise.support.runtime import precision_context
from foldwise.support.verlet import leapfrog

D = 3


@partial(jax.jit, static_argnames="density")
def follow(start, step, n_steps, density, metric):
    return leapfrog(start, step, n_steps, density, lambda p: velocity(metric, p))


def quartic(q):
    """Log density of coordinates with light tails that depend on each other, and one score."""

    def log_density(q):
        return -0.25 * jnp.sum(q**4) - 0.5 * jnp.sum(q**2) + 0.3 * jnp.sin(q[0] * q[1])

    value, gradient = jax.vmap(jax.vmap(jax.value_and_grad(log_density)))(q)
    return value, gradient, jnp.sum(q, axis=-1)


def normal(q):
    """A standard normal and one score."""
    return -0.5 * jnp.sum(q**2, axis=-1), -q, jnp.sum(q, axis=-1)


def metric_of(kind, rng, folds):
    a = rng.normal(size=(D, 2 * D))
    covariance, local = a @ a.T / (2 * D), np.zeros((folds, D), bool)
    if kind == "fold":
        return near_metric(covariance, local, np.ones((folds, D)))
    local[1, 0] = True
    return shared_metric(covariance, local, np.full(D, 2.0), least_stretch=1.0)


def integrate(density, metric, p, q, step, n_steps):
    with precision_context("float64"):
        start = (jnp.asarray(p), jnp.asarray(q), *density(jnp.asarray(q)))
        end = follow(start, jnp.asarray(step), jnp.asarray(n_steps), density, metric)
        return [np.asarray(part) for part in end]


def energy(metric, p, q, density=quartic):
    with precision_context("float64"):
        kinetic = 0.5 * np.sum(p * np.asarray(velocity(metric, jnp.asarray(p))), axis=-1)
        return kinetic - np.asarray(density(jnp.asarray(q))[0])


@pytest.mark.parametrize("kind", ["fold", "shared"])
def test_the_integrator_is_reversible(rng, kind):
    p, q = rng.normal(size=(2, 3, 5, D))
    metric, step, n_steps = metric_of(kind, rng, 3), np.array([0.1, 0.2, 0.15]), [20, 11, 16]
    there = integrate(quartic, metric, p, q, step, n_steps)
    assert np.abs(there[1] - q).max(axis=-1).min() > 0.1
    back = integrate(quartic, metric, -there[0], there[1], step, n_steps)
    np.testing.assert_allclose(back[1], q, atol=1e-11)
    np.testing.assert_allclose(-back[0], p, atol=1e-11)


@pytest.mark.parametrize("kind", ["fold", "shared"])
def test_the_error_of_the_energy_is_of_second_order(rng, kind):
    p, q = rng.normal(size=(2, 3, 40, D))
    metric, errors = metric_of(kind, rng, 3), []
    for n in (20, 40, 80):
        end = integrate(quartic, metric, p, q, np.full(3, 1.0 / n), [n] * 3)
        change = energy(metric, end[0], end[1]) - energy(metric, p, q)
        errors.append(np.sqrt(np.mean(change**2)))
    assert errors[0] < 0.1
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4.0, rtol=0.1)


def test_trajectories_of_a_normal_tend_to_circles(rng):
    p, q = rng.normal(size=(2, 2, 20, D))
    unit, length = FoldMetric(*np.stack([[np.eye(D)] * 2] * 2)), np.array([1.0, 2.0])
    time, errors = length[:, None, None], []
    for n in (40, 80):
        end = integrate(normal, unit, p, q, length / n, [n, n])
        errors.append(np.abs(end[1] - (q * np.cos(time) + p * np.sin(time))).max())
    assert errors[0] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.05)


def test_a_fold_that_is_done_waits(rng):
    p, q = rng.normal(size=(2, 3, 5, D))
    metric, step, n_steps = metric_of("fold", rng, 3), np.array([0.1, 0.2, 0.15]), [7, 1, 4]
    together = integrate(quartic, metric, p, q, step, n_steps)
    for k, n in enumerate(n_steps):
        own, some = FoldMetric(*(part[[k]] for part in metric)), [k]
        alone = integrate(quartic, own, p[some], q[some], step[some], [n])
        for mine, theirs in zip(alone, together, strict=True):
            np.testing.assert_allclose(mine, theirs[some], rtol=1e-12, atol=1e-12)
    with precision_context("float64"):
        for found, expected in zip(together[2:], quartic(jnp.asarray(together[1])), strict=True):
            np.testing.assert_allclose(found, np.asarray(expected), rtol=1e-12)
