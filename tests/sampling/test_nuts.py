"""NUTS of the full-data fit: correlations are learned in warm-up, and only where there are some."""

import jax.numpy as jnp
import numpy as np
import pytest

import foldwise as fw
from foldwise.sampling.nuts import Nuts
from foldwise.support.progress import Progress

D = 30


def normal(covariance):
    """A normal prior, and two rows that together see the first parameter with noise of sd one."""
    precision = np.linalg.inv(covariance)
    model = fw.Model(
        lambda q: -0.5 * q @ precision @ q,
        lambda q: -0.25 * (1.0 - q[0]) ** 2 * jnp.ones(2),
        np.zeros(len(covariance)),
        2,
        name="normal",
    )
    gain = covariance[:, 0] / (1.0 + covariance[0, 0])
    return model, gain, covariance - np.outer(gain, covariance[0])


def stretched(rng, factor):
    """Scales of 0.1 to 10, and one direction that is ``factor`` times as wide as the others."""
    direction = rng.normal(size=D)
    direction /= np.linalg.norm(direction)
    scale = np.geomspace(0.1, 10.0, D)
    correlated = np.eye(D) + (factor**2 - 1.0) * np.outer(direction, direction)
    return correlated * np.outer(scale, scale)


@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_correlations_are_learned_where_there_are_some(rng, seed, factor):
    model, mean, covariance = normal(stretched(rng, factor))
    fit = fw.fit(model, seed=seed, progress=False)
    assert fit.settled
    error = np.sqrt(np.diag(covariance) / fit.ess)
    assert np.abs((fit.flat.mean(axis=0) - mean) / error).max() < 4.5
    # a normal density needs 7 steps with variances alone, 40 times as many where it is stretched;
    # no more than 15, which are finer, once its covariance is known
    changed = factor != 1.0
    transitions = 4 * (1000 + (550 if changed else 500))
    assert fit.gradients < (20 if changed else 12) * transitions


def test_coordinates_stay_where_there_are_no_correlations(rng):
    for factor, changed in ((1.0, False), (40.0, True)):
        model, _, _ = normal(stretched(rng, factor))
        run = Nuts(model, 1, 0.1 * rng.normal(size=(4, D)), Progress(False))
        run.warm_up(1000)
        assert run.uncorrelated is changed
        # an acceptance of 0.95 there: correlations are others in the tails
        assert run.caution == changed
        assert run._done == (550 if changed else 500)


def test_early_trees_are_small(rng):
    """However short the steps that a narrow direction demands."""
    model, _, _ = normal(np.diag([1e-6] + [1.0] * (D - 1)))
    run = Nuts(model, 1, 0.01 * rng.normal(size=(4, D)), Progress(False))
    run._compile()
    for doublings, most in ((6, 63), (10, 1023)):
        before = run.gradients
        run._run(np.zeros((20, 2), int), True, doublings)
        spent = (run.gradients - before) / 80
        assert spent <= most and (doublings == 6 or spent > 63)


def test_few_parameters_are_left_to_the_windows(rng):
    model, _, _ = normal(np.eye(3) + 400.0)
    run = Nuts(model, 1, rng.normal(size=(4, 3)), Progress(False))
    run.warm_up(1000)
    assert not run.uncorrelated and not run._looks


@pytest.mark.parametrize("iterations", [850, 1500])
def test_only_a_usual_warm_up_is_cut_short(rng, iterations):
    """Others have other windows: none ends at 450, or more than one follows."""
    model, _, _ = normal(stretched(rng, 1.0))
    run = Nuts(model, 1, 0.1 * rng.normal(size=(4, D)), Progress(False))
    run.warm_up(iterations)
    assert run._done == iterations


def test_warm_up_is_not_cut_short_where_chains_disagree(rng):
    """Two modes that no chain leaves: the last window is kept."""
    model = fw.Model(
        lambda q: -0.5 * (jnp.sum(q[1:] ** 2) + (jnp.abs(q[0]) - 8.0) ** 2),
        lambda q: 0.0 * q[0] * jnp.ones(2),
        np.zeros(D),
        2,
        name="two modes",
    )
    starts = 0.1 * rng.normal(size=(4, D))
    starts[:, 0] += [8.0, 8.0, -8.0, -8.0]
    run = Nuts(model, 1, starts, Progress(False))
    run.warm_up(1000)
    assert run._done == 1000
