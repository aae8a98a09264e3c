"""Proposals in layers on a funnel whose integrals are known."""

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

import foldwise as fw
from foldwise.sampling import refits
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


SCHOOLS, CLASSES = 8, 3


class Nested:
    """Two rows in each of three classes of eight schools; the scale of schools is not known."""

    def __init__(self, seed=9):
        rng = np.random.default_rng(seed)
        self.of = np.repeat(np.arange(SCHOOLS), CLASSES)
        self.class_ = np.repeat(np.arange(len(self.of)), 2)
        self.school = self.of[self.class_]
        effects = 0.8 * rng.normal(size=SCHOOLS)[self.school]
        effects += 0.5 * rng.normal(size=len(self.of))[self.class_]
        self.y = 1.0 + effects + 0.7 * rng.normal(size=len(self.class_))

    def model(self):
        def log_prior(p):
            tau = jnp.exp(p["log_tau"])
            schools = -0.5 * jnp.sum(((p["u"] - p["mu"]) / tau) ** 2) - SCHOOLS * p["log_tau"]
            classes = -0.5 * jnp.sum(((p["v"] - p["u"][self.of]) / 0.5) ** 2)
            return schools + classes - 0.5 * (p["mu"] / 5) ** 2 + p["log_tau"] - 0.5 * tau**2

        def log_likelihood(p):
            rows = -0.5 * ((self.y - p["v"][self.class_]) / 0.7) ** 2
            return rows - np.log(0.7) - 0.5 * np.log(2 * np.pi)

        start = {"log_tau": 0.0, "mu": 0.0, "u": np.zeros(SCHOOLS), "v": np.zeros(len(self.of))}
        return fw.Model(log_prior, log_likelihood, start, len(self.y))

    def log_evidence(self, keep):
        """Log density of some rows, which are normal given the scale, on a grid of it."""
        same = [(of[:, None] == of)[np.ix_(keep, keep)] for of in (self.school, self.class_)]
        found, y = [], self.y[keep]
        for log_tau in np.arange(-9.0, 3.0, 0.05):
            cov = 25.0 + np.exp(2 * log_tau) * same[0] + 0.25 * same[1] + 0.49 * np.eye(len(y))
            size = np.linalg.slogdet(2 * np.pi * cov)[1]
            prior = log_tau - 0.5 * np.exp(2 * log_tau)
            found.append(prior - 0.5 * (y @ np.linalg.solve(cov, y) + size))
        return logsumexp(found)

    def joint(self):
        every = self.log_evidence(self.school >= 0)
        return np.array([every - self.log_evidence(self.school != k) for k in range(SCHOOLS)])


def test_folds_that_no_mixture_fits_are_refitted_in_layers(monkeypatch):
    """Even if one serves the full data, where every school has its rows."""
    monkeypatch.setattr(refits, "_GOOD", 0.05)
    problem = Nested()
    folds = fw.leave_group_out(problem.school)
    result = fw.cross_validate(problem.model(), folds, seed=0, progress=False)
    assert set(result.folds["method"].values) <= {"refit", "importance"}
    assert (result.folds["status"] == "fine").all()
    exact = problem.joint()
    assert np.abs((result.folds["elpd"] - exact) / result.folds["mcse"]).max() < 4
    assert abs(result.elpd - exact.sum()) < 4 * result.mcse


def test_parameters_that_all_hang_together_have_no_layers_and_one_look_tells():
    """Every pair of twenty is coupled: no second point is looked at."""
    looked = []

    class Coupled:
        def __call__(self, points):
            looked.append(len(points))
            return -0.5 * (points**2).sum(axis=1) - 0.01 * points.sum(axis=1) ** 2

    assert Layers.found(Coupled(), np.random.default_rng(0).normal(size=(3, 20))) is None
    assert sum(looked) == 4 * 20 * 21 // 2
