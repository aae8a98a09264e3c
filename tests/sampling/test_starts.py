"""Starts all over the prior: other modes are seen, and far starts harm no healthy model."""

import jax.numpy as jnp
import numpy as np
import pytest

import foldwise as fw
from foldwise.models.evaluate import gradients
from foldwise.sampling import full_data
from foldwise.sampling import starts as starting
from foldwise.sampling.fit import FitWarning
from foldwise.sampling.full_data import full_data_fit
from foldwise.sampling.pooled import Chains
from foldwise.support.progress import Progress


def mixture(apart, weight, prior, init, rows=14, spare=0):
    """Rows of N(mu, 1) with probability ``weight``, else of N(-mu, 1); P(mu < 0) by quadrature.

    With 15 ``spare`` parameters there are too many for a mixture to be fitted to the modes.
    """
    rng = np.random.default_rng(3)
    sign = np.where(np.arange(rows) % 2 == 0, 1.0, -1.0)
    y = apart * sign + rng.normal(size=rows)

    def log_likelihood(mu, np=jnp, y=y):
        either = np.logaddexp(
            np.log(weight) - 0.5 * (y - mu) ** 2, np.log(1 - weight) - 0.5 * (y + mu) ** 2
        )
        return either - 0.5 * np.log(2 * np.pi)

    grid = np.linspace(-6 * apart, 6 * apart, 20_001)
    density = log_likelihood(grid, np, y[:, None]).sum(axis=0) - 0.5 * (grid / prior) ** 2
    share = np.exp(density - density.max())
    model = fw.Model(
        lambda q: -0.5 * (q[0] / prior) ** 2 - 0.5 * jnp.sum(q[1:] ** 2),
        lambda q: log_likelihood(q[0]),
        np.concatenate([[float(init)], np.zeros(spare)]),
        rows,
        name="mixture",
    )
    return model, share[grid < 0].sum() / share.sum()


@pytest.mark.parametrize("apart, prior, init", [(3.0, 3.0, 3.0), (3.0, 10.0, -3.0)])
def test_a_second_mode_is_seen(apart, prior, init, seed):
    model, below = mixture(apart, 0.6, prior, init, spare=15)
    assert 0.02 < below < 0.98
    with pytest.warns(FitWarning, match="different starts disagree: several modes"):
        fit = full_data_fit(model, seed, Progress(False))
    assert not fit.settled and 0.0 < np.mean(fit.flat[:, 0] < 0.0) < 1.0
    with pytest.warns(FitWarning, match="several modes"):
        assert not fw.fit(model, draws=200, warmup=200, seed=seed, progress=False).settled


@pytest.mark.parametrize("apart, prior, init", [(3.0, 3.0, 3.0), (1.0, 3.0, 1.0)])
def test_two_modes_of_one_parameter_have_their_share(apart, prior, init, seed):
    model, below = mixture(apart, 0.6, prior, init)
    fit = full_data_fit(model, seed, Progress(False))
    share = (fit.flat < 0.0).mean()
    assert fit.settled and abs(share - below) < 4 * np.sqrt(below * (1 - below) / fit.ess.min())


def test_a_mode_that_nuts_leaves_during_warm_up_is_not_forgotten(seed, monkeypatch):
    """As if all four chains of NUTS had left one of two modes: they agree."""
    model, below = mixture(4.0, 0.6, 3.0, 4.0, spare=15)

    def above(ends, count):
        return ends[ends[:, -1, 0] > 0.0][:count, -1]

    monkeypatch.setattr(full_data, "far_apart", above)
    with pytest.warns(FitWarning, match="stayed where these draws never are"):
        fit = full_data_fit(model, seed, Progress(False))
    assert fit.rhat.max() < 1.01 and (fit.flat[:, 0] > 0.0).all() and below > 0.02
    assert fit.missed > 10 and not fit.settled


def test_modes_that_chains_move_between_are_no_trouble(seed):
    model, below = mixture(0.5, 0.6, 3.0, 0.5)
    fit = full_data_fit(model, seed, Progress(False))
    share = (fit.flat < 0.0).mean()
    assert fit.settled and abs(share - below) < 5 * np.sqrt(below * (1 - below) / fit.ess.min())


def test_a_place_without_mass_is_left(seed):
    """A second maximum exp(-60) as high as the first: chains that start there are brought back."""

    def log_prior(x):
        return jnp.logaddexp(-0.5 * (x - 6.0) ** 2, -0.5 * (x + 6.0) ** 2 - 60.0)

    model = fw.Model(log_prior, lambda x: 0.0 * x * np.ones(2), -6.0, 2, name="hollow")
    fit = full_data_fit(model, seed, Progress(False))
    assert fit.settled and abs(fit.flat.mean() - 6.0) < 0.1


def test_lost_chains_are_brought_back(rng):
    def log_prior(x):
        return jnp.logaddexp(-0.5 * (x - 20.0) ** 2, -0.5 * (x + 20.0) ** 2 - 60.0)

    model = fw.Model(log_prior, lambda x: 0.0 * x * np.ones(2), 0.0, 2)
    chains = Chains(model, np.repeat([[-20.0], [20.0]], [70, 30], axis=0), rng)
    chains.tune(20)
    assert (chains.position < 0.0).sum() == 70
    chains.bring_back()
    assert np.all(chains.position > 10.0) and np.all(np.concatenate(chains.visited) > 10.0)
    np.testing.assert_allclose(
        gradients(model, chains.position).log_density, chains.log_density, rtol=1e-12
    )


def test_starts_cover_the_prior():
    sd, centre = np.array([0.01, 1.0, 300.0]), np.array([5.0, -2.0, 1000.0])
    model = fw.Model(
        lambda x: -0.5 * jnp.sum(((x - centre) / sd) ** 2), lambda x: 0.0 * x, centre + sd, 3
    )
    points, spent = starting.starting_points(model, 20, 1)
    away = ((points - centre) / sd)[np.arange(20) % 4 != 0]
    assert spent > 0 and np.abs(away).max() < 10.0
    assert np.all(away.min(axis=0) < -0.5) and np.all(away.max(axis=0) > 0.5)


def test_starts_that_are_far_too_low_are_taken_nearer():
    """exp(exp(x)) is infinite from 6.6 on, which a prior sd of 50 reaches in most starts."""
    model = fw.Model(
        lambda x: -0.5 * jnp.sum((x / 50.0) ** 2),
        lambda x: -jnp.exp(jnp.exp(x)) + x,
        np.zeros(4),
        4,
    )
    points, _ = starting.starting_points(model, 20, 1)
    density = gradients(model, points).log_density
    assert np.isfinite(density).all() and density.min() > -1000.0
    assert full_data_fit(model, 1, Progress(False)).settled


def test_a_function_gives_all_starts():
    model = fw.Model(
        lambda x: -0.5 * x**2, lambda x: 0.0 * x * np.ones(3), lambda key: jnp.float64(7.0), 3
    )
    points, spent = starting.starting_points(model, 20, 1)
    assert np.all(points == 7.0) and spent == 0


def test_lost_chains(rng):
    positions = rng.normal(size=(6, 50, 2))
    level = -0.5 * (positions**2).sum(axis=2)
    level[1] -= 40.0  # low, and no wider: lost
    positions[2], level[2] = positions[2] * np.exp(20.0), level[2] - 40.0  # low, but as wide
    positions[3], level[3] = positions[3] * np.exp(-20.0), level[3] + 40.0  # narrow, but high
    level[4] -= 10.0
    positions[5], level[5] = 0.0, -np.inf
    lost = starting.lost_chains(positions, level)
    np.testing.assert_array_equal(lost, [False, True, False, False, False, True])


def test_far_apart_has_every_place(rng):
    positions = rng.normal(size=(30, 20, 3))
    positions[7] += 50.0
    positions[11, :, 1] -= 40.0
    chosen = starting.far_apart(positions, 4)
    assert (chosen[:, 0] > 25).sum() == 1 and (chosen[:, 1] < -20).sum() == 1
