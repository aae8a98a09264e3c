"""The density of the globals and its gradient, against closed forms and brute quadrature."""

from functools import partial

import jax
import numpy as np
import pytest
from effects import Effects, Group, log_normal

from foldwise.scores.marginal_model import MarginalModel, Rules


@pytest.fixture(scope="module")
def normal():
    return Effects([Group(1), Group(2, rows=5), Group(3), Group(1, rows=1), Group(1)])


@pytest.fixture(scope="module")
def counts():
    return Effects([Group(1, "Poisson"), Group(1, "binomial", rows=2), Group(2, "Bernoulli")])


@pytest.fixture(scope="module")
def single():
    return Effects([Group(1, "Poisson"), Group(1, "binomial", rows=3), Group(1, "Bernoulli")])


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def evaluated(effects, rules, points, masks):
    """Log prior, log density of the rows, their joint gradient, at points with masks."""
    model = MarginalModel.of(effects.model, effects.structure, rules)

    def both(g, rows):
        found = jax.value_and_grad(model.flat_posterior)(g, rows)
        return model.flat_log_prior(g), model.flat_joint(g, rows), *found

    return [np.asarray(part) for part in jax.jit(jax.vmap(both))(points, masks)]


def exact_normal(effects, g, rows):
    """Log density of the rows marked given (log tau, mu)."""
    total = 0.0
    for j, group in enumerate(effects.groups):
        own = effects.rows[j][rows[effects.rows[j]]]
        if not own.size:
            continue
        x = effects.x[j][own - effects.rows[j][0]]
        prior = np.exp(2 * g[0]) * np.linalg.inv(np.eye(group.effects) + 0.4)
        away = effects.y[j][own - effects.rows[j][0]] - g[1]
        total += log_normal(away, x @ prior @ x.T + 0.7**2 * np.eye(len(own)))
    return total


def slopes(function, g, step=1e-5):
    """Central differences."""
    moves = step * np.eye(len(g))
    return np.array([(function(g + m) - function(g - m)) / (2 * step) for m in moves])


def test_normal_rows_and_effects_have_the_closed_form(normal):
    rng = np.random.default_rng(0)
    points = 0.4 * rng.normal(size=(6, 2))
    masks = rng.random((6, normal.model.n_obs)) < np.array([0.0, 0.2, 0.5, 0.8, 0.9, 1.0])[:, None]
    prior, joint, whole, gradient = evaluated(normal, Rules(2, 2), points, masks)
    exact = np.array([exact_normal(normal, *pair) for pair in zip(points, masks, strict=True)])
    np.testing.assert_allclose(joint, exact, atol=1e-9)
    # p(g) has a constant that the model's prior leaves out
    of_prior = -0.5 * (points**2).sum(axis=1)
    np.testing.assert_allclose(np.ptp(prior - of_prior), 0.0, atol=1e-9)
    np.testing.assert_allclose(whole, prior + joint, atol=1e-9)
    for g, rows, found in zip(points, masks, gradient, strict=True):
        expected = slopes(lambda g, rows=rows: exact_normal(normal, g, rows), g) - g
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_counts_agree_with_brute_quadrature(counts):
    rng = np.random.default_rng(1)
    points, masks = 0.3 * rng.normal(size=(2, 2)), rng.random((2, counts.model.n_obs)) < 0.7
    masks[1] = True
    _, joint, _, gradient = evaluated(counts, Rules(15, 15), points, masks)

    def exact(g, rows):
        draw, total = np.concatenate([g, np.zeros(counts.model.dimension - 2)]), 0.0
        for cell in range(len(counts.structure)):
            own = counts.rows[counts.group_of(cell)]
            seen, none = counts.brute(cell, draw, [own[rows[own]], own[:0]])
            total += seen - none
        return total

    for k in range(2):
        assert joint[k] == pytest.approx(exact(points[k], masks[k]), abs=2e-6)
        expected = slopes(lambda g, k=k: exact(g, masks[k]), points[k], 1e-4) - points[k]
        np.testing.assert_allclose(gradient[k], expected, atol=2e-5)


def test_rows_given_others_are_differences_of_joint_densities(single):
    model = MarginalModel.of(single.model, single.structure, Rules(31, 31))
    n, g = model.n_obs, np.array([0.1, -0.2])
    train = np.ones(n, bool)
    train[[0, 1, 4, 5]] = False
    slots, valid = np.array([0, 1, 5, 4, 0]), np.array([True] * 4 + [False])
    shared = jax.jit(partial(model.flat_rows_given, trained=False))(g, slots, valid, train)
    found = jax.jit(partial(model.flat_rows_given, trained=True))(g, slots, valid, train)
    joint = jax.jit(jax.vmap(model.flat_posterior, (None, 0)))
    masks = np.tile(train, (6, 1))
    masks[np.arange(4), slots[:4]] = True
    masks[4] = True
    *one, whole, none = np.asarray(joint(g, masks))
    np.testing.assert_allclose(found, [*(one - none), 0.0], atol=1e-10)
    np.testing.assert_allclose(shared, [*(one - none), 0.0], atol=1e-6)
    together = jax.jit(model.flat_given)(g, ~train, train)
    assert float(together) == pytest.approx(whole - none, abs=1e-10)


def test_draws_side_by_side_do_not_matter_to_each_other(single):
    model = MarginalModel.of(single.model, single.structure, Rules(5, 5))
    points = np.array([[0.1, -0.2], [2.0, 3.0], [-3.0, 0.5]])
    masks = np.ones((2, model.n_obs), bool)
    masks[1, 3:] = False

    def over(points, masks):
        inner = jax.vmap(model.flat_posterior, (0, None))
        return jax.vmap(inner, (None, 0))(points, masks)

    together = jax.jit(over)(points, masks)
    alone = jax.jit(model.flat_posterior)
    for k in range(3):
        for s in range(2):
            np.testing.assert_allclose(alone(points[k], masks[s]), together[s, k], rtol=1e-13)


def test_it_goes_to_other_processes(single):
    cloudpickle = pytest.importorskip("cloudpickle")
    model = MarginalModel.of(single.model, single.structure, Rules(2, 3))
    twin = cloudpickle.loads(cloudpickle.dumps(model))
    assert (twin.sentence, twin.rules, twin.dimension) == (model.sentence, Rules(2, 3), 2)
    q = np.full(twin.base.dimension, 0.1)
    np.testing.assert_array_equal(
        twin.base.flat_log_likelihood(q), model.base.flat_log_likelihood(q)
    )
