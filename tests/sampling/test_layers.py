"""Proposals in layers on a funnel whose integrals are known."""

import numpy as np
from scipy.special import logsumexp

from foldwise.sampling.layers import Layers, climbed
from foldwise.sampling.proposals import share_of

Y = np.array([0.3, -0.8, 1.1, 0.2, -0.4, 0.9, -1.3, 0.1])


class Funnel:
    """x_j ~ N(0, tau), y_j ~ N(x_j, 1), tau ~ half-N(1): coordinates log tau and x."""

    def __call__(self, points):
        log_tau, x = points[:, 0], points[:, 1:]
        prior = log_tau - 0.5 * np.exp(2 * log_tau) - len(Y) * log_tau
        effects = np.exp(-2 * log_tau)[:, None] * x**2 + (Y - x) ** 2
        return prior - 0.5 * effects.sum(axis=1)

    def slopes(self, points):
        raise NotImplementedError("layers need values alone")


def top_density(log_tau):
    """Exact log density of log tau, up to a constant."""
    variance = 1.0 + np.exp(2 * log_tau)[:, None]
    rows = -0.5 * (np.log(variance) + Y**2 / variance).sum(axis=1)
    return rows + log_tau - 0.5 * np.exp(2 * log_tau)


def test_effects_of_one_scale_are_pieces_and_integrate_to_its_density():
    starts = np.random.default_rng(1).normal(size=(3, 1 + len(Y)))
    layers = Layers.found(Funnel(), starts)
    assert layers.top.tolist() == [0]
    assert sorted(layers.middle) == list(range(1, 9))
    log_tau = np.array([-6.0, -3.0, -1.0, 0.0, 1.0])
    off = layers(log_tau[:, None]) - top_density(log_tau)
    # where pieces are normal, Laplace's approximation is exact
    assert np.ptp(off) < 1e-4


def test_weighted_proposals_have_the_moments_of_a_funnel():
    rng = np.random.default_rng(2)
    proposal = climbed(Funnel(), rng.normal(size=(8, 1 + len(Y))), rng)
    points = proposal.draw(rng, 4000)
    log_ratio = Funnel()(points) - proposal.log_density(points)
    effective = 4000 * share_of(log_ratio)
    assert effective > 0.5 * 4000
    weight = np.exp(log_ratio - logsumexp(log_ratio))
    grid = np.arange(-12.0, 3.0, 0.01)
    exact = np.exp(top_density(grid) - logsumexp(top_density(grid)))
    mean, mean_there = exact @ grid, weight @ points[:, 0]
    sd = np.sqrt(exact @ (grid - mean) ** 2)
    assert abs(mean_there - mean) < 4 * sd / np.sqrt(effective)
    spread = weight @ (points[:, 0] - mean) ** 2
    noise = np.sqrt(exact @ ((grid - mean) ** 2 - sd**2) ** 2 / effective)
    assert abs(spread - sd**2) < 4 * noise
